"""Run the suite against an adapter, tier by tier, and say what was found; an adapter's fault never gets out of here."""

import dataclasses
import os
import pickle
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsampling import Capabilities, Model
from specsampling_conformance._catalogue import TIERS, all_checks, manifest_faults, manifest_ids, selected_ids
from specsampling_conformance._checks import Check, CheckResult, Effort, Loader, Measured, Subject, run_check
from specsampling_conformance._expectations import (
    checked_capabilities,
    checked_expectations,
    expected_reason,
    judge,
)
from specsampling_conformance._guard import TimeLimitExceeded, peak_mib, time_limit
from specsampling_conformance._report import Report, TierCost
from specsampling_conformance._tiny import write_tiny_checkpoint
from specsampling_conformance._trial import LONGEST_TEXT
from specsampling_conformance._workers import Outcome, in_processes, one_after_another

__all__ = [
    "CHECKPOINT",
    "EFFORTS",
    "TIME_LIMIT",
    "WatchedLoad",
    "attempt",
    "check_backend",
    "fresh_seed",
    "reproduce_line",
    "tiers_of",
]

_TIERS_OF = {"contract": ("T0",), "exact": ("T0", "T1"), "pr": TIERS, "nightly": TIERS}

EFFORTS = {
    "contract": Effort(),
    "exact": Effort(),
    "pr": Effort(),
    "nightly": Effort(examples=200, steps=12, tv=0.01, every_shape=True),
}
"""How hard each tier tries."""

TIME_LIMIT = 600.0
"""Seconds that one check may take in one dtype."""

CHECKPOINT = {"vocab_size": 4, "num_layers": 2, "max_length": LONGEST_TEXT}
"""Sizes of the checkpoint that the checks of T0 load: two layers, so that a fault in one of them shows, and a context
as long as the longest text of a check, so that an adapter that compiles meets few sizes of caches."""

_XLA_FLAGS, _QUICKLY_COMPILED = "XLA_FLAGS", "--xla_backend_optimization_level=0"
"""What processes are given where JAX is loaded, but for the nightly tier: XLA compiles the same program to machine code
in half the time, without making it fast. That is most of what such a run does."""

# What a model must have for any other check to make sense.
_FIRST = "T0.model.members"


class WatchedLoad:
    """A loader that remembers whether it raised.

    Parameters
    ----------
    load : callable
        The adapter's loader.
    checkpoint : Path, optional
        What to load in place of whatever is asked for.
    """

    def __init__(self, load: Loader, checkpoint: Path | None = None) -> None:
        self.load, self.checkpoint = load, checkpoint
        self.failed = False

    def __call__(self, checkpoint: Path, dtype: str) -> Model[Any]:
        """Load, and take note of an exception on its way out."""
        try:
            return self.load(self.checkpoint or checkpoint, dtype)
        except BaseException:  # goes on its way; no kind of it is a model
            self.failed = True
            raise


def tiers_of(tier: str) -> tuple[str, ...]:
    """Return ``T0`` … of what a caller calls a tier."""
    if tier not in _TIERS_OF:
        raise ValueError(f"`tier` must be one of {', '.join(_TIERS_OF)}, got {tier!r}")
    return _TIERS_OF[tier]


def fresh_seed() -> int:
    """Return a seed of fresh entropy, short enough for JSON readers that hold numbers as doubles."""
    return secrets.randbits(48)


def attempt(entry: Check, subject: Subject, limit: float | None = None) -> CheckResult:
    """Run a check in the subject's dtype only; whatever comes out of the adapter is a result."""
    start = time.perf_counter()
    alone = dataclasses.replace(subject.capabilities, dtypes=(subject.dtype,))
    try:
        with time_limit(limit):
            return run_check(entry, dataclasses.replace(subject, capabilities=alone), clock=time.perf_counter)
    except KeyboardInterrupt:
        raise
    except TimeLimitExceeded as late:
        diagnosis = str(late)
    except BaseException as error:  # SystemExit and its like are an adapter's doing too
        diagnosis = f"raised {type(error).__name__}: {error}"
    return CheckResult(
        id=entry.id,
        clause=entry.clause,
        status="failed",
        seed=subject.seed,
        diagnosis=f"{subject.dtype}: {diagnosis}",
        seconds=time.perf_counter() - start,
    )


def check_backend(
    load: Loader,
    capabilities: Capabilities,
    *,
    tier: str = "pr",
    expected_failures: Mapping[str, str] | None = None,
    seed: int | None = None,
    checks: Sequence[str] = (),
    backend: str | None = None,
    draft_backend: str | None = None,
    device: str | None = None,
    checkpoint: Path | None = None,
    time_limit: float | None = TIME_LIMIT,
    progress: bool | None = None,
    jobs: int = 1,
) -> Report:
    """Run the suite against an adapter and return what it found.

    Whatever the adapter raises is a result. What the caller does wrong (an unknown id, a tier that does not exist) is
    raised at once.

    Parameters
    ----------
    load : callable
        ``load(checkpoint, dtype) -> Model``: `checkpoint` is the path of a directory with ``config.json`` and
        ``model.safetensors``, `dtype` one of the declared names. It may ignore the checkpoint and return any model.
    capabilities : Capabilities
        What the adapter declares.
    tier : {"pr", "nightly", "exact", "contract"}
        How much to run: all tiers as for a pull request, all tiers with the samples that certify a total variation of
        0.01, T0 and T1, or T0 alone.
    expected_failures : mapping of str to str, optional
        Reasons by check id (in every dtype) or by ``id[dtype]``. One that passes is a failure.
    seed : int, optional
        Replays an earlier run; None is fresh entropy.
    checks : sequence of str
        Patterns such as ``"T0.rollback.*"``; a run of some checks gets no level. None: all.
    backend, device : str, optional
        Name of the adapter's entry point and the device, for the report and for the checks that load the adapter in a
        fresh process.
    draft_backend : str, optional
        Name of the backend that `load` takes for drafts, where that is another one; for the report.
    checkpoint : Path, optional
        Directory to load in place of the suite's own checkpoints, for an adapter that cannot host foreign weights. Its
        model is tested with a few ids, beside a draft of the suite's own.
    time_limit : float or None
        Seconds that one check may take in one dtype, where the system can interrupt it.
    progress : bool, optional
        Whether to show a progress bar; by default only where standard error is a terminal.
    jobs : int, default: 1
        In how many processes checks run. With more than one, `load` must be a function or object that pickles: a
        function of a module, but no closure. Where JAX is loaded here, these processes have
        ``XLA_FLAGS=--xla_backend_optimization_level=0`` in all tiers but the nightly, unless `XLA_FLAGS` is set; the
        report says so. Nothing else depends on their number.

    Returns
    -------
    Report
        With `passed`, `level` and `failures`; ``print(report)`` tells the story.

    Raises
    ------
    TypeError, ValueError
        If an argument cannot be used.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import Capabilities, check_backend
    >>> def load(checkpoint, dtype):
    ...     return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> report = check_backend(load, Capabilities(select=True), checks=["T0.rollback.*"], seed=1)
    >>> report.passed, report.failures, report.level
    (True, [], None)
    """
    tiers = tiers_of(tier)
    checked_capabilities(capabilities)
    expected = checked_expectations(expected_failures or {}, capabilities)
    if seed is not None and seed < 0:
        raise ValueError(f"`seed` must be non-negative, got {seed}")
    if checkpoint is not None and not checkpoint.is_dir():
        raise ValueError(f"`checkpoint` must be a directory, got {str(checkpoint)!r}")
    if jobs < 1:
        raise ValueError(f"`jobs` must be at least 1, got {jobs}")
    if jobs > 1:
        try:
            pickle.dumps(load)
        except Exception as error:  # pickle raises whatever the object does
            raise TypeError(f"`load` must pickle where `jobs` is more than 1: {error}") from error
    wanted = set(selected_ids(manifest_ids(capabilities), checks))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="specsampling-conformance-", ignore_cleanup_errors=True) as folder:
        watched = WatchedLoad(load, checkpoint)
        subject = Subject(
            load=watched,
            capabilities=capabilities,
            checkpoint=checkpoint or write_tiny_checkpoint(Path(folder) / "tiny", **CHECKPOINT),
            own_checkpoint=checkpoint is not None,
            dtype=capabilities.dtypes[0],
            seed=fresh_seed() if seed is None else seed,
            effort=EFFORTS[tier],
            backend=backend,
            draft_backend=draft_backend,
            device=device,
            dtypes=capabilities.dtypes,
        )
        run = _Run(_Checker(subject, watched, expected, tier, time_limit), tiers, wanted)
        run.to_its_end(jobs, progress=sys.stderr.isatty() if progress is None else progress)
    name = backend or str(getattr(load, "__qualname__", type(load).__qualname__))
    return Report(
        backend=name if draft_backend is None else f"{name} with drafts of {draft_backend}",
        device=device,
        capabilities=capabilities,
        tier=tier,
        seed=subject.seed,
        checks=tuple(run.results()),
        costs=tuple(run.costs()),
        seconds=time.perf_counter() - start,
        jobs=jobs,
        environment=run.environment,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Checker:
    """Runs one check after another of an adapter, in this process or, pickled, in another."""

    subject: Subject
    watched: WatchedLoad
    expected: Mapping[str, str]
    tier: str
    limit: float | None

    def __call__(self, check_id: str) -> Outcome:
        """Run a check in every dtype, up to the first in which it fails unexpectedly."""
        (entry,) = (entry for entry in all_checks() if entry.id == check_id)
        self.watched.failed = False
        done: list[CheckResult] = []
        for dtype in self.subject.capabilities.dtypes:
            reason = expected_reason(entry.id, dtype, self.expected)
            subject = self.subject.at(dtype)
            if reason is not None:
                subject = subject.with_effort(dataclasses.replace(subject.effort, shrink=False))
            done.append(judge(attempt(entry, subject, self.limit), reason))
            if done[-1].status == "failed":
                break
        result = _merged(done)
        if result.status != "failed":
            return Outcome(result, False, peak_mib())
        ends_run = entry.id == _FIRST or self.watched.failed
        return self._failed(result, self.subject.capabilities.dtypes[len(done) - 1], ends_run=ends_run)

    def lost(self, check_id: str, why: str) -> Outcome:
        """Return the outcome of a check whose process is gone."""
        (entry,) = (entry for entry in all_checks() if entry.id == check_id)
        result = CheckResult(id=entry.id, clause=entry.clause, status="failed", seed=self.subject.seed, diagnosis=why)
        return self._failed(result, self.subject.capabilities.dtypes[0], ends_run=entry.id == _FIRST)

    def _failed(self, result: CheckResult, dtype: str, *, ends_run: bool) -> Outcome:
        line = reproduce_line(result.id, self.subject, self.tier, dtype)
        told = dataclasses.replace(result, diagnosis=f"{result.diagnosis}\nreproduce: {line}")
        return Outcome(told, ends_run, peak_mib())


class _Run:
    """One run, from the first tier to the first that fails."""

    def __init__(self, checker: _Checker, tiers: Sequence[str], wanted: set[str]) -> None:
        self._checker, self._tiers, self._wanted = checker, tiers, wanted
        self._subject = checker.subject
        self._entries = [entry for entry in all_checks() if entry.applies(self._subject.capabilities)]
        self._outcomes: dict[str, Outcome] = {}
        self.environment: dict[str, str] = {}

    def to_its_end(self, jobs: int, *, progress: bool) -> None:
        """Run every check that is asked for, up to what a failure makes pointless."""
        entries = [entry for entry in self._entries if entry.tier in self._tiers and entry.id in self._wanted]
        together: dict[str, list[Check]] = {}
        for entry in entries:
            together.setdefault(entry.group or entry.id, []).append(entry)
        groups = list(together.values())
        if min(jobs, len(groups)) <= 1:
            outcomes = one_after_another(self._checker, groups, self._needs)
        else:
            is_quick = "jax" in sys.modules and not self._subject.effort.every_shape and _XLA_FLAGS not in os.environ
            self.environment = {_XLA_FLAGS: _QUICKLY_COMPILED} if is_quick else {}
            outcomes = in_processes(self._checker, groups, self._needs, min(jobs, len(groups)), self.environment)
        for outcome in _shown(outcomes, len(entries), progress):
            self._outcomes[outcome.result.id] = outcome

    def _needs(self, entry: Check) -> bool:
        """Whether what a check finds can still matter."""
        return self._stops()[self._entries.index(entry)] is None

    def _stops(self) -> list[str | None]:
        """Return for each check why it is not run, as far as that is known: because of a check or tier before it."""
        reasons: list[str | None] = []
        why, tier, failed = None, "", ""
        for entry in self._entries:
            if entry.tier != tier and failed:
                why = why or f"{tier} failed ({failed})"
            tier = entry.tier
            reasons.append(why)
            outcome = self._outcomes.get(entry.id)
            if why is None and outcome is not None and outcome.result.status == "failed":
                failed = f"{failed.removesuffix(' and others')} and others" if failed else entry.id
                if outcome.ends_run:
                    why = f"no model to go on with ({entry.id})"
        return reasons

    def results(self) -> list[CheckResult]:
        """Return a result for every check of the manifest, run or not."""
        results = []
        for entry, why in zip(self._entries, self._stops(), strict=True):
            if entry.tier not in self._tiers:
                results.append(self._not_run(entry, f"tier {self._checker.tier!r} ends before {entry.tier}"))
            elif why is not None:
                results.append(self._not_run(entry, why))
            elif entry.id not in self._wanted:
                results.append(self._not_run(entry, "not among the checks asked for"))
            else:
                results.append(self._outcomes[entry.id].result)
        faults = manifest_faults([result.id for result in results], self._subject.capabilities)
        kept = [result for result in results if result.id not in faults]
        return kept + [self._failed_manifest(check_id, why) for check_id, why in faults.items()]

    def costs(self) -> list[TierCost]:
        """Return what each tier cost of which something was run."""
        found = []
        for tier in self._tiers:
            stops = zip(self._entries, self._stops(), strict=True)
            ids = [entry.id for entry, why in stops if entry.tier == tier and why is None]
            ran = [self._outcomes[check_id] for check_id in ids if check_id in self._outcomes]
            if ran:
                peaks = [outcome.peak_mib for outcome in ran if outcome.peak_mib is not None]
                cost = TierCost(
                    tier=tier,
                    num_checks=len(ran),
                    seconds=sum(outcome.result.seconds for outcome in ran),
                    num_samples=sum(m.n or 0 for outcome in ran for m in outcome.result.measured.values()),
                    peak_mib=max(peaks, default=None),
                )
                found.append(cost)
        return found

    def _not_run(self, entry: Check, why: str) -> CheckResult:
        return CheckResult(id=entry.id, clause=entry.clause, status="not-run", seed=self._subject.seed, diagnosis=why)

    def _failed_manifest(self, check_id: str, why: str) -> CheckResult:
        return CheckResult(id=check_id, clause=why, status="failed", seed=self._subject.seed, diagnosis=why)


def _merged(results: Sequence[CheckResult]) -> CheckResult:
    """Return one result for all dtypes: the first failure, else the first of what was expected, else what passed."""
    for status in ("failed", "expected-failure", "passed", "not-applicable"):
        chosen = [result for result in results if result.status == status]
        if chosen:
            break
    measured: dict[str, Measured] = {}
    for result in results:
        measured |= result.measured
    seconds = sum(result.seconds for result in results)
    told = "\n".join(dict.fromkeys(result.diagnosis for result in chosen if result.diagnosis)) or None
    left_out = tuple(dtype for result in results for dtype in result.left_out)
    return dataclasses.replace(chosen[0], diagnosis=told, seconds=seconds, measured=measured, left_out=left_out)


def reproduce_line(check_id: str, subject: Subject, tier: str, dtype: str) -> str:
    """Return the line that runs one check again as it was run: by the compiler's flags that this process has."""
    flags = os.environ.get(_XLA_FLAGS) if "jax" in sys.modules else None
    if subject.backend is None:
        rest = "" if tier == "pr" else f", tier={tier!r}"
        line = f"check_backend(load, capabilities, checks=[{check_id!r}], seed={subject.seed}{rest})"
        return f"{line}  # where {_XLA_FLAGS}={shlex.quote(flags)}" if flags else line
    parts = [f"{_XLA_FLAGS}={shlex.quote(flags)}"] if flags else []
    parts += [f"python -m specsampling_conformance --backend {subject.backend}"]
    parts += [f"--draft-backend {subject.draft_backend}"] if subject.draft_backend else []
    parts += [f"--device {subject.device}"] if subject.device else []
    parts += [f"--checkpoint {shlex.quote(str(subject.checkpoint))}"] if subject.own_checkpoint else []
    parts += [f"--tier {tier}"] if tier != "pr" else []
    parts += [f"--dtype {dtype} --checks {check_id} --seed {subject.seed}"]
    return " ".join(parts)


def _shown(outcomes: Iterator[Outcome], total: int, progress: bool) -> Iterator[Outcome]:
    """Yield the outcomes, with a progress bar where that is wanted and tqdm is installed."""
    if not progress:
        yield from outcomes
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield from outcomes
        return
    with tqdm(total=total, unit="check", leave=False) as bar:
        for outcome in outcomes:
            bar.set_description(outcome.result.id)
            bar.update()
            yield outcome
