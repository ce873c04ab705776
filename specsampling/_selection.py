"""Finding the lowest logit that top-k and top-p keep, without sorting the vocabulary where that is dear.

Every way here gives the same answer, but for ids whose cumulated mass lies within rounding of the threshold; they
differ in what is cheap. NumPy partitions (at small V it sorts), PyTorch takes a growing number of highest logits (on
the CPU it leaves the work to NumPy), JAX bisects, as does PyTorch inside a trace, and any other namespace sorts. A
framework's own functions come from the namespace of the arrays: nothing here imports one.

The answer is a logit and not a probability, for two reasons. Logits that differ can have equal probabilities once
these are rounded, so that a threshold among them would keep too much; and ties are then ties of what the model said.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import is_jax_array, is_jax_namespace, is_torch_array

from specsampling._arrays import device, is_watched, namespace
from specsampling._categorical import block_sums, num_blocks
from specsampling._errors import CapabilityError
from specsampling._model import Array

__all__ = ["PerBatchRow", "column", "lowest_kept"]

PerBatchRow: TypeAlias = float | np.ndarray | None
"""One number for all rows, a host array with one entry per row of the batch, or None (off)."""

# Below this many entries a row is sorted: neither a partition nor a second pass would pay.
_SMALL = 2048
# Up to so many rows a call of each is cheaper than the calls that a sort of all of them takes.
_FEW = 6
# What PyTorch asks `topk` for at first, and by how much more each time.
_FIRST_TOP, _GROWTH = 512, 8


def lowest_kept(
    logits: Array, weights: Array, peak: Array, temperature: PerBatchRow, top_k: PerBatchRow, top_p: PerBatchRow
) -> Array:
    """Return the lowest logit of each row that top-k, and then top-p among what is left, keep.

    Parameters
    ----------
    logits : array
        Real floating array of shape ``(..., V)``, float32 or float64.
    weights : array
        ``exp((logits - peak) / temperature)``, of the same shape.
    peak : array
        The maximum of each row, of shape ``(..., 1)``.
    temperature, top_k, top_p : float or ndarray or None
        Settings, one for all rows or one per row of the first axis. A `top_k` of V or more and a `top_p` of 1 remove
        nothing.

    Returns
    -------
    array
        Of shape ``(..., 1)``: exactly one of the row's logits, or ``-inf`` where none is dropped. Anything where `peak`
        is not finite.
    """
    if isinstance(logits, np.ndarray):
        return _in_numpy(logits, weights, peak, temperature, top_k, top_p)
    if is_jax_array(logits):
        return _compiled_bisect()(logits, weights, _counts(top_k, logits), column(top_p, logits))
    if is_torch_array(logits):
        return _in_torch(logits, weights, peak, temperature, top_k, top_p)
    return _by_sorting(logits, peak, temperature, top_k, top_p)


def column(values: PerBatchRow, like: Array, dtype: Any = None) -> Any:
    """Return `values` ready to broadcast along the first axis of `like`, as `dtype` (None: that of `like`).

    A number or None stays what it is: the namespace's own promotion costs nothing, and never changes a dtype.
    """
    if not isinstance(values, np.ndarray):
        return values
    values = values.reshape(-1, *(1,) * (like.ndim - 1))
    return namespace(like).asarray(values, dtype=like.dtype if dtype is None else dtype, device=device(like))


def _counts(top_k: PerBatchRow, like: Array) -> Any:
    return column(top_k, like, namespace(like).int32)


def _scaled(logits: Array, peak: Array, temperature: Any) -> Array:
    shifted = logits - peak
    return shifted if temperature is None else shifted / temperature


def _by_sorting(logits: Array, peak: Array, temperature: PerBatchRow, top_k: PerBatchRow, top_p: PerBatchRow) -> Array:
    xp = namespace(logits)
    size = logits.shape[-1]
    ordered = xp.flip(xp.sort(logits, axis=-1), axis=-1)
    if top_k is None:
        lowest = ordered[..., -1:]
    else:
        lowest = _at(ordered, xp.clip(_like_index(_counts(top_k, logits), peak), 1, size) - 1)
    if top_p is None:
        return lowest
    mass = xp.exp(_scaled(ordered, peak, column(temperature, logits)))
    mass = xp.where(ordered >= lowest, mass, xp.zeros_like(mass))
    mass = xp.cumulative_sum(mass, axis=-1, dtype=xp.float64)
    return _nucleus_edge(ordered, mass, mass[..., -1:], lowest, column(top_p, logits))


def _nucleus_edge(ordered: Array, mass: Array, total: Array, lowest: Array, top_p: Any) -> Array:
    """Return the first of the descending logits at which the running `mass` reaches its share of `total`."""
    xp = namespace(ordered)
    top_p = xp.zeros_like(total) + top_p
    short = xp.sum(xp.astype(mass < top_p * total, xp.int64), axis=-1, keepdims=True)
    edge = _at(ordered, xp.clip(short, 0, ordered.shape[-1] - 1))
    # Off is off: with top_p = 1 the sum is reached, to rounding, before the tail is in.
    return xp.where(top_p < 1.0, xp.maximum(edge, lowest), lowest)


def _at(ordered: Array, index: Array) -> Array:
    return namespace(ordered).take_along_axis(ordered, index, axis=-1)


def _like_index(values: Any, like: Array) -> Array:
    xp = namespace(like)
    return xp.zeros(like.shape, dtype=xp.int64, device=device(like)) + values


# The caller's quiet ends where PyTorch comes in; rows without a law, and weights that underflow, are no warnings.
@np.errstate(all="ignore")
def _in_numpy(
    logits: np.ndarray,
    weights: np.ndarray,
    peak: np.ndarray,
    temperature: PerBatchRow,
    top_k: PerBatchRow,
    top_p: PerBatchRow,
) -> np.ndarray:
    # Large vocabularies go row by row; so do small ones of few rows, where calls cost more than elements.
    if logits.shape[-1] > _SMALL or (peak.size <= _FEW and logits.size <= _SMALL):
        return _by_partition(logits, weights, peak, temperature, top_k, top_p)
    lowest: np.ndarray = _by_sorting(logits, peak, temperature, top_k, top_p)
    return lowest


def _by_partition(
    logits: np.ndarray,
    weights: np.ndarray,
    peak: np.ndarray,
    temperature: PerBatchRow,
    top_k: PerBatchRow,
    top_p: PerBatchRow,
) -> np.ndarray:
    size = logits.shape[-1]
    temperatures = _host_rows(temperature, 1.0, peak)
    counts = _host_rows(top_k, size, peak)
    shares = _host_rows(top_p, 1.0, peak)
    lowest = np.full_like(peak, -math.inf)
    flat = lowest.reshape(-1)
    rows = logits.reshape(-1, size)
    row_weights = weights.reshape(-1, size)
    for row, top in enumerate(peak.reshape(-1).tolist()):
        if not math.isfinite(top):
            continue
        x, w = rows[row], row_weights[row]
        if counts[row] < size:
            edge = size - counts[row]
            flat[row] = np.partition(x, edge)[edge]
            kept = x >= flat[row]
            x, w = x[kept], w[kept]
        if shares[row] < 1.0:
            flat[row] = _nucleus_of_row(x, w, top, temperatures[row], shares[row])
    return lowest


def _host_rows(values: PerBatchRow, off: float, peak: np.ndarray) -> list[Any]:
    """Return one value for each row of all leading axes."""
    if not isinstance(values, np.ndarray):
        return [off if values is None else values] * peak.size
    return np.repeat(values, peak.size // max(values.size, 1)).tolist()


def _nucleus_of_row(x: np.ndarray, weights: np.ndarray, peak: float, temperature: float, top_p: float) -> Any:
    """Quickselect by mass: partition what is in question, and go on with the half that holds the edge."""
    total = float(weights.sum(dtype=np.float64))
    need = top_p * total
    # All ids below a V-th of what top-p leaves out can be left out together, so the edge is not among them (the half
    # is for rounding). Of a trained model's logits most go here.
    x = x[weights >= 0.5 * (1.0 - top_p) * total / x.size]
    while x.size > _SMALL:
        half = x.size // 2
        x = np.partition(x, half)
        mass = float(np.exp(_scaled(x[half:], peak, temperature)).sum(dtype=np.float64))
        if mass >= need:
            x = x[half:]
        else:
            need -= mass
            x = x[:half]
    x = np.sort(x)[::-1]
    running = np.cumsum(np.exp(_scaled(x, peak, temperature)), dtype=np.float64)
    return x[min(int(np.searchsorted(running, need)), x.size - 1)]


def _in_torch(
    logits: Array, weights: Array, peak: Array, temperature: PerBatchRow, top_k: PerBatchRow, top_p: PerBatchRow
) -> Array:
    torch = namespace(logits)
    if sys.modules["torch"].jit.is_tracing():
        # Which has no operation to look at floats as integers, and would crash in it.
        raise CapabilityError("top-k and top-p cannot be traced by `torch.jit.trace`; use `torch.compile`")
    if is_watched() or (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _bisect(logits, weights, _counts(top_k, logits), column(top_p, logits))
    if logits.device.type == "cpu":
        # The memory is shared, and NumPy's partition leaves PyTorch's topk and sort behind by far.
        logits, weights, peak = (x.detach().contiguous().numpy() for x in (logits, weights, peak))
        return torch.from_numpy(_in_numpy(logits, weights, peak, temperature, top_k, top_p))
    return _by_growing_top(logits, weights, peak, temperature, top_k, top_p)


def _by_growing_top(
    logits: Array, weights: Array, peak: Array, temperature: PerBatchRow, top_k: PerBatchRow, top_p: PerBatchRow
) -> Array:
    torch = namespace(logits)
    size = logits.shape[-1]
    num_top = min(_FIRST_TOP, size)
    counts = None if top_k is None else np.minimum(top_k, size)
    if counts is not None:
        num_top = max(num_top, int(np.max(counts, where=counts < size, initial=1)))
    ordered = torch.topk(logits, num_top, dim=-1).values
    lowest = torch.full_like(peak, -math.inf)
    if counts is not None:
        index = _like_index(_counts(counts, logits), peak)
        lowest = torch.where(index < size, _at(ordered, index.clamp(max=num_top) - 1), lowest)
    if top_p is None:
        return lowest
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    total = torch.where(logits >= lowest, weights, 0.0).sum(dim=-1, keepdim=True, dtype=wide)
    share = column(top_p, logits)
    while True:
        mass = torch.exp(_scaled(ordered, peak, column(temperature, logits)))
        mass = torch.where(ordered >= lowest, mass, 0.0).cumsum(dim=-1, dtype=wide)
        # A row is settled once its sum is reached, or top-k bounds it before that, or there is nothing to find.
        settled = (mass[..., -1:] >= share * total) | (ordered[..., -1:] <= lowest)
        settled = settled | (share >= 1.0) | ~torch.isfinite(peak)
        if num_top == size or bool(settled.all()):
            return _nucleus_edge(ordered, mass, total, lowest, share)
        num_top *= _GROWTH
        if 2 * num_top < size:
            ordered = torch.topk(logits, num_top, dim=-1).values
        else:
            num_top = size
            ordered = torch.sort(logits, axis=-1, descending=True)


def _repeat(xp: Any, times: int, step: Callable[..., Any], values: Any) -> Any:
    if is_jax_namespace(xp):  # its own loop: XLA would take seconds to compile so many copies of a step
        return sys.modules["jax"].lax.fori_loop(0, times, lambda _, values: step(*values), values)
    for _ in range(times):
        values = step(*values)
    return values


@functools.cache
def _compiled_bisect() -> Callable[..., Array]:
    # Outside of a trace JAX would compile a loop anew at every call, because its body is another closure each time.
    compiled: Callable[..., Array] = sys.modules["jax"].jit(_bisect)
    return compiled


def _bisect(logits: Array, weights: Array, top_k: Any, top_p: Any) -> Array:
    """Bisect over bit patterns, which order as the floats do: a pass over V per bit finds the edge exactly."""
    xp = namespace(logits)
    num_bits = 8 * logits.dtype.itemsize
    magnitude = 2 ** (num_bits - 1) - 1
    integer = xp.int32 if num_bits == 32 else xp.int64

    def flip(bits: Array) -> Array:  # its own inverse: negative floats have their patterns in the reverse order
        return bits ^ ((bits >> (num_bits - 1)) & magnitude)

    def search(low: Array, enough: Callable[[Array], Array]) -> Array:
        """Return the highest float of which `enough` holds; it holds of `low`, and of all below any it holds of."""
        low, high = flip(low.view(integer)), flip(xp.max(logits, axis=-1, keepdims=True).view(integer))

        def halve(low: Array, high: Array) -> tuple[Array, Array]:
            middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and the sum would overflow
            holds = enough(flip(middle).view(logits.dtype))
            return xp.where(holds, middle, low), xp.where(holds, high, middle - 1)

        low, _ = _repeat(xp, num_bits, halve, (low, high))
        return flip(low).view(logits.dtype)

    lowest = xp.full_like(logits[..., :1], -math.inf)
    if top_k is not None:
        count = xp.clip(xp.zeros_like(lowest, dtype=xp.int32) + top_k, 1, logits.shape[-1])
        lowest = search(lowest, lambda x: xp.sum(xp.astype(logits >= x, xp.int32), axis=-1, keepdims=True) >= count)
    if top_p is not None:
        weights = xp.where(logits >= lowest, weights, xp.zeros_like(weights))

        def mass(weights: Array) -> Array:  # by blocks: a trace may have no float64 to add in
            return xp.sum(block_sums(weights, num_blocks(weights.shape[-1], 2)), axis=-1, keepdims=True)

        need = top_p * mass(weights)

        def enough(x: Array) -> Array:
            return mass(xp.where(logits >= x, weights, xp.zeros_like(weights))) >= need

        top_p = xp.zeros_like(need) + top_p
        lowest = xp.where(top_p < 1.0, search(lowest, enough), lowest)
    # Where denormal numbers count as zero, one of them may have come out; the logit itself is the least that passes.
    return xp.min(xp.where(logits >= lowest, logits, xp.full_like(logits, math.inf)), axis=-1, keepdims=True)
