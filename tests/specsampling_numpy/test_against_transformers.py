"""The decoder computes what transformers' own classes compute, for every variant it accepts."""

from pathlib import Path

import numpy as np
import pytest

from specsampling_numpy import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Turns in the original context are 6.4, 2.0, 0.6 and 0.2: one kept, one blended, two stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
VARIANTS = {
    "one key head a query head": ("Llama", {}),
    "grouped queries": ("Llama", {"num_key_value_heads": 2}),
    "one key head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "head_dim of its own": ("Llama", {"head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "attention bias only": ("Llama", {"attention_bias": True}),
    "another theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "Mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "Qwen2": ("Qwen2", {"num_key_value_heads": 2}),
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def reference(name: str, tmp_path: Path) -> object:
    """Save a random model and return it in float64."""
    family, options = VARIANTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial norms and biases, all 1 or all 0, would hide a mix-up
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model.save_pretrained(tmp_path, safe_serialization=True)
    return model


@pytest.mark.filterwarnings("default")  # the framework's own
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, offline: None):
    model = reference(name, tmp_path)
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(3, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert np.ptp(expected) > 3, "logits this flat would not tell variants apart"
    for dtype in ("float32", "float64"):
        ours = load(tmp_path, dtype=dtype)
        cache = ours.init_cache(3, 40)
        parts = []
        for start, stop in ((0, 17), (17, 18), (18, 23), (23, 40)):
            logits, cache = ours.score(cache, tokens[:, start:stop])
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("default")
def test_tokens_may_be_tensors(tmp_path: Path, offline: None):
    reference("biases", tmp_path)
    model = load(tmp_path)
    logits, cache = model.score(model.init_cache(1, 4), torch.tensor([[1, 2, 3]]))
    expected, _ = model.score(model.init_cache(1, 4), [[1, 2, 3]])
    np.testing.assert_array_equal(logits, expected)
    assert model.rollback(cache, torch.tensor([1])).lengths.tolist() == [1]
