"""The error tree: every failure the library reports on purpose.

::

    SpecSamplingError
    ├── BackendError                    a backend could not be had
    │   ├── BackendNotInstalledError    (ImportError) known, but a package it needs is missing
    │   └── UnknownBackendError         (LookupError) nothing is registered under that name
    ├── CapabilityError                 (NotImplementedError) the model or adapter cannot do what was asked
    ├── CacheError                      (ValueError) a cache was asked for more than it holds
    └── NonFiniteLogitsError            (ValueError) a model returned NaN, +inf, or a row of nothing but -inf

Each class also inherits the builtin exception a caller would catch without knowing this library. Wrong arguments
raise plain ``ValueError`` and ``TypeError``.
"""

__all__ = [
    "BackendError",
    "BackendNotInstalledError",
    "CacheError",
    "CapabilityError",
    "NonFiniteLogitsError",
    "SpecSamplingError",
    "UnknownBackendError",
]


class SpecSamplingError(Exception):
    """Base class of every error that this library raises on purpose, wrong arguments apart."""


class BackendError(SpecSamplingError):
    """A backend could not be had."""


class BackendNotInstalledError(BackendError, ImportError):
    """A known backend cannot be imported; the message names the package and how to install it."""


class UnknownBackendError(BackendError, LookupError):
    """No backend is registered under the name asked for; the message lists those that are."""


class CapabilityError(SpecSamplingError, NotImplementedError):
    """The model or adapter cannot do what was asked; raised before the first round, never half-way."""


class CacheError(SpecSamplingError, ValueError):
    """A cache was asked to hold more than its capacity, or to keep more tokens than it holds."""


class NonFiniteLogitsError(SpecSamplingError, ValueError):
    """A model returned a row of logits with no law: NaN, +inf, or nothing but -inf.

    Attributes
    ----------
    row : int
        Row of the batch, counted as the caller gave the prompts.
    position : int
        Position in that row's text (prompt included) of the token whose law is missing.
    model : str
        ``"target"`` or ``"draft"``.
    """

    def __init__(self, message: str, *, row: int = -1, position: int = -1, model: str = "target") -> None:
        super().__init__(message)
        self.row = row
        self.position = position
        self.model = model
