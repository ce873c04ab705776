"""Turn what callers pass into plain values and arrays, and refuse what makes no sense, once, before anything runs."""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = [
    "as_choices",
    "as_count",
    "as_counts",
    "as_flag",
    "as_model",
    "as_prompts",
    "as_row_ids",
    "as_stop_sequences",
    "as_token_ids",
]

_LARGEST_COUNT = 2**31 - 1  # lengths are int32 on devices
_LARGEST_ROW_ID = 2**32 - 1  # a row id is one word of the generator's counter


def as_count(name: str, value: Any, *, minimum: int = 0, maximum: int = _LARGEST_COUNT) -> int:
    """Return `value` as an int from `minimum` to `maximum`."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {count}")
    if count > maximum:
        raise ValueError(f"`{name}` must be at most {maximum}, got {count}")
    return count


def as_counts(name: str, value: Any, batch_size: int) -> np.ndarray:
    """Return one non-negative count per row from one number or a sequence of them."""
    if not _is_sequence(value) or isinstance(value, str | bytes):
        return np.full(batch_size, as_count(name, value), dtype=np.int32)
    counts = np.array([as_count(name, count) for count in value], dtype=np.int32)
    if counts.size != batch_size:
        raise ValueError(f"`{name}` must be one number or one for each of the {batch_size} prompts, got {counts.size}")
    return counts


def as_flag(name: str, value: Any) -> bool:
    """Return `value`, which must be a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")
    return bool(value)


def as_choices(lookahead: Any) -> tuple[int, ...]:
    """Return every K that a lookahead, an int or a callable with `choices`, may ask for."""
    if not callable(lookahead):
        return (as_count("lookahead", lookahead),)
    choices = getattr(lookahead, "choices", None)
    if not isinstance(choices, tuple) or not choices:
        raise TypeError("a callable `lookahead` must have an attribute `choices`, a tuple of every K it may return")
    return tuple(as_count("lookahead.choices", choice) for choice in choices)


def as_model(name: str, model: Any) -> Any:
    """Return `model`, which must have every member that the contract asks for."""
    required = ("vocab_size", "max_rollback", "init_cache", "score", "rollback")
    missing = [member for member in required if not hasattr(model, member)]
    if missing:
        raise TypeError(f"`{name}` must be a Model, got {model!r}, which has no {', '.join(missing)}")
    return model


def as_prompts(prompts: Any, vocab_size: int) -> list[np.ndarray]:
    """Return one integer array per prompt; a single sequence of ids is a batch of one."""
    rows = _as_list("prompts", prompts)
    if not rows:
        raise ValueError("`prompts` must not be empty")
    if not any(_is_sequence(row) for row in rows):
        rows = [rows]
    return [_as_prompt(row, index, vocab_size) for index, row in enumerate(rows)]


def _as_prompt(prompt: Any, row: int, vocab_size: int) -> np.ndarray:
    values = prompt if isinstance(prompt, np.ndarray) else _as_list("prompts", prompt)
    if not len(values):
        raise ValueError(f"`prompts` must have at least one token each, got none in row {row}")
    ids = np.asarray(values)
    if ids.ndim != 1:
        raise ValueError(f"`prompts` must be sequences of token ids, got shape {ids.shape} in row {row}")
    # NumPy takes True among integers for 1.
    has_bool = isinstance(values, list) and not {bool, np.bool_}.isdisjoint(map(type, values))
    if has_bool or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"`prompts` must be integers, got {'bool' if has_bool else ids.dtype} in row {row}")
    wrong = np.nonzero((ids < 0) | (ids >= vocab_size))[0]
    if wrong.size:
        raise ValueError(
            f"`prompts` must hold ids from 0 to {vocab_size - 1}, got {ids[wrong[0]]} in row {row}, position {wrong[0]}"
        )
    return ids.astype(np.int32)


def as_token_ids(name: str, ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Return a tuple of ids, each in the vocabulary."""
    return tuple(as_count(name, token, maximum=vocab_size - 1) for token in _as_list(name, ids))


def as_stop_sequences(sequences: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return a tuple of tuples of ids, none of them empty."""
    name = "stop_sequences"
    result = tuple(as_token_ids(name, sequence, vocab_size) for sequence in _as_list(name, sequences))
    if () in result:
        raise ValueError("`stop_sequences` must not hold an empty sequence")
    return result


def as_row_ids(row_ids: Any, batch_size: int) -> np.ndarray:
    """Return one id per row, 0 … B - 1 by default; two rows with one id would share their randomness."""
    if row_ids is None:
        return np.arange(batch_size, dtype=np.int64)
    if isinstance(row_ids, str | bytes):
        raise TypeError(f"`row_ids` must be a sequence of integers, got {row_ids!r}")
    keys = [as_count("row_ids", row_id, maximum=_LARGEST_ROW_ID) for row_id in _as_list("row_ids", row_ids)]
    if len(keys) != batch_size:
        raise ValueError(f"`row_ids` must have one id for each of the {batch_size} prompts, got {len(keys)}")
    ids = np.array(keys, dtype=np.int64)
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        shared = int(values[counts > 1][0])
        rows = np.nonzero(ids == shared)[0].tolist()
        raise ValueError(f"`row_ids` must differ, got {shared} in rows {rows}, which would share their randomness")
    return ids


def _as_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, bytes):
        raise TypeError(f"`{name}` must be token ids, got bytes; a model whose ids are bytes takes `list(…)` of them")
    if isinstance(values, str):
        raise TypeError(f"`{name}` must be token ids, got text; encode it with the model's tokenizer first")
    if not _is_sequence(values):
        raise TypeError(f"`{name}` must be a sequence, got {values!r}")
    return list(values)


def _is_sequence(values: Any) -> bool:
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0
