"""`JaxModel`: the model contract over pure functions, jitted once per bucket of shapes."""

import functools
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specsampling import Array, Capabilities, CapabilityError, DecodeRound, Drafter, Sampling, decode_round
from specsampling_numpy import read_config

from ._checks import checked_block, checked_lengths, checked_num_logits, checked_sizes, on_host
from ._functions import (
    COMPILER_OPTIONS,
    Functions,
    JaxCache,
    TracedModel,
    capacity_bucket,
    forward,
    is_traced,
    width_bucket,
)
from ._llama import llama_decoder, read_params
from ._sharding import cache_sharding, check_divides, checked_mesh, constrained, devices_of, named_device, replicated

__all__ = ["JaxModel"]

_DTYPES = ("float32", "bfloat16", "float64")


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
    device : jax.Device or jax.sharding.NamedSharding, optional
        Where caches are made: on a device, or every array of a cache spread over a mesh. None leaves it to JAX. The
        `params` stay where they are.
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

    Raises
    ------
    TypeError
        If a function is not callable, or `device` is neither a device nor a sharding.
    ValueError
        If `vocab_size` or `max_length` is not a positive integer.

    Notes
    -----
    Shapes come in buckets: capacities in steps of a quarter of a power of two (at least 32), blocks of 1, 2, 8,
    16, … tokens. So an eager call compiles a few times in all. Padding is written past the block, where nothing reads
    it.

    Lengths are kept on the host. A block that does not fit, or a rollback to more than a row holds, is refused there:
    XLA would clamp or drop the index. Inside a caller's own ``jax.jit`` nothing can be looked at, and both are
    undefined.

    There is no ``select``: with every row dropped shapes would change and all be compiled anew, so finished rows are
    masked.

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
        if not isinstance(device, jax.Device | NamedSharding | None):
            raise TypeError(f"`device` must be a jax.Device or a NamedSharding, got {device!r}")
        sharding = device if isinstance(device, NamedSharding) else None
        self.functions = Functions(apply_fn, head_fn, vocab_size, max_length, sharding)
        self.params = params
        self.vocab_size = vocab_size
        if max_length is not None:
            self.max_length = max_length
        self.capabilities = Capabilities(dtypes=dtypes, compile_round=True)
        self.device = device
        self._init_cache_fn = init_cache_fn
        self._drops_padding = False  # of which an `apply_fn` is not asked: it may write with an operation that clamps

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | PathLike[str],
        *,
        dtype: str = "float32",
        device: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        replicate: bool = False,
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
        mesh : jax.sharding.Mesh, optional
            Devices along one axis that the model is split over: heads, inner sizes and token ids (tensor parallelism).
            Every device reads its own part of the weights, and holds its own heads of the cache.
        replicate : bool, default: False
            Give every device of the `mesh` the whole model: a small draft beside a target that is split.

        Returns
        -------
        JaxModel
            The model, ready to score.

        Raises
        ------
        FileNotFoundError
            If the directory or a file in it is missing.
        ValueError
            If `dtype` or `device` is another, `mesh` is given together with `device` or has more axes than one,
            `replicate` is without a mesh, the files do not agree with each other, or the mesh does not divide the
            model's heads and inner sizes.
        TypeError
            If `mesh` is not a mesh.
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
        if mesh is None and replicate:
            raise ValueError("`replicate` must be False without a `mesh`: there is one device")
        if mesh is not None and device is not None:
            raise ValueError(f"`device` must be None where there is a `mesh`, which says it all, got {device!r}")
        where = named_device(device)
        path = Path(checkpoint)
        config = read_config(path)
        if mesh is not None:
            mesh = checked_mesh(mesh)
            if not replicate:
                check_divides(mesh, config)
            where = replicated(mesh) if replicate else cache_sharding(mesh)
        numbers = jnp.dtype(dtype)
        decoder = llama_decoder(config)
        model = cls(
            decoder.apply,
            read_params(path, config, numbers, where, split=mesh is not None and not replicate),
            functools.partial(decoder.init_cache, dtype=numbers),
            config.vocab_size,
            head_fn=decoder.head,
            max_length=config.max_position_embeddings,
            device=where,
            dtypes=_DTYPES if has_float64 else _DTYPES[:-1],
        )
        model._drops_padding = True
        return model

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
        batch_size, capacity = checked_sizes(batch_size, capacity)
        size = capacity_bucket(capacity)
        self._check_memory(batch_size, size)
        if isinstance(self.device, NamedSharding):  # never whole on one device
            arrays = jax.jit(lambda: self._init_cache_fn(batch_size, size), out_shardings=self.device)()
        else:
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
        TypeError
            If `tokens` are not integers.
        ValueError
            If `tokens` or `num_logits` are out of range or of the wrong shape.
        CacheError
            If a row would exceed the capacity; the cache is then as it was.
        """
        if is_traced(tokens, cache):
            return TracedModel(self.functions, self.params).score(cache, jnp.asarray(tokens), num_logits=num_logits)
        lengths = on_host(cache.lengths)
        if isinstance(self.device, NamedSharding):
            tokens = on_host(tokens)  # from wherever they are to every device
        block = checked_block(tokens, lengths, int(cache.capacity), self.vocab_size)
        length = block.shape[1]
        wanted = checked_num_logits(num_logits, length)
        width, size = width_bucket(length), capacity_bucket(int(cache.capacity))
        held = int(lengths.max()) if len(lengths) else 0
        if held + width > size:
            if not held:
                width = size  # a prompt fills the arrays, whatever its length
            elif not self._drops_padding:
                width = length
        computed = min(width, width_bucket(wanted))
        if not isinstance(block, np.ndarray) and all(device.platform == "cpu" for device in block.devices()):
            block = np.asarray(block)  # no transfer; and whether ids were put on a device compiles nothing anew
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
        TypeError
            If `lengths` are not integers.
        ValueError
            If `lengths` are not of shape ``(B,)``.
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        """
        if is_traced(lengths, cache):
            return TracedModel(self.functions, self.params).rollback(cache, lengths)
        return cache._replace(lengths=checked_lengths(lengths, on_host(cache.lengths)))

    def compile_round(self, drafter: Drafter[Any] | None, sampling: Sampling, lookahead: int) -> DecodeRound:
        """Return `specsampling.decode_round`, compiled; see `specsampling_jax.compile_round`.

        It is not compiled where a subclass scores or rolls back in a way of its own, which a trace would pass over.
        """
        from ._round import compile_round

        if type(self).score is not JaxModel.score or type(self).rollback is not JaxModel.rollback:
            return decode_round

        return compile_round(self, drafter, sampling, lookahead)

    def _check_memory(self, batch_size: int, capacity: int) -> None:
        """Refuse a cache that is larger than all memory of a device, before any of it is asked for."""
        device = min(self.devices, key=lambda device: (device.process_index != jax.process_index(), device.id))
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is None:  # as on CPUs
            return
        leaves = jax.tree.leaves(jax.eval_shape(lambda: self._init_cache_fn(batch_size, capacity)))
        shapes = [leaf.shape for leaf in leaves]
        if isinstance(self.device, NamedSharding):
            shapes = [self.device.shard_shape(shape) for shape in shapes]
        needed = sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))
        if needed > limit:
            raise CapabilityError(
                f"a cache of `batch_size` = {batch_size} and `capacity` = {capacity} needs {needed:,} bytes, and "
                f"{device} has {limit:,}"
            )

    @property
    def devices(self) -> frozenset[Any]:
        """The devices that caches are on."""
        return devices_of(self.device)


@functools.partial(
    jax.jit,
    static_argnames=("functions", "num_logits"),
    donate_argnames=("arrays",),
    compiler_options=COMPILER_OPTIONS,
)
def _score(
    functions: Functions, params: Any, arrays: Any, lengths: Array, tokens: Array, length: Array, *, num_logits: int
) -> tuple[Array, Any]:
    logits, arrays = forward(functions, params, arrays, lengths, tokens, length, num_logits)
    if functions.sharding is not None:  # outside of a trace every process may look at them
        logits = constrained(logits, replicated(functions.sharding.mesh))
    return logits, arrays
