"""Read config.json of the Llama family: sizes, constants, windows and rotations, checked as they are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specsampling import CapabilityError

from ._json import as_list, as_object, positive, read_object

__all__ = ["FAMILIES", "LlamaConfig", "read_config"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that :func:`read_config` understands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes and constants of a Llama-family decoder, under their names in config.json.

    Attributes
    ----------
    vocab_size, hidden_size, intermediate_size, num_hidden_layers : int
        Sizes of the vocabulary, the residual stream and the MLP, and the depth.
    num_attention_heads, num_key_value_heads, head_dim : int
        Query heads, the key and value heads they share, and the even width of each.
    max_position_embeddings : int
        Context limit in tokens.
    rms_norm_eps : float
        Added to the mean square in RMSNorm.
    tie_word_embeddings : bool
        The output head is the embedding, transposed, unless the file holds a head: that is then used, as transformers
        does from version 5 on.
    query_bias, output_bias, mlp_bias, head_norms : bool
        Which projections carry a bias: query, key and value; attention output; all of the MLP. And whether queries and
        keys are normalised head by head.
    windows : tuple of int or None
        For each layer, how many tokens back a position sees, itself included; None: all.
    frequencies : tuple of float
        RoPE's radians per position, ``head_dim / 2`` of them.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import LlamaConfig, read_config
    >>> config = read_config(specsampling.bundled("draft"))
    >>> isinstance(config, LlamaConfig), len(config.windows) == config.num_hidden_layers
    (True, True)
    >>> config.shapes()["model.embed_tokens.weight"] == (config.vocab_size, config.hidden_size)
    True
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    frequencies: tuple[float, ...]

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name, after ``model.layers.N.``, and shape of every tensor of a layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        linear = {  # (outputs, inputs, bias)
            "self_attn.q_proj": (queries, hidden, self.query_bias),
            "self_attn.k_proj": (keys, hidden, self.query_bias),
            "self_attn.v_proj": (keys, hidden, self.query_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.head_norms:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        for name, (outputs, inputs, bias) in linear.items():
            shapes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that the checkpoint must hold."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes


def read_config(checkpoint: Path, *, families: tuple[str, ...] = FAMILIES) -> LlamaConfig:
    """Read config.json.

    Parameters
    ----------
    checkpoint : Path
        The directory it is in.
    families : tuple of str, optional
        Those values of ``model_type`` that the caller serves.

    Returns
    -------
    LlamaConfig
        What it says, with the family's defaults filled in.

    Raises
    ------
    FileNotFoundError
        If the directory or its config.json is missing.
    ValueError
        If the file is not a JSON object, or a size in it is missing or impossible.
    CapabilityError
        If it describes an architecture outside the Llama family, or a variant that is not supported.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import read_config
    >>> read_config(specsampling.bundled("draft")).vocab_size
    256

    What an adapter of your own serves of the families that are understood is for it to say:

    >>> from specsampling_numpy import FAMILIES
    >>> FAMILIES
    ('llama', 'mistral', 'qwen2', 'qwen3')
    >>> read_config(specsampling.bundled("draft"), families=FAMILIES[2:])
    Traceback (most recent call last):
    specsampling...CapabilityError: ...config.json: `model_type` must be one of qwen2, qwen3, got 'llama'
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json in {str(checkpoint)!r}: a checkpoint is a directory with config.json and model.safetensors"
            + (", and this is a file" if checkpoint.is_file() else "")
        )
    raw = read_object(path)
    family = raw.get("model_type")
    if family not in families:
        raise CapabilityError(f"{path}: `model_type` must be one of {', '.join(families)}, got {family!r}")

    def size(key: str, default: int | None = None) -> int:
        value = default if raw.get(key) is None else raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: `{key}` must be a positive integer, got {value!r}")
        return value

    heads = size("num_attention_heads")
    key_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", 128 if family == "qwen3" else size("hidden_size") // heads)
    if head_dim % 2 or heads % key_heads:
        raise ValueError(
            f"{path}: `head_dim` must be even and `num_attention_heads` a multiple of `num_key_value_heads`, got "
            f"{head_dim}, {heads} and {key_heads}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CapabilityError(f"{path}: `hidden_act` must be 'silu', got {raw['hidden_act']!r}")
    biased = bool(raw.get("attention_bias"))
    return LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=positive(raw.get("rms_norm_eps", 1e-6), f"{path}: `rms_norm_eps`"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        query_bias=family == "qwen2" or (family in ("llama", "qwen3") and biased),
        output_bias=family in ("llama", "qwen3") and biased,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
        head_norms=family == "qwen3",
        windows=_windows(raw, size("num_hidden_layers"), path),
        frequencies=_frequencies(raw, head_dim, path),
    )


def _windows(raw: dict[str, Any], num_layers: int, path: Path) -> tuple[int | None, ...]:
    """Return each layer's attention window."""
    # Where the key is missing, transformers takes 4096 in every family that has windows; null is none.
    family, window = raw["model_type"], raw.get("sliding_window", 4096)
    if family == "llama" or (family != "mistral" and not raw.get("use_sliding_window")):
        window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{path}: `sliding_window` must be a positive integer or null, got {window!r}")
    kinds = None if raw.get("layer_types") is None else as_list(raw["layer_types"], f"{path}: `layer_types`")
    if kinds is None:
        # Before transformers 5 the Qwen families said from which layer on the window holds.
        first = 0 if family == "mistral" else raw.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        kinds = ["full_attention"] * num_layers if window is None else kinds
    strangers = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if strangers:
        raise CapabilityError(f"{path}: `layer_types` must be full_attention or sliding_attention, got {strangers}")
    if len(kinds) != num_layers or ("sliding_attention" in kinds and window is None):
        raise ValueError(
            f"{path}: `layer_types` must name {num_layers} layers, and `sliding_window` must be set where one slides, "
            f"got {kinds} and {raw.get('sliding_window')!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _frequencies(raw: dict[str, Any], head_dim: int, path: Path) -> tuple[float, ...]:
    """Return RoPE's frequencies."""
    # transformers 5 writes both into `rope_parameters`; before it, theta stood alone and `rope_scaling` held the rest.
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(f"{path}: `rope_parameters` and `rope_scaling` say two things, {new} and {old}")
    scaling = as_object(new or old or {}, f"{path}: `rope_parameters`")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise CapabilityError(f"{path}: RoPE must be the same in every layer, got {scaling}")
    rope = {
        "rope_theta": raw.get("rope_theta", 10000.0),
        "rope_type": scaling.get("type", "default"),
        "partial_rotary_factor": raw.get("partial_rotary_factor"),
        **scaling,
    }
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "llama3") or rope["partial_rotary_factor"] not in (None, 1):
        raise CapabilityError(f"{path}: RoPE must be of type default, linear or llama3 and whole, got {rope}")

    def constant(key: str) -> float:
        return positive(rope.get(key), f"{path}: `{key}` of RoPE of type {kind!r}")

    frequencies = constant("rope_theta") ** (-np.arange(0, head_dim, 2) / head_dim)
    if kind == "default":
        return tuple(frequencies.tolist())
    slowed = frequencies / constant("factor")
    if kind == "linear":
        return tuple(slowed.tolist())
    # Llama 3: wavelengths short against the original context stay, long ones are stretched, between them a blend.
    low, high = constant("low_freq_factor"), constant("high_freq_factor")
    if low >= high:
        raise ValueError(f"{path}: `low_freq_factor` must be below `high_freq_factor`, got {low} and {high}")
    turns = constant("original_max_position_embeddings") * frequencies / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((keep * frequencies + (1 - keep) * slowed).tolist())
