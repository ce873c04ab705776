"""Train the pair of byte-level models that ships with specsampling.

The *target* is a deep, narrow Llama. In NumPy a token costs the number of NumPy calls more than the arithmetic in
them, so depth is what makes it slow, width is what would make a block of five tokens dearer than one, and a *draft* of
one layer is a tenth of the cost whatever its width.

A draft token is accepted with probability sum(min(p, q)) = 1 - TV(p, q). So the draft does not learn the text, it
learns the target's law, mostly on text that the target wrote: first by cross-entropy, whose gradient is useful from the
first step, then on the total variation itself.

Kill the script, run the same command again, and it goes on from its last checkpoint.

    python train_bundled_pair.py --text tinyshakespeare.txt --out pair      # under an hour on two CPU cores
    python train_bundled_pair.py --smoke --out smoke                        # 20 steps on the excerpt beside this file
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

VOCAB = 256  # token ids are bytes
EXCERPT = Path(__file__).with_name("train_excerpt.txt")


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


TARGET = Shape(
    hidden_size=64,
    num_hidden_layers=28,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=128,
    tie_word_embeddings=True,
)
DRAFT = Shape(
    hidden_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=384,
    tie_word_embeddings=False,
)


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


def optimizers_for(model: Llama, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Give the layers' matrices to Muon, and embeddings, head and norms to AdamW."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "layers" in name]
    outer = [p for name, p in named if p.ndim == 1 or "layers" not in name]
    return [Muon(inner, lr=muon_lr), torch.optim.AdamW(outer, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)]


def train(
    model: Llama,
    loss_at: Callable[[int], Tensor],
    *,
    num_steps: int,
    muon_lr: float,
    adam_lr: float,
    checkpoint: Path,
    label: str,
    save_every: int = 200,
) -> None:
    """Minimise ``loss_at(step)`` under warmed-up, then falling learning rates; resume from ``checkpoint`` if there.

    ``loss_at`` draws its batch from the step's number alone, so a resumed run sees the batches of an unbroken one.
    """
    optimizers = optimizers_for(model, muon_lr=muon_lr, adam_lr=adam_lr)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    peaks = (muon_lr, adam_lr)
    warmup = min(40, num_steps // 10 + 1)
    bar = tqdm(range(first, num_steps), initial=first, total=num_steps, desc=label, mininterval=2.0)
    smoothed = math.nan
    for step in bar:
        scale = min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / num_steps)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        loss = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smoothed = loss.item() if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss.item()
        bar.set_postfix(loss=f"{smoothed:.3f}", refresh=False)
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            state = {"step": step + 1, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)  # never half a checkpoint


def read_bytes(path: Path) -> tuple[Tensor, Tensor]:
    """Return the first nine tenths of a file and its held-out last tenth, as byte ids."""
    tokens = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:]


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Cut rows of ``length`` bytes out of ``text``."""
    return text[starts[:, None] + torch.arange(length)]


def text_batch(text: Tensor, seed: int, step: int) -> Tensor:
    """Draw 8 short blocks, or in each eighth batch 2 as long as the context, so that all of it can be used."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    num_rows, length = (2, 1024) if step % 8 == 7 else (8, 256)
    return windows(text, torch.randint(len(text) - length, (num_rows,), generator=rng), length + 1)


def text_loss(model: Llama, text: Tensor, seed: int) -> Callable[[int], Tensor]:
    """Return the cross-entropy of a model on a step's batch, as a function of the step."""

    def loss_at(step: int) -> Tensor:
        batch = text_batch(text, seed, step)
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return loss_at


@torch.inference_mode()
def write_samples(target: Llama, prompts: Tensor, length: int, seed: int) -> Tensor:
    """Let the target go on from ``prompts`` ``(N, P)`` until each row has ``length`` bytes."""
    rng = torch.Generator().manual_seed(seed)
    num_rows, prompt_length = prompts.shape
    cache = target.new_cache(num_rows, length)
    tokens = functional.pad(prompts, (0, length - prompt_length))
    target(prompts[:, :-1], cache)
    for position in tqdm(range(prompt_length, length), desc="samples", leave=False, mininterval=2.0):
        logits = target(tokens[:, position - 1 : position], cache, position - 1)[:, 0]
        tokens[:, position] = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
    return tokens


class Lessons(NamedTuple):
    """Rows of bytes ``(N, T + 1)`` and the target's law of each next byte ``(N, T, A)``, over the text's A bytes."""

    tokens: Tensor
    laws: Tensor


@torch.inference_mode()
def lessons_on(target: Llama, rows: Tensor, alphabet: Tensor, label: str) -> Lessons:
    """Ask the target for its laws along ``rows``."""
    parts = tqdm(rows.split(8), desc=label, mininterval=2.0)
    return Lessons(rows, torch.cat([target(part[:, :-1]).softmax(-1)[..., alphabet].half() for part in parts]))


def make_lessons(
    target: Llama, text: Tensor, alphabet: Tensor, *, num_samples: int, length: int, seed: int, file: Path
) -> list[Lessons]:
    """Return the target's laws on what it writes itself, from prompts out of the text, and on the text.

    The text comes in rows as long as the context, for the draft to know all positions.
    """
    if file.exists():
        return [Lessons(*pair) for pair in torch.load(file, weights_only=True)]
    rng = torch.Generator().manual_seed(seed)
    written = []
    for i, num_rows in enumerate(len(part) for part in torch.arange(num_samples).split(256)):
        prompts = windows(text, torch.randint(len(text) - 32, (num_rows,), generator=rng), 32)
        written.append(write_samples(target, prompts, length + 1, seed=seed + 1 + i))
    long_rows = text[: (len(text) - 1) // 1024 * 1024 + 1].unfold(0, 1025, 1024)
    lessons = [
        lessons_on(target, torch.cat(written), alphabet, "laws of samples"),
        lessons_on(target, long_rows, alphabet, "laws of text"),
    ]
    torch.save([tuple(pair) for pair in lessons], file)
    return lessons


def distil_loss(
    draft: Llama, lessons: list[Lessons], alphabet: Tensor, *, num_steps: int, seed: int
) -> Callable[[int], Tensor]:
    """Return the cross-entropy to the target's law for a third of the steps, then 1 - sum(min(p, q))."""

    def loss_at(step: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
        tokens, laws = lessons[1 if step % 4 == 3 else 0]
        rows = torch.randint(len(tokens), (max(1, 5120 // tokens.shape[1]),), generator=rng)
        logits, law = draft(tokens[rows, :-1]), laws[rows].float()
        if step < num_steps // 3:
            return -(law * logits.log_softmax(-1)[..., alphabet]).sum(-1).mean()
        return 1 - torch.minimum(law, logits.softmax(-1)[..., alphabet]).sum(-1).mean()

    return loss_at


@torch.inference_mode()
def bits_per_byte(model: Llama, text: Tensor, length: int) -> float:
    """Score ``text`` in windows of ``length`` bytes, each read from an empty context."""
    rows = text[: (len(text) - 1) // length * length + 1].unfold(0, length + 1, length)
    total = sum(
        functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        for part in rows.split(16)
    )
    return total / (len(rows) * length * math.log(2))


@torch.inference_mode()
def mean_overlap(target: Llama, draft: Llama, rows: Tensor, first: int) -> float:
    """Return the mean of sum(min(p, q)) over the bytes from position ``first`` on."""
    overlaps = [
        torch.minimum(target(part).softmax(-1), draft(part).softmax(-1)).sum(-1)[:, first - 1 : -1]
        for part in rows.split(16)
    ]
    return torch.cat(overlaps).mean().item()


def torch_figures(target: Llama, draft: Llama, held_out: Tensor, *, num_rows: int, length: int) -> dict[str, float]:
    """Return overlaps on held-out text and on the target's continuations of it, and each model's bits per byte."""
    starts = torch.linspace(0, len(held_out) - length, num_rows).long()
    written = write_samples(target, windows(held_out, starts, 64), length, seed=0)
    figures = {"overlap on held-out text": mean_overlap(target, draft, windows(held_out, starts, length), 64)}
    figures["overlap on the target's own text"] = mean_overlap(target, draft, written, 64)
    for name, model in (("target", target), ("draft", draft)):
        for context in (256, 1024):
            figures[f"{name}: bits per byte, windows of {context}"] = bits_per_byte(model, held_out, context)
    return figures


def library_figures(directory: Path, held_out: Tensor, *, num_prompts: int, max_new_tokens: int) -> dict[str, float]:
    """Run the pair as a user would: specsampling on its NumPy backend, held-out prompts, four draft tokens a round."""
    from specsampling import Sampling, generate, load_model

    target, draft = load_model("numpy", directory / "target"), load_model("numpy", directory / "draft")
    starts = torch.linspace(0, len(held_out) - 64, num_prompts).long()
    prompts = windows(held_out, starts, 64).tolist()
    figures = {}
    for temperature in (1.0, 0.0):
        settings = {"max_new_tokens": max_new_tokens, "sampling": Sampling(temperature=temperature)}
        runs, plain_seconds, seconds = [], [], []
        for i, prompt in enumerate(prompts):
            began = time.perf_counter()
            generate(target, None, prompt, seed=i, **settings)
            plain_seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            runs.append(generate(target, draft, prompt, lookahead=4, seed=i, **settings).stats)
            seconds.append(time.perf_counter() - began)
        accepted, tested = sum(run.accepted for run in runs), sum(run.tested for run in runs)
        emitted, calls = sum(run.emitted for run in runs), sum(run.target_calls for run in runs)
        at = f"at temperature {temperature:.0f}"
        figures[f"accepted / tested {at}"] = accepted / tested
        figures[f"tokens per target call {at}"] = emitted / calls
        figures[f"times plain decoding {at}"] = float(np.median(plain_seconds) / np.median(seconds))
    return figures


def export(model: Llama, directory: Path) -> None:
    """Write a Hugging Face style checkpoint in float16, and leave ``model`` with the weights as they were rounded."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    (directory / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(model.shape.config(), indent=2) + "\n")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train both models, export them, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="the text to learn; its last tenth is held out")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for target/, draft/, report.json and the checkpoints"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="20 steps each, by default on the excerpt beside this file"
    )
    parser.add_argument("--target-steps", type=int, default=2000)
    parser.add_argument("--draft-steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    if args.text is None and not args.smoke:
        parser.error("--text FILE is required (or --smoke)")
    if args.smoke:
        target_steps, draft_steps, num_samples, num_rows, length = 20, 20, 4, 4, 96
    else:
        target_steps, draft_steps, num_samples, num_rows, length = args.target_steps, args.draft_steps, 1024, 128, 320

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    work = args.out / "checkpoints"
    work.mkdir(parents=True, exist_ok=True)
    text, held_out = read_bytes(args.text or EXCERPT)
    alphabet = text.unique()

    target = Llama(TARGET)
    loss = text_loss(target, text, args.seed)
    train(
        target, loss, num_steps=target_steps, muon_lr=0.02, adam_lr=4e-3, checkpoint=work / "target.pt", label="target"
    )
    export(target, args.out / "target")

    lessons = make_lessons(
        target, text, alphabet, num_samples=num_samples, length=length, seed=args.seed, file=work / "lessons.pt"
    )
    draft = Llama(DRAFT)
    loss = distil_loss(draft, lessons, alphabet, num_steps=draft_steps, seed=args.seed)
    train(draft, loss, num_steps=draft_steps, muon_lr=0.02, adam_lr=4e-3, checkpoint=work / "draft.pt", label="draft")
    export(draft, args.out / "draft")

    figures = torch_figures(target, draft, held_out, num_rows=num_rows, length=length)
    figures |= library_figures(args.out, held_out, num_prompts=num_rows // 4, max_new_tokens=length - 64)
    for name, value in figures.items():
        print(f"{name:42s} {value:.3f}")
    (args.out / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()
