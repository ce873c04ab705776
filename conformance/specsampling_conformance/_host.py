"""Arrays of any framework to NumPy and back, for the suite's own arithmetic."""

from typing import Any, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Array", "host_copy", "namespace_name", "namespace_of", "native_floats", "native_integers", "overwrite"]


Array: TypeAlias = Any
"""An array of any array-API namespace."""


def host_copy(array: Array) -> NDArray[Any]:
    """Return a NumPy copy that shares no memory with `array`; floating values come as float64.

    Float64 holds every value of a narrower floating dtype exactly, bfloat16 included, which NumPy lacks.
    """
    if array_api_compat.is_torch_array(array):
        detached = array.detach().cpu()
        array = detached.double().numpy() if detached.is_floating_point() else detached.numpy()
    elif array_api_compat.is_cupy_array(array):
        array = array.get()
    values = np.array(array)
    return values if values.dtype.kind in "iub" else values.astype(np.float64)


def native_integers(values: ArrayLike, dtype: str, like: Array | None) -> Array:
    """Return integers of `dtype` in the namespace and on the device of `like`; NumPy where that is None."""
    host = np.asarray(values, dtype=dtype)
    if like is None or array_api_compat.is_numpy_array(like):
        return host.copy()
    xp = array_api_compat.array_namespace(like)
    if array_api_compat.is_jax_array(like):
        # Uncommitted, so that JAX may put it beside whatever it is used with, sharded weights included.
        return xp.asarray(host)
    return xp.asarray(host, device=array_api_compat.device(like))


def native_floats(values: ArrayLike, like: Array) -> Array:
    """Return real numbers in the namespace, on the device and in the dtype of `like`."""
    xp = namespace_of(like)
    # Float32 first: not every framework takes float64 from the host, and no other dtype is wider than that.
    host = np.array(values, dtype=np.float64 if like.dtype == xp.float64 else np.float32)
    if array_api_compat.is_numpy_array(like) or array_api_compat.is_jax_array(like):
        return xp.astype(xp.asarray(host), like.dtype)
    return xp.astype(xp.asarray(host, device=array_api_compat.device(like)), like.dtype)


def overwrite(array: Array) -> bool:
    """Write ones over an array, and return whether that could be done: some frameworks' arrays never change."""
    try:
        array[...] = 1
    except TypeError:
        return False
    return True


def namespace_of(array: Array) -> Any:
    """Return an array's namespace."""
    return array_api_compat.array_namespace(array)


def namespace_name(array: Array) -> str:
    """Return the name of an array's namespace, as a person would write it."""
    return str(array_api_compat.array_namespace(array).__name__).removeprefix("array_api_compat.")
