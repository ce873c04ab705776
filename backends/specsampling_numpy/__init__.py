"""The reference backend: a Llama-family decoder and a table of laws, in plain NumPy."""

from os import PathLike
from pathlib import Path
from typing import Any

from ._llama import NumpyModel
from ._table import TableModel

__all__ = ["NumpyModel", "TableModel", "load"]


def load(
    checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None, **options: Any
) -> NumpyModel:
    if device not in (None, "cpu"):
        raise ValueError(f"`device` must be 'cpu' or None, got {device!r}: this backend computes with NumPy")
    if options:
        raise TypeError(f"unknown options {', '.join(map(repr, sorted(options)))}: the numpy backend takes none")
    return NumpyModel(Path(checkpoint), dtype=dtype)
