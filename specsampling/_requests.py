"""Turn what callers pass into plain arrays, and refuse what makes no sense, once, before anything runs."""

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

__all__ = ["as_choices", "as_count", "as_prompts", "as_row_ids", "as_token_ids", "per_row"]


def as_count(name: str, value: Any, *, minimum: int = 0) -> int:
    """Return `value` as an int of at least `minimum`."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {count}")
    return count


def as_choices(lookahead: Any) -> tuple[int, ...]:
    """Return every K that a lookahead, an int or a callable with `choices`, may ask for."""
    if not callable(lookahead):
        return (as_count("lookahead", lookahead),)
    choices = getattr(lookahead, "choices", None)
    if not isinstance(choices, tuple) or not choices:
        raise TypeError("a callable `lookahead` must have an attribute `choices`, a tuple of every K it may return")
    return tuple(as_count("lookahead.choices", choice) for choice in choices)


def as_prompts(prompts: Any, vocab_size: int) -> list[np.ndarray]:
    """Return one integer array per prompt; a single sequence of ids is a batch of one."""
    if isinstance(prompts, str | bytes):
        raise TypeError("`prompts` must be token ids, got text; encode it with the model's tokenizer first")
    rows = list(prompts)
    if not rows:
        raise ValueError("`prompts` must not be empty")
    if any(isinstance(row, str | bytes) for row in rows):
        raise TypeError("`prompts` must be token ids, got text; encode it with the model's tokenizer first")
    if all(np.ndim(row) == 0 for row in rows):
        rows = [rows]
    return [_as_prompt(row, index, vocab_size) for index, row in enumerate(rows)]


def _as_prompt(prompt: Any, row: int, vocab_size: int) -> np.ndarray:
    ids = np.asarray(prompt)
    if ids.ndim != 1:
        raise ValueError(f"`prompts` must be sequences of token ids, got shape {ids.shape} in row {row}")
    if ids.size == 0:
        raise ValueError(f"`prompts` must have at least one token each, got none in row {row}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"`prompts` must be integers, got {ids.dtype} in row {row}")
    wrong = np.nonzero((ids < 0) | (ids >= vocab_size))[0]
    if wrong.size:
        raise ValueError(
            f"`prompts` must hold ids from 0 to {vocab_size - 1}, got {ids[wrong[0]]} in row {row}, position {wrong[0]}"
        )
    return ids.astype(np.int32)


def as_token_ids(name: str, ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Return a tuple of ids, each in the vocabulary; a single int counts as one."""
    if isinstance(ids, SupportsIndex):
        ids = (ids,)
    if isinstance(ids, str | bytes):
        raise TypeError(f"`{name}` must be token ids, got text")
    result = tuple(as_count(name, token) for token in ids)
    for token in result:
        if token >= vocab_size:
            raise ValueError(f"`{name}` must hold ids from 0 to {vocab_size - 1}, got {token}")
    return result


def as_row_ids(row_ids: Any, batch_size: int) -> np.ndarray:
    """Return one id per row, 0 … B - 1 by default; two rows with one id would share their randomness."""
    if row_ids is None:
        return np.arange(batch_size, dtype=np.int64)
    ids = np.array([as_count("row_ids", row_id) for row_id in row_ids], dtype=np.int64)
    if ids.shape != (batch_size,):
        raise ValueError(f"`row_ids` must have one id for each of the {batch_size} prompts, got {ids.size}")
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        shared = int(values[counts > 1][0])
        rows = np.nonzero(ids == shared)[0].tolist()
        raise ValueError(f"`row_ids` must differ, got {shared} in rows {rows}, which would share their randomness")
    return ids


def per_row(name: str, value: Any, batch_size: int) -> np.ndarray:
    """Return one non-negative count per row from a scalar or a sequence."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and np.ndim(value) > 0:
        counts = np.array([as_count(name, count) for count in value], dtype=np.int32)
        if counts.shape != (batch_size,):
            raise ValueError(f"`{name}` must be one number or one for each of the {batch_size} prompts, got {len(value)}")
        return counts
    return np.full(batch_size, as_count(name, value), dtype=np.int32)
