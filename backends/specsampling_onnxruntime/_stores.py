"""A batch's memory for each layout, and how a block is fed to a session that keeps its keys and values that way.

No key or value ever leaves the device: buffers are bound, rearranged there, and bound again.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from array_api_compat import array_namespace

from ._buffers import Buffers, new_buffers
from ._checks import Ints
from ._device import Device, as_array
from ._layouts import IN_PLACE, NO_CACHE, PAST_AND_PRESENT, SHARED_BUFFER, Layout

__all__ = ["BufferStore", "PastStore", "Runner", "Store", "TokenStore", "new_store"]

_SMALLEST = 64
"""Tokens that the first buffers hold; larger ones are multiples of it."""

_SLACK = 32
"""Masked entries that a past may hold before it is compacted, whatever its length."""


class Runner(NamedTuple):
    """A session and what is needed to call it.

    Attributes
    ----------
    session : InferenceSession
        The session.
    layout : Layout
        What its graph takes and gives.
    device : Device
        Where it computes.
    vocab_size : int
        Number of token ids, V.
    framework : str
        Where logits go.
    max_length : int or None
        Context limit: positions past it, where only padding is, are clamped.
    """

    session: Any
    layout: Layout
    device: Device
    vocab_size: int
    framework: str
    max_length: int | None

    def run(self, binding: Any, feeds: dict[str, Any], batch_size: int, num_logits: int) -> Any:
        """Feed small arrays of the host, and return logits ``(B, num_logits, V)``, newly allocated."""
        logits = self.device.empty((batch_size, num_logits, self.vocab_size), self.layout.dtype)
        binding.bind_ortvalue_output("logits", logits)
        for name, array in feeds.items():
            if name in self.layout.inputs:
                binding.bind_cpu_input(name, np.ascontiguousarray(array, dtype=self.layout.inputs[name]))
        self.session.run_with_iobinding(binding)
        if self.device.kind != "cpu":
            binding.synchronize_outputs()
        return as_array(logits, self.framework)

    def positions(self, lengths: Ints, block: int) -> Ints:
        """Return the positions ``(B, T)`` of a block."""
        positions: Ints = lengths[:, None] + np.arange(block)
        return positions if self.max_length is None else np.minimum(positions, self.max_length - 1)


class Store(Protocol):
    """The memory of a batch. It is told the rows' lengths and does not keep them."""

    def feed(self, tokens: Ints, lengths: Ints, num_logits: int) -> Any:
        """Append a block behind each row's length, and return the logits of its last positions."""
        ...

    def keep(self, lengths: Ints) -> None:
        """Forget what lies past these lengths."""
        ...

    def select(self, rows: Ints, lengths: Ints) -> "Store":
        """Return a store of some rows, given their lengths."""
        ...


def new_store(runner: Runner, batch_size: int, capacity: int) -> Store:
    """Return an empty store for the runner's layout, of which no more than `capacity` tokens a row are asked."""
    if runner.layout.kind in (IN_PLACE, SHARED_BUFFER):
        return BufferStore(runner, batch_size, capacity)
    stores: dict[str, Any] = {PAST_AND_PRESENT: PastStore, NO_CACHE: TokenStore}
    store: Store = stores[runner.layout.kind](runner, batch_size)
    return store


class BufferStore:
    """Buffers bound as input and as output, so that a block is written into them and nothing is copied.

    Attention's work grows with the buffer. So a buffer holds little more than the longest row, and becomes a quarter
    larger when the row has outgrown it: copies then cost a fraction of what was computed in between. Where the row may
    not grow by more than that, it is given all it may need and nothing is copied.
    """

    def __init__(self, runner: Runner, batch_size: int, capacity: int) -> None:
        self._runner, self._batch_size, self._capacity = runner, batch_size, capacity
        self._hold(new_buffers(runner.device, runner.layout.caches, batch_size, capacity + -capacity % _SMALLEST), 0)

    def _hold(self, buffers: Buffers, size: int) -> None:
        self._buffers, self._size = buffers, size
        self._binding = self._runner.session.io_binding()
        for cache, value in zip(self._runner.layout.caches, buffers.values, strict=True):
            self._binding.bind_ortvalue_input(cache.past, value)
            self._binding.bind_ortvalue_output(cache.present, value)

    @property
    def buffers(self) -> list[Any]:
        """Keys and values as they are bound."""
        return self._buffers.values

    def feed(self, tokens: Ints, lengths: Ints, num_logits: int) -> Any:
        """Append a block; see `Store`."""
        span = int(lengths.max()) + tokens.shape[1]
        if span > self._size:
            self._grow(int(lengths.max()), span)
        if self._runner.layout.kind == IN_PLACE:
            wanted = np.arange(tokens.shape[1] - num_logits, tokens.shape[1])
            feeds = {"input_ids": tokens, "past_lengths": lengths, "logit_positions": wanted}
            return self._runner.run(self._binding, feeds, self._batch_size, num_logits)
        return self._feed_by_mask(tokens, lengths)[:, tokens.shape[1] - num_logits :]

    def _feed_by_mask(self, tokens: Ints, lengths: Ints) -> Any:
        """Feed GroupQueryAttention, which takes the length of its one row, the block included, from the mask."""
        runner, block = self._runner, tokens.shape[1]
        # It turns keys by a table that ends at the context limit. Past that there is but padding, which is not fed.
        room = block if runner.max_length is None else min(max(runner.max_length - int(lengths.max()), 0), block)
        padding = as_array(
            runner.device.zeros((1, block - room, runner.vocab_size), runner.layout.dtype), runner.framework
        )
        if room == 0:
            return padding
        feeds = {"input_ids": tokens[:, :room], "attention_mask": np.ones((1, int(lengths.max()) + room))}
        feeds["position_ids"] = runner.positions(lengths, room)
        logits = runner.run(self._binding, feeds, 1, room)
        return logits if room == block else array_namespace(logits).concat([logits, padding], axis=1)

    def _grow(self, held: int, span: int) -> None:
        size = max(span, self._size + self._size // 4)
        if self._capacity <= span + span // 4:
            size = self._capacity
        size += -size % _SMALLEST
        self._binding = None  # it would keep what is replaced
        self._buffers.grow(held, size)
        self._hold(self._buffers, size)

    def keep(self, lengths: Ints) -> None:
        """Do nothing: what lies past a row's length is not seen, and is overwritten."""

    def select(self, rows: Ints, lengths: Ints) -> "BufferStore":  # noqa: ARG002 (other stores need them)
        """Return a store of some rows; see `Store`."""
        chosen = BufferStore(self._runner, len(rows), self._capacity)
        chosen._hold(self._buffers.select(rows), self._size)
        return chosen


class PastStore:
    """What the last step returned as ``present``, with a mask of the entries that count.

    Every step appends to all rows at the same place. What a row has rolled back is masked where it lies; once there are
    many such entries, the others are moved together.
    """

    def __init__(self, runner: Runner, batch_size: int) -> None:
        self._runner, self._batch_size = runner, batch_size
        # Which entries count, (B, entries); those of a row are in the order of its tokens.
        self.mask = np.zeros((batch_size, 0), dtype=bool)
        self.past = [runner.device.zeros((batch_size, c.heads, 0, c.size), c.dtype) for c in runner.layout.caches]

    def feed(self, tokens: Ints, lengths: Ints, num_logits: int) -> Any:
        """Append a block; see `Store`."""
        longest = int(lengths.max())
        if self.mask.shape[1] - longest > max(_SLACK, longest // 4):
            self._compact(longest)
        runner, caches = self._runner, self._runner.layout.caches
        mask = np.concatenate([self.mask, np.ones(tokens.shape, dtype=bool)], axis=1)
        binding = runner.session.io_binding()
        for cache, past in zip(caches, self.past, strict=True):
            binding.bind_ortvalue_input(cache.past, past)
            binding.bind_output(cache.present, runner.device.kind, runner.device.index)
        feeds = {"input_ids": tokens, "attention_mask": mask}
        feeds["position_ids"] = runner.positions(lengths, tokens.shape[1])
        logits = runner.run(binding, feeds, self._batch_size, tokens.shape[1])
        # Outputs come in the order in which they were bound.
        self.past, self.mask = binding.get_outputs()[: len(caches)], mask
        return logits[:, tokens.shape[1] - num_logits :]

    def _compact(self, longest: int) -> None:
        order = np.argsort(~self.mask, axis=1, kind="stable")[:, :longest]
        self.mask = np.take_along_axis(self.mask, order, axis=1)
        for index, past in enumerate(self.past):
            self.past[index] = self._runner.device.take_columns(past, np.ascontiguousarray(order))

    def keep(self, lengths: Ints) -> None:
        """Mask what lies past these lengths."""
        self.mask = self.mask & (self.mask.cumsum(axis=1) <= lengths[:, None])

    def select(self, rows: Ints, lengths: Ints) -> "PastStore":  # noqa: ARG002 (other stores need them)
        """Return a store of some rows; see `Store`."""
        chosen = PastStore(self._runner, len(rows))
        chosen.mask = self.mask[rows]
        chosen.past = [self._runner.device.take_rows(past, rows) for past in self.past]
        return chosen


class TokenStore:
    """The tokens themselves: without a cache every step computes all of the text again."""

    def __init__(self, runner: Runner, batch_size: int) -> None:
        self._runner, self._tokens = runner, np.zeros((batch_size, 0), dtype=np.int64)

    def feed(self, tokens: Ints, lengths: Ints, num_logits: int) -> Any:
        """Append a block; see `Store`."""
        (batch_size, block), longest = tokens.shape, int(lengths.max())
        texts = np.zeros((batch_size, longest + block), dtype=np.int64)
        texts[:, :longest] = self._tokens[:, :longest]
        rows, positions = np.arange(batch_size)[:, None], lengths[:, None] + np.arange(block)
        texts[rows, positions] = tokens
        self._tokens = texts
        if num_logits == 0:  # nothing to compute, and nothing to keep but the tokens
            return as_array(
                self._runner.device.empty((batch_size, 0, self._runner.vocab_size), self._runner.layout.dtype),
                self._runner.framework,
            )
        feeds = {"input_ids": texts, "attention_mask": np.arange(longest + block) < lengths[:, None] + block}
        feeds["position_ids"] = self._runner.positions(np.zeros(batch_size, dtype=np.int64), longest + block)
        logits = self._runner.run(self._runner.session.io_binding(), feeds, batch_size, longest + block)
        return logits[rows, positions[:, block - num_logits :]]

    def keep(self, lengths: Ints) -> None:
        """Do nothing: what lies past a row's length is overwritten."""

    def select(self, rows: Ints, lengths: Ints) -> "TokenStore":  # noqa: ARG002 (other stores need them)
        """Return a store of some rows; see `Store`."""
        chosen = TokenStore(self._runner, len(rows))
        chosen._tokens = self._tokens[rows]
        return chosen
