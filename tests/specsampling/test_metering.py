import time
from typing import Any

import numpy as np

from specsampling import Context, CounterSource, ModelDrafter, PromptLookup, Sampling
from specsampling._metering import MeteredDrafter, MeteredModel
from specsampling_numpy import TableModel


class Slow(TableModel):
    """Takes 10 ms to score and 5 ms to roll back; says which keywords it was called with."""

    def __init__(self) -> None:
        super().__init__([0.5, 0.5])
        self.keywords: list[dict[str, Any]] = []

    def score(self, cache: Any, tokens: Any, /, **keywords: Any) -> Any:
        self.keywords.append(keywords)
        time.sleep(0.01)
        return super().score(cache, tokens, **keywords)

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        time.sleep(0.005)
        return super().rollback(cache, lengths)


def test_model_is_timed_and_called_as_users_call_it():
    model = Slow()
    metered = MeteredModel(model)
    assert metered.vocab_size == 2
    logits, cache = metered.score(model.init_cache(1, 4), np.array([[0, 1]]))
    assert logits.shape == (1, 2, 2)
    assert metered.seconds >= 0.01
    before = metered.seconds
    cache = metered.rollback(cache, np.array([1]))
    assert metered.seconds >= before + 0.005
    logits, _ = metered.score(cache, np.array([[0, 1]]), num_logits=1)
    assert logits.shape == (1, 1, 2)
    assert metered.seconds >= before + 0.015
    assert model.keywords == [{}, {"num_logits": 1}]


def test_drafter_is_timed_and_its_calls_are_counted():
    drafter = ModelDrafter(Slow())
    metered, state = MeteredDrafter(drafter), drafter.init(1, 8)
    assert (metered.num_calls, metered.seconds) == (0, 0.0)
    context = Context(np.zeros((1, 8), np.int32), np.array([1], np.int32))
    randomness = CounterSource(0).begin_round([0], [0], 2)
    proposal, _ = metered.propose(state, context, 2, Sampling(), randomness)
    assert proposal.tokens.shape == (1, 2)
    assert metered.num_calls == 2
    assert metered.seconds >= 0.02


def test_drafter_without_a_model_makes_no_calls():
    assert MeteredDrafter(PromptLookup()).num_calls == 0
