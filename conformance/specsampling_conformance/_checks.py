"""What a check is, what it is run against, and what it leaves behind.

A check is a function of a :class:`Subject` registered under a stable dotted id together with one sentence, the clause
of the contract that it enforces. It returns what it measured, or raises :class:`CheckFailure` (the adapter is wrong) or
:class:`NotApplicable` (the clause says nothing about this adapter). Everything else that comes out of it is the
adapter's doing too, and is reported as a failure: :func:`run_check` never raises for an adapter's fault.
"""

import dataclasses
import traceback
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from specsampling import Capabilities, Model
from specsampling_conformance._engine import Engine

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailure",
    "CheckResult",
    "EXACT",
    "Effort",
    "LeftOut",
    "Loader",
    "Measured",
    "NotApplicable",
    "Subject",
    "check",
    "checks_for",
    "run_check",
]

ResultT = TypeVar("ResultT")

EXACT = {"float64": 1e-12, "float32": 1e-6}
r"""Total variation that is put down to the arithmetic of laws, by the dtype they are made in; twice that on rounds.

That is what is left where logits are equal: a law's entries are rounded, an accepted probability is a ratio of two of
them, and the paths' probabilities are summed. With :math:`u` the unit of rounding an entry is off by a factor of at
most :math:`1 + u\,(2 |d| / T + 4)`, :math:`d` being its logit less the largest one: so its error is at most
:math:`u\,(2/e + 4)`, at any temperature, because :math:`x e^{-x} \le 1/e`. Some dozens of such errors make 1e-7 in
float32, as measured, and 1e-15 in float64.
"""

Loader: TypeAlias = Callable[[Path, str], Model[Any]]
"""A callable ``load(checkpoint, dtype) -> Model``."""


class NotApplicable(Exception):  # noqa: N818 - a verdict and not an error
    """The clause says nothing about this adapter; the message says why."""


class LeftOut(NotApplicable):
    """The clause is left to the nightly tier in this dtype, because the run goes through it in another."""


class CheckFailure(AssertionError):  # noqa: N818 - a verdict and not an error
    """An adapter broke a clause.

    Attributes
    ----------
    summary : str
        What went wrong, in one line.
    expected : str
        What was expected, and where it comes from.
    worst : tuple of str
        The worst cells, worst first.
    calls : tuple of str
        The calls that show it, as a person would write them down.
    setting : str
        What the calls start from, such as ``"B=2, capacity=8"``.
    measured : Measured or None
        What was measured, where that came before the verdict: the report shows it as it does for a check that passed.
    """

    def __init__(
        self,
        summary: str,
        *,
        expected: str = "",
        worst: Iterable[str] = (),
        calls: Iterable[str] = (),
        setting: str = "",
        measured: "Measured | None" = None,
    ) -> None:
        self.summary, self.expected = summary, expected
        self.worst, self.calls, self.setting = tuple(worst), tuple(calls), setting
        self.measured = measured
        super().__init__(self.diagnosis)

    @property
    def diagnosis(self) -> str:
        """The whole message: the calls and what came of them, what was expected, and the worst cells."""
        story = f"{'; '.join(self.calls)} -> {self.summary}" if self.calls else self.summary
        lines = [f"{self.setting}: {story}" if self.setting else story]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        lines.extend(self.worst)
        return "\n".join(lines)


class Measured(NamedTuple):
    """What a check that passed has measured; a field is None where the check does not measure it.

    Attributes
    ----------
    exact_tv : float or None
        Total variation between an enumerated law and the law it should be.
    tolerance : float or None
        The bound that `exact_tv`, or the difference a T0 check looks at, had to keep.
    ln_e : float or None
        Logarithm of the e-value of a sampled check.
    n : int or None
        Samples drawn.
    certified_tv : float or None
        Total variation that the samples certify.
    values : mapping of str to anything JSON can hold
        Whatever else the report shows, such as ``{"delta": 3e-7}``; the rounding a check measures is always called
        ``delta``. Data for the report's plots stand under ``plot``, a mapping with any of these keys:

        ``exact_law``
            List of ``[label, expected, got]``: cells of a law, what they should be and what they are.
        ``e_path``
            List of ``[n, ln_e]``: the logarithm of the e-value after n samples, at every look.
        ``threshold``
            What ``ln_e`` must stay below: ``ln(1 / alpha)``.
        ``delta``
            Mapping of dtype to ``[measured, cap]``, for checks that measure several dtypes at once.
        ``acceptance_per_slot``
            List with, for each draft slot, the fraction of tested tokens that were accepted.
        ``expected_acceptance_per_slot``
            The same from the exact law, where it is known.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import Capabilities, check_backend
    >>> def load(checkpoint, dtype):
    ...     return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> report = check_backend(load, Capabilities(), checks=["T0.score.block_equals_steps"], seed=1)
    >>> (measured,) = [result.measured["float32"] for result in report.checks if result.status == "passed"]
    >>> 0.0 <= measured.values["delta"] <= measured.tolerance
    True
    """

    exact_tv: float | None = None
    tolerance: float | None = None
    ln_e: float | None = None
    n: int | None = None
    certified_tv: float | None = None
    values: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard the randomised parts of a check try.

    Attributes
    ----------
    examples : int
        Random call sequences tried by the state machine.
    steps : int
        Most calls in one of them.
    shrink : bool
        Whether a failing sequence is made as short as possible; not for failures that were expected.
    tv : float
        Total variation that the sampled checks certify.
    every_shape : bool
        Whether every situation is gone through in every dtype and shape. Where not, models that compile are asked for
        fewer shapes, and a run's later dtypes for fewer situations; see `Subject.spares` and `Subject.leads`.
    """

    examples: int = 25
    steps: int = 8
    shrink: bool = True
    tv: float = 0.05
    every_shape: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One adapter in one dtype, as the checks see it.

    Attributes
    ----------
    load : callable
        ``load(checkpoint, dtype) -> Model``. It may ignore the checkpoint and return any model.
    capabilities : Capabilities
        What the adapter declares.
    checkpoint : Path
        Directory of a tiny checkpoint.
    own_checkpoint : bool
        Whether that is one of the adapter's own, which stands in for every checkpoint of the suite.
    dtype : str
        Dtype to load it in.
    seed : int
        Seed of everything random in the run.
    effort : Effort
        How hard to try.
    backend : str or None
        Name of the adapter's entry point, where it has one: a fresh process can then load it too.
    draft_backend : str or None
        Name of the entry point that loads the drafts, where that is another one.
    device : str or None
        Device that the entry point is asked for.
    dtypes : tuple of str
        The dtypes of the run, where they are known.
    engine : Engine
        The library that drives the adapter; the tests of the suite put a broken one in its place.
    """

    load: Loader
    capabilities: Capabilities
    checkpoint: Path
    dtype: str
    seed: int = 0
    own_checkpoint: bool = False
    effort: Effort = dataclasses.field(default_factory=Effort)
    backend: str | None = None
    draft_backend: str | None = None
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    engine: Engine = dataclasses.field(default_factory=Engine)
    _models: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def model(self, checkpoint: Path | None = None) -> Model[Any]:
        """Return the adapter's model of a checkpoint, loaded once."""
        path = self.checkpoint if checkpoint is None else checkpoint
        return self.once(path, lambda: self.load(path, self.dtype))

    def once(self, key: Hashable, compute: Callable[[], ResultT], *, for_all_dtypes: bool = False) -> ResultT:
        """Return what `compute` returns, computed once for this adapter in this dtype and kept under `key`.

        Clauses about one and the same enumeration share it so; what raises is computed anew.
        """
        place = (key, None if for_all_dtypes else self.dtype)
        if place not in self._models:
            self._models[place] = compute()
        result: ResultT = self._models[place]
        return result

    def spares(self, *models: Any) -> bool:
        """Whether shapes are to be few, because one of the models is compiled anew for each."""
        return not self.effort.every_shape and any(hasattr(model, "compile_round") for model in models)

    def leads(self, model: Any) -> bool:
        """Whether this dtype is one in which everything is gone through.

        All are where the effort is for every shape. Else the run's first exact dtype is, or its first where none is
        exact; and so is any exact one in which nothing needs to be compiled.
        """
        dtypes = self.dtypes or (self.dtype,)
        first = next((dtype for dtype in dtypes if dtype in EXACT), dtypes[0])
        is_cheap = self.dtype in EXACT and not self.spares(model)
        return self.effort.every_shape or is_cheap or self.dtype == first

    def check_leads(self, model: Any) -> None:
        """Raise `LeftOut` in a dtype that is left to the nightly tier."""
        if not self.leads(model):
            raise LeftOut(f"left to the nightly tier in {self.dtype}: another dtype of this run goes through it")

    def check_seed(self, check_id: str) -> int:
        """Return the seed of one check: it does not depend on which other checks run."""
        return int(np.random.SeedSequence([self.seed, zlib.crc32(check_id.encode())]).generate_state(1)[0])

    def rng(self, check_id: str) -> np.random.Generator:
        """Return the generator of one check."""
        return np.random.default_rng(self.check_seed(check_id))

    def at(self, dtype: str) -> "Subject":
        """Return the same adapter in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def with_effort(self, effort: Effort) -> "Subject":
        """Return the same adapter, tried more or less hard."""
        return dataclasses.replace(self, effort=effort)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A registered check.

    Attributes
    ----------
    id : str
        Stable dotted id, ``T0.rollback.to_zero``: tier, subject, claim.
    clause : str
        The contract in one sentence; docs/contract.md is made of these.
    requires : tuple of str
        Boolean capabilities that must be declared; with a leading ``!``, that must be declared absent. ``rows`` asks
        for batches of at least two, ``!max_batch_size`` for an adapter with no limit and ``max_batch_size`` for one.
    run : callable
        The function.
    group : str
        A name that it shares with checks that look at the same enumeration or sample: they run in one process, one
        after the other. Empty where it shares nothing.
    """

    id: str
    clause: str
    requires: tuple[str, ...]
    run: Callable[[Subject], Measured | None]
    group: str = ""

    @property
    def tier(self) -> str:
        """``T0`` … ``T3``."""
        return self.id.partition(".")[0]

    def applies(self, capabilities: Capabilities) -> bool:
        """Whether the check belongs to the manifest of adapters with these capabilities."""
        return all(_declared(capabilities, name.removeprefix("!")) != name.startswith("!") for name in self.requires)


def _declared(capabilities: Capabilities, name: str) -> bool:
    if name == "rows":
        return capabilities.max_batch_size is None or capabilities.max_batch_size >= 2
    if name == "max_batch_size":
        return capabilities.max_batch_size is not None
    return bool(getattr(capabilities, name))


CHECKS: dict[str, Check] = {}
"""Every check by its id, in the order of the contract."""


def check(
    check_id: str, clause: str, *, requires: tuple[str, ...] = (), group: str = ""
) -> Callable[[Callable[[Subject], Measured | None]], Callable[[Subject], Measured | None]]:
    """Register a function of a :class:`Subject` as a check."""

    def register(function: Callable[[Subject], Measured | None]) -> Callable[[Subject], Measured | None]:
        if check_id in CHECKS:
            raise ValueError(f"`check_id` must be new, got {check_id!r}")
        CHECKS[check_id] = Check(id=check_id, clause=clause, requires=requires, run=function, group=group)
        return function

    return register


def checks_for(capabilities: Capabilities, tiers: Iterable[str]) -> list[Check]:
    """Return the checks of these tiers that apply to an adapter with these capabilities, in order."""
    wanted = set(tiers)
    return [entry for entry in CHECKS.values() if entry.tier in wanted and entry.applies(capabilities)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a check left behind; one object of the report's ``checks``.

    Attributes
    ----------
    id, clause : str
        Of the check.
    status : str
        ``passed``, ``failed``, ``expected-failure``, ``not-applicable`` or ``not-run``.
    seed : int
        Seed of the run; with it the check repeats.
    diagnosis : str or None
        Why it failed, or why it does not apply.
    seconds : float
        Wall-clock time.
    measured : mapping of str to Measured
        What was measured, by dtype.
    left_out : tuple of str
        The dtypes of the run in which the check was left to the nightly tier.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import Capabilities, check_backend
    >>> def load(checkpoint, dtype):
    ...     return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> report = check_backend(load, Capabilities(), checks=["T0.rollback.to_zero"], seed=1)
    >>> (result,) = [result for result in report.checks if result.status != "not-run"]
    >>> result.id, result.status, result.clause
    ('T0.rollback.to_zero', 'passed', 'A row rolled back to length 0 is an empty row.')
    """

    id: str
    clause: str
    status: str
    seed: int
    diagnosis: str | None = None
    seconds: float = 0.0
    measured: Mapping[str, Measured] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def worst(self, name: str) -> Any:
        """Return a field of :class:`Measured` from the dtype where it is largest, or None where none has it."""
        found = [value for m in self.measured.values() if (value := getattr(m, name)) is not None]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the object as the report writes it."""
        largest = max(self.measured.values(), key=_share_of_tolerance, default=Measured())
        return {
            "id": self.id,
            "status": self.status,
            "clause": self.clause,
            "exact_tv": largest.exact_tv,
            "tolerance": largest.tolerance,
            "ln_e": self.worst("ln_e"),
            "n": self.worst("n"),
            "certified_tv": self.worst("certified_tv"),
            "seed": self.seed,
            "diagnosis": self.diagnosis,
            "seconds": round(self.seconds, 4),
            "values": {dtype: dict(m.values) for dtype, m in self.measured.items() if m.values},
        }


def _share_of_tolerance(measured: Measured) -> float:
    if measured.exact_tv is None or not measured.tolerance:
        return -1.0
    return measured.exact_tv / measured.tolerance


def run_check(entry: Check, subject: Subject, *, clock: Callable[[], float]) -> CheckResult:
    """Run a check in every dtype the adapter declares and return the result; it stops at the first that fails.

    Parameters
    ----------
    entry : Check
        The check.
    subject : Subject
        The adapter; its `dtype` is replaced by each declared one in turn.
    clock : callable
        Seconds, such as :func:`time.perf_counter`.

    Returns
    -------
    CheckResult
        With status ``passed``, ``failed`` or ``not-applicable`` (which it is only if it is so in every dtype).
    """
    start = clock()
    measured: dict[str, Measured] = {}
    reasons: list[str] = []
    left_out: list[str] = []
    status, diagnosis = "passed", None
    for dtype in subject.capabilities.dtypes:
        try:
            measured[dtype] = entry.run(subject.at(dtype)) or Measured()
        except NotApplicable as reason:
            reasons.append(str(reason))
            if isinstance(reason, LeftOut):
                left_out.append(dtype)
        except CheckFailure as failure:
            status, diagnosis = "failed", f"{dtype}: {failure.diagnosis}"
            if failure.measured is not None:
                measured[dtype] = failure.measured
            break
        except Exception as error:  # an adapter is foreign code: whatever it raises is its failure
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            status, diagnosis = "failed", f"{dtype}: raised {type(error).__name__}: {error} ({place})"
            break
    if status == "passed" and not measured:
        status, diagnosis = "not-applicable", "; ".join(dict.fromkeys(reasons))
    return CheckResult(
        id=entry.id,
        clause=entry.clause,
        status=status,
        seed=subject.seed,
        diagnosis=diagnosis,
        seconds=clock() - start,
        measured=measured,
        left_out=tuple(left_out),
    )
