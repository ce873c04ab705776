"""What a run found: the report, its JSON, and the summary a person reads at the end of a run."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import specsampling
from specsampling import CONTRACT_VERSION, Capabilities
from specsampling_conformance._checks import CheckResult

__all__ = ["CERTIFIED_TV", "Report", "SUITE_VERSION", "TierCost", "check_json", "finite"]

SUITE_VERSION = specsampling.__version__
"""The suite ships in the core's distribution and has its version."""

CERTIFIED_TV = 0.01
"""Largest total variation that a sampled law of sequences may leave open at level "certified"."""

_SEQUENCES = "T2.sequences."

_KEYS = ("id", "status", "clause", "exact_tv", "tolerance", "ln_e", "n", "certified_tv", "seed", "diagnosis")

# What each level rests on, from the highest down. A level is given when everything under it passed.
_LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("certified", ("T0", "T1", "T2", "T3")),
    ("exact", ("T0", "T1")),
    ("contract", ("T0",)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierCost:
    """What one tier cost.

    Attributes
    ----------
    tier : str
        ``T0`` … ``T3``.
    num_checks : int
        Checks that were run.
    seconds : float
        Time that its checks took, one after the other or not.
    num_samples : int
        Sequences drawn, and for T0 call sequences tried.
    peak_mib : float or None
        Largest memory of a process up to the last check of the tier that it ran, in MiB; None where the system does not
        tell.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import Capabilities, check_backend
    >>> def load(checkpoint, dtype):
    ...     return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> report = check_backend(load, Capabilities(), checks=["T0.score.shape", "T0.rollback.to_zero"], seed=1)
    >>> [(cost.tier, cost.num_checks) for cost in report.costs]
    [('T0', 2)]
    """

    tier: str
    num_checks: int
    seconds: float
    num_samples: int
    peak_mib: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run of the suite found. ``str(report)`` is the summary that the command line prints.

    Attributes
    ----------
    backend : str
        Name of the adapter's entry point, or of its loader.
    device : str or None
        Device that was asked for.
    capabilities : Capabilities
        What the adapter declares; the dtypes are those of the run.
    tier : str
        How much was run: "contract", "exact", "pr" or "nightly".
    seed : int
        Seed of everything random in the run.
    checks : tuple of CheckResult
        Every check of the manifest for these capabilities, run or not.
    costs : tuple of TierCost
        Time, samples and memory of each tier that was run.
    seconds : float
        Wall-clock time of the run.
    jobs : int
        In how many processes checks were run.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import Capabilities, check_backend
    >>> def load(checkpoint, dtype):
    ...     return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> report = check_backend(load, Capabilities(select=True), checks=["T0.score.shape"], seed=1)
    >>> report.passed, report.level  # a level rests on every check of its tiers
    (True, None)
    >>> str(report).endswith("not-run, 1 passed. Level: none. Seed: 1.")
    True
    """

    backend: str
    device: str | None
    capabilities: Capabilities
    tier: str
    seed: int
    checks: tuple[CheckResult, ...]
    costs: tuple[TierCost, ...] = ()
    seconds: float = 0.0
    jobs: int = 1

    @property
    def failures(self) -> list[str]:
        """Ids of the checks that failed; expected failures are not among them."""
        return [result.id for result in self.checks if result.status == "failed"]

    @property
    def passed(self) -> bool:
        """Whether something was run and nothing failed."""
        ran = any(result.status in ("passed", "expected-failure") for result in self.checks)
        return ran and not self.failures

    @property
    def level(self) -> str | None:
        """The highest level that the run proves: "certified", "exact", "contract" or None.

        A level rests on whole tiers: one expected failure in a tier, or one check of it that was not run, and no level
        that rests on the tier is given. None as soon as anything failed.
        """
        if not self.passed:
            return None
        for level, tiers in _LEVELS:
            if level == "certified" and not (self.tier == "nightly" and self._certifies()):
                continue
            if all(self._settled(tier) for tier in tiers):
                return level
        return None

    @property
    def exit_status(self) -> int:
        """What the command line exits with: 0, or 1 when something failed."""
        return 0 if self.passed else 1

    def _settled(self, tier: str) -> bool:
        """Whether every check of a tier passed or does not apply, and one of them did pass."""
        found = {result.status for result in self.checks if result.id.partition(".")[0] == tier}
        return "passed" in found and found <= {"passed", "not-applicable"}

    def _certifies(self) -> bool:
        """Whether every sampled law of sequences is certified; other sampled checks are about other laws."""
        sequences = [result for result in self.checks if result.id.startswith(_SEQUENCES)]
        left_open = [result.worst("certified_tv") for result in sequences if result.status == "passed"]
        # To four digits: the sample size is a whole number, and its inverse is found by bisection.
        return bool(left_open) and all(tv is not None and float(f"{tv:.4g}") <= CERTIFIED_TV for tv in left_open)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON holds it; ``report.schema.json`` in the package describes it."""
        return {
            "suite_version": SUITE_VERSION,
            "contract_version": CONTRACT_VERSION,
            "backend": self.backend,
            "device": self.device,
            "dtypes": list(self.capabilities.dtypes),
            "capabilities": _without_tuples(dataclasses.asdict(self.capabilities)),
            "level": self.level,
            "seed": self.seed,
            "checks": [check_json(result) for result in self.checks],
        }

    def write_json(self, path: str | Path) -> None:
        """Write the report as JSON; folders that are missing are made."""
        _write(path, json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n")

    def write_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs nothing else; folders that are missing are made."""
        from specsampling_conformance._html import report_page

        _write(path, report_page(self))

    def __str__(self) -> str:
        return "\n".join([*self._story(), *self._costs(), self._verdict()])

    def _story(self) -> list[str]:
        lines = [f"{self.backend} on {self.device or 'its default device'}, {', '.join(self.capabilities.dtypes)}"]
        for result in self.checks:
            if result.status in ("failed", "expected-failure"):
                lines += ["", f"{result.status.upper()} {result.id}", f"  {result.clause}"]
                lines += [f"  {line}" for line in (result.diagnosis or "").splitlines()]
        return [*lines, ""]

    def _costs(self) -> list[str]:
        lines = []
        for cost in self.costs:
            memory = "" if cost.peak_mib is None else f", peak memory {cost.peak_mib:.0f} MiB"
            samples = f", {cost.num_samples:,} samples" if cost.num_samples else ""
            lines.append(f"{cost.tier}  {cost.num_checks} checks in {cost.seconds:.1f} s{samples}{memory}")
        if self.costs:
            processes = "1 process" if self.jobs == 1 else f"{self.jobs} processes side by side"
            lines.append(f"All  {self.seconds:.1f} s in {processes}")
        return lines

    def _verdict(self) -> str:
        counts = Counter(result.status for result in self.checks)
        tally = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: -item[1]))
        return f"{len(self.checks)} checks: {tally}. Level: {self.level or 'none'}. Seed: {self.seed}."


def check_json(result: CheckResult) -> dict[str, Any]:
    """Return one object of the report's ``checks``."""
    held = result.to_json()
    return {key: finite(held[key]) for key in _KEYS}


def finite(value: Any) -> Any:
    """Return a value that JSON can hold: infinities and NaN, which it lacks, become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _without_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _write(path: str | Path, text: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
