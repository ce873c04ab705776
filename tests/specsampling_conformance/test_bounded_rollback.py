"""The recurrent model of the template, and what goes wrong when its snapshots are kept carelessly."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from specsampling_conformance import check_backend

TEMPLATE = Path(__file__).parents[2] / "conformance" / "template" / "recurrent"


@pytest.fixture(scope="module")
def recurrent():
    """Import the template's module from where it stands: it is not installed here."""
    spec = importlib.util.spec_from_file_location("specsampling_recurrent", TEMPLATE / "specsampling_recurrent.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def run(recurrent):
    """Run T0's clauses about rollback on a variant of the model."""

    def checked(*methods, max_rollback=8, **attributes):
        broken = {method.__name__: method for method in methods}
        variant = type("Variant", (recurrent.RecurrentModel,), broken)

        def load(checkpoint, dtype):
            model = variant(recurrent.load(TEMPLATE / "demo", dtype=dtype).weights, max_rollback)
            for name, value in attributes.items():
                setattr(model, name, value)
            return model

        checks = ["T0.rollback.*", "T0.cache.fixed_sequences"]
        return check_backend(load, recurrent.CAPABILITIES, tier="contract", checks=checks, progress=False)

    return checked


@pytest.mark.parametrize("max_rollback", [1, 2, 5, 8])
def test_the_template_goes_back_as_far_as_it_says(run, max_rollback):  # fault #74
    report = run(max_rollback=max_rollback)
    assert report.passed, str(report)


def test_a_ring_with_one_snapshot_too_few_is_found_out(run):
    assert "T0.rollback.every_depth" in run(ring_size=8).failures


def test_a_second_rollback_from_a_shifted_snapshot_is_found_out(run):  # fault #77
    shifts = {}

    def rollback(self, cache, lengths, /):
        kept = np.array(lengths)
        shift = shifts.pop(id(cache.snapshots), 0 * kept)
        rows = np.arange(len(kept))
        snapshots = cache.snapshots.copy()
        snapshots[rows, kept % self.ring_size] = cache.snapshots[rows, (kept + shift) % self.ring_size]
        shifts[id(snapshots)] = cache.lengths - kept
        return cache._replace(snapshots=snapshots, lengths=kept)

    assert "T0.rollback.twice" in run(rollback).failures


def test_a_rollback_beyond_the_snapshots_is_never_silent(run, recurrent):  # fault #76
    def rollback(self, cache, lengths, /):
        return cache._replace(lengths=np.array(lengths))

    assert "T0.rollback.beyond_limit" in run(rollback).failures


def test_snapshots_that_were_overwritten_do_not_come_back_with_a_rollback(run, recurrent):  # fault #77
    def rollback(self, cache, lengths, /):
        new = recurrent.RecurrentModel.rollback(self, cache, lengths)
        return new._replace(oldest=np.maximum(new.lengths - self.max_rollback, 0))

    assert run(rollback).failures == ["T0.rollback.beyond_limit"]


def test_snapshots_that_were_overwritten_do_not_come_back_with_a_selection(run, recurrent):
    def select(self, cache, rows, /):
        new = recurrent.RecurrentModel.select(self, cache, rows)
        return new._replace(oldest=0 * new.lengths)

    assert run(select).failures == ["T0.rollback.beyond_limit"]
