"""Sampling settings, and the one function that turns logits into the probabilities they ask for."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import is_jax_namespace, is_torch_namespace

from specsampling._arrays import device, namespace
from specsampling._model import Array
from specsampling._selection import column, lowest_kept

__all__ = ["Sampling", "to_probs"]

PerRow: TypeAlias = float | Sequence[float | None] | None


class _Plan(NamedTuple):
    """What `to_probs` needs of a Sampling, derived once. A filter that is off everywhere is None.

    Numbers hold for every row; arrays have one entry per row, in which greedy rows borrow the settings of a sampled
    one (their probabilities are replaced anyhow) and filters that are off have a value that removes nothing.
    """

    num_rows: int | None
    greedy: bool | np.ndarray
    temperature: float | np.ndarray | None
    top_k: int | np.ndarray | None
    top_p: float | np.ndarray | None
    log_min_p: float | np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits: temperature, then top-k, then top-p, then min-p.

    Each setting is one number for all rows, or a sequence (or array) with one entry per row of the batch. None, for
    all rows or for one, means off: every filter removes nothing, and the temperature is 1. Each filter sees the law
    that the one before it left, renormalised; ids tied with the last one kept are kept too.

    Attributes
    ----------
    temperature : float or sequence of float
        Logits are divided by it. At 0 the row is *greedy*: its law is one at the id of the highest logit (the lowest
        such id on ties) and zero elsewhere, and the filters have no effect. Sampled and greedy rows may be mixed.
    top_k : int or sequence of int, optional
        Keep the `top_k` ids of highest probability; at least 1.
    top_p : float or sequence of float, optional
        Keep the fewest ids of highest probability whose sum is at least `top_p`; above 0, and off at 1.
    min_p : float or sequence of float, optional
        Keep the ids whose probability is at least `min_p` times that of the most probable one; from 0 (off) to 1.

    Raises
    ------
    TypeError
        A setting is not a number, or a `top_k` is not an integer.
    ValueError
        A setting is out of its range, or two settings have entries for different numbers of rows.

    Notes
    -----
    Settings given per row are stored as tuples, so that a Sampling hashes (under ``jax.jit`` it is a static argument).
    How many rows a batch has is known only where the settings are used: whatever is for another number of them, an
    empty sequence included, is refused there.

    Examples
    --------
    >>> Sampling(temperature=0.7, top_p=0.9)
    Sampling(temperature=0.7, top_k=None, top_p=0.9, min_p=None)
    >>> mixed = Sampling(temperature=[0.0, 0.8], top_k=[None, 50])
    >>> mixed.rows([1])
    Sampling(temperature=(0.8,), top_k=(50,), top_p=None, min_p=None)
    >>> mixed.rows([0]).is_greedy
    True
    """

    temperature: PerRow = 1.0
    top_k: int | Sequence[int | None] | None = None
    top_p: PerRow = None
    min_p: PerRow = None
    _plan: _Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in _RANGES:
            object.__setattr__(self, name, _normalised(name, getattr(self, name)))
        object.__setattr__(self, "_plan", _make_plan(self))

    @property
    def is_greedy(self) -> bool:
        """Whether every row has temperature 0."""
        return self._plan.greedy is True

    def rows(self, index: Any) -> "Sampling":
        """Return the settings of the rows `index` (row numbers, a mask or a slice), in that order.

        Settings given as one number hold for any rows, and stay as they are.
        """
        if self._plan.num_rows is None:
            return self
        if not isinstance(index, slice):
            index = np.asarray(index)
            index = index if index.size else index.astype(np.int64)
        kept = np.arange(self._plan.num_rows)[index].tolist()

        def take(values: Any) -> Any:
            return tuple(values[i] for i in kept) if isinstance(values, tuple) else values

        return Sampling(
            temperature=take(self.temperature),
            top_k=take(self.top_k),
            top_p=take(self.top_p),
            min_p=take(self.min_p),
        )

    def check_rows(self, batch_size: int, name: str = "sampling") -> None:
        """Raise ValueError, under the argument's `name`, unless settings given per row are for `batch_size` rows."""
        if self._plan.num_rows not in (None, batch_size):
            raise ValueError(
                f"`{name}` must hold one value per setting, or one per row of the batch ({batch_size}), "
                f"got values for {self._plan.num_rows} rows"
            )


def to_probs(logits: Array, sampling: Sampling) -> Array:
    r"""Return the law that `sampling` makes of `logits`.

    With temperature :math:`T` and kept set :math:`S` (see :class:`Sampling`),

    .. math:: p_i = \frac{[i \in S]\, e^{x_i / T}}{\sum_{j \in S} e^{x_j / T}}

    Parameters
    ----------
    logits : array
        Real floating array of shape ``(..., V)``. Entries of ``-inf`` get probability zero, exactly. Not modified.
    sampling : Sampling
        Settings given per row go along the first axis of `logits`, which then has at least two.

    Returns
    -------
    array
        Real floating array of the shape of `logits`, in its namespace and on its device; float32 for logits in half
        precision, else of their dtype. Each row sums to one, except that a row whose maximum is not finite (it holds
        NaN or ``+inf``, or nothing but ``-inf``) has no law and is NaN throughout.

    Raises
    ------
    TypeError
        `logits` is not real floating.
    ValueError
        `logits` has no vocabulary, or `sampling` holds settings for another number of rows.

    Notes
    -----
    Pure, and of static shape under a trace. Which ids are kept is decided by comparing logits, not probabilities:
    where one id holds nearly all mass, rounded sums of the others no longer tell what a threshold asks. Temperatures
    outside the normal numbers of the dtype are brought among them; only logits as close together, or as far apart, as
    these numbers are small and large could tell.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.log([0.5, 0.25, 0.125, 0.125])
    >>> to_probs(logits, Sampling(top_p=0.6)).round(3)
    array([0.667, 0.333, 0.   , 0.   ])
    >>> to_probs(logits, Sampling(temperature=0.0))
    array([1., 0., 0., 0.])
    """
    xp, logits = _at_least_single(logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"`logits` must have shape (..., V) with V at least 1, got {tuple(logits.shape)}")
    plan = sampling._plan
    if plan.num_rows is not None and (logits.ndim < 2 or logits.shape[0] != plan.num_rows):
        raise ValueError(
            f"`logits` must have shape (B, ..., V) with B = {plan.num_rows}, the number of rows that `sampling` holds "
            f"settings for, got {tuple(logits.shape)}"
        )
    if not isinstance(logits, np.ndarray) and (is_torch_namespace(xp) or is_jax_namespace(xp)):
        return _law(xp, logits, plan)
    # Only rows without a law are invalid operations, and NaN is what they are to give.
    with np.errstate(all="ignore"):
        return _law(xp, logits, plan)


def _law(xp: Any, logits: Array, plan: _Plan) -> Array:
    peak = xp.max(logits, axis=-1, keepdims=True)
    if plan.greedy is True:
        return _one_hot(xp, logits, peak)
    shifted = logits - peak
    temperature = plan.temperature
    if temperature is not None:
        temperature = _normal(temperature, 126 if logits.dtype == xp.float32 else 1022)
        shifted = shifted / column(temperature, logits)
    weights = xp.exp(shifted)
    dropped = None
    if plan.top_k is not None or plan.top_p is not None:
        dropped = logits < lowest_kept(logits, weights, peak, temperature, plan.top_k, plan.top_p)
    if plan.log_min_p is not None:
        unlikely = shifted < column(plan.log_min_p, logits)
        dropped = unlikely if dropped is None else dropped | unlikely
    if dropped is not None:
        # No comparison drops NaN, so it reaches the sum, and through it the whole row.
        weights = xp.where(dropped, xp.zeros_like(weights), weights)
    probs = weights / xp.sum(weights, axis=-1, keepdims=True)
    if not isinstance(logits, np.ndarray) and is_jax_namespace(xp):
        # XLA compiles exp as if NaN did not exist: from a NaN that is a constant of the program anything may come.
        probs = xp.where(_has_law(xp, logits, peak), probs, xp.full_like(probs, math.nan))
    if plan.greedy is not False:
        probs = xp.where(column(plan.greedy, logits, xp.bool), _one_hot(xp, logits, peak), probs)
    return probs


def _normal(temperature: float | np.ndarray, exponent: int) -> float | np.ndarray:
    """Bring `temperature` among the normal numbers of a dtype, whose reciprocals are finite as well."""
    lowest, highest = 2.0**-exponent, 2.0**exponent
    if not isinstance(temperature, np.ndarray):
        return min(max(temperature, lowest), highest)
    within: np.ndarray = np.minimum(np.maximum(temperature, lowest), highest)
    return within


def _at_least_single(logits: Array) -> tuple[Any, Array]:
    """Return the namespace, and the logits in single precision at least."""
    if isinstance(logits, np.ndarray) and not logits.flags.c_contiguous:
        logits = np.ascontiguousarray(logits)  # along any other axis NumPy's sums are not pairwise
    xp = namespace(logits)
    dtype = logits.dtype
    if dtype in (xp.float32, xp.float64):
        return xp, logits
    if str(dtype).removeprefix("torch.") in ("float16", "bfloat16"):
        return xp, xp.astype(logits, xp.float32)
    raise TypeError(f"`logits` must be float16, bfloat16, float32 or float64, got {dtype}")


def _one_hot(xp: Any, logits: Array, peak: Array) -> Array:
    # One pass over V: what is chosen among has one entry per row.
    one = xp.where(_has_law(xp, logits, peak), xp.ones_like(peak), xp.full_like(peak, math.nan))
    likeliest = xp.argmax(logits, axis=-1, keepdims=True)
    if isinstance(logits, np.ndarray):
        probs = np.empty(logits.shape, logits.dtype)
        probs[...] = one - 1
        rows = probs.reshape(-1, probs.shape[-1])  # a view, and at once what `put_along_axis` does
        rows[np.arange(rows.shape[0]), likeliest.ravel()] = one.ravel()
        return probs
    return xp.where(likeliest == xp.arange(logits.shape[-1], device=device(logits)), one, one - 1)


def _has_law(xp: Any, logits: Array, peak: Array) -> Array:
    has_law = xp.isfinite(peak)
    if isinstance(logits, np.ndarray) or is_torch_namespace(xp):
        return has_law
    # NaN is looked for by itself because XLA's maximum over a long row can miss it.
    return has_law & ~xp.any(xp.isnan(logits), axis=-1, keepdims=True)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0.0 <= value <= sys.float_info.max, "finite and at least 0 (which is greedy)"),
    "top_k": (lambda value: value >= 1, "at least 1 (None is off)"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "above 0 and at most 1 (None is off)"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "from 0 to 1 (None is off)"),
}


def _normalised(name: str, values: Any) -> Any:
    """Return `values` as a number, None or a tuple of them, each checked."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return tuple(_checked(name, value, f" in row {row}") for row, value in enumerate(values))
    return _checked(name, values, "")


def _checked(name: str, value: Any, where: str) -> float | None:
    if value is None:
        return 1.0 if name == "temperature" else None
    kind, kind_name = (Integral, "an integer") if name == "top_k" else (Real, "a real number")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be {kind_name}, None, or a sequence of these, got {value!r}{where}")
    in_range, wording = _RANGES[name]
    if not in_range(value):
        raise ValueError(f"`{name}` must be {wording}, got {value}{where}")
    return int(value) if isinstance(value, Integral) and name == "top_k" else float(value)


def _make_plan(sampling: Sampling) -> _Plan:
    settings = {name: getattr(sampling, name) for name in _RANGES}
    lengths = {name: len(values) for name, values in settings.items() if isinstance(values, tuple)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"settings given per row must all be for the same rows, got {lengths}")
    num_rows = next(iter(lengths.values()), None)

    def per_row(name: str) -> list[Any]:
        values = settings[name]
        return list(values) if isinstance(values, tuple) else [values] * (1 if num_rows is None else num_rows)

    temperature = per_row("temperature")
    greedy = [value == 0.0 for value in temperature]
    sampled = greedy.index(False) if False in greedy else 0

    def merged(values: list[Any], off: Any) -> Any:
        values = [values[sampled] if skip else value for value, skip in zip(values, greedy, strict=True)]
        values = [off if value is None else value for value in values]
        if len(set(values)) > 1:
            return np.asarray(values)
        return None if not values or values[0] == off else values[0]

    # No vocabulary is larger; arrays of counts are int32 on devices.
    most = np.iinfo(np.int32).max
    top_k = [None if value is None else min(value, most) for value in per_row("top_k")]
    min_p = [None if value is None else math.log(value) if value else -math.inf for value in per_row("min_p")]
    return _Plan(
        num_rows=num_rows,
        greedy=all(greedy) if len(set(greedy)) < 2 else np.asarray(greedy),
        temperature=merged(temperature, 1.0),
        top_k=merged(top_k, most),
        top_p=merged(per_row("top_p"), 1.0),
        log_min_p=merged(min_p, -math.inf),
    )
