"""Randomness by label: every random decision is asked of one object, and answered from an array of uniforms.

Nothing here keeps a stream that is consumed: it does not matter in which order decisions are taken, or what was
accepted.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import array_api_compat
import numpy as np

from specsampling._arrays import is_host, move, namespace
from specsampling._categorical import below_one, draw, num_levels
from specsampling._model import Array

__all__ = ["Label", "Purpose", "RandomSource", "Randomness", "UniformRandomness", "asked_like"]


class Purpose(enum.IntEnum):
    """What a random decision is for; together with a slot it names the decision within a round.

    Examples
    --------
    >>> from specsampling import Purpose
    >>> [purpose.name for purpose in Purpose]
    ['DRAFT', 'ACCEPT', 'RESAMPLE']
    """

    DRAFT = 0
    """Draw the token that is proposed in a slot."""
    ACCEPT = 1
    """Keep or reject the token that was proposed in a slot."""
    RESAMPLE = 2
    """Draw the round's last token, from the residual or as the bonus. There is one a round: slot 0."""


class Label(NamedTuple):
    """Name of a random decision, unique within a round.

    Attributes
    ----------
    purpose : Purpose
        What the decision is for.
    slot : int
        Which of the round's decisions of that purpose, from 0.

    Examples
    --------
    >>> from specsampling import Label, Purpose
    >>> Label(Purpose.DRAFT, 2)  # the draw of the third token
    Label(purpose=<Purpose.DRAFT: 0>, slot=2)
    """

    purpose: Purpose
    slot: int


class Randomness(Protocol):
    """Answers the random decisions of one round, each asked once and by label.

    Answers come in the namespace and on the device of the question. The library asks nothing else, so an object that
    branches here can enumerate the exact law of any loop built on it.

    Examples
    --------
    One that answers every question in the likeliest way:

    >>> import numpy as np
    >>> class Likeliest:
    ...     def begin_round(self, row_ids, rounds, lookahead):
    ...         return self
    ...     def accept(self, numerator, denominator, label):
    ...         return 2 * numerator > denominator
    ...     def categorical(self, weights, label):
    ...         return np.argmax(weights, axis=-1)
    >>> from specsampling import generate
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel([[0.2, 0.8], [0.9, 0.1]])
    >>> generate(model, model, [0], max_new_tokens=4, randomness=Likeliest()).tokens
    [[1, 0, 1, 0]]
    """

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        """Return booleans, each True with probability ``min(1, numerator / denominator)``.

        `numerator` is a real floating array of shape ``(B, K)``, and covers the slots ``label.slot + 0 … K - 1``, one
        per column; `denominator` has the same shape. Where the numerator is 0 the answer is False, where it is at least
        the denominator and not 0 it is True.
        """
        ...

    def categorical(self, weights: Array, label: Label) -> Array:
        """Return an id per row, each with probability proportional to its weight.

        `weights` is a real floating array of shape ``(B, V)``, not negative; rows need not sum to one. The answer is an
        integer array of shape ``(B,)``.
        """
        ...


class RandomSource(Protocol):
    """Gives each round its :class:`Randomness`.

    Examples
    --------
    >>> from specsampling import CounterSource
    >>> round_of_two_rows = CounterSource(seed=0).begin_round(row_ids=[0, 1], rounds=[3, 0], lookahead=4)
    >>> round_of_two_rows.uniforms.shape  # rows, decisions, levels of a draw
    (2, 9, 3)
    """

    def begin_round(
        self, row_ids: Sequence[int] | np.ndarray, rounds: Sequence[int] | np.ndarray, lookahead: int
    ) -> Randomness:
        """Return the randomness of one round.

        `row_ids` names the rows of the batch, and `rounds` says how many rounds each has had: host integers of shape
        ``(B,)``. The round drafts at most `lookahead` tokens.
        """
        ...


class UniformRandomness:
    """The :class:`Randomness` of one round, built over an array of uniforms.

    A compiled round takes :meth:`uniforms_like` its weights as an argument and builds the object anew within the trace.

    Parameters
    ----------
    uniforms : array
        Real floating array of shape ``(B, 2 * lookahead + 1, 3)``, strictly inside (0, 1). Along the second axis:
        DRAFT slots, ACCEPT slots, the RESAMPLE slot. Along the last: one uniform per level of a categorical draw
        (`accept` uses the first).
    lookahead : int
        Number of DRAFT slots, and of ACCEPT slots.

    Attributes
    ----------
    uniforms : array
        As given.
    lookahead : int
        As given.

    Raises
    ------
    ValueError
        If the shape is another. Questions raise it where a label is asked twice or lies outside the array, where the
        batch has another size, and for float64 weights where the uniforms are float32.
    TypeError
        On a question whose weights are not floating-point numbers.

    Notes
    -----
    Comparisons are made in the dtype of the weights; float16 and bfloat16 weights are raised to float32 first. For
    float32 weights float64 uniforms are cut to their first 23 bits, and half a step added.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Label, Purpose, UniformRandomness
    >>> randomness = UniformRandomness(np.full((1, 3, 3), 0.5), lookahead=1)
    >>> randomness.accept(np.array([[0.3]]), np.array([[0.5]]), Label(Purpose.ACCEPT, 0)).tolist()
    [[True]]
    >>> randomness.categorical(np.array([[0.2, 0.2, 0.6]]), Label(Purpose.RESAMPLE, 0)).tolist()
    [2]
    """

    __slots__ = ("_asked", "_converted", "lookahead", "uniforms")

    def __init__(self, uniforms: Array, lookahead: int) -> None:
        if len(uniforms.shape) != 3 or tuple(uniforms.shape[1:]) != (2 * lookahead + 1, 3):
            raise ValueError(
                f"`uniforms` must have shape (B, 2 * lookahead + 1, 3) with lookahead {lookahead}, "
                f"got {tuple(uniforms.shape)}"
            )
        self.uniforms = uniforms
        self.lookahead = lookahead
        self._asked = 0
        self._converted: dict[Any, Array] = {}

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        """Return ``p > 0 and (p >= q or u * q < p)`` for numerators p and denominators q, per element.

        Parameters
        ----------
        numerator, denominator : array
            Real floating arrays of shape ``(B, K)``, of one dtype.
        label : Label
            Label of the first column; the others follow.

        Returns
        -------
        array
            Boolean array of shape ``(B, K)``. False where the numerator is NaN.
        """
        numerator, denominator = _raised(numerator), _raised(denominator)
        start = self._claim(label, numerator.shape[1], numerator.shape[0])
        uniform = self.uniforms_like(numerator)[:, start : start + numerator.shape[1], 0]
        is_certain = numerator >= denominator
        return (numerator > 0) & (is_certain | (uniform * denominator < numerator))

    def categorical(self, weights: Array, label: Label) -> Array:
        """Return one id per row, drawn by its weight.

        Parameters
        ----------
        weights : array
            Real floating array of shape ``(B, V)``, not negative, with a finite sum; rows need not sum to one.
        label : Label
            Label of the draw.

        Returns
        -------
        array
            Integer array of shape ``(B,)``. An id of weight zero is never returned where the row has a positive weight;
            a row that has none, or a NaN, gives some id in range.
        """
        weights = _raised(weights)
        slot = self._claim(label, 1, weights.shape[0])
        return draw(weights, self.uniforms_like(weights)[:, slot, :], num_levels(weights.shape[-1]))

    def uniforms_like(self, like: Array) -> Array:
        """Return the uniforms in the namespace, on the device and in the dtype of `like` (float32 or float64).

        Converted once per round and kind, and below 1 whatever a source gave. Always go through here: a plain cast to
        float32 rounds, to 1 in the end.

        Examples
        --------
        >>> import numpy as np
        >>> from specsampling import UniformRandomness
        >>> randomness = UniformRandomness(np.full((1, 1, 3), 1 - 2.0**-53), lookahead=0)
        >>> bool(np.all(randomness.uniforms_like(np.zeros(1, np.float32)) < 1))
        True
        """
        key = like.dtype if is_host(like) else (type(like), like.dtype, array_api_compat.device(like))
        converted = self._converted.get(key)
        if converted is None:
            converted = below_one(move(_to_dtype(self.uniforms, namespace(like).finfo(like.dtype).bits), like))
            self._converted[key] = converted
        return converted

    def _claim(self, label: Label, count: int, batch_size: int) -> int:
        """Check a question and note its labels as asked; return where its slots start along the uniforms."""
        purpose, slot = label
        limit = 1 if purpose == Purpose.RESAMPLE else self.lookahead
        if slot < 0 or slot + count > limit:
            raise ValueError(
                f"`label` must lie within the round: {Purpose(purpose).name} has slots 0 to {limit - 1} at lookahead "
                f"{self.lookahead}, got slots {slot} to {slot + count - 1}"
            )
        if batch_size != self.uniforms.shape[0]:
            raise ValueError(
                f"a question must have a row for each of the round's {self.uniforms.shape[0]} rows, got {batch_size}"
            )
        start = purpose * self.lookahead + slot
        bits = ((1 << count) - 1) << start
        if self._asked & bits:
            raise ValueError(
                f"`label` must be asked once in a round, got {Purpose(purpose).name} slot {slot} again: its uniform "
                "would be used twice"
            )
        self._asked |= bits
        return start


class _Translated:
    """Asks a `Randomness` in the namespace and on the device of `like`, whatever the question is made of."""

    def __init__(self, randomness: Randomness, like: Array) -> None:
        self._randomness, self._like = randomness, like

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        answer = self._randomness.accept(move(numerator, self._like), move(denominator, self._like), label)
        return move(answer, numerator)

    def categorical(self, weights: Array, label: Label) -> Array:
        return move(self._randomness.categorical(move(weights, self._like), label), weights)


def asked_like(randomness: Randomness, like: Array) -> Randomness:
    """Return a `Randomness` that is asked in the namespace and on the device of `like`.

    Our own answers in any namespace and stays what it is, as does one that is asked in NumPy anyhow. A subclass of ours
    may answer in another way.
    """
    is_general = is_host(like) or type(randomness) is UniformRandomness
    return randomness if is_general else _Translated(randomness, like)


def _raised(weights: Array) -> Array:
    """Return weights as float32 or float64; 16-bit ones are raised to float32."""
    xp = namespace(weights)
    if weights.dtype in (xp.float32, xp.float64):
        return weights
    if not xp.isdtype(weights.dtype, "real floating") or xp.finfo(weights.dtype).bits > 64:
        raise TypeError(f"weights must be real floating-point numbers of at most 64 bits, got {weights.dtype}")
    return xp.astype(weights, xp.float32)


def _to_dtype(uniforms: Array, bits: int) -> Array:
    xp = namespace(uniforms)
    held = xp.finfo(uniforms.dtype).bits
    if held == bits:
        return uniforms
    if held < bits:
        raise ValueError(
            f"`uniforms` must be float64 for float64 weights, got {uniforms.dtype}: 23 bits are too few for the law"
        )
    return xp.astype((xp.floor(uniforms * 2.0**23) + 0.5) * 2.0**-23, xp.float32)
