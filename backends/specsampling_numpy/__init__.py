"""The reference backend."""

from ._table import TableModel

__all__ = ["TableModel"]
