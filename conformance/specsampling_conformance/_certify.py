r"""How sure the sampled check is: power, sample sizes and the total variation certified by a run.

A certificate says: *any* law at total variation `tv` from the exact one would have been rejected after `n` samples
with probability at least ``1 - beta``. It is calculated, not simulated, in three steps.

1. **Least detectable direction.** Among laws q at total variation :math:`\delta` from p, the one hardest to tell
   from p moves mass between two halves of p in proportion: :math:`q = p (1 \pm 2\delta)`. By Cauchy's inequality
   :math:`\chi^2(q, p) = \delta^2 / (a (1 - a)) \ge 4 \delta^2`, with a the mass of the half that gains. Any other
   direction, or any split other than one half, has a larger :math:`\chi^2`, hence more power.
2. **The e-value as a function of one number.** With the counts nearly Gaussian, the log of the Dirichlet mixture
   depends on them through Pearson's statistic X alone (a Gaussian prior of variance :math:`p / \kappa` on the shift):

   .. math:: \ln E_\kappa \approx \tfrac12 X \frac{n}{n + \kappa} - \frac{k - 1}{2} \ln(1 + n / \kappa).

   Only the joint law's half of the e-process is counted, and only the last look: the marginals and the earlier looks
   can but add power.
3. **The law of that number.** X is noncentral chi-square with k - 1 degrees of freedom and noncentrality
   :math:`4 n \delta^2`, whose distribution function is summed here exactly.

What is approximate is step 2's and 3's normality, so the calculation aims at 0.8 `beta` instead of `beta`. The
suite's own tests simulate the true multinomial at the sample sizes returned and find the power promised.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsampling_conformance._evalue import ALPHA, CONCENTRATIONS, log_e_value, log_gamma, log_sum_exp

__all__ = [
    "BETA",
    "Rates",
    "certified_tv",
    "certify",
    "least_detectable",
    "noncentral_chi2_cdf",
    "power",
    "rejection_rates",
]

Floats = NDArray[np.float64]

BETA = 1e-3
"""Largest probability, in a certificate, of missing a deviation of the certified size."""

_BETA_MARGIN = 0.8


def noncentral_chi2_cdf(x: float, degrees: int, noncentrality: float) -> float:
    r"""Return the distribution function of the noncentral chi-square law.

    A Poisson mixture of central ones, whose distribution functions are tail sums of the series
    :math:`P(a, y) = \sum_{i \ge 0} y^{a + i} e^{-y} / \Gamma(a + i + 1)`.
    """
    if x <= 0.0:
        return 0.0
    centre = noncentrality / 2.0
    most = int(max(centre, x / 2.0) + 40.0 * math.sqrt(max(centre, x / 2.0)) + 100.0)
    index = np.arange(most, dtype=np.float64)
    shapes = degrees / 2.0 + index
    terms = np.exp(shapes * math.log(x / 2.0) - x / 2.0 - log_gamma(shapes + 1.0))
    central = np.cumsum(terms[::-1])[::-1]
    if centre == 0.0:
        return float(central[0])
    weights = np.exp(index * math.log(centre) - centre - log_gamma(index + 1.0))
    return float(np.sum(weights * central))


def _log_e_of_pearson(statistic: float, num_cells: int, num_samples: float) -> float:
    ratio = num_samples / CONCENTRATIONS
    by_concentration = 0.5 * statistic * ratio / (1.0 + ratio) - 0.5 * (num_cells - 1) * np.log1p(ratio)
    mean = float(log_sum_exp(by_concentration, axis=0)) - math.log(len(CONCENTRATIONS))
    return mean - math.log(2.0)


def power(num_cells: int, tv: float, num_samples: float, alpha: float = ALPHA) -> float:
    """Return the probability of rejecting the least detectable law at a total variation.

    Parameters
    ----------
    num_cells : int
        Cells of positive probability, k; at least 2.
    tv : float
        Total variation between the sampled law and the exact one, in (0, 1/2].
    num_samples : float
        Sequences drawn.
    alpha : float, optional
        Level of the test.

    Returns
    -------
    float
        See the module's text for what is calculated.
    """
    threshold = math.log(1.0 / alpha)
    low, high = 0.0, 1.0
    while _log_e_of_pearson(high, num_cells, num_samples) < threshold:
        high *= 2.0
        if high > 1e12:
            return 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _log_e_of_pearson(middle, num_cells, num_samples) >= threshold else (middle, high)
    return 1.0 - noncentral_chi2_cdf(high, num_cells - 1, 4.0 * num_samples * tv * tv)


def certify(k: int, tv: float, alpha: float = ALPHA, beta: float = BETA) -> int:
    """Return how many samples certify a total variation.

    Parameters
    ----------
    k : int
        Cells of positive probability; at least 2.
    tv : float
        Total variation to be certified, in (0, 1/2].
    alpha : float, optional
        Level of the test.
    beta : float, optional
        Largest probability of missing the least detectable law at that total variation.

    Returns
    -------
    int
        The smallest number of samples with enough power.

    Examples
    --------
    Five batches of 4096 sequences certify 0.05 over the 81 sequences of four tokens out of three:

    >>> certify(81, 0.05) <= 5 * 4096
    True
    """
    _check(k, alpha, beta)
    if not 0.0 < tv <= 0.5:
        raise ValueError(f"`tv` must lie in (0, 0.5], got {tv}")
    high = 1
    while power(k, tv, high, alpha) < 1.0 - _BETA_MARGIN * beta:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(k, tv, middle, alpha) >= 1.0 - _BETA_MARGIN * beta else (middle, high)
    return high


def certified_tv(k: int, n: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Return the smallest total variation that `n` samples certify, to four digits; 1.0 when they certify none.

    Parameters
    ----------
    k : int
        Cells of positive probability; at least 2.
    n : int
        Sequences drawn.
    alpha, beta : float, optional
        As for :func:`certify`.

    Returns
    -------
    float
        The inverse of :func:`certify`.
    """
    _check(k, alpha, beta)
    low, high = 0.0, 0.5
    if n < 1 or power(k, high, n, alpha) < 1.0 - _BETA_MARGIN * beta:
        return 1.0
    while high - low > 1e-5 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if power(k, middle, n, alpha) >= 1.0 - _BETA_MARGIN * beta else (middle, high)
    return high


def _check(k: int, alpha: float, beta: float) -> None:
    if k < 2:
        raise ValueError(f"`k` must be at least 2, got {k}")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"`{name}` must lie strictly between 0 and 1, got {value}")


def least_detectable(law: ArrayLike, tv: float, rng: np.random.Generator) -> Floats:
    """Return a law at total variation `tv` from `law` in the direction hardest to detect.

    Mass moves in proportion between two random sets of cells of about one half each.

    Parameters
    ----------
    law : array
        Float array that sums to one, any shape.
    tv : float
        Total variation of the result from `law`; below about 0.4, or no such law exists.
    rng : numpy.random.Generator
        Chooses the sets.

    Returns
    -------
    array
        Float64 array of the shape of `law`.
    """
    probs = np.asarray(law, dtype=np.float64)
    flat = probs.ravel() / np.sum(probs)
    order = rng.permutation(flat.size)
    gained = 0.0
    gains = np.zeros(flat.size, dtype=bool)
    for cell in order:
        if abs(gained + flat[cell] - 0.5) < abs(gained - 0.5):
            gains[cell] = True
            gained += flat[cell]
    moved = np.where(gains, flat * (1.0 + tv / gained), flat * (1.0 - tv / (1.0 - gained)))
    if np.any(moved < 0.0):
        raise ValueError(f"`tv` of {tv} is more than the cells that lose can give up, {1.0 - gained}")
    return moved.reshape(probs.shape)


class Rates(NamedTuple):
    """What repeated runs of the sampled check did; the meta-tests print it.

    Attributes
    ----------
    num_streams : int
        Independent runs.
    rejected : int
        Runs that rejected at some look.
    median_samples : float
        Median samples at the first rejecting look; +inf when fewer than half the runs rejected.
    """

    num_streams: int
    rejected: int
    median_samples: float

    @property
    def rate(self) -> float:
        """Fraction of runs that rejected."""
        return self.rejected / self.num_streams


def rejection_rates(
    law: ArrayLike,
    sampled_law: ArrayLike,
    *,
    alpha: float,
    looks: int,
    batch_size: int,
    num_streams: int,
    rng: np.random.Generator,
) -> Rates:
    """Simulate the sampled check many times, looking after every batch and stopping at the first rejection.

    With `sampled_law` equal to `law` this measures the false-alarm rate under optional stopping, which Ville's
    inequality bounds by `alpha`; with another law it measures the power.

    Parameters
    ----------
    law : array
        The exact law, its axes the positions.
    sampled_law : array
        The law the samples are drawn from, of the same shape.
    alpha : float
        Level of the test.
    looks, batch_size : int
        Number of batches and sequences in each.
    num_streams : int
        Independent runs.
    rng : numpy.random.Generator
        Draws the counts.

    Returns
    -------
    Rates
        How many rejected, and when.
    """
    probs = np.asarray(law, dtype=np.float64)
    drawn_from = np.asarray(sampled_law, dtype=np.float64).ravel()
    counts = np.zeros((num_streams, probs.size), dtype=np.int64)
    first = np.full(num_streams, np.inf)
    for look in range(1, looks + 1):
        counts += rng.multinomial(batch_size, drawn_from / np.sum(drawn_from), size=num_streams)
        log_e = log_e_value(counts.reshape(num_streams, *probs.shape), probs)
        reached = (log_e >= math.log(1.0 / alpha)) & np.isinf(first)
        first[reached] = look * batch_size
    return Rates(num_streams, int(np.sum(np.isfinite(first))), float(np.median(first)))
