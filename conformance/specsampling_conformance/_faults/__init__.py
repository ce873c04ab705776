"""Faults planted on purpose, which the suite must kill, and controls, which it must not."""

from specsampling_conformance._faults import (  # noqa: F401 - importing registers the faults
    _adapter,
    _cache,
    _drafter,
    _engine,
    _large,
    _randomness,
    _stopping,
    _verification,
)
from specsampling_conformance._faults._registry import CRASHES, FAULTS, REFERENCE_CAPABILITIES, Fault

__all__ = ["CRASHES", "FAULTS", "Fault", "REFERENCE_CAPABILITIES"]
