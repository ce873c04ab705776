"""What is refused before a weight is read; what is computed: test_against_transformers.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsampling import CapabilityError

pytest.importorskip("jax")

from specsampling_jax import load
from specsampling_numpy import read_config


@pytest.fixture
def tiny(folder: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder(), tmp_path / "tiny"))


def change(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"model_type": "gpt2"}, CapabilityError, "one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"hidden_act": "gelu"}, CapabilityError, "'silu', got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, CapabilityError, "default, linear or llama3"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
            ValueError,
            "`low_freq_factor` of RoPE of type 'llama3' must be a positive finite number, got None",
        ),
        ({"layer_types": ["linear_attention"] * 2}, CapabilityError, r"got \['linear_attention'\]"),
        ({"layer_types": ["full_attention"]}, ValueError, "must name 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, ValueError, "`sliding_window` must be set"),
        ({"model_type": "mistral", "sliding_window": 0}, ValueError, "`sliding_window` must be a positive integer"),
        ({"vocab_size": 0}, ValueError, "`vocab_size` must be a positive integer, got 0"),
        ({"head_dim": 7}, ValueError, "`head_dim` must be even"),
        ({"rms_norm_eps": -1}, ValueError, "`rms_norm_eps`"),
        ({"vocab_size": 8}, ValueError, r"'model.embed_tokens.weight' must have shape \(8, 16\) .* got \(7, 16\)"),
        ({"tie_word_embeddings": False}, ValueError, r"'lm_head.weight' of shape \(7, 16\) is missing"),
        ({"num_hidden_layers": 1}, ValueError, "'model.layers.1.*not one that config.json calls for"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(tiny: Path, entries: Any, error: type, message: str):
    change(tiny, **entries)
    with pytest.raises(error, match=message):
        load(tiny)


@pytest.mark.parametrize(
    ("entries", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "llama", "sliding_window": 5}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (None, 5)),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False, "max_window_layers": 1},
            (None,) * 2,
        ),
        (
            {"model_type": "qwen3", "sliding_window": 5, "use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            (5, None),
        ),
    ],
)
def test_each_layers_window_is_what_the_family_means(tiny: Path, entries: Any, windows: Any):
    change(tiny, **entries)
    assert read_config(tiny).windows == windows


def test_files_that_are_missing_or_broken_are_named(tiny: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*nowhere"):
        load(tmp_path / "nowhere")
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a sound safetensors file"):
        load(tiny)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="safetensors only"):
        load(tiny)
    (tiny / "config.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        load(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        load(tiny)


def test_shards_are_read_through_their_index(tiny: Path):
    tokens = [[1, 2, 3]]
    whole = load(tiny)
    expected, _ = whole.score(whole.init_cache(1, 4), tokens)
    tensors = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    shards = {name: f"part{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tiny / shard)
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    model = load(tiny)
    np.testing.assert_array_equal(model.score(model.init_cache(1, 4), tokens)[0], expected)
    (tiny / "part1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="names 'part1.safetensors'"):
        load(tiny)
    index.write_text(json.dumps({"weight_map": {"a": "../b"}}))
    with pytest.raises(ValueError, match="beside the index, got '../b'"):
        load(tiny)


def test_a_head_in_the_file_is_used_even_where_the_config_ties_it(tiny: Path):
    tokens = [[1, 2, 3]]

    def logits() -> Any:
        model = load(tiny)
        return np.asarray(model.score(model.init_cache(1, 4), tokens)[0])

    tied, tensors = logits(), load_file(tiny / "model.safetensors")
    save_file({**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, tiny / "model.safetensors")
    np.testing.assert_allclose(logits(), 2 * tied, rtol=1e-6)
