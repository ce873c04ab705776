"""T2: real streams pass, broken ones are rejected and named. False alarms: at most 2e-8 a check."""

import time
from pathlib import Path

import numpy as np
import pytest

from specsampling import Capabilities, load_model
from specsampling_conformance import _sampled
from specsampling_conformance._cast import cast
from specsampling_conformance._checks import CHECKS, Effort, Subject, checks_for, run_check
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults import FAULTS
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._tiny import write_tiny_checkpoint


def subject_for(load=ReferenceModel, engine=None, seed=11, **options):
    return Subject(
        load=load,
        capabilities=options.pop("capabilities", Capabilities(dtypes=("float64",), select=True)),
        checkpoint=Path("unused"),
        dtype=options.pop("dtype", "float64"),
        seed=seed,
        engine=Engine() if engine is None else engine,
        effort=options.pop("effort", Effort(shrink=False)),
    )


def check(check_id, subject):
    return run_check(CHECKS[check_id], subject, clock=time.perf_counter)


@pytest.mark.statistical
def test_the_reference_backend_passes_and_is_certified():  # false alarms: 7 checks of 2e-8 each
    subject = subject_for(lambda checkpoint, dtype: load_model("numpy", checkpoint, dtype=dtype), dtype="float32")
    subject = subject.at("float32")
    for entry in checks_for(subject.capabilities, ["T2"]):
        measured = entry.run(subject)
        if entry.id.startswith("T2.sequences"):
            assert measured.n == 5 * 4096
            assert measured.certified_tv <= 0.05
            assert [n for n, _ in measured.values["plot"]["e_path"]] == [4096 * k for k in range(1, 6)]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("name", "check_id"),
    [
        ("stream restarted each round", "T2.sequences.model_draft"),
        ("draft uniform used again to accept", "T2.sequences.model_draft"),
        ("8-bit uniforms", "T2.sequences.sharp"),
        ("half-precision uniforms", "T2.sequences.sharp"),
        ("uniforms shared by neighbours", "T2.rows.neighbours"),
        ("overlapping streams", "T2.rows.neighbours"),
        ("seed ignored", "T2.streams.seeds"),
        ("random but not repeatable", "T2.streams.seeds"),
    ],
)
def test_broken_streams_are_rejected(name, check_id):  # survives with a probability below 1e-3
    assert check(check_id, subject_for(engine=FAULTS[name].planted())).status == "failed"


@pytest.mark.statistical
def test_a_rejection_names_the_stream_that_fits():  # another name with a probability below 1e-9
    name = "stream restarted each round"
    result = check("T2.sequences.model_draft", subject_for(engine=FAULTS[name].planted(), effort=Effort()))
    assert f"data most consistent with: {name}" in result.diagnosis


def test_a_test_that_cannot_say_no_fails(monkeypatch):
    monkeypatch.setattr(_sampled.EProcess, "rejected", property(lambda self: False))
    assert check("T2.control.biased_stream", subject_for()).status == "failed"


def test_small_batches_are_sampled_less_and_say_so():
    subject = subject_for(capabilities=Capabilities(dtypes=("float64",), max_batch_size=2))
    measured = CHECKS["T2.sequences.model_draft"].run(subject)
    assert measured.n == 512
    assert measured.certified_tv > 0.05


def test_the_same_seed_draws_the_same_sample():
    runs = [_sampled.sample(subject_for(seed=seed), "model_draft").process.counts for seed in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_coarse_dtypes_are_held_against_their_own_enumerated_law():
    setting = _sampled.SAMPLED["sharp"]
    exact, coarse = subject_for(), subject_for(dtype="float16")
    coarse = Subject(
        load=lambda checkpoint, dtype: ReferenceModel(checkpoint, "float32"),
        capabilities=Capabilities(dtypes=("float16",)),
        checkpoint=Path("unused"),
        dtype="float16",
    )
    laws = [_sampled.law_of(subject, setting, cast(subject, setting.pair)) for subject in (exact, coarse)]
    np.testing.assert_allclose(laws[0], laws[1], atol=1e-5)
    # Their paths are enumerated, and grow tenfold with every token.
    assert _sampled.sample(coarse, "model_draft").process.law.shape == (3,) * 3
    assert _sampled.sample(exact, "model_draft").process.law.shape == (3,) * 4


@pytest.mark.statistical
@pytest.mark.parametrize("contrast", [0.5, 1.5, 4.0])
def test_small_probabilities_are_sampled_of_weights_of_any_size(contrast, tmp_path):  # survives: below 1e-3
    own = write_tiny_checkpoint(tmp_path, vocab_size=32, contrast=contrast)
    subject = subject_for(lambda checkpoint, dtype: ReferenceModel(own, dtype))
    setting = _sampled.setting_for(subject, "sharp")
    law = _sampled.law_of(subject, setting, cast(subject, setting.pair))
    assert 0.85 < law.max() < 0.95
    assert np.count_nonzero(law > 1e-3) >= 5
    if contrast < 4:  # where the e-value of the fault passes the threshold many times over in the first batch
        broken = subject_for(subject.load, FAULTS["stream restarted each round"].planted())
        assert check("T2.sequences.sharp", broken).status == "failed"
    assert check("T2.sequences.sharp", subject).status == "passed"
