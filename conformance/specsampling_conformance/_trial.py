"""Calls on an adapter's cache, each held against a fresh recompute, and written down as a person would.

The oracle feeds every row on its own into a fresh cache, one token a call: nothing that concerns batches, blocks or
rollbacks can reach it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specsampling import Model
from specsampling_conformance._checks import CheckFailure, NotApplicable, Subject
from specsampling_conformance._host import Array, host_copy, native_integers, overwrite

__all__ = ["DELTA_CAPS", "LONGEST_TEXT", "Oracle", "Trial", "largest_difference", "tolerance_for"]

Floats = NDArray[np.float64]
ResultT = TypeVar("ResultT")

DELTA_CAPS = {"float64": 2e-6, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference of logits, relative to the largest logit or 1, that is put down to rounding.

A measured difference alone would let a fault widen its own tolerance. The cap in float64 is loose because some runtimes
compute a float64 softmax in float32.
"""

LONGEST_TEXT = 62
"""Tokens of the longest text of a check. With a column of padding or two it takes 64, and an adapter that compiles
meets few sizes of caches.
"""


def tolerance_for(dtype: str) -> float:
    """Return the cap for a dtype; a dtype the suite does not know is not applicable rather than a pass."""
    if dtype not in DELTA_CAPS:
        raise NotApplicable(f"no cap on rounding is defined for dtype {dtype!r}; known: {', '.join(DELTA_CAPS)}")
    return DELTA_CAPS[dtype]


def largest_difference(got: Floats, expected: Floats) -> float:
    """Return the largest absolute difference; equal infinities differ by 0, and NaN differs from everything."""
    with np.errstate(invalid="ignore"):
        difference = np.where(got == expected, 0.0, np.abs(got - expected))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0.0))


class Oracle:
    """The model's own one-token scores from an empty cache, remembered by prefix.

    Parameters
    ----------
    model : Model
        The model.
    capacity : int, optional
        Capacity of every cache it asks for, one number so that compiled adapters trace once.
    """

    def __init__(self, model: Model[Any], capacity: int = 16) -> None:
        self._model = model
        self._capacity = capacity
        self._rows: dict[tuple[int, ...], Floats] = {}

    def logits(self, prefix: Sequence[int]) -> Floats:
        """Return the logits of the token after `prefix`, shape ``(V,)``."""
        wanted = tuple(int(token) for token in prefix)
        if wanted not in self._rows:
            cache = self._model.init_cache(1, max(self._capacity, len(wanted)))
            logits: Array = None
            for end, token in enumerate(wanted, start=1):
                logits, cache = self._model.score(cache, native_integers([[token]], "int64", logits))
                got = host_copy(logits)
                if got.shape != (1, 1, self._model.vocab_size):
                    raise CheckFailure(
                        f"logits of shape {got.shape}",
                        expected=f"shape {(1, 1, self._model.vocab_size)}, which is (B, T, V)",
                        calls=[f"score {_written([[token]])}"],
                        setting=f"B=1, capacity={self._capacity}",
                    )
                self._rows[wanted[:end]] = got[0, 0]
        return self._rows[wanted]


class Trial:
    """A cache under test, the rows it should hold, and the calls made so far.

    Parameters
    ----------
    subject : Subject
        The adapter.
    batch_size, capacity : int
        Of the cache.
    oracle : Oracle, optional
        Shared between trials of one model to save work.
    overwrites : bool, default: False
        Write over tokens, lengths and rows as soon as the call they were given to has returned, as a caller may who
        uses one buffer for all blocks; arrays that cannot be written to stay.

    Attributes
    ----------
    cache
        The adapter's cache after the last call.
    rows : list of list of int
        Tokens that each row should hold.
    floors : list of int
        How far back each row may go: to 0, or to `max_rollback` tokens behind the furthest it has been.
    calls : list of str
        What was called, for counterexamples.
    logits : array or None
        What the last `score` returned, as the adapter returned it.
    """

    def __init__(
        self,
        subject: Subject,
        batch_size: int,
        capacity: int,
        oracle: Oracle | None = None,
        *,
        overwrites: bool = False,
    ) -> None:
        self.model = subject.model()
        self.batch_size = batch_size
        self.tolerance = tolerance_for(subject.dtype)
        self.capacity = capacity
        self.overwrites = overwrites
        self.oracle = Oracle(self.model) if oracle is None else oracle
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]
        self.floors = [0] * batch_size
        self.calls: list[str] = []
        self.logits: Array = None
        self.largest = 0.0
        self.cache: Any = self.attempt(lambda: self.model.init_cache(batch_size, capacity))

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row should hold."""
        return [len(row) for row in self.rows]

    @property
    def room(self) -> int:
        """Tokens that still fit every row."""
        return self.capacity - max(self.lengths)

    def attempt(self, call: Callable[[], ResultT]) -> ResultT:
        """Return what `call` returns; what it raises becomes a failure that shows the calls so far."""
        try:
            return call()
        except CheckFailure:
            raise
        except Exception as error:  # an adapter is foreign code: whatever it raises is its failure
            raise self.failure(f"raised {type(error).__name__}: {error}") from error

    def failure(self, summary: str, *, expected: str = "", worst: Sequence[str] = ()) -> CheckFailure:
        """Return a failure that shows the calls so far."""
        setting = f"B={self.batch_size}, capacity={self.capacity}"
        return CheckFailure(
            summary, expected=expected, worst=worst, calls=self.calls or ["init_cache"], setting=setting
        )

    def integers(self, values: Sequence[Any]) -> Array:
        """Return integers as the contract hands them over: NumPy at first, then of the logits' own namespace."""
        return native_integers(values, "int64", self.logits)

    def score(
        self,
        tokens: Sequence[Sequence[int]],
        num_logits: int | None = None,
        *,
        dtype: str = "int64",
        host: bool = False,
    ) -> Floats:
        """Score a block, compare every row of logits with the oracle, and return them as float64."""
        self.calls.append(f"score {_written(tokens)}" + ("" if num_logits is None else f" num_logits={num_logits}"))
        block = native_integers(tokens, dtype, None if host else self.logits)
        model, cache = self.model, self.cache
        if num_logits is None:
            self.logits, self.cache = self.attempt(lambda: model.score(cache, block))
        else:
            self.logits, self.cache = self.attempt(lambda: model.score(cache, block, num_logits=num_logits))
        self._overwrite(block)
        for row, new in zip(self.rows, tokens, strict=True):
            row.extend(int(token) for token in new)
        if model.max_rollback is not None:
            self.floors = [
                max(floor, len(row) - model.max_rollback) for floor, row in zip(self.floors, self.rows, strict=True)
            ]
        return self._compare(len(tokens[0]) if num_logits is None else num_logits)

    def rollback(self, lengths: Sequence[int], *, dtype: str = "int64", host: bool = False) -> None:
        """Keep the first tokens of each row."""
        self.calls.append(f"rollback {_written(lengths)}")
        kept = native_integers(lengths, dtype, None if host else self.logits)
        cache = self.cache
        self.cache = self.attempt(lambda: self.model.rollback(cache, kept))
        self._overwrite(kept)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.calls.append(f"select {_written(rows)}")
        select: Callable[[Any, Array], Any] = getattr(self.model, "select")  # noqa: B009 - no member of the protocol
        index, cache = self.integers(rows), self.cache
        self.cache = self.attempt(lambda: select(cache, index))
        self._overwrite(index)
        self.rows = [list(self.rows[row]) for row in rows]
        self.floors = [self.floors[row] for row in rows]

    def refused(self, description: str, call: Callable[[], object], errors: tuple[type[Exception], ...]) -> None:
        """Assert that a call raises one of `errors`; the cache it was given stays the one under test."""
        self.calls.append(description)
        names = " or ".join(error.__name__ for error in errors)
        try:
            call()
        except errors:
            self.calls[-1] += " (refused)"
            return
        except Exception as error:  # any other one is the failure that this looks for
            raise self.failure(f"raised {type(error).__name__}: {error}", expected=names) from error
        raise self.failure("nothing was raised", expected=names)

    def _overwrite(self, array: Array) -> None:
        if self.overwrites and overwrite(array):
            self.calls[-1] += " (then overwritten)"

    def _compare(self, num_logits: int) -> Floats:
        got = host_copy(self.logits)
        shape = (len(self.rows), num_logits, self.model.vocab_size)
        if got.shape != shape:
            raise self.failure(f"logits of shape {got.shape}", expected=f"shape {shape}, which is (B, num_logits, V)")
        if num_logits == 0:
            return got
        if got.dtype != np.float64:
            raise self.failure(f"logits of dtype {got.dtype}", expected="a real floating dtype")
        for row in self.rows:
            self.oracle.logits(row)  # and of all that it begins with, in one go
        expected = np.stack(
            [
                np.stack([self.oracle.logits(row[:end]) for end in range(len(row) - num_logits + 1, len(row) + 1)])
                for row in self.rows
            ]
        )
        scale = max(1.0, float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0)))
        self.largest = max(self.largest, largest_difference(got, expected))
        if largest_difference(got, expected) > self.tolerance * scale:
            raise self._wrong(got, expected)
        return got

    def _wrong(self, got: Floats, expected: Floats) -> CheckFailure:
        cells = [
            (largest_difference(got[b, t], expected[b, t]), b, t)
            for b in range(got.shape[0])
            for t in range(got.shape[1])
        ]
        cells.sort(key=lambda cell: -cell[0])
        off, b, t = cells[0]
        held = self.rows[b][: len(self.rows[b]) - got.shape[1] + t + 1]
        worst = []
        for size, row, column in cells[:3]:
            if size > self.tolerance:
                logits, reference = _digits(got[row, column]), _digits(expected[row, column])
                worst.append(f"row {row}, position {column} of the block: got {logits}, expected {reference}")
        return self.failure(
            f"row {b} logits off by {off:.2g}",
            expected=f"the logits after {_written(held)} in a fresh cache, one token a call, to {self.tolerance:g}",
            worst=worst,
        )


def _written(values: Sequence[Any]) -> str:
    return str([list(v) if isinstance(v, Sequence) else int(v) for v in values]).replace(", ", ",")


def _digits(values: Floats, most: int = 6) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:most])
    return f"[{shown}{', …' if len(values) > most else ''}]"
