"""`to_probs` against a float64 reference that sorts, in every namespace, and the checks of `Sampling`."""

import contextlib
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsampling._sampling import Sampling, to_probs

INF = math.inf
NAN = math.nan


class Law(NamedTuple):
    probs: np.ndarray
    ambiguous: np.ndarray  # ids so close to a threshold that rounding may decide


def reference(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Law:
    """The law of one row, in float64, by sorting, with every step spelled out."""
    x = np.asarray(logits, dtype=np.float64)
    ambiguous = np.zeros(x.size, dtype=bool)
    if not math.isfinite(x.max()):
        return Law(np.full(x.size, NAN), ambiguous)
    if temperature == 0:
        return Law((np.arange(x.size) == np.argmax(x)).astype(np.float64), ambiguous)
    with np.errstate(over="ignore"):
        probs = np.exp((x - x.max()) / temperature)
    probs /= math.fsum(probs)
    order = np.argsort(-x, kind="stable")
    if top_k is not None and top_k < x.size:
        probs[x < x[order[top_k - 1]]] = 0.0
        probs /= math.fsum(probs)
    if top_p is not None and top_p < 1:
        cumulated = np.cumsum(probs[order])
        # an id is kept while the ids strictly above it fall short of top_p
        first_of_ties = np.searchsorted(-x[order], -x[order], side="left")
        above = np.empty(x.size)
        above[order] = np.where(first_of_ties > 0, cumulated[first_of_ties - 1], 0.0)
        ambiguous |= np.abs(above - top_p) < 1e-5
        probs[above >= top_p] = 0.0
        probs /= math.fsum(probs)
    if min_p is not None:
        bound = min_p * probs.max()
        ambiguous |= (np.abs(probs - bound) < 1e-5 * bound) & (probs < probs.max())
        probs[probs < bound] = 0.0
        probs /= math.fsum(probs)
    ambiguous |= (probs > 0) & (probs < 1e-36)  # below what float32 holds
    return Law(probs, ambiguous)


def assert_law(got: np.ndarray, expected: Law, what: object = "") -> None:
    if np.isnan(expected.probs[0]):
        assert np.isnan(got).all(), what
        return
    assert np.isfinite(got).all(), what
    differ = (got > 0) != (expected.probs > 0)
    assert not (differ & ~expected.ambiguous).any(), f"{what}: other support at {np.flatnonzero(differ)[:10]}"
    if not differ.any():
        assert 0.5 * np.abs(got.astype(np.float64) - expected.probs).sum() <= 1e-5, what


def assert_batch(got: np.ndarray, logits: np.ndarray, sampling: Sampling, what: object = "") -> None:
    """Compare every row of ``(B, ..., V)`` with the reference under that row's own settings."""
    assert got.shape == logits.shape, what
    for b in range(logits.shape[0]):
        own = {
            name: value[b] if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(sampling).items()
            if not name.startswith("_")
        }
        size = logits.shape[-1]
        for row, x in zip(got[b].reshape(-1, size), logits[b].reshape(-1, size), strict=True):
            assert_law(row, reference(x, **own), (what, sampling))


def in_numpy(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    return to_probs(logits, sampling)


def in_strict(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    return np.asarray(to_probs(array_api_strict.asarray(logits), sampling)._array)


def in_strict_static(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    with array_api_strict.ArrayAPIStrictFlags(data_dependent_shapes=False):
        return in_strict(logits, sampling)


def in_torch(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return to_probs(torch.tensor(logits), sampling).numpy()


def in_torch_trace(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """As `torch.compile` would trace it, which must find no branch on data."""
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    compiled = torch.compile(to_probs, fullgraph=True, backend="eager")
    return compiled(torch.tensor(logits), sampling).numpy()


def in_jax(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    jax = pytest.importorskip("jax")
    with precision_of(jax, logits):
        return np.asarray(to_probs(jax.numpy.asarray(logits), sampling))


def in_jax_jit(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    jax = pytest.importorskip("jax")
    with precision_of(jax, logits):
        return np.asarray(jax.jit(to_probs, static_argnums=1)(jax.numpy.asarray(logits), sampling))


@contextlib.contextmanager
def precision_of(jax: Any, logits: np.ndarray) -> Iterator[None]:
    with jax.enable_x64(logits.dtype == np.float64):
        yield


WAYS = [in_numpy, in_strict, in_strict_static, in_torch, in_jax, in_jax_jit]
Way = Callable[[np.ndarray, Sampling], np.ndarray]
every_way = pytest.mark.parametrize("way", WAYS)


def laws(size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Logits of the shapes that make selection hard."""
    normal = rng.standard_normal(size)
    peaked = np.full(size, math.log(0.01 / max(size - 1, 1))) + 0.01 * normal
    peaked[size // 2] = math.log(0.99)
    masked = 3 * normal
    masked[rng.random(size) < 0.7] = -INF
    masked[size // 3] = 0.5
    return {
        "normal": 3 * normal,
        "flat": np.zeros(size),
        "nearly flat": 1e-3 * normal,
        "ties": np.round(2 * normal),
        "zipf": -1.1 * np.log(1.0 + rng.permutation(size)),
        "peaked": peaked,
        "masked": masked,
        "signed zeros": np.where(normal > 0, 0.0, -0.0),
        "far": 1e4 + 40 * normal,
    }


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.6, top_k=40),
    Sampling(top_p=0.9),
    Sampling(temperature=1.7, top_p=0.995),
    Sampling(min_p=0.05),
    Sampling(temperature=0.8, top_k=1000, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("size", [1, 7, 257, 5000])
@pytest.mark.parametrize("way", [in_numpy, in_strict, in_strict_static, in_torch, in_jax_jit])
def test_law_is_that_of_the_reference(way: Way, size: int) -> None:
    logits = np.stack(list(laws(size, np.random.default_rng(size)).values())).astype(np.float32)
    for sampling in SETTINGS:
        assert_batch(way(logits, sampling), logits, sampling, size)


@every_way
@pytest.mark.parametrize("name", ["normal", "nearly flat", "ties", "zipf", "peaked", "masked"])
def test_law_is_that_of_the_reference_at_large_vocabularies(way: Way, name: str) -> None:
    logits = laws(262_144, np.random.default_rng(3))[name].astype(np.float32)[None, :250_000]
    for sampling in (Sampling(top_p=0.9), Sampling(temperature=0.8, top_k=70_000, top_p=0.95, min_p=0.01)):
        assert_batch(way(logits, sampling), logits, sampling, name)


@every_way
def test_float64_is_kept_and_exact(way: Way) -> None:
    logits = np.stack(list(laws(3000, np.random.default_rng(5)).values()))
    for sampling in SETTINGS:
        got = way(logits, sampling)
        assert got.dtype == np.float64
        for row, x in zip(got, logits, strict=True):
            own = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            expected = reference(x, **own)
            if np.array_equal(row > 0, expected.probs > 0):
                assert np.abs(row - expected.probs).sum() <= 1e-11
            else:
                assert_law(row, expected, sampling)


MIXED = Sampling(
    temperature=[0.0, 0.5, None, 1.5],
    top_k=[3, None, 7, 2],
    top_p=[0.5, 0.9, None, 1.0],
    min_p=[0.1, None, 0.0, 0.2],
)


@every_way
@pytest.mark.parametrize("size", [40, 3000])
def test_filter_of_a_batch_equals_the_filter_of_each_row(way: Way, size: int) -> None:  # fault #121, #99
    logits = np.random.default_rng(1).integers(-6, 6, (4, 3, size)).astype(np.float32)
    got = way(logits, MIXED)
    assert_batch(got, logits, MIXED)
    if way in (in_numpy, in_torch):  # in JAX each would be a trace
        for b in range(4):
            names = ("temperature", "top_k", "top_p", "min_p")
            own = Sampling(**{name: getattr(MIXED, name)[b] for name in names})
            for t in range(3):
                np.testing.assert_allclose(got[b, t], way(logits[b, t], own), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.slow
def test_torch_trace_gives_the_law_without_looking_at_data() -> None:
    logits = np.stack(list(laws(3000, np.random.default_rng(5)).values()))[:4].astype(np.float32)
    assert_batch(in_torch_trace(logits, MIXED), logits, MIXED)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_inside_a_trace_gives_the_law(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    logits = np.stack(list(laws(3000, np.random.default_rng(5)).values())).astype(dtype)
    for sampling in SETTINGS:
        assert_batch(in_torch(logits, sampling), logits, sampling)


def test_jax_vmap_maps_over_rows() -> None:
    jax = pytest.importorskip("jax")
    logits = np.random.default_rng(1).integers(-6, 6, (4, 3, 40)).astype(np.float32)
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01)
    got = jax.vmap(jax.vmap(lambda x: to_probs(x, sampling)))(logits)
    assert_batch(np.asarray(got), logits, sampling)


@every_way
def test_greedy_is_one_at_the_lowest_of_the_highest_ids(way: Way) -> None:  # fault #6, #34
    logits = np.full((2, 10), -1.0, dtype=np.float32)
    logits[0, [3, 7]] = 2.5
    logits[1, 9] = 1e30
    expected = np.zeros((2, 10))
    expected[0, 3] = expected[1, 9] = 1.0
    np.testing.assert_array_equal(way(logits, Sampling(temperature=0)), expected)
    mixed = way(logits, Sampling(temperature=[0.0, 2.0]))
    np.testing.assert_array_equal(mixed[0], expected[0])
    with_filters = Sampling(temperature=0.0, top_k=5, top_p=0.1, min_p=1.0)
    np.testing.assert_array_equal(way(logits, with_filters), expected)


@every_way
def test_signed_zeros_tie(way: Way) -> None:
    logits = np.asarray([-1.0, -0.0, 0.0, -0.0], dtype=np.float32)
    np.testing.assert_array_equal(way(logits, Sampling(temperature=0.0)), [0, 1, 0, 0])
    for sampling in (Sampling(top_k=1), Sampling(top_p=0.1), Sampling(min_p=1.0)):
        np.testing.assert_allclose(way(logits, sampling), [0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


@every_way
def test_temperature_gives_the_published_law(way: Way) -> None:  # fault #7
    logits = np.asarray([2.0, 1.0, 0.0], dtype=np.float32)
    np.testing.assert_allclose(way(logits, Sampling(temperature=0.5)), [0.8668, 0.1173, 0.0159], atol=5e-5)
    np.testing.assert_allclose(way(logits, Sampling()), [0.6652, 0.2447, 0.0900], atol=5e-5)


@every_way
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-38, 1e-45, 1e-300, 5e-324, None, 1e30, 1e300])
def test_any_temperature_gives_finite_probabilities(way: Way, temperature: float | None) -> None:  # fault #54
    logits = np.asarray([[1.0, 3.0, 3.0, -INF, 2.9999998], [-1e30, 0.0, 1e30, 5.0, 1e30]], dtype=np.float32)
    got = way(logits, Sampling(temperature=temperature))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got.sum(axis=-1), 1.0, rtol=1e-6)
    assert got[0, 3] == 0.0
    if temperature == 0.0:
        np.testing.assert_array_equal(got, [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]])
    elif temperature is None:
        np.testing.assert_array_equal(got, way(logits, Sampling()))
    elif temperature < 1:
        np.testing.assert_array_equal(got[1], [0, 0, 0.5, 0, 0.5])


def test_tiny_temperature_of_one_row_is_raised_for_that_row_only() -> None:
    logits = np.asarray([[1.0, 3.0], [1.0, 3.0]], dtype=np.float32)
    got = to_probs(logits, Sampling(temperature=[1e-300, 1.0]))
    np.testing.assert_allclose(got, [[0, 1], reference(logits[1]).probs], rtol=1e-6)


def test_temperature_left_out_is_one_whatever_else_is_set() -> None:  # fault #106
    assert Sampling(top_k=50).temperature == 1.0
    np.testing.assert_allclose(to_probs(np.zeros(100), Sampling(top_k=50)), 0.01)


@every_way
def test_min_p_gives_the_published_law_at_every_position(way: Way) -> None:  # fault #107
    logits = np.tile(np.log(np.asarray([0.6, 0.3, 0.08, 0.02], dtype=np.float32)), (2, 3, 1))
    got = way(logits, Sampling(min_p=0.2))
    np.testing.assert_allclose(got, np.broadcast_to([2 / 3, 1 / 3, 0, 0], got.shape), rtol=1e-6)


@every_way
def test_ties_with_the_last_kept_are_kept(way: Way) -> None:
    logits = np.log(np.asarray([0.125, 0.5, 0.125, 0.125, 0.125], dtype=np.float32))
    every = [0.125, 0.5, 0.125, 0.125, 0.125]
    np.testing.assert_allclose(way(logits, Sampling(top_k=2)), every, rtol=1e-6)
    np.testing.assert_allclose(way(logits, Sampling(top_p=0.51)), every, rtol=1e-6)
    np.testing.assert_allclose(way(logits, Sampling(min_p=0.25 - 1e-6)), every, rtol=1e-6)
    np.testing.assert_allclose(way(logits, Sampling(top_k=1)), [0, 1, 0, 0, 0])


@every_way
def test_top_p_stops_where_the_sum_is_reached_exactly(way: Way) -> None:
    logits = np.asarray([0.0, 1.0, 0.0], dtype=np.float32) * np.float32(math.log(2))
    np.testing.assert_array_equal(way(logits, Sampling(top_p=0.5)), [0, 1, 0])


@every_way
def test_each_filter_sees_the_law_renormalised_by_the_one_before(way: Way) -> None:
    # Of (.4, .3, .2, .1) top-k 2 leaves (.57, .43); 0.55 of that is the first id alone, of the whole it would be two.
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    np.testing.assert_array_equal(way(logits, Sampling(top_k=2, top_p=0.55)), [1, 0, 0, 0])
    np.testing.assert_allclose(way(logits, Sampling(top_p=0.55)), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)


@every_way
def test_settings_that_remove_nothing_are_off(way: Way) -> None:
    logits = np.asarray([30.0, 0.0, -30.0, -50.0], dtype=np.float32)  # the tail is lost in any float32 sum
    off = Sampling(temperature=1, top_k=4, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(way(logits, off), way(logits, Sampling()))
    assert (way(logits, off) > 0).all()
    batch = np.stack([logits, logits])
    got = way(batch, Sampling(top_k=[10, 1], top_p=[1.0, 0.5]))
    np.testing.assert_array_equal(got[0], way(logits, Sampling()))
    np.testing.assert_array_equal(got[1], [1, 0, 0, 0])


@every_way
@pytest.mark.parametrize("size", [6, 5000])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=2, top_p=0.9), Sampling(min_p=0.5), Sampling(top_p=0.5)]
)
def test_a_row_with_no_law_is_nan_throughout(way: Way, size: int, sampling: Sampling) -> None:  # fault #62
    logits = np.zeros((6, size), dtype=np.float32)
    logits[0, 3] = NAN
    logits[1, 2] = INF
    logits[2] = -INF
    logits[3, [0, 5]] = [-INF, NAN]
    logits[4, [1, 2]] = [INF, NAN]
    logits[5, 1:] = -INF
    for chosen in (
        sampling,
        Sampling(temperature=0.0),
        Sampling(temperature=[0.0, 1.0, 0.0, 1.0, 0.0, 1.0], top_p=0.9),
    ):
        got = way(logits, chosen)
        assert np.isnan(got[:5]).all()
        np.testing.assert_array_equal(got[5], np.arange(size) == 0)


@pytest.mark.parametrize("size", [5, 256, 5000])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=2), Sampling(temperature=0.5, top_p=0.5, min_p=0.1)])
def test_a_row_that_the_program_itself_makes_nan_is_nan_throughout(size: int, sampling: Sampling) -> None:
    # XLA compiles the exponential of such a constant into whatever the registers hold.
    jax = pytest.importorskip("jax")

    def law(logits: Any) -> Any:
        is_bad = jax.numpy.arange(3)[:, None] == 1
        return to_probs(jax.numpy.where(is_bad, jax.numpy.nan, logits), sampling)

    got = np.asarray(jax.jit(law)(np.ones((3, size), np.float32)))
    assert np.isnan(got).all(axis=1).tolist() == [False, True, False]
    assert np.isnan(got).any(axis=1).tolist() == [False, True, False]


@every_way
def test_input_is_not_modified(way: Way) -> None:  # fault #154
    logits = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(np.float32)
    before = logits.copy()
    processed = way(logits, Sampling(temperature=0.5, top_k=10, top_p=0.9, min_p=0.1))
    np.testing.assert_array_equal(logits, before)
    assert not np.allclose(processed, way(logits, Sampling()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_raised_to_float32_first(dtype: str) -> None:  # fault #62
    values = [65504.0, 65472.0, -INF, 1.0] if dtype == "float16" else [65280.0, 65279.0, -INF, 1.0]
    half: list[Any] = []
    if dtype == "float16":
        half.append(np.asarray(values, dtype=np.float16))
    with contextlib.suppress(ImportError):
        import ml_dtypes

        half.append(np.asarray(values, dtype=getattr(ml_dtypes, dtype, np.float16)))
    with contextlib.suppress(ImportError):
        import torch

        half.append(torch.tensor(values, dtype=getattr(torch, dtype)))
    with contextlib.suppress(ImportError):
        import jax.numpy as jnp

        half.append(jnp.asarray(values, dtype=dtype))
    if not half:
        pytest.skip(f"nothing that is installed has {dtype}")
    for logits in half:
        for sampling in (Sampling(temperature=20.0), Sampling(temperature=20.0, top_k=3, top_p=0.99)):
            got = to_probs(logits, sampling)
            assert str(got.dtype).removeprefix("torch.") == "float32"
            raised = [float(x) for x in logits]
            own = {"temperature": 20.0, "top_k": sampling.top_k, "top_p": sampling.top_p}
            assert_law(np.asarray(got), reference(np.asarray(raised), **own))


def test_layout_of_the_input_does_not_matter() -> None:
    # NumPy sums along a strided axis one by one: over a flat law that alone is an error of 1e-3. (Not quite flat, for
    # a sum of ones is exact.)
    logits = np.full((3, 250_000), -0.7, dtype=np.float32)
    logits[:, 0] = 0.0
    got = to_probs(np.asfortranarray(logits), Sampling())
    np.testing.assert_array_equal(got, to_probs(logits, Sampling()))
    assert_law(got[0], reference(logits[0]))


def test_one_id_with_nearly_all_mass_keeps_only_its_share() -> None:
    size = 250_000
    probs = np.full(size, 0.01 / (size - 1))
    probs[77] = 0.99
    logits = (np.log(probs) + 1e-3 * np.random.default_rng(0).standard_normal(size)).astype(np.float32)
    expected = reference(logits, top_p=0.995)
    for way in WAYS:
        got = way(logits, Sampling(top_p=0.995))
        wrong = int(((got > 0) != (expected.probs > 0)).sum())
        assert wrong * 4e-8 < 1e-6, (way.__name__, wrong)  # each id of the tail holds 4e-8
        assert_law(got, expected, way.__name__)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex64])
def test_logits_that_are_not_real_floating_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"`logits` must be float16, bfloat16, float32 or float64, got "):
        to_probs(np.zeros((1, 3), dtype=dtype), Sampling())


@pytest.mark.parametrize("shape", [(3,), (1, 5)])
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_settings_for_no_rows_are_refused_where_there_are_rows(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`logits` must have shape \(B, ..., V\) with B = 0, .* got \("):
        to_probs(np.zeros(shape), Sampling(**{name: []}))


@pytest.mark.parametrize("shape", [(3,), (3, 5), (1, 5)])
def test_settings_for_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`logits` must have shape \(B, ..., V\) with B = 2, .* got \("):
        to_probs(np.zeros(shape), Sampling(top_k=[1, 2]))


@every_way
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3, 0), (0, 0)])
def test_logits_without_a_vocabulary_are_refused(way: Way, shape: tuple[int, ...]) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_k=2, top_p=0.5)):
        with pytest.raises(ValueError, match=r"`logits` must have shape \(..., V\) with V at least 1, got \("):
            way(np.zeros(shape, dtype=np.float32), sampling)


def test_no_rows_give_no_rows() -> None:
    for sampling in (Sampling(top_k=2, top_p=0.5), Sampling(temperature=[], top_k=[])):
        assert to_probs(np.zeros((0, 5)), sampling).shape == (0, 5)


# One strategy for rows with ties and masks, on a grid that float32 holds exactly.
rows = st.lists(st.one_of(st.integers(-24, 24).map(lambda n: n / 4), st.just(-INF)), min_size=1, max_size=30)
some = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.just(0.0), st.floats(0.05, 10.0), st.none()),
        "top_k": st.one_of(st.integers(1, 40), st.none()),
        "top_p": st.one_of(st.floats(1e-3, 1.0), st.none()),
        "min_p": st.one_of(st.floats(0.0, 1.0), st.none()),
    },
)


@settings(max_examples=300, deadline=None)
@given(rows, some)
def test_any_row_under_any_settings_has_the_law_of_the_reference(row: list[float], chosen: dict[str, Any]) -> None:
    logits = np.asarray(row, dtype=np.float32)
    own = {"temperature": 1.0, **chosen}
    own["temperature"] = 1.0 if own["temperature"] is None else own["temperature"]
    assert_law(to_probs(logits, Sampling(**chosen)), reference(logits, **own))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_batch_is_its_rows_one_by_one(data: st.DataObject) -> None:
    batch, positions, size = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)))
    grid = st.lists(st.integers(-12, 12), min_size=batch * positions * size, max_size=batch * positions * size)
    logits = (np.asarray(data.draw(grid), dtype=np.float32) / 2).reshape(batch, positions, size)
    values = {
        "temperature": st.one_of(st.just(0.0), st.floats(0.05, 10.0), st.none()),
        "top_k": st.one_of(st.integers(1, 10), st.none()),
        "top_p": st.one_of(st.floats(1e-3, 1.0), st.none()),
        "min_p": st.one_of(st.floats(0.0, 1.0), st.none()),
    }
    per_row = {name: data.draw(st.lists(one, min_size=batch, max_size=batch)) for name, one in values.items()}
    for name in data.draw(st.sets(st.sampled_from(sorted(values)))):
        per_row[name] = per_row[name][0]
    sampling = Sampling(**per_row)
    assert_batch(to_probs(logits, sampling), logits, sampling)


@settings(max_examples=100, deadline=None)
@given(rows, some, st.randoms(use_true_random=False))
def test_the_order_of_ids_does_not_matter(row: list[float], chosen: dict[str, Any], random: Any) -> None:
    if max(row) == -INF or chosen.get("temperature") == 0.0:
        return
    order = list(range(len(row)))
    random.shuffle(order)
    logits = np.asarray(row, dtype=np.float64)
    sampling = Sampling(**chosen)
    np.testing.assert_allclose(to_probs(logits[order], sampling), to_probs(logits, sampling)[order], rtol=1e-12)


class TestSampling:
    def test_defaults_are_off(self) -> None:
        assert Sampling() == Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)
        assert not Sampling().is_greedy

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            (
                "temperature",
                -0.1,
                ValueError,
                "`temperature` must be finite and at least 0 (which is greedy), got -0.1",
            ),
            ("temperature", NAN, ValueError, "got nan"),
            ("temperature", INF, ValueError, "got inf"),
            ("temperature", [1.0, -1], ValueError, "got -1 in row 1"),
            (
                "temperature",
                "1.0",
                TypeError,
                "`temperature` must be a real number, None, or a sequence of these, got '1.0'",
            ),
            ("temperature", True, TypeError, "got True"),
            ("temperature", 1j, TypeError, "got 1j"),
            ("temperature", [[1.0]], TypeError, "got [1.0] in row 0"),
            ("top_k", 0, ValueError, "`top_k` must be at least 1 (None is off), got 0"),
            ("top_k", -1, ValueError, "got -1"),
            ("top_k", 2.0, TypeError, "`top_k` must be an integer, None, or a sequence of these, got 2.0"),
            ("top_k", False, TypeError, "got False"),
            ("top_k", [1, None, 0], ValueError, "got 0 in row 2"),
            ("top_k", np.asarray([True]), TypeError, "got True in row 0"),
            ("top_p", 0.0, ValueError, "`top_p` must be above 0 and at most 1 (None is off), got 0.0"),
            ("top_p", 1.1, ValueError, "got 1.1"),
            ("top_p", NAN, ValueError, "got nan"),
            ("top_p", b"1", TypeError, "got b'1'"),
            ("min_p", -0.1, ValueError, "`min_p` must be from 0 to 1 (None is off), got -0.1"),
            ("min_p", 1.5, ValueError, "got 1.5"),
            ("min_p", NAN, ValueError, "got nan"),
        ],
    )
    def test_values_out_of_range_are_refused(self, name: str, value: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error) as raised:
            Sampling(**{name: value})
        assert message in str(raised.value)
        assert f"`{name}`" in str(raised.value)

    def test_settings_for_different_numbers_of_rows_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must all be for the same rows, got \{'temperature': 2, 'top_k': 3\}"):
            Sampling(temperature=[1.0, 1.0], top_k=[1, 2, 3], top_p=0.5)

    def test_positional_settings_are_refused(self) -> None:
        with pytest.raises(TypeError):
            Sampling(0.5)  # type: ignore[misc]

    def test_arrays_become_tuples_that_hash(self) -> None:
        by_array = Sampling(temperature=np.asarray([0.0, 0.5], dtype=np.float32), top_k=np.asarray([3, 4]))
        assert by_array == Sampling(temperature=(0.0, 0.5), top_k=[3, 4])
        assert hash(by_array) == hash(Sampling(temperature=[0, 0.5], top_k=(3, 4)))
        assert by_array != Sampling(temperature=[0, 0.5], top_k=(3, 5))
        assert all(type(value) is int for value in by_array.top_k)  # type: ignore[union-attr]
        assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)) == Sampling(temperature=0.5, top_k=3)
        assert Sampling(top_k=np.asarray([None, 3])).top_k == (None, 3)

    def test_temperature_none_is_one(self) -> None:
        assert Sampling(temperature=None) == Sampling()
        assert Sampling(temperature=[None, 0.0]).temperature == (1.0, 0.0)

    def test_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Sampling().temperature = 0.5  # type: ignore[misc]

    def test_repr_shows_the_settings_only(self) -> None:
        assert repr(Sampling(top_k=[1, None])) == "Sampling(temperature=1.0, top_k=(1, None), top_p=None, min_p=None)"

    def test_survives_pickle_and_replace(self) -> None:
        sampling = Sampling(temperature=[0.0, 0.5], top_p=0.9)
        again = pickle.loads(pickle.dumps(sampling))
        assert again == sampling
        logits = np.random.default_rng(0).standard_normal((2, 9))
        np.testing.assert_array_equal(to_probs(logits, again), to_probs(logits, sampling))
        changed = dataclasses.replace(sampling, temperature=1.0)
        np.testing.assert_array_equal(to_probs(logits, changed), to_probs(logits, Sampling(top_p=0.9)))

    def test_is_greedy_only_if_every_row_is(self) -> None:
        assert Sampling(temperature=0).is_greedy
        assert Sampling(temperature=[0, 0], top_k=[1, 2]).is_greedy
        assert not Sampling(temperature=[0, 1]).is_greedy

    def test_rows_picks_per_row_values_and_leaves_the_others(self) -> None:
        sampling = Sampling(temperature=[0.0, 0.5, 1.0], top_k=4, top_p=[None, 0.5, 0.9])
        assert sampling.rows([2, 0]) == Sampling(temperature=[1.0, 0.0], top_k=4, top_p=[0.9, None])
        assert sampling.rows(np.asarray([False, True, False])) == Sampling(temperature=[0.5], top_k=4, top_p=[0.5])
        assert sampling.rows(slice(1, None)) == sampling.rows((1, 2))
        assert sampling.rows([]) == Sampling(temperature=[], top_k=4, top_p=[])
        with pytest.raises(IndexError):
            sampling.rows([3])
        scalar = Sampling(top_k=4)
        assert scalar.rows([5, 6]) is scalar

    def test_check_rows_wants_one_value_or_one_per_row(self) -> None:
        Sampling(top_k=3).check_rows(7)
        Sampling(top_k=[3, None]).check_rows(2)
        with pytest.raises(ValueError, match=r"one per row of the batch \(3\), got values for 2 rows"):
            Sampling(top_k=[3, None]).check_rows(3)
        with pytest.raises(ValueError, match=r"one per row of the batch \(1\), got values for 0 rows"):
            Sampling(temperature=[]).check_rows(1)


def test_top_k_beyond_any_vocabulary_is_off_for_its_row() -> None:
    logits = np.log([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    got = to_probs(logits, Sampling(top_k=[2**63, 1]))
    np.testing.assert_allclose(got, [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])


def test_a_temperature_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="`temperature` must be finite"):
        Sampling(temperature=10**400)
