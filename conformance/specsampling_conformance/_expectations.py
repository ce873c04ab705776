"""What a caller declares about an adapter, checked before anything runs, and what it makes of a result."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specsampling import Capabilities
from specsampling_conformance._catalogue import all_checks, manifest_ids
from specsampling_conformance._checks import CheckResult

__all__ = ["checked_capabilities", "checked_expectations", "expected_reason", "judge"]


def checked_capabilities(capabilities: Any) -> Capabilities:
    """Return the capabilities if they are some, with at least one dtype and none twice."""
    if not isinstance(capabilities, Capabilities):
        raise TypeError(f"`capabilities` must be a specsampling.Capabilities, got {type(capabilities).__name__}")
    dtypes: Any = capabilities.dtypes
    if isinstance(dtypes, str) or not dtypes or len(set(dtypes)) != len(dtypes):
        raise ValueError(f"`capabilities.dtypes` must be a tuple of different names, at least one, got {dtypes!r}")
    return capabilities


def checked_expectations(expected: Mapping[str, Any], capabilities: Capabilities) -> dict[str, str]:
    """Return the expected failures if each names a check of this adapter's manifest, and says why.

    Raises
    ------
    ValueError
        If an id is unknown, does not apply to these capabilities, or has no reason.
    """
    ids = set(manifest_ids(capabilities))
    for key, reason in expected.items():
        check_id, dtype = _split(key)
        if check_id not in ids:
            known = {entry.id for entry in all_checks()}
            why = "does not apply to an adapter with these capabilities" if check_id in known else "is no check's id"
            raise ValueError(f"`expected_failures` must name checks of the suite, got {key!r}, which {why}")
        if dtype is not None and dtype not in capabilities.dtypes:
            raise ValueError(f"`expected_failures` must name a dtype of {capabilities.dtypes}, got {key!r}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"`expected_failures` must give a reason for {key!r}, with a link, got {reason!r}")
    return dict(expected)


def expected_reason(check_id: str, dtype: str, expected: Mapping[str, str]) -> str | None:
    """Return why a check is expected to fail in a dtype, or None where it is not: ``id[dtype]`` goes before ``id``."""
    return expected.get(f"{check_id}[{dtype}]", expected.get(check_id))


def _split(key: str) -> tuple[str, str | None]:
    check_id, bracket, dtype = key.partition("[")
    return (check_id, dtype.removesuffix("]")) if bracket else (key, None)


def judge(result: CheckResult, reason: str | None) -> CheckResult:
    """Return the result as the expectation turns it: a failure that was expected, or a success that was not."""
    if reason is None:
        return result
    if result.status == "failed":
        told = f"expected to fail: {reason}\n{result.diagnosis}"
        return dataclasses.replace(result, status="expected-failure", diagnosis=told)
    came = "it passed" if result.status == "passed" else f"it does not apply ({result.diagnosis})"
    told = f"expected to fail ({reason}), but {came}: take it out of `expected_failures`"
    return dataclasses.replace(result, status="failed", diagnosis=told)
