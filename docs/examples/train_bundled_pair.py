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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from small_llama import Llama, Muon, Shape
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

EXCERPT = Path(__file__).with_name("train_excerpt.txt")

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
