"""Where weights are and what they are stored in: maps of devices, two dtypes, quantised weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import CapabilityError, Sampling, generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_torch import TorchModel, load  # noqa: E402 (after importorskip)

PROMPTS = [[1, 2, 3], [4]]
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, build: Any) -> Path:
    """A Llama wide enough for the kernels of quantised weights."""
    folder = tmp_path_factory.mktemp("placement")
    build("Llama", "float32", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


def placed(disk: tuple[str, ...]) -> dict[str, str]:
    return {part: "disk" if part in disk else "cpu" for part in PARTS}


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        "cpu",
        "auto",
        placed(("model.layers.0",)),
        placed(("model.embed_tokens", "model.layers.1", "lm_head")),
        {"": "disk"},
    ],
    ids=["cpu", "word", "auto", "a layer on disk", "both ends on disk", "disk"],
)
def test_text_does_not_depend_on_where_the_weights_are(saved: Path, tmp_path: Path, device_map: Any):
    pytest.importorskip("accelerate")
    whole = load(saved, dtype="float64", device="cpu")
    expected = generate(whole, whole, PROMPTS, max_new_tokens=12, seed=1)
    options = {"offload_folder": tmp_path} if "disk" in str(device_map) else {}
    model = load(saved, dtype="float64", device_map=device_map, **options)
    assert model.device.type == "cpu"
    assert generate(model, model, PROMPTS, max_new_tokens=12, seed=1).tokens == expected.tokens


def test_a_model_without_weights_is_refused(build: Any):
    with pytest.raises(CapabilityError, match="must have its weights in memory, got a LlamaForCausalLM"):
        TorchModel(build("Llama").to("meta"))


@pytest.mark.parametrize(
    ("target", "draft"), [("float64", "bfloat16"), ("bfloat16", "float64"), ("float16", "float32")]
)
def test_the_text_is_the_targets_whatever_the_drafts_dtype(build: Any, target: str, draft: str):  # fault #141
    model, other = TorchModel(build("Llama", target)), TorchModel(build("Llama", draft))
    greedy = Sampling(temperature=0.0)
    expected = generate(model, None, PROMPTS, max_new_tokens=16, sampling=greedy)
    result = generate(model, other, PROMPTS, max_new_tokens=16, sampling=greedy)
    assert result.tokens == expected.tokens
    assert result.stats.acceptance_rate > 0.5


def steps_and_block(model: TorchModel) -> tuple[Any, Any]:
    """The logits of a text in one block beside another row, and of its tokens one by one alone."""
    text = np.random.default_rng(0).integers(11, size=(2, 8))
    block, _ = model.score(model.init_cache(2, 8), text)
    cache, steps = model.init_cache(1, 8), []
    for column in range(8):
        logits, cache = model.score(cache, text[:1, column : column + 1])
        steps.append(logits[0, 0])
    return block[0], torch.stack(steps)


def check_quantized(saved: Path, **options: Any) -> TorchModel:
    whole, model = load(saved, device="cpu"), load(saved, device="cpu", **options)
    assert model.module.is_quantized
    block, steps = steps_and_block(model)
    torch.testing.assert_close(block, steps, rtol=0, atol=1e-4)
    own, _ = steps_and_block(whole)
    assert 1e-3 < (block - own).abs().max() < own.std(), "quantised weights are rounded, and not another model's"
    result = generate(model, model, PROMPTS, max_new_tokens=16, seed=2)
    assert result.stats.acceptance_rate == 1
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torchao says of PyTorch while it is imported
def test_int8_weights_of_torchao_pass_contract_and_law(saved: Path):
    from specsampling import Capabilities
    from specsampling_conformance import check_backend

    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = check_quantized(saved, quantization_config=config)
    assert isinstance(model.module.model.layers[0].mlp.up_proj.weight, quantization.Int8Tensor)
    report = check_backend(lambda checkpoint, dtype: model, Capabilities(select=True), tier="exact")
    assert (report.failures, report.level) == ([], "exact")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what bitsandbytes says of the kernels it has not
def test_int8_weights_of_bitsandbytes_without_outliers_do_not_depend_on_the_block(saved: Path):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    model = check_quantized(saved, quantization_config=config)
    assert model.module.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_outliers_looked_for_across_a_block_are_refused_before_anything_is_loaded(saved: Path, tmp_path: Path):
    """With them a block's logits were 0.1 from those of its tokens one by one: see `refuse_quantization`."""
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(CapabilityError, match="`llm_int8_threshold` 6.0: .* set `llm_int8_threshold=0.0`"):
        load(saved, device="cpu", quantization_config=config)
    text = (saved / "config.json").read_text().rstrip().removesuffix("}")
    quantized = '"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
    (tmp_path / "config.json").write_text(f"{text}, {quantized}")
    with pytest.raises(CapabilityError, match="set `llm_int8_threshold=0.0`"):
        load(tmp_path, device="cpu")


def test_quantised_weights_are_held_against_their_own_forward_pass(build: Any):
    """Activations scaled by the largest of their block: what a token becomes depends on its company."""
    module = build("Llama", "float32")
    module.is_quantized = True
    TorchModel(module)

    def rounded(layer: Any, inputs: Any) -> Any:
        scale = inputs[0].abs().max() / 127
        return (torch.round(inputs[0] / scale) * scale,)

    module.model.layers[1].mlp.register_forward_pre_hook(rounded)
    with pytest.raises(CapabilityError, match="has quantised weights, and in blocks and rows of other lengths"):
        TorchModel(module)
