"""Find backends by name through the entry-point group ``specsampling.backends``.

First-party adapters register there as a third party's would. All that is special about them is the table of packages
they need, so that a missing framework is reported with the extra that brings it, and without importing anything.
"""

import importlib.util
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeAlias

from specsampling._errors import BackendError, BackendNotInstalledError, UnknownBackendError
from specsampling._model import Model

__all__ = ["BackendStatus", "available_backends", "load_model"]

_GROUP = "specsampling.backends"

# What each first-party adapter imports besides the base dependencies; the extra that installs it has its name.
_FIRST_PARTY: dict[str, tuple[str, ...]] = {
    "jax": ("jax",),
    "numpy": (),
    "onnxruntime": ("onnx", "onnxruntime"),
    "torch": ("torch", "transformers"),
}

_Loader: TypeAlias = Callable[..., Model[Any]]


class BackendStatus(NamedTuple):
    """What is known about one backend.

    Attributes
    ----------
    name : str
        The name :func:`load_model` takes.
    installed : bool
        Whether the backend can be loaded here.
    target : str
        The entry point, for example ``"specsampling_numpy:load"``.
    reason : str
        Why it is not installed and how to mend that; empty when it is.

    Examples
    --------
    >>> from specsampling import available_backends
    >>> {backend.name: backend.target for backend in available_backends()}["numpy"]
    'specsampling_numpy:load'
    """

    name: str
    installed: bool
    target: str
    reason: str


def load_model(
    name: str,
    checkpoint: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str | None = None,
    **options: Any,
) -> Model[Any]:
    """Load a checkpoint with the backend registered under `name`.

    Parameters
    ----------
    name : str
        A backend that :func:`available_backends` lists.
    checkpoint : str or path
        Whatever the backend reads: for all first-party ones a directory with ``config.json`` and safetensors weights,
        such as :func:`bundled` returns.
    dtype : str, default: "float32"
        Dtype of weights and logits, by its array-API name.
    device : str, optional
        Device in the backend's own words, for example ``"cuda:0"``; None lets the backend choose.
    **options : Any
        Passed on to the backend, which refuses those it does not know.

    Returns
    -------
    Model
        The loaded model.

    Raises
    ------
    UnknownBackendError
        If nothing is registered under `name`.
    BackendNotInstalledError
        If the backend is known but a package it needs is missing.
    BackendError
        If several distributions register `name`.

    Examples
    --------
    >>> import specsampling
    >>> model = specsampling.load_model("numpy", specsampling.bundled("draft"))
    >>> model.vocab_size
    256
    """
    entries = _entries()
    if name not in entries:
        known = ", ".join(f"`{other}`" for other in sorted(entries)) or "none"
        raise UnknownBackendError(f"`name` must be a registered backend ({known}), got {name!r}")
    load = _loader(name, entries[name])
    return load(checkpoint, dtype=dtype, device=device, **options)


def available_backends() -> tuple[BackendStatus, ...]:
    """List every registered backend, with the reason where one cannot be loaded.

    First-party adapters are judged by whether the packages they need can be found, so no framework is imported.
    Adapters of other distributions are imported, because nothing else tells what they need.

    Returns
    -------
    tuple of BackendStatus
        In the order of their names.

    Examples
    --------
    >>> import specsampling
    >>> [backend.name for backend in specsampling.available_backends() if backend.installed]  # doctest: +ELLIPSIS
    [...'numpy'...]
    """
    return tuple(_status(name, targets) for name, targets in sorted(_entries().items()))


def _entries() -> dict[str, dict[str, EntryPoint]]:
    """Return, by name, the entry points that differ in value; more than one is a clash."""
    entries: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=_GROUP):
        entries.setdefault(entry.name, {})[entry.value] = entry
    return entries


def _status(name: str, targets: dict[str, EntryPoint]) -> BackendStatus:
    shown = ", ".join(sorted(targets))
    try:
        if name in _FIRST_PARTY and len(targets) == 1:
            _check_requirements(name)
        else:
            _loader(name, targets)
    except BackendError as error:
        return BackendStatus(name, installed=False, target=shown, reason=str(error))
    return BackendStatus(name, installed=True, target=shown, reason="")


def _loader(name: str, targets: dict[str, EntryPoint]) -> _Loader:
    if len(targets) > 1:
        raise BackendError(
            f"backend `{name}` is registered more than once ({', '.join(sorted(targets))}): "
            "uninstall the distributions that are not wanted"
        )
    if name in _FIRST_PARTY:
        _check_requirements(name)
    (entry,) = targets.values()
    try:
        loader: _Loader = entry.load()
    except (ImportError, AttributeError) as error:
        raise BackendNotInstalledError(f"backend `{name}` ({entry.value}) cannot be imported: {error}") from error
    return loader


def _check_requirements(name: str) -> None:
    for package in _FIRST_PARTY[name]:
        if importlib.util.find_spec(package) is None:
            raise BackendNotInstalledError(
                f"backend `{name}` needs the package `{package}`: pip install 'specsampling[{name}]'", name=package
            )
