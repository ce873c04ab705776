"""Read a Hugging Face style directory (config.json and safetensors) and check one against the other.

Everything is checked on the headers, before a weight is read: a wrong file costs an error message, not memory.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specsampling import CapabilityError

from ._cache import Floats

__all__ = ["LlamaConfig", "open_weights", "read_config", "rotation_frequencies"]

_FAMILIES = ("llama", "mistral", "qwen2")
# bfloat16 is the upper half of a float32, which NumPy lacks: it is read as integers and shifted.
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


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
    query_bias, output_bias, mlp_bias : bool
        Which projections carry a bias: query, key and value; attention output; all of the MLP.
    rope : dict
        ``rope_theta``, ``rope_type`` and the constants of that type.
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
    rope: dict[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that the checkpoint must hold."""
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
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (hidden,)
            for name, (outputs, inputs, bias) in linear.items():
                shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (outputs,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_config(checkpoint: Path) -> LlamaConfig:
    """Read config.json.

    Raises
    ------
    FileNotFoundError
        If the directory or its config.json is missing.
    ValueError
        If the file is not a JSON object, or a size in it is missing or impossible.
    CapabilityError
        If it describes an architecture outside the Llama family, or a variant that is not supported.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json in {str(checkpoint)!r}: a checkpoint is a directory with config.json and model.safetensors"
        )
    raw = _read_object(path)
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise CapabilityError(f"{path}: `model_type` must be one of {', '.join(_FAMILIES)}, got {family!r}")

    def size(key: str, default: int | None = None) -> int:
        value = default if raw.get(key) is None else raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: `{key}` must be a positive integer, got {value!r}")
        return value

    heads = size("num_attention_heads")
    # transformers 5 writes both into `rope_parameters`; before it, theta stood alone and `rope_scaling` held the rest.
    scaling = _as_object(raw.get("rope_parameters") or raw.get("rope_scaling") or {}, f"{path}: `rope_parameters`")
    rope = {
        "rope_theta": raw.get("rope_theta", 10000.0),
        "rope_type": scaling.get("type", "default"),
        "partial_rotary_factor": raw.get("partial_rotary_factor"),
        **scaling,
    }
    config = LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=_positive(raw.get("rms_norm_eps", 1e-6), f"{path}: `rms_norm_eps`"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        query_bias=family == "qwen2" or bool(raw.get("attention_bias")),
        output_bias=family == "llama" and bool(raw.get("attention_bias")),
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
        rope=rope,
    )
    if config.head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{path}: `head_dim` must be even and `num_attention_heads` a multiple of `num_key_value_heads`, got "
            f"{config.head_dim}, {config.num_attention_heads} and {config.num_key_value_heads}"
        )
    sliding = raw.get("sliding_window") if family == "mistral" else raw.get("use_sliding_window")
    layer_types = [] if raw.get("layer_types") is None else _as_list(raw["layer_types"], f"{path}: `layer_types`")
    if sliding or any(kind != "full_attention" for kind in layer_types):
        raise CapabilityError(f"{path}: sliding-window attention is not supported, only full attention is")
    if raw.get("hidden_act", "silu") != "silu":
        raise CapabilityError(f"{path}: `hidden_act` must be 'silu', got {raw['hidden_act']!r}")
    rotation_frequencies(config, str(path))
    return config


def rotation_frequencies(config: LlamaConfig, path: str = "config.json") -> Floats:
    """Return the RoPE frequencies, radians per position, float64 of shape ``(head_dim / 2,)``.

    Raises
    ------
    CapabilityError
        If the scaling is none of default, linear and llama3.
    ValueError
        If one of its constants is missing or not a positive finite number.
    """
    rope = config.rope
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor") not in (None, 1):
        raise CapabilityError(f"{path}: RoPE must be of type default, linear or llama3 and whole, got {rope}")

    def constant(key: str) -> float:
        return _positive(rope.get(key), f"{path}: `{key}` of RoPE of type {kind!r}")

    frequencies: Floats = constant("rope_theta") ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if kind == "default":
        return frequencies
    slowed = frequencies / constant("factor")
    if kind == "linear":
        return slowed
    # Llama 3: wavelengths short against the original context stay, long ones are stretched, between them a blend.
    low, high = constant("low_freq_factor"), constant("high_freq_factor")
    if low == high:
        raise ValueError(f"{path}: `low_freq_factor` and `high_freq_factor` must differ, got {low} for both")
    turns = constant("original_max_position_embeddings") * frequencies / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    blend: Floats = keep * frequencies + (1 - keep) * slowed
    return blend


def open_weights(checkpoint: Path, config: LlamaConfig) -> Callable[[str], Floats]:
    """Check every tensor's name, shape and dtype against `config`, and return a function that reads one by name.

    Tensors come as stored, bfloat16 raised to float32. Nothing but safetensors headers is read until then. Where the
    config ties the head to the embedding and the file holds none, ``lm_head.weight`` is the embedding.

    Raises
    ------
    FileNotFoundError
        If there is neither model.safetensors nor model.safetensors.index.json, or a shard is missing.
    ValueError
        If a file is broken, or a tensor missing, unexpected or of the wrong shape.
    """
    found: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
    for path in _weight_files(checkpoint):
        found |= _read_header(path)
    source = checkpoint / "model.safetensors"
    shapes = config.shapes()
    embedding = "model.embed_tokens.weight"
    if config.tie_word_embeddings and "lm_head.weight" in found:
        shapes["lm_head.weight"] = shapes[embedding]
    for name, shape in shapes.items():
        if name not in found:
            raise ValueError(f"{source}: tensor {name!r} of shape {shape} is missing")
        path, stored, received, _ = found[name]
        if received != shape:
            raise ValueError(f"{path}: tensor {name!r} must have shape {shape} by config.json, got {received}")
        if stored not in _STORED:
            raise ValueError(f"{path}: tensor {name!r} must be one of {', '.join(_STORED)}, got {stored}")
    for name, (path, _, received, _) in found.items():
        # Old checkpoints store RoPE's frequencies.
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{path}: tensor {name!r} of shape {received} is not one that config.json calls for")
    found.setdefault("lm_head.weight", found[embedding])

    def read(name: str) -> Floats:
        path, stored, shape, offset = found[name]
        tensor = np.fromfile(path, dtype=_STORED[stored], count=int(np.prod(shape)), offset=offset).reshape(shape)
        return (tensor.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else tensor

    return read


def _weight_files(checkpoint: Path) -> list[Path]:
    single, index = checkpoint / "model.safetensors", checkpoint / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(
            f"no model.safetensors and no model.safetensors.index.json in {str(checkpoint)!r}: weights are read from "
            "safetensors only"
        )
    shards = _as_object(_read_object(index).get("weight_map"), f"{index}: `weight_map`")
    files = []
    for shard in sorted({str(file) for file in shards.values()}):
        if Path(shard).name != shard:
            raise ValueError(f"{index}: a shard must be a file beside the index, got {shard!r}")
        if not (checkpoint / shard).is_file():
            raise FileNotFoundError(f"{index} names {shard!r}, which is not there")
        files.append(checkpoint / shard)
    return files


def _read_header(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """Return file, stored dtype, shape and byte offset of each tensor, once safetensors has found the file sound."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a sound safetensors file: {error}") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: (path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return _as_object(content, f"the content of {path}")


def _as_object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} must be a JSON object, got {type(value).__name__}")


def _as_list(value: Any, what: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{what} must be a list, got {value!r}")


def _positive(value: Any, what: str) -> float:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{what} must be a positive finite number, got {value!r}")
    return float(value)
