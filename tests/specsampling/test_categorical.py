"""Draws by levels: their law, computed exactly from what the sampler compares, and every edge of a row."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specsampling._arrays import to_host
from specsampling._categorical import (
    block_sums,
    block_weights,
    boundaries,
    categorical_from_uniforms,
    num_blocks,
    num_levels,
)

SIZES = [1, 2, 3, 17, 320, 321, 1000, 4001, 32_768, 32_769, 50_257]
"""Vocabulary sizes of one, two and three levels, at both ends of each, most of them no multiple of a block."""

BITS = {np.dtype(np.float32): 23, np.dtype(np.float64): 52}


def grid(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the uniforms with these numbers: every one that a source can give lies at half a step."""
    return ((numbers + 0.5) * 2.0 ** -BITS[dtype]).astype(dtype)


def counts(bounds: np.ndarray) -> np.ndarray:
    """Return for every boundary how many uniforms of the grid give its id or one before it, by the sampler's test."""
    steps = 2 ** BITS[bounds.dtype]
    highest = np.maximum.accumulate(bounds, axis=-1)
    total = bounds[..., -1:]
    near = np.floor(highest.astype(np.longdouble) / total * steps).astype(np.int64)
    result: np.ndarray = np.clip(near - 3, 0, None)
    for number in (near + offset for offset in range(-3, 4)):
        result += (grid(number, bounds.dtype) * total < highest) & (number >= 0) & (number < steps)
    return result


def level_law(bounds: np.ndarray) -> np.ndarray:
    """Return the exact law of one level's draw in each row, as a share of the grid of uniforms."""
    shares: np.ndarray = np.diff(counts(bounds), axis=-1, prepend=0) / np.longdouble(2 ** BITS[bounds.dtype])
    return shares


def exact_law(
    weights: np.ndarray, levels: int | None = None, asarray: Callable[[np.ndarray], Any] = np.asarray
) -> np.ndarray:
    """Return the exact law of `categorical_from_uniforms`, from the boundaries of all its levels."""
    vocab_size = weights.size
    levels = num_levels(vocab_size) if levels is None else levels
    if levels == 1:
        (only,) = level_law(to_host(boundaries(asarray(weights[None]))))
        return np.asarray(only)
    blocks = num_blocks(vocab_size, levels)
    sums = to_host(block_sums(asarray(weights[None]), blocks))[0]
    size = math.ceil(vocab_size / blocks)
    members = np.concatenate([weights, np.zeros(size * blocks - vocab_size, weights.dtype)]).reshape(size, blocks).T
    inside = np.zeros(members.shape, np.longdouble)
    drawn = members.max(axis=-1) > 0
    inside[drawn] = level_law(to_host(boundaries(asarray(np.ascontiguousarray(members[drawn])))))
    law: np.ndarray = (exact_law(sums, levels - 1, asarray)[:, None] * inside).T.reshape(-1)[:vocab_size]
    return law


def error(weights: np.ndarray, **options: Any) -> float:
    """Return the total-variation distance between the exact law and the weights."""
    exact = weights.astype(np.longdouble)
    return float(np.abs(exact_law(weights, **options) - exact / exact.sum()).sum() / 2)


def flat(vocab_size: int) -> np.ndarray:
    return np.full(vocab_size, 1 / vocab_size)


def zipf(vocab_size: int) -> np.ndarray:
    weights: np.ndarray = 1 / np.arange(1, vocab_size + 1)
    weights /= weights.sum()
    return weights


def spread(vocab_size: int) -> np.ndarray:
    """99 % on a thousand ids, 1 % over 100 000 others (less where there are fewer)."""
    head = min(vocab_size // 3, 1000)
    tail = min(vocab_size - head, 100_000)
    weights = np.zeros(vocab_size)
    weights[:head] = 0.99 * zipf(head)
    weights[vocab_size - tail :] = 0.01 / tail
    return weights


def one_heavy(position: float) -> Callable[[int], np.ndarray]:
    def law(vocab_size: int) -> np.ndarray:
        weights = np.full(vocab_size, 0.01 / (vocab_size - 1))
        weights[int(position * (vocab_size - 1))] = 0.99
        return weights

    return law


LAWS = {
    "flat": flat,
    "zipf": zipf,
    "spread": spread,
    "heavy-first": one_heavy(0.0),
    "heavy-middle": one_heavy(0.5),
    "heavy-last": one_heavy(1.0),
}


def test_number_of_levels_depends_on_the_vocabulary_alone_and_keeps_each_level_short() -> None:
    previous = 1
    for vocab_size in [*range(1, 2000), *range(2000, 300_000, 97), 1_000_000]:
        levels = num_levels(vocab_size)
        assert levels >= previous
        previous = levels
        remaining = vocab_size
        for level in range(levels, 1, -1):
            blocks = num_blocks(remaining, level)
            assert math.ceil(remaining / blocks) <= 320
            remaining = blocks
        assert remaining <= 320
    assert previous == 3


@pytest.mark.parametrize(
    "vocab_size", [251, 255, 317, 319, 320, 31_694, 32_079, 32_695, 32_768, 33_483, 151_936, 250_000]
)
@pytest.mark.parametrize("law", LAWS)
def test_float32_law_is_within_1e_5(law: str, vocab_size: int) -> None:
    # Sizes at which a level is as long as it gets, and the one the design names.
    assert error(LAWS[law](vocab_size).astype(np.float32)) < 1e-5


@pytest.mark.parametrize("vocab_size", [2, 255, 320, 32_768, 250_000])
@pytest.mark.parametrize("law", ["flat", "zipf", "spread", "heavy-first"])
def test_float64_law_is_within_1e_12(law: str, vocab_size: int) -> None:
    assert error(LAWS[law](vocab_size)) < 1e-12


@pytest.mark.parametrize("law", LAWS)
def test_law_holds_on_every_framework(law: str, framework: Any) -> None:
    # Sums are taken in another order on each.
    for vocab_size, dtype, limit in ((250_000, np.float32, 1e-5), (317, np.float64, 1e-12)):
        assert error(LAWS[law](vocab_size).astype(dtype), asarray=framework.asarray) < limit


@pytest.mark.parametrize("vocab_size", [320, 32_768, 250_000])
@pytest.mark.parametrize("steps", [1.0001, 1.5, 2.9999, 5.0001, 101.0001, 1001.0001, 16_385.0001])
def test_worst_float32_laws_are_within_5e_5(steps: float, vocab_size: int) -> None:
    # One heavy id in each block of each level, and the others just off the step of a float32 sum: there a running sum
    # in floating point rounds every term the same way.
    def nested(size: int, levels: int) -> np.ndarray:
        if levels > 1:
            blocks = num_blocks(size, levels)
            inner = nested(math.ceil(size / blocks), 1)
            return np.outer(nested(blocks, levels - 1), inner / inner.sum()).T.reshape(-1)[:size]
        weights = np.full(size, steps * 2.0**-24)
        weights[0] = 1
        return weights

    assert error(nested(vocab_size, num_levels(vocab_size)).astype(np.float32)) < 5e-5


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([2, 100, 319, 320, 20_000, 32_768, 40_000]),
    power=st.floats(0, 12),
)
def test_any_float32_law_is_within_5e_5(seed: int, vocab_size: int, power: float) -> None:
    weights = np.random.default_rng(seed).random(vocab_size) ** power
    assert error(weights.astype(np.float32)) < 5e-5


def test_one_level_would_not_do() -> None:
    # Not even in whole numbers: 23 bits cannot tell 250 000 ids apart.
    assert error(flat(250_000).astype(np.float32), levels=1) > 1e-3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sampler_changes_id_exactly_where_the_law_says(dtype: Any) -> None:
    # Ties the computed law to the sampler: the last uniform of each id, and the first of the next.
    weights = np.array([zipf(317), flat(317), one_heavy(0.5)(317)]).astype(dtype)
    ends = counts(boundaries(weights))
    for row, ids in enumerate(weights):
        last = grid(ends[row] - 1, ids.dtype)
        first = grid(ends[row][:-1], ids.dtype)
        rows = np.broadcast_to(ids, (317, 317))
        assert categorical_from_uniforms(rows, np.stack([last] * 3, axis=-1)).tolist() == list(range(317))
        assert categorical_from_uniforms(rows[1:], np.stack([first] * 3, axis=-1)).tolist() == list(range(1, 317))


@pytest.mark.parametrize("vocab_size", [321, 4001, 32_769, 50_257])
def test_each_level_uses_its_own_uniform(vocab_size: int) -> None:
    weights = np.broadcast_to(flat(vocab_size), (3, vocab_size))
    levels = num_levels(vocab_size)
    blocks = num_blocks(vocab_size, levels)
    uniforms = np.full((3, 3), 0.2)
    uniforms[1, levels - 1] = 0.9
    uniforms[2, 0] = 0.9
    base, other_member, other_block = categorical_from_uniforms(weights, uniforms).tolist()
    assert base % blocks == other_member % blocks
    assert base // blocks != other_member // blocks
    assert base % blocks != other_block % blocks


@pytest.mark.parametrize("vocab_size", SIZES)
def test_blocks_hold_every_id_once(vocab_size: int) -> None:
    levels = max(2, num_levels(vocab_size))
    blocks = num_blocks(vocab_size, levels)
    weights = np.arange(1.0, vocab_size + 1)
    # The sums of the block's members, taken out one block at a time, are the block sums.
    members = block_weights(np.broadcast_to(weights, (blocks, vocab_size)), np.arange(blocks), blocks)
    assert np.sort(members[members > 0]).tolist() == weights.tolist()
    np.testing.assert_array_equal(block_sums(weights, blocks), members.sum(axis=-1))


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Return a row that has a positive weight, with zeros of both signs and denormals, and uniforms at the edges."""
    vocab_size = draw(st.sampled_from(SIZES))
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float64])))
    smallest = float(np.finfo(dtype).smallest_subnormal)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = draw(st.sampled_from([[smallest], [smallest, 3 * smallest], [1.0], [1.0, smallest], [1e30, 1e-30, 1.0]]))
    weights = rng.choice(np.array([0.0, -0.0]), vocab_size)
    num_positive = draw(st.integers(1, min(vocab_size, 8)))
    weights[rng.choice(vocab_size, num_positive, replace=False)] = rng.choice(values, num_positive)
    eps = float(np.finfo(dtype).eps)
    # 0 and 1 come from faulty sources only.
    edges = [2.0 ** -(BITS[dtype] + 1), 1 - eps / 2, 0.0, 1.0, 0.5, 0.3]
    uniforms = np.array(draw(st.lists(st.sampled_from(edges), min_size=3, max_size=3)), dtype)
    return weights.astype(dtype), uniforms


@given(rows())
@example((np.array([0.0, 5e-324, 0.0]), np.array([0.0, 0.0, 0.0])))
@example((np.array([0.0, 5e-324, 0.0]), np.array([1.0, 1.0, 1.0])))
def test_id_of_weight_zero_is_never_drawn(row: tuple[np.ndarray, np.ndarray]) -> None:
    # faults #26, #27: also for negative zeros, at both ends of the uniforms, and past them
    weights, uniforms = row
    before = weights.copy()
    drawn = int(categorical_from_uniforms(weights, uniforms))
    assert weights[drawn] > 0
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("vocab_size", [256, 4001, 50_257])
def test_id_of_weight_zero_is_never_drawn_on_any_framework(vocab_size: int, framework: Any) -> None:
    # fault #26
    rng = np.random.default_rng(0)
    draw = framework.compile(categorical_from_uniforms)
    for dtype in (np.float32, np.float64):
        weights = np.where(rng.random((64, vocab_size)) < 0.5, 0, rng.random((64, vocab_size))).astype(dtype)
        weights[:32, vocab_size // 2 :] = 0
        weights[16:48, : vocab_size // 4] = -0.0
        eps = float(np.finfo(dtype).eps)
        for uniform in (2.0 ** -(BITS[np.dtype(dtype)] + 1), 0.5, 1 - eps / 2, 0.0, 1.0):
            uniforms = np.full((64, 3), uniform, dtype)
            drawn = to_host(draw(framework.asarray(weights), framework.asarray(uniforms)))
            assert (weights[np.arange(64), drawn] > 0).all()


@pytest.mark.parametrize("vocab_size", [256, 4001, 50_257])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_uniform_at_all_gives_an_id_of_weight_zero(dtype: Any, vocab_size: int) -> None:
    # fault #26: the measure of the uniforms that give such an id is 0, which no number of draws could show
    rng = np.random.default_rng(0)
    weights = np.where(rng.random(vocab_size) < 0.5, 0, rng.random(vocab_size)).astype(dtype)
    law = exact_law(weights)
    assert law[weights == 0].max() == 0
    assert abs(law.sum() - 1) < 1e-15


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_hot_rows_give_their_id(vocab_size: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    ids = np.unique([0, vocab_size - 1, vocab_size // 2, *rng.integers(0, vocab_size, 5)])
    weights = np.zeros((ids.size, vocab_size), dtype)
    weights[np.arange(ids.size), ids] = 3
    for uniform in (2.0**-24, 0.5, 1 - 2.0**-24):
        assert categorical_from_uniforms(weights, np.full((ids.size, 3), uniform, dtype)).tolist() == ids.tolist()


def test_smallest_uniform_gives_the_first_id_and_the_largest_the_last() -> None:
    weights = np.array([[0, 0, 1, 2, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=np.float32)
    assert categorical_from_uniforms(weights, np.full((2, 3), 2.0**-24, np.float32)).tolist() == [2, 0]
    assert categorical_from_uniforms(weights, np.full((2, 3), 1 - 2.0**-24, np.float32)).tolist() == [4, 5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab_size", [3, 1000, 50_257])
def test_denormal_sums_keep_their_law(dtype: Any, vocab_size: int) -> None:
    smallest = np.finfo(dtype).smallest_subnormal
    weights = np.zeros(vocab_size, dtype)
    weights[0], weights[-1] = smallest, 3 * smallest
    law = exact_law(weights)
    np.testing.assert_allclose(law[[0, -1]].astype(float), [0.25, 0.75], rtol=0, atol=1e-6)
    assert law[1:-1].sum() == 0


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_without_a_law_give_an_id_in_range_and_leave_other_rows_alone(vocab_size: int, dtype: Any) -> None:
    good = np.random.default_rng(0).random(vocab_size)
    weights = np.stack([np.zeros(vocab_size), good, np.full(vocab_size, np.nan), np.where(good > 0.5, np.nan, 9e9)])
    weights = weights.astype(dtype)
    uniforms = np.full((4, 3), 0.7, dtype)
    drawn = categorical_from_uniforms(weights, uniforms)
    assert ((drawn >= 0) & (drawn < vocab_size)).all()
    assert drawn[1] == categorical_from_uniforms(weights[1:2], uniforms[:1])[0]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_row_is_drawn_alike_alone_in_a_batch_and_in_any_layout(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    weights, uniforms = rng.random((2, 3, vocab_size)), rng.random((2, 3, 3))
    drawn = categorical_from_uniforms(weights, uniforms)
    assert drawn.shape == (2, 3)
    assert np.issubdtype(drawn.dtype, np.integer)
    alone = [[int(categorical_from_uniforms(weights[i, j], uniforms[i, j])) for j in range(3)] for i in range(2)]
    assert drawn.tolist() == alone
    columns = np.asfortranarray(weights)
    assert categorical_from_uniforms(columns, uniforms).tolist() == alone
    assert categorical_from_uniforms(np.repeat(weights, 2, axis=-1)[..., ::2], uniforms).tolist() == alone


@pytest.mark.parametrize("vocab_size", SIZES)
def test_all_frameworks_draw_the_same_ids(vocab_size: int, framework: Any) -> None:
    # Whole-number sums make boundaries equal to a few units of 2**-60; the chance that one of these 200 fixed uniforms
    # falls between two of them is below 1e-12.
    rng = np.random.default_rng(vocab_size)
    weights, uniforms = rng.exponential(size=(200, vocab_size)) ** 2, rng.random((200, 3))
    drawn = framework.compile(categorical_from_uniforms)(framework.asarray(weights), framework.asarray(uniforms))
    assert to_host(drawn).tolist() == categorical_from_uniforms(weights, uniforms).tolist()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")  # array-api-compat remembers types
def test_compiled_by_pytorch_the_boundaries_are_one_graph() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.as_tensor(spread(1000)[None])
    compiled = torch.compile(boundaries, fullgraph=True, backend="eager")
    assert torch.equal(compiled(weights), boundaries(weights))


def test_float32_without_64_bit_integers_is_enough() -> None:
    jax = pytest.importorskip("jax")
    weights, uniforms = spread(1000).astype(np.float32)[None], np.full((1, 3), 0.3, np.float32)
    drawn = jax.jit(categorical_from_uniforms)(jax.numpy.asarray(weights), jax.numpy.asarray(uniforms))
    assert not jax.config.read("jax_enable_x64")
    assert np.asarray(drawn).tolist() == categorical_from_uniforms(weights, uniforms).tolist()
