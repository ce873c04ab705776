"""The array frameworks that the core is tested with; those that are not installed are skipped."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest


class Framework(NamedTuple):
    """One way of running array code.

    Attributes
    ----------
    name : str
        Its name in test ids.
    asarray : callable
        Makes an array of it out of a NumPy array, dtype kept.
    compile : callable
        Traces a function where the framework is to be traced, and is the identity elsewhere.
    flushes_denormals : bool
        Whether arithmetic takes denormal numbers for zero.
    """

    name: str
    asarray: Callable[[np.ndarray], Any]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    flushes_denormals: bool = False


@pytest.fixture(params=["numpy", "strict", "strict-static", "torch", "jax", "jax-jit"])
def framework(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Run the test once per installed framework; "static" and "jit" allow no shape that depends on data."""
    name = request.param
    if name == "numpy":
        yield Framework(name, np.asarray)
    elif name.startswith("strict"):
        strict = pytest.importorskip("array_api_strict")
        with strict.ArrayAPIStrictFlags(data_dependent_shapes=name == "strict"):
            yield Framework(name, strict.asarray)
    elif name == "torch":
        yield Framework(name, pytest.importorskip("torch").asarray)
    else:
        jax = pytest.importorskip("jax")
        before = jax.config.read("jax_enable_x64")
        jax.config.update("jax_enable_x64", True)
        try:
            compiled = jax.jit if name == "jax-jit" else Framework._field_defaults["compile"]
            yield Framework(name, jax.numpy.asarray, compiled, flushes_denormals=True)
        finally:
            jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="session")
def enumeration() -> ModuleType:
    """Return the helper module `enumeration.py`, which test modules in importlib mode cannot import by name."""
    spec = importlib.util.spec_from_file_location("enumeration", Path(__file__).with_name("enumeration.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toys() -> ModuleType:
    """Return the helper module `toys.py`."""
    spec = importlib.util.spec_from_file_location("toys", Path(__file__).with_name("toys.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
