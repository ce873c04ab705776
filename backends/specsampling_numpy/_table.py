"""A model whose next-token laws are written down: for tests, teaching and exact enumeration."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specsampling import Capabilities

from ._cache import Floats, Ints, checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes

__all__ = ["TableCache", "TableModel"]


class TableCache(NamedTuple):
    """The tokens themselves: a table needs no other memory.

    Attributes
    ----------
    tokens : array
        Integers of shape ``(B, capacity)``; what lies past a row's length is stale and never read.
    lengths : array
        Integers of shape ``(B,)``: how many tokens each row holds.
    """

    tokens: Ints
    lengths: Ints


class TableModel:
    """A model that reads its next-token laws from a table.

    Parameters
    ----------
    table : array_like or callable
        The laws, each over the V ids of the last axis. Shape ``(V,)``: one law, whatever came before. Shape
        ``(V, V)``: row i is the law after token i. Shape ``(V,) * (n + 1)``: the law after the last n tokens, oldest
        first; where a row has fewer, the missing ones count as id 0. A callable is given the whole prefix as a tuple
        of ints and returns the V entries of the law that follows it, so it may depend on the position; it must give
        the same answer each time, because answers are remembered.
    vocab_size : int, optional
        V; needed with a callable, otherwise read from the table.
    max_length : int, optional
        Context limit to declare. None declares none.
    logits : bool
        The entries are logits rather than probabilities. They are taken as they are, unchecked, NaN included.
    dtype : str
        Floating dtype of the logits returned.

    Attributes
    ----------
    vocab_size : int
        Number of token ids, V.
    max_length : int or None
        The context limit declared.
    max_rollback : None
        Rows go back any number of tokens.
    capabilities : Capabilities
        What the conformance suite may ask for.

    Raises
    ------
    ValueError
        If a size is not a positive integer, the table's axes differ in length, or a law has negative entries or does
        not sum to one.

    Notes
    -----
    A cache is modified in place: like every cache of this library it must not be used again once passed in.

    Examples
    --------
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel([[0.5, 0.5], [1.0, 0.0]])  # after token 1 always token 0
    >>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=3), [[0, 1]])
    >>> logits.shape
    (1, 2, 2)
    >>> [[float(logit) for logit in law] for law in logits[0]]
    [[-0.6931471805599453, -0.6931471805599453], [0.0, -inf]]

    A law for each position, and a rollback to the first token:

    >>> model = TableModel(lambda prefix: [1.0, 0.0] if len(prefix) % 2 else [0.0, 1.0], vocab_size=2)
    >>> logits, cache = model.score(model.init_cache(1, 3), [[0, 1, 0]])
    >>> logits.argmax(axis=-1).tolist()
    [[0, 1, 0]]
    >>> logits, cache = model.score(model.rollback(cache, [1]), [[1]])
    >>> logits.argmax(axis=-1).tolist()
    [[1]]
    """

    max_rollback: int | None = None

    def __init__(
        self,
        table: ArrayLike | Callable[[tuple[int, ...]], ArrayLike],
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        logits: bool = False,
        dtype: str = "float64",
    ) -> None:
        for name, size in (("vocab_size", vocab_size), ("max_length", max_length)):
            is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
            if size is not None and not (is_integer and size > 0):
                raise ValueError(f"`{name}` must be a positive integer, got {size!r}")
        self.max_length = max_length
        self._dtype = np.dtype(dtype)
        if self._dtype.kind != "f":
            raise ValueError(f"`dtype` must be a floating dtype, got {dtype!r}")
        self.capabilities = Capabilities(dtypes=(self._dtype.name,), select=True)
        if callable(table):
            if vocab_size is None:
                raise TypeError("`vocab_size` must be given when `table` is a callable")
            self.vocab_size = vocab_size
            self._order: int | None = None
            law = table

            @lru_cache(maxsize=2**16)
            def remembered(prefix: tuple[int, ...]) -> Floats:
                return self._as_logits(law(prefix), (vocab_size,), logits)

            self._law = remembered
        else:
            shape = np.shape(table)
            if not shape or len(set(shape)) != 1 or vocab_size not in (None, shape[0]):
                wanted = "V" if vocab_size is None else vocab_size
                raise ValueError(f"`table` must have shape ({wanted},) * (n + 1) for some n >= 0, got {shape}")
            self.vocab_size = shape[0]
            self._order = len(shape) - 1
            self._table = self._as_logits(table, shape, logits).reshape(-1, self.vocab_size)

    def _as_logits(self, law: ArrayLike, shape: tuple[int, ...], logits: bool) -> Floats:
        entries = np.asarray(law, dtype=np.float64)
        if entries.shape != shape:
            raise ValueError(f"a law must have shape {shape}, got {entries.shape}")
        if not logits:
            sound = (entries >= 0).all(axis=-1) & (abs(entries.sum(axis=-1) - 1) <= 1e-6)
            if not sound.all():
                first = tuple(np.argwhere(~sound)[0].tolist())
                raise ValueError(f"a law must be non-negative and sum to one, got {entries[first]} at {first}")
            with np.errstate(divide="ignore"):
                entries = np.log(entries)
        return entries.astype(self._dtype)

    def init_cache(self, batch_size: int, capacity: int) -> TableCache:
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row has room for; may exceed `max_length`, as padding does.

        Returns
        -------
        TableCache
            No row holds a token yet.

        Raises
        ------
        ValueError
            If either is negative.
        """
        checked_sizes(batch_size, capacity)
        return TableCache(np.zeros((batch_size, capacity), dtype=np.int64), np.zeros(batch_size, dtype=np.int64))

    def score(self, cache: TableCache, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Floats, TableCache]:
        """Append a block to every row and return the laws that follow its last positions.

        Parameters
        ----------
        cache : TableCache
            Modified in place; use the one returned.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``.
        num_logits : int, optional
            How many of the block's last positions are wanted; None is all T, 0 none.

        Returns
        -------
        logits : array
            Floats of shape ``(B, num_logits, V)``, ``-inf`` where the probability is zero; a fresh array.
        cache : TableCache
            Holding T more tokens in every row.

        Raises
        ------
        TypeError
            If `tokens` are not integers.
        ValueError
            If `tokens` or `num_logits` are out of range or of the wrong shape.
        CacheError
            If a row would exceed the capacity; the cache is then as it was.
        """
        history, lengths = cache
        tokens = checked_block(tokens, lengths, history.shape[1], self.vocab_size)
        batch_size, block = tokens.shape
        num_logits = checked_num_logits(num_logits, block)
        positions = lengths[:, None] + np.arange(block)
        rows = np.arange(batch_size)[:, None]
        history[rows, positions] = tokens
        wanted = positions[:, block - num_logits :]
        if self._order is None:
            logits = np.empty((batch_size, num_logits, self.vocab_size), dtype=self._dtype)
            for row, ends in enumerate(wanted.tolist()):
                prefix = tuple(history[row, : lengths[row] + block].tolist())
                for column, end in enumerate(ends):
                    logits[row, column] = self._law(prefix[: end + 1])
        else:
            # Base-V digits of the row of the table: the last n tokens, 0 where there was none.
            earlier = wanted[:, :, None] - np.arange(self._order)[::-1]
            context = np.where(earlier < 0, 0, history[rows[:, :, None], np.maximum(earlier, 0)])
            logits = self._table[context @ self.vocab_size ** np.arange(self._order)[::-1]]
        return logits, TableCache(history, lengths + block)

    def rollback(self, cache: TableCache, lengths: Any, /) -> TableCache:
        """Keep the first ``lengths[b]`` tokens of row b.

        Parameters
        ----------
        cache : TableCache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds.

        Returns
        -------
        TableCache
            Shares its memory with `cache`; holds a copy of `lengths`.

        Raises
        ------
        TypeError
            If `lengths` are not integers.
        ValueError
            If `lengths` are not of shape ``(B,)``.
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        """
        return TableCache(cache.tokens, checked_lengths(lengths, cache.lengths))

    def select(self, cache: TableCache, rows: Any) -> TableCache:
        """Return a cache of some rows, in the order given.

        Parameters
        ----------
        cache : TableCache
            Must not be used again.
        rows : array
            Integers of shape ``(R,)``, each in ``[0, B)``; a row named twice is copied twice.

        Returns
        -------
        TableCache
            Of R rows, with memory of its own.

        Raises
        ------
        TypeError
            If `rows` are not integers.
        ValueError
            If `rows` are not of shape ``(R,)``, or one of them does not exist.
        """
        rows = checked_rows(rows, len(cache.lengths))
        return TableCache(cache.tokens[rows], cache.lengths[rows])
