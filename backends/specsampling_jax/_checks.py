"""What is refused before anything is traced or written: an index that XLA would clamp or drop never reaches it."""

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import CacheError

__all__ = ["Ints", "checked_block", "checked_lengths", "checked_num_logits", "checked_sizes", "on_host"]

Ints = NDArray[np.integer[Any]]


def checked_sizes(batch_size: int, capacity: int) -> tuple[int, int]:
    """Return the number of rows and of tokens as ints, neither negative."""
    batch_size, capacity = operator.index(batch_size), operator.index(capacity)
    if batch_size < 0 or capacity < 0:
        raise ValueError(f"`batch_size` and `capacity` must be non-negative, got {batch_size} and {capacity}")
    return batch_size, capacity


def on_host(x: Any) -> Any:
    """Return `x` as a NumPy array; waits for the device where it lives on one."""
    detach = getattr(x, "detach", None)  # a PyTorch tensor
    return np.asarray(x if detach is None else detach().cpu())


def checked_block(tokens: Any, lengths: Ints, capacity: int, vocab_size: int) -> Any:
    """Return the tokens as an integer array ``(B, T)`` that can be appended to rows of these `lengths`.

    Ids that are on a device already are not fetched to be looked at: one out of range gives NaN there.

    Raises
    ------
    TypeError
        If the tokens are not integers.
    ValueError
        If the shape is not ``(B, T)`` or an id is outside ``[0, V)``.
    CacheError
        If a row has no room for T more tokens.
    """
    is_on_device = type(tokens).__module__.startswith("jax")
    block = tokens if is_on_device else on_host(tokens)
    if block.ndim != 2 or block.shape[0] != len(lengths):
        raise ValueError(f"`tokens` must have shape (B, T) with B = {len(lengths)}, got {tuple(block.shape)}")
    if np.dtype(block.dtype).kind not in "iu" and block.size:
        raise TypeError(f"`tokens` must be an integer array, got dtype {block.dtype}")
    if not is_on_device and block.size and (block.min() < 0 or block.max() >= vocab_size):
        row, column = np.argwhere((block < 0) | (block >= vocab_size))[0]
        raise ValueError(
            f"`tokens` must lie in [0, {vocab_size}), got {block[row, column]} in row {row}, column {column}"
        )
    if len(lengths) and lengths.max() + block.shape[1] > capacity:
        row = int(lengths.argmax())
        raise CacheError(
            f"row {row} holds {lengths[row]} tokens and cannot take {block.shape[1]} more: the cache's capacity is "
            f"{capacity}; ask `init_cache` for a larger one"
        )
    return block


def checked_num_logits(num_logits: int | None, block: int) -> int:
    """Return how many positions of a block of `block` tokens need logits."""
    if num_logits is None:
        return block
    num_logits = operator.index(num_logits)
    if not 0 <= num_logits <= block:
        raise ValueError(f"`num_logits` must lie between 0 and the block's {block} tokens, got {num_logits}")
    return num_logits


def checked_lengths(wanted: Any, held: Ints) -> Ints:
    """Return the `wanted` row lengths as a fresh array, none longer than what the row holds."""
    lengths: Ints = on_host(wanted)
    if lengths.shape != held.shape:
        raise ValueError(f"`lengths` must have shape (B,) with B = {len(held)}, got {lengths.shape}")
    if lengths.dtype.kind not in "iu" and lengths.size:
        raise TypeError(f"`lengths` must be an integer array, got dtype {lengths.dtype}")
    wrong = (lengths < 0) | (lengths > held)
    if wrong.any():
        row = int(wrong.argmax())
        raise CacheError(f"row {row} holds {held[row]} tokens and cannot be rolled back to {lengths[row]}")
    return lengths.astype(np.int32)
