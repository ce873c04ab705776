"""What a model computes, as functions that jit can tell apart, and the model contract over them inside a trace."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specsampling import Array, CapabilityError

from ._checks import checked_num_logits
from ._sharding import constrained

__all__ = [
    "COMPILER_OPTIONS",
    "Functions",
    "JaxCache",
    "TracedModel",
    "capacity_bucket",
    "forward",
    "is_traced",
    "width_bucket",
]

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""A number that was rounded to bfloat16 stays rounded. Left to itself, XLA keeps some wider inside a fusion, and the
logits of a text then depend on what is compiled around it."""


class JaxCache(NamedTuple):
    """A model's memory and how much of it each row uses; a pytree.

    Attributes
    ----------
    arrays : pytree
        What the model's ``init_cache_fn`` made. The next `score` takes it over: buffers are donated.
    lengths : array
        Integers of shape ``(B,)``: tokens in each row. NumPy, so that the host can refuse what does not fit without
        waiting for a device; traced where the call is.
    capacity : int
        Tokens that each row has room for. The arrays may hold more, because shapes come in buckets.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_jax import JaxCache, load
    >>> model = load(specsampling.bundled("draft"))
    >>> cache = model.init_cache(batch_size=2, capacity=40)
    >>> isinstance(cache, JaxCache), cache.lengths.tolist(), cache.capacity
    (True, [0, 0], 40)
    >>> keys, values = cache.arrays[0]  # of the first layer: (B, kv_heads, positions, head_dim)
    >>> keys.shape[0], keys.shape[2]
    (2, 64)
    """

    arrays: Any
    lengths: Array
    capacity: int


class Functions(NamedTuple):
    """What a model computes, apart from its weights; static under jit, so that equal ones share compiled code.

    Attributes
    ----------
    apply_fn, head_fn, vocab_size, max_length
        As `JaxModel` takes them.
    sharding : jax.sharding.NamedSharding or None
        Of every array of the cache; None where all is on one device.
    """

    apply_fn: Callable[..., Any]
    head_fn: Callable[..., Any] | None
    vocab_size: int
    max_length: int | None
    sharding: Any


class TracedModel:
    """A model inside a trace: the three methods of the contract, nothing looked at."""

    max_rollback: int | None = None
    max_length: int

    def __init__(self, functions: Functions, params: Any) -> None:
        self.functions, self.params = functions, params
        self.vocab_size = functions.vocab_size
        if functions.max_length is not None:
            self.max_length = functions.max_length

    def init_cache(self, batch_size: int, capacity: int) -> JaxCache:
        """Refuse: buffers that are donated from call to call are made outside."""
        raise CapabilityError(
            f"a cache ({batch_size} rows of {capacity} tokens) cannot be made inside a trace: call `init_cache` "
            "before, and pass it in"
        )

    def score(self, cache: JaxCache, tokens: Array, /, *, num_logits: int | None = None) -> tuple[Array, JaxCache]:
        """Append a block; see `JaxModel.score`. Whether it fits is not looked at."""
        length = tokens.shape[1]
        wanted = checked_num_logits(num_logits, length)
        logits, arrays = forward(self.functions, self.params, cache.arrays, cache.lengths, tokens, length, wanted)
        return logits, cache._replace(arrays=arrays, lengths=cache.lengths + length)

    def rollback(self, cache: JaxCache, lengths: Array, /) -> JaxCache:
        """Keep the first tokens of each row; see `JaxModel.rollback`. Whether they are there is not looked at."""
        return cache._replace(lengths=jnp.asarray(lengths, jnp.int32))


def capacity_bucket(capacity: int) -> int:
    """Return how many tokens are allocated where `capacity` are asked for: at most a quarter or 32 more.

    Examples
    --------
    >>> from specsampling_jax._functions import capacity_bucket
    >>> [capacity_bucket(capacity) for capacity in (1, 33, 1000, 1100)]
    [32, 64, 1024, 1280]
    """
    step = max(32, 1 << max(capacity.bit_length() - 3, 0))
    return max(1, -(-capacity // step)) * step


def width_bucket(length: int) -> int:
    """Return the width that a block of `length` tokens is padded to: 0, 1, 2, 8, or the next power of two.

    One compilation saved is worth hundreds of calls: on a CPU eight tokens of a model of 135 M parameters took a tenth
    to a fifth longer than three or four. Two took three quarters as long, and every round of K = 1 has them.
    """
    return length if length <= 2 else max(8, 1 << (length - 1).bit_length())


def is_traced(x: Any, cache: JaxCache) -> bool:
    """Return whether a call happens inside a trace, where no value can be looked at."""
    return isinstance(x, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer)


def forward(
    functions: Functions, params: Any, arrays: Any, lengths: Array, tokens: Array, length: Array, num_logits: int
) -> tuple[Array, Any]:
    """Append a block, of which the first `length` columns are real, and return the logits of the last of these."""
    hidden, arrays = functions.apply_fn(params, arrays, tokens.astype(jnp.int32), lengths)
    if functions.sharding is not None:  # so that what comes out can be donated to the next call
        arrays = constrained(arrays, functions.sharding)
    if not isinstance(length, int) or num_logits < length:
        # A padded block may have fewer real columns than are computed: the caller takes the last ones.
        columns = jnp.maximum(length - num_logits + jnp.arange(num_logits), 0)
        hidden = jnp.take(hidden, columns, axis=1)
    return hidden if functions.head_fn is None else functions.head_fn(params, hidden), arrays
