"""Memory for keys and values that a block is written into: it grows with the text, and gives up finished rows.

On the CPU that happens within the memory there is. New memory would cost several times what the copies do: the system
hands it out page by page.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime

from ._checks import Ints
from ._device import Device
from ._layouts import CacheTensor

__all__ = ["Buffers", "DeviceBuffers", "HostBuffers", "new_buffers"]

_RESERVE = 4
"""How many times what is needed is asked of the system, which hands out only what is written to."""


class Buffers(Protocol):
    """Keys and values of all layers, of as many columns each.

    Attributes
    ----------
    values : list of OrtValue
        Of shape ``(B, heads, columns, size)``.
    """

    values: list[Any]

    def grow(self, held: int, columns: int) -> None:
        """Give every row `columns` columns, of which the first `held` are kept. What is behind them is finite."""
        ...

    def select(self, rows: Ints) -> "Buffers":
        """Return the chosen rows. These buffers must not be used again."""
        ...


def new_buffers(device: Device, caches: Sequence[CacheTensor], batch_size: int, capacity: int) -> Buffers:
    """Return empty buffers, of which no more than `capacity` columns are asked."""
    if device.kind == "cpu":
        return HostBuffers(caches, batch_size, capacity)
    return DeviceBuffers(device, caches, batch_size)


class HostBuffers:
    """Buffers in the host's memory: see `Buffers`.

    Attributes
    ----------
    values : list of OrtValue
        Views of the memory's first part.
    """

    def __init__(self, caches: Sequence[CacheTensor], batch_size: int, capacity: int) -> None:
        self._caches, self._batch_size, self._capacity = caches, batch_size, capacity
        self._columns = self._reserved = 0
        self._memory = [np.zeros(0, cache.dtype) for cache in caches]
        self._make_values()

    def _arrays(self) -> list[np.ndarray]:
        arrays = []
        for cache, memory in zip(self._caches, self._memory, strict=True):
            shape = (self._batch_size, cache.heads, self._columns, cache.size)
            arrays.append(memory[: np.prod(shape, dtype=int)].reshape(shape))
        return arrays

    def _make_values(self) -> None:
        self.values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in self._arrays()]

    def grow(self, held: int, columns: int) -> None:
        """Move every row's tokens to where they belong; see `Buffers`."""
        is_new, reserved = columns > self._reserved, self._reserved
        if is_new:
            reserved = max(columns, min(self._capacity, _RESERVE * columns))
        self.values = []  # they would keep memory that is given up below
        for index, cache in enumerate(self._caches):
            parts, old = self._batch_size * cache.heads, self._memory[index]
            new = np.zeros(parts * reserved * cache.size, cache.dtype) if is_new else old
            held_length, old_stride, new_stride = (n * cache.size for n in (held, self._columns, columns))
            for part in reversed(range(parts)):  # from the last on, so that nothing is overwritten that has yet to move
                start = part * new_stride
                new[start : start + held_length] = old[part * old_stride : part * old_stride + held_length]
                if not is_new:
                    new[start + held_length : start + new_stride] = 0  # another row's numbers need not be finite
            self._memory[index] = new  # one by one, so that but one is held twice
        self._columns, self._reserved = columns, reserved
        self._make_values()

    def select(self, rows: Ints) -> "HostBuffers":
        """Return the chosen rows, moved together where they are in order; see `Buffers`."""
        chosen = HostBuffers(self._caches, len(rows), self._capacity)
        chosen._columns = self._columns
        if (np.diff(rows) > 0).all():
            # All the memory goes over to fewer rows, which can grow further in it.
            chosen._memory, chosen._reserved = self._memory, self._reserved * self._batch_size // max(len(rows), 1)
            for array in self._arrays():
                for place, row in enumerate(rows.tolist()):
                    if place != row:
                        array[place] = array[row]
        else:
            chosen._reserved = self._columns
            chosen._memory = [array[rows].ravel() for array in self._arrays()]
        chosen._make_values()
        return chosen


class DeviceBuffers:
    """Buffers on a device, rearranged by graphs there: see `Buffers`.

    Attributes
    ----------
    values : list of OrtValue
        New ones after each change.
    """

    def __init__(self, device: Device, caches: Sequence[CacheTensor], batch_size: int) -> None:
        self._device, self._caches, self._batch_size = device, caches, batch_size
        self.values = self._zeros(0)

    def _zeros(self, columns: int) -> list[Any]:
        return [self._device.zeros((self._batch_size, c.heads, columns, c.size), c.dtype) for c in self._caches]

    def grow(self, held: int, columns: int) -> None:
        """Copy what is held; see `Buffers`."""
        if held == 0:
            self.values = self._zeros(columns)
            return
        kept = np.minimum(np.arange(columns), held - 1)
        for index, value in enumerate(self.values):
            self.values[index] = self._device.take_columns(value, kept)

    def select(self, rows: Ints) -> "DeviceBuffers":
        """Copy the chosen rows; see `Buffers`."""
        chosen = DeviceBuffers(self._device, self._caches, len(rows))
        chosen.values = [self._device.take_rows(value, rows) for value in self.values]
        return chosen
