"""The counter generator against published answers, and the purity of its uniforms."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import CounterSource, Label, Philox, Purpose, UniformRandomness
from specsampling import _counter as counter_module
from specsampling._arrays import to_host
from specsampling._counter import philox4x32

DRAFT, ACCEPT, RESAMPLE = (Label(purpose, 0) for purpose in Purpose)
SMALLEST: dict[Any, float] = {np.float32: 2.0**-24, np.float64: 2.0**-53}
LARGEST: dict[Any, float] = {np.float32: 1 - 2.0**-24, np.float64: 1 - 2.0**-53}


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, answer: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(answer))


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, r"`seed` must lie in 0 to 2\*\*64 - 1, got -1"),
        (2**64, ValueError, r"`seed` must lie in 0 to 2\*\*64 - 1, got 18446744073709551616"),
        (1.0, TypeError, "`seed` must be an integer, got 1.0"),
        (True, TypeError, "`seed` must be an integer, got True"),
        (None, TypeError, "`seed` must be an integer, got None"),
    ],
)
def test_a_key_that_is_no_64_bit_integer_is_refused(seed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Philox(seed)


def test_a_key_may_be_any_64_bit_integer() -> None:
    for seed in (0, 2**64 - 1, np.uint64(2**64 - 1), np.int8(7)):
        expected = philox4x32(np.zeros(4, np.uint32), np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32))
        np.testing.assert_array_equal(Philox(seed)(np.zeros(4, np.uint32)), expected)


def philox_in_integers(counter: list[int], key: list[int], rounds: int) -> list[int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(rounds):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32) ^ b ^ k, second & 0xFFFFFFFF
        c, d = (first >> 32) ^ d ^ m, first & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@given(st.integers(0, 2**32 - 1), st.integers(0, 10))
def test_philox_takes_arrays_of_counters_and_fewer_rounds(seed: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    counter, key = rng.integers(0, 2**32, (2, 3, 4), np.uint32), rng.integers(0, 2**32, 2, np.uint32)
    result = philox4x32(counter, key, rounds)
    assert result.dtype == np.uint32
    expected = [philox_in_integers(each, key.tolist(), rounds) for each in counter.reshape(-1, 4).tolist()]
    assert result.reshape(-1, 4).tolist() == expected


def expected_uniform(seed: int, row_id: int, round_: int, label: Label, level: int) -> float:
    """Return the documented uniform, computed on its own."""
    counter = [row_id, round_, label.purpose * 2**24 + label.slot, level // 2]
    out = philox_in_integers(counter, [seed & 0xFFFFFFFF, seed >> 32], 10)
    high, low = out[2 * (level % 2)], out[2 * (level % 2) + 1]
    return (((high << 32 | low) >> 12) + 0.5) * 2.0**-52


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_uniforms_are_the_documented_function_of_the_label(
    seed: int, rows: list[tuple[int, int]], lookahead: int
) -> None:
    row_ids, rounds = zip(*rows, strict=True)
    uniforms = CounterSource(seed).begin_round(row_ids, rounds, lookahead).uniforms
    labels = [Label(purpose, slot) for purpose in (Purpose.DRAFT, Purpose.ACCEPT) for slot in range(lookahead)]
    expected = [
        [[expected_uniform(seed, *row, label, level) for level in range(3)] for label in [*labels, RESAMPLE]]
        for row in rows
    ]
    assert uniforms.tolist() == expected


@given(st.data())
def test_uniforms_do_not_depend_on_calls_before_or_on_company(data: st.DataObject) -> None:
    # fault #102: rows leave, join and change places, rounds and lookaheads jump; each answer is a fresh source's
    source = CounterSource(5)
    rounds = dict.fromkeys(range(6), 0)
    for _ in range(data.draw(st.integers(1, 12))):
        row_ids = data.draw(st.lists(st.sampled_from(list(rounds)), min_size=1, max_size=6, unique=True))
        if data.draw(st.integers(0, 3)) == 0:
            rounds[row_ids[0]] = data.draw(st.integers(0, 100))
        lookahead = data.draw(st.sampled_from([0, 1, 4, 20]))
        got = source.begin_round(row_ids, [rounds[row] for row in row_ids], lookahead).uniforms
        for row, uniforms in zip(row_ids, got, strict=True):
            alone = CounterSource(5).begin_round([row], [rounds[row]], lookahead).uniforms
            np.testing.assert_array_equal(uniforms, alone[0])
            rounds[row] += 1


def test_slot_has_one_uniform_at_every_lookahead() -> None:
    short, long = (CounterSource(1).begin_round([3], [2], lookahead).uniforms[0] for lookahead in (2, 5))
    np.testing.assert_array_equal(short, long[[0, 1, 5, 6, 10]])


def test_no_uniform_is_given_twice() -> None:
    # Over rows, rounds, slots, levels and seeds. Two 52-bit numbers among these 26 000 are equal by chance with
    # probability 8e-8, for a new choice of seeds.
    uniforms = [
        CounterSource(seed).begin_round(range(8), [round_] * 8, 4).uniforms
        for seed in (0, 1, 2**32, 2**63)
        for round_ in range(30)
    ]
    assert np.unique(uniforms).size == 4 * 30 * 8 * 9 * 3


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    # 52 bits and 3 products at six standard deviations: false alarm 1.1e-7 for a new seed (this one is fixed).
    source = CounterSource(11)
    uniforms = np.stack([source.begin_round(range(100), [round_] * 100, 4).uniforms for round_ in range(40)])
    numbers = (uniforms * 2.0**52).astype(np.int64).ravel()
    for bit in range(52):
        ones = int((numbers >> bit & 1).sum())
        assert abs(ones - numbers.size / 2) < 6 * math.sqrt(numbers.size / 4)
    centred = uniforms - 0.5
    for axis in (1, 2, 3):  # rows, slots, levels
        product = centred * np.roll(centred, 1, axis=axis)
        assert abs(product.mean()) < 6 / 12 / math.sqrt(product.size)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, np.int64(7), np.uint64(2**64 - 1)])
def test_seed_is_kept_and_repeats(seed: int) -> None:
    source = CounterSource(seed)
    assert source.seed == int(seed)
    assert type(source.seed) is int
    assert repr(source) == f"CounterSource({int(seed)})"
    again = CounterSource(source.seed).begin_round([0], [0], 3).uniforms
    np.testing.assert_array_equal(source.begin_round([0], [0], 3).uniforms, again)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, np.int64(-3)])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"`seed` must lie in 0 to 2\*\*64 - 1, got"):
        CounterSource(seed)


@pytest.mark.parametrize("seed", [True, False, 1.0, "1", np.float64(2), [1], np.bool(True)])
def test_seed_of_another_type_is_refused(seed: Any) -> None:
    with pytest.raises(TypeError, match="`seed` must be an integer or None, got"):
        CounterSource(seed)


def test_default_seed_is_zero_and_none_is_fresh_entropy() -> None:
    # fault #101: two unseeded sources are equal with probability 2**-64
    assert CounterSource().seed == 0
    first, second = CounterSource(None), CounterSource(None)
    assert first.seed != second.seed
    assert first.begin_round([0], [0], 1).uniforms[0, 0, 0] != second.begin_round([0], [0], 1).uniforms[0, 0, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
def test_source_can_be_copied_and_pickled(copied: Any) -> None:
    source = CounterSource(3)
    source.begin_round([0, 1], [0, 0], 2)
    expected = CounterSource(3).begin_round([0, 1], [1, 1], 2).uniforms
    np.testing.assert_array_equal(copied(source).begin_round([0, 1], [1, 1], 2).uniforms, expected)


@pytest.mark.parametrize(
    ("row_ids", "row"),
    [
        ([0, -1], 1),
        ([2**32, 0], 0),
        ([0, 2**70], 1),
        (np.array([-5, 0], np.int32), 0),
        (np.array([1, 2**63], np.uint64), 1),
    ],
)
def test_row_id_that_does_not_fit_is_named(row_ids: Any, row: int) -> None:
    source = CounterSource(0)
    source.begin_round([0, 1], [0, 0], 1)
    with pytest.raises(ValueError, match=rf"`row_ids` must lie in 0 to 2\*\*32 - 1, got .* in row {row}"):
        source.begin_round(row_ids, [0, 0], 1)
    with pytest.raises(ValueError, match=rf"`rounds` must lie in 0 to 2\*\*32 - 1, got .* in row {row}"):
        source.begin_round([0, 1], row_ids, 1)


@pytest.mark.parametrize("row_ids", [[0, 1.0], [True, False], np.array([0.0, 1.0]), [None, 0], ["0", "1"]])
def test_row_ids_that_are_not_integers_are_refused(row_ids: Any) -> None:
    with pytest.raises(TypeError, match="`row_ids` must be integers, got"):
        CounterSource(0).begin_round(row_ids, [0, 0], 1)


@pytest.mark.parametrize(("row_ids", "rounds"), [([], []), ([0], [0, 0]), ([[0]], [[0]]), (0, 0)])
def test_row_ids_and_rounds_of_other_shapes_are_refused(row_ids: Any, rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"`row_ids` and `rounds` must both have shape \(B,\), B at least 1, got"):
        CounterSource(0).begin_round(row_ids, rounds, 1)


@pytest.mark.parametrize("lookahead", [-1, 2**24])
def test_lookahead_that_does_not_fit_is_refused(lookahead: int) -> None:
    with pytest.raises(ValueError, match=f"`lookahead` must lie in .* got {lookahead}"):
        CounterSource(0).begin_round([0], [0], lookahead)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.int64])
def test_row_ids_of_any_integer_type_are_the_same_rows(dtype: Any) -> None:
    expected = CounterSource(0).begin_round([3, 200], [1, 0], 1).uniforms
    got = CounterSource(0).begin_round(np.array([3, 200], dtype), np.array([1, 0], dtype), 1).uniforms
    np.testing.assert_array_equal(got, expected)


def test_last_rounds_can_be_had() -> None:
    source = CounterSource(0)
    last = 2**32 - 1
    for round_ in (last - 1, last):
        uniforms = source.begin_round([last], [round_], 1).uniforms
        assert uniforms[0, 0, 0] == expected_uniform(0, last, round_, DRAFT, 0)
    # Drawing ahead does not go past the end either.
    with pytest.raises(ValueError, match="`rounds` must lie in"):
        source.begin_round([last], [last + 1], 1)


def test_caller_may_write_into_the_uniforms() -> None:
    source = CounterSource(0)
    expected = CounterSource(0).begin_round([0], [0], 1).uniforms
    for _ in range(2):
        uniforms = source.begin_round([0], [0], 1).uniforms
        np.testing.assert_array_equal(uniforms, expected)
        uniforms[...] = 0.5


def test_generator_is_called_rarely_while_rounds_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
        sizes.append(counter.size // 8)
        return philox4x32(counter, key)

    monkeypatch.setattr(counter_module, "philox4x32", counted)
    source = CounterSource(0)
    for round_ in range(200):
        row_ids = range(3 - round_ // 80)  # rows finish
        source.begin_round(row_ids, [round_] * len(row_ids), 4 if round_ % 2 else 0)
    assert len(sizes) <= 7
    # Memory does not grow with the batch: no further ahead than a few hundred kilobytes, or one round.
    sizes.clear()
    source = CounterSource(0)
    for round_ in range(3):
        source.begin_round(range(4096), [round_] * 4096, 4)
    assert sizes == [4096 * 9] * 3


def test_extreme_bits_give_uniforms_strictly_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, SMALLEST), (2**32 - 1, LARGEST)):

        def constant(counter: np.ndarray, key: np.ndarray, word: int = word) -> np.ndarray:
            return np.full_like(counter, word)

        monkeypatch.setattr(counter_module, "philox4x32", constant)
        randomness = CounterSource(0).begin_round([0], [0], 1)
        assert np.unique(randomness.uniforms).tolist() == [expected[np.float64]]
        assert np.unique(randomness.uniforms_like(np.zeros(1, np.float32))).tolist() == [expected[np.float32]]


def test_float32_uniforms_are_the_first_23_bits_of_the_float64_ones(framework: Any) -> None:
    uniforms = CounterSource(2).begin_round(range(50), [0] * 50, 4).uniforms
    expected = (np.floor(uniforms * 2**23) + 0.5) / 2**23
    like = framework.asarray(np.zeros((50, 4), np.float32))
    for given_uniforms in (uniforms, framework.asarray(uniforms)):
        randomness = UniformRandomness(given_uniforms, 4)
        converted = randomness.uniforms_like(like)
        assert converted.dtype == like.dtype
        assert type(converted) is type(like)
        np.testing.assert_array_equal(to_host(converted).astype(np.float64), expected)
        assert randomness.uniforms_like(like) is converted
        # Those of the other dtype are asked for in the same round, where a draft has another than its target.
        fine = framework.asarray(np.zeros(1))
        if fine.dtype != like.dtype:  # as it is in a JAX that is set to 32 bits
            both = UniformRandomness(uniforms, 4)
            both.uniforms_like(like)
            np.testing.assert_array_equal(to_host(both.uniforms_like(fine)), uniforms)
        # Once they are float32 nothing more is lost.
        np.testing.assert_array_equal(to_host(UniformRandomness(converted, 4).uniforms_like(like)), to_host(converted))
