"""Which planted fault fits a failure best: its exact law against the law found, or its samples against the samples."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from specsampling_conformance._checks import CheckFailure
from specsampling_conformance._enumeration import Outcome
from specsampling_conformance._faults import CRASHES, FAULTS, Fault
from specsampling_conformance._oracle import total_variation

__all__ = ["best_fitting_law", "best_fitting_stream", "with_diagnosis"]

_FITS = 0.5
"""A fault is named when its law is nearer to what was found than half as far as the right law is."""


def with_diagnosis(failure: CheckFailure, line: str | None) -> CheckFailure:
    """Return the failure with one more line."""
    if line is None:
        return failure
    return CheckFailure(
        failure.summary,
        expected=failure.expected,
        worst=[*failure.worst, line],
        calls=failure.calls,
        setting=failure.setting,
    )


def best_fitting_law(
    found: Mapping[Outcome, float],
    expected: Mapping[Outcome, float],
    law_under: Callable[[Fault], Mapping[Outcome, float]],
) -> str | None:
    """Return a line that names the planted fault whose exact law is nearest to `found`.

    Parameters
    ----------
    found, expected : mapping
        Laws of (tokens, rounds): the one enumerated and the right one.
    law_under : callable
        Enumerates the same situation under a planted fault; whatever it raises rules the fault out.

    Returns
    -------
    str or None
        None where no fault fits.
    """
    distance = total_variation(dict(found), dict(expected))
    best: tuple[float, str] | None = None
    for fault in _suspects("cache", "engine", "drafter"):
        try:
            law = law_under(fault)
        except CRASHES:  # a fault that crashes here has no law here
            continue
        fit = total_variation(dict(found), dict(law))
        if best is None or fit < best[0]:
            best = fit, fault.name
    if best is None or best[0] >= _FITS * distance:
        return None
    return f"data most consistent with: {best[1]} (TV {best[0]:.2g} from its law, {distance:.2g} from the right one)"


def best_fitting_stream(
    counts: NDArray[np.int64], law: NDArray[np.float64], counts_under: Callable[[Fault], NDArray[np.int64]]
) -> str | None:
    """Return a line that names the planted fault of the streams whose samples make `counts` likeliest.

    Parameters
    ----------
    counts : array
        Counts of sequences that were rejected.
    law : array
        The right law, of the same shape.
    counts_under : callable
        Draws a sample under a planted fault.

    Returns
    -------
    str or None
        None where the right law explains the counts as well.
    """
    best: tuple[float, str] | None = None
    for fault in _suspects("randomness"):
        try:
            drawn = counts_under(fault)
        except CRASHES:
            continue
        # Cells that were not drawn have the right law's share of one sample.
        smoothed = (drawn + law) / (drawn.sum() + 1.0)
        gain = _log_likelihood(counts, smoothed) - _log_likelihood(counts, law)
        if best is None or gain > best[0]:
            best = gain, fault.name
    if best is None or best[0] <= np.log(len(FAULTS)):
        return None
    return f"data most consistent with: {best[1]} ({best[0]:.0f} nats better than the right law)"


def _suspects(*kinds: str) -> Iterator[Fault]:
    return (fault for fault in FAULTS.values() if fault.kind in kinds)


def _log_likelihood(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    seen = counts > 0
    with np.errstate(divide="ignore"):
        return float(np.sum(counts[seen] * np.log(np.maximum(law[seen], 1e-300))))
