"""Tiny random checkpoints in the Llama layout, for checks that need weights but no particular law."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

__all__ = ["write_tiny_checkpoint"]


def write_tiny_checkpoint(
    directory: Path,
    *,
    vocab_size: int = 4,
    seed: int = 0,
    hidden_size: int = 8,
    num_layers: int = 1,
    max_length: int = 64,
    contrast: float = 1.0,
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of a small random Llama and return the directory.

    Weights are large, so that the law of a token depends strongly on every token before it: a cache that loses, keeps
    or misplaces one entry moves the logits by far more than rounding does.

    Parameters
    ----------
    directory : Path
        Created where it is missing.
    vocab_size, hidden_size, num_layers, max_length : int, optional
        Sizes; two attention heads share one key and value head.
    seed : int, optional
        Seed of the weights.
    contrast : float, optional
        Standard deviation of the logits, roughly.

    Returns
    -------
    Path
        The directory.
    """
    rng = np.random.default_rng(seed)
    head_size = hidden_size // 2
    intermediate = 2 * hidden_size

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        weight: np.ndarray = scale * rng.standard_normal((rows, columns)) / np.sqrt(columns)
        return weight.astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, hidden_size, 2.0)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden_size, dtype=np.float32),
            prefix + "self_attn.q_proj.weight": matrix(hidden_size, hidden_size, 1.5),
            prefix + "self_attn.k_proj.weight": matrix(head_size, hidden_size, 1.5),
            prefix + "self_attn.v_proj.weight": matrix(head_size, hidden_size, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(hidden_size, hidden_size, 2.0),
            prefix + "post_attention_layernorm.weight": np.ones(hidden_size, dtype=np.float32),
            prefix + "mlp.gate_proj.weight": matrix(intermediate, hidden_size),
            prefix + "mlp.up_proj.weight": matrix(intermediate, hidden_size),
            prefix + "mlp.down_proj.weight": matrix(hidden_size, intermediate),
        }
    weights["model.norm.weight"] = np.ones(hidden_size, dtype=np.float32)
    weights["lm_head.weight"] = matrix(vocab_size, hidden_size, contrast)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
