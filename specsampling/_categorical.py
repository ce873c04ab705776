"""Draw ids from rows of weights: an inverse CDF by levels, accurate in float32 for any vocabulary.

A running sum over V ids in float32 has steps as large as the probabilities in its tail: on a flat law over 250 000 ids
the total-variation error is 7e-3. So ids are put into blocks, a block is drawn by its sum, then an id within the block,
each with a uniform of its own; large vocabularies have three levels. No running sum is then longer than a few hundred
terms, and since fewer terms are added one after the other it is faster too.

Block ``j`` of ``n`` holds the ids ``j, j + n, j + 2 n, …``. Any partition gives the same law, and with this one the
block sums are a sum of contiguous rows, several times faster in NumPy than sums along the last axis.
"""

import math

import array_api_compat
import numpy as np

from specsampling._arrays import first_true, is_host, namespace, pad_last, take_along_axis
from specsampling._model import Array

__all__ = [
    "below_one",
    "block_sums",
    "block_weights",
    "boundaries",
    "categorical_from_uniforms",
    "draw",
    "num_blocks",
    "num_levels",
]


def num_levels(vocab_size: int) -> int:
    """Return how many draws choose one id out of `vocab_size`: 1, 2 or 3, a function of the vocabulary size alone.

    Examples
    --------
    >>> from specsampling._categorical import num_levels
    >>> [num_levels(vocab_size) for vocab_size in (1, 256, 32_000, 262_144)]
    [1, 1, 2, 3]
    """
    if vocab_size <= 320:
        return 1
    return 2 if vocab_size <= 32_768 else 3


def num_blocks(vocab_size: int, levels: int) -> int:
    """Return into how many blocks `vocab_size` ids are put, where `levels` draws choose one: every level as long."""
    block_size = round(math.pow(vocab_size, 1 / levels))
    return math.ceil(vocab_size / block_size)


def categorical_from_uniforms(weights: Array, uniforms: Array) -> Array:
    """Draw one id per row of weights, as a pure function of the uniforms.

    Parameters
    ----------
    weights : array
        Real floating array (float32 or float64) of shape ``(..., V)``, not negative, with a finite sum; rows need not
        sum to one, and their sum may be denormal.
    uniforms : array
        Array of shape ``(..., 3)`` of the same dtype, strictly inside (0, 1). The first ``num_levels(V)`` entries along
        the last axis are used.

    Returns
    -------
    array
        Integer array of shape ``(...)``. An id of weight zero is never returned when its row has a positive weight. A
        row that has none, or a NaN, gives some id in range: whoever made the row has to look for those.

    Notes
    -----
    No shape depends on data, so the function can be traced. Where a device flushes denormal numbers to zero, a
    denormal weight counts as zero. The law differs from the weights' by less than 1e-5 in float32 (total variation, on
    the laws of language models at any V; 5e-5 on the worst) and 1e-12 in float64; tests compute it from the boundaries.
    The lengths of the levels are chosen for that: 23 bits tell about 320 ids apart so well, twice about 180.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling._categorical import categorical_from_uniforms
    >>> weights = np.array([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    >>> categorical_from_uniforms(weights, np.full((2, 3), 0.3)).tolist()
    [2, 1]
    """
    return draw(weights, below_one(uniforms), num_levels(weights.shape[-1]))


def below_one(uniforms: Array) -> Array:
    """Return `uniforms` with the largest number below 1 for a 1, which only a faulty source gives."""
    xp = namespace(uniforms)
    return xp.minimum(uniforms, 1.0 - xp.finfo(uniforms.dtype).eps / 2)


def draw(weights: Array, uniforms: Array, levels: int) -> Array:
    """Draw as `categorical_from_uniforms` does, in `levels` levels, with uniforms that are known to be below 1."""
    if levels == 1:
        return _invert(boundaries(weights), uniforms[..., 0])
    blocks = num_blocks(weights.shape[-1], levels)
    block = draw(block_sums(weights, blocks), uniforms, levels - 1)
    member = _invert(boundaries(block_weights(weights, block, blocks)), uniforms[..., levels - 1])
    return block + blocks * member


def boundaries(weights: Array) -> Array:
    """Return what one level compares with: running sums of shape ``(..., n)``, in units that differ from row to row.

    The id drawn is the first whose entry is greater than the uniform times the last entry.
    """
    total = namespace(weights).sum(weights, axis=-1, keepdims=True, dtype=weights.dtype)
    # Only NumPy warns of a row of zeros, or with NaN, which has no law. To silence it takes as long as a sum, so a lone
    # row is looked at first; on a device `errstate` would break a graph of PyTorch's compiler in two.
    if not is_host(weights) or (total.size == 1 and 0.0 < total.item() < math.inf):
        return _running_sums(weights, total)
    with np.errstate(invalid="ignore"):
        return _running_sums(weights, total)


def _running_sums(weights: Array, total: Array) -> Array:
    xp = namespace(weights)
    # The sums are taken in whole numbers, which makes them exact, and the same in any order. In floating point equal
    # terms are all rounded the same way, and the errors add up (1.5e-5 on "0.99 on one id"); and where a device sums in
    # parallel the sums are not even monotone, so that an id of weight zero could be drawn. What is cut off is less than
    # one unit per id, 2**-30 of the sum in float32.
    integer, one = (xp.int32, 2.0**30) if weights.dtype == xp.float32 else (xp.int64, 2.0**60)
    shares = xp.astype(weights / total * one, integer)
    return xp.astype(xp.cumulative_sum(shares, axis=-1, dtype=integer), weights.dtype)


def _invert(bounds: Array, uniform: Array) -> Array:
    threshold = uniform[..., None] * bounds[..., -1:]
    return first_true(bounds > threshold)


def block_sums(weights: Array, blocks: int) -> Array:
    """Return the sum of each of `blocks` blocks of ``(..., V)`` weights, of shape ``(..., blocks)``."""
    xp = namespace(weights)
    vocab_size = weights.shape[-1]
    full = vocab_size // blocks
    grid = xp.reshape(weights[..., : full * blocks], (*weights.shape[:-1], full, blocks))
    sums = xp.sum(grid, axis=-2, dtype=weights.dtype)
    if full * blocks == vocab_size:
        return sums
    return sums + pad_last(weights[..., full * blocks :], blocks)


def block_weights(weights: Array, block: Array, blocks: int) -> Array:
    """Return the weights of one block per row, of shape ``(..., ceil(V / blocks))``, zero past the vocabulary."""
    xp = namespace(weights)
    vocab_size = weights.shape[-1]
    size = math.ceil(vocab_size / blocks)
    members = xp.arange(size, dtype=block.dtype, device=array_api_compat.device(block))
    ids = block[..., None] + blocks * members
    if size * blocks == vocab_size:
        return take_along_axis(weights, ids, -1)
    inside = ids < vocab_size
    found = take_along_axis(weights, xp.where(inside, ids, xp.zeros_like(ids)), -1)
    return xp.where(inside, found, xp.zeros_like(found))
