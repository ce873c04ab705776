"""A Llama-family decoder in NumPy, with a cache that rolls each row back on its own.

The arithmetic of a small model is cheap; what costs is the number of NumPy calls. So whatever can be done to the
weights is done once, at load: each RMSNorm's weight and the attention's 1 / sqrt(head_dim) are multiplied into the
matrix that follows, query, key and value become one matrix, and RoPE's pairs are laid side by side, where a rotation is
one complex product. None of it changes the function computed.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling import Capabilities, CapabilityError

from ._cache import Floats, Ints, checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes
from ._checkpoint import open_weights
from ._config import read_config

__all__ = ["KeyValueCache", "NumpyModel"]

_FAMILIES = ("llama", "mistral", "qwen2")


class KeyValueCache(NamedTuple):
    """Keys and values of every layer, in the order of the tokens.

    Attributes
    ----------
    keys_values : array
        Floats of shape ``(layers, B, capacity, 2, kv_heads, head_dim)``; what lies past a row's length is stale, and no
        position attends to it.
    lengths : array
        Integers of shape ``(B,)``: how many tokens each row holds.
    rotations : array
        Complex of shape ``(capacity, head_dim / 2)``: RoPE at each position, for as far as this cache can reach.
    """

    keys_values: Floats
    lengths: Ints
    rotations: Any


class _Layer(NamedTuple):
    """A layer's matrices ``(inputs, outputs)``, norms folded in, and their biases (None where there are none)."""

    qkv: Floats
    qkv_bias: Floats | None
    out: Floats
    out_bias: Floats | None
    half_gate: Floats
    half_gate_bias: Floats | None
    up: Floats
    up_bias: Floats | None
    down: Floats
    down_bias: Floats | None


class _Block(NamedTuple):
    """Where a block of T tokens stands, the same for every layer."""

    batch_size: int
    length: int
    span: int  # positions that any row of the batch uses, this block included
    slots: tuple[Any, Any]  # index of the block's positions in a layer's cache (B, capacity, …)
    rotation: Any  # complex (B or 1, T, 1, head_dim / 2)
    mask: Floats | None  # 0 or -inf, (B or 1, 1, T * groups, span); None where everything may be seen
    ones: Floats


class NumpyModel:
    """A Llama-family decoder (Llama, Mistral, Qwen2) read from a checkpoint directory.

    Parameters
    ----------
    checkpoint : str or Path
        Directory with config.json and model.safetensors (or shards and their index).
    dtype : str
        "float32" or "float64": dtype of the weights in memory, the arithmetic, the cache and the logits.

    Attributes
    ----------
    vocab_size : int
        Number of token ids, V.
    max_length : int
        Context limit, ``max_position_embeddings``. A cache may be larger, because padding may lie past the limit.
    max_rollback : None
        Rows go back any number of tokens.
    capabilities : Capabilities
        What the conformance suite may ask for.

    Raises
    ------
    FileNotFoundError
        If the directory, config.json or the weights are missing.
    ValueError
        If `dtype` is another, or config and weights do not agree; nothing large was allocated by then.
    CapabilityError
        If the architecture is none of those supported.

    Notes
    -----
    A cache is modified in place and must not be used again once passed in, nor shared between threads; the model itself
    is never modified. A row's logits do not depend on the other rows, on padding or on how the tokens were cut into
    blocks, except that BLAS may sum in another order for another shape: with logits of order ten, differences of a few
    1e-14 in float64 and up to 3e-5 in float32 were measured.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import NumpyModel
    >>> model = NumpyModel(specsampling.bundled("draft"))
    >>> cache = model.init_cache(batch_size=2, capacity=8)
    >>> logits, cache = model.score(cache, [[82, 79, 77], [74, 85, 0]])  # the second row is padded,
    >>> logits.shape == (2, 3, model.vocab_size)
    True
    >>> cache = model.rollback(cache, [3, 2])  # and now the padding is gone
    >>> logits, cache = model.score(cache, [[69], [76]], num_logits=1)
    >>> cache.lengths.tolist()
    [4, 3]
    """

    max_rollback: int | None = None
    capabilities = Capabilities(dtypes=("float32", "float64"), select=True)

    def __init__(self, checkpoint: str | Path, *, dtype: str = "float32") -> None:
        if dtype not in self.capabilities.dtypes:
            raise ValueError(f"`dtype` must be one of {', '.join(self.capabilities.dtypes)}, got {dtype!r}")
        self.config = config = read_config(Path(checkpoint), families=_FAMILIES)
        if any(config.windows):
            raise CapabilityError(
                f"{Path(checkpoint) / 'config.json'}: sliding-window attention is not supported, only full attention is"
            )
        weights = open_weights(Path(checkpoint), config)
        self.vocab_size = config.vocab_size
        self.max_length = config.max_position_embeddings
        self._dtype = np.dtype(dtype)
        self._frequencies = np.array(config.frequencies)
        # Arrays, because a Python number would be converted at each use; `dot` below is a cheaper `@` for two axes.
        self._eps = np.array(config.rms_norm_eps, dtype)
        self._one = np.array(1, dtype)
        self._mean = np.full((config.hidden_size, 1), 1 / config.hidden_size, dtype)

        def tensor(name: str) -> Floats:
            return weights.read(name).astype(dtype)

        def pairs(rows: Floats, heads: int) -> Floats:
            # RoPE rotates entries i and i + head_dim / 2 of a head together: put them next to each other.
            return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

        def layer(index: int) -> _Layer:
            prefix = f"model.layers.{index}."
            before_attention = tensor(f"{prefix}input_layernorm.weight")
            before_mlp = tensor(f"{prefix}post_attention_layernorm.weight")

            def qkv(kind: str) -> Floats:
                query, key, value = (tensor(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv")
                query = pairs(query, config.num_attention_heads) * self._dtype.type(config.head_dim**-0.5)
                return np.concatenate([query, pairs(key, config.num_key_value_heads), value])

            def bias(name: str, present: bool) -> Floats | None:
                return tensor(f"{prefix}{name}.bias") if present else None

            half_gate_bias = bias("mlp.gate_proj", config.mlp_bias)
            return _Layer(
                qkv=_columns(qkv("weight") * before_attention),
                qkv_bias=qkv("bias") if config.query_bias else None,
                out=_columns(tensor(f"{prefix}self_attn.o_proj.weight")),
                out_bias=bias("self_attn.o_proj", config.output_bias),
                half_gate=_columns(tensor(f"{prefix}mlp.gate_proj.weight") * before_mlp / 2),
                half_gate_bias=None if half_gate_bias is None else half_gate_bias / 2,
                up=_columns(tensor(f"{prefix}mlp.up_proj.weight") * before_mlp),
                up_bias=bias("mlp.up_proj", config.mlp_bias),
                down=_columns(tensor(f"{prefix}mlp.down_proj.weight")),
                down_bias=bias("mlp.down_proj", config.mlp_bias),
            )

        self._embedding = tensor("model.embed_tokens.weight")
        self._layers = [layer(index) for index in range(config.num_hidden_layers)]
        self._head = _columns(tensor("lm_head.weight") * tensor("model.norm.weight"))

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row has room for; may exceed `max_length`, as padding does.

        Returns
        -------
        KeyValueCache
            No row holds a token yet.

        Raises
        ------
        ValueError
            If either is negative.
        """
        checked_sizes(batch_size, capacity)
        config = self.config
        shape = (config.num_hidden_layers, batch_size, capacity, 2, config.num_key_value_heads, config.head_dim)
        angles = np.arange(capacity)[:, None] * self._frequencies
        # Zeros, not empty: weight 0 times a NaN left in memory would be NaN.
        return KeyValueCache(
            keys_values=np.zeros(shape, self._dtype),
            lengths=np.zeros(batch_size, np.int64),
            rotations=np.exp(1j * angles).astype(np.result_type(self._dtype, np.complex64)),
        )

    # Whoever decodes looks for logits that are not finite, and names row and position: warnings would only add noise.
    @np.errstate(over="ignore", invalid="ignore")
    def score(
        self, cache: KeyValueCache, tokens: Any, /, *, num_logits: int | None = None
    ) -> tuple[Floats, KeyValueCache]:
        """Append a block to every row and return the logits of its last positions.

        Parameters
        ----------
        cache : KeyValueCache
            Modified in place; use the one returned.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``; T may be 0.
        num_logits : int, optional
            How many of the block's last positions are wanted; None is all T, 0 none.

        Returns
        -------
        logits : array
            Floats of shape ``(B, num_logits, V)``: row t is the law of the token *after* position t. A fresh array.
        cache : KeyValueCache
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
        keys_values, lengths, rotations = cache
        tokens = checked_block(tokens, lengths, keys_values.shape[2], self.vocab_size)
        batch_size, block_length = tokens.shape
        num_logits = checked_num_logits(num_logits, block_length)
        if not tokens.size:
            return np.empty((batch_size, num_logits, self.vocab_size), self._dtype), cache
        block = self._place(lengths, block_length, rotations)
        keys = keys_values[:, :, : block.span, 0].transpose(0, 1, 3, 4, 2)
        values = keys_values[:, :, : block.span, 1].transpose(0, 1, 3, 2, 4)
        x = self._embedding.take(tokens.ravel(), axis=0)  # (B * T, hidden_size), as every step but attention wants it
        for layer, layer_cache, layer_keys, layer_values in zip(self._layers, keys_values, keys, values, strict=True):
            self._add_attention(x, layer, block, layer_cache, layer_keys, layer_values)
            self._add_mlp(x, layer)
        if num_logits < block_length:
            width = self.config.hidden_size
            x = x.reshape(batch_size, block_length, width)[:, block_length - num_logits :].reshape(-1, width)
        logits = self._normalised(x).dot(self._head).reshape(batch_size, num_logits, self.vocab_size)
        return logits, KeyValueCache(keys_values, lengths + block_length, rotations)

    def rollback(self, cache: KeyValueCache, lengths: Any, /) -> KeyValueCache:
        """Keep the first ``lengths[b]`` tokens of row b.

        Nothing moves: what lies past a row's length is never attended to, and is overwritten by the next block.

        Parameters
        ----------
        cache : KeyValueCache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds.

        Returns
        -------
        KeyValueCache
            Shares its memory with `cache`; holds a copy of `lengths`.

        Raises
        ------
        TypeError
            If `lengths` are not integers.
        ValueError
            If `lengths` are not of shape ``(B,)``.
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        """
        return cache._replace(lengths=checked_lengths(lengths, cache.lengths))

    def select(self, cache: KeyValueCache, rows: Any) -> KeyValueCache:
        """Return a cache of some rows, in the order given.

        Parameters
        ----------
        cache : KeyValueCache
            Must not be used again.
        rows : array
            Integers of shape ``(R,)``, each in ``[0, B)``; a row named twice is copied twice.

        Returns
        -------
        KeyValueCache
            Of R rows, with memory of its own.

        Raises
        ------
        TypeError
            If `rows` are not integers.
        ValueError
            If `rows` are not of shape ``(R,)``, or one of them does not exist.
        """
        rows = checked_rows(rows, len(cache.lengths))
        lengths = cache.lengths[rows]
        live = int(lengths.max(initial=0))
        keys_values = np.zeros((len(cache.keys_values), len(rows), *cache.keys_values.shape[2:]), self._dtype)
        keys_values[:, :, :live] = cache.keys_values[:, rows, :live]
        return KeyValueCache(keys_values, lengths, cache.rotations)

    def _place(self, lengths: Ints, block_length: int, rotations: Any) -> _Block:
        """Say where a block goes in the cache and what each of its positions may see."""
        longest, shortest = int(lengths.max()), int(lengths.min())
        span = longest + block_length
        slots: tuple[Any, Any]
        if longest == shortest:  # as with one row: slices are cheaper than index arrays
            positions = np.arange(longest, span)[None]
            slots = (slice(None), slice(longest, span))
        else:
            positions = lengths[:, None] + np.arange(block_length)
            slots = (np.arange(len(lengths))[:, None], positions)
        mask = None
        if block_length > 1 or longest != shortest:
            # Each position sees itself and what came before it in its own row; its query heads stand side by side.
            heads_a_key = self.config.num_attention_heads // self.config.num_key_value_heads
            unseen = np.arange(span) > positions.repeat(heads_a_key, axis=1)[:, None, :, None]
            mask = np.where(unseen, self._dtype.type(-np.inf), self._dtype.type(0))
        return _Block(
            batch_size=len(lengths),
            length=block_length,
            span=span,
            slots=slots,
            rotation=rotations[positions][:, :, None],
            mask=mask,
            ones=np.ones((span, 1), self._dtype),
        )

    def _add_attention(
        self, x: Floats, layer: _Layer, block: _Block, cache: Floats, keys: Floats, values: Floats
    ) -> None:
        """Write the block's keys and values to `cache` and add to `x` what its queries gather from the live span."""
        batch_size, length, _, slots, rotation, mask, ones = block
        query_heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        groups, head_dim = query_heads // kv_heads, self.config.head_dim

        heads = self._normalised(x).dot(layer.qkv)
        if layer.qkv_bias is not None:
            heads += layer.qkv_bias
        heads = heads.reshape(batch_size, length, query_heads + 2 * kv_heads, head_dim)
        turned = heads[:, :, : query_heads + kv_heads].view(rotation.dtype)
        np.multiply(turned, rotation, out=turned)
        cache[slots] = heads[:, :, query_heads:].reshape(batch_size, length, 2, kv_heads, head_dim)

        # The query heads that share a key, at all T positions, are the rows of one matrix.
        queries = heads[:, :, :query_heads].reshape(batch_size, length, kv_heads, groups, head_dim)
        queries = queries.swapaxes(1, 2).reshape(batch_size, kv_heads, length * groups, head_dim)
        scores = queries @ keys
        if mask is not None:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values
        mixed /= scores @ ones  # their sum, sooner than `sum` has it
        mixed = mixed.reshape(batch_size, kv_heads, length, groups, head_dim).swapaxes(1, 2)
        x += mixed.reshape(batch_size * length, query_heads * head_dim).dot(layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias

    def _add_mlp(self, x: Floats, layer: _Layer) -> None:
        """Add to `x` the layer's SwiGLU, ``down(silu(gate(x)) * up(x))``."""
        normalised = self._normalised(x)
        half_gate = normalised.dot(layer.half_gate)
        up = normalised.dot(layer.up)
        if layer.half_gate_bias is not None:
            half_gate += layer.half_gate_bias
            up += layer.up_bias
        # silu(g) = g * sigmoid(g) = (g / 2) * (1 + tanh(g / 2)), which cannot overflow.
        up *= half_gate
        np.tanh(half_gate, out=half_gate)
        half_gate += self._one
        up *= half_gate
        x += up.dot(layer.down)
        if layer.down_bias is not None:
            x += layer.down_bias

    def _normalised(self, x: Floats) -> Floats:
        """RMSNorm without its weight, which the next matrix holds."""
        root_mean_square: Floats = np.sqrt((x * x).dot(self._mean) + self._eps)
        return x / root_mean_square


def _columns(weight: Floats) -> Floats:
    """Turn an ``(outputs, inputs)`` matrix into a contiguous ``(inputs, outputs)`` one, the faster order for BLAS."""
    return np.ascontiguousarray(weight.T)
