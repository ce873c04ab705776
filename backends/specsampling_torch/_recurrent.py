"""Snapshots of recurrent states, so that a model without a past to return to can be rolled back a few tokens.

A recurrent layer keeps one state that each token overwrites. Tokens are therefore fed one at a time, and after each
the state of every row goes into a ring of ``max_rollback + 1`` snapshots, at the place ``length % (max_rollback + 1)``:
a rollback takes each row's own snapshot out again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ._cache import RowStore, select_layer
from ._checks import Ints

__all__ = ["SnapshotStore", "is_recurrent", "recurrent_copy", "snapshot_bytes"]


def is_recurrent(layer: Any) -> bool:
    """Say whether one of transformers' layer caches holds a state instead of keys and values."""
    return hasattr(layer, "recurrent_states") and not isinstance(layer, CacheLayerMixin)


def recurrent_copy(layer: Any, batch_size: int) -> Any:
    """Return a fresh layer like `layer`, whose shapes are known, in the state before the first token."""
    fresh = type(layer)(number_of_states=layer.number_of_states)
    for index in range(layer.number_of_states):
        for kind in ("conv", "recurrent"):
            known = getattr(layer, f"{kind}_states")[index]
            if known is not None:
                fresh.lazy_initialization(
                    **{f"{kind}_states": known.new_zeros((batch_size, *known.shape[1:]))}, state_idx=index
                )
        # A state of zeros is what the first token meets, and rows of one batch need not meet it together.
        fresh.has_previous_state[index] = True
    return fresh


def _states_of(layers: Sequence[Any]) -> list[Any]:
    return [
        state
        for layer in layers
        if is_recurrent(layer)
        for states in (layer.conv_states, layer.recurrent_states)
        for state in states.values()
        if state is not None
    ]


def snapshot_bytes(layers: Sequence[Any], max_rollback: int) -> int:
    """Return the bytes of a row's states and of their snapshots, given layers of one row."""
    per_state: int = sum(state[:1].nbytes for state in _states_of(layers))
    return per_state * (max_rollback + 2)


class SnapshotStore(RowStore):
    """States of recurrent layers with their snapshots, beside the keys and values of other layers.

    Parameters
    ----------
    layers : sequence
        As for `RowStore`; a recurrent layer stands for a fresh one with its shapes.
    batch_size, capacity : int
        Rows, and tokens of each.
    max_rollback : int
        Snapshots kept, besides the state itself.
    """

    def __init__(self, layers: Sequence[Any], batch_size: int, capacity: int, max_rollback: int) -> None:
        fresh = [recurrent_copy(layer, batch_size) if is_recurrent(layer) else layer for layer in layers]
        super().__init__(fresh, batch_size, capacity)
        self._slots = max_rollback + 1
        self._rings = [state.new_zeros((self._slots, *state.shape)) for state in self._states()]
        self._is_rolled_back = False

    def _states(self) -> list[Any]:
        return _states_of(self.layers)

    def roll_back(self) -> None:
        """Take note that the states are to be taken from the snapshots."""
        self._is_rolled_back = True

    def restore(self, lengths: Ints) -> None:
        """Bring every row's states to where they were at ``lengths[b]`` tokens, if any row was rolled back."""
        if self._is_rolled_back:
            for ring, state in zip(self._rings, self._states(), strict=True):
                state.copy_(ring[self._index(lengths, ring)])
            self._is_rolled_back = False

    def record(self, lengths: Ints) -> None:
        """Take a snapshot of every row at ``lengths[b]`` tokens."""
        for ring, state in zip(self._rings, self._states(), strict=True):
            ring[self._index(lengths, ring)] = state

    def _index(self, lengths: Ints, ring: Any) -> tuple[Any, Any]:
        slots = torch.as_tensor(lengths % self._slots, device=ring.device)
        return slots, torch.arange(len(slots), device=ring.device)

    def select(self, rows: Any) -> "SnapshotStore":
        """Return a store of some rows, with memory of its own."""
        chosen = SnapshotStore.__new__(SnapshotStore)
        RowStore.__init__(chosen, (), 0, 0)
        layers = [
            recurrent_copy(layer, len(rows)) if is_recurrent(layer) else select_layer(layer, rows, chosen.place)
            for layer in self.layers
        ]
        Cache.__init__(chosen, layers=layers)
        chosen._slots = self._slots
        chosen._rings = [ring[:, rows.to(ring.device)] for ring in self._rings]
        chosen._is_rolled_back = True  # the newest snapshot is the state itself
        return chosen
