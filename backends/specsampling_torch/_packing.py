"""Weights laid out for small blocks on the CPU, and attention that copies no keys.

Scoring K + 1 tokens should cost what one costs, since either way every weight is read once. PyTorch's own matrix
products miss that: MKL takes twice as long for two columns as for one. oneDNN's, over weights that were brought into
its own order beforehand, are nearly flat up to about eight tokens, and faster at every size. And where keys are shared
by groups of heads, transformers copies them for each head of a group as soon as there is a mask.
"""

import copy
import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["GROUPED", "PackedLinear", "can_pack", "group_heads", "grouped_attention", "packed_copy"]

GROUPED = "specsampling_grouped"

# oneDNN's layout differs little with the number of rows that it is told to expect; this suits 1 to 512.
_EXPECTED_ROWS = 8

_SMALLEST = 2**17
"""Smaller weights are read from the CPU's own cache, and oneDNN's longer call costs more than its order gains."""

_layers: WeakValueDictionary[int, "PackedLinear"] = WeakValueDictionary()
_numbers = itertools.count()

# Compilers cannot look into a packed weight, so within a graph a layer is called by its number.
_library = torch.library.Library("specsampling", "DEF")
_library.define("packed_linear(Tensor x, int layer, int out_features) -> Tensor")


@torch.library.impl(_library, "packed_linear", "CPU")  # type: ignore[untyped-decorator, unused-ignore]
def _packed_linear(x: Any, layer: int, out_features: int) -> Any:  # noqa: ARG001 (what the shape is told from)
    return _layers[layer].multiply(x)


@torch.library.register_fake("specsampling::packed_linear", lib=_library)  # type: ignore[untyped-decorator, unused-ignore]
def _(x: Any, layer: int, out_features: int) -> Any:  # noqa: ARG001 (the signature declared above)
    return x.new_empty((*x.shape[:-1], out_features))


class PackedLinear(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A linear layer over weights in oneDNN's own order; they are a copy, and the layer it replaces can be dropped.

    Parameters
    ----------
    linear : torch.nn.Linear
        The layer, on the CPU.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Not a buffer: a packed tensor has no storage that could be moved, copied or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _EXPECTED_ROWS)
        self._number = next(_numbers)
        _layers[self._number] = self

    def multiply(self, x: Any) -> Any:
        """Return ``x @ weight.T + bias``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def forward(self, x: Any) -> Any:
        """Return ``x @ weight.T + bias``."""
        if torch.compiler.is_compiling():
            return torch.ops.specsampling.packed_linear(x, self._number, self.out_features)
        return self.multiply(x)


def can_pack(linear: Any) -> bool:
    """Return whether a module is a plain linear layer on the CPU, in a dtype that oneDNN multiplies there."""
    # Subclasses are quantised layers and the like; hooks are how layers are sharded.
    if type(linear) is not torch.nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return False
    weight = linear.weight
    if type(weight.data) is not torch.Tensor or weight.device.type != "cpu" or not weight.numel():
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(weight.dtype == torch.float32)


def packed_copy(module: Any) -> Any:
    """Return a module of the same parameters, in which linear layers are packed where they can be and are large.

    The module itself stays as it is. What is not packed is shared with it.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(module.parameters(), module.buffers())}
    twin = copy.deepcopy(module, shared)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if can_pack(child) and child.weight.numel() >= _SMALLEST:
                setattr(parent, name, PackedLinear(child))
    return twin.eval()


def group_heads(module: Any) -> None:
    """Have a module's ``sdpa`` attention copy no keys; one that attends in another way, or is not known, stays."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) == "sdpa":
        config._attn_implementation = GROUPED
        config.get_text_config()._attn_implementation = GROUPED


def grouped_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Any, None]:
    """Attend as transformers' ``sdpa`` does, with the heads of a group as further queries of their common keys."""
    batch_size, num_heads, width, size = query.shape
    groups = num_heads // key.shape[1]
    if (
        groups == 1
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or options.get("position_bias") is not None
    ):
        result: tuple[Any, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    if options.get("softcap") is not None:
        raise ValueError("`sdpa` attention knows no soft cap")
    query = query.reshape(batch_size, key.shape[1], groups * width, size)
    mask = attention_mask if width == 1 else attention_mask.repeat(1, 1, groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    output = output.reshape(batch_size, num_heads, width, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
# For whoever calls the module itself: without this, transformers would leave windows and padding out.
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)
