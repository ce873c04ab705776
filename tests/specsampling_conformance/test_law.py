"""T1: right adapters of every kind pass, planted faults are named, compiled rounds are enumerated."""

import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest

from specsampling import Capabilities, CapabilityError, load_model
from specsampling_conformance import _enumerated, _large, _law, _law_edges  # noqa: F401 - registers the checks
from specsampling_conformance._cast import PAIRS, cast, is_hosted, logit_delta, sequence_tolerance
from specsampling_conformance._checks import CHECKS, CheckFailure, Effort, Subject, checks_for, run_check
from specsampling_conformance._engine import Engine
from specsampling_conformance._enumerated import enumerated
from specsampling_conformance._faults import FAULTS
from specsampling_conformance._law_compare import compare
from specsampling_conformance._oracle import keeps_ids, reference_probs
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._situations import SITUATIONS
from specsampling_conformance._wrappers import MaskedModel
from specsampling_numpy import TableModel


def numpy_load(checkpoint, dtype):
    return load_model("numpy", checkpoint, dtype=dtype)


def subject_for(load, dtype="float64", engine=None, effort=None, **capabilities):
    return Subject(
        load=load,
        capabilities=Capabilities(dtypes=(dtype,), **capabilities),
        checkpoint=Path("unused"),
        dtype=dtype,
        engine=Engine() if engine is None else engine,
        effort=Effort(shrink=False) if effort is None else effort,
    )


def run(subject, *patterns):
    found = [
        run_check(entry, subject, clock=time.perf_counter)
        for entry in checks_for(subject.capabilities, ["T1"])
        if not patterns or any(entry.id.startswith(pattern) for pattern in patterns)
    ]
    assert found
    return found


def failed(results):
    return [f"{result.id}: {result.diagnosis}" for result in results if result.status == "failed"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_reference_backend_passes(dtype):
    results = run(subject_for(numpy_load, dtype, select=True))
    assert not failed(results)
    bound = {"float32": 3e-6, "float64": 2e-12}[dtype]
    enumerated_laws = [result for result in results if not result.id.startswith("T1.large.")]
    assert all(result.worst("exact_tv") is None or result.worst("exact_tv") < bound for result in enumerated_laws)


class Fixed(TableModel):
    """Reads no checkpoint: a law of its own over many ids."""

    def __init__(self, vocab_size, dtype="float64"):
        logits = np.random.default_rng(vocab_size).normal(0, 1, (vocab_size, vocab_size))
        super().__init__(logits, logits=True, dtype=dtype)


@pytest.mark.parametrize("vocab_size", [2, 3, 50])
def test_a_model_that_hosts_no_weights_but_its_own_passes(vocab_size):
    subject = subject_for(lambda checkpoint, dtype: Fixed(vocab_size, dtype), select=True)
    assert not is_hosted(subject)
    models = cast(subject, "four")
    assert models.target.vocab_size == min(vocab_size, 4) == models.draft.vocab_size
    assert not failed(run(subject))


def test_a_masked_model_has_the_law_given_its_ids():
    model = Fixed(9)
    small = MaskedModel(model, [2, 5, 8])
    logits, _ = small.score(small.init_cache(1, 4), np.array([[0, 2]]))
    whole, _ = model.score(model.init_cache(1, 4), np.array([[2, 8]]))
    np.testing.assert_array_equal(logits, whole[:, :, [2, 5, 8]])


@pytest.mark.parametrize(
    "capabilities", [{"max_batch_size": 1}, {"per_row_rollback": False}, {"max_batch_size": 5}], ids=str
)
def test_adapters_of_small_batches_pass(capabilities):
    class Small(ReferenceModel):
        def init_cache(self, batch_size, capacity):
            assert batch_size <= capabilities.get("max_batch_size", 1_000)
            return super().init_cache(batch_size, capacity)

        def rollback(self, cache, lengths, /):
            if not capabilities.get("per_row_rollback", True) and len(set(np.asarray(lengths).tolist())) > 1:
                raise CapabilityError("`lengths` must be equal")
            return super().rollback(cache, lengths)

    subject = subject_for(Small, **capabilities)
    assert not failed(run(subject, "T1.law.lookahead_then_none", "T1.rounds.settings", "T1.boundary", "T1.drift"))


def test_a_draft_without_a_context_limit_cannot_outgrow_it():
    class Unlimited(ReferenceModel):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            del self.max_length

    results = run(subject_for(Unlimited), "T1.law.short_draft", "T1.rounds.short_draft")
    assert [result.status for result in results] == ["not-applicable"] * 2


@pytest.mark.parametrize(
    ("name", "check_id"),
    [
        ("rollback one too few", "T1.law.lookahead_then_none"),
        ("bonus token drawn from the draft", "T1.law.fixed_lookahead"),
    ],
)
@pytest.mark.slow
def test_a_failure_names_the_planted_fault_that_fits(name, check_id):
    fault = FAULTS[name]
    is_adapter = fault.kind == "cache"
    subject = subject_for(
        fault.planted if is_adapter else ReferenceModel,
        engine=None if is_adapter else fault.planted(),
        effort=Effort(),
    )
    result = run_check(CHECKS[check_id], subject, clock=time.perf_counter)
    assert result.status == "failed"
    assert f"data most consistent with: {name}" in result.diagnosis


def test_at_a_fixed_lookahead_a_stale_cache_is_invisible():
    # K = 0 shows what the next block would overwrite: why schedules vary.
    class Stale(ReferenceModel):
        """Attends to what was rolled back, unless it was overwritten since."""

        def block_mask(self, cache, width):
            mask = super().block_mask(cache, width)
            slots = np.arange(cache.keys.shape[2])
            stale = (slots >= cache.lengths[:, None] + width) & (slots < cache.written[:, None])
            return mask | stale[:, None]

    law = lambda name: run(subject_for(Stale), f"T1.law.{name}")[0]
    assert law("lookahead_then_none").status == "failed"


NEW_FAULTS = {
    "end tokens forbidden by the block": "T1.law.min_new_tokens",
    "end tokens forbidden in the first slot only": "T1.law.min_new_tokens",
    "end tokens forbidden to the first row's minimum": "T1.law.min_new_tokens",
    "end tokens forbidden after the filters": "T1.law.min_new_tokens",
    "stop sequence seen within a block only": "T1.law.stop_sequences",
    "stop sequence begun in the prompt": "T1.law.stop_sequences",
    "stop sequence looked for at a round's end only": "T1.law.stop_sequences",
    "stop sequence cut off": "T1.law.stop_sequences",
    "draft's law cut to the target's ids": "T1.law.wider_draft",
    "unknown id taken for the last": "T1.law.wider_draft",
    "ids new to the draft never drawn": "T1.law.narrower_draft",
    "draft's context passed": "T1.rounds.short_draft",
    "draft's context one short": "T1.rounds.short_draft",
    "first row's draft settings for all": "T1.rounds.row_draft_settings",
    "first row's draft settings reported": "T1.law.row_draft_settings",
    "ids past 65 536 cut": "T1.large.selection",
    "law in half precision": "T1.large.selection",
    "selection among the likeliest 1 000": "T1.large.selection",
    "one uniform for all levels": "T1.large.draws",
    "running sum over all ids": "T1.large.draws",
    "draw in half precision": "T1.large.draws",
}


@pytest.mark.parametrize(("name", "check_id"), NEW_FAULTS.items(), ids=NEW_FAULTS)
def test_the_situation_made_for_a_fault_shows_it(name, check_id):
    assert failed(run(subject_for(ReferenceModel, engine=FAULTS[name].planted()), check_id))


def test_frozen_pairs_keep_the_ids_of_every_situation_far_from_its_edges():
    # At the cap of float32, which no adapter's rounding may pass: no row is ever left out on the pairs in float32.
    class Rough(ReferenceModel):
        def pick_logits(self, logits, num_logits):
            noise = 1e-4 * (logits.shape[1] > 1)  # blocks differ from single tokens, by half the cap
            return super().pick_logits(logits + noise * np.cos(1e3 * logits), num_logits)

    subject = subject_for(Rough, "float32")
    for situation in SITUATIONS.values():
        assert logit_delta(subject, cast(subject, situation.pair), "target") > 5e-5
        assert _enumerated.stable_rows(subject, situation) == situation.rows


def test_tolerances_follow_the_temperature_and_the_dtype():
    class Coarse(ReferenceModel):
        def __init__(self, checkpoint, dtype):
            super().__init__(checkpoint, "float32")

        def pick_logits(self, logits, num_logits):
            return super().pick_logits(logits + (logits.shape[1] > 1) / 256, num_logits)  # blocks and single tokens

    exact, coarse = subject_for(ReferenceModel), subject_for(Coarse, "bfloat16")
    assert sequence_tolerance(exact, cast(exact, "three_a"), 3) == 1e-12
    models = cast(coarse, "three_a")
    delta = logit_delta(coarse, models, "target")
    assert delta == pytest.approx(2 / 256, rel=1e-3)  # twice what was measured
    warm, cold = (sequence_tolerance(coarse, models, 3, temperature=t) for t in (1.0, 0.25))
    assert warm == pytest.approx(3 * np.tanh(delta / 2))
    assert cold == pytest.approx(3 * np.tanh(2 * delta))
    assert sequence_tolerance(coarse, models, 3, temperature=0.0) == 1e-6


def test_narrow_dtypes_are_given_a_unit_in_the_last_place_where_nothing_was_measured():
    class Alike(ReferenceModel):
        def __init__(self, checkpoint, dtype):
            super().__init__(checkpoint, "float64")

        def pick_logits(self, logits, num_logits):
            return super().pick_logits(np.round(logits, 6), num_logits)

    for dtype, unit in (("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        subject = subject_for(Alike, dtype)
        models = cast(subject, "four")
        assert models.differences["target"].delta == 0
        assert 4 < models.differences["target"].scale < 8
        assert logit_delta(subject, models, "target") == 4 * unit


def test_differences_are_measured_behind_rows_of_other_lengths():
    class Ragged(ReferenceModel):
        def score(self, cache, tokens, *, num_logits=None):
            uneven = len(set(np.asarray(cache.lengths).tolist())) > 1
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            return logits + uneven / 1024, cache

    subject = subject_for(Ragged, "float32")
    assert cast(subject, "three_a").differences["target"].delta == pytest.approx(1 / 1024, rel=1e-3)


def test_no_perturbation_within_delta_moves_a_law_past_its_tolerance():
    rng = np.random.default_rng(3)
    worst = 0.0
    for _ in range(400):
        logits, delta, temperature = rng.normal(0, 2, 5), 10.0 ** rng.uniform(-3, 0), rng.uniform(0.2, 2)
        settings = {"temperature": temperature, "top_p": rng.uniform(0.3, 1), "top_k": int(rng.integers(1, 6))}
        moved = logits + delta * rng.choice((-1.0, 1.0), 5)
        before, after = reference_probs(logits, **settings), reference_probs(moved, **settings)
        if keeps_ids(logits, delta, **settings):
            assert np.array_equal(before > 0, after > 0)
            distance = 0.5 * np.abs(before - after).sum()
            assert distance <= np.tanh(delta / temperature / 2) + 1e-12
            worst = max(worst, distance / np.tanh(delta / temperature / 2))
    assert worst > 0.9  # the bound is met


def test_every_situation_is_checked_for_tokens_and_rounds():
    for name in SITUATIONS:
        assert {f"T1.law.{name}", f"T1.rounds.{name}"} <= set(CHECKS)


def test_an_enumeration_is_made_once_for_all_its_clauses():
    subject = subject_for(numpy_load)
    assert enumerated(subject, "greedy_draft") is enumerated(subject, "greedy_draft")


def test_settings_that_keep_an_id_by_a_hair_are_left_out():
    class Tied(ReferenceModel):
        def __init__(self, checkpoint, dtype):
            super().__init__(checkpoint, "float32")

        def pick_logits(self, logits, num_logits):
            # As coarse as half precision: ties everywhere.
            return super().pick_logits(np.round(logits * 4) / 4, num_logits)

    result = run(subject_for(Tied, "bfloat16"), "T1.law.settings")[0]
    assert result.status == "passed", result.diagnosis
    assert "by a hair" in result.measured["bfloat16"].values["note"]


def test_laws_are_compared_by_mass_support_and_distance():
    right = {(0,): 0.25, (1,): 0.75}
    assert compare("x", right, dict(right), 1e-12).exact_tv == 0
    for wrong, said in (
        ({(0,): 0.25, (1,): 0.5}, "sum to"),
        ({(0,): 0.26, (1,): 0.74}, "total variation 0.01"),
        ({(0,): 0.25, (1,): 0.75 - 1e-14, (2,): 1e-14}, "one of the laws only"),
    ):
        with pytest.raises(CheckFailure, match=said):
            compare("x", right, wrong, 1e-12)
    compare("x", right, {(0,): 0.25, (1,): 0.75 - 1e-14, (2,): 1e-14}, 1e-12, forbidden=False)


def test_frozen_pairs_are_one_layer_and_of_three_and_four_ids():
    assert [pair.vocab_size for pair in PAIRS.values()] == [3, 3, 4]
    for pair in PAIRS.values():
        for path in (pair.target, pair.draft):
            assert ReferenceModel(path, "float64").num_layers == 1


def jax_model():
    pytest.importorskip("jax")
    location = Path(__file__).with_name("jax_model.py")
    spec = importlib.util.spec_from_file_location("jax_model_of_the_suite", location)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_compiled_rounds_are_enumerated_and_replayed():
    module = jax_model()
    subject = subject_for(lambda checkpoint, dtype: module.JaxModel(checkpoint), "float32", compile_round=True)
    results = run(subject, "T1.compiled", "T1.boundary.decisions")
    assert not failed(results)
    assert all(result.status == "passed" for result in results)
    target = subject.model(PAIRS["three_b"].target)
    assert 0 < target.num_traces < 12  # nothing is traced anew from batch to batch


@pytest.mark.slow
def test_uniforms_cut_inside_a_compiled_round_are_noticed():
    module = jax_model()

    class Coarse(module.JaxModel):
        def compile_round(self, drafter, sampling, lookahead):
            decode = super().compile_round(drafter, sampling, lookahead)

            def coarse(target, drafter, carry, context, limits, end_bans, randomness, /, **options):
                cut = np.floor(np.asarray(randomness.uniforms) * 2**12) / 2**12 + 2.0**-13
                rounded = type(randomness)(cut, randomness.lookahead)
                return decode(target, drafter, carry, context, limits, end_bans, rounded, **options)

            return coarse

    subject = subject_for(lambda checkpoint, dtype: Coarse(checkpoint), "float32", compile_round=True)
    assert failed(run(subject, "T1.boundary.decisions"))


def test_a_compiled_round_that_cannot_ask_the_host_is_left_out():
    class Compiled(ReferenceModel):
        def compile_round(self, drafter, sampling, lookahead):
            raise CapabilityError("no callbacks")

    subject = subject_for(Compiled, compile_round=True)
    results = {result.id: result for result in run(subject, "T1.law.fixed_lookahead", "T1.compiled.law")}
    assert results["T1.law.fixed_lookahead"].status == "passed"
    assert "cannot ask the host" in results["T1.law.fixed_lookahead"].measured["float64"].values["note"]
    assert results["T1.compiled.law"].status == "not-applicable"
