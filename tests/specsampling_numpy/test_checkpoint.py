"""Configs and weights that do not fit are refused with one line that names file, tensor and both shapes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsampling import CapabilityError
from specsampling_numpy import NumpyModel, load, open_weights, read_config

Write = Callable[..., Path]


def change(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replace tensors in a checkpoint; None removes one. Names are written with `__` for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors")


def logits(folder: Path, dtype: str = "float64") -> np.ndarray:
    model = load(folder, dtype=dtype)
    scored, _ = model.score(model.init_cache(1, 5), [[1, 2, 3, 4, 5]])
    return scored


def test_load_takes_no_device_but_the_cpu_and_no_options(tiny: Path):
    assert load(str(tiny), device="cpu").vocab_size == 13
    with pytest.raises(ValueError, match="`device` must be 'cpu' or None, got 'cuda'"):
        load(tiny, device="cuda")
    with pytest.raises(TypeError, match="unknown options 'attention', 'threads'"):
        load(tiny, threads=2, attention="flash")
    with pytest.raises(ValueError, match="`dtype` must be one of float32, float64, got 'float16'"):
        load(tiny, dtype="float16")


def test_missing_files_are_named(tmp_path: Path, write: Write):
    (tmp_path / "file").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no config.json in '.*file'.*, and this is a file"):
        NumpyModel(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"no config.json in '.*nowhere'.*model.safetensors"):
        load(tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors and no .*read from safetensors only"):
        load(tmp_path)


@pytest.mark.parametrize("stored", ["float16", "float64"])
def test_stored_dtypes_are_converted(tmp_path: Path, write: Write, stored: str):
    write(tmp_path / "stored", stored=stored)
    exact = {
        name: tensor.astype("float64") for name, tensor in load_file(tmp_path / "stored/model.safetensors").items()
    }
    write(tmp_path / "exact")
    save_file(exact, tmp_path / "exact/model.safetensors")
    np.testing.assert_array_equal(logits(tmp_path / "stored"), logits(tmp_path / "exact"))
    assert logits(tmp_path / "stored", "float32").dtype == np.float32


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path, write: Write):
    weights = load_file(write(tmp_path / "exact") / "model.safetensors")
    halves = {name: np.ascontiguousarray(weight.view(np.uint16)[..., 1::2]) for name, weight in weights.items()}
    rounded = {name: (half.astype(np.uint32) << 16).view(np.float32) for name, half in halves.items()}
    save_file(rounded, tmp_path / "exact/model.safetensors")
    # Written by hand: NumPy has no such dtype.
    header, data = {}, b""
    for name, half in halves.items():
        offsets = [len(data), len(data) + half.nbytes]
        header[name] = {"dtype": "BF16", "shape": half.shape, "data_offsets": offsets}
        data += half.tobytes()
    text = json.dumps(header).encode()
    write(tmp_path / "half")
    (tmp_path / "half/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    np.testing.assert_array_equal(logits(tmp_path / "half"), logits(tmp_path / "exact"))


def test_shards_are_read_through_their_index(tmp_path: Path, write: Write):
    expected = logits(write(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    np.testing.assert_array_equal(logits(tmp_path), expected)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 'model-00002-of-00002.safetensors', which is not there"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match=r"a file beside the index, got '../elsewhere.safetensors'"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": None}))
    with pytest.raises(ValueError, match="`weight_map` must be a JSON object, got NoneType"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, r"model.safetensors: tensor 'model.norm.weight' of shape \(12,\) is missing"),
        (
            {"model__layers__1__mlp__up_proj__weight": np.zeros((20, 11), np.float32)},
            r"tensor 'model.layers.1.mlp.up_proj.weight' must have shape \(20, 12\) by config.json, got \(20, 11\)",
        ),
        (
            {"model__extra": np.zeros(3, np.float32)},
            r"tensor 'model.extra' of shape \(3,\) is not one that config.json",
        ),
        ({"model__norm__weight": np.zeros(12, np.int32)}, "must be one of F64, F32, F16, BF16, got I32"),
    ],
)
def test_weights_that_the_config_does_not_call_for_are_refused(
    tmp_path: Path, write: Write, tensors: dict[str, np.ndarray | None], message: str
):
    change(write(tmp_path), **tensors)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_size_in_the_config_is_held_against_the_weights_before_memory_is_asked_for(tmp_path: Path, write: Write):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 10**15}))
    with pytest.raises(ValueError, match=r"must have shape \(1000000000000000, 12\) by config.json, got \(13, 12\)"):
        load(tmp_path)


def test_frequencies_that_old_checkpoints_store_are_passed_over(tmp_path: Path, write: Write):
    expected = logits(write(tmp_path))
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(3, np.float32))
    np.testing.assert_array_equal(logits(tmp_path), expected)


def test_a_head_in_the_file_is_used_even_where_the_config_ties_it(tmp_path: Path, write: Write):
    tied = logits(write(tmp_path, tie_word_embeddings=True))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding)
    np.testing.assert_array_equal(logits(tmp_path), tied)
    change(tmp_path, lm_head__weight=2 * embedding)
    np.testing.assert_array_equal(logits(tmp_path), 2 * tied)
    change(tmp_path, lm_head__weight=embedding[1:])
    with pytest.raises(ValueError, match=r"tensor 'lm_head.weight' must have shape \(13, 12\) by config.json"):
        load(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path, write: Write):
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors is not a sound safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"the content of .*config.json must be a JSON object, got list"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": None}, "`vocab_size` must be a positive integer, got None"),
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, got 0"),
        ({"num_hidden_layers": True}, "got True"),
        ({"max_position_embeddings": "16"}, "got '16'"),
        ({"head_dim": 5}, "`head_dim` must be even"),
        ({"num_key_value_heads": 3}, "a multiple of `num_key_value_heads`, got 6, 4 and 3"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` must be a positive finite number, got 'small'"),
        ({"rms_norm_eps": True}, "`rms_norm_eps` must be a positive finite number, got True"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be a positive finite number, got 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a positive finite number, got nan"),
        ({"layer_types": "full_attention"}, "config.json: `layer_types` must be a list, got 'full_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`sliding_window` must be set where one slides"),
        ({"rope_theta": -1.0}, "config.json: `rope_theta` of RoPE of type 'default' must be a positive finite number"),
        ({"rope_theta": 10**400}, "`rope_theta` of RoPE of type 'default' must be a positive finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "`factor` of RoPE .* must be a positive finite number"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 2,
                    "original_max_position_embeddings": 8,
                }
            },
            "config.json: `low_freq_factor` must be below `high_freq_factor`, got 2.0 and 2.0",
        ),
        ({"rope_scaling": "llama3"}, "`rope_parameters` must be a JSON object, got str"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "`rope_parameters` and `rope_scaling` say two things",
        ),
        ({"rope_theta": "high"}, "`rope_theta` of RoPE of type 'default' must be a positive finite number, got 'high'"),
        (
            {"rope_scaling": {"type": "linear"}},
            "`factor` of RoPE of type 'linear' must be a positive finite number, got None",
        ),
    ],
)
def test_configs_that_make_no_sense_are_refused(tmp_path: Path, write: Write, config: dict, message: str):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3"}, "`model_type` must be one of llama, mistral, qwen2, got 'qwen3'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention is not supported"),
        ({"model_type": "mistral"}, "sliding-window attention is not supported"),  # 4096 where the key is missing
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "sliding-window attention is not supported",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window attention is not supported",
        ),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu', got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear or llama3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "default, linear or llama3 and whole"),
        ({"partial_rotary_factor": 0.5}, "default, linear or llama3 and whole"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE must be the same in every layer"),
    ],
)
def test_variants_that_are_not_supported_are_refused_by_name(tmp_path: Path, write: Write, config: dict, message: str):
    with pytest.raises(CapabilityError, match=message):
        load(write(tmp_path, **config))


def test_theta_is_found_in_either_place_and_head_dim_defaults_to_an_equal_share(tmp_path: Path, write: Write):
    old = read_config(write(tmp_path / "old", rope_theta=500.0, head_dim=None, num_attention_heads=2))
    new = read_config(
        write(tmp_path / "new", rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, num_attention_heads=2)
    )
    assert (old.head_dim, new.head_dim) == (6, 6)
    np.testing.assert_allclose(old.frequencies, 500.0 ** (-np.arange(3) / 3), rtol=1e-15)
    assert new.frequencies == old.frequencies


def test_qwen2_has_query_biases_only_and_key_heads_default_to_query_heads(tmp_path: Path, write: Write):
    config = read_config(write(tmp_path, model_type="qwen2", num_key_value_heads=None))
    assert config.num_key_value_heads == 4
    assert {name.rsplit(".", 2)[1] for name in config.shapes() if name.endswith("bias")} == {
        "q_proj",
        "k_proj",
        "v_proj",
    }
    assert NumpyModel(tmp_path).max_length == 16


def test_headers_alone_are_read_until_a_tensor_is_asked_for(tmp_path: Path, write: Write):
    write(tmp_path)
    weights = open_weights(tmp_path, read_config(tmp_path))
    change(tmp_path, model__norm__weight=np.full(12, 7, np.float32))
    np.testing.assert_array_equal(weights.read("model.norm.weight"), np.full(12, 7, np.float32))
