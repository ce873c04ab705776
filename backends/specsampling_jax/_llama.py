"""A Llama-family decoder as pure functions of its weights and its cache."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsampling import Array
from specsampling_numpy import LlamaConfig, open_weights

from ._sharding import place, weight_sharding

__all__ = ["LlamaDecoder", "llama_decoder", "read_params"]

_MINOR = 256
"""Positions are split into ``_MINOR * major + minor`` to be turned to angles; see `_rotation`."""


@dataclass(frozen=True, slots=True)
class LlamaDecoder:
    """The functions of a `JaxModel` for one configuration.

    Attributes
    ----------
    config : LlamaConfig
        Sizes and constants.
    """

    config: LlamaConfig

    def init_cache(self, batch_size: int, capacity: int, dtype: Any) -> list[tuple[Array, Array]]:
        """Return keys and values of each layer, of shape ``(B, kv_heads, capacity, head_dim)``.

        Heads come before positions, as attention multiplies them: the cache is never transposed.
        """
        shape = (batch_size, self.config.num_key_value_heads, capacity, self.config.head_dim)
        # Zeros, not empty: weight 0 times a NaN left in memory would be NaN.
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.config.num_hidden_layers)]

    def apply(self, params: Any, cache: Any, tokens: Array, lengths: Array) -> tuple[Array, Any]:
        """Append ``(B, T)`` tokens to rows of these lengths; return hidden states ``(B, T, hidden)`` and the cache."""
        config = self.config
        embedding = params["embedding"]
        with _precision(embedding.dtype):
            # An id out of range gives NaN, never another id's embedding.
            known = (tokens >= 0) & (tokens < config.vocab_size)
            x = jnp.take(embedding, jnp.where(known, tokens, config.vocab_size), axis=0, mode="fill")
            capacity = cache[0][0].shape[2]
            positions = lengths[:, None] + jnp.arange(tokens.shape[1], dtype=lengths.dtype)
            rotation = _rotation(positions, config.frequencies, capacity, _wide(x.dtype))
            masks = {window: _mask(positions, capacity, window) for window in sorted(set(config.windows), key=str)}
            layers = []
            for layer, held, window in zip(params["layers"], cache, config.windows, strict=True):
                x, written = self._layer(layer, x, held, positions, rotation, masks[window])
                layers.append(written)
        return x, layers

    def head(self, params: Any, hidden: Array) -> Array:
        """Return the logits ``(B, n, V)`` of hidden states ``(B, n, hidden)``, in single precision at least."""
        head = params.get("head", params["embedding"])
        with _precision(head.dtype):
            hidden = self._normalised(hidden, params["norm"])
            return jnp.einsum("bth,vh->btv", hidden, head, preferred_element_type=_wide(head.dtype))

    # Traced and lowered once for all layers of one shape, here and in whatever else is compiled; XLA inlines it.
    @functools.partial(jax.jit, static_argnums=0)
    def _layer(
        self, layer: Any, x: Array, held: tuple[Array, Array], positions: Array, rotation: Any, mask: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        mixed, written = self._attend(layer, x, held, positions, rotation, mask)
        x = x + mixed
        return x + self._mlp(layer, self._normalised(x, layer["post_attention_layernorm.weight"])), written

    def _attend(
        self, layer: Any, x: Array, held: tuple[Array, Array], positions: Array, rotation: Array, mask: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        config = self.config
        batch_size, length = positions.shape
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        groups = heads // kv_heads
        x = self._normalised(x, layer["input_layernorm.weight"])
        query, key, value = (
            _linear(layer, f"self_attn.{name}_proj", x).reshape(batch_size, length, count, config.head_dim)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if config.head_norms:
            query = self._normalised(query, layer["self_attn.q_norm.weight"])
            key = self._normalised(key, layer["self_attn.k_norm.weight"])
        query, key = _rotated(query, rotation), _rotated(key, rotation)
        # Columns of padding that lie past the capacity are dropped here; whoever calls has refused tokens that do.
        rows = jnp.arange(batch_size)[:, None]
        keys, values = (
            cache.at[rows, :, positions].set(new, mode="drop", unique_indices=True)
            for cache, new in zip(held, (key, value), strict=True)
        )
        # The query heads that share a key, at all T positions, are the rows of one matrix.
        query = query.reshape(batch_size, length, kv_heads, groups, config.head_dim).transpose(0, 2, 3, 1, 4)
        query = query.reshape(batch_size, kv_heads, groups * length, config.head_dim)
        wide = _wide(x.dtype)
        scores = jnp.einsum("bkqd,bkcd->bkqc", query, keys, preferred_element_type=wide) * config.head_dim**-0.5
        capacity = keys.shape[2]
        scores = scores.reshape(batch_size, kv_heads, groups, length, capacity)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
        weights = weights.reshape(batch_size, kv_heads, groups * length, capacity).astype(x.dtype)
        mixed = jnp.einsum("bkqc,bkcd->bkqd", weights, values)
        mixed = mixed.reshape(batch_size, kv_heads, groups, length, config.head_dim)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(batch_size, length, heads * config.head_dim)
        return _linear(layer, "self_attn.o_proj", mixed), (keys, values)

    def _mlp(self, layer: Any, x: Array) -> Array:
        gate = jax.nn.silu(_linear(layer, "mlp.gate_proj", x))
        return _linear(layer, "mlp.down_proj", gate * _linear(layer, "mlp.up_proj", x))

    def _normalised(self, x: Array, weight: Array) -> Array:
        """RMSNorm over the last axis, in single precision at least."""
        wide = x.astype(_wide(x.dtype))
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return weight * (wide * scale).astype(x.dtype)


@functools.cache
def llama_decoder(config: LlamaConfig) -> LlamaDecoder:
    """Return the decoder of a configuration, always the same one, so that equal configurations share compiled code.

    jit keeps that by the functions, and two bound methods are equal only where they are bound to the same object.
    """
    return LlamaDecoder(config)


def read_params(checkpoint: Path, config: LlamaConfig, dtype: Any, where: Any, *, split: bool) -> Any:
    """Read the weights of a checkpoint onto a device or a mesh, tensor by tensor.

    With `split` every device of the mesh that `where` names reads its own part.
    """
    weights = open_weights(checkpoint, config)

    def tensor(name: str) -> Array:
        stored = weights.read(name, bfloat16=jnp.bfloat16)
        return place(stored, dtype, weight_sharding(where.mesh, name, stored.shape) if split else where)

    params = {"embedding": tensor("model.embed_tokens.weight"), "norm": tensor("model.norm.weight")}
    params["layers"] = tuple(
        {name: tensor(f"model.layers.{layer}.{name}") for name in config.layer_shapes()}
        for layer in range(config.num_hidden_layers)
    )
    if weights.has_head:
        params["head"] = tensor("lm_head.weight")
    return params


def _precision(dtype: Any) -> Any:
    """Return the context in which matrix products of this dtype are what the dtype says, on accelerators too."""
    return jax.default_matmul_precision("default" if dtype.itemsize < 4 else "highest")


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _linear(layer: Any, name: str, x: Array) -> Array:
    y = jnp.einsum("bti,oi->bto", x, layer[f"{name}.weight"])
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def _mask(positions: Array, capacity: int, window: int | None) -> Array:
    """Return which of the cache's positions each of ``(B, T)`` sees: itself and what came before, ``(B, T, C)``."""
    columns = jnp.arange(capacity, dtype=positions.dtype)
    seen = columns <= positions[:, :, None]
    return seen if window is None else seen & (columns > positions[:, :, None] - window)


def _rotation(positions: Array, frequencies: tuple[float, ...], capacity: int, dtype: Any) -> tuple[Array, Array]:
    """Return cosine and sine of RoPE's angles at ``(B, T)`` positions, of shape ``(B, T, 1, head_dim / 2)``.

    In float32 the product of a position of many thousands and a frequency is off by 1e-3 radians. So the angle is the
    sum of two, each looked up in a short table made in float64, and a rotation by a sum is two rotations.
    """
    steps = np.asarray(frequencies)

    def looked_up(index: Array, angles: Any) -> tuple[Array, Array]:
        # Both in one table: each lookup is a kernel of its own.
        table = jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), dtype)
        cos, sin = jnp.split(table[index], 2, axis=-1)
        return cos, sin

    cos, sin = looked_up(positions % _MINOR, np.arange(_MINOR)[:, None] * steps)
    if capacity > _MINOR:  # else all multiples of _MINOR are 0, and rotate by nothing
        major = np.arange(-(-capacity // _MINOR) + 1)[:, None] * (_MINOR * steps)
        high_cos, high_sin = looked_up(jnp.minimum(positions // _MINOR, major.shape[0] - 1), major)
        cos, sin = high_cos * cos - high_sin * sin, high_sin * cos + high_cos * sin
    return cos[:, :, None, :], sin[:, :, None, :]


def _rotated(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate entries i and i + head_dim / 2 of every head together; x is ``(B, T, heads, head_dim)``."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
