"""A recurrent backend for specsampling: a minimal gated unit in NumPy that goes back by snapshots.

A recurrent model folds its text into a state of fixed size, and a state cannot be unfolded: to take tokens back, the
state from before them must have been kept. So each row keeps its last few states in a ring, and says through
`max_rollback` how far that reaches. Speculative sampling needs no more: with K drafted tokens a round takes back at
most K + 1, and the library refuses a lookahead for which the ring is too short.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

from specsampling import Array, CacheError, Capabilities, CapabilityError

CAPABILITIES = Capabilities(dtypes=("float32", "float64"), select=True)
"""What the suite holds this adapter to; `per_row_rollback` is on by default."""


class SnapshotCache(NamedTuple):
    """The states of every row, as many as a rollback can need.

    Attributes
    ----------
    snapshots : array
        Floats ``(B, max_rollback + 1, H)``, a ring: the state after n tokens is at place ``n % (max_rollback + 1)``.
    lengths : array
        Integers ``(B,)``: how many tokens each row holds.
    oldest : array
        Integers ``(B,)``: the shortest length whose snapshot has not been overwritten.
    capacity : int
        How many tokens a row may hold. States take no more room for longer texts, but the contract's limit is a limit.
    """

    snapshots: np.ndarray
    lengths: np.ndarray
    oldest: np.ndarray
    capacity: int


class RecurrentModel:
    """Scores text with a minimal gated unit: a gate z decides how much of the state gives way to what is new.

    With e the embedding of a token and h the state before it::

        z = sigmoid(W e + U h)        c = tanh(W' e + U' h)        h <- (1 - z) h + z c        logits = O h

    Parameters
    ----------
    weights : dict of str to array
        ``embedding (V, H)``, ``input (H, 2 H)`` and ``state (H, 2 H)`` (gate and candidate side by side), and
        ``output (H, V)``, all of one floating dtype.
    max_rollback : int
        How many tokens a row can go back. Memory grows with it, and the largest lookahead is one less.
    """

    capabilities = CAPABILITIES

    def __init__(self, weights: dict[str, np.ndarray], max_rollback: int = 8) -> None:
        self.weights = weights
        self.vocab_size, self.hidden_size = weights["embedding"].shape
        self.max_rollback: int | None = max_rollback
        self.ring_size = max_rollback + 1  # going back by r tokens takes r states and the one that they follow

    def init_cache(self, batch_size: int, capacity: int) -> SnapshotCache:
        """Return an empty cache: in every row the zero state, which is the snapshot of length 0."""
        shape = (batch_size, self.ring_size, self.hidden_size)
        none = np.zeros(batch_size, dtype=np.int64)
        return SnapshotCache(np.zeros(shape, self.weights["embedding"].dtype), none, none, capacity)

    def score(
        self, cache: SnapshotCache, tokens: Array, /, *, num_logits: int | None = None
    ) -> tuple[np.ndarray, SnapshotCache]:
        """Append a ``(B, T)`` block to every row and return the logits of its last `num_logits` positions."""
        block = np.asarray(tokens)
        batch_size, width = block.shape
        # Refused before anything is written, so that the caller may go on with the cache it has.
        if cache.lengths.max() + width > cache.capacity:
            row = int(cache.lengths.argmax())
            raise CacheError(
                f"`tokens` must fit the capacity of {cache.capacity}, got {cache.lengths[row]} + {width} (row {row})"
            )
        rows = np.arange(batch_size)
        inputs = self.weights["embedding"][block] @ self.weights["input"]
        states = np.empty((batch_size, width + 1, self.hidden_size), inputs.dtype)
        states[:, 0] = cache.snapshots[rows, cache.lengths % self.ring_size]
        for t in range(width):
            states[:, t + 1] = self.step(states[:, t], inputs[:, t])
            # Each row writes at its own place. Writing into the cache that came in is allowed: ownership is linear,
            # and whoever passed it in must not use it again.
            cache.snapshots[rows, (cache.lengths + t + 1) % self.ring_size] = states[:, t + 1]
        wanted = width if num_logits is None else num_logits
        logits = states[:, width + 1 - wanted :] @ self.weights["output"]
        lengths = cache.lengths + width
        # A long block overwrites snapshots, its own included. `oldest` never falls again: a rollback brings no
        # overwritten snapshot back, however short the row has become.
        oldest = np.maximum(cache.oldest, lengths - (self.ring_size - 1))
        return logits, cache._replace(lengths=lengths, oldest=oldest)

    def step(self, state: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Return the state after one more token in every row."""
        from_token, from_state = np.split(inputs, 2, axis=-1), np.split(state @ self.weights["state"], 2, axis=-1)
        gate = 1 / (1 + np.exp(-(from_token[0] + from_state[0])))
        return state + gate * (np.tanh(from_token[1] + from_state[1]) - state)

    def rollback(self, cache: SnapshotCache, lengths: Array, /) -> SnapshotCache:
        """Keep the first ``lengths[b]`` tokens of each row.

        No state moves. A snapshot's place follows from the length it belongs to, so the next `score` finds the right
        one, after a second rollback as after the first. (A ring that counts from its newest entry must shift, and the
        second rollback then restores a state that is off by the depth of the first.)
        """
        kept = np.array(lengths, dtype=np.int64)  # a copy: the caller's array may change later
        outside = (kept < 0) | (kept > cache.lengths)
        if outside.any():
            row = int(outside.argmax())
            raise CacheError(f"`lengths` must be from 0 to {cache.lengths[row]}, got {kept[row]} (row {row})")
        # Never silently: a row that went on from a wrong state would look right and follow another law.
        if (kept < cache.oldest).any():
            row = int((cache.oldest - kept).argmax())
            raise CapabilityError(
                f"`lengths` must be at least {cache.oldest[row]}, because `max_rollback` is {self.max_rollback},"
                f" got {kept[row]} (row {row}): load the model with a larger `max_rollback`"
            )
        return cache._replace(lengths=kept)

    def select(self, cache: SnapshotCache, rows: Array, /) -> SnapshotCache:
        """Keep these rows, in this order. Optional: without it finished rows go on costing work."""
        index = np.asarray(rows)
        return cache._replace(
            snapshots=cache.snapshots[index], lengths=cache.lengths[index], oldest=cache.oldest[index]
        )


def load(
    checkpoint: str | Path, *, dtype: str = "float32", device: str | None = None, max_rollback: int = 8
) -> RecurrentModel:
    """Load a checkpoint: the entry point that ``specsampling.load_model("recurrent", …)`` calls.

    What cannot be honoured is refused: another device, and a checkpoint that describes another kind of model.
    """
    if dtype not in CAPABILITIES.dtypes:
        raise CapabilityError(f"`dtype` must be one of {CAPABILITIES.dtypes}, got {dtype!r}")
    if device not in (None, "cpu"):
        raise CapabilityError(f"`device` must be None or 'cpu', got {device!r}")
    if max_rollback < 1:
        raise ValueError(f"`max_rollback` must be a positive integer, got {max_rollback}")
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "minimal-gated-unit":
        raise CapabilityError(f"`model_type` must be 'minimal-gated-unit', got {config.get('model_type')!r}")
    stored = load_file(Path(checkpoint) / "model.safetensors")
    return RecurrentModel({name: weight.astype(dtype) for name, weight in stored.items()}, max_rollback)
