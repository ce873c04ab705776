"""Finding the lowest logit that top-k and top-p keep."""

from typing import Any

import numpy as np
from array_api_compat import device as device_of

from specsampling._arrays import namespace
from specsampling._model import Array

__all__ = ["lowest_kept"]


def lowest_kept(logits: Array, weights: Array, peak: Array, temperature: Any, top_k: Any, top_p: Any) -> Array:
    """Return the lowest logit of each row that top-k and then top-p keep, with shape ``(..., 1)``.

    `weights` are ``exp((logits - peak) / temperature)``. Settings are a number, an array that broadcasts against
    ``(..., 1)``, or None (off). Rows without a finite maximum get any value.
    """
    xp = namespace(logits)
    ordered = xp.sort(logits, axis=-1, descending=True)
    size = ordered.shape[-1]
    lowest = ordered[..., -1:]
    if top_k is not None:
        k = xp.minimum(xp.zeros_like(peak, dtype=xp.int64) + top_k, xp.asarray(size, device=device_of(peak)))
        lowest = xp.take_along_axis(ordered, k - 1, axis=-1)
    if top_p is None:
        return lowest
    shifted = ordered - peak
    if temperature is not None:
        shifted = shifted / temperature
    mass = xp.where(ordered >= lowest, xp.exp(shifted), xp.zeros_like(shifted))
    mass = xp.cumulative_sum(mass, axis=-1)
    short = mass < top_p * mass[..., -1:]
    last = xp.sum(xp.astype(short, xp.int32), axis=-1, keepdims=True)
    last = xp.minimum(xp.astype(last, xp.int64), xp.asarray(size - 1, device=device_of(peak)))
    found = xp.take_along_axis(ordered, last, axis=-1)
    return xp.where((top_p < 1.0) & xp.ones_like(found, dtype=xp.bool), xp.maximum(found, lowest), lowest)
