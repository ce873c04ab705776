"""What is refused before a session runs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import CacheError

__all__ = ["Ints", "checked_block", "checked_lengths", "checked_num_logits", "checked_rows", "checked_sizes"]

Ints = NDArray[np.int64]


def _on_host(x: Any) -> NDArray[Any]:
    detach = getattr(x, "detach", None)  # a PyTorch tensor
    if detach is not None:
        return np.asarray(detach().cpu())
    get = getattr(x, "get", None)  # a CuPy array, which refuses `asarray`
    return np.asarray(x if get is None else get())


def checked_sizes(batch_size: int, capacity: int) -> None:
    """Refuse a negative number of rows or of tokens."""
    if batch_size < 0 or capacity < 0:
        raise ValueError(f"`batch_size` and `capacity` must be non-negative, got {batch_size} and {capacity}")


def checked_block(tokens: Any, lengths: Ints, capacity: int, vocab_size: int) -> Ints:
    """Return the tokens as a contiguous array ``(B, T)`` that can be appended to rows of these `lengths`.

    Raises
    ------
    TypeError
        If the tokens are not integers.
    ValueError
        If the shape is not ``(B, T)`` or an id is outside ``[0, V)``.
    CacheError
        If a row has no room for T more tokens.
    """
    block = _on_host(tokens)
    if block.ndim != 2 or len(block) != len(lengths):
        raise ValueError(f"`tokens` must have shape (B, T) with B = {len(lengths)}, got {block.shape}")
    if block.dtype.kind not in "iu" and block.size:
        raise TypeError(f"`tokens` must be an integer array, got dtype {block.dtype}")
    if block.size and (block.min() < 0 or block.max() >= vocab_size):
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
    return np.ascontiguousarray(block, dtype=np.int64)


def checked_num_logits(num_logits: int | None, block: int) -> int:
    """Return how many positions of a block of `block` tokens need logits."""
    if num_logits is None:
        return block
    if not 0 <= num_logits <= block:
        raise ValueError(f"`num_logits` must lie between 0 and the block's {block} tokens, got {num_logits}")
    return num_logits


def checked_lengths(wanted: Any, held: Ints) -> Ints:
    """Return the `wanted` row lengths as a fresh array, none longer than what the row holds."""
    lengths = _on_host(wanted)
    if lengths.shape != held.shape:
        raise ValueError(f"`lengths` must have shape (B,) with B = {len(held)}, got {lengths.shape}")
    if lengths.dtype.kind not in "iu" and lengths.size:
        raise TypeError(f"`lengths` must be an integer array, got dtype {lengths.dtype}")
    wrong = (lengths < 0) | (lengths > held)
    if wrong.any():
        row = int(wrong.argmax())
        raise CacheError(f"row {row} holds {held[row]} tokens and cannot be rolled back to {lengths[row]}")
    return lengths.astype(np.int64)


def checked_rows(wanted: Any, batch_size: int) -> Ints:
    """Return the `wanted` rows as an integer array of valid row numbers."""
    rows = _on_host(wanted)
    if rows.ndim != 1:
        raise ValueError(f"`rows` must be one-dimensional, got shape {rows.shape}")
    if rows.dtype.kind not in "iu" and rows.size:
        raise TypeError(f"`rows` must be an integer array, got dtype {rows.dtype}")
    if rows.size and (rows.min() < 0 or rows.max() >= batch_size):
        raise ValueError(f"`rows` must lie in [0, {batch_size}), got {rows.tolist()}")
    return rows.astype(np.int64)
