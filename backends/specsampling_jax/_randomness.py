"""A `specsampling.Randomness` inside a trace that is answered by one on the host, in order."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specsampling import Array, Label, Randomness

__all__ = ["AskingRandomness", "Desk"]


class Desk:
    """Where compiled code leaves its questions: it outlives a round, whose randomness sits behind it for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._randomness: Randomness | None = None
        self._error: Exception | None = None

    @contextlib.contextmanager
    def open(self, randomness: Randomness) -> Iterator[None]:
        """Let `randomness` answer whatever is asked meanwhile, and raise what it raised; for one thread at a time."""
        with self._lock:
            self._randomness, self._error = randomness, None
            try:
                yield
            finally:
                self._randomness = None
            if self._error is not None:
                raise self._error

    def ask(self, question: str, label: Label, shape: tuple[int, ...], dtype: Any, *weights: Any) -> Any:
        """Answer a question on the host."""
        try:
            if self._error is None:
                answer = getattr(self._randomness, question)(*(np.asarray(x) for x in weights), label)
                return np.asarray(answer, dtype).reshape(shape)
        except Exception as error:  # raised again by whoever runs the compiled code
            self._error = error
        return np.zeros(shape, dtype)


class AskingRandomness:
    """Passes every question on to a desk by an ordered callback; lives inside a trace."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        """Ask for booleans ``(B, K)``."""
        return self._ask("accept", label, numerator.shape, np.bool_, numerator, denominator)

    def categorical(self, weights: Array, label: Label) -> Array:
        """Ask for an id per row, ``(B,)``."""
        return self._ask("categorical", label, weights.shape[:1], np.int32, weights)

    def _ask(self, question: str, label: Label, shape: tuple[int, ...], dtype: Any, *weights: Array) -> Array:
        # NumPy has no bfloat16.
        weights = tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in weights)
        ask = functools.partial(self._desk.ask, question, label, shape, dtype)
        answer: Any = jax.eval_shape(lambda: jnp.zeros(shape, dtype))
        return io_callback(ask, answer, *weights, ordered=True)
