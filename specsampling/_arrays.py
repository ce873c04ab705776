"""The few things the core does with arrays that the array API does not spell: where they live, and moving them."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from specsampling import _numpy
from specsampling._model import Array

__all__ = [
    "device",
    "fetch",
    "first_true",
    "is_host",
    "is_watched",
    "marker",
    "move",
    "namespace",
    "pad_last",
    "pick",
    "take_along_axis",
    "take_rows",
    "to_host",
    "workable",
    "zeroed_at",
]

# Of more numbers than these PyTorch's threads make less work than NumPy's shorter calls.
_FEW = 2**20


def namespace(*arrays: Array) -> Any:
    """Return the array-API namespace that all of `arrays` share."""
    # Without compatibility wrappers and the general look-up: at small sizes a round is made of such microseconds.
    for x in arrays:
        if type(x) is not np.ndarray:
            break
    else:
        return _numpy
    return array_api_compat.array_namespace(*arrays)


def device(x: Array) -> Any:
    """Return the device of `x`, or None where there is none to name: NumPy, and JAX, whose constants join any array."""
    if is_host(x) or array_api_compat.is_jax_array(x):
        return None
    return array_api_compat.device(x)


def marker(x: Array) -> Array:
    """Return an empty array in the namespace, dtype and device of `x` that keeps none of its memory alive."""
    if is_host(x):
        return np.empty(0, x.dtype)
    xp = namespace(x)
    if array_api_compat.is_torch_array(x):
        x = x.detach()  # a graph of derivatives would keep every activation alive
    return xp.asarray(xp.reshape(x[:0, ...], (0,)), copy=True)


def take_along_axis(x: Array, index: Array, axis: int) -> Array:
    """Return `x` gathered along `axis`, as the array API says."""
    if is_host(x) and x.ndim == 2 and axis in (1, -1):  # NumPy's own is written in Python, and several times slower
        return x[_counting(x.shape[0])[:, None], index]
    xp = namespace(x)
    if array_api_compat.is_torch_array(index):  # PyTorch alone insists on 64-bit indices
        index = xp.astype(index, xp.int64, copy=False)
    return xp.take_along_axis(x, index, axis=axis)


def pick(x: Array, ids: Array) -> Array:
    """Return ``x[b, t, ids[b, t]]``: ``(B, T, V)`` and ``(B, T)`` give ``(B, T)``."""
    if is_host(x):  # for speed, as above
        return x[_counting(x.shape[0])[:, None], _counting(x.shape[1]), ids]
    return take_along_axis(x, ids[:, :, None], -1)[:, :, 0]


def take_rows(x: Array, index: Array) -> Array:
    """Return ``x[b, index[b], :]`` for every row b: ``(B, T, V)`` and ``(B,)`` give ``(B, V)``."""
    if is_host(x):  # for speed, as above
        return x[_counting(x.shape[0]), index]
    xp = namespace(x)
    batch_size, width, vocab_size = x.shape
    offsets = xp.arange(batch_size, device=device(index)) * width
    return xp.take(xp.reshape(x, (batch_size * width, vocab_size)), offsets + index, axis=0)


def zeroed_at(x: Array, ids: Array) -> Array:
    """Return a copy of ``(B, V)`` with 0 in place of ``x[b, ids[b]]``, where V has such an id."""
    vocab_size = x.shape[1]
    if is_host(x):
        left = x.copy()
        is_known = (ids >= 0) & (ids < vocab_size)
        left[is_known, ids[is_known]] = 0.0
        return left
    xp = namespace(x)
    return xp.where(xp.arange(vocab_size, device=device(x)) == ids[:, None], 0.0, x)


@functools.lru_cache(maxsize=64)
def _counting(stop: int) -> np.ndarray:
    """Return 0 … `stop` - 1, made once."""
    numbers = np.arange(stop)
    numbers.flags.writeable = False
    return numbers


def first_true(flags: Array) -> Array:
    """Return the index of the first True along the last axis, 0 where there is none."""
    if is_host(flags):
        return flags.argmax(axis=-1)
    xp = namespace(flags)
    return xp.argmax(xp.astype(flags, xp.int8), axis=-1)  # the standard has no argmax of booleans


def is_host(x: Array) -> bool:
    """Return whether `x` is a NumPy array, whose values the host may look at without waiting for a device."""
    return isinstance(x, np.ndarray)


def to_host(x: Array) -> np.ndarray:
    """Return `x` as a NumPy array; waits for the device where it lives on one.

    PyTorch's bfloat16, for which NumPy has no name, is raised to float32.
    """
    if isinstance(x, np.ndarray):
        return x
    if array_api_compat.is_torch_array(x):
        x = x.detach().cpu().resolve_neg()
        x = x.float() if x.dtype is namespace(x).bfloat16 else x
    return np.asarray(x)


def workable(x: Array) -> Array:
    """Return floating-point `x` as what a round works on fastest: NumPy where few numbers of PyTorch's are on the host.

    A round is made of small steps, and PyTorch's calls take several times as long as NumPy's. Memory is shared, but for
    half precision, which is raised to single. Whatever is being traced stays as it is, and what are no laws' numbers.
    """
    if not array_api_compat.is_torch_array(x):
        return x
    torch: Any = sys.modules["torch"]
    if type(x) is not torch.Tensor or x.device.type != "cpu" or is_watched() or x.numel() > _FEW:
        return x
    if x.dtype in (torch.float32, torch.float64):
        return to_host(x)
    return to_host(x.detach().float()) if x.dtype in (torch.float16, torch.bfloat16) else x


def is_watched() -> bool:
    """Return whether PyTorch traces, compiles or maps what is being done, so that values would become constants.

    Two of the four questions have no public function. Where a version of PyTorch has lost theirs, the answer is yes:
    what is slower and right. For use where there is a PyTorch array.
    """
    torch: Any = sys.modules["torch"]
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    try:
        return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None)
    except AttributeError:
        return True


def fetch(arrays: Sequence[Array | None]) -> list[Any]:
    """Return small arrays as NumPy ones, waiting once for the device they live on, and not once for each.

    What is None stays None.

    PyTorch arrays cross as bytes in one transfer; of JAX arrays all transfers are begun before the first is awaited.
    """
    if all(x is None or is_host(x) for x in arrays):
        return [*arrays]
    fetched: list[Any] = [*arrays]
    on_torch = [i for i, x in enumerate(fetched) if array_api_compat.is_torch_array(x)]
    if on_torch:
        xp = namespace(fetched[on_torch[0]])
        # Repeated once: a copy, of stride 1 whatever the stride was, without which bytes cannot be looked at.
        parts = [xp.reshape(fetched[i].detach(), (-1,)).repeat(1).view(xp.uint8) for i in on_torch]
        whole = to_host(xp.concat(parts))
        ends = np.cumsum([part.shape[0] for part in parts])
        for i, part in zip(on_torch, np.split(whole, ends[:-1]), strict=True):
            dtype = str(fetched[i].dtype).removeprefix("torch.")
            fetched[i] = part.view(dtype).reshape(tuple(fetched[i].shape))
    for x in fetched:
        if array_api_compat.is_jax_array(x):
            x.copy_to_host_async()
    return [None if x is None else to_host(x) for x in fetched]


def move(x: Array, like: Array | None) -> Array:
    """Return `x` in the namespace and on the device of `like`; None stands for NumPy.

    Between frameworks arrays cross by DLPack on a device, and through NumPy (no copy where both sides can share the
    memory) on the host: DLPack there would refuse 64-bit integers in a JAX that is set to 32 bits.
    """
    if like is None or is_host(like):
        return to_host(x)
    xp = namespace(like)
    if array_api_compat.is_jax_array(like):
        return _move_to_jax(x, like, xp)
    where = array_api_compat.device(like)
    if not is_host(x) and namespace(x) is xp:
        return array_api_compat.to_device(x, where)
    if _is_in_host_memory(x):
        # PyTorch takes over memory only if it may write to it (JAX's is read-only) and no stride is negative.
        return xp.asarray(np.require(to_host(x), requirements=("C", "W")), device=where)
    return array_api_compat.to_device(xp.from_dlpack(x), where)


def _move_to_jax(x: Array, like: Array, xp: Any) -> Array:
    if _is_traced(like) or _is_traced(x):  # there is no device to ask for, and constants join whatever they meet
        return xp.asarray(x)
    devices = like.devices()
    where = next(iter(devices)) if len(devices) == 1 else None
    if array_api_compat.is_jax_array(x):
        return x if where is None or x.devices() == devices else array_api_compat.to_device(x, where)
    return xp.asarray(to_host(x) if _is_in_host_memory(x) else xp.from_dlpack(x), device=where)


def _is_traced(x: Array) -> bool:
    # A tracer counts as a JAX array, and raises rather than lacks what only an array with values has.
    return array_api_compat.is_jax_array(x) and isinstance(x, sys.modules["jax"].core.Tracer)


def _is_in_host_memory(x: Array) -> bool:
    return is_host(x) or "cpu" in str(array_api_compat.device(x)).lower()


def pad_last(x: Array, size: int) -> Array:
    """Return `x` with zeros appended along its last axis up to `size`."""
    missing = size - x.shape[-1]
    if missing <= 0:
        return x
    xp = namespace(x)
    zeros = xp.zeros((*x.shape[:-1], missing), dtype=x.dtype, device=device(x))
    return xp.concat([x, zeros], axis=-1)
