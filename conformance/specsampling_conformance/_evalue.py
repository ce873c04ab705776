r"""An anytime-valid test of sampled sequences against an exact law: the Dirichlet-mixture e-process.

Let :math:`p` be the exact law over cells (all sequences of a fixed length) and :math:`N` the counts after :math:`n`
samples. For each concentration :math:`\kappa` the Dirichlet(:math:`\kappa p`) mixture of alternatives has the
likelihood ratio

.. math::

    E_\kappa(N) = \frac{\Gamma(\kappa)}{\Gamma(\kappa + n)}
                 \prod_i \frac{\Gamma(\kappa p_i + N_i)}{\Gamma(\kappa p_i)} \Big/ \prod_i p_i^{N_i},

a martingale of mean one under :math:`p`. Averages of such martingales are again martingales of mean one: over the
grid of :math:`\kappa`, over the positions (each position's marginal law), and over the joint and the marginals. By
Ville's inequality the average ever reaches :math:`1/\alpha` with probability at most :math:`\alpha`, whenever and
however often one looks; so a run may stop early, and e-values of independent runs multiply.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ALPHA",
    "CONCENTRATIONS",
    "EProcess",
    "Look",
    "MAX_CHECKS",
    "log_e_value",
    "log_gamma",
    "log_mixture_ratio",
    "log_sum_exp",
    "neighbour_counts",
    "neighbour_law",
    "sequence_counts",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALPHA = 2e-8
"""False-alarm probability of one sampled check."""

MAX_CHECKS = 50
"""Most sampled checks in one run, so that the whole run raises a false alarm with probability at most 1e-6."""

CONCENTRATIONS: Floats = 10.0 ** np.arange(2.0, 7.25, 0.5)
"""The grid of Dirichlet concentrations: alternatives at every scale from TV 0.1 down to TV 1e-4."""

_SHIFT = 10
# B_2k / (2k (2k - 1)): at arguments of at least _SHIFT the first term left out is below 1e-17.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_gamma(x: ArrayLike) -> Floats:
    """Return the logarithm of the gamma function, elementwise, for positive arguments.

    Stirling's series, after a shift by ten for arguments below ten. Agrees with :func:`math.lgamma` to 1e-14
    relative, or absolute where the value is below 1 (5e-14 below 30); written here so that the suite needs no SciPy.

    Parameters
    ----------
    x : array
        Real floating array of positive numbers, any shape.

    Returns
    -------
    array
        Float64 array of the shape of `x`.

    Examples
    --------
    >>> float(log_gamma(5.0).round(12)) == round(math.log(24.0), 12)
    True
    """
    value = np.asarray(x, dtype=np.float64)
    small = value < _SHIFT
    large = np.where(small, value + _SHIFT, value)
    inverse = 1.0 / large
    square = inverse * inverse
    series = np.zeros_like(large)
    for coefficient in reversed(_STIRLING):
        series = series * square + coefficient
    result = (large - 0.5) * np.log(large) - large + 0.5 * math.log(2.0 * math.pi) + series * inverse
    if np.any(small):
        low = np.where(small, value, 1.0)
        product = np.ones_like(low)
        for step in range(_SHIFT):
            product = product * (low + step)
        result = np.where(small, result - np.log(product), result)
    return result


def log_sum_exp(values: Floats, axis: int) -> Floats:
    """Return the logarithm of the sum of exponentials along one axis; rows of nothing but -inf give -inf."""
    top = np.max(values, axis=axis, keepdims=True)
    anchor = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total = np.log(np.sum(np.exp(values - anchor), axis=axis, keepdims=True))
    result: Floats = np.squeeze(total + anchor, axis=axis)
    return result


def log_mixture_ratio(counts: ArrayLike, law: ArrayLike) -> Floats:
    """Return the log likelihood ratio of the Dirichlet mixture against `law`, for one set of cells.

    Parameters
    ----------
    counts : array
        Integer array of shape ``(..., k)``: how often each cell was seen; leading axes are independent streams.
    law : array
        Float array of shape ``(k,)``: the exact law, which sums to one. Cells of probability zero are allowed.

    Returns
    -------
    array
        Float64 array of shape ``(...)``; +inf where a cell of probability zero was seen.
    """
    seen = np.asarray(counts, dtype=np.float64)
    probs = np.asarray(law, dtype=np.float64)
    possible = probs > 0.0
    impossible = np.any(seen[..., ~possible] > 0.0, axis=-1)
    seen, probs = seen[..., possible], probs[possible]
    total = np.sum(seen, axis=-1)
    by_concentration = []
    for concentration in CONCENTRATIONS:
        prior = concentration * probs
        # A cell that was not seen contributes nothing; computed, it would be the difference of two rounded terms.
        cells = np.where(seen > 0.0, log_gamma(prior + seen) - log_gamma(prior), 0.0)
        by_concentration.append(np.sum(cells, axis=-1) + log_gamma(concentration) - log_gamma(concentration + total))
    evidence = log_sum_exp(np.stack(by_concentration), axis=0) - math.log(len(CONCENTRATIONS))
    return np.where(impossible, np.inf, evidence - np.sum(seen * np.log(probs), axis=-1))


class Look(NamedTuple):
    """One look at a running test.

    Attributes
    ----------
    num_samples : int
        Samples seen so far.
    log_e : float
        Logarithm of the e-value at that moment.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling_conformance import audit
    >>> looks = []
    >>> report = audit(lambda prompt, n: np.zeros((n, 1), dtype=int), [0.5, 0.5], batch_size=64, on_look=looks.append)
    >>> looks == list(report.looks), looks[0].num_samples, looks[-1].log_e >= report.threshold
    (True, 64, True)
    """

    num_samples: int
    log_e: float


class EProcess:
    """A running test of sampled sequences against their exact law.

    Parameters
    ----------
    law : array
        Float array whose axes are the positions of a sequence, shape ``(V,) * L``: the exact law of the sequence.
        A one-dimensional law has no marginals besides itself.
    alpha : float, optional
        Largest probability of a false alarm, over the whole life of the test.

    Attributes
    ----------
    law : array
        The exact law, divided by its sum.
    counts : array
        Integer array of the shape of `law`: what was seen so far.
    looks : list of Look
        The e-value after every update, for the report's plot.

    Notes
    -----
    The joint law has weight 1/2; the marginals of the positions share the other 1/2. `rejected` remembers: once the
    e-value has reached ``1 / alpha`` the test has failed, whatever comes later. A sequence of probability zero fails
    it at once.

    Examples
    --------
    >>> test = EProcess(np.full((2, 2), 0.25), alpha=0.01)
    >>> test.update([[250, 250], [250, 250]]) < 0.0
    True
    >>> test.update([[250, 0], [0, 250]]) > 50.0, test.rejected
    (True, True)
    """

    def __init__(self, law: ArrayLike, alpha: float = ALPHA) -> None:
        probs = np.asarray(law, dtype=np.float64)
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"`alpha` must lie strictly between 0 and 1, got {alpha}")
        if probs.ndim == 0 or not np.all(np.isfinite(probs)) or np.any(probs < 0.0):
            raise ValueError("`law` must be an array of finite, non-negative probabilities with at least one axis")
        total = float(np.sum(probs))
        if abs(total - 1.0) > 1e-5:
            raise ValueError(f"`law` must sum to one, got a sum of {total!r}")
        self.law: Floats = probs / total
        self.alpha = alpha
        self.counts: Ints = np.zeros(probs.shape, dtype=np.int64)
        self.looks: list[Look] = []

    def update(self, counts: ArrayLike) -> float:
        """Add counts of the shape of `law` and return the logarithm of the e-value."""
        more = np.asarray(counts)
        if more.shape != self.law.shape or more.dtype.kind not in "iu":
            raise ValueError(f"`counts` must be integers of shape {self.law.shape}, got {more.dtype} {more.shape}")
        self.counts = self.counts + more
        self.looks.append(Look(self.num_samples, float(log_e_value(self.counts, self.law))))
        return self.log_e

    def update_sequences(self, tokens: ArrayLike) -> float:
        """Add samples given as an integer array of shape ``(n, L)`` and return the logarithm of the e-value."""
        return self.update(sequence_counts(tokens, self.law.shape))

    @property
    def num_samples(self) -> int:
        """Number of sequences seen so far."""
        return int(np.sum(self.counts))

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value now; 0 before anything was seen."""
        return self.looks[-1].log_e if self.looks else 0.0

    @property
    def threshold(self) -> float:
        """What `log_e` must reach to reject: ``ln(1 / alpha)``."""
        return math.log(1.0 / self.alpha)

    @property
    def rejected(self) -> bool:
        """Whether the e-value has ever reached ``1 / alpha``."""
        return any(look.log_e >= self.threshold for look in self.looks)

    @property
    def impossible(self) -> list[tuple[int, ...]]:
        """Cells of probability zero that were seen."""
        return [tuple(int(i) for i in cell) for cell in np.argwhere((self.law == 0.0) & (self.counts > 0))]


def log_e_value(counts: ArrayLike, law: ArrayLike) -> Floats:
    """Return the log e-value of the whole test: the joint at weight 1/2 and the marginals sharing the other 1/2.

    Parameters
    ----------
    counts : array
        Integer array of shape ``(..., *law.shape)``; leading axes are independent streams.
    law : array
        Float array whose axes are positions.

    Returns
    -------
    array
        Float64 array of shape ``(...)``.
    """
    seen, probs = np.asarray(counts), np.asarray(law, dtype=np.float64)
    streams = seen.shape[: seen.ndim - probs.ndim]
    joint = log_mixture_ratio(seen.reshape(*streams, -1), probs.ravel())
    if probs.ndim == 1:
        return joint
    marginals = []
    for position in range(probs.ndim):
        others = tuple(axis for axis in range(probs.ndim) if axis != position)
        seen_here = np.sum(seen, axis=tuple(axis + len(streams) for axis in others))
        marginals.append(log_mixture_ratio(seen_here, np.sum(probs, axis=others)))
    mean_of_marginals = log_sum_exp(np.stack(marginals), axis=0) - math.log(probs.ndim)
    return np.logaddexp(joint, mean_of_marginals) - math.log(2.0)


def sequence_counts(tokens: ArrayLike, shape: Sequence[int]) -> Ints:
    """Count sequences ``(n, L)`` into an array of `shape`, one axis a position; an id out of range raises."""
    sequences = np.asarray(tokens)
    if sequences.ndim != 2 or sequences.shape[1] != len(shape):
        raise ValueError(f"`tokens` must have shape (n, {len(shape)}), got {sequences.shape}")
    cells = np.ravel_multi_index(tuple(sequences.T), tuple(shape))
    return np.bincount(cells, minlength=math.prod(shape)).reshape(tuple(shape)).astype(np.int64)


def neighbour_law(law: ArrayLike) -> Floats:
    """Return the law of the first tokens of two independent rows, ``(V, V)``, from the law of one row's sequence."""
    probs = np.asarray(law, dtype=np.float64)
    first = np.sum(probs, axis=tuple(range(1, probs.ndim)))
    return np.outer(first, first)


def neighbour_counts(first_tokens: ArrayLike, vocab_size: int) -> Ints:
    """Count pairs of first tokens of rows 0 and 1, 2 and 3, … of each batch.

    Uniforms shared between rows leave every row's own law exact; only the law of several rows together shows them.
    Pairs do not overlap, so they are independent of one another and the same test applies, with
    :func:`neighbour_law` as the law.

    Parameters
    ----------
    first_tokens : array
        Integer array of shape ``(..., B)``: the first token of each row of each batch.
    vocab_size : int
        Number of token ids, V.

    Returns
    -------
    array
        Integer array of shape ``(V, V)``.
    """
    tokens = np.asarray(first_tokens)
    even = tokens.shape[-1] // 2 * 2
    return sequence_counts(tokens[..., :even].reshape(-1, 2), (vocab_size, vocab_size))
