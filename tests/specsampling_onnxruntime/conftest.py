"""Real graphs of every layout, all of one checkpoint, made when a test asks for them."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("onnxruntime")

from specsampling_numpy import NumpyModel, read_config
from specsampling_onnxruntime import OnnxModel, build, export

LAYOUTS = ("built", "exported", "past and present", "shared buffer", "no cache")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # GroupQueryAttention takes multiples of 16
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random checkpoint of any family; keyword arguments replace entries of its config."""

    def write(*, seed: int = 0, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        rng = np.random.default_rng(seed)
        weights = {
            name: (rng.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.2, shape)).astype(np.float32)
            for name, shape in read_config(folder).shapes().items()
        }
        save_file(weights, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def tiny(write: Callable[..., Path]) -> Path:
    """Return a checkpoint of two layers, with shared key heads and a context of 64 tokens."""
    return write(seed=3)


@pytest.fixture(scope="session")
def reference(tiny: Path) -> NumpyModel:
    return NumpyModel(tiny)


@pytest.fixture(scope="session")
def module(tiny: Path) -> Any:
    """Return the checkpoint as a model of transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype="float32").eval()


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, tiny: Path) -> Callable[..., Path]:
    """Return the file of a layout."""
    made: dict[str, Path] = {}

    def graph(layout: str) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp("graph")
            (folder / "config.json").write_text((tiny / "config.json").read_text())
            path = folder / "model.onnx"
            if layout == "built":
                build(tiny, path)
            elif layout == "shared buffer":
                path = write_shared_buffer(tiny, folder)
            else:
                write = {"exported": export, "past and present": write_past_and_present, "no cache": write_no_cache}
                write[layout](request.getfixturevalue("module"), path)
            made[layout] = path
        return made[layout]

    return graph


@pytest.fixture(scope="session")
def load_layout(graph: Callable[..., Path]) -> Callable[..., OnnxModel]:
    """Return a model of a layout."""
    loaded: dict[str, OnnxModel] = {}

    def load(layout: str) -> OnnxModel:
        if layout not in loaded:
            path = graph(layout)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "has no cache" if layout != "no cache" else ".* has no cache")
                loaded[layout] = OnnxModel(path)
        return loaded[layout]

    return load


@pytest.fixture(params=LAYOUTS)
def model(request: pytest.FixtureRequest, load_layout: Callable[..., OnnxModel]) -> OnnxModel:
    return load_layout(request.param)


def write_past_and_present(module: Any, path: Path, *, positions: bool = True, fixed_block: bool = False) -> Path:
    """Export a model as Optimum does: past_key_values.N.key in, present.N.key out."""
    import torch
    from transformers.cache_utils import DynamicCache

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, input_ids: Any, attention_mask: Any, *others: Any) -> Any:
            position_ids, past = (others[0], others[1:]) if positions else (None, others)
            cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            out = self.module(input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache)
            return out.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))

    config, block = module.config, 1 if fixed_block else 3
    names = [f"{layer}.{kind}" for layer in range(config.num_hidden_layers) for kind in ("key", "value")]
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past")
    tokens = torch.zeros((2, block), dtype=torch.int64)
    # Each past is a tensor of its own: the exporter takes what is one object for one input.
    keys = [torch.zeros((2, config.num_key_value_heads, 4, config.head_dim)) for _ in names]
    inputs = [tokens, torch.ones((2, block + 4), dtype=torch.int64)]
    tokens_axes = {0: batch} if fixed_block else {0: batch, 1: torch.export.Dim("block")}
    shapes: list[Any] = [tokens_axes, {0: batch, 1: past + 1 if fixed_block else torch.export.Dim("span")}]
    others: list[Any] = [{0: batch, 2: past} for _ in names]
    if positions:
        inputs.append(torch.arange(4, 4 + block).expand(2, -1).contiguous())
        others.insert(0, tokens_axes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Step().eval(),
            (*inputs, *keys),
            path,
            input_names=["input_ids", "attention_mask", *(["position_ids"] if positions else [])]
            + [f"past_key_values.{name}" for name in names],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_shapes=(*shapes, tuple(others)),
            opset_version=23,
            dynamo=True,
            verbose=False,
        )
    return path


def write_no_cache(module: Any, path: Path) -> Path:
    """Export a model without its cache."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
            named = {"attention_mask": attention_mask, "position_ids": position_ids}
            return self.module(input_ids, **named, use_cache=False).logits

    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("block")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Step().eval(),
            tuple(torch.ones((2, 3), dtype=torch.int64) for _ in range(3)),
            path,
            input_names=["input_ids", "attention_mask", "position_ids"],
            output_names=["logits"],
            dynamic_shapes=(axes, axes, axes),
            opset_version=23,
            dynamo=True,
            verbose=False,
        )
    return path


def write_shared_buffer(checkpoint: Path, folder: Path) -> Path:
    """Run the model builder of onnxruntime-genai, which wants a tokenizer beside the weights."""
    pytest.importorskip("onnxruntime_genai")
    pytest.importorskip("transformers")
    source = folder / "source"
    source.mkdir()
    for file in checkpoint.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    vocabulary = {f"<{token}>": token for token in range(256)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"},
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = json.loads((source / "config.json").read_text())
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (source / "config.json").write_text(json.dumps({**config, **ends}))
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
    done = subprocess.run([*command, "-p", "fp32", "-e", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "model.onnx"
