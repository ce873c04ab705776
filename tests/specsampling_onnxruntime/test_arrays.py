"""What is bound where: nothing of the cache crosses the host, and every array that is bound is sound."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from specsampling import CapabilityError
from specsampling_onnxruntime import OnnxModel, load
from specsampling_onnxruntime._device import Device

STORED = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, width, bytes: of one token


class Bound:
    """What a run of a model binds: names, and bytes that come from or go to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed: list[dict[str, Any]] = []
        self.values: dict[str, int] = {}
        self.read = 0
        binding, value, bound = onnxruntime.IOBinding, onnxruntime.OrtValue, self
        feed, into, outof, numpy = (
            binding.bind_cpu_input,
            binding.bind_ortvalue_input,
            binding.bind_ortvalue_output,
            value.numpy,
        )

        def bind_cpu_input(self: Any, name: str, array: Any) -> None:
            assert array.flags.c_contiguous
            bound.fed.append({"name": name, "shape": array.shape, "bytes": array.nbytes, "array": array.copy()})
            feed(self, name, array)

        def bind_ortvalue_input(self: Any, name: str, ortvalue: Any) -> None:
            bound.values[name] = ortvalue.data_ptr()
            into(self, name, ortvalue)

        def bind_ortvalue_output(self: Any, name: str, ortvalue: Any) -> None:
            bound.values[name] = ortvalue.data_ptr()
            outof(self, name, ortvalue)

        def read(self: Any) -> Any:
            bound.read += self.tensor_size_in_bytes()
            return numpy(self)

        monkeypatch.setattr(binding, "bind_cpu_input", bind_cpu_input)
        monkeypatch.setattr(binding, "bind_ortvalue_input", bind_ortvalue_input)
        monkeypatch.setattr(binding, "bind_ortvalue_output", bind_ortvalue_output)
        monkeypatch.setattr(value, "numpy", read)
        monkeypatch.setattr(binding, "copy_outputs_to_cpu", lambda _: pytest.fail("everything was copied to the host"))

    def masks(self) -> list[Any]:
        return [entry["array"] for entry in self.fed if entry["name"] == "attention_mask"]


def test_a_step_feeds_and_reads_what_its_block_takes_and_none_of_the_cache(
    model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.layout == "no cache":
        pytest.skip("it feeds all of the text")
    _, cache = model.score(model.init_cache(1, 60), np.ones((1, 40), dtype=np.int64), num_logits=0)
    bound = Bound(monkeypatch)
    logits, _ = model.score(model.rollback(cache, [38]), [[1, 2, 3]], num_logits=2)
    per_token = 8 * 3  # ids, positions or a mask
    assert sum(entry["bytes"] for entry in bound.fed) <= per_token * 43 < STORED * 3
    rows_read = 2 if model.layout == "in place" else 3  # other people's graphs give logits of the whole block
    assert bound.read == rows_read * 256 * 4
    assert logits.shape == (1, 2, 256)


@pytest.mark.parametrize("layout", ["built", "exported", "shared buffer"])
def test_buffers_are_bound_once_as_input_and_output(
    load_layout: Callable[..., OnnxModel], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_layout(layout)
    bound = Bound(monkeypatch)
    _, cache = model.score(model.init_cache(1, 60), [[1, 2]])
    for tensor in model._runner.layout.caches:
        assert bound.values[tensor.past] == bound.values[tensor.present]
    places = dict(bound.values)
    bound.values.clear()
    for _ in range(5):
        _, cache = model.score(cache, [[3]])
    assert bound.values.keys() == {"logits"}
    assert [buffer.data_ptr() for buffer in cache.store.buffers] == [
        places[c.past] for c in model._runner.layout.caches
    ]


def test_a_step_in_a_large_cache_costs_memory_by_its_text_and_not_by_its_capacity(
    load_layout: Callable[..., OnnxModel],
) -> None:
    model = load_layout("built")
    cache = model.init_cache(4, 10**9)
    assert [buffer.shape()[2] for buffer in cache.store.buffers] == [0] * 4
    sizes = []
    for _ in range(30):
        _, cache = model.score(cache, np.ones((4, 9), dtype=np.int64), num_logits=0)
        sizes.append(cache.store.buffers[0].shape()[2])
        assert cache.lengths[0] <= sizes[-1] <= max(64, 1.25 * cache.lengths[0] + 64)
    assert len(set(sizes)) <= 5


@pytest.mark.parametrize(("capacity", "sizes"), [(220, [256, 256]), (230, [192, 256]), (1000, [192, 256])])
def test_a_buffer_never_grows_where_its_first_text_needs_most_of_the_capacity(
    load_layout: Callable[..., OnnxModel], capacity: int, sizes: list[int]
) -> None:
    model, found = load_layout("built"), []
    cache = model.init_cache(1, capacity)
    for block in (180, 40):
        _, cache = model.score(cache, np.ones((1, block), dtype=np.int64), num_logits=0)
        found.append(cache.store.buffers[0].shape()[2])
    assert found == sizes


def test_a_buffer_that_grew_holds_no_value_that_could_spoil_a_sum(load_layout: Callable[..., OnnxModel]) -> None:
    model = load_layout("built")
    _, cache = model.score(model.init_cache(1, 500), np.ones((1, 60), dtype=np.int64), num_logits=0)
    _, cache = model.score(model.rollback(cache, [2]), np.ones((1, 80), dtype=np.int64), num_logits=0)
    for buffer in cache.store.buffers:
        assert np.isfinite(buffer.numpy()).all()


def test_a_row_whose_numbers_are_not_finite_spoils_no_other_when_buffers_grow_or_rows_go(
    load_layout: Callable[..., OnnxModel],
) -> None:
    model = load_layout("built")
    texts = np.random.default_rng(3).integers(0, 256, (4, 170))
    expected, _ = model.score(model.init_cache(1, 170), texts[3:])
    _, cache = model.score(model.init_cache(4, 500), texts[:, :60], num_logits=0)
    for buffer in cache.store.buffers:
        buffer.numpy()[[0, 2]] = np.nan  # a view: see above
    logits, cache = model.score(cache, texts[:, 60:110])  # grows, within what was asked of the system at first
    assert abs(logits[3] - expected[0, 60:110]).max() < 2e-5
    cache = model.select(cache, [2, 3])
    logits, cache = model.score(model.rollback(cache, [0, 110]), texts[2:, 110:])
    assert abs(logits[1] - expected[0, 110:]).max() < 2e-5


def test_rows_that_go_and_texts_that_grow_stay_in_the_memory_they_had(load_layout: Callable[..., OnnxModel]) -> None:
    model = load_layout("built")
    _, cache = model.score(model.init_cache(4, 10**9), np.ones((4, 60), dtype=np.int64), num_logits=0)
    places = [buffer.data_ptr() for buffer in cache.store.buffers]
    for rows in ([0, 1, 3], [1, 2], [1]):
        cache = model.select(cache, rows)
        _, cache = model.score(cache, np.ones((len(rows), 50), dtype=np.int64), num_logits=0)
        assert [buffer.data_ptr() for buffer in cache.store.buffers] == places
    assert cache.store.buffers[0].shape() == [1, 2, 256, 16]


# fault #171: a past of no tokens has no address, and is bound by its shape
def test_a_past_of_no_tokens_can_be_bound(
    load_layout: Callable[..., OnnxModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_layout("past and present")
    cache = model.init_cache(2, 8)
    assert [past.shape() for past in cache.store.past] == [[2, 2, 0, 16]] * 4
    got, _ = model.score(cache, [[1, 2], [3, 4]])
    expected, _ = load_layout("built").score(load_layout("built").init_cache(2, 8), [[1, 2], [3, 4]])
    assert abs(got - expected).max() < 2e-5


# fault #172: the mask spans past and block, on every call, also after a rollback
def test_the_mask_spans_past_and_block(load_layout: Callable[..., OnnxModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_layout("past and present")
    bound = Bound(monkeypatch)
    cache = model.init_cache(2, 40)
    past = 0
    for block, kept in ((3, [3, 1]), (1, [2, 2]), (4, [6, 0]), (2, [8, 2])):
        _, cache = model.score(cache, np.ones((2, block), dtype=np.int64))
        assert bound.masks()[-1].shape == (2, past + block)
        assert bound.masks()[-1].sum(axis=1).tolist() == cache.lengths.tolist()
        past = cache.store.past[0].shape()[2]
        cache = model.rollback(cache, kept)


# fault #176 and #177: lengths are those of the mask, which a rollback shortens
def test_the_mask_of_a_shared_buffer_is_as_long_as_the_text(
    load_layout: Callable[..., OnnxModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_layout("shared buffer")
    bound = Bound(monkeypatch)
    _, cache = model.score(model.init_cache(1, 40), np.ones((1, 5), dtype=np.int64))
    _, cache = model.score(cache, [[1, 2]])
    _, cache = model.score(model.rollback(cache, [3]), [[1]])
    assert [mask.shape for mask in bound.masks()] == [(1, 5), (1, 7), (1, 4)]
    assert all(mask.all() for mask in bound.masks())


# fault #169: arrays whose memory is not in order
@pytest.mark.parametrize("rows", [1, 2])
def test_arrays_that_are_not_contiguous_are_read_right(model: OnnxModel, rows: int) -> None:
    if model.capabilities.max_batch_size == 1 < rows:
        pytest.skip("one row only")
    tokens = np.random.default_rng(0).integers(0, 256, (rows, 6))
    scattered = np.asfortranarray(np.repeat(tokens, 2, axis=1))[:, ::2]
    lengths = np.array([[4, 9], [3, 9]])[:rows, 0]
    results = []
    for block, kept in ((tokens, lengths.copy()), (scattered, lengths)):
        _, cache = model.score(model.init_cache(rows, 12), block)
        logits, _ = model.score(model.rollback(cache, kept), block[:, ::-1])
        results.append(logits)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_integers_of_any_width_are_taken(load_layout: Callable[..., OnnxModel], dtype: str) -> None:
    model = load_layout("built")
    got, cache = model.score(model.init_cache(1, 8), np.array([[1, 2]], dtype))
    expected, _ = model.score(model.init_cache(1, 8), [[1, 2]])
    np.testing.assert_array_equal(got, expected)
    assert model.rollback(cache, np.array([1], dtype)).lengths.tolist() == [1]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_logits_may_go_to_another_framework_and_its_arrays_come_back(
    graph: Callable[..., Path], framework: str
) -> None:
    module = pytest.importorskip(framework)
    xp = module if framework == "torch" else pytest.importorskip("jax.numpy")
    model, plain = OnnxModel(graph("built"), arrays=framework), OnnxModel(graph("built"))
    logits, cache = model.score(model.init_cache(1, 8), [[1, 2]])
    expected, _ = plain.score(plain.init_cache(1, 8), [[1, 2]])
    assert type(logits).__module__.startswith(framework)
    np.testing.assert_array_equal(np.asarray(logits), expected)
    kept = np.asarray(logits).copy()
    cache = model.rollback(cache, xp.asarray(np.array([1], np.int32)))
    logits, cache = model.score(cache, xp.asarray(np.array([[2]], np.int32)))
    np.testing.assert_array_equal(kept, expected)
    assert abs(np.asarray(logits)[0, 0] - expected[0, 1]).max() < 2e-5


def test_arrays_of_a_framework_that_is_unknown_or_missing_are_refused(
    graph: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="`arrays` must be one of numpy, torch, cupy, jax, got 'mlx'"):
        OnnxModel(graph("built"), arrays="mlx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="`arrays` is 'cupy', which is not installed"):
        OnnxModel(graph("built"), arrays="cupy")


# fault #179 is about a provider that reads the past from the wrong buffer: each that is there recomputes what it cached
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_provider_cached_is_what_it_recomputes(tiny: Path, device: str) -> None:
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device]
    if provider not in onnxruntime.get_available_providers():
        pytest.skip(f"{provider} is not available")
    model = load(tiny, device=device, arrays="numpy")
    assert model.session.get_providers()[0] == provider
    tokens = np.random.default_rng(0).integers(0, 256, (2, 12))
    _, cache = model.score(model.init_cache(2, 12), tokens[:, :9], num_logits=0)
    _, cache = model.score(cache, tokens[:, 9:11])
    cached, _ = model.score(cache, tokens[:, 11:])
    fresh, _ = model.score(model.init_cache(2, 12), tokens, num_logits=1)
    assert abs(cached - fresh).max() < 2e-4


def test_a_provider_that_is_missing_is_an_error(graph: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(
        CapabilityError, match=r"device 'cuda:1' needs CUDAExecutionProvider, .*only CPUExecutionProvider"
    ):
        load(graph("built"), device="cuda:1")


# ONNX Runtime lists CUDA where it was compiled in, and goes on with the CPU where its libraries cannot be loaded.
def test_a_provider_that_does_not_start_is_an_error(
    graph: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    device = Device("cuda:0")
    start = onnxruntime.InferenceSession

    def on_the_cpu(source: Any, options: Any, providers: Any, **others: Any) -> Any:
        assert providers == [("CUDAExecutionProvider", {"device_id": "0"}), ("CPUExecutionProvider", {})]
        return start(source, options, providers=["CPUExecutionProvider"], **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_cpu)
    with pytest.raises(CapabilityError, match=r"could not start CUDAExecutionProvider and would compute with \['CPU"):
        device.open(graph("built"))


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:", "cuda:x", ""])
def test_devices_that_are_none_are_refused(graph: Callable[..., Path], name: str) -> None:
    with pytest.raises(ValueError, match="`device` must be 'cpu', 'cuda' or 'cuda:N', got"):
        OnnxModel(graph("built"), device=name)


def test_options_of_a_session_are_taken(graph: Callable[..., Path]) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    assert OnnxModel(graph("built"), session_options=options).session.get_session_options().intra_op_num_threads == 1


# Else they would spin on for 20 ms after each run, on the cores that the other model of a pair computes on.
def test_threads_rest_between_runs(graph: Callable[..., Path]) -> None:
    options = OnnxModel(graph("built")).session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "2000"


def test_a_pool_that_the_process_has_for_all_sessions_is_used(graph: Callable[..., Path]) -> None:
    code = (
        "import sys, onnxruntime; from specsampling_onnxruntime import OnnxModel;"
        "onnxruntime.set_global_thread_pool_sizes(1, 1);"
        "model = OnnxModel(sys.argv[1]);"
        "print(model.session.get_session_options().use_per_session_threads, model.vocab_size)"
    )
    command = [sys.executable, "-c", code, str(graph("built"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "256"]


def test_positions_of_padding_stay_within_the_context(
    load_layout: Callable[..., OnnxModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_layout("past and present")  # a table of learned positions would end there
    bound = Bound(monkeypatch)
    _, cache = model.score(model.init_cache(1, 80), np.ones((1, 62), dtype=np.int64), num_logits=0)
    model.score(cache, np.ones((1, 5), dtype=np.int64))
    positions = [entry["array"].tolist() for entry in bound.fed if entry["name"] == "position_ids"]
    assert positions == [[list(range(62))], [[62, 63, 63, 63, 63]]]
