"""What the suite proves in general, once more by example: the stories behind the code's comments."""

from pathlib import Path

import numpy as np
import pytest

import specsampling
from specsampling import CacheError, CapabilityError, PromptLookup, Sampling
from specsampling_recurrent import load

DEMO = Path(__file__).parents[1] / "demo"


@pytest.fixture
def model():
    return load(DEMO, dtype="float64")


def last_logits(model, text):
    """Return the logits after a text, from an empty cache."""
    return model.score(model.init_cache(1, len(text)), np.array([text]), num_logits=1)[0][0, -1]


def test_two_rollbacks_in_a_row_restore_the_right_states(model):
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    _, cache = model.score(model.init_cache(2, 20), np.array([text, text[::-1]]))
    cache = model.rollback(cache, np.array([9, 10]))  # by 2 and by 1
    cache = model.rollback(cache, np.array([6, 8]))  # and by 3 and by 2 more
    logits, _ = model.score(cache, np.array([[7], [8]]))
    np.testing.assert_allclose(logits[0, 0], last_logits(model, [*text[:6], 7]))
    np.testing.assert_allclose(logits[1, 0], last_logits(model, [*text[::-1][:8], 8]))


def test_text_is_the_greedy_text_though_some_rounds_propose_nothing(model):
    prompts = [[1, 2, 3, 1, 2], [7]]
    greedy = Sampling(temperature=0.0)
    plain = specsampling.generate(model, None, prompts, max_new_tokens=50, sampling=greedy)
    fast = specsampling.generate(model, PromptLookup(), prompts, max_new_tokens=50, sampling=greedy)
    assert fast.tokens == plain.tokens
    assert fast.stats.accepted < fast.stats.proposed  # something was taken back


def test_a_lookahead_beyond_the_snapshots_is_refused_before_the_first_round():
    model = load(DEMO, max_rollback=3)
    specsampling.generate(model, PromptLookup(), [1, 2, 1], max_new_tokens=4, lookahead=2)
    with pytest.raises(CapabilityError, match="max_rollback"):
        specsampling.generate(model, PromptLookup(), [1, 2, 1], max_new_tokens=4, lookahead=3)


def test_a_length_is_no_index_and_a_dtype_no_hint(model):
    _, cache = model.score(model.init_cache(1, 8), np.array([[1, 2]]))
    with pytest.raises(CacheError, match=r"from 0 to 2, got -1 \(row 0\)"):
        model.rollback(cache, np.array([-1]))
    with pytest.raises(CapabilityError, match="float16"):
        load(DEMO, dtype="float16")


def test_a_checkpoint_of_another_kind_is_refused():
    with pytest.raises(CapabilityError, match="model_type"):
        load(specsampling.bundled("draft"))
