"""Feed committed tokens to a model in bounded chunks: how prompts are prefilled and a lagging draft catches up."""

from typing import Any, NamedTuple

import numpy as np

from specsampling._arrays import device, marker, move, namespace, take_along_axis
from specsampling._model import Array, Model

__all__ = ["CHUNK", "Fed", "feed", "gather_block"]

CHUNK = 512
"""Most tokens a row is fed in one call; a bounded rollback (recurrent models) makes it smaller."""


class Fed(NamedTuple):
    """A fed cache, an array that tells where the model's arrays live, and the number of calls it took."""

    cache: Any
    like: Array | None
    num_calls: int


def feed(
    model: Model[Any], cache: Any, tokens: np.ndarray, start: np.ndarray, stop: np.ndarray, like: Array | None
) -> Fed:
    """Bring every row's cache from ``start[b]`` to ``stop[b]`` tokens, computing no logits.

    Rows differ in length, so blocks are padded on the right with id 0 and each row is rolled back to its own length
    after *each* chunk: a recurrent model can only go back `max_rollback` tokens, and padding must never be remembered.
    No block reaches past column C, where the cache ends: of a row that is fed nothing, because it is finished or past
    the context limit, the cache may be nearly full.

    Parameters
    ----------
    model : Model
        The model to feed.
    cache : object
        Its cache, which holds ``start[b]`` tokens of row b. Must not be used again.
    tokens, start, stop : ndarray
        Host integer arrays: the text ``(B, C)`` and how much of it is held (less than C) and wanted, ``(B,)`` each.
    like : array or None
        An array from the model's earlier answers, None before the first.

    Returns
    -------
    Fed
        The cache with ``max(start[b], stop[b])`` tokens in row b, where the arrays live, and the number of calls.
    """
    chunk = CHUNK if model.max_rollback is None else max(1, min(CHUNK, model.max_rollback))
    num_calls = 0
    stop = np.maximum(start, stop)
    while True:
        missing = stop - start
        width = min(chunk, int(missing.max()), tokens.shape[1] - int(start.max()))
        if width <= 0:
            return Fed(cache, like, num_calls)
        block = gather_block(tokens, start, stop, width)
        logits, cache = model.score(cache, move(block, like), num_logits=0)
        like = marker(logits)
        num_calls += 1
        start = np.minimum(start + width, stop)
        if int(missing.min()) < width:
            cache = model.rollback(cache, move(start.astype(np.int32), like))


def gather_block(tokens: Array, start: Array, stop: Array, width: int) -> Array:
    """Return the ``(B, width)`` block of each row's tokens ``start[b] … stop[b] - 1``, padded on the right with id 0.

    Pure array API on arrays of one namespace; `tokens` is ``(B, C)`` and all are integers.
    """
    xp = namespace(tokens)
    index = start[:, None]
    if width != 1:
        index = index + xp.arange(width, dtype=start.dtype, device=device(start))
    held = take_along_axis(tokens, xp.minimum(index, tokens.shape[1] - 1), 1)
    return xp.where(index < stop[:, None], held, 0)
