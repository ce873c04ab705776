"""JSON files of other people: read, and refused by name where they are not what they should be."""

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["as_list", "as_object", "positive", "read_object"]


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return as_object(content, f"the content of {path}")


def as_object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} must be a JSON object, got {type(value).__name__}")


def as_list(value: Any, what: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{what} must be a list, got {value!r}")


def positive(value: Any, what: str) -> float:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{what} must be a positive finite number, got {value!r}")
    return float(value)
