"""Make the ONNX graph of a Llama-family checkpoint, with a cache that is written in place.

The graph takes ``input_ids (B, T)``, ``past_lengths (B,)`` (how many tokens each row holds, where its block begins),
``logit_positions (num_logits,)`` (which positions of the block are wanted), and for each layer N ``cache.N.key`` and
``cache.N.value``, ``(B, kv_heads, capacity, head_dim)``. It returns ``logits (B, num_logits, V)`` and
``updated.N.key`` and ``updated.N.value`` of the same shapes as the cache's. Whoever binds one buffer as both has
TensorScatter write the block into it and copy nothing.
"""

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling_numpy import LlamaConfig, Weights, open_weights, read_config

from ._graph import GraphWriter
from ._quantization import BITS, add_product

__all__ = ["DTYPES", "LAYOUT_KEY", "LAYOUT_VERSION", "MAX_LENGTH_KEY", "build"]

DTYPES = ("float32", "float16", "int8", "int4")
"""What :func:`build` makes: int8 and int4 are weights only, in float32 arithmetic."""

LAYOUT_KEY = "specsampling.layout"
LAYOUT_VERSION = "1"
"""Entry of a graph's metadata by which it is known to have the layout of this module."""

MAX_LENGTH_KEY = "specsampling.max_length"
"""Entry with the context limit."""


class _Step(NamedTuple):
    """What all layers of one step share."""

    past_lengths: str
    cosines: str
    sines: str
    masks: dict[int | None, str]  # by window: 0 or -inf, (B, 1, groups * T, capacity)


def build(checkpoint: str | PathLike[str], out: str | PathLike[str], *, dtype: str = "float32") -> Path:
    """Write the ONNX graph of a checkpoint of the Llama family.

    Parameters
    ----------
    checkpoint : path
        Directory with config.json and safetensors, as Hugging Face writes it. PyTorch is not needed.
    out : path
        The file to write. Weights of more than 16 MiB go to a second file, with ``.data`` behind its name.
    dtype : str
        "float32" or "float16"; or "int8" or "int4", where matrices are stored in blocks of integers (MatMulNBits) and
        everything else is float32.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    FileNotFoundError
        If the directory or a file in it is missing.
    ValueError
        If `dtype` is another, or config and weights do not agree.
    CapabilityError
        If the architecture is not supported.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import specsampling
    >>> from specsampling_onnxruntime import OnnxModel, build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = OnnxModel(build(specsampling.bundled("draft"), pathlib.Path(folder) / "draft.onnx"))
    >>> model.vocab_size, model.max_length
    (256, 1024)
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = read_config(Path(checkpoint))
    weights = open_weights(Path(checkpoint), config)
    graph = GraphWriter()
    _Decoder(graph, config, weights, dtype).write()
    path = Path(out)
    graph.write(path, {LAYOUT_KEY: LAYOUT_VERSION, MAX_LENGTH_KEY: str(config.max_position_embeddings)})
    return path


class _Decoder:
    def __init__(self, graph: GraphWriter, config: LlamaConfig, weights: Weights, dtype: str) -> None:
        self.graph, self.config, self.weights = graph, config, weights
        self.bits = BITS.get(dtype)
        self.dtype = np.dtype("float32" if self.bits else dtype)

    def write(self) -> None:
        graph, config = self.graph, self.config
        tokens = graph.add_input("input_ids", np.int64, ["batch", "block"])
        past_lengths = graph.add_input("past_lengths", np.int64, ["batch"])
        wanted = graph.add_input("logit_positions", np.int64, ["num_logits"])
        shape: list[int | str] = ["batch", config.num_key_value_heads, "capacity", config.head_dim]
        for layer in range(config.num_hidden_layers):
            for kind in ("key", "value"):
                graph.add_input(f"cache.{layer}.{kind}", self.dtype, shape)
        embedding = graph.add_weight("embedding", self._tensor("model.embed_tokens.weight"))
        x = graph.add("Gather", embedding, tokens, axis=0)
        step = self._step(tokens, past_lengths)
        for layer in range(config.num_hidden_layers):
            x = self._add_attention(x, layer, step)
            x = self._add_mlp(x, layer)
        x = graph.add("Gather", x, wanted, axis=1)
        x = self._norm(x, "model.norm.weight")
        head = self._tensor("lm_head.weight")
        add_product(graph, x, "head", head, None, bits=self.bits, output="logits")
        graph.add_output("logits", self.dtype, ["batch", "num_logits", config.vocab_size])
        for layer in range(config.num_hidden_layers):
            for kind in ("key", "value"):
                graph.add_output(f"updated.{layer}.{kind}", self.dtype, shape)

    def _tensor(self, name: str) -> NDArray[Any]:
        return self.weights.read(name).astype(self.dtype)

    def _norm(self, x: str, name: str, scale: float = 1.0) -> str:
        weight = self.graph.add_weight(name, self._tensor(name) * self.dtype.type(scale))
        return self.graph.add("RMSNormalization", x, weight, axis=-1, epsilon=self.config.rms_norm_eps)

    def _step(self, tokens: str, past_lengths: str) -> _Step:
        """Turn lengths into rotations and masks."""
        graph, config = self.graph, self.config
        block = graph.add("Squeeze", graph.add("Shape", tokens, start=1, end=2))
        zero, one = graph.constant(0), graph.constant(1)
        offsets = graph.add("Range", zero, block, one)
        positions = graph.add("Add", graph.add("Unsqueeze", past_lengths, graph.constant([1])), offsets)
        # In double precision: at position 8000 a rounded frequency turns a float32 angle by a thousandth.
        angles = graph.add("Cast", graph.add("Unsqueeze", positions, graph.constant([2])), to=_DOUBLE)
        angles = graph.add("Mul", angles, graph.constant(config.frequencies, np.float64))
        cosines, sines = (
            graph.add("CastLike", graph.add(function, angles), graph.constant(0, self.dtype))
            for function in ("Cos", "Sin")
        )
        # The query heads that share a key are rows of one matrix, head by head.
        groups = config.num_attention_heads // config.num_key_value_heads
        rows = graph.add("Tile", positions, graph.constant([1, groups]))
        rows = graph.add("Unsqueeze", rows, graph.constant([1, 3]))
        capacity = graph.add("Squeeze", graph.add("Shape", "cache.0.key", start=2, end=3))
        columns = graph.add("Range", zero, capacity, one)
        masks: dict[int | None, str] = {}
        for window in dict.fromkeys(config.windows):
            seen = graph.add("LessOrEqual", columns, rows)
            if window is not None:
                near = graph.add("Greater", columns, graph.add("Sub", rows, graph.constant(window)))
                seen = graph.add("And", seen, near)
            masks[window] = graph.add("Where", seen, graph.constant(0, self.dtype), graph.constant(-np.inf, self.dtype))
        return _Step(past_lengths, cosines, sines, masks)

    def _add_attention(self, x: str, layer: int, step: _Step) -> str:
        graph, config = self.graph, self.config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        prefix = f"model.layers.{layer}."
        scale = width**-0.5  # multiplied into whatever makes the queries

        def stacked(kind: str) -> NDArray[Any]:
            parts = [self._tensor(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv"]
            if not config.head_norms:
                parts[0] = parts[0] * self.dtype.type(scale)
            return np.concatenate(parts)

        normalised = self._norm(x, f"{prefix}input_layernorm.weight")
        bias = stacked("bias") if config.query_bias else None
        qkv = add_product(graph, normalised, f"{prefix}qkv", stacked("weight"), bias, bits=self.bits)
        qkv = graph.add("Reshape", qkv, graph.constant([0, 0, heads + 2 * kv_heads, width]))
        qkv = graph.add("Transpose", qkv, perm=[0, 2, 1, 3])
        if config.head_norms:
            parts = graph.constant([heads, kv_heads, kv_heads])
            queries, keys, values = graph.add_split("Split", qkv, parts, outputs=3, axis=1)
            queries = self._norm(queries, f"{prefix}self_attn.q_norm.weight", scale)
            keys = self._norm(keys, f"{prefix}self_attn.k_norm.weight")
            queries, keys = (graph.add("RotaryEmbedding", x, step.cosines, step.sines) for x in (queries, keys))
        else:
            turned, values = graph.add_split(
                "Split", qkv, graph.constant([heads + kv_heads, kv_heads]), outputs=2, axis=1
            )
            turned = graph.add("RotaryEmbedding", turned, step.cosines, step.sines)
            queries, keys = graph.add_split("Split", turned, graph.constant([heads, kv_heads]), outputs=2, axis=1)
        keys, values = (
            graph.add(
                "TensorScatter",
                f"cache.{layer}.{kind}",
                new,
                step.past_lengths,
                output=f"updated.{layer}.{kind}",
                axis=2,
            )
            for kind, new in (("key", keys), ("value", values))
        )
        queries = graph.add("Reshape", queries, graph.constant([0, kv_heads, -1, width]))
        # ONNX Runtime makes one operator of these two, which reads the keys where they are.
        scores = graph.add("MatMul", queries, graph.add("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = graph.add("Add", scores, step.masks[config.windows[layer]])
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), values)
        mixed = graph.add("Reshape", mixed, graph.constant([0, heads, -1, width]))
        mixed = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = graph.add("Reshape", mixed, graph.constant([0, 0, heads * width]))
        return graph.add("Add", x, self._linear(mixed, f"{prefix}self_attn.o_proj", config.output_bias))

    def _add_mlp(self, x: str, layer: int) -> str:
        graph, config = self.graph, self.config
        prefix = f"model.layers.{layer}."
        normalised = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        # One product rather than two: a block of five tokens was the cheaper by a twentieth.
        weight = self._stacked(f"{prefix}mlp", ("gate", "up"), "weight")
        bias = self._stacked(f"{prefix}mlp", ("gate", "up"), "bias") if config.mlp_bias else None
        both = add_product(graph, normalised, f"{prefix}gate_up", weight, bias, bits=self.bits)
        inner = config.intermediate_size
        gate, up = graph.add_split("Split", both, graph.constant([inner, inner]), outputs=2, axis=-1)
        silu = graph.add("Mul", gate, graph.add("Sigmoid", gate))
        return graph.add("Add", x, self._linear(graph.add("Mul", silu, up), f"{prefix}mlp.down_proj", config.mlp_bias))

    def _stacked(self, prefix: str, names: tuple[str, ...], kind: str) -> NDArray[Any]:
        return np.concatenate([self._tensor(f"{prefix}.{name}_proj.{kind}") for name in names])

    def _linear(self, x: str, name: str, has_bias: bool) -> str:
        bias = self._tensor(f"{name}.bias") if has_bias else None
        return add_product(self.graph, x, name, self._tensor(f"{name}.weight"), bias, bits=self.bits)


_DOUBLE = 11  # onnx.TensorProto.DOUBLE
