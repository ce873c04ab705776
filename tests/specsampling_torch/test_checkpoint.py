"""From a checkpoint to text: loading, the NumPy backend's logits, mixed backends, the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specsampling
from specsampling import CapabilityError, PromptLookup, Sampling, bundled, generate, load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_torch import TorchModel, load  # noqa: E402 (after importorskip)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def saved(tmp_path: Path, checkpoint: Path) -> Path:
    """A copy of a tiny checkpoint, to be spoilt."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_bundled_logits_are_those_of_the_numpy_backend(name: str):
    text = np.frombuffer(b"ROMEO:\nBut soft, what light through yonder window breaks?\n", np.uint8)[None].astype(int)
    expected, _ = (model := load_model("numpy", bundled(name))).score(model.init_cache(1, 64), text)
    logits, _ = (model := load_model("torch", bundled(name), device="cpu")).score(model.init_cache(1, 64), text)
    assert np.ptp(expected) > 10
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=0.0)])
def test_either_side_may_be_numpy(sampling: Sampling):
    """Same uniforms, same weights: the same text, wherever draft and target are computed."""
    names = ("numpy", "torch")
    models = {
        (backend, role): load_model(backend, bundled(role), dtype="float64", device="cpu")
        for backend in names
        for role in ("target", "draft")
    }
    prompts = [list(b"ROMEO:"), list(b"To be, or not")]
    texts = {
        (target, draft): generate(
            models[target, "target"], models[draft, "draft"], prompts, max_new_tokens=24, sampling=sampling, seed=3
        ).tokens
        for target in names
        for draft in names
    }
    assert len({json.dumps(text) for text in texts.values()}) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_weights_logits_and_cache_have_the_dtype_asked_for(checkpoint: Path, dtype: str):
    model = load(checkpoint, dtype=dtype, device="cpu")
    logits, cache = model.score(model.init_cache(1, 2), np.array([[1]]))
    assert {logits.dtype, cache.store.layers[0].keys.dtype, model.module.dtype} == {getattr(torch, dtype)}


def test_draft_and_target_may_differ_in_dtype(checkpoint: Path):
    target, draft = load(checkpoint, dtype="float64", device="cpu"), load(checkpoint, dtype="bfloat16", device="cpu")
    result = generate(target, draft, [[1, 2]], max_new_tokens=12)
    assert result.stats.accepted > 0.5 * result.stats.tested


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_the_one_asked_for(checkpoint: Path, attention: str):
    model = TorchModel.from_pretrained(checkpoint, device="cpu", attn_implementation=attention)
    assert model.module.config._attn_implementation == attention


def test_experts_in_float64_are_computed_eagerly(tmp_path: Path, build: Any):
    build("Mixtral", "float32").save_pretrained(tmp_path)
    model = load(tmp_path, dtype="float64", device="cpu")
    logits, _ = model.score(model.init_cache(1, 2), np.array([[1, 2]]))
    assert logits.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int8"}, ValueError, "`dtype` must be one of float32, .*, got 'int8'"),
        ({"device": "cpu", "device_map": "cpu"}, ValueError, "cannot be combined with `device_map`"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"device": "bogus"}, ValueError, "`device` must name a device of this PyTorch, got 'bogus': "),
        ({"device": "cuda:99"}, ValueError, "`device` must name a device of this PyTorch, got 'cuda:99': "),
        ({"max_rollback": 2, "device": "cpu"}, ValueError, "is for recurrent models"),
    ],
)
def test_wrong_options_are_refused(checkpoint: Path, options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        load(checkpoint, **options)


@pytest.mark.parametrize("setting", [True, False])
def test_loading_prints_nothing_and_leaves_progress_bars_as_they_were(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], setting: bool
):
    logging = transformers.utils.logging
    was_on = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if setting else logging.disable_progress_bar)()
    try:
        load(checkpoint, device="cpu")
        assert capfd.readouterr() == ("", "")
        assert logging.is_progress_bar_enabled() == setting
    finally:
        (logging.enable_progress_bar if was_on else logging.disable_progress_bar)()


def test_a_missing_directory_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no checkpoint directory '/.*nowhere'"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no config.json in"):
        load(tmp_path)


def test_weights_that_are_missing_are_not_made_up(saved: Path):
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no model.layers.0.mlp.up_proj.weight \(1 such\)"):
        load(saved, device="cpu")


def test_weights_of_another_shape_are_refused(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 25}))
    with pytest.raises(ValueError, match="weights have other shapes than config.json says"):
        load(saved, device="cpu")


def test_pickled_weights_are_not_read(saved: Path):
    weights = {name: torch.tensor(weight) for name, weight in load_file(saved / "model.safetensors").items()}
    (saved / "model.safetensors").unlink()
    torch.save(weights, saved / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(saved, device="cpu")


def test_code_in_a_checkpoint_is_not_run(saved: Path):
    config = json.loads((saved / "config.json").read_text())
    code = {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (saved / "config.json").write_text(json.dumps({**config, **code}))
    (saved / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(saved, device="cpu")


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(saved: Path):
    (saved / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 11}))
    (saved / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CapabilityError, match="`t5` is an encoder-decoder model"):
        load(saved, device="cpu")


def test_vocabularies_that_differ_are_refused_before_any_work(checkpoint: Path, build: Any):
    with pytest.raises(ValueError, match="the target has 256 ids, the draft 11"):
        generate(load(checkpoint, device="cpu"), TorchModel(build("Llama")), [[1]], max_new_tokens=2)


def test_a_prompt_past_the_context_is_refused_before_any_work(checkpoint: Path):
    model = load(checkpoint, device="cpu")
    model.module.forward = None  # would raise
    with pytest.raises(ValueError, match="passes the target's context of 64 tokens in row 1"):
        generate(model, PromptLookup(), [[1], [1] * 60], max_new_tokens=5)


def test_the_command_line_generates_with_torch(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    from specsampling.__main__ import main

    arguments = ["generate", "ab", "--target", str(checkpoint), "--draft", str(checkpoint), "--dtype", "float64"]
    arguments += ["--device", "cpu", "--max-new-tokens", "9", "--seed", "4", "--json"]
    reports = []
    for backend in ("numpy", "torch"):
        assert main([*arguments, "--backend", backend]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[1]["backend"] == "torch"
    assert reports[0]["tokens"] == reports[1]["tokens"]


def test_the_backend_is_listed_as_installed():
    status = {backend.name: backend for backend in specsampling.available_backends()}["torch"]
    assert status == ("torch", True, "specsampling_torch:load", "")
