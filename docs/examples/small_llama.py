"""A Llama in plain PyTorch with the names of Hugging Face's checkpoints, and Muon: for train_bundled_pair.py."""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Llama", "Muon", "Shape", "VOCAB"]

VOCAB = 256  # token ids are bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a Llama, under the names a Hugging Face ``config.json`` uses."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def config(self) -> dict[str, object]:
        """Return what ``config.json`` holds."""
        fixed = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "float16",
        }
        return fixed | asdict(self)


class Attention(nn.Module):
    """Rotary attention whose query heads share the key and value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.head_dim = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor | None, start: int) -> Tensor:
        """Let ``x`` ``(B, T, W)``, at positions from ``start`` on, attend to what is cached and to itself."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            stop = start + x.shape[1]
            cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
            k, v = cache[0, :, :, :stop], cache[1, :, :, :stop]
        # With a cache we feed a prompt into an empty one, then token by token: the mask is the usual one, or none.
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to heads ``(B, H, T, D)``, Llama's way: entry i turns with entry i + D / 2."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, W)`` to ``(B, T, W)``."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor | None, start: int) -> Tensor:
        """Return the residual stream ``(B, T, W)`` after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama whose ``state_dict`` has the names of Hugging Face's ``LlamaForCausalLM``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.model.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if not shape.tie_word_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, VOCAB, bias=False)
        head_dim = shape.hidden_size // shape.num_attention_heads
        inverse_frequency = shape.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), inverse_frequency).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the matrices; what writes to the residual stream starts small, the more so the deeper the stack."""
        for name, weight in self.named_parameters():
            if weight.ndim != 2:
                continue
            is_embedding = "embed_tokens" in name or "lm_head" in name
            std = 0.02 if is_embedding else 0.6 * weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= math.sqrt(2 * self.shape.num_hidden_layers)
            nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Return the logits ``(B, T, V)`` of ``tokens`` ``(B, T)``, the first of which stands at position ``start``."""
        rotation = self.cos[start : start + tokens.shape[1]], self.sin[start : start + tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotation, None if cache is None else cache[i], start)
        head = self.model.embed_tokens if self.shape.tie_word_embeddings else self.lm_head
        return functional.linear(self.model.norm(x), head.weight)

    def new_cache(self, num_rows: int, capacity: int) -> Tensor:
        """Return an empty key/value cache ``(layers, 2, B, heads, capacity, head_dim)``."""
        shape = self.shape
        head_dim = shape.hidden_size // shape.num_attention_heads
        return torch.zeros(shape.num_hidden_layers, 2, num_rows, shape.num_key_value_heads, capacity, head_dim)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for the weight matrices inside the layers (Jordan et al., 2024).

    In a minute's trial it took half AdamW's steps to a better loss. ``torch.optim.Muon`` takes one matrix at a time,
    which would double the time of a step; this one stacks the matrices of each shape.
    """

    def __init__(
        self, params: list[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every weight from its gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for (rows, columns), weights in by_shape.items():
                for weight in weights:
                    buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    buffer.lerp_(weight.grad, 1 - group["momentum"])
                nesterov = torch.stack([w.grad.lerp(self.state[w]["momentum"], group["momentum"]) for w in weights])
                step_size = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for weight, update in zip(weights, orthogonalize(nesterov), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=step_size)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix near one, by five Newton-Schulz steps of Muon's quintic."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x
