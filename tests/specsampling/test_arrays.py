import subprocess
import sys
import warnings

import numpy as np
import pytest

from specsampling import _numpy
from specsampling._arrays import (
    device,
    fetch,
    is_host,
    marker,
    move,
    namespace,
    pad_last,
    pick,
    take_along_axis,
    take_rows,
    to_host,
    workable,
)


def test_gathering_is_the_same_in_every_framework(framework):
    rng = np.random.default_rng(0)
    x, ids, index = rng.random((3, 4, 5)), rng.integers(0, 5, (3, 4)), rng.integers(0, 4, 3)
    for integer in (np.int32, np.int64):
        given = [framework.asarray(a) for a in (x, ids.astype(integer), index.astype(integer))]

        @framework.compile
        def gather(x, ids, index):
            return (
                pick(x, ids),
                pick(x[:, :2, :], ids[:, :2]),
                take_rows(x, index),
                take_along_axis(x[:, :, 0], index[:, None], 1),
                take_along_axis(x, ids[:, :, None], -1),
                take_along_axis(x, index[:, None, None], 1),
                pad_last(x, 7),
                pad_last(x, 5),
            )

        rows = np.arange(3)
        expected = [
            x[rows[:, None], np.arange(4), ids],
            x[rows[:, None], np.arange(2), ids[:, :2]],
            x[rows, index],
            x[rows, index, 0][:, None],
            np.take_along_axis(x, ids[:, :, None], -1),
            np.take_along_axis(x, index[:, None, None], 1),
            np.concatenate([x, np.zeros((3, 4, 2))], axis=-1),
            x,
        ]
        for found, wanted in zip(gather(*given), expected, strict=True):
            assert type(found) is type(given[0])
            assert np.asarray(found).tolist() == wanted.tolist()


def test_namespace_of_numpy_arrays_is_numpy_and_of_two_kinds_is_an_error():
    strict = pytest.importorskip("array_api_strict")
    assert namespace(np.zeros(1), np.zeros(2)) is _numpy
    assert namespace(strict.zeros(1)) is strict
    with pytest.raises(TypeError, match="Multiple namespaces"):
        namespace(np.zeros(1), strict.zeros(1))


def test_subclass_of_numpys_arrays_has_a_namespace_too(tmp_path):
    array = np.memmap(tmp_path / "array", dtype=np.float64, shape=(2, 3), mode="w+")
    assert namespace(array).sum(array) == 0
    assert is_host(array)


def test_device_is_named_only_where_constants_need_one():
    assert device(np.zeros(1)) is None
    strict = pytest.importorskip("array_api_strict")
    assert device(strict.zeros(1, device=strict.Device("device1"))) == strict.Device("device1")


def test_device_of_jax_and_torch():
    torch = pytest.importorskip("torch")
    assert device(torch.zeros(1)) == torch.device("cpu")


def test_jax_places_its_constants_itself():
    jax = pytest.importorskip("jax")
    assert device(jax.numpy.zeros(1)) is None


HOSTS = {
    "numpy": lambda: np.asarray,
    "strict": lambda: pytest.importorskip("array_api_strict").asarray,
    "torch": lambda: pytest.importorskip("torch").asarray,
    "jax": lambda: pytest.importorskip("jax").numpy.asarray,
}


@pytest.mark.parametrize("there", HOSTS)
@pytest.mark.parametrize("here", HOSTS)
def test_arrays_cross_between_frameworks_with_their_numbers_and_dtype(here, there):  # fault #141
    source, like = HOSTS[here](), HOSTS[there]()(np.zeros(1, np.float32))
    for array in (np.array([[1, -2], [3, 4]], np.int32), np.array([0.5, 1e-40], np.float32), np.array([True, False])):
        moved = move(source(array), like)
        assert type(moved) is type(like)
        assert device(moved) == device(like)
        assert to_host(moved).dtype == array.dtype
        assert to_host(moved).tolist() == array.tolist()
    assert type(move(source(array), None)) is np.ndarray


@pytest.mark.parametrize("there", HOSTS)
def test_views_and_read_only_memory_cross_as_well(there):
    like = HOSTS[there]()(np.zeros(1, np.float32))
    read_only = np.arange(6, dtype=np.int32).reshape(2, 3)
    read_only.flags.writeable = False
    for array in (read_only, read_only.T, np.arange(6, dtype=np.int32)[::-1], np.broadcast_to(np.int32(3), (4,))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns only the first time
            assert to_host(move(array, like)).tolist() == array.tolist()


@pytest.mark.parametrize("there", HOSTS)
def test_array_of_its_own_kind_stays_where_it_is(there):
    array = HOSTS[there]()(np.zeros(3, np.float32))
    assert move(array, array) is array


SMALL_ARRAYS = [
    np.array([[1, -2], [3, 4]], np.int32),
    np.array([[2**40], [5]]),
    np.array([True, False]),
    np.array([0.5, np.nan], np.float32),
    np.array([[1 / 3, np.inf], [0.0, -0.0]]),
    np.zeros((2, 0), np.float32),
    np.array(7, np.int32),
]


@pytest.mark.parametrize("there", [[name] for name in HOSTS] + [["torch", "numpy"]], ids="+".join)
def test_small_arrays_are_fetched_with_their_numbers_shapes_and_dtypes(there):
    arrays = [HOSTS[there[i % len(there)]]()(x) for i, x in enumerate(SMALL_ARRAYS)]
    for x, expected in zip(fetch(arrays), map(to_host, arrays), strict=True):
        assert isinstance(x, np.ndarray)
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x, expected, strict=True)


def test_torch_arrays_are_fetched_in_one_transfer(monkeypatch):
    torch = pytest.importorskip("torch")
    to_cpu, calls = torch.Tensor.cpu, []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: calls.append(self.shape) or to_cpu(self))
    transposed = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    fetched = fetch([transposed, torch.ones(2, dtype=torch.float64)])
    assert [x.tolist() for x in fetched] == [[[0, 3], [1, 4], [2, 5]], [1.0, 1.0]]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "strided",
    [lambda x: x[:, 1], lambda x: x[:1, 1], lambda x: x[:, :1], lambda x: x[0, ::2], lambda x: x[0, :1].expand(3)],
)
def test_strided_torch_arrays_are_fetched(strided):
    torch = pytest.importorskip("torch")
    x = strided(torch.arange(6).reshape(2, 3))
    assert fetch([x])[0].tolist() == x.tolist()


def test_gradients_are_left_behind():
    torch = pytest.importorskip("torch")
    assert to_host(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert marker(2 * torch.ones(2, requires_grad=True)).grad_fn is None


def test_what_numpy_has_no_name_or_flag_for_reaches_the_host():
    torch = pytest.importorskip("torch")
    half = to_host(torch.tensor([1.5, -0.25], dtype=torch.bfloat16))
    assert (half.dtype, half.tolist()) == (np.float32, [1.5, -0.25])
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negative.is_neg()
    assert to_host(negative).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")]
)
def test_a_round_works_in_numpy_on_few_torch_numbers_of_the_host(dtype, expected):
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, dtype=getattr(torch, dtype), requires_grad=True)
    view = workable(x)
    assert type(view) is np.ndarray
    assert (view.dtype, view.tolist()) == (np.dtype(expected), x.tolist())
    assert (view.ctypes.data == x.data_ptr()) == (dtype == expected)


def test_a_round_leaves_alone_what_numpy_does_no_faster():
    torch = pytest.importorskip("torch")
    many, unreal = torch.zeros(2**10, 2**11), torch.zeros(2, device="meta")
    for x in (many, unreal, torch.zeros(2, dtype=torch.int64), torch.zeros(2).to(torch.float8_e4m3fn)):
        assert workable(x) is x


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_round_makes_no_constants_of_what_torch_traces_or_maps():
    torch = pytest.importorskip("torch")
    seen = []

    def look(x):
        seen.append(type(workable(x)))
        return x + 1

    x = torch.zeros(2)
    torch.jit.trace(look, x, check_trace=False)
    torch.func.vmap(look)(x[:, None])
    torch.fx.experimental.proxy_tensor.make_fx(look)(x)
    assert len(seen) >= 3
    assert np.ndarray not in seen


def test_a_torch_without_its_private_functions_is_worked_on_in_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    assert isinstance(workable(torch.zeros(2)), np.ndarray)
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert isinstance(workable(torch.zeros(2)), torch.Tensor)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_round_stays_in_torch_while_it_is_traced():
    torch = pytest.importorskip("torch")
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    x = torch.arange(3.0)
    assert torch.compile(lambda x: workable(x) + 1, backend=keep, fullgraph=True)(x).tolist() == [1, 2, 3]
    assert len(graphs) == 1
    assert "detach" not in graphs[0]


@pytest.mark.parametrize("there", ["torch", "jax"])
def test_memory_of_another_device_crosses_by_dlpack(there):  # fault #141
    # A device of array_api_strict that is not called "cpu" stands for a GPU: NumPy cannot read it.
    strict = pytest.importorskip("array_api_strict")
    array = strict.asarray(np.arange(3, dtype=np.float32), device=strict.Device("device1"))
    like = HOSTS[there]()(np.zeros(1, np.float32))
    moved = move(array, like)
    assert type(moved) is type(like)
    assert to_host(moved).tolist() == [0.0, 1.0, 2.0]


def test_array_follows_the_device_within_its_framework():  # fault #141
    strict = pytest.importorskip("array_api_strict")
    like = strict.zeros(1, device=strict.Device("device1"))
    for array in (np.arange(3), strict.arange(3), strict.arange(3, device=strict.Device("device2"))):
        assert move(array, like).device == like.device


def test_traced_arrays_take_constants_in():
    jax = pytest.importorskip("jax")

    @jax.jit
    def both_ways(x):
        assert device(x) is None
        return move(np.arange(3, dtype=np.int32), x) + move(x, jax.numpy.zeros(3, np.int32))

    assert both_ways(np.arange(3, dtype=np.int32)).tolist() == [0, 2, 4]


def test_two_devices_of_jax():  # fault #141
    pytest.importorskip("jax")
    # The number of devices is fixed when JAX starts.
    script = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from specsampling import Proposal, UniformRandomness, verify
from specsampling._arrays import move
first, second = jax.devices()
x = jax.device_put(np.arange(4, dtype=np.float32), first)
y = jax.device_put(np.zeros(4, np.float32), second)
assert move(x, y).devices() == move(np.arange(4), y).devices() == {second}
assert move(y, y) is y
sharded = jax.device_put(y, NamedSharding(Mesh(np.array([first, second]), "b"), PartitionSpec("b")))
assert move(x, sharded) is x
assert move(np.arange(4, dtype=np.float32), sharded).tolist() == [0, 1, 2, 3]
rng = np.random.default_rng(0)
arrays = [rng.integers(0, 4, (3, 2)), np.array([0, 1, 2]), *rng.dirichlet(np.ones(4), (2, 3, 3)).astype(np.float32)]
arrays[2] = arrays[2][:, :2]
tokens, num_tokens, draft_probs, target_probs = (jax.device_put(a, second) for a in arrays)
verdict = verify(Proposal(tokens, num_tokens, draft_probs), target_probs, UniformRandomness(rng.random((3, 5, 3)), 2))
assert verdict.next_token.devices() == verdict.num_accepted.devices() == {second}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=300)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0, 4)])
def test_a_marker_says_where_an_array_lives_and_keeps_nothing_of_it(framework, shape):
    x = framework.asarray(np.ones(shape))
    where = marker(x)
    assert tuple(where.shape) == (0,)
    assert namespace(where) is namespace(x)
    assert where.dtype == x.dtype
    if is_host(where):
        assert where.base is None or where.base.size == 0
