import json
import math

import numpy as np
import pytest

import specsampling
from specsampling import Sampling
from specsampling_conformance import audit
from specsampling_conformance._cast import PAIRS
from specsampling_conformance._certify import certified_tv, certify, least_detectable
from specsampling_conformance._oracle import one_token_law, sequence_law
from specsampling_numpy import TableModel

LAW = np.array([[0.3, 0.2], [0.1, 0.4]])


def drawing(law, seed=0):
    """Return a sampler of an array's law."""
    rng = np.random.default_rng(seed)
    flat = np.ravel(law)

    def sample(prompt, num_samples):
        cells = rng.choice(flat.size, size=num_samples, p=flat)
        return np.stack(np.unravel_index(cells, np.shape(law)), axis=1)

    return sample


@pytest.fixture(scope="module")
def model():
    """Return a model whose law depends on the last two tokens."""
    laws = np.random.default_rng(3).dirichlet([1.0, 1.0, 1.0], size=(3, 3))
    return TableModel(laws)


def sampling_from(model, prompt, length, *, end_tokens=(), seed=0, **settings):
    """Return a sampler of a model's law, one token at a time."""
    law, rng = one_token_law(model, **settings), np.random.default_rng(seed)

    def one():
        text = tuple(prompt)
        for _ in range(length):
            text = (*text, int(rng.choice(model.vocab_size, p=law(text))))
            if text[-1] in end_tokens:
                break
        return list(text[len(prompt) :])

    return lambda prompt, num_samples: [one() for _ in range(num_samples)]


# Each of these is wrong with probability at most 2e-8.
@pytest.mark.statistical
def test_a_right_sampler_passes_and_is_certified():
    report = audit(drawing(LAW), LAW, tv=0.1)
    assert report.passed
    assert report.stopped == "enough samples"
    assert report.n == certify(4, 0.1, 1e-8)
    assert report.certified_tv == pytest.approx(certified_tv(4, report.n, 1e-8))
    assert report.certified_tv <= 0.1
    assert report.diagnosis is None
    assert "no deviation" in str(report)


@pytest.mark.statistical
def test_a_law_written_down_may_have_sequences_of_any_length():
    law = {(7,): 0.5, (3, 7): 0.25, (3, 3, 70_000): 0.25}
    cells = list(law)
    rng = np.random.default_rng(0)

    def sample(prompt, num_samples):
        return [cells[index] for index in rng.choice(3, size=num_samples, p=list(law.values()))]

    report = audit(sample, law, tv=0.2)
    assert report.passed
    assert report.num_cells == 3


@pytest.mark.statistical
def test_a_models_law_under_its_settings_is_what_samples_are_held_to(model):
    settings = {"temperature": 0.6, "top_p": 0.9}
    sample = sampling_from(model, (1, 2), 3, end_tokens=(0,), **settings)
    report = audit(
        sample, model, prompt=(1, 2), length=3, sampling=Sampling(**settings), end_tokens=[0], tv=0.2, batch_size=300
    )
    assert report.passed, str(report)
    assert report.settings["temperature"] == 0.6
    assert report.settings["end_tokens"] == [0]


@pytest.mark.statistical
def test_this_librarys_own_engine_passes():
    target, draft = (specsampling.load_model("numpy", path) for path in (PAIRS["four"].target, PAIRS["four"].draft))
    batches = iter(range(10**6))

    def sample(prompt, num_samples):
        prompts = [prompt] * num_samples
        return specsampling.generate(
            target, draft, prompts, max_new_tokens=3, lookahead=2, end_tokens=[3], seed=next(batches)
        ).tokens

    report = audit(sample, target, prompt=(1, 2), length=3, end_tokens=[3], tv=0.1, batch_size=2048)
    assert report.passed, str(report)


# The least detectable law at the total variation certified is missed with probability at most 1e-3.
@pytest.mark.statistical
def test_the_least_detectable_law_is_rejected():
    other = least_detectable(LAW, 0.1, np.random.default_rng(0))
    report = audit(drawing(other, seed=4), LAW, tv=0.1)
    assert not report.passed
    assert report.stopped == "rejected"
    assert report.ln_e >= report.threshold == pytest.approx(math.log(1e8))
    assert len(report.worst) == 4
    assert "total variation of about 0." in report.diagnosis


def test_a_rejection_ends_the_audit_at_once():
    sizes = []
    sample = drawing(LAW[::-1])

    def counted(prompt, num_samples):
        sizes.append(num_samples)
        return sample(prompt, num_samples)

    report = audit(counted, LAW, tv=0.02, batch_size=100)
    assert not report.passed
    assert sizes == [100] * len(report.looks)
    assert report.n < 1000 < certify(4, 0.02, 1e-8)


@pytest.mark.parametrize(
    ("engine", "asked", "told"),
    [
        ({}, {"temperature": 0.3}, "temperature ignored"),
        ({}, {"top_k": 2}, "top_k ignored"),
        ({"temperature": 0.0}, {"temperature": 1.0}, "greedy decoding"),
    ],
)
def test_settings_that_the_engine_ignores_are_named(model, engine, asked, told):
    sample = sampling_from(model, (1, 2), 2, **engine)
    report = audit(sample, model, prompt=(1, 2), length=2, sampling=Sampling(**asked), batch_size=500)
    assert not report.passed
    assert f"data most consistent with: {told}" in report.diagnosis


def test_a_prompt_that_lost_its_last_token_is_named(model):
    report = audit(sampling_from(model, (0, 1), 2), model, prompt=(0, 1, 2), length=2)
    assert "data most consistent with: the prompt's last token missing" in report.diagnosis


def test_the_callers_own_suspicion_is_named(model):
    draft = TableModel(np.random.default_rng(8).dirichlet([1.0, 1.0, 1.0], size=3))
    report = audit(sampling_from(draft, (1,), 2), model, prompt=(1,), length=2, alternatives={"the draft's law": draft})
    assert "data most consistent with: the draft's law" in report.diagnosis


def test_tokens_after_an_end_token_are_impossible(model):
    report = audit(sampling_from(model, (1,), 3), model, prompt=(1,), length=3, end_tokens=[2], batch_size=50)
    assert report.ln_e == math.inf
    assert report.n == 50
    assert "goes on after an end token" in report.diagnosis
    assert "data most consistent with: end tokens ignored" in report.diagnosis


def test_sequences_that_end_early_are_impossible(model):
    report = audit(lambda prompt, n: [[0]] * n, model, prompt=(1,), length=3, batch_size=50)
    assert "[0] ended early" in report.diagnosis


def test_an_id_that_the_law_does_not_know_is_impossible():
    report = audit(lambda prompt, n: [[5, 1]] * n, {(0, 1): 0.5, (1, 0): 0.5})
    assert "[?, 1] was ruled out" in report.diagnosis
    assert report.worst[0].tokens == (-1, 1)


def test_uniforms_shared_by_neighbours_are_found_out():
    sample = drawing(LAW)

    def pairs(prompt, num_samples):
        return np.repeat(sample(prompt, num_samples // 2), 2, axis=0)

    report = audit(pairs, LAW, num_samples=400, batch_size=100)
    assert not report.passed
    assert report.neighbours_ln_e >= report.threshold > report.ln_e
    assert "neighbouring ones are not independent" in report.diagnosis


def test_an_engine_seeded_anew_in_each_call_is_found_out():
    def reseeded(prompt, num_samples):
        return drawing(LAW, seed=5)(prompt, num_samples)

    report = audit(reseeded, LAW, tv=0.01, batch_size=64)
    assert not report.passed
    assert "every call began with the same sequences" in report.diagnosis


# 60 streams with alpha 0.05, each looked at 5 times: more than 14 alarms have probability below 1e-6.
@pytest.mark.statistical
def test_alarms_are_no_more_often_false_than_promised():
    sample = drawing(LAW, seed=11)
    alarms = sum(not audit(sample, LAW, num_samples=400, batch_size=80, alpha=0.05).passed for _ in range(60))
    assert alarms <= 14


def test_greedy_decoding_has_one_sequence_and_needs_few(model):
    greedy = Sampling(temperature=0.0)
    sample = sampling_from(model, (1,), 3, temperature=0.0)
    report = audit(sample, model, prompt=(1,), length=3, sampling=greedy, tv=0.05)
    assert report.passed
    assert report.num_cells == 1
    assert report.n == 135
    assert 1 - (1 - report.certified_tv) ** report.n == pytest.approx(0.999)
    once = iter([[1, 1, 1]])
    (right,) = sample([1], 1)

    def slip(prompt, num_samples):
        return [next(once, right) for _ in range(num_samples)]

    assert not audit(slip, model, prompt=(1,), length=3, sampling=greedy).passed


def test_a_time_limit_certifies_what_it_had():
    report = audit(drawing(LAW), LAW, tv=0.001, time_limit=0.2)
    assert report.passed
    assert report.stopped == "time limit"
    assert report.certified_tv == pytest.approx(certified_tv(4, report.n, 1e-8))


def test_one_batch_is_always_drawn_and_may_be_too_few_to_certify_anything():
    report = audit(drawing(LAW), LAW, time_limit=0.0, batch_size=10)
    assert (report.n, report.certified_tv, len(report.looks)) == (10, 1.0, 1)
    assert "too few sequences" in str(report)


def test_a_seed_is_recorded_and_replays():
    generators, seeds = [], []

    def reseed(seed):
        seeds.append(seed)
        generators.append(np.random.default_rng(seed))

    def sample(prompt, num_samples):
        return generators[-1].integers(0, 2, (num_samples, 2))

    first = audit(sample, LAW, num_samples=50, reseed=reseed)
    again = audit(sample, LAW, num_samples=50, reseed=reseed, seed=first.seed)
    fresh = audit(sample, LAW, num_samples=50, reseed=reseed)
    assert seeds == [first.seed, first.seed, fresh.seed]
    assert again.ln_e == first.ln_e
    assert fresh.seed != first.seed
    assert audit(sample, LAW, num_samples=50).seed is None


def test_each_batch_is_told(capsys):
    looks = []
    report = audit(drawing(LAW), LAW, num_samples=250, batch_size=100, on_look=looks.append)
    assert [look.num_samples for look in looks] == [100, 200, 250]
    assert tuple(looks) == report.looks


def test_a_report_is_json(tmp_path, model):
    report = audit(
        sampling_from(model, (1,), 2),
        model,
        prompt=(1,),
        length=2,
        end_tokens=[2],
        name="mine",
        settings={"engine": "1.2"},
    )
    report.write_json(tmp_path / "deep" / "audit.json")
    held = json.loads((tmp_path / "deep" / "audit.json").read_text())
    assert held["ln_e"] == "inf"
    assert (held["name"], held["passed"], held["stopped"]) == ("mine", False, "rejected")
    assert held["settings"] == {**report.settings, "engine": "1.2"}
    assert held["worst"][0]["tokens"] == list(report.worst[0].tokens)
    assert held["looks"] == [[report.n, "inf"]]


def one_batch(batch):
    return lambda prompt, num_samples: batch


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ([[0, 1]] * 4, ValueError, "the 5 sequences it was asked for, got 4"),
        (np.zeros((6, 2), dtype=int), ValueError, "the 5 sequences it was asked for, got 6"),
        ([[0, 1]] * 4 + [[0, 1, 0]], ValueError, r"at most 2 new tokens, without the prompt, got 3 \(sequence 4\)"),
        ([[0, 1]] * 4 + [[0, 2]], ValueError, r"ids in \[0, 2\), got \[0, 2\] \(sequence 4\)"),
        ([[0, 1]] * 4 + [[-1, 0]], ValueError, r"ids in \[0, 2\), got \[-1, 0\] \(sequence 4\)"),
        (np.zeros((5, 2)), TypeError, r"must return integers, got \[0.0, 0.0\] \(sequence 0\)"),
        (["01"] * 5, TypeError, r"must return sequences of ids, got str \(sequence 0\)"),
        (np.zeros(5, dtype=int), TypeError, r"must return sequences of ids, got int \(sequence 0\)"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_row(batch, error, message):
    with pytest.raises(error, match=message):
        audit(one_batch(batch), LAW, num_samples=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reference": LAW * 2}, "`reference` must sum to one"),
        ({"reference": np.full((2, 3), 1 / 6)}, r"`reference` must have shape \(V,\) \* length"),
        ({"reference": {(0,): 1.5, (1,): -0.5}}, r"non-negative ids probabilities, got -0.5 for \[1\]"),
        ({"reference": {(-1,): 1.0}}, r"got 1.0 for \[-1\]"),
        ({"reference": {(): 1.0}}, "at least one token"),
        ({"length": 2}, "`length` must be left out"),
        ({"sampling": Sampling()}, "`sampling` must be left out"),
        ({"prompt": ()}, "`prompt` must be one or more"),
        ({"end_tokens": [-1]}, "`end_tokens` must be non-negative"),
        ({"tv": 0.6}, "`tv` must lie in"),
        ({"alpha": 0.0}, "`alpha` must lie"),
        ({"num_samples": 0}, "`num_samples` must be"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"seed": 3}, "`seed` must come with `reseed`"),
        ({"alternatives": {"other": LAW * 2}}, "`alternatives\\['other'\\]`: `reference` must sum to one"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_drawn(arguments, message):
    def never(prompt, num_samples):
        raise AssertionError("nothing may be drawn")

    with pytest.raises(ValueError, match=message):
        audit(never, **{"reference": LAW, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "`length` must be a positive integer"),
        ({"length": 2, "prompt": (3,)}, r"`prompt` must have ids in \[0, 3\)"),
        ({"length": 2, "sampling": Sampling(temperature=[1.0, 0.5])}, "one value of each setting"),
    ],
)
def test_a_model_needs_settings_that_fit_it(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        audit(drawing(LAW), model, **arguments)


def test_a_model_with_too_many_sequences_is_refused():
    with pytest.raises(ValueError, match="more than 65536 sequences a probability, too many"):
        audit(drawing(LAW), TableModel(np.full(257, 1 / 257)), length=2)


def test_a_law_over_too_many_cells_is_refused():
    with pytest.raises(ValueError, match="more than 4194304 cells"):
        audit(drawing(LAW), {tuple(range(8)): 1.0})


def test_an_explicit_law_is_cut_at_its_end_tokens():
    law = sequence_law(lambda text: np.array([0.5, 0.5]), (), 2)
    report = audit(lambda prompt, n: [[0], [1, 0], [1, 1], [0]] * (n // 4), law, end_tokens=[0], num_samples=400)
    assert report.num_cells == 3
    assert {cell.tokens: cell.expected for cell in report.worst} == {(0,): 200.0, (1, 0): 100.0, (1, 1): 100.0}
