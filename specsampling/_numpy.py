"""NumPy's functions of the array API without the layers around them: at the sizes of a round these take longer.

What :func:`specsampling._arrays.namespace` returns for NumPy's own arrays. A function gives what NumPy's of the same
name gives for arrays; all other names are NumPy's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = [
    "all",
    "any",
    "argmax",
    "astype",
    "clip",
    "cumulative_prod",
    "cumulative_sum",
    "finfo",
    "full_like",
    "iinfo",
    "isdtype",
    "max",
    "min",
    "result_type",
    "stack",
    "sum",
    "take",
    "zeros_like",
]


def __getattr__(name: str) -> Any:
    value = globals()[name] = getattr(np, name)  # found at once from the next time on
    return value


def _reduction(ufunc: np.ufunc) -> Callable[..., Any]:
    reduce: Callable[..., Any] = ufunc.reduce

    def function(x: np.ndarray, /, *, axis: int | None = None, dtype: Any = None, keepdims: bool = False) -> Any:
        return reduce(x, axis=axis, dtype=dtype, keepdims=keepdims)

    return function


all = _reduction(np.logical_and)
any = _reduction(np.logical_or)
max = _reduction(np.maximum)
min = _reduction(np.minimum)
sum = _reduction(np.add)


def _accumulation(ufunc: np.ufunc) -> Callable[..., Any]:
    accumulate: Callable[..., Any] = ufunc.accumulate

    def function(x: np.ndarray, /, *, axis: int, dtype: Any = None) -> Any:
        return accumulate(x, axis=axis, dtype=dtype)

    return function


cumulative_prod = _accumulation(np.multiply)
cumulative_sum = _accumulation(np.add)

# Of dtypes, whose answers do not change.
finfo = functools.cache(np.finfo)
iinfo = functools.cache(np.iinfo)
result_type = functools.cache(np.result_type)


def argmax(x: np.ndarray, /, *, axis: int, keepdims: bool = False) -> Any:
    """Return the index of the first maximum along `axis`."""
    return x.argmax(axis=axis, keepdims=keepdims)


def astype(x: np.ndarray, dtype: Any, /, *, copy: bool = True) -> np.ndarray:
    """Return `x` in another dtype."""
    return x.astype(dtype, copy=copy)


def clip(x: np.ndarray, min: Any, max: Any, /) -> np.ndarray:
    """Return `x`, brought between two bounds."""
    clipped: np.ndarray
    try:
        clipped = np.minimum(np.maximum(x, min), max)
    except OverflowError:  # a bound that the dtype of narrow integers cannot hold
        clipped = np.clip(x, min, max)
    return clipped


def full_like(x: np.ndarray, value: Any, /, *, dtype: Any = None) -> np.ndarray:
    """Return an array in the shape of `x` that holds `value` throughout."""
    full = np.empty(x.shape, x.dtype if dtype is None else dtype)
    full.fill(value)
    return full


def isdtype(dtype: np.dtype[Any], kind: Any, /) -> bool:
    """Return whether a dtype is of a kind."""
    return dtype.kind in "iu" if kind == "integral" else np.isdtype(dtype, kind)


def stack(arrays: Sequence[np.ndarray], /, *, axis: int = 0) -> np.ndarray:
    """Join arrays of one shape along a new axis."""
    new = (*(slice(None),) * axis, None) if axis >= 0 else (..., None, *(slice(None),) * (-axis - 1))
    return np.concatenate([x[new] for x in arrays], axis=axis)


def take(x: np.ndarray, indices: np.ndarray, /, *, axis: int) -> np.ndarray:
    """Return the entries of `x` at `indices` along `axis`."""
    return x.take(indices, axis=axis)


def zeros_like(x: np.ndarray, /, *, dtype: Any = None) -> np.ndarray:
    """Return zeros in the shape of `x`."""
    return np.zeros(x.shape, x.dtype if dtype is None else dtype)
