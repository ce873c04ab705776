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
_REFERENCE = "T3.logits.reference"

_KEYS = ("id", "status", "clause", "exact_tv", "tolerance", "ln_e", "n", "certified_tv", "seed", "diagnosis")

# What each level rests on, from the lowest up. A level is given when everything under it passed or does not apply.
_LEVELS: dict[str, tuple[str, ...]] = {
    "contract": ("T0",),
    "exact": ("T0", "T1"),
    "certified": ("T0", "T1", "T2", "T3"),
}

_MAY_NOT_APPLY = ("T3",)
"""Tiers of which nothing need apply: a model that hosts no weights but its own has no reference to agree with."""

_FAINT = 100
"""How many times what rounding may do one token's influence on the logits must be, or faults could hide below it."""


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
    environment : mapping of str to str
        Variables that these processes were given beyond what was set, so that they compile quickly.

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
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
        reached = [level for level in _LEVELS if self._missing(level) is None]
        return reached[-1] if reached and self.passed else None

    @property
    def remarks(self) -> list[str]:
        """What to read beside the verdict, a line each.

        Where to begin when several checks failed; why the level is not the next higher one; that the model's equations
        were compared with nothing, if so; whether its logits depend on its text so little that a fault could hide
        below the tolerance; how it was compiled, if otherwise than users do; and how many checks were left to the
        nightly tier in some dtype.
        """
        lines = (
            self._where_to_begin(),
            self._shortfall(),
            self._own_equations(),
            self._faintness(),
            self._compiled_otherwise(),
            self._left_to_nightly(),
        )
        return [line for line in lines if line]

    @property
    def exit_status(self) -> int:
        """What the command line exits with: 0, or 1 when something failed."""
        return 0 if self.passed else 1

    def _missing(self, level: str) -> str | None:
        """Return why a level is not reached, as far as that is no failure; None where nothing is missing."""
        if level == "certified" and self.tier != "nightly":
            return f"its samples are drawn in the nightly tier, and this run was of the tier {self.tier!r}"
        for tier in _LEVELS[level]:
            results = [result for result in self.checks if result.id.partition(".")[0] == tier]
            for status, why in (("expected-failure", "is expected to fail"), ("not-run", "was not run")):
                held_back = [result for result in results if result.status == status]
                if held_back:
                    first, others = held_back[0], len(held_back) - 1
                    told = f" ({first.diagnosis})" if status == "not-run" and first.diagnosis else ""
                    more = f", and {others} more of {tier}" if others else ""
                    return f"`{first.id}` {why}{told}{more}"
            passed = any(result.status == "passed" for result in results)
            if not results or not (passed or tier in _MAY_NOT_APPLY):
                return f"nothing of {tier} applies"
        return self._left_open() if level == "certified" else None

    def _left_open(self) -> str | None:
        """Return what the sampled laws of sequences leave open, if so; other sampled checks are about other laws."""
        sequences = [result for result in self.checks if result.id.startswith(_SEQUENCES)]
        passed = [result for result in sequences if result.status == "passed"]
        for result in passed:
            tv = result.worst("certified_tv")
            if tv is None:
                return f"`{result.id}` certifies nothing, because its law has a single sequence"
            # To four digits: the sample size is a whole number, and its inverse is found by bisection.
            if float(f"{tv:.4g}") > CERTIFIED_TV:
                return f"`{result.id}` leaves a total variation of {tv:.4g} open, more than {CERTIFIED_TV:g}"
        return None if passed else "no sampled law of sequences applies"

    def _shortfall(self) -> str | None:
        if not self.passed:
            return None
        higher = [(level, why) for level in _LEVELS if (why := self._missing(level)) is not None]
        return f"Not {higher[0][0]}: {higher[0][1]}." if higher else None

    def _where_to_begin(self) -> str | None:
        """Return the failure with the fewest calls, of the first tier that has any; among several failures only."""
        failed = [result for result in self.checks if result.status == "failed"]
        if len(failed) < 2:
            return None
        first = min(failed, key=lambda result: (result.id.partition(".")[0], _length_of_story(result)))
        story = (first.diagnosis or "").partition("\n")[0]
        return f"Start with `{first.id}`: {story}"

    def _own_equations(self) -> str | None:
        compared = [result.status for result in self.checks if result.id == _REFERENCE]
        if not self.passed or compared != ["not-applicable"]:
            return None
        return (
            "Not compared with another implementation: the logits. Weights of your own are taken as they are, so hold"
            " them against your reference yourself."
        )

    def _faintness(self) -> str | None:
        measured = [one for result in self.checks for one in result.measured.values() if "influence" in one.values]
        seen = [one.values["influence"] / one.tolerance for one in measured if one.tolerance]
        if not seen or max(seen) >= _FAINT:  # what one dtype shows need not show in another
            return None
        return (
            f"Faint: one token more or less moves the logits by {max(seen):.2g} times what is put down to rounding, and"
            " a fault could hide below that; test with larger weights."
        )

    def _compiled_otherwise(self) -> str | None:
        if not self.environment:
            return None
        given = ", ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"Compiled quickly, not to be fast, with {given}; the nightly tier compiles as users do."

    def _left_to_nightly(self) -> str | None:
        counts = Counter(dtype for result in self.checks for dtype in result.left_out)
        if not counts:
            return None
        told = ", ".join(f"{count} checks in {dtype}" for dtype, count in counts.items())
        return f"Left to the nightly tier, because another dtype goes through them: {told}."

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
        return "\n".join([*self._story(), *self._costs(), *self.remarks, self._verdict()])

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


def _length_of_story(result: CheckResult) -> tuple[bool, int, int]:
    """Return a key that sorts failures by how much there is to read: those that show calls first, the fewest ahead."""
    calls, arrow, _ = (result.diagnosis or "").partition("\n")[0].partition(" -> ")
    return (False, calls.count("; "), len(calls)) if arrow else (True, 0, 0)


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
