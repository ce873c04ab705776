"""Trace a model of transformers into a graph whose cache is written by TensorScatter."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from specsampling import CapabilityError

# How a model of transformers is called with masks and positions is the PyTorch backend's knowledge.
from specsampling_torch import CausalLM

from ._build import LAYOUT_KEY, LAYOUT_VERSION, MAX_LENGTH_KEY
from ._graph import OPSET

__all__ = ["trace"]

_ROWS, _BLOCK, _CAPACITY = 2, 3, 7
"""Sizes that the model is traced with: all different, none of them one."""


class _ScatterLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers, written at each row's own length."""

    is_sliding = False
    is_compileable = True
    supports_early_init = False
    keys: Any
    values: Any

    def __init__(self, keys: Any, values: Any, past_lengths: Any) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._past_lengths = past_lengths

    def lazy_initialization(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the buffers are there."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ARG002 (transformers' signature)
        """Write a block ``(B, heads, T, size)``; return the whole buffers."""
        self.keys, self.values = (
            torch.onnx.ops.symbolic(
                "TensorScatter",
                (buffer, block, self._past_lengths),
                {"axis": 2},
                dtype=buffer.dtype,
                shape=buffer.shape,
                version=OPSET,
            )
            for buffer, block in ((self.keys, key_states), (self.values, value_states))
        )
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (transformers' signature)
        """Return the capacity, and that it begins at position 0."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return the capacity."""
        capacity: int = self.keys.shape[2]
        return capacity

    get_max_cache_shape = get_max_length  # what older versions call it


class _Step(torch.nn.Module):  # type: ignore[misc]
    """One step of a model as a function of tensors."""

    def __init__(self, module: Any, model: CausalLM) -> None:
        super().__init__()
        self.module, self._model = module, model  # the module is a submodule, so that its weights are the graph's

    def forward(self, input_ids: Any, past_lengths: Any, logit_positions: Any, *buffers: Any) -> tuple[Any, ...]:
        layers: list[Any] = [
            _ScatterLayer(keys, values, past_lengths) for keys, values in zip(buffers[::2], buffers[1::2], strict=True)
        ]
        positions = past_lengths[:, None] + torch.arange(input_ids.shape[1])
        if self._model.max_length is not None:
            positions = positions.clamp(max=self._model.max_length - 1)  # padding may lie past the limit
        span = buffers[0].shape[2]
        logits = self._model.logits(input_ids, positions, Cache(layers=layers), span=span, wanted=logit_positions)
        return logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values))


def trace(module: Any, path: Path) -> None:
    """Write the graph of a model."""
    model = CausalLM(module.eval())
    probe, zero = DynamicCache(config=model.config), torch.zeros((1, 1), dtype=torch.int64)
    with torch.no_grad():
        model.logits(zero, zero, probe, span=1, wanted=1)
    shapes = []
    for layer in probe.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise CapabilityError(f"{model.name} has layers that keep no keys and values: no graph can roll them back")
        shapes += [tuple(keys.shape), tuple(values.shape)]
    names = [f"{layer}.{kind}" for layer in range(len(probe.layers)) for kind in ("key", "value")]
    axes = {axis: torch.export.Dim(axis, min=1) for axis in ("batch", "block", "num_logits", "capacity")}
    by_axis = {0: axes["batch"], 2: axes["capacity"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        program: Any = torch.onnx.export(
            _Step(module, model).eval(),
            (
                torch.zeros((_ROWS, _BLOCK), dtype=torch.int64),
                torch.zeros(_ROWS, dtype=torch.int64),
                torch.arange(_BLOCK - 1),
                *(torch.zeros((_ROWS, heads, _CAPACITY, size), dtype=model.dtype) for _, heads, _, size in shapes),
            ),
            input_names=["input_ids", "past_lengths", "logit_positions", *(f"cache.{name}" for name in names)],
            output_names=["logits", *(f"updated.{name}" for name in names)],
            dynamic_shapes=(
                {0: axes["batch"], 1: axes["block"]},
                {0: axes["batch"]},
                {0: axes["num_logits"]},
                tuple(by_axis for _ in shapes),
            ),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    program.model.metadata_props[LAYOUT_KEY] = LAYOUT_VERSION
    if model.max_length is not None:
        program.model.metadata_props[MAX_LENGTH_KEY] = str(model.max_length)
    program.save(str(path), external_data=sum(p.nbytes for p in module.parameters()) > 2**24)
