"""The cache against recomputation, row by row, in float64; the numbers themselves: test_against_transformers.py."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsampling import CacheError
from specsampling_numpy import NumpyModel

V = 13
TOLERANCE = 1e-12  # float64; logits are of order 1 to 10


@pytest.fixture(scope="module")
def model(tiny: Path) -> NumpyModel:
    return NumpyModel(tiny, dtype="float64")


def alone(model: NumpyModel, tokens: list[int]) -> np.ndarray:
    """Logits (T, V) of one row in one fresh call."""
    logits, _ = model.score(model.init_cache(1, len(tokens)), [tokens])
    return logits[0]


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=shape)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_block_equals_single_steps(model: NumpyModel, dtype: type):  # fault #84
    tokens = random_tokens(2, 9).astype(dtype)
    cache = model.init_cache(2, 9)
    steps = []
    for t in range(9):
        logits, cache = model.score(cache, tokens[:, t : t + 1])
        steps.append(logits)
    block, _ = model.score(model.init_cache(2, 9), tokens)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), block, rtol=0, atol=TOLERANCE)


def test_two_tokens_on_three_cached_see_up_to_themselves(model: NumpyModel):  # fault #84
    tokens = random_tokens(5).tolist()
    _, cache = model.score(model.init_cache(1, 5), [tokens[:3]])
    logits, _ = model.score(cache, [tokens[3:]])
    np.testing.assert_allclose(logits[0], alone(model, tokens)[3:], rtol=0, atol=TOLERANCE)


@settings(max_examples=60)
@given(data=st.data())
def test_blocks_rollbacks_and_selections_equal_a_fresh_recompute(model: NumpyModel, data: st.DataObject):
    # faults #64 (rollback to 0, to more than is held), #79, #82 (reset instead of rolled back), #122 (stale keys keep
    # weight), #126 (rows mixed up)
    capacity = 8
    batch_size = data.draw(st.integers(1, 4), label="rows")
    cache = model.init_cache(batch_size, capacity)
    kept: list[list[int]] = [[] for _ in range(batch_size)]
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        block = data.draw(st.integers(0, min(4, capacity - max(map(len, kept)))), label="T")
        row = st.lists(st.integers(0, V - 1), min_size=block, max_size=block)
        tokens = [data.draw(row) for _ in kept]
        logits, cache = model.score(cache, np.array(tokens, dtype=np.int64))
        kept = [old + new for old, new in zip(kept, tokens, strict=True)]
        for history, received in zip(kept, logits, strict=True):
            if block:
                expected = alone(model, history)[len(history) - block :]
                np.testing.assert_allclose(received, expected, rtol=0, atol=TOLERANCE)
        if data.draw(st.booleans(), label="roll back"):
            lengths = [data.draw(st.integers(0, len(history))) for history in kept]
            cache = model.rollback(cache, np.array(lengths, dtype=np.int32))
            kept = [history[:length] for history, length in zip(kept, lengths, strict=True)]
        if data.draw(st.booleans(), label="select"):
            rows = data.draw(st.lists(st.integers(0, len(kept) - 1), min_size=1, max_size=4))
            cache = model.select(cache, np.array(rows))
            kept = [kept[row] for row in rows]
        assert cache.lengths.tolist() == [len(history) for history in kept]


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), num_logits=st.integers(0, 3), order=st.randoms())
def test_a_row_does_not_depend_on_company_order_or_padding(model: NumpyModel, lengths, num_logits, order):
    histories = [random_tokens(length + 3, seed=seed).tolist() for seed, length in enumerate(lengths)]
    order.shuffle(histories)
    longest = max(map(len, histories)) - 3
    prompts = [history[:-3] + [0] * (longest - len(history) + 3) for history in histories]
    nothing, cache = model.score(model.init_cache(len(histories), longest + 3), prompts, num_logits=0)
    assert nothing.shape == (len(histories), 0, V)
    cache = model.rollback(cache, [len(history) - 3 for history in histories])
    logits, _ = model.score(cache, [history[-3:] for history in histories], num_logits=num_logits)
    assert logits.shape == (len(histories), num_logits, V)
    for history, received in zip(histories, logits, strict=True):
        expected = alone(model, history)[len(history) - num_logits :]
        np.testing.assert_allclose(received, expected, rtol=0, atol=TOLERANCE)


def test_a_rolled_back_tail_takes_no_attention(model: NumpyModel):  # fault #122
    tokens = random_tokens(2, 6)
    _, cache = model.score(model.init_cache(2, 8), tokens)
    cache = model.rollback(cache, [4, 6])
    # Were the tail attended to, even with a weight of 1e-300, this would show.
    cache.keys_values[:, 0, 4:] = 1e300
    logits, _ = model.score(cache, [[3], [5]])
    np.testing.assert_allclose(logits[0, 0], alone(model, [*tokens[0, :4], 3])[-1], rtol=0, atol=TOLERANCE)


def test_rollback_to_zero_starts_over_and_a_second_rollback_goes_on_from_the_first(model: NumpyModel):
    # faults #64, #82
    tokens = random_tokens(2, 6)
    _, cache = model.score(model.init_cache(2, 6), tokens)
    cache = model.rollback(model.rollback(cache, [3, 5]), [0, 2])
    assert cache.lengths.tolist() == [0, 2]
    logits, _ = model.score(cache, [[1, 2], [1, 2]])
    np.testing.assert_allclose(logits[0], alone(model, [1, 2]), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits[1], alone(model, [*tokens[1, :2], 1, 2])[2:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("lengths", "message"), [([3, 5], "row 1 holds 4 .* 5"), ([-1, 4], "row 0 holds 4 .* -1")])
def test_rollback_to_what_is_not_there_names_row_and_lengths(model: NumpyModel, lengths: list[int], message: str):
    _, cache = model.score(model.init_cache(2, 6), random_tokens(2, 4))  # fault #64
    with pytest.raises(CacheError, match=message):
        model.rollback(cache, lengths)


def test_overflow_names_row_and_numbers_and_corrupts_nothing(model: NumpyModel):
    # fault #79: no gap and no overlap between what is held and what is appended
    tokens = random_tokens(2, 5)
    _, cache = model.score(model.init_cache(2, 6), tokens)
    cache = model.rollback(cache, [2, 5])
    before = cache.keys_values.copy()
    with pytest.raises(CacheError, match=r"row 1 holds 5 tokens and cannot take 2 more.*capacity is 6"):
        model.score(cache, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(cache.keys_values, before)
    logits, cache = model.score(cache, [[1], [2]])
    assert cache.lengths.tolist() == [3, 6]
    np.testing.assert_allclose(logits[1, 0], alone(model, [*tokens[1], 2])[-1], rtol=0, atol=TOLERANCE)


def test_padding_may_lie_past_the_context_limit(model: NumpyModel):
    assert model.max_length == 16
    tokens = random_tokens(20)
    logits, cache = model.score(model.init_cache(1, 20), [tokens])
    np.testing.assert_allclose(logits[0, :16], alone(model, tokens[:16].tolist()), rtol=0, atol=TOLERANCE)
    assert np.isfinite(logits).all()
    assert model.rollback(cache, [16]).lengths.tolist() == [16]


def test_logits_are_fresh_and_inputs_unchanged(model: NumpyModel):
    tokens = random_tokens(2, 3)
    tokens.flags.writeable = False
    first, cache = model.score(model.init_cache(2, 6), tokens)
    copy = first.copy()
    lengths = np.array([1, 2])
    cache = model.rollback(cache, lengths)
    lengths[:] = 0
    assert cache.lengths.tolist() == [1, 2]
    model.score(cache, tokens)
    np.testing.assert_array_equal(first, copy)


def test_selected_rows_own_their_memory(model: NumpyModel):
    _, cache = model.score(model.init_cache(2, 6), random_tokens(2, 3))
    twice = model.select(cache, [1, 1])
    _, twice = model.score(twice, [[1], [2]])
    logits, _ = model.score(twice, [[3], [3]])
    assert abs(logits[0] - logits[1]).max() > 1e-3
    assert model.select(twice, []).lengths.tolist() == []


def test_nothing_to_score_gives_nothing(model: NumpyModel):
    cache = model.init_cache(2, 4)
    logits, cache = model.score(cache, [[], []])
    assert logits.shape == (2, 0, V)
    logits, _ = model.score(model.select(cache, []), np.zeros((0, 3), np.int64), num_logits=2)
    assert logits.shape == (0, 2, V)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([[1], [13]], {}, ValueError, r"`tokens` must lie in \[0, 13\), got 13 in row 1, column 0"),
        ([[1, -1], [1, 1]], {}, ValueError, "got -1 in row 0, column 1"),
        ([[1]], {}, ValueError, r"B = 2, got \(1, 1\)"),
        ([1, 2], {}, ValueError, r"got \(2,\)"),
        ([[1.0], [2.0]], {}, TypeError, "integer array, got dtype float64"),
        ([[1], [2]], {"num_logits": 2}, ValueError, "`num_logits` must lie between 0 and .* 1 tokens, got 2"),
        ([[1], [2]], {"num_logits": -1}, ValueError, "got -1"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(model: NumpyModel, tokens, options, error, message):
    with pytest.raises(error, match=message):
        model.score(model.init_cache(2, 4), tokens, **options)


def test_wrong_lengths_rows_and_sizes_are_refused(model: NumpyModel):
    cache = model.init_cache(2, 4)
    with pytest.raises(ValueError, match=r"`lengths` must have shape \(B,\) with B = 2, got \(1,\)"):
        model.rollback(cache, [0])
    with pytest.raises(TypeError, match="`lengths` must be an integer array, got dtype float64"):
        model.rollback(cache, [0.0, 0.0])
    with pytest.raises(ValueError, match=r"`rows` must lie in \[0, 2\), got \[0, 2\]"):
        model.select(cache, [0, 2])
    with pytest.raises(ValueError, match=r"`rows` must lie in \[0, 2\), got \[-1\]"):
        model.select(cache, [-1])
    with pytest.raises(ValueError, match="one-dimensional"):
        model.select(cache, [[0]])
    with pytest.raises(TypeError, match="`rows` must be an integer array, got dtype bool"):
        model.select(cache, [True, False])
    with pytest.raises(ValueError, match="non-negative, got -1 and 4"):
        model.init_cache(-1, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_weights_that_overflow_give_non_finite_logits_and_no_warning(
    tmp_path: Path, write: Callable[..., Path], value: float
):
    # fault #51: the decoder names row and position; here only that row may suffer.
    from safetensors.numpy import load_file, save_file

    path = write(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][3] = value
    weights["lm_head.weight"][5] *= np.float32(1e30)
    save_file(weights, path)
    model = NumpyModel(tmp_path)
    logits, _ = model.score(model.init_cache(2, 3), [[1, 2, 4], [1, 3, 4]])
    assert np.isfinite(logits[0]).all()
    if value != 1e30:
        assert not np.isfinite(logits[1, 1]).all()


def test_float32_is_float64_rounded(tiny: Path, model: NumpyModel):
    single = NumpyModel(tiny)
    tokens = random_tokens(3, 8)
    logits, cache = single.score(single.init_cache(3, 8), tokens)
    assert logits.dtype == cache.keys_values.dtype == np.float32
    expected, _ = model.score(model.init_cache(3, 8), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_thousands_of_ragged_rows(model: NumpyModel):
    lengths = np.random.default_rng(0).integers(0, 5, size=2048)
    _, cache = model.score(model.init_cache(2048, 6), random_tokens(2048, 4), num_logits=0)
    logits, _ = model.score(model.rollback(cache, np.minimum(lengths, 4)), random_tokens(2048, 2, seed=1))
    for row in (0, 7, 2047):
        history = [*random_tokens(2048, 4)[row, : lengths[row]], *random_tokens(2048, 2, seed=1)[row]]
        np.testing.assert_allclose(logits[row], alone(model, history)[-2:], rtol=0, atol=TOLERANCE)
