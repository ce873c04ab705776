"""What every test module may use."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from safetensors.numpy import save_file

PACKAGES = ("specsampling", "specsampling_numpy", "specsampling_conformance")

# Examples are new in each run, so there is nothing to gain from a time limit on a shared machine.
hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")

TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the work tree's packages where nox tests the wheel."""
    if not os.environ.get("SPECSAMPLING_TEST_INSTALLED"):
        return
    for name in PACKAGES:
        found = str(importlib.import_module(name).__file__)
        if "site-packages" not in found:
            raise pytest.UsageError(f"`{name}` must be imported from site-packages, got {found}")


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """Write a random Llama checkpoint; keyword arguments replace entries of its config."""

    def write(folder: Path, *, seed: int = 0, **config: object) -> Path:
        merged = {**TINY_CONFIG, **config}
        rng = np.random.default_rng(seed)
        hidden, inner, vocab = (int(merged[f"{size}_size"]) for size in ("hidden", "intermediate", "vocab"))
        heads, kv_heads = (int(merged[f"num_{kind}_heads"]) * 8 for kind in ("attention", "key_value"))
        shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
        for layer in range(int(merged["num_hidden_layers"])):
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in {
                    "input_layernorm": (hidden,),
                    "post_attention_layernorm": (hidden,),
                    "self_attn.q_proj": (heads, hidden),
                    "self_attn.k_proj": (kv_heads, hidden),
                    "self_attn.v_proj": (kv_heads, hidden),
                    "self_attn.o_proj": (hidden, heads),
                    "mlp.gate_proj": (inner, hidden),
                    "mlp.up_proj": (inner, hidden),
                    "mlp.down_proj": (hidden, inner),
                }.items()
            }
        weights = {
            name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.3, shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(merged))
        save_file(weights, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Path]) -> Path:
    """Return a random byte-level checkpoint with a context of 64 tokens."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
