"""Adapter faults: capacity, selection, shapes, inputs and outputs handled wrong."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import CacheError, Capabilities
from specsampling_conformance._faults._registry import cache_fault
from specsampling_conformance._host import Array
from specsampling_conformance._reference import Floats, Ints, ReferenceCache, ReferenceModel

__all__: list[str] = []


@cache_fault("compaction forgets the values", "`select` takes the rows of the keys and leaves the values as they were.")
class _SelectForgetsValues(ReferenceModel):
    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        kept = super().select(cache, rows)
        return kept._replace(values=cache.values[:, : kept.lengths.size])


@cache_fault("compaction forgets the lengths", "`select` takes the rows of the storage and leaves the lengths.")
class _SelectForgetsLengths(ReferenceModel):
    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        kept = super().select(cache, rows)
        size = kept.lengths.size
        return kept._replace(lengths=cache.lengths[:size], positions=cache.positions[:size])


@cache_fault("compaction keeps the old order", "`select` returns the rows sorted, not in the order asked for.")
class _SelectSorts(ReferenceModel):
    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        return super().select(cache, np.sort(np.asarray(rows)))


@cache_fault("compaction keeps the first rows", "`select` keeps the right number of rows, but the first ones.")
class _SelectFirst(ReferenceModel):
    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        return super().select(cache, np.arange(np.asarray(rows).size))


@cache_fault(
    "undeclared select ignored",
    "An adapter that declares no `select` has one that returns the cache unchanged.",
    Capabilities(dtypes=("float32", "float64"), select=False),
)
class _SelectIgnored(ReferenceModel):
    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        return cache


@cache_fault("logits a reused buffer", "`score` returns a view of a buffer that the next call writes to.")
class _ReusedBuffer(ReferenceModel):
    buffer: Floats | None = None

    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        logits, cache = super().score(cache, tokens, num_logits=num_logits)
        if self.buffer is None or self.buffer.size < logits.size:
            self.buffer = np.empty(max(logits.size, 4096), logits.dtype)
        view = self.buffer[: logits.size].reshape(logits.shape)
        view[:] = logits
        return view, cache


@cache_fault("tokens modified", "`score` writes to the block it is given.")
class _TokensModified(ReferenceModel):
    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        result = super().score(cache, tokens, num_logits=num_logits)
        tokens[:, :] = 0
        return result


@cache_fault("lengths modified", "`rollback` writes to the lengths it is given.")
class _LengthsModified(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        rolled = super().rollback(cache, np.array(lengths))
        lengths -= 1
        return rolled


@cache_fault("overflow clamped to the last slot", "Entries past the capacity overwrite the last slot, silently.")
class _OverflowClamped(ReferenceModel):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        return

    def block_slots(self, cache: ReferenceCache, width: int) -> Ints:
        slots: Ints = np.minimum(super().block_slots(cache, width), cache.keys.shape[2] - 1)
        return slots


@cache_fault("overflow of one row unnoticed", "Room is checked for the first row only; the others are clamped.")
class _OverflowOfOneRow(_OverflowClamped):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        if int(cache.lengths[0]) + width > cache.keys.shape[2]:
            raise CacheError("`tokens` must fit the capacity")


@cache_fault("overflow corrupts", "A block that does not fit raises, after some of it has been written.")
class _OverflowCorrupts(ReferenceModel):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        if int(np.max(cache.lengths)) + width > cache.keys.shape[2]:
            cache.keys[:, :, 0] = 0.0
        super().check_capacity(cache, width)


@cache_fault("capacity one short", "A cache holds one token less than it was made for.")
class _OneShort(ReferenceModel):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        super().check_capacity(cache, width + 1)


@cache_fault("capacity spent by rollbacks", "What was rolled back still counts towards the capacity.")
class _CapacitySpent(ReferenceModel):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        super().check_capacity(cache._replace(lengths=np.maximum(cache.written, cache.lengths)), width)


@cache_fault("rollback beyond the row clamped", "A rollback to more tokens than the row holds is taken as a no-op.")
class _BeyondClamped(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        return super().rollback(cache, np.minimum(np.asarray(lengths), cache.lengths))


@cache_fault("rollback beyond the row believed", "A rollback to more tokens than the row holds brings back stale ones.")
class _BeyondBelieved(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        kept = np.asarray(lengths, dtype=np.int64)
        return cache._replace(lengths=kept, positions=kept)


@cache_fault("negative length clamped", "A negative length is taken as 0.")
class _NegativeClamped(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        return super().rollback(cache, np.maximum(np.asarray(lengths), 0))


@cache_fault("negative length read from the end", "A length of -1 is read as an index is: all but the last token.")
class _NegativeFromEnd(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        kept = np.asarray(lengths, dtype=np.int64)
        return super().rollback(cache, np.where(kept < 0, np.maximum(cache.lengths + kept, 0), kept))


@cache_fault("empty block refused on an empty cache", "A block of no tokens raises where there is nothing to score.")
class _EmptyRefused(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        if int(np.max(cache.lengths)) + width == 0:
            raise ValueError("zero-size array to reduction operation maximum which has no identity")
        return super().block_mask(cache, width)


@cache_fault("empty block kept as padding", "A block of no tokens is padded to one token, which stays in the cache.")
class _EmptyKept(ReferenceModel):
    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        block = np.asarray(tokens)
        if block.shape[1]:
            return super().score(cache, block, num_logits=num_logits)
        return super().score(cache, np.pad(block, ((0, 0), (0, 1))), num_logits=0)


@cache_fault("dtype ignored", "Whatever dtype is asked for, the model is loaded in float32.")
class _Float32Only(ReferenceModel):
    def __init__(self, checkpoint: Path, dtype: str) -> None:
        super().__init__(checkpoint, "float32")


@cache_fault("first positions instead of last", "`num_logits` returns the block's first positions.")
class _FirstPositions(ReferenceModel):
    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        return logits[:, :num_logits]


@cache_fault("num_logits zero means all", "`num_logits=0` is read as the default.")
class _ZeroMeansAll(ReferenceModel):
    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        return super().pick_logits(logits, num_logits or None)


@cache_fault("blocks without logits not appended", "A block scored with `num_logits=0` leaves the cache as it was.")
class _PrefillLost(ReferenceModel):
    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        logits, after = super().score(cache, tokens, num_logits=num_logits)
        return logits, cache if num_logits == 0 else after


@cache_fault(
    "only the logits' tokens appended", "A block is cut to its last `num_logits` tokens before it is appended."
)
class _CutToLogits(ReferenceModel):
    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        return super().score(cache, tokens[:, -num_logits:] if num_logits else tokens, num_logits=num_logits)


@cache_fault("logits shifted by one", "Row t of a block's logits is the law after position t - 1.")
class _Shifted(ReferenceModel):
    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        return super().pick_logits(np.concatenate([logits[:, :1], logits[:, :-1]], axis=1), num_logits)


@cache_fault("id 0 masked as padding", "Tokens of id 0 are taken for padding and never attended to.")
class _ZeroIsPadding(ReferenceModel):
    def write(self, storage: Floats, block: Floats, slots: Ints) -> None:
        super().write(storage, block * self.real[..., None, None], slots)

    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        # Only in blocks, where padding would be: an adapter that did so everywhere would be another, consistent model.
        self.real = (np.asarray(tokens) != 0) | (np.asarray(tokens).shape[1] == 1)
        return super().score(cache, tokens, num_logits=num_logits)


@cache_fault("one row squeezed", "A batch of one row loses its batch axis.")
class _Squeezed(ReferenceModel):
    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        picked = super().pick_logits(logits, num_logits)
        return picked[0] if picked.shape[0] == 1 else picked


@cache_fault("int32 refused", "Only int64 tokens are accepted.")
class _Int64Only(ReferenceModel):
    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        if np.asarray(tokens).dtype != np.int64:
            raise TypeError("expected int64")
        return super().score(cache, tokens, num_logits=num_logits)


@cache_fault("padding past max_length refused", "A block with columns past `max_length` raises.")
class _LimitEnforced(ReferenceModel):
    def check_capacity(self, cache: ReferenceCache, width: int) -> None:
        if int(np.max(cache.lengths)) + width > self.max_length:
            raise CacheError("`tokens` must not go past `max_length`")
        super().check_capacity(cache, width)


@cache_fault("neighbours mixed", "A row's logits take a little from the row before it.")
class _Mixed(ReferenceModel):
    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        return super().pick_logits(logits + 0.01 * np.roll(logits, 1, axis=0), num_logits)


@cache_fault("not repeatable", "Logits carry noise that differs from call to call, well below the tolerance.")
class _Noisy(ReferenceModel):
    calls = 0

    def pick_logits(self, logits: Floats, num_logits: int | None) -> Floats:
        self.calls += 1
        noise: Any = np.finfo(logits.dtype).eps * self.calls
        return super().pick_logits(logits * (1 + noise), num_logits)
