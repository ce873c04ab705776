"""A small Llama in plain NumPy whose cache is written to be broken on purpose.

Every decision that a planted fault may get wrong is a method of its own: where a block is written, what positions its
tokens have, what each of them may attend to, what a rollback keeps. The class as it stands is right, and the suite's
own tests hold it to that; a fault is a subclass that overrides one method.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from specsampling import CacheError
from specsampling_conformance._host import Array

__all__ = ["ReferenceCache", "ReferenceModel"]

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


class ReferenceCache(NamedTuple):
    """Keys and values of every row, and how far each row has come.

    Attributes
    ----------
    keys, values : array
        Real floating arrays of shape ``(layers, B, capacity, heads, head size)``.
    lengths : array
        Integer array of shape ``(B,)``: tokens held by each row.
    positions : array
        Integer array of shape ``(B,)``: position of the next token. Always `lengths` here; apart, so that a fault can
        roll back one and forget the other.
    written : array
        Integer array of shape ``(B,)``: first slot that was never written.
    """

    keys: Floats
    values: Floats
    lengths: Ints
    positions: Ints
    written: Ints


class ReferenceModel:
    """A Llama-layout checkpoint in NumPy, computed the plain way.

    Parameters
    ----------
    checkpoint : Path
        Directory with ``config.json`` and ``model.safetensors``.
    dtype : str
        ``"float32"`` or ``"float64"``.
    """

    max_rollback: int | None = None

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.weights = {
            name: weight.astype(dtype) for name, weight in load_file(checkpoint / "model.safetensors").items()
        }
        self.vocab_size: int = config["vocab_size"]
        self.max_length: int = config["max_position_embeddings"]
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.epsilon: float = config["rms_norm_eps"]
        self.frequencies = config["rope_theta"] ** -(np.arange(0, self.head_size, 2) / self.head_size)
        self.dtype = np.dtype(dtype)

    @classmethod
    def load(cls, checkpoint: Path, dtype: str) -> Self:
        """Read a checkpoint; the loader that the suite is given."""
        return cls(checkpoint, dtype)

    def init_cache(self, batch_size: int, capacity: int) -> ReferenceCache:
        """Return an empty cache."""
        shape = (self.num_layers, batch_size, capacity, self.num_kv_heads, self.head_size)
        none = np.zeros(batch_size, dtype=np.int64)
        return ReferenceCache(np.zeros(shape, self.dtype), np.zeros(shape, self.dtype), none, none, none)

    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        """Append a block and return the logits of its last `num_logits` positions."""
        block = np.asarray(tokens)
        width = block.shape[1]
        self.check_capacity(cache, width)
        positions, slots = self.block_positions(cache, width), self.block_slots(cache, width)
        visible = self.block_mask(cache, width)
        keys, values = cache.keys.copy(), cache.values.copy()
        hidden = self.weights["model.embed_tokens.weight"][block]
        for layer in range(self.num_layers):
            normed = self._normalise(hidden, self._layer(layer, "input_layernorm"))
            query = self._heads(normed, self._layer(layer, "self_attn.q_proj"), self.num_heads)
            key = self._heads(normed, self._layer(layer, "self_attn.k_proj"), self.num_kv_heads)
            value = self._heads(normed, self._layer(layer, "self_attn.v_proj"), self.num_kv_heads)
            self.write(keys[layer], self._rotate(key, positions), slots)
            self.write(values[layer], value, slots)
            attended = self._attend(self._rotate(query, positions), keys[layer], values[layer], visible)
            hidden = hidden + attended @ self._layer(layer, "self_attn.o_proj").T
            normed = self._normalise(hidden, self._layer(layer, "post_attention_layernorm"))
            gate = normed @ self._layer(layer, "mlp.gate_proj").T
            gated = gate / (1.0 + np.exp(-gate)) * (normed @ self._layer(layer, "mlp.up_proj").T)
            hidden = hidden + gated @ self._layer(layer, "mlp.down_proj").T
        unembedding = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = self._normalise(hidden, self.weights["model.norm.weight"]) @ unembedding.T
        lengths = cache.lengths + width
        written = np.maximum(cache.written, np.max(slots, axis=1, initial=-1) + 1)
        cache = ReferenceCache(keys, values, lengths, cache.positions + width, written)
        return self.pick_logits(logits, num_logits), cache

    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        """Keep the first ``lengths[b]`` tokens of each row."""
        kept = np.array(lengths, dtype=np.int64)
        outside = (kept < 0) | (kept > cache.lengths)
        if np.any(outside):
            row = int(np.argmax(outside))
            raise CacheError(f"`lengths` must be from 0 to {cache.lengths[row]}, got {kept[row]} (row {row})")
        return cache._replace(lengths=kept, positions=kept)

    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        """Keep these rows, in this order."""
        index = np.asarray(rows)
        return ReferenceCache(
            cache.keys[:, index],
            cache.values[:, index],
            cache.lengths[index],
            cache.positions[index],
            cache.written[index],
        )

    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        """Raise where the longest row has no room for the block."""
        longest, capacity = int(np.max(cache.lengths)), cache.keys.shape[2]
        if longest + width > capacity:
            raise CacheError(f"`tokens` must fit the capacity of {capacity}, got {longest} + {width} tokens")

    def block_positions(self, cache: ReferenceCache, width: int) -> Ints:
        """Positions of the block's tokens, ``(B, T)``."""
        return cache.positions[:, None] + np.arange(width)

    def block_slots(self, cache: ReferenceCache, width: int) -> Ints:
        """Slots the block is written to, ``(B, T)``."""
        return cache.lengths[:, None] + np.arange(width)

    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        """Mask of the slots that each token of the block attends to, ``(B, T, capacity)``."""
        last = cache.lengths[:, None] + np.arange(width)
        mask: NDArray[np.bool_] = np.arange(cache.keys.shape[2]) <= last[..., None]
        return mask

    def write(self, storage: Floats, block: Floats, slots: Ints) -> None:
        """Write a block into one layer's storage ``(B, capacity, heads, head size)``."""
        storage[np.arange(storage.shape[0])[:, None], slots] = block

    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        """Return the last `num_logits` positions."""
        return logits if num_logits is None else logits[:, logits.shape[1] - num_logits :]

    def _layer(self, layer: int, name: str) -> Floats:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _normalise(self, hidden: Floats, weight: Floats) -> Floats:
        scale = np.sqrt(np.mean(hidden * hidden, axis=-1, keepdims=True) + self.dtype.type(self.epsilon))
        normed: Floats = hidden / scale * weight
        return normed

    def _heads(self, hidden: Floats, weight: Floats, heads: int) -> Floats:
        return (hidden @ weight.T).reshape(*hidden.shape[:2], heads, self.head_size)

    def _rotate(self, vectors: Floats, positions: Ints) -> Floats:
        angles = positions[..., None, None] * self.frequencies
        cosine, sine = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        first, second = np.split(vectors, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _attend(self, query: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]) -> Floats:
        group = self.num_heads // self.num_kv_heads
        keys, values = np.repeat(keys, group, axis=2), np.repeat(values, group, axis=2)
        scores = np.einsum("bthd,bshd->bhts", query, keys) / self.dtype.type(np.sqrt(self.head_size))
        scores = np.where(visible[:, None], scores, -np.inf)
        weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        weights = weights / np.sum(weights, axis=-1, keepdims=True)
        attended = np.einsum("bhts,bshd->bthd", weights, values)
        merged: Floats = attended.reshape(*attended.shape[:2], self.num_heads * self.head_size)
        return merged
