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

from ._graph import CONTRIBUTED, GraphWriter
from ._quantization import BITS, add_product

__all__ = ["DEVICE_KEY", "DTYPES", "LAYOUT_KEY", "LAYOUT_VERSION", "MAX_LENGTH_KEY", "build"]

DTYPES = ("float32", "float16", "int8", "int4")
"""What :func:`build` makes: int8 and int4 are weights only, in float32 arithmetic."""

LAYOUT_KEY = "specsampling.layout"
LAYOUT_VERSION = "1"
"""Entry of a graph's metadata by which it is known to have the layout of this module."""

MAX_LENGTH_KEY = "specsampling.max_length"
"""Entry with the context limit."""

DEVICE_KEY = "specsampling.device"
"""Entry that names the only kind of device the graph runs on, where there is but one."""


_MOST_ROTATIONS = 2**15
"""Rows of a graph's table of rotations: that of a larger context would be as large as the weights of a small model."""


class _Alone(NamedTuple):
    """What GroupQueryAttention takes, for a step of one row."""

    condition: str  # whether the step is one that it serves
    last: str  # the place of each row's last token, (B,)
    total: str  # tokens held after the step, (1,)
    cosines: str  # (rows of the table, width / 2)
    sines: str


class _Step(NamedTuple):
    """What all layers of one step share."""

    past_lengths: str
    cosines: str
    sines: str
    masks: dict[int | None, str]  # by window: 0 or -inf, (B, 1, T * groups, capacity)
    merged: str  # the shape (B, T, heads * width)
    alone: _Alone | None


def build(
    checkpoint: str | PathLike[str], out: str | PathLike[str], *, dtype: str = "float32", device: str = "cpu"
) -> Path:
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
    device : str
        Where it will run, "cpu" or "cuda". For the CPU attention is made of operators of ONNX Runtime's own; a graph
        for CUDA does the same with those that every provider has, and runs anywhere.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    FileNotFoundError
        If the directory or a file in it is missing.
    ValueError
        If `dtype` or `device` is another, or config and weights do not agree.
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
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be 'cpu' or 'cuda', got {device!r}")
    config = read_config(Path(checkpoint))
    weights = open_weights(Path(checkpoint), config)
    graph = GraphWriter()
    _Decoder(graph, config, weights, dtype, device).write()
    path = Path(out)
    properties = {LAYOUT_KEY: LAYOUT_VERSION, MAX_LENGTH_KEY: str(config.max_position_embeddings)}
    graph.write(path, properties | ({DEVICE_KEY: device} if device == "cpu" else {}))
    return path


class _Decoder:
    """Writes the nodes.

    The query heads that share a key are rows of one matrix. In a layer without a choice (see `_has_choice`) a token's
    ``heads`` are stored so that those with the same place in their groups stand side by side: then
    ``(B, T, heads * width)`` *is* ``(B, T * groups, kv_heads * width)``. Elsewhere they are transposed.
    """

    def __init__(self, graph: GraphWriter, config: LlamaConfig, weights: Weights, dtype: str, device: str) -> None:
        self.graph, self.config, self.weights, self.device = graph, config, weights, device
        self.bits = BITS.get(dtype)
        self.dtype = np.dtype("float32" if self.bits else dtype)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def _has_choice(self, layer: int) -> bool:
        """Return whether an `If` in this layer has a step of one row take GroupQueryAttention.

        In ONNX Runtime's graphs for the CPU it takes one row only, and heads as wide as a multiple of 16. Layers with a
        window go without, because releases differ by one in what they call one; so does float16, where it and what
        other steps take are a rounding apart that is large.
        """
        config, is_full = self.config, self.config.windows[layer] is None
        return self.device == "cpu" and self.dtype == np.float32 and config.head_dim % 16 == 0 and is_full

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
        change = None  # what is still to be added to x
        for layer in range(config.num_hidden_layers):
            x, normalised = self._add_and_norm(x, change, f"model.layers.{layer}.input_layernorm.weight")
            change = self._attention(normalised, layer, step)
            x, normalised = self._add_and_norm(x, change, f"model.layers.{layer}.post_attention_layernorm.weight")
            change = self._mlp(normalised, layer)
        x = x if change is None else graph.add("Add", x, change)
        x = self._norm(graph.add("Gather", x, wanted, axis=1), "model.norm.weight")
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

    def _add_and_norm(self, x: str, change: str | None, name: str) -> tuple[str, str]:
        """Return ``x + change`` and its normalisation, of one operator: what a small step costs is their number."""
        if change is None:
            return x, self._norm(x, name)
        weight, total, normalised = self.graph.add_weight(name, self._tensor(name)), f"{name}.sum", f"{name}.normalised"
        self.graph.add_split(
            "SkipSimplifiedLayerNormalization",
            x,
            change,
            weight,
            outputs=[normalised, "", "", total],
            domain=CONTRIBUTED,
            epsilon=self.config.rms_norm_eps,
        )
        return total, normalised

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
        rows = graph.add("Unsqueeze", positions, graph.constant([2]))
        rows = graph.add("Tile", rows, graph.constant([1, 1, self.groups]))
        rows = graph.add("Reshape", rows, graph.constant([0, 1, -1, 1]))
        capacity = graph.add("Squeeze", graph.add("Shape", "cache.0.key", start=2, end=3))
        columns = graph.add("Range", zero, capacity, one)
        masks: dict[int | None, str] = {}
        for window in dict.fromkeys(config.windows):
            seen = graph.add("LessOrEqual", columns, rows)
            if window is not None:
                near = graph.add("Greater", columns, graph.add("Sub", rows, graph.constant(window)))
                seen = graph.add("And", seen, near)
            masks[window] = graph.add("Where", seen, graph.constant(0, self.dtype), graph.constant(-np.inf, self.dtype))
        width = graph.constant([config.num_attention_heads * config.head_dim])
        merged = graph.add("Concat", graph.add("Shape", tokens), width, axis=0)
        alone = self._alone(tokens, past_lengths) if any(map(self._has_choice, range(len(config.windows)))) else None
        return _Step(past_lengths, cosines, sines, masks, merged, alone)

    def _alone(self, tokens: str, past_lengths: str) -> _Alone:
        graph, config = self.graph, self.config
        size = min(config.max_position_embeddings, _MOST_ROTATIONS)
        angles = np.arange(size)[:, None] * np.asarray(config.frequencies)
        cosines, sines = (
            graph.add_weight(f"rotations.{function.__name__}", function(angles).astype(self.dtype))
            for function in (np.cos, np.sin)
        )
        batch, block = (graph.add("Shape", tokens, start=axis, end=axis + 1) for axis in (0, 1))
        totals = graph.add("Add", past_lengths, block)
        total = graph.add("ReduceMax", totals, keepdims=1)
        # Padding may lie past the table, and texts longer than it are possible.
        served = graph.add("LessOrEqual", total, graph.constant([size]))
        condition = graph.add("And", graph.add("Equal", batch, graph.constant([1])), served)
        last = graph.add("Cast", graph.add("Sub", totals, graph.constant([1])), to=_INT32)
        return _Alone(graph.add("Squeeze", condition), last, graph.add("Cast", total, to=_INT32), cosines, sines)

    def _attention(self, x: str, layer: int, step: _Step) -> str:
        graph, config = self.graph, self.config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        prefix, has_choice = f"model.layers.{layer}.self_attn.", self._has_choice(layer)
        bias = self._stacked(prefix, "bias", has_choice) if config.query_bias else None
        qkv = [add_product(graph, x, f"{prefix}qkv", self._stacked(prefix, "weight", has_choice), bias, bits=self.bits)]
        if config.head_norms:
            queries, keys, values = self._split(qkv)
            queries = self._norm_heads(queries, f"{prefix}q_norm.weight", heads, width**-0.5)
            qkv = [queries, self._norm_heads(keys, f"{prefix}k_norm.weight", kv_heads), values]
        mixed, cache = f"mixed.{layer}", [f"updated.{layer}.key", f"updated.{layer}.value"]
        weight = self._tensor(f"{prefix}o_proj.weight")
        if has_choice:
            shapes: dict[str, list[int | str]] = {mixed: ["batch", "block", heads * width]}
            shapes |= {name: ["batch", kv_heads, "capacity", width] for name in cache}
            graph.add_choice(
                step.alone.condition if step.alone else "",
                shapes,
                self.dtype,
                lambda names: self._attend_alone(qkv, layer, step, names),
                lambda names: self._attend(qkv, layer, step, names),
            )
        else:
            self._attend(qkv, layer, step, [mixed, *cache])
            weight = weight.reshape(-1, kv_heads, self.groups, width).swapaxes(1, 2).reshape(weight.shape)
        return self._product(mixed, f"{prefix}o_proj", weight, config.output_bias)

    def _split(self, qkv: list[str]) -> list[str]:
        if len(qkv) == 3:
            return qkv
        kv_size = self.config.num_key_value_heads * self.config.head_dim
        sizes = self.graph.constant([self.groups * kv_size, kv_size, kv_size])
        return self.graph.add_split("Split", *qkv, sizes, outputs=3, axis=-1)

    def _attend_alone(self, qkv: list[str], layer: int, step: _Step, names: list[str]) -> None:
        """Rotate, write the cache and attend in one operator."""
        assert step.alone is not None
        _, last, total, cosines, sines = step.alone
        cache = [f"cache.{layer}.key", f"cache.{layer}.value"]
        self.graph.add_split(
            "GroupQueryAttention", *(qkv if len(qkv) == 3 else [*qkv, "", ""]), *cache, last, total, cosines, sines,
            outputs=names, domain=CONTRIBUTED, num_heads=self.config.num_attention_heads,
            kv_num_heads=self.config.num_key_value_heads, scale=1.0, do_rotary=1,
        )  # fmt: skip

    def _attend(self, qkv: list[str], layer: int, step: _Step, names: list[str]) -> None:
        graph, config = self.graph, self.config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        queries, keys, values = self._split(qkv)
        queries = graph.add("RotaryEmbedding", queries, step.cosines, step.sines, num_heads=heads)
        keys = graph.add("RotaryEmbedding", keys, step.cosines, step.sines, num_heads=kv_heads)
        keys, values = (
            graph.add(
                "TensorScatter",
                f"cache.{layer}.{kind}",
                self._by_head(new),
                step.past_lengths,
                output=name,
                axis=2,
            )
            for kind, new, name in (("key", keys, names[1]), ("value", values, names[2]))
        )
        moves = self._has_choice(layer) and self.groups > 1 and kv_heads > 1  # else there is but one order
        if moves:
            queries = graph.add("Reshape", queries, graph.constant([0, 0, kv_heads, self.groups, width]))
            queries = graph.add("Transpose", queries, perm=[0, 1, 3, 2, 4])
        queries = graph.add("Reshape", queries, graph.constant([0, -1, kv_heads * width]))
        mixed = self._mix(queries, keys, values, step.masks[config.windows[layer]])
        if moves:
            mixed = graph.add("Reshape", mixed, graph.constant([0, -1, self.groups, kv_heads, width]))
            mixed = graph.add("Transpose", mixed, perm=[0, 1, 3, 2, 4])
        graph.add("Reshape", mixed, step.merged, output=names[0])

    def _stacked(self, prefix: str, kind: str, has_choice: bool) -> NDArray[Any]:
        """Return what makes queries, keys and values at once; queries are scaled, and without a choice reordered."""
        config = self.config
        queries, keys, values = (self._tensor(f"{prefix}{name}_proj.{kind}") for name in "qkv")
        if not config.head_norms:  # else the norm scales them
            queries = queries * self.dtype.type(config.head_dim**-0.5)
        if not has_choice:
            by_group = queries.reshape(config.num_key_value_heads, self.groups, config.head_dim, -1).swapaxes(0, 1)
            queries = by_group.reshape(queries.shape)
        return np.concatenate([queries, keys, values])

    def _norm_heads(self, x: str, name: str, heads: int, scale: float = 1.0) -> str:
        width = self.config.head_dim
        normalised = self._norm(self.graph.add("Reshape", x, self.graph.constant([0, 0, heads, width])), name, scale)
        return self.graph.add("Reshape", normalised, self.graph.constant([0, 0, heads * width]))

    def _by_head(self, x: str) -> str:
        """Turn ``(B, n, kv_heads * width)`` into ``(B, kv_heads, n, width)``."""
        shape = self.graph.constant([0, 0, self.config.num_key_value_heads, self.config.head_dim])
        return self.graph.add("Transpose", self.graph.add("Reshape", x, shape), perm=[0, 2, 1, 3])

    def _mix(self, queries: str, keys: str, values: str, mask: str) -> str:
        """Return the mean of `values` for each of the queries ``(B, n, kv_heads * width)``, heads last but one."""
        graph = self.graph
        if self.device == "cpu":
            heads = self.config.num_key_value_heads
            operands = [queries, keys, values, "", "", mask]
            return graph.add("MultiHeadAttention", *operands, domain=CONTRIBUTED, num_heads=heads, scale=1.0)
        # ONNX Runtime makes one operator of the first two, which reads the keys where they are.
        scores = graph.add("MatMul", self._by_head(queries), graph.add("Transpose", keys, perm=[0, 1, 3, 2]))
        weights = graph.add("Softmax", graph.add("Add", scores, mask), axis=-1)
        return graph.add("Transpose", graph.add("MatMul", weights, values), perm=[0, 2, 1, 3])

    def _mlp(self, x: str, layer: int) -> str:
        graph, prefix, has_bias = self.graph, f"model.layers.{layer}.mlp.", self.config.mlp_bias
        # Two products: one of both would have to be split, and what it wrote copied.
        gate, up = (self._linear(x, f"{prefix}{name}_proj", has_bias) for name in ("gate", "up"))
        silu = graph.add("Mul", gate, graph.add("Sigmoid", gate))
        return self._linear(graph.add("Mul", silu, up), f"{prefix}down_proj", has_bias)

    def _linear(self, x: str, name: str, has_bias: bool) -> str:
        return self._product(x, name, self._tensor(f"{name}.weight"), has_bias)

    def _product(self, x: str, name: str, weight: NDArray[Any], has_bias: bool) -> str:
        bias = self._tensor(f"{name}.bias") if has_bias else None
        return add_product(self.graph, x, name, weight, bias, bits=self.bits)


_INT32, _DOUBLE = 6, 11  # onnx.TensorProto.INT32 and DOUBLE
