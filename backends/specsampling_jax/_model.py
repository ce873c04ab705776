"""`JaxModel`: the model contract over pure functions, jitted once per bucket of shapes."""

import functools
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsampling import Array, Capabilities, CapabilityError, DecodeRound, Drafter, Sampling
from specsampling_numpy import LlamaConfig, read_config

from ._checks import checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes, on_host
from ._llama import LlamaDecoder, read_params
from ._randomness import Desk

__all__ = ["Functions", "JaxCache", "JaxModel", "TracedModel", "capacity_bucket", "is_traced", "width_bucket"]

_DTYPES = ("float32", "bfloat16", "float64")


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
    """

    arrays: Any
    lengths: Array
    capacity: int


class Functions(NamedTuple):
    """What a model computes, apart from its weights: hashes by identity, and is static under jit."""

    apply_fn: Callable[..., Any]
    head_fn: Callable[..., Any] | None
    vocab_size: int
    max_length: int | None


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
        logits, arrays = _forward(self.functions, self.params, cache.arrays, cache.lengths, tokens, length, wanted)
        return logits, cache._replace(arrays=arrays, lengths=cache.lengths + length)

    def rollback(self, cache: JaxCache, lengths: Array, /) -> JaxCache:
        """Keep the first tokens of each row; see `JaxModel.rollback`. Whether they are there is not looked at."""
        return cache._replace(lengths=jnp.asarray(lengths, jnp.int32))


class JaxModel:
    """A causal language model given by pure functions, its cache preallocated and donated from call to call.

    Parameters
    ----------
    apply_fn : callable
        ``apply_fn(params, cache, tokens, lengths) -> (logits, cache)``: appends a block of int32 `tokens` ``(B, T)`` to
        rows that hold ``lengths[b]`` tokens, and returns logits ``(B, T, V)``. Position t of row b is position
        ``lengths[b] + t`` of the text, and attends to no position after itself. What the cache holds past a row's
        length is stale and must not be read. Pure, and traced.
    params : pytree
        The weights.
    init_cache_fn : callable
        ``init_cache_fn(batch_size, capacity) -> cache``: a pytree of arrays.
    vocab_size : int
        Number of token ids, V.
    head_fn : callable, optional
        ``head_fn(params, hidden) -> logits`` where `apply_fn` returns hidden states ``(B, T, …)`` in place of logits:
        the head is then computed only for the positions asked for, and never for a prompt.
    max_length : int, optional
        Context limit to declare; None declares none.
    batch_axis : int, default: 0
        The axis of the cache's arrays that `select` picks rows from.
    device : jax.Device, optional
        Where caches are made; None leaves it to JAX.
    dtypes : tuple of str, default: ("float32",)
        Dtypes to declare.

    Attributes
    ----------
    vocab_size : int
        Number of token ids, V.
    max_length : int
        Context limit; absent where none is declared.
    max_rollback : None
        Rows go back any number of tokens.
    capabilities : Capabilities
        What the conformance suite may ask for.

    Notes
    -----
    Shapes come in buckets: capacities in steps of a quarter of a power of two (at least 32), blocks in powers of two.
    So an eager call compiles a few times in all. Padding is written past the block, where nothing reads it.

    Lengths are kept on the host. A block that does not fit, or a rollback to more than a row holds, is refused there:
    XLA would clamp or drop the index. Inside a caller's own ``jax.jit`` nothing can be looked at, and both are
    undefined.

    Examples
    --------
    A model that repeats itself: the logits of the next token favour the one before.

    >>> import jax, jax.numpy as jnp
    >>> from specsampling_jax import JaxModel
    >>> def apply(params, cache, tokens, lengths):
    ...     return params["scale"] * jax.nn.one_hot(tokens, 5), cache
    >>> model = JaxModel(apply, {"scale": jnp.float32(3)}, lambda batch_size, capacity: jnp.zeros(batch_size), 5)
    >>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=8), [[4, 2]], num_logits=1)
    >>> logits.tolist(), cache.lengths.tolist()
    ([[[0.0, 0.0, 3.0, 0.0, 0.0]]], [2])
    """

    max_rollback: int | None = None
    max_length: int

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: Any,
        init_cache_fn: Callable[[int, int], Any],
        vocab_size: int,
        *,
        head_fn: Callable[..., Any] | None = None,
        max_length: int | None = None,
        batch_axis: int = 0,
        device: Any = None,
        dtypes: tuple[str, ...] = ("float32",),
    ) -> None:
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_length": max_length}
        for name, value in sizes.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}")
        for name, function in (("apply_fn", apply_fn), ("init_cache_fn", init_cache_fn), ("head_fn", head_fn)):
            if not callable(function) and not (name == "head_fn" and function is None):
                raise TypeError(f"`{name}` must be callable, got {function!r}")
        self.functions = Functions(apply_fn, head_fn, vocab_size, max_length)
        self.params = params
        self.vocab_size = vocab_size
        if max_length is not None:
            self.max_length = max_length
        self.capabilities = Capabilities(dtypes=dtypes, select=True, compile_round=True)
        self.device = device
        self.desk = Desk()
        self._init_cache_fn = init_cache_fn
        self._batch_axis = batch_axis

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None
    ) -> "JaxModel":
        """Load a Llama-family checkpoint (Llama, Mistral, Qwen2, Qwen3).

        Parameters
        ----------
        checkpoint : path
            Directory with config.json and model.safetensors (or shards and their index).
        dtype : str
            "float32", "bfloat16", or "float64" where ``jax_enable_x64`` is set: of weights, arithmetic and cache.
            Normalisation, softmax, rotations and logits are never in less than float32.
        device : str, optional
            A platform of JAX, with an index or without: ``"cpu"``, ``"cuda:1"``. None leaves it to JAX.

        Returns
        -------
        JaxModel
            The model, ready to score.

        Raises
        ------
        FileNotFoundError
            If the directory or a file in it is missing.
        ValueError
            If `dtype` or `device` is another, or the files do not agree with each other.
        CapabilityError
            If the architecture is none of those supported, or float64 is not enabled.

        Examples
        --------
        >>> import specsampling
        >>> from specsampling_jax import JaxModel
        >>> JaxModel.from_pretrained(specsampling.bundled("target")).max_length
        1024
        """
        if dtype not in _DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        has_float64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        if dtype == "float64" and not has_float64:
            raise CapabilityError(
                '`dtype` = "float64" needs 64-bit JAX: call jax.config.update("jax_enable_x64", True) before anything '
                "else, or set JAX_ENABLE_X64=1"
            )
        where = _device(device)
        path = Path(checkpoint)
        config = read_config(path)
        numbers = jnp.dtype(dtype)
        decoder = _decoder(config)
        return cls(
            decoder.apply,
            read_params(path, config, numbers, where),
            functools.partial(decoder.init_cache, dtype=numbers),
            config.vocab_size,
            head_fn=decoder.head,
            max_length=config.max_position_embeddings,
            device=where,
            dtypes=_DTYPES if has_float64 else _DTYPES[:-1],
        )

    def init_cache(self, batch_size: int, capacity: int) -> JaxCache:
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row has room for; may exceed `max_length`, as padding does.

        Returns
        -------
        JaxCache
            No row holds a token yet.

        Raises
        ------
        ValueError
            If either is negative.
        CapabilityError
            If the device has not that much memory.
        """
        checked_sizes(batch_size, capacity)
        size = capacity_bucket(capacity)
        self._check_memory(batch_size, size)
        with jax.default_device(self.device):
            arrays = self._init_cache_fn(batch_size, size)
        if self.device is not None:
            arrays = jax.device_put(arrays, self.device)
        return JaxCache(arrays, np.zeros(batch_size, np.int32), capacity)

    def score(self, cache: JaxCache, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Array, JaxCache]:
        """Append a block to every row and return the logits of its last positions.

        Parameters
        ----------
        cache : JaxCache
            Donated; use the one returned.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``; T may be 0. Ids that are on a device already are not
            fetched to be looked at.
        num_logits : int, optional
            How many of the block's last positions are wanted; None is all T, 0 none.

        Returns
        -------
        logits : array
            Floats of shape ``(B, num_logits, V)``: row t is the law of the token *after* position t.
        cache : JaxCache
            Holding T more tokens in every row.

        Raises
        ------
        ValueError
            If `tokens` or `num_logits` are out of range or of the wrong shape.
        CacheError
            If a row would exceed the capacity; the cache is then as it was.
        """
        if is_traced(tokens, cache):
            return TracedModel(self.functions, self.params).score(cache, jnp.asarray(tokens), num_logits=num_logits)
        lengths = on_host(cache.lengths)
        block = checked_block(tokens, lengths, int(cache.capacity), self.vocab_size)
        length = block.shape[1]
        wanted = checked_num_logits(num_logits, length)
        # Padding must not reach past the arrays either: an `apply_fn` may write with an operation that clamps.
        width = width_bucket(length)
        if len(lengths) and int(lengths.max()) + width > capacity_bucket(int(cache.capacity)):
            width = length
        computed = min(width, width_bucket(wanted))
        if width > length:
            xp = np if isinstance(block, np.ndarray) else jnp
            block = xp.pad(block, ((0, 0), (0, width - length)))
        if isinstance(block, np.ndarray):
            block = block.astype(np.int32, copy=False)
        logits, arrays = _score(
            self.functions, self.params, cache.arrays, lengths, block, np.int32(length), num_logits=computed
        )
        if computed > wanted:
            logits = logits[:, computed - wanted :]
        return logits, JaxCache(arrays, (lengths + length).astype(np.int32), cache.capacity)

    def rollback(self, cache: JaxCache, lengths: Any, /) -> JaxCache:
        """Keep the first ``lengths[b]`` tokens of row b.

        Nothing moves: what lies past a row's length is never attended to, and is overwritten by the next block.

        Parameters
        ----------
        cache : JaxCache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds.

        Returns
        -------
        JaxCache
            Shares its memory with `cache`.

        Raises
        ------
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        """
        if is_traced(lengths, cache):
            return TracedModel(self.functions, self.params).rollback(cache, lengths)
        return cache._replace(lengths=checked_lengths(lengths, on_host(cache.lengths)))

    def select(self, cache: JaxCache, rows: Any) -> JaxCache:
        """Return a cache of some rows, in the order given.

        Parameters
        ----------
        cache : JaxCache
            Must not be used again.
        rows : array
            Integers of shape ``(R,)``, each in ``[0, B)``; a row named twice is copied twice.

        Returns
        -------
        JaxCache
            Of R rows, with memory of its own.

        Raises
        ------
        ValueError
            If a row does not exist.
        """
        lengths = on_host(cache.lengths)
        chosen = checked_rows(rows, len(lengths))
        return cache._replace(arrays=_take(cache.arrays, chosen, axis=self._batch_axis), lengths=lengths[chosen])

    def compile_round(self, drafter: Drafter[Any] | None, sampling: Sampling, lookahead: int) -> DecodeRound:
        """Return `specsampling.decode_round`, compiled; see `specsampling_jax.compile_round`."""
        from ._round import compile_round

        return compile_round(self, drafter, sampling, lookahead)

    def _check_memory(self, batch_size: int, capacity: int) -> None:
        """Refuse a cache that is larger than all memory of the device, before any of it is asked for."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda: self._init_cache_fn(batch_size, capacity)))
        needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        device = jax.devices()[0] if self.device is None else self.device
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and needed > limit:
            raise CapabilityError(
                f"a cache of `batch_size` = {batch_size} and `capacity` = {capacity} needs {needed:,} bytes, and "
                f"{device} has {limit:,}"
            )


@functools.cache
def _decoder(config: LlamaConfig) -> LlamaDecoder:
    # One object per configuration: jit tells functions apart by identity.
    return LlamaDecoder(config)


def capacity_bucket(capacity: int) -> int:
    """Return how many tokens are allocated where `capacity` are asked for: at most a quarter or 32 more.

    Examples
    --------
    >>> from specsampling_jax._model import capacity_bucket
    >>> [capacity_bucket(capacity) for capacity in (1, 33, 1000, 1100)]
    [32, 64, 1024, 1280]
    """
    step = max(32, 1 << max(capacity.bit_length() - 3, 0))
    return max(1, -(-capacity // step)) * step


def width_bucket(length: int) -> int:
    """Return the width that a block of `length` tokens is padded to: the next power of two, or 0."""
    return 0 if length == 0 else 1 << (length - 1).bit_length()


def is_traced(x: Any, cache: JaxCache) -> bool:
    """Return whether a call happens inside a trace, where no value can be looked at."""
    return isinstance(x, jax.core.Tracer) or isinstance(cache.lengths, jax.core.Tracer)


def _forward(
    functions: Functions, params: Any, arrays: Any, lengths: Array, tokens: Array, length: Array, num_logits: int
) -> tuple[Array, Any]:
    """Append a block, of which the first `length` columns are real, and return the logits of the last of these."""
    hidden, arrays = functions.apply_fn(params, arrays, tokens.astype(jnp.int32), lengths)
    if not isinstance(length, int) or num_logits < length:
        # A padded block may have fewer real columns than are computed: the caller takes the last ones.
        columns = jnp.maximum(length - num_logits + jnp.arange(num_logits), 0)
        hidden = jnp.take(hidden, columns, axis=1)
    return hidden if functions.head_fn is None else functions.head_fn(params, hidden), arrays


@functools.partial(jax.jit, static_argnames=("functions", "num_logits"), donate_argnames=("arrays",))
def _score(
    functions: Functions, params: Any, arrays: Any, lengths: Array, tokens: Array, length: Array, *, num_logits: int
) -> tuple[Array, Any]:
    return _forward(functions, params, arrays, lengths, tokens, length, num_logits)


@functools.partial(jax.jit, static_argnames=("axis",))
def _take(arrays: Any, rows: Array, *, axis: int) -> Any:
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=axis), arrays)


def _device(name: str | None) -> Any:
    """Return the JAX device of that name."""
    if name is None:
        return None
    platform, _, index = name.partition(":")
    try:
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(sorted({f"{device.platform}:{device.id}" for device in jax.devices()}))
        raise ValueError(f"`device` must be a device that JAX has ({known}), got {name!r}") from error
