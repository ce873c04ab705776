"""Rounds in which no row has more than one proposed token: the target is fed two or one, and nothing else changes."""

from typing import Any

import numpy as np
import pytest

from specsampling import (
    Context,
    CounterSource,
    Label,
    PromptLookup,
    Proposal,
    Purpose,
    RoundCarry,
    RoundOutput,
    Sampling,
    UniformRandomness,
    decode_round,
    generate,
)
from specsampling_numpy import TableModel

TABLE = np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]])
LOOKAHEAD = 3


class Recording(TableModel):
    """A table model that remembers how wide the blocks were that it gave logits of."""

    def __init__(self, law: Any, **options: Any) -> None:
        super().__init__(law, **options)
        self.widths: list[int] = []

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
        if num_logits != 0:
            self.widths.append(np.asarray(tokens).shape[1])
        return super().score(cache, tokens, num_logits=num_logits)


class Fixed:
    """A drafter whose proposal is given."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal

    def init(self, batch_size: int, capacity: int) -> None:
        return None

    def propose(self, *_: Any) -> tuple[Proposal, None]:
        return self.proposal, None


def run(proposal: Proposal, limits: list[int], seed: int, **options: Any) -> tuple[RoundOutput, list[int]]:
    target = Recording(TABLE)
    rows = len(limits)
    carry = RoundCarry(target.init_cache(rows, 8), None, None)
    context = Context(np.arange(rows * 8, dtype=np.int32).reshape(rows, 8) % 3, np.ones(rows, dtype=np.int32))
    randomness = CounterSource(seed).begin_round(range(rows), [0] * rows, LOOKAHEAD)
    output, _ = decode_round(
        *(target, Fixed(proposal), carry, context, np.array(limits), None, randomness),
        lookahead=LOOKAHEAD,
        **{"sampling": Sampling(), **options},
    )
    return output, target.widths


def proposal_of(num_tokens: list[int], vocab_size: int | None) -> Proposal:
    rows = len(num_tokens)
    probs = None if vocab_size is None else np.full((rows, LOOKAHEAD, vocab_size), 1 / vocab_size)
    return Proposal(np.ones((rows, LOOKAHEAD), dtype=np.int32), np.array(num_tokens), probs)


@pytest.mark.parametrize(
    ("num_tokens", "limits", "width"),
    [
        ([0, 0], [5, 5], 1),
        ([0, 1], [5, 5], 2),
        ([1, 2], [5, 2], 2),
        ([1, 2], [5, 3], LOOKAHEAD + 1),
        ([3, 3], [1, 1], 1),  # the last token of each row
        ([3, 3], [1, 0], 1),
        ([3, 3], [1, 2], 2),
        ([3, 3], [2, 3], LOOKAHEAD + 1),
        ([0, 3], [5, 0], 1),  # the row that proposes has finished
        ([-1, 0], [5, 5], 1),
    ],
    ids=str,
)
def test_no_more_is_fed_than_one_proposed_token_where_no_row_may_use_more(num_tokens, limits, width):
    _, widths = run(proposal_of(num_tokens, None), limits, seed=0)
    assert widths == [width]


@pytest.mark.parametrize("vocab_size", [None, 3, 5])
@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
@pytest.mark.parametrize("num_tokens", [[0, 0, 0], [1, 3, 0]], ids=str)
def test_what_comes_out_is_what_a_full_block_gives(num_tokens, vocab_size, logprobs, monkeypatch):
    proposal = proposal_of(num_tokens, vocab_size)
    options = {"logprobs": logprobs, "validate": True, "sampling": Sampling(temperature=[0.0, 0.7, 1.0])}
    short = [run(proposal, [5, 2, 2], seed, **options) for seed in range(20)]
    monkeypatch.setattr("specsampling._round._num_fed", lambda *_: LOOKAHEAD)
    whole = [run(proposal, [5, 2, 2], seed, **options) for seed in range(20)]
    for (got, few), (expected, block) in zip(short, whole, strict=True):
        assert (few, block) == ([1 + num_tokens[0]], [LOOKAHEAD + 1])
        for name in ("tokens", "num_proposed", "num_accepted", "bad_target_slot", "bad_draft_slot"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
        assert got.is_point_mass == expected.is_point_mass == (vocab_size is None)
        assert got.overlap.shape == expected.overlap.shape == (3, LOOKAHEAD)
        assert (got.logprobs is None) == (logprobs is None)
        if logprobs is not None:
            assert got.logprobs.shape == expected.logprobs.shape == (3, LOOKAHEAD + 1)
            for row, count in enumerate(got.num_accepted):
                np.testing.assert_array_equal(got.logprobs[row, : count + 1], expected.logprobs[row, : count + 1])
        for row, count in enumerate(got.num_proposed):
            np.testing.assert_array_equal(got.overlap[row, :count], expected.overlap[row, :count])
    accepted = sum(got.num_accepted for got, _ in short)
    assert (accepted > 0).any() == (sum(num_tokens) > 0)


def test_the_same_random_decisions_are_asked_for():
    class Counting(UniformRandomness):
        asked: list[tuple[Any, tuple[int, ...]]] = []

        def accept(self, numerator, denominator, label):
            self.asked.append((label, numerator.shape))
            return super().accept(numerator, denominator, label)

    target = Recording(TABLE)
    carry = RoundCarry(target.init_cache(1, 8), None, None)
    decode_round(
        *(target, Fixed(proposal_of([0], None)), carry, Context(np.zeros((1, 8), dtype=np.int32), np.array([1]))),
        *(np.array([4]), None, Counting(np.full((1, 2 * LOOKAHEAD + 1, 3), 0.5), LOOKAHEAD)),
        lookahead=LOOKAHEAD,
        sampling=Sampling(),
    )
    assert target.widths == [1]
    assert Counting.asked == [(Label(Purpose.ACCEPT, 0), (1, LOOKAHEAD))]


def test_counts_on_a_device_are_not_waited_for():
    strict = pytest.importorskip("array_api_strict")
    empty = proposal_of([0, 0], None)
    _, widths = run(empty._replace(num_tokens=strict.asarray(empty.num_tokens)), [5, 5], seed=0)
    assert widths == [LOOKAHEAD + 1]


def test_prompt_lookup_costs_no_wider_blocks_where_nothing_matches():
    target = Recording(np.eye(8)[[1, 2, 3, 4, 5, 6, 7, 0]])  # eight ids in turn: nothing matches before the ninth
    generate(target, PromptLookup(), [0], max_new_tokens=8, lookahead=LOOKAHEAD)
    assert target.widths == [1] * 8
    target.widths.clear()
    result = generate(target, PromptLookup(block_ngram=2), [0], max_new_tokens=13, lookahead=LOOKAHEAD)
    # One token was seen before, then two in a row.
    assert target.widths == [1] * 8 + [2, 3 + 1]
    assert result.tokens == [[(1 + step) % 8 for step in range(13)]]


def test_a_short_round_that_has_no_law_is_flagged():
    bad = Recording(np.full((3, 3), np.nan), logits=True)
    carry = RoundCarry(bad.init_cache(1, 8), None, None)
    context = Context(np.zeros((1, 8), dtype=np.int32), np.array([1]))
    output, _ = decode_round(
        *(bad, Fixed(proposal_of([0], None)), carry, context, np.array([4]), None),
        CounterSource(0).begin_round([0], [0], LOOKAHEAD),
        lookahead=LOOKAHEAD,
        sampling=Sampling(),
    )
    assert output.bad_target_slot.tolist() == [0]
