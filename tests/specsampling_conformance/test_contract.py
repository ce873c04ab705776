"""T0: right adapters pass every clause, whatever they declare, and every planted cache fault is killed."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsampling_numpy
from specsampling import CacheError, Capabilities, CapabilityError
from specsampling_conformance._checks import CheckFailure, Effort, Subject, checks_for, run_check
from specsampling_conformance._contract import contract_checks
from specsampling_conformance._faults import FAULTS, REFERENCE_CAPABILITIES, Fault
from specsampling_conformance._machine import run_random_sequences
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._sequences import CallSequence, shrink_sequence
from specsampling_conformance._tiny import write_tiny_checkpoint
from specsampling_conformance._trial import Oracle, Trial, largest_difference

CACHE_FAULTS = [fault for fault in FAULTS.values() if fault.kind == "cache"]

# Short texts are all right under them.
IN_LONG_TEXTS = ("deep rollback kept short", "mask of the first tile", "ring keeps its window only")

# What each fault breaks is one clause, and no other check touches it.
KILLED_BY_ONE = {
    "negative length clamped": "T0.rollback.negative",
    "negative length read from the end": "T0.rollback.negative",
    "empty block refused on an empty cache": "T0.score.empty_block",
    "empty block kept as padding": "T0.score.empty_block",
    "dtype ignored": "T0.score.dtype",
}

# What a call sequence alone can show. The others concern one clause that no sequence of legal calls touches.
ONE_CLAUSE_ONLY = {
    *IN_LONG_TEXTS,
    *KILLED_BY_ONE,
    "caches share their lengths",
    "blocks without logits not appended",
    "first positions instead of last",
    "int32 refused",
    "lengths kept by reference",
    "lengths modified",
    "logits a reused buffer",
    "not repeatable",
    "num_logits zero means all",
    "only the logits' tokens appended",
    "overflow clamped to the last slot",
    "overflow corrupts",
    "overflow of one row unnoticed",
    "padding past max_length refused",
    "rollback beyond the row believed",
    "rollback beyond the row clamped",
    "tokens modified",
    "undeclared select ignored",
    "unequal rollback silently levelled",
    "unsupported rollback clamped",
    "unsupported rollback silently ignored",
}
SEQUENCE_FAULTS = [fault for fault in CACHE_FAULTS if fault.name not in ONE_CLAUSE_ONLY]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def subject_for(
    load: Any, checkpoint: Path, capabilities: Capabilities = REFERENCE_CAPABILITIES, **options: Any
) -> Subject:
    return Subject(load=load, capabilities=capabilities, checkpoint=checkpoint, dtype="float64", **options)


def failures(subject: Subject) -> list[str]:
    results = [run_check(entry, subject, clock=time.perf_counter) for entry in checks_for(subject.capabilities, ["T0"])]
    return [f"{result.id}: {result.diagnosis}" for result in results if result.status == "failed"]


class BoundedModel(ReferenceModel):
    """Right, and goes back two tokens at most."""

    max_rollback = 2

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        if np.any(cache.lengths - np.asarray(lengths) > 2):
            raise CapabilityError("`lengths` must go back two tokens at most")
        return super().rollback(cache, lengths)


class LevelModel(ReferenceModel):
    """Right, and cannot tell rows apart in a rollback, select rows or hold more than three."""

    select = None  # type: ignore[assignment]  # as an adapter might take a power back

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        if batch_size > 3:
            raise CapabilityError("`batch_size` must be at most 3")
        return super().init_cache(batch_size, capacity)

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        if len(set(np.asarray(lengths).tolist())) > 1:
            raise CapabilityError("`lengths` must be equal")
        return super().rollback(cache, lengths)


RIGHT = {
    "reference": (ReferenceModel.load, REFERENCE_CAPABILITIES),
    "numpy backend": (lambda path, dtype: specsampling_numpy.load(path, dtype=dtype), REFERENCE_CAPABILITIES),
    "bounded rollback": (BoundedModel.load, REFERENCE_CAPABILITIES),
    "level rollback": (LevelModel.load, Capabilities(dtypes=("float64",), per_row_rollback=False, max_batch_size=3)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_adapter_passes_every_clause(name: str, checkpoint: Path):
    load, capabilities = RIGHT[name]
    assert failures(subject_for(load, checkpoint, capabilities)) == []


@pytest.mark.parametrize("seed", range(1, 3))
def test_no_seed_accuses_a_right_adapter(seed: int, checkpoint: Path):
    assert failures(subject_for(ReferenceModel.load, checkpoint, seed=seed)) == []


def test_a_backend_with_an_entry_point_is_run_in_two_fresh_processes(checkpoint: Path):
    subject = subject_for(RIGHT["numpy backend"][0], checkpoint, backend="numpy")
    entry = next(entry for entry in contract_checks() if entry.id == "T0.cache.fresh_processes")
    assert run_check(entry, subject, clock=time.perf_counter).status == "passed"


def test_a_loader_that_is_a_closure_is_not_applicable_to_fresh_processes(checkpoint: Path):
    subject = subject_for(RIGHT["numpy backend"][0], checkpoint)
    entry = next(entry for entry in contract_checks() if entry.id == "T0.cache.fresh_processes")
    assert run_check(entry, subject, clock=time.perf_counter).status == "not-applicable"


def first_kill(fault: Fault, checkpoint: Path, seed: int) -> str | None:
    capabilities = dataclasses.replace(fault.capabilities, dtypes=("float64",))
    subject = subject_for(fault.planted, checkpoint, capabilities, seed=seed, effort=Effort(shrink=False))
    for entry in checks_for(fault.capabilities, ["T0"]):
        result = run_check(entry, subject, clock=time.perf_counter)
        if result.status == "failed":
            calls, arrow, _ = (result.diagnosis or "").partition(" -> ")
            assert not arrow or calls.count("; ") < 5, result.diagnosis
            return entry.id
    return None


@pytest.mark.parametrize("fault", CACHE_FAULTS, ids=lambda fault: fault.name)
def test_every_planted_cache_fault_is_killed(fault: Fault, checkpoint: Path):
    assert [seed for seed in range(1) if first_kill(fault, checkpoint, seed) is None] == []


@pytest.mark.parametrize("name", IN_LONG_TEXTS)
@pytest.mark.parametrize("rows", [1, 2])
def test_faults_of_long_texts_are_killed_by_the_clause_about_them(name: str, rows: int, checkpoint: Path):
    capabilities = dataclasses.replace(REFERENCE_CAPABILITIES, max_batch_size=rows)
    subject = subject_for(FAULTS[name].planted, checkpoint, capabilities)
    (entry,) = (one for one in checks_for(capabilities, ["T0"]) if one.id == "T0.cache.long_texts")
    result = run_check(entry, subject, clock=time.perf_counter)
    assert result.status == "failed"
    assert result.diagnosis.count(";") <= 4  # between five calls


@pytest.mark.parametrize(("name", "check_id"), KILLED_BY_ONE.items())
def test_a_fault_of_one_clause_is_killed_by_its_check_and_no_other(name: str, check_id: str, checkpoint: Path):
    found = failures(subject_for(FAULTS[name].planted, checkpoint))
    assert [failure.partition(": ")[0] for failure in found] == [check_id]


def test_logits_finer_than_the_dtype_that_was_loaded_are_right(checkpoint: Path):
    subject = subject_for(lambda path, dtype: ReferenceModel(path, "float32"), checkpoint)
    (entry,) = (one for one in contract_checks() if one.id == "T0.score.dtype")
    for dtype, status in (("float32", "passed"), ("bfloat16", "passed"), ("float64", "failed")):
        asked = dataclasses.replace(subject.at(dtype), capabilities=Capabilities(dtypes=(dtype,)))
        assert run_check(entry, asked, clock=time.perf_counter).status == status


@pytest.mark.parametrize(("ids", "status"), [(2, "failed"), (3, "failed"), (4, "failed"), (5, "passed")])
def test_a_model_of_its_own_needs_five_ids(ids: int, status: str, tmp_path: Path, checkpoint: Path):
    own = write_tiny_checkpoint(tmp_path, vocab_size=ids)
    subject = subject_for(lambda path, dtype: ReferenceModel(own, dtype), checkpoint)
    result = run_check(contract_checks()[0], subject, clock=time.perf_counter)
    assert (result.id, result.status) == ("T0.model.members", status)
    assert status == "passed" or f"the model has {ids} ids" in (result.diagnosis or "")


@pytest.mark.parametrize(("contrast", "is_faint"), [(1.0, False), (0.5, False), (1e-3, True)])
def test_influence_is_what_the_token_before_the_last_does(contrast: float, is_faint: bool, tmp_path: Path):
    subject = subject_for(ReferenceModel.load, write_tiny_checkpoint(tmp_path, vocab_size=8, contrast=contrast))
    (entry,) = (one for one in contract_checks() if one.id == "T0.score.block_equals_steps")
    measured = run_check(entry, subject, clock=time.perf_counter).measured["float32"]
    assert (measured.values["influence"] < 100 * measured.tolerance) == is_faint


def test_models_of_short_texts_are_not_asked_for_long_ones(checkpoint: Path):
    class Short(ReferenceModel):
        def __init__(self, checkpoint: Path, dtype: str) -> None:
            super().__init__(checkpoint, dtype)
            self.max_length = 24

    (entry,) = (one for one in checks_for(REFERENCE_CAPABILITIES, ["T0"]) if one.id == "T0.cache.long_texts")
    result = run_check(entry, subject_for(Short, checkpoint), clock=time.perf_counter)
    assert (result.status, result.diagnosis) == ("not-applicable", "the model's texts have 24 tokens at most")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", CACHE_FAULTS, ids=lambda fault: fault.name)
def test_every_planted_cache_fault_is_killed_whatever_the_seed(fault: Fault, checkpoint: Path):
    assert [seed for seed in range(20) if first_kill(fault, checkpoint, seed) is None] == []


def counterexample(fault: Fault, checkpoint: Path, seed: int) -> CheckFailure | None:
    subject = subject_for(fault.planted, checkpoint, fault.capabilities, seed=seed)
    try:
        run_random_sequences(subject, seed)
    except CheckFailure as failure:
        return failure
    return None


@pytest.mark.parametrize("fault", SEQUENCE_FAULTS, ids=lambda fault: fault.name)
def test_random_calls_alone_show_the_fault_in_at_most_five(fault: Fault, checkpoint: Path):
    for seed in range(2):
        failure = counterexample(fault, checkpoint, seed)
        assert failure is not None
        assert len(failure.calls) <= 5 or "not when the same calls were made again" in failure.summary


@pytest.mark.nightly
@pytest.mark.parametrize("fault", SEQUENCE_FAULTS, ids=lambda fault: fault.name)
def test_random_calls_alone_show_the_fault_in_20_of_20_seeds(fault: Fault, checkpoint: Path):
    assert [seed for seed in range(20) if counterexample(fault, checkpoint, seed) is None] == []


def test_a_counterexample_reads_as_a_person_would_write_it(checkpoint: Path):
    subject = subject_for(FAULTS["rollback no-op"].planted, checkpoint)
    calls: tuple[tuple[str, list[Any]], ...] = (
        ("score", [[1, 2], [0, 1], [2, 2]]),
        ("score", [[0], [0], [1]]),
        ("rollback", [2, 1, 3]),
        ("score", [[2, 1], [2, 0], [1, 1]]),
    )
    sequence = CallSequence("", 3, 8, calls)
    failure = shrink_sequence(sequence, subject, Oracle(subject.model()))
    assert failure is not None
    assert [call.split()[0] for call in failure.calls] == ["score", "rollback", "score"]
    assert str(failure).startswith("B=2, capacity=8: score [[")
    assert "; rollback [" in str(failure)
    assert "-> row " in str(failure)
    assert "one token a call" in failure.expected


def test_an_oracle_scores_one_token_a_call_in_a_cache_of_one_row(checkpoint: Path):
    calls: list[tuple[int, ...]] = []

    class Watched(ReferenceModel):
        def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
            calls.append(np.asarray(tokens).shape)
            return super().score(cache, tokens, num_logits=num_logits)

    oracle = Oracle(Watched(checkpoint, "float64"))
    oracle.logits([1, 2, 0])
    oracle.logits([1, 2])
    assert calls == [(1, 1)] * 3


def test_a_row_of_a_bounded_model_may_go_back_from_the_furthest_it_has_been(checkpoint: Path):
    trial = Trial(subject_for(BoundedModel.load, checkpoint), 2, 8)
    trial.score([[0, 1, 2], [1, 1, 1]])
    trial.rollback([1, 3])
    assert trial.floors == [1, 1]
    trial.score([[0], [0]])
    assert trial.floors == [1, 2]


def test_a_clause_is_a_sentence_and_an_id_has_three_parts():
    checks = contract_checks()
    assert len(checks) > 35
    for entry in checks:
        assert entry.clause.endswith(".")
        assert len(entry.id.split(".")) == 3
        assert entry.tier == "T0"


def test_the_declared_capabilities_choose_the_clauses():
    able = {entry.id for entry in checks_for(Capabilities(select=True), ["T0"])}
    unable = {entry.id for entry in checks_for(Capabilities(per_row_rollback=False), ["T0"])}
    alone = {entry.id for entry in checks_for(Capabilities(max_batch_size=1), ["T0"])}
    assert "T0.select.in_order" in able - unable
    assert {"T0.select.absent", "T0.rollback.unequal_refused"} <= unable - able
    assert "T0.rows.limit" in alone - able
    assert "T0.rows.neighbours" not in alone


def test_one_row_at_most_is_enough_to_be_certified(checkpoint: Path):
    class Alone(ReferenceModel):
        def init_cache(self, batch_size: int, capacity: int) -> Any:
            if batch_size > 1:
                raise CapabilityError("`batch_size` must be 1")
            return super().init_cache(batch_size, capacity)

    capabilities = Capabilities(dtypes=("float64",), select=True, max_batch_size=1)
    assert failures(subject_for(Alone.load, checkpoint, capabilities)) == []


def test_what_an_adapter_raises_is_a_result_and_not_an_error(checkpoint: Path):
    class Broken(ReferenceModel):
        def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
            raise KeyError("no such layer")

    subject = subject_for(Broken.load, checkpoint)
    results = [run_check(e, subject, clock=time.perf_counter) for e in checks_for(subject.capabilities, ["T0"])]
    failed = [result for result in results if result.status == "failed"]
    assert len(failed) > 25
    assert all("KeyError" in (result.diagnosis or "") for result in failed)


def test_a_loader_that_raises_is_a_result_too(checkpoint: Path):
    def load(path: Path, dtype: str) -> Any:
        raise CacheError("no weights")

    entry = contract_checks()[0]
    result = run_check(entry, subject_for(load, checkpoint), clock=time.perf_counter)
    assert result.status == "failed"
    assert "no weights" in (result.diagnosis or "")


def test_differences_count_nan_as_infinite_and_equal_infinities_as_nothing():
    assert largest_difference(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.5])) == 0.5
    assert largest_difference(np.array([np.nan]), np.array([0.0])) == np.inf
    assert largest_difference(np.array([np.nan]), np.array([np.nan])) == np.inf
    assert largest_difference(np.array([-np.inf]), np.array([0.0])) == np.inf
