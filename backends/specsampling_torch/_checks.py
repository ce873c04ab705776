"""What a model refuses before anything is written: every refusal of the model contract, in one place."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specsampling import CacheError, CapabilityError

__all__ = ["Ints", "checked_block", "checked_lengths", "checked_num_logits", "checked_rows", "checked_sizes", "on_host"]

Ints = NDArray[np.integer[Any]]


def on_host(integers: Any) -> Ints:
    """Return an integer array of any namespace as NumPy; waits for the device where it lives on one."""
    host: Ints = integers.cpu().numpy() if isinstance(integers, torch.Tensor) else np.asarray(integers)
    return host


def checked_sizes(batch_size: int, capacity: int) -> None:
    """Refuse a negative number of rows or of tokens."""
    if batch_size < 0 or capacity < 0:
        raise ValueError(f"`batch_size` and `capacity` must be non-negative, got {batch_size} and {capacity}")


def checked_block(block: Any, lengths: Ints, capacity: int, vocab_size: int, device: Any) -> Any:
    """Return the tokens `block` as an int64 tensor ``(B, T)`` that can be appended to rows of these `lengths`.

    Ids are looked at where that costs nothing, on the host; a wrong one on an accelerator is an error of its kernels.

    Raises
    ------
    TypeError
        If the tokens are not integers.
    ValueError
        If the shape is not ``(B, T)`` or an id is outside ``[0, V)``.
    CacheError
        If a row has no room for T more tokens.
    """
    tokens = block if isinstance(block, torch.Tensor) else torch.as_tensor(np.array(block))
    if tokens.ndim != 2 or len(tokens) != len(lengths):
        raise ValueError(f"`tokens` must have shape (B, T) with B = {len(lengths)}, got {tuple(tokens.shape)}")
    if (tokens.is_floating_point() or tokens.dtype == torch.bool) and tokens.numel():
        raise TypeError(f"`tokens` must be an integer array, got dtype {tokens.dtype}")
    if tokens.device.type == "cpu" and tokens.numel():
        ids = tokens.numpy()
        if ids.min() < 0 or ids.max() >= vocab_size:
            row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
            raise ValueError(
                f"`tokens` must lie in [0, {vocab_size}), got {ids[row, column]} in row {row}, column {column}"
            )
    if len(lengths) and lengths.max() + tokens.shape[1] > capacity:
        row = int(lengths.argmax())
        raise CacheError(
            f"row {row} holds {lengths[row]} tokens and cannot take {tokens.shape[1]} more: the cache's capacity is "
            f"{capacity}; ask `init_cache` for a larger one"
        )
    return tokens.to(device=device, dtype=torch.int64)


def checked_num_logits(num_logits: int | None, block: int) -> int:
    """Return how many positions of a block of `block` tokens need logits."""
    if num_logits is None:
        return block
    if not 0 <= num_logits <= block:
        raise ValueError(f"`num_logits` must lie between 0 and the block's {block} tokens, got {num_logits}")
    return num_logits


def checked_lengths(wanted: Any, held: Ints, floors: Ints | None, max_rollback: int | None) -> Ints:
    """Return the `wanted` row lengths as a fresh array, none longer than what the row holds or below its floor."""
    lengths = on_host(wanted)
    if lengths.shape != held.shape:
        raise ValueError(f"`lengths` must have shape (B,) with B = {len(held)}, got {lengths.shape}")
    if lengths.dtype.kind not in "iu" and lengths.size:
        raise TypeError(f"`lengths` must be an integer array, got dtype {lengths.dtype}")
    wrong = (lengths < 0) | (lengths > held)
    if wrong.any():
        row = int(wrong.argmax())
        raise CacheError(f"row {row} holds {held[row]} tokens and cannot be rolled back to {lengths[row]}")
    if floors is not None and (lengths < floors).any():
        row = int((lengths < floors).argmax())
        raise CapabilityError(
            f"row {row} cannot be rolled back to {lengths[row]} tokens, only to {floors[row]}: this model keeps "
            f"snapshots of its last {max_rollback} steps (`max_rollback`)"
        )
    return lengths.astype(np.int64)


def checked_rows(wanted: Any, batch_size: int) -> Ints:
    """Return the `wanted` rows as an integer array of valid row numbers."""
    rows = on_host(wanted)
    if rows.ndim != 1:
        raise ValueError(f"`rows` must be one-dimensional, got shape {rows.shape}")
    if rows.size == 0:
        return rows.astype(np.int64)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"`rows` must be an integer array, got dtype {rows.dtype}")
    if rows.min() < 0 or rows.max() >= batch_size:
        raise ValueError(f"`rows` must lie in [0, {batch_size}), got {rows.tolist()}")
    return rows.astype(np.int64)
