"""Each way of finding the lowest kept logit gives the answer of the others."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specsampling import CapabilityError, Sampling, _selection, to_probs
from specsampling._selection import lowest_kept

INF = math.inf


def by_hand(x: np.ndarray, temperature: float, top_k: float, top_p: float) -> float:
    """The lowest kept logit of one row, in float64."""
    ordered = np.sort(x.astype(np.float64))[::-1]
    lowest = ordered[min(int(top_k), x.size) - 1] if top_k < x.size else -INF
    if top_p < 1:
        ordered = ordered[ordered >= lowest]
        mass = np.cumsum(np.exp((ordered - ordered[0]) / temperature))
        lowest = ordered[np.searchsorted(mass, top_p * mass[-1])]
    return float(lowest)


def setting(values: Any, row: int, off: float) -> Any:
    if values is None:
        return off
    return values[row] if isinstance(values, np.ndarray) else values


def in_numpy(which: str) -> Callable[..., np.ndarray]:
    def way(x: np.ndarray, temperature: Any, top_k: Any, top_p: Any) -> np.ndarray:
        w, peak = weighed(x, temperature)
        if which == "_by_sorting":
            return _selection._by_sorting(x, peak, temperature, top_k, top_p)
        return getattr(_selection, which)(x, w, peak, temperature, top_k, top_p)

    way.__name__ = f"numpy{which}"
    return way


def weighed(x: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
    peak = x.max(axis=-1, keepdims=True)
    scale = 1.0 if temperature is None else np.asarray(temperature, dtype=x.dtype)
    scale = scale.reshape(-1, *(1,) * (x.ndim - 1)) if isinstance(scale, np.ndarray) else scale
    with np.errstate(all="ignore"):
        return np.exp((x - peak) / scale), peak


def torch_growing_top(x: np.ndarray, temperature: Any, top_k: Any, top_p: Any) -> np.ndarray:
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(y) for y in (x, *weighed(x, temperature))]
    return _selection._by_growing_top(*tensors, temperature, top_k, top_p).numpy()


def torch_bisection(x: np.ndarray, temperature: Any, top_k: Any, top_p: Any) -> np.ndarray:
    torch = pytest.importorskip("torch")
    logits, weights, _ = (torch.tensor(y) for y in (x, *weighed(x, temperature)))
    settings = _selection._counts(top_k, logits), _selection.column(top_p, logits)
    return _selection._bisect(logits, weights, *settings).numpy()


def jax_bisection(x: np.ndarray, temperature: Any, top_k: Any, top_p: Any) -> np.ndarray:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(x.dtype == np.float64):
        arrays = [jax.numpy.asarray(y) for y in (x, *weighed(x, temperature))]
        return np.asarray(lowest_kept(*arrays, temperature, top_k, top_p))


every_way = pytest.mark.parametrize(
    "way",
    [in_numpy("_by_sorting"), in_numpy("_by_partition"), torch_growing_top, torch_bisection, jax_bisection],
    ids=lambda way: way.__name__,
)

PER_ROW = (
    np.asarray([0.5, 1.0, 3.0, 1.0]),
    np.asarray([3, 1_000_000, 1500, 20]),
    np.asarray([0.5, 0.9, 1.0, 0.999]),
)


@every_way
@pytest.mark.parametrize("size", [3, 40, 700, 5000, 40_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_answer_is_that_of_a_float64_sort(way: Callable[..., np.ndarray], size: int, dtype: Any) -> None:
    rng = np.random.default_rng(size)
    normal = rng.standard_normal((4, size))
    masked = np.where(rng.random((4, size)) < 0.8, -INF, 3 * normal)
    masked[:, 0] = 0.0
    for x in (3 * normal, 1e-2 * normal, np.round(3 * normal), masked, np.zeros((4, size))):
        logits = x.astype(dtype)
        for temperature, top_k, top_p in ((None, 5, None), (0.7, None, 0.9), (None, 900, 0.97), PER_ROW):
            got = way(logits, temperature, top_k, top_p)
            assert got.shape == (4, 1)
            assert got.dtype == dtype
            for row in range(4):
                own = setting(temperature, row, 1.0), setting(top_k, row, INF), setting(top_p, row, 1.0)
                expected = by_hand(logits[row], *own)
                if expected == -INF or got[row, 0] == -INF:  # nothing is dropped, whichever is said
                    assert (logits[row] >= got[row, 0]).all() == (logits[row] >= expected).all()
                    continue
                assert got[row, 0] in logits[row]
                if got[row, 0] != expected:  # the sums meet the share to rounding, where ids are many and alike
                    between = np.abs(mass_above(logits[row], got[row, 0], *own) - own[2])
                    assert own[2] < 1
                    assert between < 1e-6


def mass_above(x: np.ndarray, edge: float, temperature: float, top_k: float, top_p: float) -> float:
    """The share of the ids strictly above the higher of two neighbouring edges is `top_p` when both are right."""
    y = x.astype(np.float64)
    y = y[y >= by_hand(x, temperature, top_k, 1.0)]
    mass = np.exp((y - y.max()) / temperature)
    lower = min(edge, by_hand(x, temperature, top_k, top_p))
    return float(mass[y > lower].sum() / mass.sum())


@every_way
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_normal_number_can_be_the_edge(way: Callable[..., np.ndarray], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    exponents = rng.uniform(-120, 120, (2, 3000)) if dtype == np.float32 else rng.uniform(-1000, 1000, (2, 3000))
    logits = (rng.choice([-1.0, 1.0], exponents.shape) * 2.0**exponents).astype(dtype)
    for k in (1, 7, 1499, 1500, 1501, 2999):
        expected = np.sort(logits, axis=-1)[:, ::-1][:, k - 1 : k]
        np.testing.assert_array_equal(way(logits, None, k, None), expected)


@every_way
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_neighbouring_numbers_are_told_apart(way: Callable[..., np.ndarray], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    logits = (1 - np.finfo(dtype).eps * rng.permuted(np.arange(-1500.0, 1500.0))).astype(dtype)[None]
    for k in (1, 1000, 1500, 1501, 2999):
        np.testing.assert_array_equal(way(logits, None, k, None)[0, 0], np.sort(logits[0])[-k])


@every_way
def test_zeros_of_either_sign_are_one_edge(way: Callable[..., np.ndarray]) -> None:
    logits = np.asarray([[1.0, -0.0, 0.0, -1.0], [-0.0, -0.0, -1.0, -2.0]], dtype=np.float32)
    np.testing.assert_array_equal(way(logits, None, 2, None), [[0.0], [0.0]])
    np.testing.assert_array_equal(way(logits, None, None, 0.6), [[0.0], [0.0]])


@every_way
def test_rows_without_a_law_come_through(way: Callable[..., np.ndarray]) -> None:
    logits = np.zeros((4, 3000), dtype=np.float32)
    logits[0, 1] = math.nan
    logits[1, 2] = INF
    logits[2] = -INF
    logits[3, 5] = 1.0
    with np.errstate(all="ignore"):
        got = way(logits, None, 1, 0.5)
    assert got[3, 0] == 1.0


@every_way
def test_leading_axes_share_the_settings_of_their_row(way: Callable[..., np.ndarray]) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(np.float32)
    temperature, top_k, top_p = np.asarray([1.0, 0.2]), np.asarray([4, 50]), np.asarray([1.0, 0.8])
    got = way(logits, temperature, top_k, top_p)
    for b in range(2):
        for t in range(3):
            assert got[b, t, 0] == by_hand(logits[b, t], temperature[b], top_k[b], top_p[b])


def test_jax_compiles_a_search_once(monkeypatch):
    jax = pytest.importorskip("jax")
    traces = []
    search = _selection._bisect
    monkeypatch.setattr(_selection, "_bisect", lambda *arguments: traces.append(1) or search(*arguments))
    _selection._compiled_bisect.cache_clear()
    logits = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32))
    for top_k, top_p in (([2, 3], [0.5, 0.7]), ([4, 1], [0.9, 0.2])):  # outside of a trace, with other numbers
        probs = np.asarray(to_probs(logits, Sampling(top_k=top_k, top_p=top_p)))
        expected = to_probs(np.asarray(logits), Sampling(top_k=top_k, top_p=top_p))
        np.testing.assert_allclose(probs, expected, atol=1e-6)
    _selection._compiled_bisect.cache_clear()
    assert len(traces) == 1


def test_torch_on_the_cpu_shares_numpys_way() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((3, 4000)).astype(np.float32)
    w, peak = weighed(x, None)
    logits = torch.tensor(x, requires_grad=True)
    got = lowest_kept(logits, torch.exp(logits - torch.tensor(peak)), torch.tensor(peak), None, 70, 0.9)
    np.testing.assert_array_equal(got.numpy(), lowest_kept(x, w, peak, None, 70, 0.9))


def test_torch_off_the_cpu_never_waits_for_top_k() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.empty((2, 4000), device="meta")  # holds no values to wait for
    got = lowest_kept(logits, logits, logits[..., :1], None, 50, None)
    assert got.shape == (2, 1)
    assert got.device.type == "meta"


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("way", ["make_fx", "vmap"])
def test_thresholds_are_no_constants_of_what_torch_traces_or_maps(way, settings):
    torch = pytest.importorskip("torch")
    logits = torch.from_numpy(np.random.default_rng(5).normal(scale=3, size=(3, 4, 4096)))
    sampling = Sampling(**settings)

    def law(x):
        return to_probs(x, sampling)

    if way == "vmap":
        got = torch.func.vmap(law)(logits)
    else:  # traced on the first block
        got = torch.stack([*map(torch.fx.experimental.proxy_tensor.make_fx(law)(logits[0]), logits)])
    expected = torch.stack([law(x) for x in logits])
    assert torch.equal(got > 0, expected > 0)
    assert float((got - expected).abs().sum(-1).max()) < 1e-12


@pytest.mark.filterwarnings("ignore")  # PyTorch's own about tracing; its classes cannot be named without it
@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.3}], ids=str)
def test_filters_are_refused_where_torch_cannot_trace_them(settings):
    torch = pytest.importorskip("torch")
    with pytest.raises(CapabilityError, match=r"cannot be traced by `torch.jit.trace`"):
        torch.jit.trace(lambda x: to_probs(x, Sampling(**settings)), torch.zeros(2, 4096), check_trace=False)
