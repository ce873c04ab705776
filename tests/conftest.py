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

ASK_FOR_FRAMEWORKS = ("test_cli.py", "test_import.py", "test_registry.py")
"""Tests whose outcome hangs on what is installed, without being skipped anywhere."""

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
    """Refuse the work tree's packages where nox tests the wheel; begin to note what passes where that is asked for."""
    if os.environ.get("SPECSAMPLING_TEST_PASSED") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(Path(os.environ["SPECSAMPLING_TEST_PASSED"])))
    if not os.environ.get("SPECSAMPLING_TEST_INSTALLED"):
        return
    for name in PACKAGES:
        found = str(importlib.import_module(name).__file__)
        if "site-packages" not in found:
            raise pytest.UsageError(f"`{name}` must be imported from site-packages, got {found}")


class _Passed:
    """Writes down which tests passed, so that sessions with more frameworks need not run them once more."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._names.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("\n".join(sorted(self._names)), encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed without a framework already, but for what asks which frameworks there are."""
    file = Path(os.environ.get("SPECSAMPLING_TEST_LEAVE_OUT", ""))
    if not file.is_file():
        return
    passed = set(file.read_text(encoding="utf-8").splitlines())
    left_out = [item for item in items if item.nodeid in passed and item.path.name not in ASK_FOR_FRAMEWORKS]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


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
