"""Tell from a graph's inputs and outputs how it keeps its keys and values, and refuse what cannot be served."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from specsampling import CapabilityError

from ._build import DEVICE_KEY, LAYOUT_KEY, LAYOUT_VERSION, MAX_LENGTH_KEY

__all__ = ["CacheTensor", "IN_PLACE", "Layout", "NO_CACHE", "PAST_AND_PRESENT", "SHARED_BUFFER", "read_layout"]

IN_PLACE = "in place"
"""That of `build` and `export`: a block is written at each row's length."""

PAST_AND_PRESENT = "past and present"
"""That of Optimum and of ``torch.onnx.export``: ``present`` is ``past`` and the block behind it, newly allocated."""

SHARED_BUFFER = "shared buffer"
"""That of onnxruntime-genai: GroupQueryAttention appends in place, its lengths are those of the mask."""

NO_CACHE = "no cache"
"""All of the text in, all of the logits out."""

_KNOWN_INPUTS = {
    IN_PLACE: {"past_lengths", "logit_positions"},
    PAST_AND_PRESENT: {"attention_mask", "position_ids"},
    SHARED_BUFFER: {"attention_mask", "position_ids"},
    NO_CACHE: {"attention_mask", "position_ids"},
}
# Of Optimum and genai, and of ours.
_CACHE_INPUT = re.compile(r"past_key_values\.(\d+)\.(key|value)|cache\.(\d+)\.(key|value)")

# They scale activations by the largest entry of the whole tensor, other rows and positions included.
_ROW_DEPENDENT = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}


class _Tensor:
    """A declared input or output: an axis is an int, or a str or None where it is dynamic."""

    def __init__(self, declared: Any) -> None:
        kind = declared.type.tensor_type
        self.name: str = declared.name
        self.shape: tuple[int | str | None, ...] = tuple(
            axis.dim_value if axis.HasField("dim_value") else (axis.dim_param or None) for axis in kind.shape.dim
        )
        self.dtype: Any = helper.tensor_dtype_to_np_dtype(kind.elem_type)

    def __str__(self) -> str:
        return f"{self.name!r} of shape ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """Keys or values of one layer.

    Attributes
    ----------
    past, present : str
        Names of the input and of the output.
    heads, size : int
        Key heads and their width: the shape is ``(B, heads, tokens, size)``.
    dtype : dtype
        Its dtype.
    """

    past: str
    present: str
    heads: int
    size: int
    dtype: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a graph takes and gives.

    Attributes
    ----------
    kind : str
        One of the four of this module.
    inputs : dict of str to dtype
        All inputs but the cache's.
    caches : tuple of CacheTensor
        Keys and values of all layers.
    vocab_size : int or None
        V; None where the graph does not declare it.
    dtype : dtype
        That of the logits.
    max_length : int or None
        Context limit, where the file or a config beside it says one.
    max_batch_size : int or None
        Where the graph's batch axis is fixed, or its kernel takes one row at a time.
    device : str or None
        The only kind of device that it was built for; None for any.
    """

    kind: str
    inputs: dict[str, Any]
    caches: tuple[CacheTensor, ...]
    vocab_size: int | None
    dtype: Any
    max_length: int | None
    max_batch_size: int | None
    device: str | None


def read_layout(path: Path) -> Layout:
    """Inspect a graph; its weights are not read.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not an ONNX model.
    CapabilityError
        If the layout is unknown, or is one that cannot be served; the message names the tensor and the remedy.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no ONNX file {str(path)!r}")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, whose home differs between its implementations
        raise ValueError(f"{path} is not an ONNX model: {error}") from error
    operators = {node.op_type for node in model.graph.node} | {n.op_type for f in model.functions for n in f.node}
    if found := sorted(operators & _ROW_DEPENDENT):
        raise CapabilityError(
            f"{path}: {found[0]} scales activations by the largest entry of the whole batch, so what a row says would "
            "depend on the other rows; quantise the weights only (MatMulNBits), as `build` does with dtype 'int8'"
        )
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {tensor.name: tensor for tensor in map(_Tensor, model.graph.input) if tensor.name not in constants}
    outputs = {tensor.name: tensor for tensor in map(_Tensor, model.graph.output)}
    tokens, logits = _tokens_and_logits(path, inputs, outputs)
    caches = tuple(
        _cache_tensor(path, tensor, outputs) for name, tensor in inputs.items() if _CACHE_INPUT.fullmatch(name)
    )
    properties = {entry.key: entry.value for entry in model.metadata_props}
    if LAYOUT_KEY in properties:
        if properties[LAYOUT_KEY] != LAYOUT_VERSION:
            raise CapabilityError(
                f"{path} has version {properties[LAYOUT_KEY]!r} of the layout of `build`, and this is "
                f"{LAYOUT_VERSION!r}: build it anew"
            )
        kind = IN_PLACE
    elif not caches:
        kind = NO_CACHE
    else:
        kind = SHARED_BUFFER if "GroupQueryAttention" in operators else PAST_AND_PRESENT
    others = {name: tensor for name, tensor in inputs.items() if not _CACHE_INPUT.fullmatch(name)}
    _check_inputs(path, kind, others)
    rows = tokens.shape[0]
    if isinstance(rows, int) and rows != 1:
        raise CapabilityError(f"{path}: input {tokens} takes {rows} rows, no more and no fewer: {_EXPORT_DYNAMIC}")
    vocab_size = logits.shape[2]
    stated = properties.get(MAX_LENGTH_KEY)
    return Layout(
        kind=kind,
        inputs={name: tensor.dtype for name, tensor in others.items()},
        caches=caches,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
        dtype=logits.dtype,
        max_length=int(stated) if stated else _context_length(path.parent),
        max_batch_size=1 if rows == 1 or kind == SHARED_BUFFER else None,
        device=properties.get(DEVICE_KEY),
    )


_EXPORT_DYNAMIC = "export the model with dynamic batch, block and past axes, or make the graph with `build` or `export`"


def _tokens_and_logits(path: Path, inputs: dict[str, _Tensor], outputs: dict[str, _Tensor]) -> tuple[_Tensor, _Tensor]:
    if "input_ids" not in inputs:
        raise CapabilityError(f"{path} has no input 'input_ids' (B, T) but {_listed(inputs)}: {_EXPORT_DYNAMIC}")
    if "logits" not in outputs:
        raise CapabilityError(
            f"{path} has no output 'logits' (B, T, V) but {_listed(outputs)}: export a causal language model with its "
            "head, and with 'logits' among the output names"
        )
    tokens, logits = inputs["input_ids"], outputs["logits"]
    if len(tokens.shape) != 2 or len(logits.shape) != 3:
        raise CapabilityError(f"{path} must map input_ids (B, T) to logits (B, T, V), got {tokens} and {logits}")
    for tensor in (tokens, logits):
        if isinstance(tensor.shape[1], int):
            raise CapabilityError(
                f"{path}: {tensor} has a fixed block axis, so it scores {tensor.shape[1]} token(s) a call and a "
                f"draft's proposals cannot be verified at once: {_EXPORT_DYNAMIC}"
            )
    return tokens, logits


def _cache_tensor(path: Path, past: _Tensor, outputs: dict[str, _Tensor]) -> CacheTensor:
    match = _CACHE_INPUT.fullmatch(past.name)
    assert match is not None
    layer, kind, own_layer, own_kind = match.groups()
    present = f"present.{layer}.{kind}" if layer else f"updated.{own_layer}.{own_kind}"
    if present not in outputs:
        raise CapabilityError(
            f"{path}: input {past} has no output {present!r} to go with it: what a step adds to the cache would be "
            "lost; export the model with its cache as output (use_cache=True)"
        )
    size = past.shape[-1] if past.shape else None
    if not isinstance(size, int):  # onnxruntime-genai's builder writes it beside the graph
        size = _beside(path.parent / "genai_config.json", "model", "decoder", "head_size")
    if len(past.shape) != 4 or not isinstance(past.shape[1], int) or size is None:
        raise CapabilityError(
            f"{path}: input {past} must have shape (B, heads, tokens, size), heads and size fixed: {_EXPORT_DYNAMIC}"
        )
    if isinstance(past.shape[2], int):
        raise CapabilityError(f"{path}: input {past} has a fixed past of {past.shape[2]} tokens: {_EXPORT_DYNAMIC}")
    return CacheTensor(past=past.name, present=present, heads=past.shape[1], size=size, dtype=past.dtype)


def _check_inputs(path: Path, kind: str, others: dict[str, _Tensor]) -> None:
    if strangers := [tensor for name, tensor in others.items() if name not in {"input_ids", *_KNOWN_INPUTS[kind]}]:
        raise CapabilityError(
            f"{path}: input {strangers[0]} is not known for a graph with {kind} layout, which takes input_ids, "
            f"{', '.join(sorted(_KNOWN_INPUTS[kind]))} and the cache: {_EXPORT_DYNAMIC}"
        )
    needed = {IN_PLACE: _KNOWN_INPUTS[IN_PLACE], PAST_AND_PRESENT: _KNOWN_INPUTS[PAST_AND_PRESENT]}
    needed |= {SHARED_BUFFER: {"attention_mask"}, NO_CACHE: set()}
    if missing := sorted(needed[kind] - others.keys()):
        raise CapabilityError(
            f"{path} has no input {missing[0]!r} but {_listed(others)}: without it rows of different length get wrong "
            f"positions; export the model with {missing[0]!r} among its inputs"
        )


def _listed(tensors: dict[str, _Tensor]) -> str:
    return ", ".join(map(str, tensors.values())) or "none at all"


def _context_length(folder: Path) -> int | None:
    """Return the context limit that a config beside the graph gives, if any does."""
    limit = _beside(folder / "genai_config.json", "model", "context_length")
    return limit or _beside(folder / "config.json", "max_position_embeddings")


def _beside(path: Path, *keys: str) -> int | None:
    """Return a positive number from a JSON file beside the graph, or None where there is none."""
    if not path.is_file():
        return None
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) and value > 0 else None
