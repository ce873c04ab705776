"""Random checkpoints of any size in the Llama family."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from specsampling_numpy import read_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """Write a checkpoint; keyword arguments replace entries of its config, None removes them."""

    def write(folder: Path, *, seed: int = 0, stored: str = "float32", **config: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        merged = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(merged))
        rng = np.random.default_rng(seed)
        weights = {
            name: (rng.normal(scale=0.4, size=shape) + ("norm" in name)).astype(stored)
            for name, shape in read_config(folder).shapes().items()
        }
        save_file(weights, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., Path]) -> Path:
    """Two layers, four query heads over two key heads, V = 13, context 16."""
    return write(tmp_path_factory.mktemp("tiny"))
