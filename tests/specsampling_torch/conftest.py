"""Tiny random models of every architecture that the backend is proven on."""

from collections.abc import Callable
from typing import Any

import pytest

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
PHI3 = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
QWEN_MOE |= {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 1, "mlp_only_layers": []}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
GEMMA2 = {"head_dim": 4, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
MAMBA2 = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 6}
MAMBA2 |= {"n_groups": 1, "expand": 2, "conv_kernel": 3, "chunk_size": 4}
MAMBA2 |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
LINEAR |= {"linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SIZES),
    "Qwen2": ("Qwen2", SIZES),
    "Qwen3": ("Qwen3", {**SIZES, "head_dim": 4}),
    "Mistral, window 3": ("Mistral", {**SIZES, "sliding_window": 3}),
    "Gemma 2, alternating": ("Gemma2", {**SIZES, **GEMMA2, **ALTERNATING}),
    "Gemma 3, alternating": ("Gemma3Text", {**SIZES, "head_dim": 4, "query_pre_attn_scalar": 4, **ALTERNATING}),
    "GPT-2": ("GPT2", GPT2),
    "GPT-NeoX": ("GPTNeoX", SIZES),
    "Phi-3": ("Phi3", {**SIZES, **PHI3, "sliding_window": 5}),
    "Mixtral": ("Mixtral", {**SIZES, **MIXTURE}),
    "Qwen2-MoE": ("Qwen2Moe", {**SIZES, **QWEN_MOE}),
    "Mamba 2": ("Mamba2", MAMBA2),
    "Qwen3-Next": ("Qwen3Next", {**SIZES, **QWEN_MOE, **LINEAR}),
}
RECURRENT = ("Mamba 2", "Qwen3-Next")
_HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Return a random module of a family, in a dtype; keyword arguments replace entries of its config."""
    import torch
    import transformers

    def build(
        family: str, dtype: str = "float64", *, seed: int = 0, attention: str | None = None, **changes: Any
    ) -> Any:
        name, options = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**{**options, **changes})
        config._attn_implementation = attention
        if dtype == "float64" and family in ("Mixtral", "Qwen2-MoE", "Qwen3-Next"):
            config._experts_implementation = "eager"
        torch.manual_seed(seed)
        module = getattr(transformers, _HEADS.get(name, f"{name}ForCausalLM"))(config)
        with torch.no_grad():
            for parameter in module.parameters():  # as they begin, laws are nearly flat and errors do not show
                scale = 0.2 if parameter.ndim == 1 else 0.3
                parameter.add_(torch.randn(parameter.shape) * scale)
        return module.to(getattr(torch, dtype)).eval()

    return build
