"""Adapters to run the suite against, and a suite small enough to see through."""

import pytest

import specsampling
from specsampling_conformance import Measured, _catalogue, _runner, _suite
from specsampling_conformance._checks import Check, CheckFailure


@pytest.fixture(scope="session")
def numpy_load():
    """Load the reference backend."""

    def load(checkpoint, dtype):
        return specsampling.load_model("numpy", checkpoint, dtype=dtype)

    return load


class Wrapped:
    """A sound model; subclasses break it."""

    def __init__(self, model):
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_rollback = None

    def init_cache(self, batch_size, capacity):
        return self.model.init_cache(batch_size, capacity)

    def score(self, cache, tokens, /, *, num_logits=None):
        return self.model.score(cache, tokens, num_logits=num_logits)

    def rollback(self, cache, lengths, /):
        return self.model.rollback(cache, lengths)


@pytest.fixture(scope="session")
def wrapped():
    """Return a base class for models that go wrong on purpose."""
    return Wrapped


class Suite:
    """A suite of checks that do as they are told, in place of the real ones."""

    def __init__(self, monkeypatch):
        self.checks = {}
        self.ran = []
        monkeypatch.setattr(_catalogue, "CHECKS", self.checks)
        self.manifest = None
        monkeypatch.setattr(_catalogue, "shipped_manifest", self._manifest)
        # A checkpoint takes longer to write than these checks to run.
        for module in (_runner, _suite):
            monkeypatch.setattr(module, "write_tiny_checkpoint", lambda directory, **sizes: directory)

    def _manifest(self):
        return self.manifest or _catalogue.build_manifest(_catalogue.all_checks())

    def add(self, check_id, outcome=None, requires=()):
        """Add a check: `outcome` is raised if it is an exception, called if it can be, else returned."""

        def run(subject):
            self.ran.append((check_id, subject))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome(subject) if callable(outcome) else outcome

        self.checks[check_id] = Check(id=check_id, clause=f"Clause {check_id}.", requires=requires, run=run)


@pytest.fixture
def suite(monkeypatch):
    """Return an empty suite, in place of the real one."""
    return Suite(monkeypatch)


def fails_in(*dtypes):
    """Return a check that fails in these dtypes."""

    def run(subject):
        if subject.dtype in dtypes:
            raise CheckFailure("wrong", expected="right", calls=["score [[1]]"])
        return Measured()

    return run


@pytest.fixture(scope="session")
def failing_in():
    """Return what makes checks that fail in some dtypes."""
    return fails_in
