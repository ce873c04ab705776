"""Cache faults: rollback, positions, masks and storage gone wrong, one method of the reference model each."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

import numpy as np
from numpy.typing import NDArray

from specsampling import Capabilities
from specsampling_conformance._faults._registry import cache_fault
from specsampling_conformance._host import Array
from specsampling_conformance._reference import Floats, Ints, ReferenceCache, ReferenceModel

__all__: list[str] = []


class _Kept(ReferenceModel):
    """A model whose rollback keeps whatever lengths `kept` says."""

    def kept(self, held: Ints, lengths: Ints) -> Ints:
        raise NotImplementedError

    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        asked = np.asarray(lengths, dtype=np.int64)
        super().rollback(cache, asked)
        kept = np.clip(self.kept(cache.lengths, asked), 0, cache.lengths)
        return cache._replace(lengths=kept, positions=kept)


@cache_fault("rollback no-op", "`rollback` returns the cache as it was.")
class _NoOp(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return held


@cache_fault("rollback one too many", "`rollback` drops one token more than it was asked to.")
class _OneTooMany(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.where(lengths < held, lengths - 1, lengths)


@cache_fault("rollback one too few", "`rollback` keeps one token more than it was asked to.")
class _OneTooFew(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return lengths + 1


@cache_fault("every row rolled back to the longest", "`rollback` takes every row to the largest of the lengths.")
class _ToLongest(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.full_like(lengths, np.max(lengths))


@cache_fault("every row rolled back to the shortest", "`rollback` takes every row to the smallest of the lengths.")
class _ToShortest(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.full_like(lengths, np.min(lengths))


@cache_fault("rows' lengths swapped", "`rollback` reads the lengths in the wrong order of rows.")
class _Swapped(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return lengths[::-1]


@cache_fault("rollback by instead of to", "`rollback` takes the lengths as the number of tokens to drop.")
class _Relative(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return held - lengths


@cache_fault("rollback to zero ignored", "A length of 0 is read as no rollback at all.")
class _ZeroIgnored(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.where(lengths == 0, held, lengths)


@cache_fault("rollback empties the row", "Any rollback that drops a token drops them all.")
class _Empties(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.where(lengths < held, 0, held)


@cache_fault("first row only", "`rollback` treats the batch as one row: the others keep what they have.")
class _FirstRowOnly(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.concatenate([lengths[:1], held[1:]])


@cache_fault("second rollback ignored", "A rollback that follows another before any `score` does nothing.")
class _SecondIgnored(_Kept):
    rolled_back = False

    def kept(self, held: Ints, lengths: Ints) -> Ints:
        ignored, self.rolled_back = self.rolled_back, bool(np.any(lengths < held))
        return held if ignored else lengths

    def write(self, storage: Floats, block: Floats, slots: Ints) -> None:
        self.rolled_back = False
        super().write(storage, block, slots)


@cache_fault("positions not rolled back", "Rotary positions go on from the longest the row has been.")
class _PositionsKept(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        return super().rollback(cache, lengths)._replace(positions=cache.positions)


@cache_fault("positions of the longest row", "Every row's positions are those of the longest row.")
class _PositionsOfLongest(ReferenceModel):
    def block_positions(self, cache: ReferenceCache, width: int) -> Ints:
        return np.max(cache.lengths) + np.zeros_like(cache.lengths)[:, None] + np.arange(width)


@cache_fault("positions restart in every block", "A block's positions count from 0 after a rollback.")
class _PositionsRestart(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        rolled = super().rollback(cache, lengths)
        return rolled._replace(positions=np.where(rolled.lengths < cache.lengths, 0, cache.positions))


@cache_fault("stale entries attended", "The mask lets a token see entries that were rolled back and not overwritten.")
class _StaleAttended(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        slots = np.arange(cache.keys.shape[2])
        stale = (slots >= cache.lengths[:, None] + width) & (slots < cache.written[:, None])
        return super().block_mask(cache, width) | stale[:, None, :]


@cache_fault("rolled-back entries zeroed but attended", "A zero key still takes its share of the softmax.")
class _ZeroedAttended(_StaleAttended):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        rolled = super().rollback(cache, lengths)
        kept = (np.arange(cache.keys.shape[2]) < rolled.lengths[:, None])[None, :, :, None, None]
        return rolled._replace(keys=rolled.keys * kept, values=rolled.values * kept)


@cache_fault("write pointer not rolled back", "New entries are written after those that were rolled back.")
class _PointerKept(ReferenceModel):
    def block_slots(self, cache: ReferenceCache, width: int) -> Ints:
        slots: Ints = np.minimum(cache.written[:, None] + np.arange(width), cache.keys.shape[2] - 1)
        return slots


@cache_fault("write pointer of the longest row", "Every row's entries are written where the longest row's go.")
class _PointerOfLongest(ReferenceModel):
    def block_slots(self, cache: ReferenceCache, width: int) -> Ints:
        return np.max(cache.lengths) + np.zeros_like(cache.lengths)[:, None] + np.arange(width)


@cache_fault("mask from the longest row", "Every row attends to as many slots as the longest row has.")
class _MaskOfLongest(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        longest = np.full_like(cache.lengths, np.max(cache.lengths))
        return super().block_mask(cache._replace(lengths=longest), width)


@cache_fault("mask from the shortest row", "Every row attends to as many slots as the shortest row has.")
class _MaskOfShortest(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        shortest = np.full_like(cache.lengths, np.min(cache.lengths))
        return super().block_mask(cache._replace(lengths=shortest), width)


@cache_fault("cache rows one broadcast view", "All rows share one row of storage, and the last one written wins.")
class _BroadcastRows(ReferenceModel):
    def write(self, storage: Floats, block: Floats, slots: Ints) -> None:
        super().write(storage, block, slots)
        storage[:] = storage[-1:]


@cache_fault("block sees its own future", "Within a block the mask is not causal.")
class _SeesFuture(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        return np.broadcast_to(
            super().block_mask(cache, width)[:, -1:], (cache.lengths.size, width, cache.keys.shape[2])
        )


@cache_fault("block does not see itself", "A token of a block sees the cache and itself, but not the block before it.")
class _BlindBlock(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        slots = np.arange(cache.keys.shape[2])
        old = slots < cache.lengths[:, None]
        own = slots == cache.lengths[:, None, None] + np.arange(width)[:, None]
        mask: NDArray[np.bool_] = old[:, None, :] | own
        return mask


@cache_fault(
    "causal mask aligned top-left", "With fewer queries than keys the causal triangle starts at the first key."
)
class _TopLeft(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        if width == 1:
            return super().block_mask(cache, width)
        return np.broadcast_to(
            np.arange(cache.keys.shape[2]) <= np.arange(width)[:, None],
            (cache.lengths.size, width, cache.keys.shape[2]),
        )


@cache_fault(
    "last layer not rolled back", "One array of the cache keeps its old lengths: new values go after stale ones."
)
class _ValuesKept(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        rolled = super().rollback(cache, lengths)
        moved = np.roll(cache.values, 1, axis=2)
        changed = (rolled.lengths < cache.lengths)[None, :, None, None, None]
        return rolled._replace(values=np.where(changed, moved, cache.values))


@cache_fault("caches share their lengths", "The lengths belong to the model: two caches of one batch size are one.")
class _SharedLengths(ReferenceModel):
    shared: dict[int, Ints]

    def init_cache(self, batch_size: int, capacity: int) -> ReferenceCache:
        cache = super().init_cache(batch_size, capacity)
        self.shared = {**getattr(self, "shared", {}), batch_size: cache.lengths}
        return cache

    def score(
        self, cache: ReferenceCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[Floats, ReferenceCache]:
        lengths = self.shared[cache.lengths.size]
        logits, after = super().score(cache._replace(lengths=lengths, positions=lengths), tokens, num_logits=num_logits)
        self.shared[lengths.size] = after.lengths
        return logits, after

    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        rolled = super().rollback(cache, lengths)
        self.shared[rolled.lengths.size] = rolled.lengths
        return rolled

    def select(self, cache: ReferenceCache, rows: Array, /) -> ReferenceCache:
        kept = super().select(cache, rows)
        self.shared[kept.lengths.size] = kept.lengths
        return kept


@cache_fault("lengths kept by reference", "The cache's lengths are the very array that `rollback` was given.")
class _LengthsByReference(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        kept = np.asarray(lengths, dtype=np.int64)
        return super().rollback(cache, kept)._replace(lengths=kept, positions=kept)


@cache_fault("ring keeps its window only", "In a ring of 32 entries a rollback needs some that were written over.")
class _Ring(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        slots = np.arange(cache.keys.shape[2])
        last = cache.lengths[:, None] + np.arange(width)
        held = slots >= np.maximum(cache.written, cache.lengths + width)[:, None] - 32
        window = (slots > last[..., None] - 32) & held[:, None, :] & super().block_mask(cache, width)
        mask: NDArray[np.bool_] = window | (slots == last[..., None])
        return mask


@cache_fault("mask of the first tile", "Of a block wider than 16 tokens the later ones see what the 16th sees.")
class _FirstTile(ReferenceModel):
    def block_mask(self, cache: ReferenceCache, width: int) -> NDArray[np.bool_]:
        return super().block_mask(cache, width)[:, np.minimum(np.arange(width), 15)]


@cache_fault("deep rollback kept short", "A rollback by more than 32 tokens goes back by 32.")
class _DeepShort(_Kept):
    def kept(self, held: Ints, lengths: Ints) -> Ints:
        return np.maximum(lengths, held - 32)


class _Bounded(ReferenceModel):
    """A model that says it goes back two tokens at most, the base of the two faults below."""

    max_rollback = 2


@cache_fault(
    "unsupported rollback silently ignored", "A rollback deeper than `max_rollback` does nothing, and says nothing."
)
class _DeepIgnored(_Bounded):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        kept = np.asarray(lengths, dtype=np.int64)
        return super().rollback(cache, kept) if np.all(cache.lengths - kept <= 2) else cache


@cache_fault("unsupported rollback clamped", "A rollback deeper than `max_rollback` goes back as far as it can.")
class _DeepClamped(_Bounded):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        kept = np.asarray(lengths, dtype=np.int64)
        return super().rollback(cache, np.maximum(kept, cache.lengths - 2))


@cache_fault(
    "unequal rollback silently levelled",
    "An adapter without per-row rollback takes the smallest length for all rows instead of raising.",
    Capabilities(dtypes=("float32", "float64"), per_row_rollback=False, select=True),
)
class _Levelled(ReferenceModel):
    def rollback(self, cache: ReferenceCache, lengths: Array, /) -> ReferenceCache:
        return super().rollback(cache, np.full(cache.lengths.shape, np.min(np.asarray(lengths))))
