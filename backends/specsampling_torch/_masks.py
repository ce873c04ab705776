"""Which positions a block may attend to, for every row at its own place, as additive masks.

Additive, because a boolean mask is right under ``sdpa`` and silently wrong under eager attention.
"""

from typing import Any, NamedTuple

import torch

__all__ = ["FULL", "MaskKind", "Visibility"]


class MaskKind(NamedTuple):
    """What a layer attends to.

    Attributes
    ----------
    window : int or None
        Only the last that many positions, its own included.
    chunk : int or None
        Only positions of its own chunk of that size.
    """

    window: int | None = None
    chunk: int | None = None


FULL = MaskKind()
"""Every position up to its own."""


class Visibility:
    """The masks of one block.

    Parameters
    ----------
    positions : tensor
        Integers of shape ``(B, T)``: where each token of the block stands in its row.
    span : int
        Keys that attention is given, from position 0.
    dtype : torch.dtype
        Of the masks.
    """

    def __init__(self, positions: Any, span: int, dtype: Any) -> None:
        self.dtype = dtype
        self._queries = positions[:, :, None]
        self._keys = torch.arange(span, device=positions.device)
        self._masks: dict[MaskKind, Any] = {}

    def mask(self, kind: MaskKind = FULL) -> Any:
        """Return 0 or the dtype's lowest number, ``(B, 1, T, span)``.

        What lies past a position in its row (stale, or never written) is masked with what lies ahead of it.
        """
        if kind not in self._masks:
            seen = self._keys <= self._queries
            if kind.window is not None:
                seen &= self._keys > self._queries - kind.window
            if kind.chunk is not None:
                seen &= self._keys // kind.chunk == self._queries // kind.chunk
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
            # Not -inf: kernels that subtract a row's maximum would make NaN of a row they see nothing of.
            self._masks[kind] = mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]
        return self._masks[kind]
