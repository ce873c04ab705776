"""Large vocabularies: the replay of a draw has the weights' law, and is what the library draws."""

import numpy as np
import pytest

from specsampling import Label, Purpose, UniformRandomness
from specsampling_conformance._host import host_copy, native_floats
from specsampling_conformance._large import drawn_by_levels, level_blocks


@pytest.mark.parametrize(("vocab_size", "levels"), [(3, 1), (320, 1), (321, 2), (32_768, 2), (32_769, 3), (128_256, 3)])
def test_blocks_of_a_draw_are_about_as_many_as_their_ids(vocab_size, levels):
    blocks = level_blocks(vocab_size)
    assert len(blocks) == levels - 1
    for larger, smaller in zip([vocab_size, *blocks], [*blocks, 1], strict=True):
        assert larger / smaller <= 400


@pytest.mark.parametrize("vocab_size", [5, 400, 33_000])
def test_the_replay_draws_ids_by_their_weights(vocab_size):
    # Strata of the uniforms of each level, a grid as fine as can be afforded: shares are off by its step at most.
    weights = np.zeros(vocab_size)
    weights[[0, 1, vocab_size // 2, vocab_size - 1]] = 0.1, 0.2, 0.3, 0.4
    steps = 12
    middles = (np.arange(steps) + 0.5) / steps
    drawn = [
        drawn_by_levels(weights, np.array([a, b, c])).token
        for a in middles
        for b in (middles if vocab_size > 320 else middles[:1])
        for c in (middles if vocab_size > 32_768 else middles[:1])
    ]
    for token in np.flatnonzero(weights):
        assert np.mean(np.array(drawn) == token) == pytest.approx(weights[token], abs=1 / steps)
    assert set(drawn) <= set(np.flatnonzero(weights).tolist())


@pytest.mark.parametrize("vocab_size", [7, 400, 33_000])
def test_the_library_draws_what_the_replay_draws(vocab_size):
    rng = np.random.default_rng(vocab_size)
    weights = rng.random((20, vocab_size))
    uniforms = rng.random((20, 1, 3))
    got = UniformRandomness(uniforms, 0).categorical(weights, Label(Purpose.RESAMPLE, 0)).tolist()
    replayed = [drawn_by_levels(row, numbers[0]) for row, numbers in zip(weights, uniforms, strict=True)]
    assert all(drawn.margin > 1e-12 for drawn in replayed)
    assert got == [drawn.token for drawn in replayed]


def test_a_margin_is_the_distance_of_the_nearest_uniform():
    drawn = drawn_by_levels(np.array([0.25, 0.25, 0.5]), np.array([0.3, 0.5, 0.5]))
    assert drawn.token == 1
    assert drawn.margin == pytest.approx(0.05)


def test_numbers_go_beside_an_array_as_it_holds_them():
    beside = native_floats([[0.1, 2.0]], np.zeros(1, dtype=np.float32))
    assert beside.dtype == np.float32
    np.testing.assert_array_equal(host_copy(beside), np.array([[0.1, 2.0]], dtype=np.float32).astype(np.float64))
