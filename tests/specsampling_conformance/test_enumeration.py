"""T1's engine: the enumerated law of the real decoder, and what the enumeration must notice."""

import numpy as np
import pytest

from specsampling import Decoder, Label, ModelDrafter, PromptLookup, Purpose, Sampling
from specsampling_conformance._enumeration import (
    BranchingSource,
    LabelReusedError,
    Scenario,
    TooManyPathsError,
    enumerate_laws,
    row_shares,
)
from specsampling_conformance._oracle import lookup_proposal, one_token_law, outcome_law, total_variation
from specsampling_numpy import TableModel


def table(seed, vocab_size=3):
    laws = np.random.default_rng(seed).dirichlet(np.full(vocab_size, 0.8), size=(vocab_size,) * 2)
    return TableModel(laws)


TARGET, DRAFT = table(0), table(1)
DRAFTERS = {
    "model": (lambda: ModelDrafter(DRAFT), DRAFT, None),
    "itself": (lambda: TARGET, TARGET, None),
    "lookup": (PromptLookup, None, lookup_proposal),
    "none": (lambda: None, None, None),
}


@pytest.mark.parametrize("end_tokens", [(), (2,)], ids=["", "ends"])
@pytest.mark.parametrize("schedule", [(2,), (2, 0), (0, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_enumerated_law_is_the_papers(drafter, schedule, end_tokens):
    make, draft, propose = DRAFTERS[drafter]
    scenarios = [Scenario((0, 1, 0), 3), Scenario((2,), 2)]
    laws = enumerate_laws(
        lambda source: Decoder(TARGET, make(), randomness=source, end_tokens=end_tokens),
        scenarios,
        schedule=schedule,
        batch_size=64,
    )
    for law, scenario in zip(laws, scenarios, strict=True):
        expected = outcome_law(
            one_token_law(TARGET),
            None if draft is None else one_token_law(draft),
            scenario.prompt,
            max_new_tokens=scenario.max_new_tokens,
            schedule=schedule,
            end_tokens=end_tokens,
            propose=propose,
        )
        assert abs(law.mass - 1) < 1e-12
        assert total_variation(law.outcomes, expected) < 1e-12
        assert law.drift < 1e-14
        assert sum(expected.values()) == pytest.approx(1, abs=1e-12)


def test_rows_after_their_first_rejection_need_no_branching():
    def laws(every_column):
        make = lambda source: Decoder(TARGET, DRAFT, randomness=source)
        return enumerate_laws(make, [Scenario((1,), 3)], every_column=every_column)[0]

    few, many = laws(False), laws(True)
    assert few.num_paths < many.num_paths
    assert total_variation(few.outcomes, many.outcomes) < 1e-12


def test_a_scenario_with_more_to_explore_may_have_more_rows():
    temperatures, scenario_of = [0.5, 2.0], row_shares([1, 9], 20)
    sampling = Sampling(temperature=[temperatures[number] for number in scenario_of])
    laws = enumerate_laws(
        lambda source: Decoder(TARGET, DRAFT, sampling=sampling, randomness=source),
        [Scenario((1,), 2)] * 2,
        batch_size=20,
        scenario_of=scenario_of,
    )
    for law, temperature in zip(laws, temperatures, strict=True):
        one, two = (one_token_law(model, temperature=temperature) for model in (TARGET, DRAFT))
        expected = outcome_law(one, two, (1,), max_new_tokens=2, schedule=(2,))
        assert total_variation(law.outcomes, expected) < 1e-12


@pytest.mark.parametrize(
    ("weights", "batch_size", "counts"),
    [([1], 5, [5]), ([1, 1], 6, [3, 3]), ([1, 1e9, 1], 192, [1, 190, 1]), ([3, 1], 4, [3, 1]), ([5, 5, 5], 3, [1] * 3)],
)
def test_rows_are_dealt_out_by_weight_and_every_scenario_has_one(weights, batch_size, counts):
    dealt = row_shares(weights, batch_size)
    assert [dealt.count(number) for number in range(len(weights))] == counts


def test_rows_of_a_kind_are_spread_over_the_batch():
    assert row_shares([1, 1], 6) == [0, 1] * 3
    assert "1" in "".join(map(str, row_shares([3, 1], 16)[:8]))


def test_rows_of_one_batch_may_have_settings_of_their_own():
    settings = [{"temperature": 0.0}, {"temperature": 2.0}]
    sampling = Sampling(temperature=[settings[row % 2]["temperature"] for row in range(32)])
    laws = enumerate_laws(
        lambda source: Decoder(TARGET, DRAFT, sampling=sampling, randomness=source),
        [Scenario((1,), 2)] * 2,
        batch_size=32,
    )
    assert laws[0].num_paths < laws[1].num_paths
    assert list(laws[0].tokens.values()) == [1.0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Label(Purpose.ACCEPT, 0), Label(Purpose.ACCEPT, 1)),
        (Label(Purpose.RESAMPLE, 0), Label(Purpose.RESAMPLE, 0)),
    ],
)
def test_a_label_asked_twice_in_a_round_is_noticed(first, second):
    source = BranchingSource()
    round_ = source.begin_round([0], [0], 2)
    weights = np.ones((1, 2))
    ask = lambda label: (
        round_.accept(weights, weights, label)
        if label.purpose == Purpose.ACCEPT
        else round_.categorical(weights, label)
    )
    ask(first)
    with pytest.raises(LabelReusedError):
        ask(second)
    source.begin_round([0], [1], 2).accept(weights, weights, Label(Purpose.ACCEPT, 0))


def test_a_row_that_depends_on_its_company_drifts():
    class Leaky(TableModel):
        def score(self, cache, tokens, /, *, num_logits=None):
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            # The whole batch leaks into every row, a little.
            return logits * (1 + 1e-3 * float(np.mean(np.asarray(tokens)))), cache

    model = Leaky(np.random.default_rng(0).dirichlet(np.full(3, 0.8), size=(3, 3)))
    (law,) = enumerate_laws(lambda source: Decoder(model, DRAFT, randomness=source), [Scenario((1,), 3)], batch_size=32)
    assert law.drift > 1e-6


def test_ways_of_answering_without_end_are_given_up():
    with pytest.raises(TooManyPathsError, match="more than 20"):
        enumerate_laws(lambda source: Decoder(TARGET, DRAFT, randomness=source), [Scenario((0,), 3)], most_paths=20)


def test_draws_for_a_row_past_the_drafts_context_are_not_branched_on():
    def make(source):
        return Decoder(TARGET, ShortTable(DRAFT), randomness=source)

    class ShortTable:
        """The draft with a context of two tokens."""

        def __init__(self, model):
            self.vocab_size, self.max_rollback, self.max_length = model.vocab_size, model.max_rollback, 2
            self.init_cache, self.score, self.rollback = model.init_cache, model.score, model.rollback

    scenarios = [Scenario((0,), 4), Scenario((2, 1, 0), 3)]
    for law, scenario in zip(enumerate_laws(make, scenarios, draft_limit=2), scenarios, strict=True):
        expected = outcome_law(
            one_token_law(TARGET),
            one_token_law(DRAFT),
            scenario.prompt,
            max_new_tokens=scenario.max_new_tokens,
            draft_limit=2,
        )
        assert total_variation(expected, law.outcomes) < 1e-12
