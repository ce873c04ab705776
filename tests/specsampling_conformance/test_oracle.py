"""What the law should be: hand-made cases of the oracle that everything else is held against."""

import itertools

import numpy as np
import pytest

from specsampling import Context, PromptLookup, Sampling, to_probs
from specsampling_conformance._oracle import (
    Scores,
    keeps_ids,
    lookup_proposal,
    one_token_law,
    outcome_law,
    reference_probs,
    sequence_law,
    total_variation,
)
from specsampling_numpy import TableModel


def fixed(*laws):
    return lambda text: np.array(laws[min(len(text) - 1, len(laws) - 1)])


def test_one_round_of_two_tokens_by_hand():  # fault #1
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    law = outcome_law(fixed(p), fixed(q), (0,), max_new_tokens=2, schedule=(1,))
    tokens = {}
    for (text, rounds), probability in law.items():
        tokens[text] = tokens.get(text, 0.0) + probability
        # A rejection (mass 0.3) is always replaced by id 0, and then a second round is needed.
        assert rounds == 1 or text[0] == 0
    assert sum(probability for (_, rounds), probability in law.items() if rounds == 2) == pytest.approx(0.3)
    for first, second in itertools.product(range(3), repeat=2):
        assert tokens[first, second] == pytest.approx(p[first] * p[second])


def test_without_a_draft_every_token_takes_a_round():
    law = outcome_law(fixed([0.5, 0.5]), None, (0,), max_new_tokens=3, schedule=(2,))
    assert {rounds for _, rounds in law} == {3}
    assert len(law) == 8


def test_chosen_tokens_are_kept_with_the_targets_probability():
    law = outcome_law(
        fixed([0.75, 0.25]), None, (0,), max_new_tokens=2, schedule=(1,), propose=lambda text, k: (1,) * k
    )
    assert law == pytest.approx({((1, 0), 1): 0.1875, ((1, 1), 1): 0.0625, ((0, 0), 2): 0.5625, ((0, 1), 2): 0.1875})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.5}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 0.5, "top_p": 0.6}, [16 / 25, 9 / 25, 0, 0]),
    ],
    ids=str,
)
def test_settings_by_hand(settings, expected):
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(reference_probs(logits, **settings), expected, atol=1e-12)
    if settings not in ({"top_p": 0.7}, {"min_p": 0.5}):  # on the edge rounding decides
        np.testing.assert_allclose(to_probs(logits[None], Sampling(**settings))[0], expected, atol=1e-12)


def test_lookup_says_what_prompt_lookup_says():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = tuple(rng.integers(0, 3, size=rng.integers(1, 9)).tolist())
        drafter = PromptLookup()
        proposal, _ = drafter.propose(
            drafter.init(1, 16), Context(np.array([text]), np.array([len(text)])), 3, Sampling(), None
        )
        assert tuple(proposal.tokens[0, : proposal.num_tokens[0]].tolist()) == lookup_proposal(text, 3)


def test_scores_are_those_of_single_tokens_and_remembered():
    calls = []

    class Counting(TableModel):
        def score(self, cache, tokens, /, *, num_logits=None):
            calls.append(np.shape(tokens))
            return super().score(cache, tokens, num_logits=num_logits)

    scores = Scores(Counting(np.eye(3)[[1, 2, 0]]))
    assert scores.law()((0, 1)).tolist() == [0, 0, 1]
    assert calls == [(1, 1)] * 2
    scores.law()((0,))
    assert len(calls) == 2


def test_sequence_law_is_the_product_of_its_conditionals():
    model = TableModel(np.random.default_rng(0).dirichlet(np.ones(3), size=3))
    law = one_token_law(model)
    joint = sequence_law(law, (2,), 3)
    assert joint.shape == (3, 3, 3)
    assert joint[1, 0, 2] == pytest.approx(law((2,))[1] * law((2, 1))[0] * law((2, 1, 0))[2])


def test_total_variation_counts_missing_cells():
    assert total_variation({(0,): 1.0}, {(1,): 1.0}) == 1.0
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.75, (1,): 0.25}) == 0.25


def test_stop_sequences_end_a_row_in_its_new_tokens_only():
    law = outcome_law(fixed([0.5, 0.5]), None, (1,), max_new_tokens=3, stop_sequences=((1, 0),))
    texts = {tokens for tokens, _ in law}
    assert (1, 0) in texts  # complete after two
    assert {(0, 0, 1), (0, 1, 0)} <= texts  # the prompt's 1 before the first 0 does not count
    assert sum(law.values()) == pytest.approx(1)


def test_banned_ids_have_no_probability_until_the_text_is_long_enough():
    scores = Scores(TableModel(np.array([0.5, 0.3, 0.2])))
    law = scores.law(banned=(0,), until=2)
    np.testing.assert_allclose(law((1,)), [0, 0.6, 0.4])
    np.testing.assert_allclose(law((1, 1)), [0.5, 0.3, 0.2])
    # Before any filter: the likeliest id that is left.
    np.testing.assert_array_equal(scores.law(banned=(0,), until=2, top_k=1)((1,)), [0, 1, 0])


def test_ids_that_one_model_lacks_have_probability_zero_in_its_law():
    p, wide, narrow = [0.5, 0.3, 0.2], [0.1, 0.3, 0.2, 0.4], [0.9, 0.1]
    for q, kept in ((wide, 0.1 + 0.3 + 0.2), (narrow, 0.5 + 0.1)):
        law = outcome_law(fixed(p), fixed(q), (0,), max_new_tokens=2, schedule=(1,))
        assert sum(chance for (_, rounds), chance in law.items() if rounds == 1) == pytest.approx(kept)
        for first in range(3):
            found = sum(chance for (tokens, _), chance in law.items() if tokens[0] == first)
            assert found == pytest.approx(p[first])


@pytest.mark.parametrize(("limit", "rounds"), [(0, {3}), (1, {2}), (2, {1}), (9, {1})])
def test_a_draft_has_no_law_after_texts_longer_than_its_context(limit, rounds):
    # A draft that is always right: one round for three tokens, if it may draft two after a prompt of one.
    law = outcome_law(fixed([0.5, 0.5]), fixed([0.5, 0.5]), (0,), max_new_tokens=3, schedule=(2,), draft_limit=limit)
    assert {number for _, number in law} == rounds


@pytest.mark.parametrize(
    ("logits", "delta", "settings", "kept"),
    [
        ([1.0, 0.0], 0.49, {"temperature": 0.0}, True),
        ([1.0, 0.0], 0.5, {"temperature": 0.0}, False),
        ([2.0, 1.0, 0.0], 0.49, {"top_k": 2}, True),
        ([2.0, 1.0, 1.0], 1e-9, {"top_k": 2}, False),
        ([2.0, 1.0, 1.0], 0.0, {"top_k": 3}, True),
        (np.log([0.5, 0.3, 0.2]), 0.01, {"top_p": 0.7}, True),
        (np.log([0.5, 0.3, 0.2]), 0.01, {"top_p": 0.799}, False),
        (np.log([0.5, 0.3, 0.2]), 0.01, {"top_p": 0.501}, False),
        (np.log([0.4, 0.3, 0.3]), 0.01, {"top_p": 0.5}, False),  # tied with the last
        (np.log([0.5, 0.3, 0.2]), 0.01, {"min_p": 0.5}, True),
        (np.log([0.5, 0.3, 0.2]), 0.01, {"min_p": 0.6}, False),
        (np.log([0.5, 0.3, 0.2]), 0.01, {"temperature": 0.01, "min_p": 0.5}, True),
        (np.log([0.5, 0.3, 0.2]), 0.3, {"temperature": 0.9}, True),
    ],
)
def test_settings_keep_their_ids_when_no_edge_is_within_reach(logits, delta, settings, kept):
    assert keeps_ids(np.array(logits), delta, **settings) is kept
