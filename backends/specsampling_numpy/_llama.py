"""A Llama-family decoder in NumPy, with a cache that rolls each row back on its own.

The arithmetic of a small model is cheap; what costs is the number of NumPy calls. So whatever can be done to the weights
is done once, at load: each RMSNorm's weight and the attention's 1 / sqrt(head_dim) are multiplied into the matrix that
follows, query, key and value become one matrix, and RoPE's pairs are laid side by side, where a rotation is one complex
product. None of it changes the function computed.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling._model import Capabilities

from ._cache import Floats, Ints, checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes
from ._checkpoint import open_weights, read_config, rotation_frequencies

__all__ = ["KeyValueCache", "NumpyModel"]


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
    blocks, except that BLAS may sum in another order for another shape: about 1e-15 of the logits' size in float64,
    1e-6 in float32.

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
        self.config = config = read_config(Path(checkpoint))
        read = open_weights(Path(checkpoint), config)
        self.vocab_size = config.vocab_size
        self.max_length = config.max_position_embeddings
        self._dtype = np.dtype(dtype)
        self._frequencies = rotation_frequencies(config)
        self._eps = np.array(config.rms_norm_eps, dtype)
        self._one = np.array(1, dtype)
        self._mean = np.full((config.hidden_size, 1), 1 / config.hidden_size, dtype)

        def tensor(name: str) -> Floats:
            return read(name).astype(dtype)

        def pairs(rows: Floats, heads: int) -> Floats:
            # RoPE rotates entries i and i + head_dim / 2 of a head together: put them next to each other.
            return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

        def layer(index: int) -> _Layer:
            prefix = f"model.layers.{index}."
            before_attention = tensor(f"{prefix}input_layernorm.weight")
            before_mlp = tensor(f"{prefix}post_attention_layernorm.weight")

            def qkv(kind: str) -> Floats:
                q, k, v = (tensor(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv")
                q = pairs(q, config.num_attention_heads) * self._dtype.type(config.head_dim**-0.5)
                return np.concatenate([q, pairs(k, config.num_key_value_heads), v])

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
        head = self._embedding if config.tie_word_embeddings else tensor("lm_head.weight")
        self._head = _columns(head * tensor("model.norm.weight"))

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return an empty cache of `batch_size` rows with room for `capacity` tokens each."""
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
        ValueError
            If `tokens` or `num_logits` are out of range or of the wrong shape.
        CacheError
            If a row would exceed the capacity; the cache is then as it was.
        """
        keys_values, lengths, rotations = cache
        tokens = checked_block(tokens, lengths, keys_values.shape[2], self.vocab_size)
        batch_size, block = tokens.shape
        num_logits = checked_num_logits(num_logits, block)
        if not tokens.size:
            return np.empty((batch_size, num_logits, self.vocab_size), self._dtype), cache
        config = self.config
        query_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        groups = query_heads // kv_heads
        longest, shortest = int(lengths.max()), int(lengths.min())
        span = longest + block
        new: tuple[Any, Any]
        if longest == shortest:  # as with one row: slices are cheaper than index arrays
            positions = np.arange(longest, span)[None]
            new = (slice(None), slice(longest, span))
        else:
            positions = lengths[:, None] + np.arange(block)
            new = (np.arange(batch_size)[:, None], positions)
        rotation = rotations[positions][:, :, None]
        mask = None
        if block > 1 or longest != shortest:
            # Query row t * groups + g of a block sees the keys up to position t.
            hidden_keys = np.arange(span) > positions.repeat(groups, axis=1)[:, None, :, None]
            mask = np.where(hidden_keys, self._dtype.type(-np.inf), self._dtype.type(0))
        ones = np.ones((span, 1), self._dtype)
        keys = keys_values[:, :, :span, 0].transpose(0, 1, 3, 4, 2)
        values = keys_values[:, :, :span, 1].transpose(0, 1, 3, 2, 4)

        # `dot` is `@` for two axes, at half the cost of a call.
        x = self._embedding.take(tokens.ravel(), axis=0)
        for weights, layer_cache, layer_keys, layer_values in zip(self._layers, keys_values, keys, values, strict=True):
            heads = self._normalised(x).dot(weights.qkv)
            if weights.qkv_bias is not None:
                heads += weights.qkv_bias
            heads = heads.reshape(batch_size, block, query_heads + 2 * kv_heads, config.head_dim)
            turned = heads[:, :, : query_heads + kv_heads].view(rotation.dtype)
            np.multiply(turned, rotation, out=turned)
            layer_cache[new] = heads[:, :, query_heads:].reshape(batch_size, block, 2, kv_heads, config.head_dim)
            queries = heads[:, :, :query_heads].reshape(batch_size, block, kv_heads, groups, config.head_dim)
            queries = queries.swapaxes(1, 2).reshape(batch_size, kv_heads, block * groups, config.head_dim)
            scores = queries @ layer_keys
            if mask is not None:
                scores += mask
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = scores @ layer_values
            mixed /= scores @ ones
            mixed = mixed.reshape(batch_size, kv_heads, block, groups, config.head_dim).swapaxes(1, 2)
            x += mixed.reshape(len(x), -1).dot(weights.out)
            if weights.out_bias is not None:
                x += weights.out_bias

            normalised = self._normalised(x)
            half_gate = normalised.dot(weights.half_gate)
            up = normalised.dot(weights.up)
            if weights.half_gate_bias is not None:
                half_gate += weights.half_gate_bias
                up += weights.up_bias
            # silu(g) = g * sigmoid(g) = (g / 2) * (1 + tanh(g / 2)), which cannot overflow.
            up *= half_gate
            np.tanh(half_gate, out=half_gate)
            half_gate += self._one
            up *= half_gate
            x += up.dot(weights.down)
            if weights.down_bias is not None:
                x += weights.down_bias

        if num_logits < block:
            x = x.reshape(batch_size, block, config.hidden_size)[:, block - num_logits :].reshape(-1, config.hidden_size)
        logits = self._normalised(x).dot(self._head).reshape(batch_size, num_logits, self.vocab_size)
        return logits, KeyValueCache(keys_values, lengths + block, rotations)

    def rollback(self, cache: KeyValueCache, lengths: Any, /) -> KeyValueCache:
        """Keep the first ``lengths[b]`` tokens of row b.

        Nothing moves: what lies past a row's length is never attended to, and is overwritten by the next block.

        Raises
        ------
        CacheError
            If a length is negative or more than the row holds.
        """
        return cache._replace(lengths=checked_lengths(lengths, cache.lengths))

    def select(self, cache: KeyValueCache, rows: Any) -> KeyValueCache:
        """Return a cache of these rows only, in this order; a row may be named twice."""
        rows = checked_rows(rows, len(cache.lengths))
        lengths = cache.lengths[rows]
        live = int(lengths.max(initial=0))
        keys_values = np.zeros((len(cache.keys_values), len(rows), *cache.keys_values.shape[2:]), self._dtype)
        keys_values[:, :, :live] = cache.keys_values[:, rows, :live]
        return KeyValueCache(keys_values, lengths, cache.rotations)

    def _normalised(self, x: Floats) -> Floats:
        """RMSNorm without its weight, which the next matrix holds."""
        return x / np.sqrt((x * x).dot(self._mean) + self._eps)


def _columns(weight: Floats) -> Floats:
    """Turn an ``(outputs, inputs)`` matrix into a contiguous ``(inputs, outputs)`` one, the faster order for BLAS."""
    return np.ascontiguousarray(weight.T)
