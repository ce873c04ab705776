"""A small Llama in JAX whose rounds are compiled whole: the smallest adapter with `compile_round`."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from safetensors.numpy import load_file

from specsampling import ModelDrafter, UniformRandomness, decode_round


class JaxCache(NamedTuple):
    keys: Any
    values: Any
    lengths: Any


class HostRandomness:
    """Asks the host for every answer, in order; which host object answers is in the box."""

    def __init__(self, box: list[Any]) -> None:
        self._box = box

    def accept(self, numerator: Any, denominator: Any, label: Any) -> Any:
        shape = jax.ShapeDtypeStruct(numerator.shape, jnp.bool_)
        ask = lambda p, q: np.asarray(self._box[0].accept(np.asarray(p), np.asarray(q), label))
        return io_callback(ask, shape, numerator, denominator, ordered=True)

    def categorical(self, weights: Any, label: Any) -> Any:
        shape = jax.ShapeDtypeStruct(weights.shape[:1], jnp.int32)
        ask = lambda w: np.asarray(self._box[0].categorical(np.asarray(w), label), dtype=np.int32)
        return io_callback(ask, shape, weights, ordered=True)


class JaxModel:
    max_rollback = None

    def __init__(self, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: jnp.asarray(w) for name, w in load_file(checkpoint / "model.safetensors").items()}
        self.vocab_size = config["vocab_size"]
        self.max_length = config["max_position_embeddings"]
        self.head_size = config["head_dim"]
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.epsilon = config["rms_norm_eps"]
        self.frequencies = config["rope_theta"] ** -(np.arange(0, self.head_size, 2) / self.head_size)
        self.num_traces = 0

    def init_cache(self, batch_size: int, capacity: int) -> JaxCache:
        shape = (self.num_layers, batch_size, capacity, self.head_size)
        return JaxCache(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(batch_size, dtype=jnp.int32))

    def rollback(self, cache: JaxCache, lengths: Any, /) -> JaxCache:
        return cache._replace(lengths=jnp.asarray(lengths, dtype=jnp.int32))

    def score(self, cache: JaxCache, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Any, JaxCache]:
        return _score(self, num_logits, cache, jnp.asarray(tokens))

    def compile_round(self, drafter: Any, sampling: Any, lookahead: int) -> Any:
        box: list[Any] = [None]

        def traced(carry: Any, context: Any, limits: Any, uniforms: Any, draft_sampling: Any, logprobs: Any) -> Any:
            self.num_traces += 1
            randomness = HostRandomness(box) if uniforms is None else UniformRandomness(uniforms, lookahead)
            return decode_round(
                self, drafter, carry, context, limits, None, randomness,
                lookahead=lookahead, sampling=sampling, draft_sampling=draft_sampling, logprobs=logprobs,
            )  # fmt: skip

        compiled = jax.jit(traced, static_argnums=(4, 5))

        def decode(target, drafter, carry, context, limits, end_bans, randomness, /, *, lookahead, sampling,
                   draft_sampling=None, end_tokens=(), logprobs=None, validate=False):  # fmt: skip
            if not isinstance(drafter, ModelDrafter | None):  # looks at the text on the host
                return decode_round(
                    target, drafter, carry, context, limits, end_bans, randomness, lookahead=lookahead,
                    sampling=sampling, draft_sampling=draft_sampling, end_tokens=end_tokens, logprobs=logprobs,
                )  # fmt: skip
            # Before a model's first answer nothing says where its arrays live, and within a trace it must be known.
            here = lambda like: jnp.zeros((0, 0)) if like is None else like
            carry = carry._replace(like=here(carry.like))
            if isinstance(drafter, ModelDrafter):
                state = drafter.catch_up(carry.drafter_state, context, drafter.traced_width)
                carry = carry._replace(drafter_state=state._replace(like=here(state.like)))
            uniforms = None
            if isinstance(randomness, UniformRandomness):
                uniforms = randomness.uniforms_like(jnp.zeros(1, dtype=jnp.float32))
            box[0] = randomness
            result = compiled(carry, context, limits, uniforms, draft_sampling, logprobs)
            jax.block_until_ready(result)
            jax.effects_barrier()
            return result

        return decode


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(model: JaxModel, num_logits: int | None, cache: JaxCache, tokens: Any) -> tuple[Any, JaxCache]:
    weights, size = model.weights, model.head_size
    rows, width = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
    slots = cache.lengths[:, None] + jnp.arange(width)
    visible = jnp.arange(cache.keys.shape[2]) <= slots[:, :, None]
    angles = slots[:, :, None, None] * jnp.asarray(model.frequencies, dtype=jnp.float32)

    def normed(x: Any, name: str) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + model.epsilon) * weights[name]

    def rotated(x: Any) -> Any:
        first, second = jnp.split(x, 2, axis=-1)
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    hidden = weights["model.embed_tokens.weight"][tokens]
    keys, values = cache.keys, cache.values
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        inner = normed(hidden, at + "input_layernorm.weight")
        heads = inner @ weights[at + "self_attn.q_proj.weight"].T
        query = rotated(heads.reshape(*heads.shape[:2], model.num_heads, size))
        key = rotated((inner @ weights[at + "self_attn.k_proj.weight"].T)[:, :, None, :])[:, :, 0]
        keys = keys.at[layer, rows, slots].set(key)
        values = values.at[layer, rows, slots].set(inner @ weights[at + "self_attn.v_proj.weight"].T)
        scores = jnp.einsum("bthd,bsd->bhts", query, keys[layer]) / size**0.5
        attention = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        attended = jnp.einsum("bhts,bsd->bthd", attention, values[layer]).reshape(*tokens.shape, -1)
        hidden = hidden + attended @ weights[at + "self_attn.o_proj.weight"].T
        inner = normed(hidden, at + "post_attention_layernorm.weight")
        gated = jax.nn.silu(inner @ weights[at + "mlp.gate_proj.weight"].T) * (
            inner @ weights[at + "mlp.up_proj.weight"].T
        )
        hidden = hidden + gated @ weights[at + "mlp.down_proj.weight"].T
    logits = normed(hidden, "model.norm.weight") @ weights["lm_head.weight"].T
    wanted = width if num_logits is None else num_logits
    return logits[:, width - wanted :], JaxCache(keys, values, cache.lengths + width)
