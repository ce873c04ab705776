"""Import the adapters where their frameworks are not installed, with the signatures they have where they are.

Building the site shall need no framework. So while an adapter is imported, everything in one is a class made on the
spot: it has a name that annotations show, takes part in ``Mesh | None`` (which the stand-ins of autodoc do not), and
as a decorator returns what it is given. Frameworks that are installed are stood in for as well, so that every build is
alike; tests/docs/test_signatures.py compares with the real ones.

``python docs/_ext/stand_ins.py`` prints the signature of every public name, as JSON.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FRAMEWORKS = ("jax", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "transformers")

with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as _file:
    PACKAGES = tuple(
        Path(path).name for path in tomllib.load(_file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
# Those that import no framework are imported as they are.
_ADAPTERS = tuple(set(PACKAGES) - {"specsampling", "specsampling_numpy", "specsampling_conformance"})


class _Kind(type):
    """A class whose attributes are classes like it, which can be called, subclassed and subscripted."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(name, f"{cls.__module__}.{cls.__qualname__}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 (options of a decorator)
        """Return the function that is decorated, or the class itself in place of an object."""
        return args[0] if args and inspect.isroutine(args[0]) else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _make(name: str, module: str) -> _Kind:
    return _Kind(name, (), {"__module__": module, "__qualname__": name})


class _Module(ModuleType):
    """A module that has every name."""

    __version__ = "0"
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Kept, so that two looks at a name see one class.
        setattr(self, name, _make(name, self.__name__))
        return vars(self)[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 (Python asks so)
        is_framework = name.partition(".")[0] in FRAMEWORKS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_framework else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty: names come when they are asked for."""


def _take_out(packages: Sequence[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in packages}


def import_packages() -> tuple[dict[str, ModuleType], dict[str, ModuleType]]:
    """Import every package of the distribution, adapters over stand-ins, and leave no trace of those.

    Returns
    -------
    packages : dict of str to module
        Every package, by name.
    modules : dict of str to module
        The modules of adapters, which whoever looks names up by import has to put into `sys.modules`.
    """
    before, finder = _take_out((*FRAMEWORKS, *_ADAPTERS)), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        packages = {name: importlib.import_module(name) for name in PACKAGES}
    finally:
        sys.meta_path.remove(finder)
        modules = _take_out(_ADAPTERS)
        _take_out(FRAMEWORKS)
        sys.modules.update(before)
    return packages, modules


def public_names(packages: dict[str, ModuleType]) -> list[tuple[str, str]]:
    """Return pairs of package and name, leaving out what a package passes on from another of ours."""
    return [
        (package, name)
        for package, module in packages.items()
        for name in module.__all__
        if _home(getattr(module, name), package) not in set(packages) - {package}
    ]


def is_alias(symbol: Any) -> bool:
    """Return whether a name stands for something of another project, such as ``typing.Any``."""
    return _home(symbol, PACKAGES[0]) not in PACKAGES


def _home(symbol: Any, package: str) -> str:
    return getattr(symbol, "__module__", package).partition(".")[0]


def signatures(packages: dict[str, ModuleType]) -> dict[str, str]:
    """Return the signature of every public callable and public method, types by their last name."""
    found = {}
    for package, module in packages.items():
        for name in module.__all__:
            symbol = getattr(module, name)
            members = {f"{package}.{name}": symbol}
            if inspect.isclass(symbol) and symbol.__module__.startswith(package):
                members |= {
                    f"{package}.{name}.{member}": getattr(symbol, member)
                    for member in vars(symbol)
                    if not member.startswith("_")
                }
            for full_name, member in members.items():
                if callable(member):
                    found[full_name] = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", _signature(member))
    return found


def _signature(member: Any) -> str:
    try:
        return str(inspect.signature(member))
    except ValueError:  # an exception class that inherits a builtin's
        return ""


if __name__ == "__main__":
    print(json.dumps(signatures(import_packages()[0])))
