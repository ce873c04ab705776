"""The pictures show what the library does."""

import sys
from pathlib import Path

import numpy as np
import pytest

import specsampling

pytest.importorskip("matplotlib")
pytest.importorskip("sphinx")
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

import pictures


@pytest.fixture(scope="module")
def round_():
    return pictures.one_round()


def test_round_in_the_picture_is_the_one_that_generate_runs(round_):
    target, draft = (specsampling.load_model("numpy", specsampling.bundled(name)) for name in ("target", "draft"))
    event = next(
        specsampling.stream(
            target,
            draft,
            list(pictures.PROMPT.encode()),
            max_new_tokens=32,
            lookahead=pictures.LOOKAHEAD,
            seed=pictures.SEED,
        )
    )
    kept = [slot.token for slot in round_.slots if slot.fate == "accepted"]
    assert [*kept, round_.next_token] == event.tokens
    assert len(kept) == sum(event.from_draft)


def test_fates_follow_from_the_numbers_shown(round_):
    for slot in round_.slots:
        is_kept = slot.uniform * slot.draft_prob < slot.target_prob
        assert slot.fate == "dropped" or (slot.fate == "accepted") == is_kept
    fates = [slot.fate for slot in round_.slots]
    assert fates == sorted(fates, key=["accepted", "rejected", "dropped"].index)
    assert fates.count("rejected") == 1  # the caption and the second picture speak of it


def test_laws_in_the_picture_are_those_of_the_rejected_slot(round_):
    rejected = next(slot for slot in round_.slots if slot.fate == "rejected")
    assert round_.draft_law[rejected.token] == pytest.approx(rejected.draft_prob)
    assert round_.target_law[rejected.token] == pytest.approx(rejected.target_prob, rel=1e-4)  # a block, and one token
    np.testing.assert_allclose([round_.draft_law.sum(), round_.target_law.sum()], 1, rtol=1e-5)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_each_picture_is_drawn_for_both_themes_and_the_same_twice(name, tmp_path):
    first = {theme: file.read_text() for theme, file in pictures.write_picture(name, tmp_path).items()}
    again = {theme: file.read_text() for theme, file in pictures.write_picture(name, tmp_path).items()}
    assert first == again
    assert first["light"] != first["dark"]
