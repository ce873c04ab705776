"""Is the suite itself any good? ``python -m specsampling_conformance.meta`` says.

Every planted fault must be killed in the tier that is meant for it, and every control must pass. The outcome is a
matrix of faults and tiers, with the total variation of each fault's exact law and the number of sequences that a
sampled test needs for it. A survivor or a false accusation makes the exit status 1.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from specsampling import RandomSource
from specsampling_conformance import _contract, _large, _law, _law_edges, _sampled, _system  # noqa: F401 - registers the checks
from specsampling_conformance._cast import PAIRS
from specsampling_conformance._checks import Check, CheckResult, Effort, Subject, checks_for, run_check
from specsampling_conformance._engine import Engine
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._evalue import EProcess
from specsampling_conformance._faults import CRASHES, FAULTS, Fault
from specsampling_conformance._oracle import Scores, sequence_law
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._tiny import write_tiny_checkpoint

__all__ = ["Line", "examine", "main", "matrix_page", "num_sequences", "plain_laws"]

_MOST_SEQUENCES = 2**17
_STEP = 256

# The checks that show most faults, first. The clauses about one and the same enumeration cost nothing after the first.
_FIRST = (
    *("selection", "draws", "fixed_lookahead", "settings", "end_tokens", "lookahead_then_none", "every_answer"),
    *("stop_sequences", "min_new_tokens", "row_draft_settings", "narrower_draft", "wider_draft", "short_draft"),
)


class Line(NamedTuple):
    """A line of the matrix.

    Attributes
    ----------
    name, kind, tier : str
        Of the fault.
    description : str
        Of the fault.
    killed_by : str or None
        The first check that failed; None where none did.
    exact_tv : float or None
        Total variation of the tokens' law from the target's, on the frozen pair that shows it best; that of the check
        which failed where plain sampling is not affected.
    sequences : int or None
        How many sequences a sampled test needs for it on that pair, the median of five runs; for a fault of the streams
        what the check took.
    seconds : float
        How long it took to say so.
    diagnosis : str
        What the check said.
    """

    name: str
    kind: str
    tier: str
    description: str
    killed_by: str | None
    exact_tv: float | None
    sequences: int | None
    seconds: float
    diagnosis: str

    @property
    def is_right(self) -> bool:
        """Whether the suite said what it should."""
        return (self.killed_by is None) == (self.kind == "control")


def examine(name: str) -> Line:
    """Let the suite loose on one planted fault or control."""
    began = time.perf_counter()
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="specsampling-meta-") as folder:
        checkpoint = write_tiny_checkpoint(Path(folder) / "tiny", num_layers=2)
        failed = _first_failure(fault, _subject(fault, checkpoint))
    diagnosis = failed.diagnosis or "" if failed else ""
    exact_tv, sequences = None, None
    if fault.kind in ("engine", "drafter", "control"):
        exact_tv, sequences = _plain_sampling(fault)
    if failed and exact_tv is None and (found := re.search(r"total variation ([0-9.e+-]+[0-9])", diagnosis)):
        exact_tv = float(found[1])
    if failed and fault.kind == "randomness" and (found := re.search(r"after (\d+) samples", diagnosis)):
        sequences = int(found[1])
    return Line(
        name=name,
        kind=fault.kind,
        tier=fault.tier,
        description=fault.description,
        killed_by=failed.id if failed else None,
        exact_tv=exact_tv,
        sequences=sequences,
        seconds=time.perf_counter() - began,
        diagnosis=diagnosis,
    )


def _subject(fault: Fault, checkpoint: Path) -> Subject:
    is_adapter = fault.kind == "cache"
    return Subject(
        load=fault.planted if is_adapter else ReferenceModel.load,
        capabilities=dataclasses.replace(fault.capabilities, dtypes=("float64",)),
        checkpoint=checkpoint,
        dtype="float64",
        seed=time.time_ns() % 2**48,
        effort=Effort(shrink=False),
        engine=Engine() if is_adapter else fault.planted(),
    )


def _first_failure(fault: Fault, subject: Subject) -> CheckResult | None:
    for entry in _checks_for(fault, subject):
        result = run_check(entry, subject, clock=time.perf_counter)
        if result.status == "failed":
            return result
    return None


def _checks_for(fault: Fault, subject: Subject) -> list[Check]:
    """Return the checks of the fault's tier, likely ones first; for a control all that it must pass.

    A control is lossless and slower: the number of rounds is not the paper's, and only the tokens' law is held against
    it.
    """
    if fault.kind == "control":
        tiers = ("T1", "T2")
        return [
            entry
            for entry in checks_for(subject.capabilities, tiers)
            if not entry.id.startswith(("T1.rounds.", "T1.boundary."))
        ]
    checks = checks_for(subject.capabilities, (fault.tier,))
    return sorted(checks, key=_place) if fault.tier == "T1" else checks


def _place(entry: Check) -> int:
    last = entry.id.rpartition(".")[2]
    return _FIRST.index(last) if last in _FIRST else len(_FIRST)


@functools.cache
def _pair_laws(name: str) -> tuple[Any, Any, NDArray[np.float64]]:
    pair = PAIRS[name]
    target, draft = ReferenceModel(pair.target, "float64"), ReferenceModel(pair.draft, "float64")
    return target, draft, sequence_law(Scores(target).law(), (1,), 3)


def plain_laws(fault: Fault, pair: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the exact law of three tokens under a fault of engine or drafter, and the target's; None if it crashes.

    Plain sampling on a frozen pair, K = 2 and K = 0 in turn.
    """
    target, draft, expected = _pair_laws(pair)
    engine: Engine = fault.planted()

    def make(source: RandomSource) -> Any:
        return engine.decoder(target, draft, randomness=source)

    try:
        (law,) = enumerate_laws(make, [Scenario((1,), 3)], schedule=(2, 0))
    except CRASHES:
        return None
    got = np.zeros(expected.shape)
    for tokens, probability in law.tokens.items():
        if len(tokens) != expected.ndim:
            return None
        got[tokens] = probability
    # Rows that disturb each other have no law of their own: their probabilities do not even sum to one.
    return got / got.sum(), expected


def num_sequences(got: NDArray[np.float64], expected: NDArray[np.float64], seed: int = 0) -> int | None:
    """Return how many sequences of law `got` the sampled test needs to reject `expected`: the median of five runs."""
    needed = []
    for run in range(5):
        rng = np.random.default_rng([seed, run])
        process = EProcess(expected)
        step = _STEP
        while not process.rejected and process.num_samples < _MOST_SEQUENCES:
            drawn = rng.multinomial(step, got.ravel())
            process.update(drawn.reshape(got.shape))
            step = max(_STEP, process.num_samples // 8)
        needed.append(process.num_samples if process.rejected else 2 * _MOST_SEQUENCES)
    median = int(np.median(needed))
    return median if median <= _MOST_SEQUENCES else None


def _plain_sampling(fault: Fault) -> tuple[float | None, int | None]:
    found = [laws for pair in PAIRS if (laws := plain_laws(fault, pair)) is not None]
    if not found:
        return None, None
    distances = [0.5 * float(np.abs(got - expected).sum()) for got, expected in found]
    best = int(np.argmax(distances))
    if distances[best] < 1e-9:
        return (distances[best] if fault.kind == "control" else None), None
    needed = [count for got, expected in found if (count := num_sequences(got, expected)) is not None]
    return distances[best], min(needed, default=None)


def matrix_page(lines: Sequence[Line]) -> str:
    """Return docs/fault-matrix.md."""
    page = ["# The suite, tested", "", *_opening(lines)]
    for kind, title in (
        ("cache", "Faults of an adapter's cache"),
        ("engine", "Faults of the engine"),
        ("drafter", "Faults of the drafter"),
        ("randomness", "Faults of the random streams"),
        ("control", "Controls"),
    ):
        page += [f"## {title}", "", "| fault | what is wrong | tier | killed by | TV | sequences |"]
        page += ["|---|---|---|---|---|---|"]
        for line in lines:
            if line.kind == kind:
                killer = (
                    f"`{line.killed_by}`" if line.killed_by else ("passes" if kind == "control" else "**survives**")
                )
                page.append(
                    f"| {_cell(line.name)} | {_cell(line.description)} | {line.tier} | {killer} |"
                    f" {_number(line.exact_tv)} | {_count(line.sequences)} |"
                )
        page.append("")
    return "\n".join(page).rstrip() + "\n"


def _opening(lines: Sequence[Line]) -> list[str]:
    faults = [line for line in lines if line.kind != "control"]
    controls = [line for line in lines if line.kind == "control"]
    killed = sum(line.killed_by is not None for line in faults)
    needed = [line.sequences for line in faults if line.sequences is not None]
    passed = sum(line.is_right for line in controls)
    found = f"{killed} of {len(faults)} faults killed, {passed} of {len(controls)} controls passed."
    if needed:
        found += (
            f" Of the {len(needed)} faults that samples show, half need no more than {int(np.median(needed)):,}"
            f" sequences and the hardest {max(needed):,}."
        )
    text = """\
What a test suite is worth is what it catches. Each line below is a fault planted on purpose, in an adapter's cache, the
engine, the drafter or the random streams, and the check that killed it. The controls are changes that cost speed and
nothing else, and must pass.

```{note}
This page is generated: `python -m specsampling_conformance.meta --write docs/fault-matrix.md`, or `nox -s meta`. It
exits with an error if a fault survives or a control is accused.
```
"""
    columns = f"""\
*TV* is the exact total variation between the law of the tokens under the fault and the target's law: of three tokens on
the frozen pair that shows it best, or that of the check which failed where plain sampling is not affected. *Sequences*
is how many the e-process needs (median of five runs, on the pair that shows the fault best); a dash says that more than
{_MOST_SEQUENCES:,} would be needed, or that the tokens' law is not changed at all. The pairs were chosen by
`python -m specsampling_conformance._search`.
"""
    return [*text.splitlines(), "", found, "", *columns.splitlines(), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value < 1e-9 else f"{value:.2g}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _examined(names: Sequence[str], jobs: int) -> dict[str, Line]:
    found: dict[str, Line] = {}
    if jobs == 1:
        for name in tqdm(names, unit="fault", disable=not sys.stderr.isatty()):
            found[name] = examine(name)
        return found
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(examine, name): name for name in names}
        finished = concurrent.futures.as_completed(futures)
        for future in tqdm(finished, total=len(names), unit="fault", disable=not sys.stderr.isatty()):
            found[futures[future]] = future.result()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the planted faults, print the matrix and say whether the suite is right about all of them."""
    parser = argparse.ArgumentParser(prog="python -m specsampling_conformance.meta", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the matrix as a page for the docs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name or kind contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    names = [fault.name for fault in FAULTS.values() if arguments.only in fault.name or arguments.only in fault.kind]
    if not names:
        parser.error(f"`--only` must match a planted fault, got {arguments.only!r}")
    found = _examined(names, arguments.jobs)
    lines = [found[name] for name in names]
    _print(lines, time.perf_counter() - began)
    if arguments.write:
        arguments.write.write_text(matrix_page(lines), encoding="utf-8")
    return 0 if all(line.is_right for line in lines) else 1


def _print(lines: Sequence[Line], seconds: float) -> None:
    for line in lines:
        verdict = line.killed_by or ("passes" if line.kind == "control" else "SURVIVES")
        sys.stdout.write(
            f"{line.kind:10} {line.name:52} {verdict:36} {_number(line.exact_tv):>9} {_count(line.sequences):>8}"
            f" {line.seconds:6.1f} s\n"
        )
    wrong = [line for line in lines if not line.is_right]
    for line in wrong:
        said = "survives" if line.killed_by is None else f"is accused by {line.killed_by}: {line.diagnosis}"
        sys.stdout.write(f"WRONG: {line.name!r} {said}\n")
    counts: Mapping[str, int] = {kind: sum(line.kind == kind for line in lines) for kind in {one.kind for one in lines}}
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    sys.stdout.write(f"{len(lines)} examined ({told}), {len(wrong)} wrong, {seconds:.0f} s\n")


if __name__ == "__main__":
    sys.exit(main())
