"""Read by mypy and pyright, never run: callers get the types that the docstrings promise."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, assert_type

import numpy as np

import specsampling
from specsampling import (
    BackendStatus,
    Context,
    CounterSource,
    Decoder,
    DecoderState,
    Drafter,
    Generation,
    Model,
    ModelDrafter,
    PromptLookup,
    Proposal,
    Randomness,
    RandomSource,
    RoundInfo,
    Sampling,
    Stats,
    StreamEvent,
    Verdict,
)
from specsampling_numpy import NumpyModel, TableModel


def results_are_typed(target: TableModel) -> None:
    result = specsampling.generate(target, PromptLookup(), [[1, 2]], max_new_tokens=[3], sampling=Sampling(top_k=2))
    assert_type(result, Generation)
    assert_type(result.tokens, list[list[int]])
    assert_type(result.from_draft, list[list[bool]])
    assert_type(result.logprobs, list[list[float]] | None)
    assert_type(result.seed, int | None)
    assert_type(result.stats, Stats)
    assert_type(result.stats.acceptance_rate, float | None)


def events_are_typed(target: TableModel) -> Generator[StreamEvent, None, Generation]:
    for event in specsampling.stream(target, None, [1], max_new_tokens=3, logprobs="raw"):
        assert_type(event, StreamEvent)
        assert_type(event.tokens, list[int])
    return assert_type((yield from specsampling.stream(target, None, [1], max_new_tokens=3)), Generation)


def a_round_is_typed(target: TableModel) -> None:
    decoder = Decoder(target, target, lookahead=2)
    state = decoder.init([[1]], max_new_tokens=4)
    assert_type(state, DecoderState)
    assert_type(decoder.step(state), tuple[DecoderState, RoundInfo])


def what_is_shipped_satisfies_the_protocols() -> None:
    model: Model[Any] = TableModel(np.ones(3))
    model = NumpyModel(Path("checkpoint"))
    drafter: Drafter[Any] = ModelDrafter(model)
    drafter = PromptLookup()
    source: RandomSource = CounterSource(None)
    specsampling.generate(model, drafter, [1], max_new_tokens=1, randomness=source)


def verification_is_typed(proposal: Proposal, randomness: Randomness) -> None:
    assert_type(specsampling.verify(proposal, np.ones((1, 2, 3)), randomness), Verdict)


def loading_is_typed() -> None:
    assert_type(specsampling.load_model("numpy", specsampling.bundled("draft"), depth=2), Model[Any])
    assert_type(specsampling.bundled("target"), Path)
    assert_type(specsampling.available_backends(), tuple[BackendStatus, ...])


class EveryOther:
    """A drafter of somebody else's, without a base class."""

    def init(self, batch_size: int, capacity: int) -> int:
        return 0

    def propose(
        self, state: int, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, int]:
        return Proposal(np.zeros((1, 0)), np.zeros(1), None), state


class NotADrafter:
    def propose(self) -> None: ...


def drafters_are_structural(target: TableModel) -> None:
    drafter: Drafter[int] = EveryOther()
    specsampling.generate(target, drafter, [1], max_new_tokens=1)
    specsampling.generate(target, NotADrafter(), [1], max_new_tokens=1)  # type: ignore[arg-type]


def lookahead_may_be_a_number_only_or_declare_its_choices(target: TableModel) -> None:
    undeclared: Callable[[DecoderState], int] = lambda state: 2
    Decoder(target, target, lookahead=undeclared)  # type: ignore[arg-type]


def options_are_keywords(target: TableModel) -> None:
    Sampling(0.5)  # type: ignore[call-arg]
    specsampling.generate(target, None, [1], 3)  # type: ignore[call-arg]
