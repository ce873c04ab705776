"""The whole forward pass as compiled graphs of static shape: one for each batch size, block width and span of keys.

A graph knows no lengths. Where each row stands comes in as positions, from which it derives the mask and the places to
write to; what attention sees is a prefix of the cache, whose length goes into few buckets. Tokens are the first axis of
the memory, so that a prefix looks the same whatever the capacity is, and the graphs of one text serve all others.
"""

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specsampling import CapabilityError

from ._cache import KeyValueShape, RowStore
from ._checks import Ints
from ._masks import Visibility

__all__ = ["BACKEND", "CompiledForward", "SHORTEST_BUCKET", "WIDEST_BLOCK", "bucket", "refuse_compilation"]

BACKEND = "inductor"
SHORTEST_BUCKET = 128
WIDEST_BLOCK = 33
"""Blocks up to this width are compiled, K + 1 among them; wider ones are prompts, of any width, and stay eager."""

_NARROW = 2
"""Blocks up to this width are always compiled: what a draft is fed in every round."""

_SOON = 5
"""A width is compiled for when it comes again within fewer blocks than this, narrow ones between."""


def bucket(length: int) -> int:
    """Return the span of keys that a text of this length is given: powers of two, and halfway between them.

    Examples
    --------
    >>> from specsampling_torch._compile import bucket
    >>> [bucket(length) for length in (1, 128, 129, 200, 1000)]
    [128, 128, 192, 256, 1024]
    """
    power: int = 1 << max(length - 1, SHORTEST_BUCKET - 1).bit_length()
    between = power // 4 * 3
    return between if length <= between and between > SHORTEST_BUCKET else power


def refuse_compilation(name: str, module: Any, is_recurrent: bool) -> None:
    """Raise `CapabilityError` where there is no compiler, or nothing that it could make one graph of."""
    if is_recurrent:
        raise CapabilityError(f"{name} is recurrent: it keeps snapshots between tokens, which `compile=True` cannot")
    has_experts = any(part.endswith("experts") for part, _ in module.named_modules())
    if has_experts and getattr(module.config, "_experts_implementation", None) == "eager":
        raise CapabilityError(
            f"{name} has its experts in a Python loop over those that are hit, which `compile=True` cannot: load it "
            "with another `experts_implementation` (in float64 there is none)"
        )
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise CapabilityError(f"`compile=True` needs a module on one device, and {name} is on {places}")
    if BACKEND != "inductor":  # the others make no machine code
        return
    if devices.pop().type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise CapabilityError(
                "`compile=True` needs a C++ compiler on the CPU, and none was found: install g++, or name one in the "
                "environment variable CXX; `pack_weights=True` needs none"
            ) from error
    elif not torch.utils._triton.has_triton():
        raise CapabilityError("`compile=True` needs Triton on a GPU: install it, or leave `compile` out")


class _TracedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's prefix, as it stands for the cache within a graph."""

    is_sliding = False
    is_compileable = True
    supports_early_init = False

    def __init__(self, keys: Any, values: Any, positions: Any) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._positions = positions
        self._rows = torch.arange(positions.shape[0], device=positions.device)[:, None]

    def lazy_initialization(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ARG002 (transformers' signature)
        """Write a block at the positions of its tokens; return the prefix as ``(B, heads, span, size)``."""
        self.keys[self._positions, self._rows] = key_states.transpose(1, 2)
        self.values[self._positions, self._rows] = value_states.transpose(1, 2)
        return self.keys.permute(1, 2, 0, 3), self.values.permute(1, 2, 0, 3)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (transformers' signature)
        """Return how many keys `update` returns, and that they begin at position 0."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Return the span less the block: the length of a row as long as the bucket."""
        width: int = self._positions.shape[1]
        return self.get_max_length() - width

    def get_max_length(self) -> int:
        """Return the span."""
        span: int = self.keys.shape[0]
        return span

    get_max_cache_shape = get_max_length


class CompiledForward:
    """The forward pass of a module, compiled once for each shape that is asked for.

    Parameters
    ----------
    name : str
        How messages call the module.
    call : callable
        ``call(tokens, positions, visibility, store, num_logits)`` returns logits.
    layers : sequence
        What each layer keeps of a token, or the layer itself.
    mask_dtype : torch.dtype
        Of the masks.
    max_length : int or None
        Context limit: positions past it are padding, which no table of positions need hold.

    Attributes
    ----------
    graphs : dict
        From (batch size, block width, number of logits, span) to what was compiled for it.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], layers: Sequence[Any], mask_dtype: Any, max_length: int | None
    ) -> None:
        self._name, self._call, self._layers = name, call, layers
        self._mask_dtype, self._max_length = mask_dtype, max_length
        self.graphs: dict[tuple[int, int, int, int], Callable[..., Any]] = {}
        self._widths = {1, _NARROW}
        self._num_blocks = self._last_width = self._last_number = 0  # the latter two of the last wider block

    def takes(self, width: int, num_logits: int) -> bool:
        """Return whether blocks of this width are compiled: 1, 2, those warmed up, and what soon comes again.

        K + 1 does, after few rounds without a proposal, but not a prompt's last chunk or what a draft is fed before its
        first token, which have any width.
        """
        if num_logits == 0 or width > WIDEST_BLOCK:
            return False
        self._num_blocks += 1
        if width == self._last_width and self._num_blocks - self._last_number < _SOON:
            self._widths.add(width)
        if width > _NARROW:
            self._last_width, self._last_number = width, self._num_blocks
        return width in self._widths

    def __call__(self, store: RowStore, lengths: Ints, block: Any, num_logits: int) -> Any:
        """Feed a block ``(B, T)`` to rows of these lengths; return logits that nothing else holds."""
        batch_size, width = block.shape
        # Strides are compiled for too, and an axis of one entry may have any; this way they are those of the warm-up.
        block = block.reshape(-1).view(batch_size, width)
        span = bucket(int(lengths.max()) + width)
        key = batch_size, width, num_logits, span
        if key not in self.graphs:
            self.graphs[key] = self._compile(span, num_logits)
        device = block.device
        positions = torch.as_tensor(lengths[:, None] + np.arange(width)).to(device, non_blocking=True)
        if device.type != "cpu":
            torch.compiler.cudagraph_mark_step_begin()
        try:
            logits = self.graphs[key](block, positions, store.prefixes(span))
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            why = str(error).strip().partition("\n")[0]
            raise CapabilityError(
                f"{self._name} cannot be compiled as one graph: {why}; load it without `compile`"
            ) from error
        # A CUDA graph writes to the same memory each time it is replayed.
        return logits if device.type == "cpu" else logits.clone()

    def warm_up(self, store: RowStore, widths: Sequence[int], longest: int) -> None:
        """Compile the graphs of these widths for every bucket up to that of a text of `longest` tokens."""
        batch_size = store.num_rows
        device = next(layer for layer in self._layers if isinstance(layer, KeyValueShape)).device
        self._widths.update(widths)
        ends = sorted({bucket(length) for length in range(1, longest + 1)})
        for end, width in itertools.product(ends, widths):
            lengths = np.full(batch_size, min(end, longest) - width, dtype=np.int64)
            if lengths[0] < 0:
                continue
            block = torch.zeros((batch_size, width), dtype=torch.int64, device=device)
            for _ in range(1 if device.type == "cpu" else 3):  # CUDA graphs are warmed up, recorded, then replayed
                self(store, lengths, block, width)

    def _compile(self, span: int, num_logits: int) -> Callable[..., Any]:
        call, layers, mask_dtype, max_length = self._call, self._layers, self._mask_dtype, self._max_length

        def forward(tokens: Any, positions: Any, prefixes: Sequence[Any]) -> Any:
            held = iter(prefixes)
            store = Cache(
                layers=[
                    _TracedLayer(next(held), next(held), positions) if isinstance(layer, KeyValueShape) else layer
                    for layer in layers
                ]
            )
            visibility = Visibility(positions, span, mask_dtype)
            if max_length is not None and span > max_length:
                positions = positions.clamp(max=max_length - 1)
            return call(tokens, positions, visibility, store, num_logits)

        # Compilers count what they compiled by code object, and give up after a few: each shape is its own function.
        own = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, "forward", forward.__defaults__, forward.__closure__
        )
        on_cpu = all(layer.device.type == "cpu" for layer in layers if isinstance(layer, KeyValueShape))
        compiled: Callable[..., Any] = torch.compile(
            own, fullgraph=True, dynamic=False, backend=BACKEND, mode="default" if on_cpu else "reduce-overhead"
        )
        return compiled
