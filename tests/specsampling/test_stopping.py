"""Stop rules against a search that knows no blocks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specsampling._stopping import StopRules

ids = st.integers(0, 3)


def first_end(text, prompt, start, count, rules):
    """Append the candidates one by one and look at the whole new text each time."""
    for end in range(start + 1, start + count + 1):
        new = text[prompt:end]
        if new[-1] in rules.end_tokens:
            return end - start, True
        if any(new[-len(stop) :] == list(stop) for stop in rules.stop_sequences if len(stop) <= len(new)):
            return end - start, True
    return count, False


@st.composite
def batches(draw):
    rules = StopRules(
        end_tokens=tuple(draw(st.lists(ids, max_size=2))),
        stop_sequences=tuple(draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=3))),
    )
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        prompt, committed, count = draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 5))
        text = draw(st.lists(ids, min_size=prompt + committed + count, max_size=prompt + committed + count))
        rows.append((text, prompt, prompt + committed, count))
    return rules, rows, draw(st.permutations(range(len(rows))))


@given(batches())
def test_a_block_ends_where_its_tokens_one_by_one_would(batch):  # fault #86, #87, #91, #92
    rules, rows, order = batch
    tokens = np.zeros((len(rows), max(len(text) for text, *_ in rows)), dtype=np.int32)
    for row, (text, *_) in enumerate(rows):
        tokens[row, : len(text)] = text
    asked = [rows[row] for row in order]
    prompts, starts, counts = (np.array(column) for column in list(zip(*asked, strict=True))[1:])
    commit = rules.commit(tokens, np.array(order), prompts, starts, counts)
    expected = [first_end(*row, rules) for row in asked]
    assert list(zip(commit.num_emitted.tolist(), commit.is_stopped.tolist(), strict=True)) == expected


def commit_one(rules, text, prompt, start):
    count = np.array([len(text) - start])
    commit = rules.commit(np.array([text]), np.array([0]), np.array([prompt]), np.array([start]), count)
    return int(commit.num_emitted[0]), bool(commit.is_stopped[0])


def test_sequence_completed_across_rounds_is_found():
    assert commit_one(StopRules(stop_sequences=((1, 2, 3),)), [0, 1, 2, 3, 5], prompt=1, start=3) == (1, True)


def test_sequence_that_begins_in_the_prompt_is_no_match():
    assert commit_one(StopRules(stop_sequences=((1, 2),)), [1, 2, 0], prompt=1, start=1) == (2, False)


def test_sequence_longer_than_the_text_is_no_match():
    assert commit_one(StopRules(stop_sequences=((1,) * 9,)), [1, 1, 1], prompt=1, start=1) == (2, False)


def test_what_lies_past_a_rows_candidates_does_not_end_it():
    tokens = np.array([[0, 1, 7, 7], [0, 1, 2, 3]])
    commit = StopRules(end_tokens=(7,)).commit(
        tokens, np.array([0, 1]), np.array([1, 1]), np.array([1, 1]), np.array([1, 3])
    )
    assert (commit.num_emitted.tolist(), commit.is_stopped.tolist()) == ([1, 3], [False, False])


def test_earliest_stop_in_the_text_wins_whatever_the_order_of_the_list():  # fault #92
    for stops in (((7,), (5, 6)), ((5, 6), (7,))):
        assert commit_one(StopRules(stop_sequences=stops), [0, 4, 5, 6, 7], prompt=1, start=1) == (3, True)


def test_sequence_in_the_first_tokens_of_a_long_block_is_found():  # fault #91
    assert commit_one(StopRules(stop_sequences=((8, 9),)), [0, 8, 9, 1, 1, 1, 1, 1, 1], prompt=1, start=1) == (2, True)
