"""Hold one law against another, and say where they differ most."""

from collections.abc import Mapping
from typing import Any

from specsampling_conformance._checks import CheckFailure, Measured
from specsampling_conformance._oracle import total_variation

__all__ = ["compare", "tokens_of", "worst_cells"]

_MOST_CELLS = 5
_MOST_BARS = 27


def tokens_of(outcomes: Mapping[tuple[tuple[int, ...], int], float]) -> dict[tuple[int, ...], float]:
    """Return the law of the tokens from that of (tokens, rounds)."""
    law: dict[tuple[int, ...], float] = {}
    for (tokens, _), probability in outcomes.items():
        law[tokens] = law.get(tokens, 0.0) + probability
    return law


def compare(
    what: str, expected: Mapping[Any, float], got: Mapping[Any, float], tolerance: float, *, forbidden: bool = True
) -> Measured:
    """Return what was measured, or raise `CheckFailure`: mass, support and total variation.

    With `forbidden` an outcome that is not expected at all may have no probability whatever; without, it may have as
    little as rounding gives (a self-draft that is rejected once in 1e8).
    """
    mass = sum(got.values())
    distance = total_variation(dict(expected), dict(got))
    measured = Measured(exact_tv=distance, tolerance=tolerance, values={"plot": {"exact_law": _bars(expected, got)}})
    # Each path's probability is a product, and the products are summed.
    if not abs(mass - 1.0) <= max(1e-9, tolerance):
        raise CheckFailure(
            f"{what}: the probabilities of all paths sum to {mass:.12g}",
            expected="a sum of one",
            worst=worst_cells(expected, got),
            measured=measured,
        )
    odd = [cell for cell, chance in got.items() if cell not in expected and chance > (0.0 if forbidden else tolerance)]
    odd += [cell for cell, chance in expected.items() if cell not in got and chance > tolerance]
    if not distance <= tolerance or odd:
        support = f", and {len(odd)} outcomes have probability in one of the laws only" if odd else ""
        raise CheckFailure(
            f"{what}: total variation {distance:.3g}{support}",
            expected=f"at most {tolerance:.2g}",
            worst=worst_cells(expected, got),
            measured=measured,
        )
    return measured


def worst_cells(expected: Mapping[Any, float], got: Mapping[Any, float]) -> list[str]:
    """Return the cells that differ most, worst first, as lines."""
    cells = sorted({*expected, *got}, key=lambda cell: -abs(expected.get(cell, 0.0) - got.get(cell, 0.0)))
    return [
        f"{_label(cell)}: expected {expected.get(cell, 0.0):.6g}, got {got.get(cell, 0.0):.6g}"
        for cell in cells[:_MOST_CELLS]
    ]


def _bars(expected: Mapping[Any, float], got: Mapping[Any, float]) -> list[list[Any]]:
    cells = sorted({*expected, *got}, key=lambda cell: -max(expected.get(cell, 0.0), got.get(cell, 0.0)))[:_MOST_BARS]
    return [[_label(cell), expected.get(cell, 0.0), got.get(cell, 0.0)] for cell in cells]


def _label(cell: Any) -> str:
    if cell and isinstance(cell[0], tuple):
        tokens, rounds = cell
        return f"{_label(tokens)} in {rounds} rounds"
    return " ".join(map(str, cell))
