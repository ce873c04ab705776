"""What an audit found: the report, its JSON, and the story it tells."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specsampling_conformance._evalue import Look
from specsampling_conformance._report import SUITE_VERSION, finite

__all__ = ["AuditReport", "WorstCell"]


class WorstCell(NamedTuple):
    """A sequence that was drawn too often or too seldom.

    Attributes
    ----------
    tokens : tuple of int
        The sequence; -1 stands for any id that the law does not know.
    expected : float
        How often it should have been drawn.
    drawn : int
        How often it was.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling_conformance import audit
    >>> report = audit(lambda prompt, n: np.zeros((n, 1), dtype=int), [0.5, 0.5])  # a coin with one side
    >>> report.worst[0]
    WorstCell(tokens=(0,), expected=512.0, drawn=1024)
    >>> print(report.worst[0])
    0: expected 512.0, drawn 1024
    """

    tokens: tuple[int, ...]
    expected: float
    drawn: int

    def __str__(self) -> str:
        written = " ".join("?" if token < 0 else str(token) for token in self.tokens) or "(nothing)"
        return f"{written}: expected {self.expected:.1f}, drawn {self.drawn}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found. ``str(report)`` tells it in a few lines.

    Attributes
    ----------
    name : str
        What was audited.
    passed : bool
        Whether neither test rejected.
    ln_e : float
        Logarithm of the e-value of the sequences, at the last look.
    neighbours_ln_e : float
        Logarithm of the e-value of the first tokens of neighbouring sequences.
    threshold : float
        What either may not reach: ``ln(2 / alpha)``.
    n : int
        Sequences drawn.
    num_cells : int
        Sequences that can occur.
    certified_tv : float
        A law at this total variation from the reference, or further, would have been rejected with probability 0.999 by
        that many sequences; 1.0 where they are too few to tell.
    stopped : str
        Why it ended: "rejected", "enough samples" or "time limit".
    worst : tuple of WorstCell
        The sequences furthest from what was expected, worst first.
    diagnosis : str or None
        For a rejection, what fits the samples best.
    seed : int or None
        What `reseed` was called with; None where the engine's randomness is its own.
    seconds : float
        Wall-clock time.
    settings : mapping
        Prompt, length, sampling settings and end tokens, and whatever the caller adds.
    looks : tuple of Look
        Samples and e-value after every batch.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling_conformance import audit
    >>> report = audit(lambda prompt, n: np.zeros((n, 1), dtype=int), [0.5, 0.5], name="a coin with one side")
    >>> print(report)
    a coin with one side: REJECTED after 1,024 sequences, ln E = 571.9 of 18.4
      the samples are at a total variation of about 0.5 from the law asked for
      0: expected 512.0, drawn 1024
      1: expected 512.0, drawn 0
    >>> report.passed, report.stopped, report.to_json()["num_cells"]
    (False, 'rejected', 2)
    """

    name: str
    passed: bool
    ln_e: float
    neighbours_ln_e: float
    threshold: float
    n: int
    num_cells: int
    certified_tv: float
    stopped: str
    worst: tuple[WorstCell, ...]
    diagnosis: str | None
    seed: int | None
    seconds: float
    settings: Mapping[str, Any]
    looks: tuple[Look, ...] = dataclasses.field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return what was found as JSON holds it; infinities are the strings "inf" and "-inf"."""
        fields = {
            field.name: finite(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("worst", "settings", "looks")
        }
        return {
            "suite_version": SUITE_VERSION,
            **fields,
            "worst": [cell._asdict() | {"tokens": list(cell.tokens)} for cell in self.worst],
            "settings": dict(self.settings),
            "looks": [[look.num_samples, finite(look.log_e)] for look in self.looks],
        }

    def write_json(self, path: str | Path) -> None:
        """Write what was found as JSON; folders that are missing are made."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        evidence = f"ln E = {self.ln_e:.1f} of {self.threshold:.1f}"
        lines = [f"{self.name}: {'no deviation' if self.passed else 'REJECTED'} after {self.n:,} sequences, {evidence}"]
        if self.passed and self.certified_tv == 1.0:
            lines.append("  too few sequences to certify anything")
        elif self.passed:
            cells = f"{self.num_cells} sequences" if self.num_cells > 1 else "the one sequence"
            lines.append(f"  certifies a total variation of {self.certified_tv:.3g} over {cells} that can occur")
        else:
            lines += [f"  {line}" for line in (self.diagnosis or "").splitlines()]
            lines += [f"  {cell}" for cell in self.worst]
        return "\n".join(lines)
