"""T3: replays from the same uniforms, mixed backends, and greedy texts with their ties."""

import time
from pathlib import Path

import numpy as np
import pytest

from specsampling import Capabilities, CounterSource, load_model
from specsampling_conformance import _system, compare_greedy  # noqa: F401 - registers the checks
from specsampling_conformance._checks import CHECKS, CheckFailure, Subject, checks_for, run_check
from specsampling_conformance._decisions import Rounding, first_mismatch, replay_round
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults import FAULTS
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._replays import FixedSource, Players, hold, run_rounds
from specsampling_numpy import TableModel


def subject_for(load=ReferenceModel, engine=None, dtype="float64"):
    return Subject(
        load=load,
        capabilities=Capabilities(dtypes=(dtype,), select=True),
        checkpoint=Path("unused"),
        dtype=dtype,
        seed=4,
        engine=Engine() if engine is None else engine,
    )


def status(check_id, subject):
    return run_check(CHECKS[check_id], subject, clock=time.perf_counter).status


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_reference_backend_agrees_with_the_suites_own_model(dtype):
    subject = subject_for(lambda checkpoint, dtype: load_model("numpy", checkpoint, dtype=dtype), dtype=dtype)
    results = [run_check(entry, subject, clock=time.perf_counter) for entry in checks_for(subject.capabilities, ["T3"])]
    assert {result.id: result.diagnosis for result in results if result.status != "passed"} == {}


@pytest.mark.parametrize(
    "name", ["bonus token drawn from the draft", "residual is the target", "greedy draft with its softmax law"]
)
def test_a_replay_sees_a_fault_without_statistics(name):
    assert status("T3.replay.pair", subject_for(engine=FAULTS[name].planted())) == "failed"


def test_other_logits_than_the_checkpoints_are_noticed():
    class Warmer(ReferenceModel):
        def pick_logits(self, logits, num_logits):
            return super().pick_logits(logits * 1.01, num_logits)

    assert status("T3.logits.reference", subject_for(Warmer)) == "failed"


def test_rows_that_know_their_company_are_noticed():
    fault = FAULTS["first row's settings for all"], FAULTS["target rows swapped"]
    assert status("T3.rows.company", subject_for(engine=fault[1].planted())) == "failed"


def test_a_model_with_weights_of_its_own_has_nothing_to_compare():
    subject = subject_for(lambda checkpoint, dtype: TableModel(np.full(9, 1 / 9)))
    assert status("T3.replay.bundled", subject) == "not-applicable"


TABLE = TableModel(np.random.default_rng(0).dirichlet(np.ones(3), size=3))
OTHER = TableModel(np.random.default_rng(1).dirichlet(np.ones(3), size=3))


def laws():
    from specsampling_conformance._oracle import one_token_law

    return one_token_law(TABLE), one_token_law(OTHER)


@pytest.mark.parametrize("source", [CounterSource(5), FixedSource(0.3), FixedSource(0.9)], ids=["seed", "low", "high"])
def test_the_decoder_does_what_the_replay_says(source):
    target, draft = laws()
    prompts = [[row % 3] for row in range(20)]
    rounds = run_rounds(subject_for(), TABLE, OTHER, prompts, max_new_tokens=9, schedule=(3, 1, 0), source=source)
    measured = hold(rounds, Players(TABLE, OTHER, target, draft), source, Rounding(0.0, 1e-12))
    assert measured.n == 180


def test_a_token_from_nowhere_is_a_mismatch():
    target, draft = laws()
    source = CounterSource(5)
    rounds = run_rounds(subject_for(), TABLE, OTHER, [[0]], max_new_tokens=6, schedule=(2,), source=source)
    wrong = rounds[0]._replace(tokens=[(rounds[0].tokens[0] + 1) % 3, *rounds[0].tokens[1:]])
    players = Players(TABLE, OTHER, target, draft)
    with pytest.raises(CheckFailure, match="follow from the same uniforms"):
        hold([wrong], players, source, Rounding(0.0, 1e-12))
    with pytest.raises(CheckFailure, match="cannot be judged"):  # what excuses everything proves nothing
        hold([wrong], players, source, Rounding(1.0, 1e-12))


def test_a_uniform_at_the_boundary_excuses_a_mismatch():
    law = lambda text: np.array([0.5, 0.5])
    uniforms = np.full((1, 3), 0.5 + 1e-9)
    options = {"lookahead": 0, "num_tokens": 0, "target": law, "draft": None}
    tokens, decisions = replay_round((0,), uniforms, rounding=Rounding(1e-6, 0.0), **options)
    assert tokens == [1]
    assert first_mismatch([0], tokens, decisions) is None
    _, decisions = replay_round((0,), uniforms, rounding=Rounding(1e-12, 0.0), **options)
    assert first_mismatch([0], tokens, decisions) is not None


def from_logits(*rows):
    return TableModel(np.array(rows, dtype=np.float64), logits=True)


def test_greedy_text_is_equal_to_itself():
    model = from_logits([0, 3, 1], [0, 1, 3], [3, 0, 1])
    found = compare_greedy(model, [0], [1, 2, 0])
    assert found.verdict == "equal"
    assert str(found) == "equal"
    assert compare_greedy(model, [0], []).verdict == "equal"


def test_an_exact_tie_is_a_numeric_tie():  # fault #31, #34
    model = from_logits([1, 1, 0], [1, 1, 0], [1, 1, 0])
    assert compare_greedy(model, [0], [0, 0]).verdict == "equal"  # the lowest id
    found = compare_greedy(model, [0], [0, 1])
    assert (found.verdict, found.position, found.margin) == ("numeric tie", 1, 0.0)


def test_a_token_that_is_not_the_likeliest_is_a_bug():  # fault #31
    model = from_logits([0, 3, 1], [0, 1, 3], [3, 0, 1])
    found = compare_greedy(model, [0], [1, 1, 2])  # off by one
    assert (found.verdict, found.position) == ("bug", 1)
    assert found.margin == 2.0
    assert "bug: new token 1" in str(found)


def test_a_tie_does_not_excuse_a_later_bug():
    model = from_logits([1, 1, 0], [0, 5, 0], [1, 0, 0])
    assert compare_greedy(model, [0], [1, 0]).verdict == "bug"


def test_the_tolerance_is_what_a_block_differs_by():  # fault #39
    class Wobbly(TableModel):
        def score(self, cache, tokens, /, *, num_logits=None):
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            return logits + (1e-7 if np.shape(tokens)[1] > 1 else 0.0) * np.arange(3), cache

    model = Wobbly(np.array([0.0, 1e-7, 0.0]), logits=True)
    found = compare_greedy(model, [0], [2, 2])
    assert found.verdict == "numeric tie"
    assert found.delta == pytest.approx(2e-7)
    assert compare_greedy(model, [0], [2, 2], tolerance=1e-9).verdict == "bug"


def test_a_measured_difference_cannot_excuse_anything():
    class Broken(TableModel):
        def score(self, cache, tokens, /, *, num_logits=None):
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            return logits + (5.0 if np.shape(tokens)[1] > 1 else 0.0) * np.arange(3), cache

    model = Broken(np.array([0.0, 1.0, 0.0]), logits=True)
    assert compare_greedy(model, [0], [2]).verdict == "bug"


def test_greedy_needs_a_prompt():
    with pytest.raises(ValueError, match="`prompt` must not be empty"):
        compare_greedy(TABLE, [], [1])
