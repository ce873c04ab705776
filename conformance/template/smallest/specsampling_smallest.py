"""The smallest backend: whatever scores whole texts becomes a model for specsampling.

`ScratchModel` asks for one callable, from token ids ``(B, n)`` to logits ``(B, n, V)``, and knows nothing else of what
is behind it. Its cache is the text itself, and every call scores that text from the start: slow, and right, because
what has no state has none to roll back wrongly. Begin like this, then make it fast with the suite watching.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from specsampling import Array, CacheError, Capabilities, CapabilityError

CAPABILITIES = Capabilities(dtypes=("float32", "float64"))


class TextCache(NamedTuple):
    """The tokens ``(B, capacity)``, and how many of them each row holds ``(B,)``."""

    tokens: np.ndarray
    lengths: np.ndarray


class ScratchModel:
    """A model without state, from a callable that is causal: logits at a position depend on nothing to the right."""

    max_rollback: int | None = None
    capabilities = CAPABILITIES

    def __init__(self, score_texts: Callable[[np.ndarray], np.ndarray], vocab_size: int) -> None:
        self.score_texts = score_texts
        self.vocab_size = vocab_size

    def init_cache(self, batch_size: int, capacity: int) -> TextCache:
        """Return an empty cache."""
        return TextCache(np.zeros((batch_size, capacity), dtype=np.int64), np.zeros(batch_size, dtype=np.int64))

    def score(
        self, cache: TextCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[np.ndarray, TextCache]:
        """Append a block ``(B, T)`` to the rows, each at its own length, and return the last `num_logits` positions."""
        block = np.asarray(tokens)
        width, capacity = block.shape[1], cache.tokens.shape[1]
        if cache.lengths.max() + width > capacity:
            raise CacheError(f"`tokens` must fit {capacity} tokens a row, got {cache.lengths.max()} and {width} more")
        texts, lengths = cache.tokens.copy(), cache.lengths + width
        np.put_along_axis(texts, cache.lengths[:, None] + np.arange(width), block, axis=1)
        # What is right of a row's end is padding, or was rolled back; a causal model does not see it.
        # One column at least: a block may have no tokens, also on an empty cache.
        logits = self.score_texts(texts[:, : max(lengths.max(), 1)])
        wanted = width if num_logits is None else num_logits
        positions = lengths[:, None] - wanted + np.arange(wanted)
        return np.take_along_axis(logits, positions[:, :, None], axis=1), TextCache(texts, lengths)

    def rollback(self, cache: TextCache, lengths: Array, /) -> TextCache:
        """Keep the first ``lengths[b]`` tokens of each row."""
        kept = np.array(lengths, dtype=np.int64)
        if ((kept < 0) | (kept > cache.lengths)).any():
            raise CacheError(f"`lengths` must be from 0 to {cache.lengths.tolist()}, got {kept.tolist()}")
        return TextCache(cache.tokens, kept)


def load(checkpoint: str | Path, *, dtype: str = "float32", device: str | None = None) -> ScratchModel:
    """Load a Llama checkpoint: the entry point that ``specsampling.load_model("smallest", …)`` calls."""
    if dtype not in CAPABILITIES.dtypes:
        raise CapabilityError(f"`dtype` must be one of {CAPABILITIES.dtypes}, got {dtype!r}")
    if device not in (None, "cpu"):
        raise CapabilityError(f"`device` must be None or 'cpu', got {device!r}")
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    stored = load_file(Path(checkpoint) / "model.safetensors")
    weights = {name: weight.astype(dtype) for name, weight in stored.items()}
    return ScratchModel(llama(config, weights), config["vocab_size"])


def llama(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that scores texts with a Llama: the equations of the model, and nothing besides."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["head_dim"]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    frequencies = config["rope_theta"] ** -(np.arange(0, size, 2) / size)

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T

    def norm(name, x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def split(x, count):  # (B, n, count * size) -> (B, count, n, size)
        return x.reshape(*x.shape[:2], count, size).swapaxes(1, 2)

    def rotate(x):
        angles = np.arange(x.shape[2])[:, None] * frequencies
        cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def attend(name, x):
        queries = rotate(split(linear(f"{name}.q_proj", x), heads))
        keys, values = (split(linear(f"{name}.{kind}_proj", x), kv_heads) for kind in "kv")
        keys, values = (np.repeat(one, heads // kv_heads, axis=1) for one in (rotate(keys), values))
        scores = queries @ keys.swapaxes(2, 3) / np.sqrt(size).astype(x.dtype)
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        weighted = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weighted / weighted.sum(axis=-1, keepdims=True) @ values
        return linear(f"{name}.o_proj", mixed.swapaxes(1, 2).reshape(*x.shape[:2], heads * size))

    def score_texts(tokens):
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
            x = x + attend(f"{layer}.self_attn", norm(f"{layer}.input_layernorm", x))
            inner = norm(f"{layer}.post_attention_layernorm", x)
            gate = linear(f"{layer}.mlp.gate_proj", inner)
            x = x + linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{layer}.mlp.up_proj", inner))
        return norm("model.norm", x) @ head.T

    return score_texts
