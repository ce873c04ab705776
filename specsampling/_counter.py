"""The default source of randomness: a counter-based generator, which keeps no stream that is consumed.

A uniform is a pure function of seed, row id, round, purpose and slot, so it does not matter in which order decisions
are taken, what else is in the batch, or what was accepted.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsampling._random import Purpose, UniformRandomness

__all__ = ["CounterSource", "Philox", "philox4x32"]

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """Return the output words of Philox4x32 for every counter.

    Parameters
    ----------
    counter : numpy.ndarray
        Array of uint32 of shape ``(..., 4)``.
    key : numpy.ndarray
        Array of uint32 of shape ``(2,)``.
    rounds : int, default: 10
        Number of rounds; 10 is the published generator.

    Returns
    -------
    numpy.ndarray
        Array of uint32 of shape ``(..., 4)``: 128 random bits per counter.

    References
    ----------
    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling._counter import philox4x32
    >>> [f"{word:08x}" for word in philox4x32(np.zeros(4, np.uint32), np.zeros(2, np.uint32)).tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    words = np.moveaxis(np.asarray(counter, dtype=np.uint32), -1, 0).astype(np.uint64, order="C")
    shape = words.shape
    words = words.reshape(4, -1)
    # The two halves of the state take the same steps: words 0 and 2 are multiplied, words 1 and 3 are mixed in.
    even, odd = words[0::2], words[1::2]
    key_words = [int(word) for word in key]
    for _ in range(rounds):
        product = even * _MULTIPLIERS[:, None]
        mixed = np.array(key_words, dtype=np.uint64)[:, None] ^ odd
        mixed ^= product[::-1] >> _HALF
        even, odd = mixed, (product & _LOW)[::-1]
        key_words = [(word + step) & 0xFFFFFFFF for word, step in zip(key_words, _KEY_STEPS, strict=True)]
    result = np.empty((*shape[1:], 4), dtype=np.uint32)
    flat = result.reshape(-1, 4)
    flat[:, 0::2], flat[:, 1::2] = even.T, odd.T
    return result


class Philox:
    """Philox4x32-10 under a 64-bit key: a fixed function from counters to random bits, without any state.

    Parameters
    ----------
    seed : int
        The key, 0 to ``2**64 - 1``; its low word comes first.

    Raises
    ------
    TypeError
        If the seed is not an integer.
    ValueError
        If it has more than 64 bits or is negative.

    References
    ----------
    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Philox
    >>> [f"{word:08x}" for word in Philox(0)(np.zeros(4, np.uint32)).tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """

    def __init__(self, seed: int) -> None:
        seed = _checked_seed(seed, "an integer")
        self._key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)

    def __call__(self, counter: np.ndarray) -> np.ndarray:
        """Return 128 bits, as ``(..., 4)`` of uint32, for every counter ``(..., 4)`` of uint32."""
        return philox4x32(counter, self._key)


class CounterSource:
    """The default source of randomness: Philox4x32-10, keyed by the seed and counted by what is decided.

    The key is the 64-bit seed (low word first). The counter is the row id, the round, purpose and slot (``purpose *
    2**24 + slot``) and a spare word, which is 0 but for the third level of a categorical draw. So a row's uniforms do
    not depend on the rest of the batch, on the lookahead or on what was accepted, and every backend sees the same bits.

    Parameters
    ----------
    seed : int or None, default: 0
        Integer from 0 to ``2**64 - 1``. None draws one from the system's entropy.

    Attributes
    ----------
    seed : int
        The seed in use, which repeats the run.

    Raises
    ------
    TypeError
        If the seed is not an integer, or row ids or rounds are not.
    ValueError
        If the seed has more than 64 bits or is negative; from :meth:`begin_round` if a row id or a round does not fit
        32 bits.

    Notes
    -----
    Uniforms are ``(n + 1/2) / 2**52`` for a 52-bit integer n. They are drawn for many rounds at once, which no caller
    can see: calls may come in any order. Two rows with the same id get the same uniforms.

    Examples
    --------
    >>> from specsampling import CounterSource
    >>> CounterSource(7).begin_round([0, 1], [0, 0], lookahead=4).uniforms.shape
    (2, 9, 3)
    >>> CounterSource(None).seed == CounterSource(None).seed
    False
    """

    __slots__ = ("_ahead", "_seed")

    def __init__(self, seed: int | None = 0) -> None:
        if seed is None:
            seed = secrets.randbits(64)
        self._seed = _checked_seed(seed, "an integer or None")
        self._ahead: _DrawnAhead | None = None

    @property
    def seed(self) -> int:
        """The seed in use, which repeats the run."""
        return self._seed

    def __repr__(self) -> str:
        return f"CounterSource({self._seed})"

    def begin_round(
        self, row_ids: Sequence[int] | np.ndarray, rounds: Sequence[int] | np.ndarray, lookahead: int
    ) -> UniformRandomness:
        """Return the randomness of one round.

        Parameters
        ----------
        row_ids : sequence of int or numpy.ndarray
            Id of each row of the batch, ``(B,)`` integers from 0 to ``2**32 - 1``.
        rounds : sequence of int or numpy.ndarray
            How many rounds each row has had, ``(B,)`` integers from 0 to ``2**32 - 1``.
        lookahead : int
            Number of tokens drafted in this round, 0 or more.

        Returns
        -------
        UniformRandomness
            Over float64 uniforms in NumPy, which the caller owns.
        """
        if not 0 <= lookahead < 2**24:
            raise ValueError(f"`lookahead` must lie in 0 to 2**24 - 1, got {lookahead}")
        ids, counts = _integers(row_ids, "row_ids"), _integers(rounds, "rounds")
        if ids.ndim != 1 or ids.size == 0 or ids.shape != counts.shape:
            raise ValueError(
                f"`row_ids` and `rounds` must both have shape (B,), B at least 1, got {ids.shape} and {counts.shape}"
            )
        uniforms = None if self._ahead is None else _look_up(self._ahead, ids, counts, lookahead)
        if uniforms is None:
            _check_words(ids, "row_ids")
            _check_words(counts, "rounds")
            self._ahead = ahead = _draw_ahead(self._seed, self._ahead, ids, counts, lookahead)
            uniforms = _slots(ahead.uniforms[0], ahead.lookahead, lookahead)
        # A copy, so that a caller who writes into it, or a framework that aliases it, cannot change later answers.
        return UniformRandomness(uniforms.copy(), lookahead)


class _DrawnAhead(NamedTuple):
    """Uniforms of some rows for a number of rounds to come."""

    lookahead: int
    row_ids: np.ndarray  # (B,) int64
    first_rounds: np.ndarray  # (B,) int64: the round of each row that `uniforms` starts with
    uniforms: np.ndarray  # (number of rounds, B, 2 * lookahead + 1, 3)


_FIRST_ROUNDS, _MOST_ROUNDS, _MOST_SLOTS = 8, 64, 2**14
"""How far ahead to draw: at first, where rounds follow each other, and in slots of all rows (400 kB)."""


def _look_up(ahead: _DrawnAhead, row_ids: np.ndarray, rounds: np.ndarray, lookahead: int) -> np.ndarray | None:
    """Return the uniforms of a round, or None where some of them were not drawn ahead."""
    if lookahead > ahead.lookahead:
        return None
    num_rounds = ahead.uniforms.shape[0]
    if row_ids.tobytes() == ahead.row_ids.tobytes():
        offsets = rounds - ahead.first_rounds
        offset = int(offsets[0])
        if 0 <= offset < num_rounds and not np.count_nonzero(offsets != offset):
            return _slots(ahead.uniforms[offset], ahead.lookahead, lookahead)
    order = np.argsort(ahead.row_ids)
    positions = order[np.minimum(np.searchsorted(ahead.row_ids, row_ids, sorter=order), order.size - 1)]
    offsets = rounds - ahead.first_rounds[positions]
    is_held = (ahead.row_ids[positions] == row_ids) & (offsets >= 0) & (offsets < num_rounds)
    if not is_held.all():
        return None
    return _slots(ahead.uniforms[offsets, positions], ahead.lookahead, lookahead)


def _slots(uniforms: np.ndarray, held: int, wanted: int) -> np.ndarray:
    """Return the slots of a shorter lookahead: a slot's uniform does not depend on how many follow."""
    if held == wanted:
        return uniforms
    return np.concatenate([uniforms[:, :wanted], uniforms[:, held : held + wanted], uniforms[:, 2 * held :]], axis=1)


def _draw_ahead(
    seed: int, previous: _DrawnAhead | None, row_ids: np.ndarray, rounds: np.ndarray, lookahead: int
) -> _DrawnAhead:
    num_rounds = _FIRST_ROUNDS
    if previous is not None:
        # Lookaheads that alternate shall not draw anew each time.
        lookahead = max(lookahead, min(previous.lookahead, 16))
        drawn = previous.uniforms.shape[0]
        if rounds.max() == previous.first_rounds.max() + drawn:  # rounds follow each other
            num_rounds = min(2 * drawn, _MOST_ROUNDS)
    num_slots = 2 * lookahead + 1
    num_rounds = min(num_rounds, max(1, _MOST_SLOTS // (row_ids.size * num_slots)), 2**32 - int(rounds.max()))
    counter = np.zeros((num_rounds, row_ids.size, num_slots, 2, 4), dtype=np.uint32)
    counter[..., 0] = row_ids[:, None, None]
    counter[..., 1] = (np.arange(num_rounds)[:, None] + rounds)[:, :, None, None]
    slot = np.arange(lookahead)
    draft, accept, resample = (int(purpose) << 24 for purpose in Purpose)
    counter[..., 2] = np.concatenate([draft + slot, accept + slot, [resample]])[:, None]
    counter[..., 1, 3] = 1
    words = Philox(seed)(counter)
    pairs = words.reshape(*counter.shape[:3], 4, 2)[..., :3, :].astype(np.uint64)
    integers = (pairs[..., 0] << np.uint64(20)) | (pairs[..., 1] >> np.uint64(12))
    return _DrawnAhead(lookahead, row_ids.copy(), rounds.copy(), (integers + 0.5) * 2.0**-52)


def _checked_seed(seed: int, kind: str) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"`seed` must be {kind}, got {seed!r}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must lie in 0 to 2**64 - 1, got {seed}")
    return int(seed)


def _integers(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype == np.int64:
        return array
    if array.dtype.kind not in "iu":
        # NumPy turns integers that fit no dtype of its own into objects or floats: look at what came.
        for row, value in enumerate(values):
            if isinstance(value, bool | np.bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"`{name}` must be integers, got {value!r} in row {row}")
        array = np.array([int(value) for value in values], dtype=object)
    _check_words(array, name)
    return array.astype(np.int64)


def _check_words(values: np.ndarray, name: str) -> None:
    is_bad = (values < 0) | (values >= 2**32)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ValueError(f"`{name}` must lie in 0 to 2**32 - 1, got {values[row]} in row {row}")
