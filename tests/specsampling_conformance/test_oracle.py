"""What the law should be: hand-made cases of the oracle that everything else is held against."""

import itertools

import numpy as np
import pytest

from specsampling import Context, PromptLookup, Sampling, to_probs
from specsampling_conformance._oracle import (
    Scores,
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
