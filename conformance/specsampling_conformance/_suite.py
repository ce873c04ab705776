"""`BackendSuite`: the suite as a class of pytest tests, an item for every check and dtype."""

import dataclasses
import functools
import hashlib
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specsampling import Capabilities, Model
from specsampling_conformance._catalogue import TIERS, all_checks, manifest_faults
from specsampling_conformance._checks import CheckResult, Subject
from specsampling_conformance._expectations import (
    checked_capabilities,
    checked_expectations,
    expected_reason,
    judge,
)
from specsampling_conformance._runner import CHECKPOINT, EFFORTS, TIME_LIMIT, attempt, fresh_seed, tiers_of
from specsampling_conformance._tiny import write_tiny_checkpoint

if TYPE_CHECKING:
    import pytest

__all__ = ["BackendSuite"]

_TIER = "SPECSAMPLING_CONFORMANCE_TIER"
_SEED = "SPECSAMPLING_CONFORMANCE_SEED"


class BackendSuite:
    """The conformance suite for pytest: derive a class whose name begins with ``Test`` and write `load`.

    Every check is an item of its own for every declared dtype, such as
    ``TestMyBackend::test_clause[T0.rollback.to_zero-float32]``. A check that does not apply is skipped with the reason,
    an expected failure is an xfail, and one that passes fails. After a failure in a tier the later tiers are skipped.
    The environment variables ``SPECSAMPLING_CONFORMANCE_TIER`` and ``SPECSAMPLING_CONFORMANCE_SEED`` go before `tier`
    and `seed`.

    Attributes
    ----------
    capabilities : Capabilities
        What the adapter declares.
    expected_failures : mapping of str to str
        Reasons by check id (in every dtype) or by ``id[dtype]``.
    tier : str
        "pr", "nightly", "exact" or "contract", as for `check_backend`.
    seed : int or None
        Replays an earlier run; None is fresh entropy, shown with every failure.
    backend, device : str or None
        Name of the adapter's entry point and the device, for the checks that load the adapter in a fresh process.
    time_limit : float or None
        Seconds that one item may take.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_conformance import BackendSuite, Capabilities
    >>> class TestMyBackend(BackendSuite):
    ...     capabilities = Capabilities(dtypes=("float32",), select=True)
    ...
    ...     def load(self, checkpoint, dtype):
    ...         return specsampling.load_model("numpy", checkpoint, dtype=dtype)
    >>> TestMyBackend().test_clause("T0.rollback.to_zero", "float32")  # one item, as pytest runs it: it passes
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    expected_failures: ClassVar[Mapping[str, str]] = {}
    tier: ClassVar[str] = "pr"
    seed: ClassVar[int | None] = None
    backend: ClassVar[str | None] = None
    device: ClassVar[str | None] = None
    time_limit: ClassVar[float | None] = TIME_LIMIT

    def load(self, checkpoint: Path, dtype: str) -> Model[Any]:
        """Return the adapter's model of a checkpoint directory, in a dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define `load(self, checkpoint, dtype)`")

    @classmethod
    def pytest_generate_tests(cls, metafunc: "pytest.Metafunc") -> None:
        """Make an item of every check and dtype; what is declared wrong is an error of collection."""
        import pytest

        if metafunc.function.__name__ != "test_clause":
            return
        try:
            tiers = tiers_of(cls._tier())
            capabilities = checked_capabilities(cls.capabilities)
            checked_expectations(cls.expected_failures, capabilities)
            entries = [entry for entry in all_checks() if entry.applies(capabilities)]
            faults = manifest_faults([entry.id for entry in entries], capabilities)
        except (RuntimeError, TypeError, ValueError) as error:
            raise pytest.Collector.CollectError(f"{cls.__name__}: {error}") from error
        if faults:
            told = "; ".join(f"{check_id}: {why}" for check_id, why in faults.items())
            raise pytest.Collector.CollectError(f"{cls.__name__}: {told}")
        metafunc.parametrize(
            ("check_id", "dtype"),
            [
                pytest.param(entry.id, dtype, id=f"{entry.id}-{dtype}")
                for entry in entries
                if entry.tier in tiers
                for dtype in capabilities.dtypes
            ],
        )

    def test_clause(self, check_id: str, dtype: str) -> None:
        """Run one check in one dtype."""
        result, told = self._judged(check_id, dtype)
        assert result.status == "passed", told

    def _judged(self, check_id: str, dtype: str) -> tuple[CheckResult, str]:
        """Return the result of a check and how its failure reads; skip what does not apply, xfail what is expected."""
        import pytest

        (entry,) = (entry for entry in all_checks() if entry.id == check_id)
        session, tier = _session(type(self)), self._tier()
        before = [earlier for earlier in TIERS[: TIERS.index(entry.tier)] if earlier in session.failed]
        if before:
            pytest.skip(f"not run: {before[0]} failed ({session.failed[before[0]]})")
        reason = expected_reason(check_id, dtype, self.expected_failures)
        subject = Subject(
            load=self.load,
            capabilities=self.capabilities,
            checkpoint=session.checkpoint,
            dtype=dtype,
            seed=session.seed,
            effort=dataclasses.replace(EFFORTS[tier], shrink=reason is None),
            backend=self.backend,
            device=self.device,
            dtypes=self.capabilities.dtypes,
            _models=session.models,
        )
        result = judge(attempt(entry, subject, self.time_limit), reason)
        if result.status == "not-applicable":
            pytest.skip(f"not applicable: {result.diagnosis}")
        if result.status == "expected-failure":
            pytest.xfail(str(result.diagnosis))
        if result.status == "failed":
            session.failed.setdefault(entry.tier, check_id)
        item = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        again = f'{_SEED}={session.seed} python -m pytest "{item}"'
        return result, f"{check_id}: {entry.clause}\n{result.diagnosis}\nreproduce: {again}"

    @classmethod
    def _tier(cls) -> str:
        return os.environ.get(_TIER) or cls.tier


class _Session:
    """What the items of one class share in one process: models are loaded once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.models: dict[tuple[Path, str], Model[Any]] = {}
        self.failed: dict[str, str] = {}

    @functools.cached_property
    def checkpoint(self) -> Path:
        folder = tempfile.mkdtemp(prefix="specsampling-conformance-")
        weakref.finalize(self, _remove, folder)
        return write_tiny_checkpoint(Path(folder) / "tiny", **CHECKPOINT)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


_SESSIONS: "weakref.WeakKeyDictionary[type[BackendSuite], _Session]" = weakref.WeakKeyDictionary()


def _session(suite: type[BackendSuite]) -> _Session:
    if suite not in _SESSIONS:
        _SESSIONS[suite] = _Session(_seed(suite))
    return _SESSIONS[suite]


def _seed(suite: type[BackendSuite]) -> int:
    """Return the seed of a class's run: the same in every worker of pytest-xdist."""
    if os.environ.get(_SEED):
        return int(os.environ[_SEED])
    if suite.seed is not None:
        return suite.seed
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return fresh_seed() if run is None else int.from_bytes(hashlib.sha256(run.encode()).digest()[:6], "big")
