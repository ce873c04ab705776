"""Graphs of models that only PyTorch has, through its exporter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import CapabilityError
from specsampling_onnxruntime import OnnxModel, export

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

SIZES = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
GEMMA2 = {"head_dim": 4, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GPT2 = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
MAMBA2 = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 6}
MAMBA2 |= {"n_groups": 1, "expand": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def random_model(family: str, **options: Any) -> Any:
    head = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, f"{family}Config")(**options))
    with torch.no_grad():
        for parameter in model.parameters():  # as they begin, laws are nearly flat and errors do not show
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.float().eval()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), [("Gemma2", {**SIZES, **GEMMA2, **WINDOWS}), ("GPT2", GPT2)])
def test_an_exported_model_says_in_ragged_blocks_what_its_own_forward_pass_says(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    module = random_model(family, **options)
    model = OnnxModel(export(module, tmp_path / "model.onnx"))
    assert (model.layout, model.vocab_size, model.max_length) == ("in place", 11, 64)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 12))
    with torch.no_grad():
        expected = module(input_ids=torch.as_tensor(tokens)).logits.numpy()
    first, cache = model.score(model.init_cache(2, 80), tokens[:, :6])
    cache = model.rollback(cache, [6, 2])
    second, cache = model.score(cache, np.stack([tokens[0, 6:10], tokens[1, 2:6]]))
    assert abs(first - expected[:, :6]).max() < 1e-5
    assert abs(second[0] - expected[0, 6:10]).max() < 1e-5
    assert abs(second[1] - expected[1, 2:6]).max() < 1e-5
    # Learned positions end at the limit, past which padding may lie.
    _, cache = model.score(cache, np.zeros((2, 60), dtype=np.int64), num_logits=0)
    last, _ = model.score(model.rollback(cache, [10, 6]), np.stack([tokens[0, 10:12], tokens[1, 6:8]]))
    assert abs(last[0] - expected[0, 10:]).max() < 1e-5


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="has layers that keep no keys and values: no graph can roll them back"):
        export(random_model("Mamba2", **MAMBA2, conv_kernel=3, chunk_size=4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


# fault #169 in the making: to the exporter one object is one input
def test_every_buffer_is_an_input_of_its_own(graph: Any) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(graph("exported")))
    scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
    buffers = [f"cache.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert sorted(node.input[0] for node in scatters) == buffers
    assert sorted(node.output[0] for node in scatters) == [name.replace("cache", "updated") for name in buffers]
