"""T0: does the cache do what it says? Importing this module registers every clause."""

from specsampling_conformance import _contract_cache, _contract_score  # noqa: F401 - registers the checks
from specsampling_conformance._checks import CHECKS, Check

__all__ = ["contract_checks"]


def contract_checks() -> list[Check]:
    """Return the checks of T0, in the order of the contract."""
    return [entry for entry in CHECKS.values() if entry.tier == "T0"]
