"""Graphs built from checkpoints: every family and option, in every dtype, against the same weights elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from specsampling import CapabilityError, PromptLookup, generate
from specsampling_numpy import NumpyModel, open_weights, read_config
from specsampling_onnxruntime import OnnxModel, build, load
from specsampling_onnxruntime._graph import GraphWriter
from specsampling_onnxruntime._quantization import pack

CLOSE = 2e-5

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, biases": {"attention_bias": True, "mlp_bias": True},
    "Llama, one key head": {"num_key_value_heads": 1},
    "Llama, a key head each": {"num_key_value_heads": 4},
    "Llama 3": {"rope_parameters": LLAMA3},
    "Qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "Qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "Mistral, window 3": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 3},
    "Qwen2, windows in some layers": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 3,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def ragged(model: Any) -> np.ndarray:
    """Return the last logits of three rows, fed in blocks, with rollbacks to unequal lengths."""
    tokens = np.random.default_rng(7).integers(0, 256, (3, 16))
    _, cache = model.score(model.init_cache(3, 40), tokens[:, :8], num_logits=0)
    _, cache = model.score(model.rollback(cache, np.array([8, 5, 1])), tokens[:, 8:9], num_logits=1)
    logits, _ = model.score(cache, tokens[:, 9:])
    return np.asarray(logits)


def one_by_one(model: Any) -> np.ndarray:
    """Return what `ragged` does, each row in a cache of its own."""
    tokens = np.random.default_rng(7).integers(0, 256, (3, 16))
    rows = []
    for text, kept in zip(tokens[:, None], (8, 5, 1), strict=True):
        _, cache = model.score(model.init_cache(1, 40), text[:, :8], num_logits=0)
        _, cache = model.score(model.rollback(cache, np.array([kept])), text[:, 8:9], num_logits=1)
        logits, _ = model.score(cache, text[:, 9:])
        rows.append(np.asarray(logits))
    return np.concatenate(rows)


def operators(graph: Any) -> list[str]:
    """Return the operators of a graph and of its branches."""
    found = []
    for node in graph.node:
        found.append(node.op_type)
        for attribute in node.attribute:
            found += operators(attribute.g)
    return found


@pytest.mark.parametrize("family", ["Llama", "Llama, tied", "Llama, biases", "Llama, one key head", "Llama 3", "Qwen2"])
def test_logits_are_those_of_the_numpy_backend(write: Callable[..., Path], family: str) -> None:
    checkpoint = write(**FAMILIES[family])
    assert abs(ragged(load(checkpoint)) - ragged(NumpyModel(checkpoint))).max() < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(write: Callable[..., Path], family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = write(**FAMILIES[family])
    module = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
    tokens = np.random.default_rng(7).integers(0, 256, (2, 16))
    with torch.no_grad():
        expected = module(input_ids=torch.as_tensor(tokens)).logits.numpy()
    model = load(checkpoint)
    first, cache = model.score(model.init_cache(2, 16), tokens[:, :7])
    second, _ = model.score(cache, tokens[:, 7:])
    assert abs(np.concatenate([first, second], axis=1) - expected).max() < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_several_operators_says_what_that_of_one_says(
    write: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    checkpoint = write(**FAMILIES[family])
    counts, logits = [], []
    for device in ("cpu", "cuda"):
        path = build(checkpoint, tmp_path / f"{device}.onnx", device=device)
        counts.append(operators(onnx.load(str(path)).graph).count("MultiHeadAttention"))
        logits.append(ragged(OnnxModel(path)))
    assert counts == [2, 0]
    assert abs(logits[0] - logits[1]).max() < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_says_what_it_says_among_others(write: Callable[..., Path], tmp_path: Path, family: str) -> None:
    path = build(write(**FAMILIES[family]), tmp_path / "model.onnx")
    windows = {"Mistral, window 3": 2, "Qwen2, windows in some layers": 1}.get(family, 0)
    assert operators(onnx.load(str(path)).graph).count("GroupQueryAttention") == 2 - windows
    model = OnnxModel(path)
    assert abs(one_by_one(model) - ragged(model)).max() < CLOSE


@pytest.mark.parametrize(("head_dim", "dtype", "close"), [(8, "float32", CLOSE), (16, "float16", 1e-2)])
def test_what_the_operator_of_one_row_does_not_suit_goes_without(
    write: Callable[..., Path], tmp_path: Path, head_dim: int, dtype: str, close: float
) -> None:
    path = build(write(head_dim=head_dim), tmp_path / "model.onnx", dtype=dtype)
    assert "GroupQueryAttention" not in operators(onnx.load(str(path)).graph)
    model = OnnxModel(path)
    assert abs(one_by_one(model) - ragged(model)).max() < close


def test_a_row_alone_may_outgrow_the_table_of_rotations(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write()
    expected = one_by_one(NumpyModel(checkpoint))
    monkeypatch.setattr("specsampling_onnxruntime._build._MOST_ROTATIONS", 12)
    assert abs(one_by_one(load(checkpoint)) - expected).max() < CLOSE


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_writes_into_the_buffers_that_are_bound(write: Callable[..., Path], rows: int) -> None:
    model = load(write())
    _, cache = model.score(model.init_cache(rows, 64), np.ones((rows, 8), int), num_logits=0)
    places = [buffer.data_ptr() for buffer in cache.store.buffers]
    before = [buffer.numpy().copy() for buffer in cache.store.buffers]
    _, cache = model.score(cache, np.ones((rows, 3), int))
    assert [buffer.data_ptr() for buffer in cache.store.buffers] == places
    for old, buffer in zip(before, cache.store.buffers, strict=True):
        new = buffer.numpy()
        assert (new[:, :, :8] == old[:, :, :8]).all()
        assert (new[:, :, 8:11] != 0).any(axis=-1).all()
        assert (new[:, :, 11:] == old[:, :, 11:]).all()


def test_a_graph_for_another_device_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    path = build(write(), tmp_path / "model.onnx")
    model = onnx.load(str(path))
    (entry,) = (entry for entry in model.metadata_props if entry.key == "specsampling.device")
    entry.value = "elsewhere"
    onnx.save(model, str(path))
    with pytest.raises(CapabilityError, match="was built for device 'elsewhere', got 'cpu': build it anew with"):
        OnnxModel(path)


def test_positions_far_out_turn_by_exact_angles(write: Callable[..., Path]) -> None:
    checkpoint = write(max_position_embeddings=10_000, num_hidden_layers=1)
    models = load(checkpoint), NumpyModel(checkpoint, dtype="float64")
    tokens = np.random.default_rng(7).integers(0, 256, (1, 9000))
    logits = []
    for model in models:
        cache = model.init_cache(1, 9000)
        for start in range(0, 9000, 500):
            last, cache = model.score(cache, tokens[:, start : start + 500], num_logits=3)
        logits.append(last)
    assert abs(logits[0] - logits[1]).max() < CLOSE


def test_half_precision_stays_within_its_rounding(write: Callable[..., Path]) -> None:
    checkpoint = write()
    got, expected = ragged(load(checkpoint, dtype="float16")), ragged(NumpyModel(checkpoint))
    assert got.dtype == np.float16
    delta = abs(got - expected).max() / abs(expected).max()
    assert 1e-6 < delta < 5e-3  # measured 1e-3


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_quantised_graphs_compute_with_the_rounded_weights(
    write: Callable[..., Path], tmp_path: Path, dtype: str, bits: int
) -> None:
    checkpoint = write()
    config = read_config(checkpoint)
    weights = open_weights(checkpoint, config)
    rounded = {}
    for name in config.shapes():
        weight = np.array(weights.read(name))
        is_matrix = weight.ndim == 2 and "embed_tokens" not in name
        rounded[name] = rounded_by_hand(weight, bits) if is_matrix else weight
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(rounded, tmp_path / "model.safetensors")
    assert abs(ragged(load(checkpoint, dtype=dtype)) - ragged(NumpyModel(tmp_path))).max() < 10 * CLOSE


def rounded_by_hand(weight: np.ndarray, bits: int) -> np.ndarray:
    """Round each run of 32 inputs to multiples of a step; queries are scaled first, by a power of two here."""
    limit = 2 ** (bits - 1) - 1
    result = np.empty_like(weight)
    for start in range(0, weight.shape[1], 32):
        run = weight[:, start : start + 32]
        step = abs(run).max(axis=1, keepdims=True) / limit
        result[:, start : start + 32] = np.rint(run / step) * step
    return result


def test_packing_puts_the_first_weight_of_a_byte_in_its_lower_half() -> None:
    packed, scales = pack(np.array([[7.0, -7.0, 0.0, 1.0]], np.float32), 4)
    assert scales.tolist() == [[1.0]]
    assert packed[0, 0, :2].tolist() == [15 | 1 << 4, 8 | 9 << 4]
    packed, scales = pack(np.zeros((1, 32), np.float32), 8)
    assert scales.tolist() == [[0.0]]
    assert set(packed.ravel().tolist()) == {128}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantised_row_does_not_depend_on_its_batch(write: Callable[..., Path], dtype: str) -> None:
    model = load(write(), dtype=dtype)
    tokens = np.random.default_rng(7).integers(0, 256, (6, 9))
    together, _ = model.score(model.init_cache(6, 9), tokens)
    alone, _ = model.score(model.init_cache(1, 9), tokens[2:3])
    assert abs(together[2] - alone[0]).max() < CLOSE


def test_text_of_a_quantised_target_is_its_own(write: Callable[..., Path]) -> None:
    model = load(write(), dtype="int8")
    plain = generate(model, None, [[1, 2, 3, 1, 2], [4]], max_new_tokens=20, seed=3)
    speculative = generate(model, model, [[1, 2, 3, 1, 2], [4]], max_new_tokens=20, seed=3)
    assert plain.tokens != generate(model, PromptLookup(), [[1, 2]], max_new_tokens=20, seed=3).tokens
    assert speculative.stats.acceptance_rate == 1.0


def test_large_weights_go_to_a_file_beside_the_graph(write: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = write(hidden_size=512, intermediate_size=4096)
    path = build(checkpoint, tmp_path / "deep" / ".." / "large.onnx") if (tmp_path / "deep").mkdir() is None else None
    assert path is not None
    assert path.stat().st_size < 2**20 < (tmp_path / "large.onnx.data").stat().st_size
    assert abs(ragged(OnnxModel(path)) - ragged(NumpyModel(checkpoint))).max() < 10 * CLOSE


def test_small_graphs_are_one_file_that_onnx_finds_sound(write: Callable[..., Path], tmp_path: Path) -> None:
    path = build(write(), tmp_path / "small.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path))
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "specsampling.layout": "1",
        "specsampling.max_length": "64",
        "specsampling.device": "cpu",
    }
    names = [tensor.name for tensor in model.graph.initializer]
    assert len(names) == len(set(names))
    assert all(numpy_helper.to_array(tensor).size for tensor in model.graph.initializer)


def test_what_cannot_be_built_is_refused_before_anything_is_written(write: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = write()
    with pytest.raises(ValueError, match="`dtype` must be one of float32, float16, int8, int4, got 'float64'"):
        build(checkpoint, tmp_path / "model.onnx", dtype="float64")
    with pytest.raises(ValueError, match="`device` must be 'cpu' or 'cuda', got 'tpu'"):
        build(checkpoint, tmp_path / "model.onnx", device="tpu")
    with pytest.raises(FileNotFoundError, match=r"no config.json in"):
        build(tmp_path, tmp_path / "model.onnx")
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text().replace('"llama"', '"bert"'))
    with pytest.raises(CapabilityError, match="`model_type` must be one of llama"):
        build(checkpoint, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_constants_are_shared_where_they_are_equal_in_shape_and_dtype_too() -> None:
    graph = GraphWriter()
    names = [graph.constant(1), graph.constant([1]), graph.constant(1, np.uint64), graph.constant([[1]])]
    assert len(set(names)) == 4
    assert graph.constant([1]) == names[1]
