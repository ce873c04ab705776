"""Which checks there are: the registry, complete and in order, and the manifest that says what it must hold.

A suite that silently runs less than it used to is green for the wrong reason. So the list of checks is written down a
second time, in ``_manifest.json``, which ships with the suite: every id with what it requires of an adapter, and the
number of checks in each tier for each set of capabilities. A run whose checks are not those of its manifest fails.
"""

import fnmatch
import functools
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specsampling import CONTRACT_VERSION, Capabilities
from specsampling_conformance import (  # noqa: F401 - importing them registers their checks
    _contract,
    _large,
    _law,
    _law_edges,
    _sampled,
    _system,
)
from specsampling_conformance._checks import CHECKS, Check

__all__ = [
    "TIERS",
    "all_checks",
    "build_manifest",
    "declared_names",
    "manifest_faults",
    "manifest_ids",
    "selected_ids",
    "shipped_manifest",
]

TIERS = ("T0", "T1", "T2", "T3")


def all_checks() -> list[Check]:
    """Return every check, by tier, in the order of the contract."""
    return [entry for tier in TIERS for entry in CHECKS.values() if entry.tier == tier]


def declared_names(capabilities: Capabilities) -> frozenset[str]:
    """Return the names that a check's `requires` may ask for and these capabilities declare."""
    names = {name for name in ("per_row_rollback", "select", "compile_round") if getattr(capabilities, name)}
    if capabilities.max_batch_size is not None:
        names.add("max_batch_size")
    if capabilities.max_batch_size is None or capabilities.max_batch_size >= 2:
        names.add("rows")
    return frozenset(names)


def _holds(requires: Iterable[str], declared: frozenset[str]) -> bool:
    return all((name.removeprefix("!") in declared) != name.startswith("!") for name in requires)


def _capability_sets() -> Iterator[frozenset[str]]:
    batches = ({"rows"}, {"rows", "max_batch_size"}, {"max_batch_size"})
    for batch, *flags in itertools.product(batches, (False, True), (False, True), (False, True)):
        names = itertools.compress(("per_row_rollback", "select", "compile_round"), flags)
        yield frozenset(batch | set(names))


def _key(declared: frozenset[str]) -> str:
    return " ".join(sorted(declared))


def build_manifest(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the manifest of a list of checks, as ``_manifest.json`` holds it."""
    return {
        "contract_version": CONTRACT_VERSION,
        "checks": {entry.id: list(entry.requires) for entry in checks},
        "counts": {
            _key(declared): {
                tier: sum(entry.tier == tier and _holds(entry.requires, declared) for entry in checks) for tier in TIERS
            }
            for declared in _capability_sets()
        },
    }


@functools.cache
def shipped_manifest() -> Mapping[str, Any]:
    """Return the manifest that ships with the suite."""
    text = importlib.resources.files("specsampling_conformance").joinpath("_manifest.json").read_text(encoding="utf-8")
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def manifest_ids(capabilities: Capabilities) -> list[str]:
    """Return the ids that a run must have for an adapter with these capabilities, whatever its tier.

    Raises
    ------
    RuntimeError
        If the manifest does not agree with itself.
    """
    manifest = shipped_manifest()
    declared = declared_names(capabilities)
    ids = [check_id for check_id, requires in manifest["checks"].items() if _holds(requires, declared)]
    counted = sum(manifest["counts"][_key(declared)].values())
    if len(ids) != counted:
        raise RuntimeError(f"the suite's manifest lists {len(ids)} checks for {_key(declared)!r} and counts {counted}")
    return ids


def manifest_faults(ids: Sequence[str], capabilities: Capabilities) -> dict[str, str]:
    """Return what is wrong with a list of checks, by id: each must be in the manifest once, and nothing else."""
    wanted = manifest_ids(capabilities)
    stranger = "the suite has a check that its manifest does not list"
    faults = {check_id: stranger for check_id in ids if check_id not in wanted}
    for check_id in wanted:
        if ids.count(check_id) != 1:
            faults[check_id] = (
                f"the suite's manifest lists this check once, and the suite has it {ids.count(check_id)} times"
            )
    return faults


def selected_ids(ids: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the ids that match one of the patterns, all of them where there are none.

    Raises
    ------
    ValueError
        If a pattern matches nothing: a run of no checks would pass.
    """
    known = list(ids)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"`checks` must match ids of this adapter's manifest, got {pattern!r}, which matches none")
    return [one for one in known if not patterns or any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns)]
