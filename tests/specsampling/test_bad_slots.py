"""Rows of logits without a law are reported where they are read, and nowhere else."""

import numpy as np
import pytest

from specsampling import Context, CounterSource, ModelDrafter, RoundCarry, Sampling, decode_round, generate
from specsampling_numpy import TableModel


@pytest.mark.parametrize("lawless", [0, 4])
def test_what_the_target_says_after_an_id_that_it_lacks_is_not_asked(lawless):
    scores = np.zeros((5, 5))
    scores[:, lawless] = -np.inf  # never drawn, and nothing follows it
    scores[lawless] = np.nan
    only_the_sixth = np.where(np.arange(6) == 5, 0.0, -np.inf)
    models = TableModel(scores, logits=True), TableModel(np.tile(only_the_sixth, (6, 1)), logits=True)
    result = generate(*models, [1], max_new_tokens=6, lookahead=3, pad_vocab=True)
    assert result.stats.accepted == 0
    assert lawless not in result.tokens[0]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int16, np.int64])
@pytest.mark.parametrize("is_lawless", [False, True])
def test_a_text_of_any_integers_can_be_decoded(dtype, is_lawless):
    model = TableModel(np.full(2, np.nan) if is_lawless else [0.5, 0.5], logits=is_lawless)
    drafter = ModelDrafter(TableModel([0.5, 0.5]))
    carry = RoundCarry(model.init_cache(1, 9), drafter.init(1, 9), None)
    context = Context(np.zeros((1, 9), dtype), np.array([1], dtype))
    randomness = CounterSource(0).begin_round([0], [0], 2)
    output, _ = decode_round(
        *(model, drafter, carry, context, np.array([5], dtype), None, randomness), lookahead=2, sampling=Sampling()
    )
    assert output.bad_target_slot.tolist() == [0 if is_lawless else -1]
    assert output.bad_draft_slot.tolist() == [-1]
