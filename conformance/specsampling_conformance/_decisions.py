"""Replay a round on the host, decision by decision, from the same uniforms; and say how near each was to its boundary.

Two backends, or a block and single steps, have slightly different logits. So a decision may differ where the uniform
lies nearer to the decision's boundary than that difference can move it, and nowhere else.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling_conformance._oracle import NextTokenLaw

__all__ = ["Decision", "Rounding", "first_mismatch", "replay_round"]

Floats = NDArray[np.float64]


class Rounding(NamedTuple):
    """How far the tested backend may be from the laws given here.

    Attributes
    ----------
    delta : float
        Largest difference of logits, after division by the temperature.
    step : float
        Largest error of a uniform and of a running sum: the resolution of the dtype.
    """

    delta: float
    step: float


class Decision(NamedTuple):
    """One decision of a round.

    Attributes
    ----------
    what : str
        As a person would say it.
    margin : float
        Distance of the uniform from the boundary of the decision.
    allowed : float
        How far rounding may move that boundary.
    """

    what: str
    margin: float
    allowed: float

    @property
    def is_sure(self) -> bool:
        """Whether rounding cannot have changed the decision."""
        return self.margin > self.allowed


def replay_round(
    text: tuple[int, ...],
    uniforms: Floats,
    *,
    lookahead: int,
    num_tokens: int,
    target: NextTokenLaw,
    draft: NextTokenLaw | Sequence[int] | None,
    rounding: Rounding,
) -> tuple[list[int], list[Decision]]:
    """Return the tokens that a round emits for one row, and every decision on the way.

    Parameters
    ----------
    text : tuple of int
        The row's committed text.
    uniforms : array
        Of shape ``(2 * lookahead + 1, 3)``; the first of each slot is used, so V is at most 320.
    lookahead : int
        K.
    num_tokens : int
        Tokens that the row may propose.
    target : callable
        The target's law.
    draft : callable, sequence of int or None
        The draft's law, the tokens that were chosen, or nothing.
    rounding : Rounding
        What differences are put down to.

    Returns
    -------
    list of int
        The tokens.
    list of Decision
        In the order in which they matter: a token can differ only if one up to it was not sure.
    """
    decisions: list[Decision] = []
    proposed: list[int] = []
    laws: list[Floats | None] = []
    chosen = None if draft is None or callable(draft) else list(draft)
    count = 0 if draft is None else num_tokens if chosen is None else min(num_tokens, len(chosen))
    for slot in range(count):
        if callable(draft):
            law = draft((*text, *proposed))
            token, decision = _drawn(law, uniforms[slot, 0], rounding, f"draft slot {slot}", 1.0, 1)
            decisions.append(decision)
            laws.append(law)
        else:
            token = chosen[slot] if chosen is not None else 0
            laws.append(None)
        proposed.append(token)
    for slot, token in enumerate(proposed):
        p = target((*text, *proposed[:slot]))
        drawn_from = laws[slot]
        q = np.eye(p.size)[token] if drawn_from is None else drawn_from
        ratio = p[token] / q[token] if q[token] > 0 else math.inf
        uniform = uniforms[lookahead + slot, 0]
        # Both probabilities may be off by a factor of exp(2 delta), a chosen token's one exactly.
        factor = math.expm1((2 if drawn_from is None else 4) * rounding.delta)
        decisions.append(
            Decision(f"accept slot {slot}", abs(uniform - ratio), min(ratio, 1.0) * factor + rounding.step)
        )
        if not uniform < ratio:
            weights = np.maximum(p - q, 0.0)
            mass = float(weights.sum())
            if mass <= 0:
                weights, mass = p, 1.0
            sides = 1 if drawn_from is None else 2
            last, decision = _drawn(weights, uniforms[-1, 0], rounding, f"in place of slot {slot}", mass, sides)
            return [*proposed[:slot], last], [*decisions, decision]
    last, decision = _drawn(target((*text, *proposed)), uniforms[-1, 0], rounding, "bonus", 1.0, 1)
    return [*proposed, last], [*decisions, decision]


def _drawn(
    weights: Floats, uniform: float, rounding: Rounding, what: str, mass: float, sides: int
) -> tuple[int, Decision]:
    """Invert the running sum; rounding moves each of `sides` laws by tanh(delta), and with it the mass."""
    sums = np.cumsum(weights) / weights.sum()
    token = int(np.argmax(sums > min(uniform, math.nextafter(1.0, 0.0))))
    inner = sums[:-1]
    margin = float(np.min(np.abs(inner - uniform), initial=1.0))
    return token, Decision(what, margin, 2 * sides * math.tanh(rounding.delta) / mass + rounding.step)


def first_mismatch(
    got: Sequence[int], expected: Sequence[int], decisions: Sequence[Decision]
) -> tuple[str, Decision] | None:
    """Return why two rounds cannot both be right, or None where they are equal or one decision was not sure.

    Parameters
    ----------
    got, expected : sequence of int
        The tokens of the round; `got` may have been cut by a limit or an end token.
    decisions : sequence of Decision
        Of the replay.

    Returns
    -------
    tuple of str and Decision or None
        What differs, and the decision that was nearest to its boundary.
    """
    if list(got) == list(expected)[: len(got)] and len(got) <= len(expected):
        return None
    if not all(decision.is_sure for decision in decisions):
        return None
    nearest = min(decisions, key=lambda decision: decision.margin - decision.allowed)
    return f"emitted {list(got)}, and {list(expected)} follow from the same uniforms", nearest
