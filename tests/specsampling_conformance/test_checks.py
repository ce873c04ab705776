"""The registry of checks, what runs them, and the record they leave."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from specsampling import Capabilities
from specsampling_conformance._checks import Check, CheckFailure, Measured, NotApplicable, Subject, check, run_check

SUBJECT = Subject(
    load=lambda path, dtype: pytest.fail("not loaded"),
    capabilities=Capabilities(dtypes=("float32", "float64")),
    checkpoint=Path(),
    dtype="float32",
    seed=7,
)


def run(function: Any) -> Any:
    ticks = itertools.count()
    entry = Check(id="T9.some.claim", clause="A sentence.", requires=(), run=function)
    return run_check(entry, SUBJECT, clock=lambda: float(next(ticks)))


def test_a_check_runs_in_every_declared_dtype():
    seen = []
    assert run(lambda subject: seen.append(subject.dtype)).status == "passed"
    assert seen == ["float32", "float64"]


def test_the_record_has_the_fields_of_the_report():
    record = run(lambda subject: Measured(exact_tv=1e-9, tolerance=1e-6, values={"delta": 0.5})).to_json()
    fields = ["id", "status", "clause", "exact_tv", "tolerance", "ln_e", "n", "certified_tv", "seed", "diagnosis"]
    assert list(record)[:10] == fields
    assert record["exact_tv"] == 1e-9
    assert record["seed"] == 7
    assert record["values"] == {"float32": {"delta": 0.5}, "float64": {"delta": 0.5}}


def test_the_record_shows_the_dtype_nearest_its_tolerance():
    def measure(subject: Subject) -> Measured:
        return (
            Measured(exact_tv=9e-7, tolerance=1e-6)
            if subject.dtype == "float32"
            else Measured(exact_tv=1e-12, tolerance=1e-11)
        )

    assert run(measure).to_json()["tolerance"] == 1e-6


def test_a_failure_names_its_dtype_and_ends_the_check():
    def fail(subject: Subject) -> None:
        raise CheckFailure("off by one", expected="none", worst=["cell 3"], calls=["score [[1]]"], setting="B=1")

    result = run(fail)
    assert result.status == "failed"
    assert result.diagnosis == "float32: B=1: score [[1]] -> off by one\nexpected: none\ncell 3"


def test_not_applicable_in_every_dtype_is_not_applicable_and_in_one_is_not():
    def never(subject: Subject) -> None:
        raise NotApplicable("no such thing")

    def sometimes(subject: Subject) -> None:
        if subject.dtype == "float32":
            raise NotApplicable("no such thing")

    assert run(never).status == "not-applicable"
    assert run(never).diagnosis == "no such thing"
    assert run(sometimes).status == "passed"


def test_an_id_is_registered_once():
    with pytest.raises(ValueError, match="must be new"):
        check("T0.rollback.to_zero", "Again.")(lambda subject: None)


def test_the_seed_of_a_check_depends_on_the_run_and_on_its_own_id_only():
    other = Subject(load=SUBJECT.load, capabilities=SUBJECT.capabilities, checkpoint=Path(), dtype="float64", seed=8)
    assert SUBJECT.check_seed("a") == SUBJECT.at("float64").check_seed("a")
    assert len({SUBJECT.check_seed("a"), SUBJECT.check_seed("b"), other.check_seed("a")}) == 3


def test_a_model_is_loaded_once_a_checkpoint_and_dtype():
    loaded = []

    def load(path: Path, dtype: str) -> Any:
        loaded.append((path, dtype))
        return object()

    subject = Subject(load=load, capabilities=Capabilities(), checkpoint=Path("a"), dtype="float32")
    assert subject.model() is subject.model()
    subject.at("float64").model()
    subject.at("float32").model(Path("b"))
    assert loaded == [(Path("a"), "float32"), (Path("a"), "float64"), (Path("b"), "float32")]
