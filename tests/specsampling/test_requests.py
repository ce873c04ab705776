"""What callers may pass, and the one clear error for each thing they may not."""

import numpy as np
import pytest

from specsampling._requests import (
    as_choices,
    as_count,
    as_counts,
    as_flag,
    as_model,
    as_prompts,
    as_row_ids,
    as_stop_sequences,
    as_token_ids,
)


class Choosy:
    def __init__(self, choices):
        self.choices = choices

    def __call__(self, state):
        return 1


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2], [3]], ((1, 2), (3,)), [np.array([1, 2]), np.array([3], dtype=np.uint8)], iter([[1, 2], [3]])],
    ids=["lists", "tuples", "arrays", "iterator"],
)
def test_prompts_come_in_any_container(prompts):
    rows = as_prompts(prompts, 4)
    assert [row.tolist() for row in rows] == [[1, 2], [3]]
    assert all(row.dtype == np.int32 for row in rows)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3), [np.int64(1), np.int8(2)]])
def test_one_sequence_is_a_batch_of_one(prompt):  # fault #124
    assert [row.tolist() for row in as_prompts(prompt, 4)] == [[1, 2]]


def test_a_matrix_is_a_row_per_prompt():
    assert [row.tolist() for row in as_prompts(np.array([[1, 2], [3, 0]]), 4)] == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("text", TypeError, "`prompts` must be token ids, got text"),
        (b"text", TypeError, "`prompts` must be token ids, got bytes; a model whose ids are bytes"),
        (["text"], TypeError, "`prompts` must be token ids, got text"),
        ([[1], "text"], TypeError, "`prompts` must be token ids, got text"),
        (3, TypeError, "`prompts` must be a sequence, got 3"),
        (None, TypeError, "`prompts` must be a sequence, got None"),
        (np.array(3), TypeError, "`prompts` must be a sequence, got array"),
        ([], ValueError, "`prompts` must not be empty"),
        (np.zeros((0, 3), int), ValueError, "`prompts` must not be empty"),
        ([[]], ValueError, "`prompts` must have at least one token each, got none in row 0"),
        ([[1], []], ValueError, "got none in row 1"),
        (np.zeros((2, 0), int), ValueError, "got none in row 0"),
        ([[1], 2], TypeError, "`prompts` must be a sequence, got 2"),
        (np.zeros((1, 1, 1), int), ValueError, r"got shape \(1, 1\) in row 0"),
        ([1.0, 2.0], TypeError, "`prompts` must be integers, got float64 in row 0"),
        ([[1], [2.0]], TypeError, "`prompts` must be integers, got float64 in row 1"),
        ([True, False], TypeError, "`prompts` must be integers, got bool in row 0"),
        ([[1, True]], TypeError, "`prompts` must be integers, got bool in row 0"),
        (np.array([True]), TypeError, "`prompts` must be integers, got bool in row 0"),
        ([[None]], TypeError, "`prompts` must be integers, got object in row 0"),
        ([[2**70]], TypeError, "`prompts` must be integers, got object in row 0"),
        ([[0], [1, 4]], ValueError, "must hold ids from 0 to 3, got 4 in row 1, position 1"),
        ([[0, -1]], ValueError, "must hold ids from 0 to 3, got -1 in row 0, position 1"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(prompts, error, message):
    with pytest.raises(error, match=message):
        as_prompts(prompts, 4)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, "`n` must be an integer, got True"),
        (np.True_, TypeError, "`n` must be an integer"),
        (2.0, TypeError, "`n` must be an integer, got 2.0"),
        ("2", TypeError, "`n` must be an integer, got '2'"),
        (None, TypeError, "`n` must be an integer, got None"),
        (np.array([1, 2]), TypeError, "`n` must be an integer"),
        (0, ValueError, "`n` must be at least 1, got 0"),
        (2**31, ValueError, "`n` must be at most 2147483647, got 2147483648"),
    ],
)
def test_counts_are_integers_in_range(value, error, message):
    with pytest.raises(error, match=message):
        as_count("n", value, minimum=1)


def test_counts_of_any_integer_type_are_ints():
    assert type(as_count("n", np.int64(3))) is int


def test_one_count_holds_for_every_row():
    assert as_counts("n", 3, 2).tolist() == as_counts("n", np.array(3), 2).tolist() == [3, 3]
    assert as_counts("n", [3, 0], 2).tolist() == as_counts("n", np.array([3, 0]), 2).tolist() == [3, 0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([3], ValueError, "`n` must be one number or one for each of the 2 prompts, got 1"),
        (np.ones((2, 2), int), TypeError, "`n` must be an integer"),
        ("33", TypeError, "`n` must be an integer, got '33'"),
        ([3, -1], ValueError, "`n` must be at least 0, got -1"),
        ([3, 1.5], TypeError, "`n` must be an integer, got 1.5"),
        (-1, ValueError, "`n` must be at least 0, got -1"),
    ],
)
def test_counts_per_row_are_checked_one_by_one(value, error, message):
    with pytest.raises(error, match=message):
        as_counts("n", value, 2)


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_are_bools(value):
    with pytest.raises(TypeError, match="`flag` must be True or False"):
        as_flag("flag", value)
    assert as_flag("flag", np.True_) is True


def test_lookahead_is_a_number_or_a_rule_with_choices():
    assert as_choices(3) == (3,)
    assert as_choices(Choosy((0, 2))) == (0, 2)


@pytest.mark.parametrize(
    ("lookahead", "error", "message"),
    [
        (-1, ValueError, "`lookahead` must be at least 0, got -1"),
        (2.0, TypeError, "`lookahead` must be an integer, got 2.0"),
        (True, TypeError, "`lookahead` must be an integer, got True"),
        (None, TypeError, "`lookahead` must be an integer, got None"),
        (lambda state: 1, TypeError, "must have an attribute `choices`"),
        (Choosy(()), TypeError, "must have an attribute `choices`"),
        (Choosy([1]), TypeError, "must have an attribute `choices`"),
        (Choosy((1, -2)), ValueError, "`lookahead.choices` must be at least 0, got -2"),
    ],
)
def test_other_lookaheads_are_refused(lookahead, error, message):
    with pytest.raises(error, match=message):
        as_choices(lookahead)


def test_model_that_lacks_members_is_refused_by_their_names():
    class Half:
        vocab_size = 3

        def score(self):
            pass

    with pytest.raises(TypeError, match=r"`target` must be a Model, .* has no max_rollback, init_cache, rollback"):
        as_model("target", Half())


def test_ids_come_in_any_container():
    assert as_token_ids("end_tokens", np.array([1, 2]), 3) == as_token_ids("end_tokens", {1, 2}, 3) == (1, 2)
    assert as_stop_sequences([np.array([1, 2]), (0,)], 3) == ((1, 2), (0,))
    assert as_stop_sequences((), 3) == ()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (1, TypeError, "`end_tokens` must be a sequence, got 1"),
        (None, TypeError, "`end_tokens` must be a sequence, got None"),
        ("ab", TypeError, "`end_tokens` must be token ids, got text"),
        ([1.0], TypeError, "`end_tokens` must be an integer, got 1.0"),
        ([True], TypeError, "`end_tokens` must be an integer, got True"),
        ([3], ValueError, "`end_tokens` must be at most 2, got 3"),
        ([-1], ValueError, "`end_tokens` must be at least 0, got -1"),
    ],
)
def test_other_ids_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        as_token_ids("end_tokens", ids, 3)


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        ([1, 2], TypeError, "`stop_sequences` must be a sequence, got 1"),
        (5, TypeError, "`stop_sequences` must be a sequence, got 5"),
        ("ab", TypeError, "`stop_sequences` must be token ids, got text"),
        (["ab"], TypeError, "`stop_sequences` must be token ids, got text"),
        ([[]], ValueError, "`stop_sequences` must not hold an empty sequence"),
        ([[1], [9]], ValueError, "`stop_sequences` must be at most 2, got 9"),
    ],
)
def test_other_stop_sequences_are_refused(sequences, error, message):
    with pytest.raises(error, match=message):
        as_stop_sequences(sequences, 3)


def test_row_ids_count_up_by_default():
    assert as_row_ids(None, 3).tolist() == [0, 1, 2]
    assert as_row_ids((7, 2**32 - 1), 2).tolist() == [7, 2**32 - 1]


@pytest.mark.parametrize(
    ("row_ids", "error", "message"),
    [
        ([1], ValueError, "one id for each of the 2 prompts, got 1"),
        ([4, 4], ValueError, r"`row_ids` must differ, got 4 in rows \[0, 1\]"),
        ([0, -1], ValueError, "`row_ids` must be at least 0, got -1"),
        ([0, 2**32], ValueError, "`row_ids` must be at most 4294967295, got 4294967296"),
        ([0, 1.0], TypeError, "`row_ids` must be an integer, got 1.0"),
        (3, TypeError, "`row_ids` must be a sequence, got 3"),
        ("01", TypeError, "`row_ids` must be a sequence of integers, got '01'"),
    ],
)
def test_other_row_ids_are_refused(row_ids, error, message):
    with pytest.raises(error, match=message):
        as_row_ids(row_ids, 2)
