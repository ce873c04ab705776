"""The pair of small byte-level models that ships inside the package."""

from pathlib import Path

__all__ = ["bundled"]


def bundled(name: str) -> Path:
    """Return the checkpoint directory of a bundled model, ``"target"`` or ``"draft"``."""
    if name not in ("target", "draft"):
        raise ValueError(f'`name` must be "target" or "draft", got {name!r}')
    return Path(__file__).parent / name
