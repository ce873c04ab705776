"""What a round answers from its uniforms."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import CounterSource, Label, Purpose, UniformRandomness
from specsampling._arrays import to_host
from specsampling._categorical import categorical_from_uniforms

DRAFT, ACCEPT, RESAMPLE = (Label(purpose, 0) for purpose in Purpose)
SMALLEST: dict[Any, float] = {np.float32: 2.0**-24, np.float64: 2.0**-53}
LARGEST: dict[Any, float] = {np.float32: 1 - 2.0**-24, np.float64: 1 - 2.0**-53}


def constant_round(uniform: float, batch_size: int, lookahead: int, dtype: Any = np.float64) -> UniformRandomness:
    return UniformRandomness(np.full((batch_size, 2 * lookahead + 1, 3), uniform, dtype), lookahead)


def acceptance(framework: Any, uniform: float, numerator: Any, denominator: Any, dtype: Any) -> list[bool]:
    p, q = np.array([numerator], dtype), np.array([denominator], dtype)
    uniforms = constant_round(uniform, 1, p.shape[1], dtype).uniforms

    def accept(uniforms: Any, p: Any, q: Any) -> Any:
        return UniformRandomness(uniforms, p.shape[1]).accept(p, q, ACCEPT)

    answer = framework.compile(accept)(*(framework.asarray(each) for each in (uniforms, p, q)))
    assert type(answer) is type(framework.asarray(p))
    result: list[bool] = to_host(answer)[0].tolist()
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("end", ["zero", "smallest", "largest"])
def test_certain_answers_do_not_depend_on_the_uniform(dtype: Any, end: str, framework: Any) -> None:
    # fault #19: with a uniform of exactly 0 too, what the target forbids is rejected; with the largest, equals stay
    uniform = {"zero": 0.0, "smallest": SMALLEST[dtype], "largest": LARGEST[dtype]}[end]
    eps = float(np.finfo(dtype).eps)
    tiny = float(np.finfo(dtype).tiny)
    nan = math.nan
    cases = [
        (0.0, 0.5, False),
        (0.0, 0.0, False),
        (-0.0, 0.5, False),
        (nan, 0.5, False),
        (nan, nan, False),
        (0.5, nan, False),
        (0.5, 0.5, True),
        (0.3, 0.1, True),
        (1.0, 1.0, True),
        (0.1 + eps, 0.1, True),
        (tiny, tiny, True),
        (tiny, 0.0, True),
        (1.0, 0.0, True),
    ]
    if not framework.flushes_denormals:
        denormal = float(np.finfo(dtype).smallest_subnormal)
        cases += [(denormal, denormal, True), (3 * denormal, 2 * denormal, True), (denormal, 0.0, True)]
        cases += [(0.0, denormal, False)]
    numerator, denominator, expected = zip(*cases, strict=True)
    assert acceptance(framework, uniform, numerator, denominator, dtype) == list(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accepts_where_the_uniform_times_the_denominator_is_less(dtype: Any, framework: Any) -> None:
    # 0.5 * q is exact: equality rejects.
    up = float(np.nextafter(dtype(0.25), dtype(1)))
    down = float(np.nextafter(dtype(0.25), dtype(0)))
    assert acceptance(framework, 0.5, [0.25, up, down], [0.5, 0.5, 0.5], dtype) == [False, True, False]
    assert acceptance(framework, SMALLEST[dtype], [1e-30, 1e-3], [1.0, 1.0], dtype) == [False, True]
    # A product that underflows to 0 is less than any positive numerator.
    tiny = float(np.finfo(dtype).tiny)
    assert acceptance(framework, SMALLEST[dtype], [tiny], [2 * tiny], dtype) == [True]


@given(st.integers(0, 2**32 - 1))
def test_acceptance_is_the_stated_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uniforms = rng.random((4, 7, 3))
    p, q = rng.random((4, 3)) ** 4, rng.random((4, 3))
    p[rng.random((4, 3)) < 0.2] = 0
    got = UniformRandomness(uniforms, 3).accept(p, q, ACCEPT)
    expected = [
        [p[b, k] > 0 and (p[b, k] >= q[b, k] or uniforms[b, 3 + k, 0] * q[b, k] < p[b, k]) for k in range(3)]
        for b in range(4)
    ]
    assert got.tolist() == expected


def test_acceptance_frequency_is_the_ratio() -> None:
    # Six standard deviations on 36 000 answers: false alarm 2e-9 for a new seed (this one is fixed).
    randomness = CounterSource(4).begin_round(range(4000), [0] * 4000, 9)
    accepted = randomness.accept(np.full((4000, 9), 0.21), np.full((4000, 9), 0.7), ACCEPT)
    assert abs(accepted.mean() - 0.3) < 6 * math.sqrt(0.3 * 0.7 / accepted.size)


def test_frameworks_answer_alike_from_the_same_uniforms(framework: Any) -> None:
    rng = np.random.default_rng(0)
    p, q, weights = rng.random((16, 4)), rng.random((16, 4)), rng.random((16, 1000))
    uniforms = CounterSource(9).begin_round(range(16), [0] * 16, 4).uniforms

    def ask(uniforms: Any, p: Any, q: Any, weights: Any) -> list[Any]:
        randomness = UniformRandomness(uniforms, 4)
        draws = [randomness.categorical(weights, Label(Purpose.DRAFT, slot)) for slot in range(4)]
        return [*draws, randomness.accept(p, q, ACCEPT), randomness.categorical(weights, RESAMPLE)]

    expected = [answer.tolist() for answer in ask(uniforms, p, q, weights)]
    question = [framework.asarray(each) for each in (p, q, weights)]
    for given_uniforms in (uniforms, framework.asarray(uniforms)):
        answers = framework.compile(ask)(given_uniforms, *question)
        assert [to_host(answer).tolist() for answer in answers] == expected


def test_uniforms_may_be_traced_while_the_question_is_a_constant() -> None:
    jax = pytest.importorskip("jax")
    weights = jax.numpy.asarray(np.random.default_rng(0).random((2, 50)), dtype=np.float32)
    randomness = CounterSource(0).begin_round([0, 1], [0, 0], 1)

    def traced(uniforms: Any) -> Any:
        return UniformRandomness(uniforms, 1).categorical(weights, DRAFT)

    got = jax.jit(traced)(randomness.uniforms_like(weights))
    assert got.tolist() == randomness.categorical(weights, DRAFT).tolist()


def test_each_label_has_its_own_place() -> None:
    weights = np.broadcast_to(np.full(100, 0.01), (2, 100))
    randomness = CounterSource(1).begin_round([0, 1], [0, 0], 3)
    places = [Label(Purpose.DRAFT, slot) for slot in range(3)] + [Label(Purpose.ACCEPT, slot) for slot in range(3)]
    for place, label in enumerate([*places, RESAMPLE]):
        expected = categorical_from_uniforms(weights, randomness.uniforms[:, place, :])
        assert randomness.categorical(weights, label).tolist() == expected.tolist()


def test_label_asked_twice_raises() -> None:
    randomness = constant_round(0.5, 1, 4)
    weights, probs = np.ones((1, 3)), np.ones((1, 2))
    randomness.categorical(weights, Label(Purpose.DRAFT, 1))
    with pytest.raises(ValueError, match=r"`label` must be asked once in a round, got DRAFT slot 1 again"):
        randomness.categorical(weights, Label(Purpose.DRAFT, 1))
    randomness.categorical(weights, Label(Purpose.DRAFT, 2))
    # A question of two columns covers two slots.
    randomness.accept(probs, probs, Label(Purpose.ACCEPT, 1))
    randomness.accept(probs[:, :1], probs[:, :1], Label(Purpose.ACCEPT, 0))
    for slot in (0, 1, 2):
        with pytest.raises(ValueError, match="asked once"):
            randomness.accept(probs, probs, Label(Purpose.ACCEPT, slot))
    randomness.accept(probs[:, :1], probs[:, :1], Label(Purpose.ACCEPT, 3))
    randomness.categorical(weights, RESAMPLE)
    with pytest.raises(ValueError, match="got RESAMPLE slot 0 again"):
        randomness.categorical(weights, RESAMPLE)


@pytest.mark.parametrize(
    ("purpose", "slot", "columns"),
    [
        (Purpose.DRAFT, 2, 1),
        (Purpose.DRAFT, -1, 1),
        (Purpose.ACCEPT, 0, 3),
        (Purpose.ACCEPT, 1, 2),
        (Purpose.RESAMPLE, 1, 1),
    ],
)
def test_label_outside_the_round_raises(purpose: Purpose, slot: int, columns: int) -> None:
    probs = np.ones((1, columns))
    with pytest.raises(ValueError, match=rf"`label` must lie within the round: {purpose.name} has slots 0 to"):
        constant_round(0.5, 1, 2).accept(probs, probs, Label(purpose, slot))


def test_question_without_columns_is_answered() -> None:
    randomness = constant_round(0.5, 2, 0)
    assert randomness.accept(np.ones((2, 0)), np.ones((2, 0)), ACCEPT).shape == (2, 0)
    assert randomness.categorical(np.ones((2, 1)), RESAMPLE).tolist() == [0, 0]


def test_question_of_another_batch_size_raises() -> None:
    # Uniforms of one row must not be spread over several.
    randomness = constant_round(0.5, 1, 1)
    with pytest.raises(ValueError, match="each of the round's 1 rows, got 3"):
        randomness.categorical(np.ones((3, 4)), RESAMPLE)
    with pytest.raises(ValueError, match="each of the round's 1 rows, got 3"):
        randomness.accept(np.ones((3, 1)), np.ones((3, 1)), ACCEPT)


@pytest.mark.parametrize("shape", [(1, 3), (1, 4, 3), (1, 3, 2), (3, 3)])
def test_uniforms_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`uniforms` must have shape \(B, 2 \* lookahead \+ 1, 3\) with lookahead 1"):
        UniformRandomness(np.full(shape, 0.5), 1)


def test_float32_uniforms_are_too_few_bits_for_float64_weights() -> None:
    randomness = constant_round(0.5, 1, 1, np.float32)
    with pytest.raises(ValueError, match="`uniforms` must be float64 for float64 weights, got float32"):
        randomness.categorical(np.ones((1, 4)), RESAMPLE)


def test_half_precision_weights_are_raised_to_float32() -> None:
    p, q = np.array([[0.3, 0.5]], np.float16), np.array([[0.5, 0.5]], np.float16)
    expected = constant_round(0.55, 1, 2).accept(p.astype(np.float32), q.astype(np.float32), ACCEPT)
    assert constant_round(0.55, 1, 2).accept(p, q, ACCEPT).tolist() == expected.tolist()
    # In float16 a running sum over 5000 ids of equal weight would stop growing at 2048.
    weights = np.ones((1, 5000), np.float16)
    drawn = constant_round(0.9, 1, 1).categorical(weights, RESAMPLE)
    assert drawn.tolist() == constant_round(0.9, 1, 1).categorical(weights.astype(np.float32), RESAMPLE).tolist()


@pytest.mark.parametrize("module", ["torch", "jax.numpy"])
def test_bfloat16_weights_are_raised_to_float32(module: str) -> None:
    xp = pytest.importorskip(module)
    weights = xp.asarray([[0.25, 0.5, 0.25]])
    drawn = constant_round(0.8, 1, 1).categorical(xp.asarray(weights, dtype=xp.bfloat16), RESAMPLE)
    assert to_host(drawn).tolist() == [2]


@pytest.mark.parametrize("dtype", [np.int64, np.bool, np.complex128, np.longdouble])
def test_weights_that_are_not_floats_of_at_most_64_bits_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="weights must be real floating-point numbers of at most 64 bits, got"):
        constant_round(0.5, 1, 1).categorical(np.ones((1, 3), dtype), RESAMPLE)


def test_mixed_dtypes_are_compared_in_the_wider_one() -> None:
    p, q = np.array([[0.1]], np.float64), np.array([[0.1]], np.float32)
    assert not constant_round(LARGEST[np.float64], 1, 1).accept(p, q, ACCEPT)[0, 0]
