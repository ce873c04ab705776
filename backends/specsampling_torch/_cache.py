"""Keys and values in preallocated tensors, each row's block written at that row's own positions.

Transformers' caches give every row of a batch one length, so rows that differ are padded and a rollback of one row is
impossible. Here a row's length is a number on the host: `score` writes behind it, attention sees the span that is in
use as a view, and a rollback is a smaller number. Nothing is moved or copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specsampling import CacheError

from ._checks import Ints

__all__ = [
    "KeyValueShape",
    "RecordingLayer",
    "RowLayer",
    "RowStore",
    "ShapeRecorder",
    "allocate",
    "out_of_memory",
    "select_layer",
]


class KeyValueShape(NamedTuple):
    """What one attention layer keeps of one token.

    Attributes
    ----------
    num_heads : int
        Key (and value) heads; of a sharded model, those of this process.
    key_size, value_size : int
        Their widths.
    dtype, device : object
        Where and how they are stored.
    """

    num_heads: int
    key_size: int
    value_size: int
    dtype: Any
    device: Any

    @property
    def num_bytes(self) -> int:
        """Bytes per token and row."""
        itemsize: int = self.dtype.itemsize
        return self.num_heads * (self.key_size + self.value_size) * itemsize


class _Place:
    """Where the next block goes, shared by all layers of a store."""

    def __init__(self) -> None:
        self.start: int | None = 0  # where every row begins, if they all begin at the same position
        self.block = 0
        self.span = 0
        self._positions: Any = None
        self._index: dict[Any, tuple[Any, Any]] = {}

    def set(self, lengths: Ints, block: int, positions: Any) -> None:
        first = int(lengths[0])
        self.block = block
        self.start = first if (lengths == first).all() else None
        self.span = int(lengths.max()) + block
        self._positions = positions
        self._index = {}

    def index(self, device: Any) -> tuple[Any, Any]:
        """Return rows ``(B, 1)`` and positions ``(B, T)`` on a device."""
        if device not in self._index:
            positions = self._positions.to(device)
            self._index[device] = torch.arange(len(positions), device=device)[:, None], positions
        return self._index[device]


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, ``(B, heads, capacity, size)`` each."""

    is_sliding = False
    is_compileable = True
    supports_early_init = False

    def __init__(self, keys: Any, values: Any, place: _Place) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.device = keys.device
        self.is_initialized = True
        self._place = place

    def lazy_initialization(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: all memory is there from the beginning."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ARG002 (transformers' signature)
        """Write a block ``(B, heads, T, size)`` behind each row's length; return views of the span in use."""
        place = self._place
        if place.start is not None:
            # One strided copy. The general case below costs several times as much, and most calls need no more.
            slots = slice(place.start, place.start + place.block)
            self.keys[:, :, slots] = key_states
            self.values[:, :, slots] = value_states
        else:
            rows, positions = place.index(self.device)
            self.keys[rows, :, positions] = key_states.transpose(1, 2)
            self.values[rows, :, positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : place.span], self.values[:, :, : place.span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (transformers' signature)
        """Return how many keys `update` returns, and that they begin at position 0."""
        return self._place.span, 0

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row held before this block."""
        return self._place.span - self._place.block

    def get_max_length(self) -> int:
        """Return the capacity."""
        capacity: int = self.keys.shape[2]
        return capacity

    get_max_cache_shape = get_max_length  # what older versions call it


class RowStore(Cache):  # type: ignore[misc]
    """Every layer's keys and values, as the object that a transformers model takes for its cache.

    Parameters
    ----------
    layers : sequence
        For each layer what it keeps of a token, or the layer itself.
    batch_size, capacity : int
        Rows, and tokens of each.
    tokens_first : bool, default: False
        Lay the memory out so that the first tokens of all rows are its beginning, whatever the capacity: compiled
        graphs are given such prefixes.
    """

    def __init__(self, layers: Sequence[Any], batch_size: int, capacity: int, *, tokens_first: bool = False) -> None:
        self.place = _Place()
        self.num_rows = batch_size
        self._prefixes: dict[int, list[Any]] = {}
        super().__init__(
            layers=[
                RowLayer(*allocate(layer, batch_size, capacity, tokens_first=tokens_first), self.place)
                if isinstance(layer, KeyValueShape)
                else layer
                for layer in layers
            ]
        )

    def prefixes(self, span: int) -> list[Any]:
        """Return each layer's first `span` keys and values, ``(span, B, heads, size)``: the same objects each time."""
        if span not in self._prefixes:
            held = [x for layer in self.layers if isinstance(layer, RowLayer) for x in (layer.keys, layer.values)]
            self._prefixes[span] = [x.permute(2, 0, 1, 3)[:span] for x in held]
            for x in self._prefixes[span]:
                # CUDA graphs then write to it where it is.
                torch._dynamo.mark_static_address(x)
        return self._prefixes[span]

    def select(self, rows: Any) -> "RowStore":
        """Return a store of some rows, with memory of its own."""
        chosen = RowStore.__new__(RowStore)
        chosen.place = _Place()
        chosen.num_rows = len(rows)
        chosen._prefixes = {}
        Cache.__init__(chosen, layers=[select_layer(layer, rows, chosen.place) for layer in self.layers])
        return chosen


def select_layer(layer: Any, rows: Any, place: _Place) -> Any:
    """Return some rows of a layer, with memory of their own; a layer that keeps nothing is returned as it is."""
    if not isinstance(layer, RowLayer):
        return layer
    index = rows.to(layer.device)
    return RowLayer(layer.keys.index_select(0, index), layer.values.index_select(0, index), place)


def allocate(shape: KeyValueShape, batch_size: int, capacity: int, *, tokens_first: bool = False) -> tuple[Any, Any]:
    """Return zeroed keys and values: weight 0 times a NaN that was left in memory would be NaN."""

    def zeros(size: int) -> Any:
        if tokens_first:
            whole = torch.zeros((capacity, batch_size, shape.num_heads, size), dtype=shape.dtype, device=shape.device)
            return whole.permute(1, 2, 0, 3)
        return torch.zeros((batch_size, shape.num_heads, capacity, size), dtype=shape.dtype, device=shape.device)

    return zeros(shape.key_size), zeros(shape.value_size)


def out_of_memory(per_token: int, per_row: int, batch_size: int, capacity: int) -> CacheError:
    """Return the error that says how much memory a cache needs, given the bytes of a token and of a row's snapshots."""
    needed = batch_size * (capacity * per_token + per_row)
    snapshots = f", {per_row} bytes of snapshots a row" if per_row else ""
    return CacheError(
        f"out of memory: a cache of {batch_size} rows and {capacity} tokens each needs {needed / 2**20:,.0f} MiB "
        f"({per_token} bytes a token{snapshots}); use fewer rows, shorter texts or a narrower dtype"
    )


class RecordingLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer that keeps nothing, and remembers the shape of what it was given."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.shape: KeyValueShape | None = None

    def lazy_initialization(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:  # noqa: ARG002 (transformers' signature)
        """Take note, and return the block itself: everything there is in an empty cache."""
        _, num_heads, _, key_size = key_states.shape
        self.shape = KeyValueShape(num_heads, key_size, value_states.shape[-1], key_states.dtype, key_states.device)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the size of an empty cache and a block."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return that nothing is held."""
        return 0

    def get_max_length(self) -> int:
        """Return that there is no limit."""
        return -1

    get_max_cache_shape = get_max_length


class ShapeRecorder(Cache):  # type: ignore[misc]
    """A stand-in for a cache that learns from one token what each layer keeps.

    Configs tell it in a dozen ways, and of a sharded model not at all.

    Parameters
    ----------
    layers : sequence of layers, optional
        For models whose layers are not all alike; otherwise they are added as they are asked for.
    """

    def __init__(self, layers: Sequence[Any] | None = None) -> None:
        if layers is None:
            super().__init__(layer_class_to_replicate=RecordingLayer)
        else:
            super().__init__(layers=list(layers))
