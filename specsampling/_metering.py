"""Proxies that time a model's calls, so that the round itself stays a pure function.

They have what :func:`specsampling.decode_round` asks of a model and of a drafter, and nothing else.
"""

import time
from typing import Any

from specsampling._drafting import Context, Drafter
from specsampling._model import Array, Model
from specsampling._random import Randomness
from specsampling._rejection import Proposal
from specsampling._sampling import Sampling

__all__ = ["MeteredDrafter", "MeteredModel"]


class MeteredModel:
    """A model whose `score` and `rollback` add their wall time to `seconds`."""

    def __init__(self, model: Model[Any]) -> None:
        self._model = model
        self.seconds = 0.0
        self.vocab_size = model.vocab_size

    def score(self, cache: Any, tokens: Array, /, *, num_logits: int | None = None) -> tuple[Array, Any]:
        """Score and time it."""
        start = time.perf_counter()
        # Without the keyword where it is the default: an adapter under test sees the call that users make.
        options = {} if num_logits is None else {"num_logits": num_logits}
        result = self._model.score(cache, tokens, **options)
        self.seconds += time.perf_counter() - start
        return result

    def rollback(self, cache: Any, lengths: Array, /) -> Any:
        """Roll back and time it."""
        start = time.perf_counter()
        cache = self._model.rollback(cache, lengths)
        self.seconds += time.perf_counter() - start
        return cache


class MeteredDrafter:
    """A drafter whose `propose` adds its wall time to `seconds`."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self._drafter = drafter
        self.seconds = 0.0

    @property
    def num_calls(self) -> int:
        """Scoring calls of the drafter's model so far, 0 for a drafter that has none."""
        return getattr(self._drafter, "num_calls", 0)

    def propose(
        self, state: Any, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, Any]:
        """Propose and time it."""
        start = time.perf_counter()
        result = self._drafter.propose(state, context, lookahead, sampling, randomness)
        self.seconds += time.perf_counter() - start
        return result
