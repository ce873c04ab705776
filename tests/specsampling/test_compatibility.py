import numpy as np
import pytest

from specsampling import ModelDrafter, PromptLookup, check_compatibility
from specsampling_numpy import TableModel


def flat(vocab_size: int, max_rollback: int | None = None) -> TableModel:
    model = TableModel(np.full(vocab_size, 1 / vocab_size))
    model.max_rollback = max_rollback
    return model


@pytest.mark.parametrize("drafter", [flat(12), ModelDrafter(flat(12)), PromptLookup(), None])
def test_a_pair_that_fits_has_no_reasons_against_it(drafter):
    assert check_compatibility(flat(12), drafter) == []


@pytest.mark.parametrize("wrap", [lambda model: model, ModelDrafter])
def test_sizes_that_differ_are_both_named_with_the_way_out(wrap):  # fault #44, #47, #156, #161
    (reason,) = check_compatibility(flat(12), wrap(flat(10)))
    assert "vocabulary sizes differ: the target has 12 ids, the draft 10" in reason
    assert "`pad_vocab=True`" in reason
    assert "tokenizer" not in reason
    assert check_compatibility(flat(12), wrap(flat(10)), pad_vocab=True) == []


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (5, True), (4, False), (1, False)])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_lookahead_past_what_a_model_can_take_back_is_named(role, limit, fits):  # fault #162
    pair = [flat(12, limit if role == name else None) for name in ("target", "draft")]
    reasons = check_compatibility(*pair, lookahead=4)
    if fits:
        assert reasons == []
    else:
        (reason,) = reasons
        assert f"`lookahead` = 4 needs the {role} to roll back 5 tokens, and its `max_rollback` is {limit}" in reason
        assert reason.endswith(f"use a lookahead of at most {limit - 1}")
        assert check_compatibility(*pair, lookahead=limit - 1) == []


def test_a_model_that_takes_nothing_back_is_offered_no_lookahead():
    (reason,) = check_compatibility(flat(12, 0), None, lookahead=0)
    assert reason.endswith("its `max_rollback` is 0; no lookahead is short enough")


def test_every_reason_is_given():  # fault #161
    assert len(check_compatibility(flat(12, 2), flat(10, 3), lookahead=3)) == 3


@pytest.mark.parametrize("drafter", ["lookup", PromptLookup])
def test_what_is_no_drafter_is_no_fit(drafter):
    with pytest.raises(TypeError, match="`drafter` must be a Drafter, a Model or None"):
        check_compatibility(flat(12), drafter)


def test_what_is_no_target_is_refused_by_name():
    with pytest.raises(TypeError, match="`target` must be a Model, got 'lookup'"):
        check_compatibility("lookup", flat(12))
