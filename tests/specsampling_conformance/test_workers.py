"""Checks in processes of their own: the same report, whatever happens to a process."""

import importlib
import os
import sys

import pytest

from specsampling import Capabilities
from specsampling_conformance import _workers as workers
from specsampling_conformance import check_backend
from specsampling_conformance._entry_point import EntryPointLoader

NUMPY = EntryPointLoader(backend="numpy", draft_backend=None, device=None)
BOTH = Capabilities(dtypes=("float32", "float64"), select=True)

ADAPTERS = """
import os, sys, time
import specsampling
from specsampling_numpy import NumpyModel

class Dying(NumpyModel):
    def score(self, cache, tokens, /, *, num_logits=None):
        if len(tokens) == 3:
            os._exit(9)
        return super().score(cache, tokens, num_logits=num_logits)

class Forgetful(NumpyModel):
    def rollback(self, cache, lengths, /):
        return cache

class Interrupting(NumpyModel):
    def score(self, cache, tokens, /, *, num_logits=None):
        raise KeyboardInterrupt

def dying(checkpoint, dtype):
    return Dying(checkpoint, dtype=dtype)

def forgetful(checkpoint, dtype):
    return Forgetful(checkpoint, dtype=dtype)

def interrupting(checkpoint, dtype):
    return Interrupting(checkpoint, dtype=dtype)

def missing(checkpoint, dtype):
    raise OSError("no weights here")

def telling(checkpoint, dtype):
    raise RuntimeError(f"XLA_FLAGS is {os.environ.get('XLA_FLAGS')}")
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return a module with faulty adapters that other processes can import."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "faulty_adapters.py").write_text(ADAPTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("faulty_adapters")


def without_seconds(report):
    return [(result.id, result.status, result.diagnosis, result.measured) for result in report.checks]


def test_two_processes_find_what_one_does(adapters):
    checks = ["T0.model.*", "T0.rows.*", "T1.*.no_drafter", "T1.labels.*", "T2.streams.*"]
    checks += ["T2.control.*", "T3.replay.tempered"]
    one, two = (check_backend(NUMPY, BOTH, checks=checks, seed=3, jobs=jobs) for jobs in (1, 2))
    assert one.passed
    assert without_seconds(one) == without_seconds(two)
    assert [(cost.tier, cost.num_checks, cost.num_samples) for cost in one.costs] == [
        (cost.tier, cost.num_checks, cost.num_samples) for cost in two.costs
    ]
    assert (one.jobs, two.jobs) == (1, 2)
    assert "in 2 processes side by side" in str(two)
    assert all(cost.seconds > 0 for cost in two.costs)
    assert all(cost.peak_mib is None or cost.peak_mib > 10 for cost in two.costs)


@pytest.mark.parametrize("kind", ["forgetful", "missing"])
def test_a_failure_is_the_same_in_two_processes(kind, adapters):
    load = getattr(adapters, kind)
    checks = ["T0.model.*", "T0.rollback.*", "T2.streams.*", "T3.replay.tempered"]
    one, two = (check_backend(load, Capabilities(), checks=checks, seed=3, jobs=jobs) for jobs in (1, 2))
    assert one.failures
    assert without_seconds(one) == without_seconds(two)
    assert one.costs[-1].tier == two.costs[-1].tier == "T0"


def test_a_process_that_is_gone_is_a_failure_of_the_check_it_ran(adapters):
    checks = ["T0.model.*", "T0.score.shape", "T0.rollback.no_op", "T0.rows.single"]
    report = check_backend(adapters.dying, Capabilities(), checks=checks, jobs=2)
    assert report.failures == ["T0.score.shape"]
    (result,) = (result for result in report.checks if result.id == "T0.score.shape")
    assert "is gone (exit status 9)" in result.diagnosis
    assert "reproduce: " in result.diagnosis
    assert [result.status for result in report.checks if result.id in checks[2:]] == ["passed"] * 2


def test_an_interrupt_is_the_callers_own(adapters):
    with pytest.raises(KeyboardInterrupt):
        check_backend(adapters.interrupting, Capabilities(), checks=["T0.score.shape", "T0.rows.single"], jobs=2)


def test_a_loader_that_does_not_pickle_is_refused_for_more_than_one_process():
    with pytest.raises(TypeError, match="`load` must pickle"):
        check_backend(lambda checkpoint, dtype: None, Capabilities(), jobs=2)
    with pytest.raises(ValueError, match="`jobs` must be at least 1"):
        check_backend(NUMPY, Capabilities(), jobs=0)


def test_processes_share_the_cores_unless_somebody_has_said_otherwise(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with workers._by_default({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("7", "2")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("tier", "loaded", "said", "given"),
    [
        ("pr", True, None, "--xla_backend_optimization_level=0"),
        ("nightly", True, None, None),  # compiles as users do
        ("pr", False, None, None),
        ("pr", True, "--xla_cpu_enable_fast_math=false", "--xla_cpu_enable_fast_math=false"),
    ],
)
def test_processes_compile_quickly_where_jax_is_loaded_and_the_report_says_so(
    tier, loaded, said, given, monkeypatch, adapters
):
    if loaded:
        monkeypatch.setitem(sys.modules, "jax", sys.modules[__name__])
    else:
        monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if said:
        monkeypatch.setenv("XLA_FLAGS", said)
    checks = ["T0.model.*", "T0.score.shape"]
    report = check_backend(adapters.telling, Capabilities(), tier=tier, checks=checks, seed=1, jobs=2)
    (failed,) = {result.diagnosis.splitlines()[0] for result in report.checks if result.status == "failed"}
    assert failed.startswith(f"float32: raised RuntimeError: XLA_FLAGS is {given} (")
    is_told = any(f"XLA_FLAGS={given}" in remark for remark in report.remarks)
    assert is_told == (given is not None and said is None)
    assert "XLA_FLAGS" not in os.environ or said


def test_what_reproduces_a_failure_names_the_flags_it_was_compiled_with(monkeypatch, adapters):
    monkeypatch.setitem(sys.modules, "jax", sys.modules[__name__])
    for flags in (None, "--xla_backend_optimization_level=0"):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        if flags:
            monkeypatch.setenv("XLA_FLAGS", flags)
        report = check_backend(adapters.missing, Capabilities(), checks=["T0.score.shape"], seed=1)
        lines = [(result.diagnosis or "").splitlines()[-1] for result in report.checks if result.status == "failed"]
        assert lines
        assert all(line.startswith("reproduce: check_backend(") for line in lines)
        assert all(line.endswith(f"  # where XLA_FLAGS={flags}") == bool(flags) for line in lines)
