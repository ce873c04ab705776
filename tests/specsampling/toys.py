"""Small models for the decoder's tests, and what they should say: plain decoding by recomputing every prefix."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specsampling import CacheError, Model
from specsampling_numpy import TableModel


def random_table(vocab_size: int, order: int = 2, seed: int = 0, sharpness: float = 1.0, **options: Any) -> TableModel:
    """Return a model whose law of the next token depends on the last `order`; no two laws agree."""
    logits = np.random.default_rng(seed).normal(0, sharpness, (vocab_size,) * (order + 1))
    return TableModel(logits, logits=True, **options)


def blended(vocab_size: int, order: int = 2, seed: int = 0, agreement: float = 0.7) -> tuple[TableModel, TableModel]:
    """Return a target and a draft that is right often, but not always."""
    rng = np.random.default_rng(seed)
    shape = (vocab_size,) * (order + 1)
    target, other = rng.normal(0, 2, shape), rng.normal(0, 2, shape)
    draft = agreement * target + (1 - agreement) * other
    return TableModel(target, logits=True), TableModel(draft, logits=True)


class RecurrentModel:
    """A running sum over the text, with snapshots to go back to: the smallest model with a bounded rollback.

    Parameters
    ----------
    vocab_size : int
        V.
    max_rollback : int
        Snapshots kept; going back further is a `CacheError`.
    seed : int
        Of the table from sums to logits.
    """

    modulus = 97

    def __init__(self, vocab_size: int, max_rollback: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.max_rollback = max_rollback
        self._logits = np.random.default_rng(seed).normal(0, 2, (self.modulus, vocab_size))
        self.widest = 0

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """Return one list of (length, sum) per row, newest last."""
        return _Sums([[(0, 0)] for _ in range(batch_size)], capacity)

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> tuple[np.ndarray, Any]:
        """Append and answer from the sums."""
        tokens = np.asarray(tokens)
        batch_size, width = tokens.shape
        self.widest = max(self.widest, width)
        wanted = width if num_logits is None else num_logits
        logits = np.zeros((batch_size, width, self.vocab_size))
        rows = []
        for row, held in enumerate(cache.rows):
            states = list(held)
            for column in range(width):
                length, total = states[-1]
                if length + 1 > cache.capacity:
                    raise CacheError(f"row {row} is full")
                states.append((length + 1, (5 * total + int(tokens[row, column]) + 1) % self.modulus))
                logits[row, column] = self._logits[states[-1][1]]
            rows.append(states[-self.max_rollback - 1 :])
        return logits[:, width - wanted :], _Sums(rows, cache.capacity)

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        """Go back to a snapshot."""
        rows = []
        for row, (held, length) in enumerate(zip(cache.rows, np.asarray(lengths).tolist(), strict=True)):
            kept = [state for state in held if state[0] <= length]
            if not kept or kept[-1][0] != length:
                raise CacheError(f"row {row} holds snapshots {[n for n, _ in held]}, not {length}")
            rows.append(kept)
        return _Sums(rows, cache.capacity)


class _Sums(NamedTuple):
    rows: list[list[tuple[int, int]]]
    capacity: int


class Strict:
    """A model that refuses a cache that was passed in before, and counts and keeps what it is asked.

    Parameters
    ----------
    model : Model
        The model behind it.
    select : bool
        Whether it can drop rows.
    max_length : int, optional
        A context limit to declare.

    Attributes
    ----------
    num_scores : int
        Calls of `score`.
    num_prefills : int
        Those without logits.
    blocks : list of array
        Every block scored.
    selected : list of list of int
        The rows of every `select`.
    """

    def __init__(self, model: Model[Any], *, select: bool = True, max_length: int | None = None) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.max_rollback = model.max_rollback
        if max_length is not None:
            self.max_length = max_length
        self.num_scores = self.num_prefills = 0
        self.blocks: list[np.ndarray] = []
        self.selected: list[list[int]] = []
        if select:
            self.select = self._select

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("a model must not be copied")

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """Begin a chain of caches."""
        return _Lease(self._model.init_cache(batch_size, capacity))

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Any, Any]:
        """Pass on."""
        self.num_scores += 1
        self.num_prefills += num_logits == 0
        self.blocks.append(np.array(tokens))
        logits, inner = self._model.score(cache.take(), tokens, num_logits=num_logits)
        return logits, _Lease(inner)

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        """Pass on."""
        return _Lease(self._model.rollback(cache.take(), lengths))

    def _select(self, cache: Any, rows: Any) -> Any:
        self.selected.append(np.asarray(rows).tolist())
        return _Lease(self._model.select(cache.take(), rows))  # type: ignore[attr-defined]


class _Lease:
    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._is_spent = False

    def take(self) -> Any:
        """Return what is inside, once."""
        assert not self._is_spent, "a cache was used after it was passed on"
        self._is_spent = True
        return self._cache

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row holds."""
        assert not self._is_spent
        lengths: np.ndarray = self._cache.lengths
        return lengths


def logits_after(model: Model[Any], text: Sequence[int]) -> np.ndarray:
    """Return the logits of the token after `text`, from an empty cache and one token at a time."""
    cache = model.init_cache(1, len(text))
    for token in text:
        logits, cache = model.score(cache, np.array([[token]]))
    return np.asarray(logits[0, -1])


def plain_greedy(
    model: Model[Any],
    prompt: Sequence[int],
    limit: int,
    end_tokens: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
) -> tuple[list[int], str]:
    """Decode greedily with no cache kept and no block ever scored; return new tokens and why they ended."""
    new: list[int] = []
    while True:
        if len(new) == limit:
            return new, "length"
        logits = logits_after(model, [*prompt, *new])
        if len(new) < min_new_tokens:
            logits[list(end_tokens)] = -np.inf
        new.append(int(np.argmax(logits)))
        if new[-1] in end_tokens or any(new[-len(stop) :] == list(stop) for stop in stop_sequences):
            return new, "stop"
