import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import CacheError
from specsampling_numpy import TableModel


def laws(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), size=shape[:-1])


def test_one_law_whatever_came_before():
    model = TableModel([0.25, 0.75, 0.0])
    logits, _ = model.score(model.init_cache(2, 4), [[0, 1], [2, 2]])
    assert logits.shape == (2, 2, 3)
    assert logits.dtype == np.float64
    np.testing.assert_array_equal(logits, np.broadcast_to([np.log(0.25), np.log(0.75), -np.inf], (2, 2, 3)))


def test_order_two_reads_the_last_two_tokens_oldest_first():
    table = laws(3, 3, 3)
    model = TableModel(table)
    logits, _ = model.score(model.init_cache(1, 4), [[2, 1, 0, 1]])
    # Before the first token stands id 0.
    expected = np.log([table[0, 2], table[2, 1], table[1, 0], table[0, 1]])
    np.testing.assert_allclose(logits[0], expected, rtol=1e-15)


def test_missing_history_counts_as_zero_whatever_the_cache_held_before():
    table = laws(3, 3, 3)
    model = TableModel(table)
    _, cache = model.score(model.init_cache(1, 4), [[2, 2, 2, 2]])
    logits, _ = model.score(model.rollback(cache, [0]), [[1]])
    np.testing.assert_allclose(logits[0, 0], np.log(table[0, 1]), rtol=1e-15)


def test_callable_sees_the_whole_prefix_of_its_own_row():  # fault #2: a law that differs at every position
    seen = set()

    def law(prefix: tuple[int, ...]) -> list[float]:
        seen.add(prefix)
        return [1.0, 0.0] if len(prefix) % 2 else [0.0, 1.0]

    model = TableModel(law, vocab_size=2)
    _, cache = model.score(model.init_cache(2, 5), [[1, 0], [0, 0]], num_logits=0)
    assert not seen
    cache = model.rollback(cache, [2, 1])
    logits, _ = model.score(cache, [[1, 0], [1, 1]])
    assert seen == {(1, 0, 1), (1, 0, 1, 0), (0, 1), (0, 1, 1)}
    assert logits.argmax(axis=-1).tolist() == [[0, 1], [1, 0]]


def test_order_zero_to_two_agree_with_the_same_law_as_a_function():
    rng = np.random.default_rng(1)
    for order in range(3):
        table = laws(*(4,) * (order + 1))
        tabled = TableModel(table)
        called = TableModel(
            lambda prefix, table=table, order=order: table[((0,) * order + prefix)[len(prefix) :]] if order else table,
            vocab_size=4,
        )
        tokens = rng.integers(4, size=(3, 6))
        expected, _ = called.score(called.init_cache(3, 6), tokens)
        logits, _ = tabled.score(tabled.init_cache(3, 6), tokens)
        np.testing.assert_array_equal(logits, expected)


@given(data=st.data())
def test_any_history_of_blocks_and_rollbacks_leaves_the_laws_of_the_tokens_kept(data: st.DataObject):
    model = TableModel(laws(3, 3, 3))
    capacity = 6
    cache = model.init_cache(2, capacity)
    kept: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 5))):
        block = data.draw(st.integers(0, capacity - max(map(len, kept))))
        tokens = data.draw(
            st.lists(st.lists(st.integers(0, 2), min_size=block, max_size=block), min_size=2, max_size=2)
        )
        logits, cache = model.score(cache, tokens)
        kept = [old + new for old, new in zip(kept, tokens, strict=True)]
        for row, history in enumerate(kept):
            if history:
                alone, _ = model.score(model.init_cache(1, capacity), [history])
                np.testing.assert_array_equal(logits[row], alone[0, len(history) - block :])
        lengths = [data.draw(st.integers(0, len(history))) for history in kept]
        cache = model.rollback(cache, lengths)
        kept = [history[:length] for history, length in zip(kept, lengths, strict=True)]


def test_select_keeps_rows_in_the_order_asked_and_copies_them():
    model = TableModel(laws(3, 3))
    _, cache = model.score(model.init_cache(3, 4), [[0, 1], [1, 2], [2, 0]])
    cache = model.select(model.rollback(cache, [1, 2, 0]), [2, 0, 0])
    assert cache.lengths.tolist() == [0, 1, 1]
    _, cache = model.score(cache, [[1], [2], [0]])
    assert cache.tokens[1, :2].tolist() == [0, 2]
    assert cache.tokens[2, :2].tolist() == [0, 0]


def test_logits_are_taken_as_they_are_and_cast():
    model = TableModel([[np.nan, 0.0], [np.inf, 2.0]], logits=True, dtype="float32", max_length=7)
    logits, _ = model.score(model.init_cache(1, 2), [[0, 1]])
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits[0], np.array([[np.nan, 0.0], [np.inf, 2.0]], np.float32))
    assert model.capabilities.dtypes == ("float32",)
    assert (model.max_length, model.max_rollback, model.vocab_size) == (7, None, 2)


def test_returned_logits_are_the_callers_to_change():
    model = TableModel(laws(3, 3))
    first, cache = model.score(model.init_cache(1, 4), [[1]])
    first[:] = 7
    second, _ = model.score(model.rollback(cache, [0]), [[1]])
    assert (second < 0).all()


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (0.5, {}, r"shape \(V,\) \* \(n \+ 1\)"),
        ([[0.5, 0.5]], {}, r"got \(1, 2\)"),
        ([0.5, 0.5], {"vocab_size": 3}, r"\(3,\).*got \(2,\)"),
        ([0.5, 0.6], {}, "sum to one"),
        ([[0.5, 0.5], [1.5, -0.5]], {}, r"at \(1,\)"),
        ([0.5, np.nan], {}, "non-negative"),
        ([0.5, 0.5], {"dtype": "int32"}, "floating"),
    ],
)
def test_tables_that_are_no_laws_are_refused(table: object, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TableModel(table, **options)


def test_callables_must_name_their_vocabulary_and_fit_it():
    with pytest.raises(TypeError, match="vocab_size"):
        TableModel(lambda prefix: [1.0])
    model = TableModel(lambda prefix: [1.0], vocab_size=2)
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        model.score(model.init_cache(1, 1), [[0]])


def test_capacity_is_exact():
    model = TableModel([0.5, 0.5])
    _, cache = model.score(model.init_cache(1, 2), [[0, 1]])
    with pytest.raises(CacheError, match=r"row 0 holds 2 tokens and cannot take 1 more.*capacity is 2"):
        model.score(cache, [[0]])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": -2}, "`vocab_size` must be a positive integer, got -2"),
        ({"vocab_size": 2.0}, "`vocab_size` must be a positive integer, got 2.0"),
        ({"vocab_size": True}, "`vocab_size` must be a positive integer, got True"),
        ({"vocab_size": 2, "max_length": "8"}, "`max_length` must be a positive integer, got '8'"),
        ({"vocab_size": 2, "max_length": 0}, "`max_length` must be a positive integer, got 0"),
    ],
)
def test_sizes_that_are_no_counts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        TableModel(lambda prefix: [0.5, 0.5], **sizes)
