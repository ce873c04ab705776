"""A `specsampling.Randomness` inside a trace that is answered by one on the host."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specsampling import Array, Label, Randomness

__all__ = ["AskingRandomness", "answering"]


class _Answerer:
    """Answers one round's questions on the host; what an answer raises is kept for whoever runs the round."""

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self.error: Exception | None = None

    def ask(self, question: str, label: Label, shape: tuple[int, ...], dtype: Any, weights: Any) -> Any:
        if self.error is None:
            try:
                answer = getattr(self._randomness, question)(*(np.asarray(x) for x in weights), label)
                return np.asarray(answer, dtype).reshape(shape)
            except Exception as error:  # raised again by `answering`
                self.error = error
        return np.zeros(shape, dtype)


# Compiled code is shared, so it does not know whom to ask: the round's id comes in as an argument.
_answerers: dict[int, _Answerer] = {}
_round_ids = itertools.count()


@contextlib.contextmanager
def answering(randomness: Randomness) -> Iterator[Any]:
    """Let `randomness` answer what compiled code asks under the round's id given, and raise what it raised."""
    round_id = next(_round_ids) % 2**31
    answerer = _answerers[round_id] = _Answerer(randomness)
    try:
        yield np.int32(round_id)
    finally:
        del _answerers[round_id]
    if answerer.error is not None:
        raise answerer.error


class AskingRandomness:
    """Passes every question on to the host; lives inside a trace.

    Parameters
    ----------
    round_id : array
        Under which `answering` gives the answers.
    ordered : bool
        Whether callbacks keep their order by themselves. On more than one device JAX cannot do that; there every
        question waits for the answers it depends on, as one about a slot does for the slots before.
    """

    def __init__(self, round_id: Array, *, ordered: bool) -> None:
        self._round_id, self._ordered = round_id, ordered

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        """Ask for booleans ``(B, K)``."""
        return self._ask("accept", label, numerator.shape, np.bool_, numerator, denominator)

    def categorical(self, weights: Array, label: Label) -> Array:
        """Ask for an id per row, ``(B,)``."""
        return self._ask("categorical", label, weights.shape[:1], np.int32, weights)

    def _ask(self, question: str, label: Label, shape: tuple[int, ...], dtype: Any, *weights: Array) -> Array:
        # NumPy has no bfloat16.
        weights = tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in weights)
        answer = jax.ShapeDtypeStruct(shape, dtype)
        ask = functools.partial(_ask_host, question, label, shape, dtype)
        return io_callback(ask, answer, self._round_id, *weights, ordered=self._ordered)


def _ask_host(question: str, label: Label, shape: tuple[int, ...], dtype: Any, round_id: Any, *weights: Any) -> Any:
    return _answerers[int(round_id)].ask(question, label, shape, dtype, weights)
