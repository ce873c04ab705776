"""Faults planted on purpose, which the suite must kill, and controls, which it must not."""

from specsampling_conformance._faults import _adapter, _cache  # noqa: F401 - importing registers the faults
from specsampling_conformance._faults._reference import ReferenceModel
from specsampling_conformance._faults._registry import FAULTS, REFERENCE_CAPABILITIES, Fault

__all__ = ["FAULTS", "REFERENCE_CAPABILITIES", "Fault", "ReferenceModel"]
