"""Planted faults: what the suite must kill, and in which tier; and the controls it must let live."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from specsampling import Capabilities, SpecSamplingError

__all__ = ["CRASHES", "FAULTS", "Fault", "KINDS", "REFERENCE_CAPABILITIES", "cache_fault", "plant"]

REFERENCE_CAPABILITIES = Capabilities(dtypes=("float32", "float64"), select=True)
"""What the reference model can do."""

CRASHES = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    SpecSamplingError,
    TypeError,
    ValueError,
)
"""What a planted fault may come to, where it has no law at all; nothing else is taken for one."""

KINDS = ("cache", "engine", "drafter", "randomness", "control")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planted fault, or a control.

    Attributes
    ----------
    name : str
        A few words, as the fault matrix and a diagnosis show it.
    description : str
        What is wrong, in one sentence.
    tier : str
        The tier that must kill it; for a control, the tier it must pass.
    kind : str
        ``cache``, ``engine``, ``drafter``, ``randomness`` or ``control``.
    planted : Any
        By kind: for a cache fault a loader ``(checkpoint, dtype) -> Model``.
    capabilities : Capabilities
        What the faulty adapter declares.
    """

    name: str
    description: str
    tier: str
    kind: str
    planted: Any
    capabilities: Capabilities = REFERENCE_CAPABILITIES


FAULTS: dict[str, Fault] = {}
"""Every planted fault and control by name."""

PlantedT = TypeVar("PlantedT")


def plant(fault: Fault) -> None:
    """Add a fault to the list."""
    if fault.name in FAULTS or fault.kind not in KINDS:
        raise ValueError(
            f"`fault` must have a new name and one of the kinds {KINDS}, got {fault.name!r}, {fault.kind!r}"
        )
    FAULTS[fault.name] = fault


def cache_fault(
    name: str, description: str, capabilities: Capabilities | None = None
) -> Callable[[type[PlantedT]], type[PlantedT]]:
    """Register a subclass of the reference model as a cache fault that T0 must kill."""

    def register(model: type[PlantedT]) -> type[PlantedT]:
        options = {} if capabilities is None else {"capabilities": capabilities}
        plant(Fault(name=name, description=description, tier="T0", kind="cache", planted=model, **options))
        return model

    return register
