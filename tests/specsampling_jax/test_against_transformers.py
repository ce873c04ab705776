"""The decoder computes what transformers' own classes compute, for every variant it accepts."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_jax import load  # noqa: E402

SIZES = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VARIANTS = {
    "Llama": ("Llama", {}),
    "one key head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "head_dim of its own": ("Llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, window 3": ("Mistral", {"sliding_window": 3}),
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, some layers slide": ("Qwen2", SLIDING),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3, biases, some layers slide": ("Qwen3", {"head_dim": 8, "attention_bias": True, **SLIDING}),
}


@pytest.mark.filterwarnings("default")  # the framework's own
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    family, options = VARIANTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial norms and biases, all 1 or all 0, would hide a mix-up
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model.save_pretrained(tmp_path, safe_serialization=True)
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(3, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert np.ptp(expected) > 3, "logits this flat would not tell variants apart"
    ours = load(tmp_path)
    cache = ours.init_cache(3, 40)
    parts = []
    for start, stop in ((0, 17), (17, 18), (18, 23), (23, 40)):
        logits, cache = ours.score(cache, torch.tensor(tokens[:, start:stop]) if start else tokens[:, :stop])
        parts.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=1e-4)
    assert ours.rollback(cache, torch.tensor([1, 2, 3])).lengths.tolist() == [1, 2, 3]
