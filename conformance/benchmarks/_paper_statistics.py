"""Intervals and tests that hold for texts: tokens of one text depend on each other, so texts are what is resampled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LawTest", "Spread", "Timings", "bootstrap_mean", "bootstrap_timings", "swap_test"]

Floats = NDArray[np.float64]

_LEVEL = (2.5, 97.5)


class Spread(NamedTuple):
    """An estimate and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Timings(NamedTuple):
    """What measured times say about the modes that were timed on the same prompts and repeats.

    Attributes
    ----------
    per_token : list of Spread
        Time per token of each mode.
    speedups : list of Spread
        The first mode's time per token over each mode's.
    best_shares : list of float
        In which share of the resamples each mode was the fastest.
    """

    per_token: list[Spread]
    speedups: list[Spread]
    best_shares: list[float]


class LawTest(NamedTuple):
    """Whether two sets of texts, in pairs by prompt, can be told apart by a number that every token has.

    Attributes
    ----------
    mean_difference : Spread
        Mean over the tokens of the second set less that of the first; the interval is a bootstrap over pairs.
    distance : float
        Kolmogorov-Smirnov distance of the two sets of tokens.
    p_mean, p_distance : float
        Shares of the swaps within pairs that look at least as different.
    """

    mean_difference: Spread
    distance: float
    p_mean: float
    p_distance: float


def _spread(value: float, resampled: Any) -> Spread:
    low, high = np.percentile(resampled, _LEVEL)
    return Spread(float(value), float(low), float(high))


def bootstrap_mean(values: Sequence[float] | Floats, *, resamples: int = 10_000, seed: int = 0) -> Spread:
    """Return the mean of `values` with the interval of a percentile bootstrap.

    Examples
    --------
    >>> bootstrap_mean([2.0, 2.0, 2.0])
    Spread(value=2.0, low=2.0, high=2.0)
    """
    data = np.asarray(values, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(data.size, size=(resamples, data.size))
    return _spread(float(data.mean()), data[chosen].mean(axis=1))


def _time_per_token(seconds: Floats, tokens: Floats) -> Floats:
    """Return each mode's median over repeats of the time of all prompts over their tokens, of ``(M, R, P)``."""
    median: Floats = np.median(seconds.sum(axis=2) / np.maximum(tokens.sum(axis=2), 1), axis=1)
    return median


def bootstrap_timings(seconds: Any, tokens: Any, *, resamples: int = 2_000, seed: int = 0) -> Timings:
    """Compare modes by time per token: in a repeat all prompts together, then the median over repeats.

    Repeats, and prompts in each of them, are resampled, the same for every mode, so that what a slow moment or a long
    prompt does to all of them drops out of the ratios.

    Parameters
    ----------
    seconds, tokens : array
        Of shape ``(M, R, P)``: modes, the baseline first, repeats, and the prompts of each.
    resamples, seed : int
        Of the bootstrap.

    Returns
    -------
    Timings
        With 95 % percentile intervals.

    Examples
    --------
    >>> result = bootstrap_timings([[[4.0]], [[2.0]]], [[[2]], [[2]]])
    >>> [spread.value for spread in result.per_token], result.speedups[1].value, result.best_shares
    ([2.0, 1.0], 2.0, [0.0, 1.0])
    """
    times, counts = (np.asarray(x, dtype=np.float64) for x in (seconds, tokens))
    num_modes, num_repeats, num_prompts = times.shape
    rng = np.random.default_rng(seed)
    drawn = np.empty((resamples, num_modes))
    for i in range(resamples):
        repeats = rng.integers(num_repeats, size=(num_repeats, 1))
        prompts = rng.integers(num_prompts, size=(num_repeats, num_prompts))
        drawn[i] = _time_per_token(times[:, repeats, prompts], counts[:, repeats, prompts])
    found = _time_per_token(times, counts)
    with np.errstate(divide="ignore", invalid="ignore"):  # texts of which a resample has no token after the first
        gains, found_gains = drawn[:, :1] / drawn, found[0] / found
    return Timings(
        per_token=[_spread(found[mode], drawn[:, mode]) for mode in range(num_modes)],
        speedups=[_spread(found_gains[mode], gains[:, mode]) for mode in range(num_modes)],
        best_shares=np.bincount(drawn.argmin(axis=1), minlength=num_modes).__truediv__(resamples).tolist(),
    )


def swap_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], *, swaps: int = 2_000, seed: int = 0
) -> LawTest:
    """Test whether two ways of writing follow one law, by a number that every token has.

    Text i of both sets continues prompt i. If the ways have the same law and their draws are independent, each pair is
    as likely the other way round, whatever the tokens of a text have to do with each other: so pairs are swapped at
    random, and the false-alarm rate is exact.

    Parameters
    ----------
    first, second : sequence of sequences of float
        One sequence per text, in the same order of prompts; a text may be empty, all of a set may not.
    swaps, seed : int
        Of the random swaps.

    Returns
    -------
    LawTest
        The differences and their p-values, of which the smallest possible is ``1 / (swaps + 1)``.

    Examples
    --------
    >>> apart = swap_test([[0.0, 1.0]] * 12, [[5.0]] * 12)
    >>> apart.mean_difference.value, apart.distance, apart.p_distance < 0.01
    (4.5, 1.0, True)
    """
    sizes = np.array([[len(text) for text in side] for side in (first, second)])
    values = np.concatenate([np.asarray(text, dtype=np.float64) for side in (first, second) for text in side])
    pairs = np.concatenate([np.repeat(np.arange(sizes.shape[1]), side) for side in sizes])
    is_second = np.arange(values.size) >= sizes[0].sum()
    order: Any = np.argsort(values, kind="stable")
    values, pairs, is_second = values[order], pairs[order], is_second[order]
    ends = np.append(np.flatnonzero(np.diff(values)), [values.size - 1])  # between equal numbers there is no distance
    sums = np.array([[float(np.sum(text)) for text in side] for side in (first, second)])

    def mean_difference(chosen: Any, flipped: Any) -> float:
        one, other = np.where(flipped, 1, 0), np.where(flipped, 0, 1)
        means = [sums[side, chosen].sum() / max(sizes[side, chosen].sum(), 1) for side in (one, other)]
        return float(means[1] - means[0])

    def distance(flipped: Any) -> float:
        in_second = is_second ^ flipped[pairs]
        total = int(in_second.sum())
        cumulated = np.cumsum(in_second)[ends]
        positions = ends + 1
        gap = cumulated / max(total, 1) - (positions - cumulated) / max(values.size - total, 1)
        return float(np.abs(gap).max())

    every, none = np.arange(sizes.shape[1]), np.zeros(sizes.shape[1], dtype=np.bool_)
    observed_mean, observed_distance = mean_difference(every, none), distance(none)
    rng = np.random.default_rng(seed)
    hits_mean = hits_distance = 1
    resampled = []
    slack = 1 - 1e-12  # the same sum in another order is not a larger difference
    for _ in range(swaps):
        flipped = rng.integers(2, size=every.size).astype(np.bool_)
        hits_mean += abs(mean_difference(every, flipped)) >= abs(observed_mean) * slack
        hits_distance += distance(flipped) >= observed_distance * slack
        resampled.append(mean_difference(rng.integers(every.size, size=every.size), none))
    return LawTest(
        mean_difference=_spread(observed_mean, resampled),
        distance=observed_distance,
        p_mean=hits_mean / (swaps + 1),
        p_distance=hits_distance / (swaps + 1),
    )
