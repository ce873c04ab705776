"""Make a draft model out of a target: some of its layers, briefly distilled towards the target's own laws.

    python conformance/benchmarks/distill_draft.py --target DIR --output DIR --text FILE ... [--layers 0 1 28 29]

Embeddings, final norm and head are the target's and stay as they are; only the chosen layers are trained, to the
cross-entropy with the target's law at every position. With ``--continuations`` the target first answers the prompts
itself, so that the draft learns the texts it will meet. An interrupted run goes on from its last checkpoint. At the end
the overlap of the two laws (the sum of min(p, q) over the vocabulary, which is the rate of acceptance at temperature 1)
and the agreement of their highest ids are measured on text that was held out, before and after, and written beside the
weights as ``acceptance.json``. The output belongs outside the repository.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import specsampling
from specsampling_torch import TorchModel


def read_texts(path: Path, excluded: frozenset[str]) -> Iterator[str]:
    """Yield the texts of a file: plain, or lines of JSON with `turns`, or with `prompt` and `canonical_solution`."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        if ".jsonl" not in path.name:
            yield file.read()
            return
        for line in file:
            entry = json.loads(line)
            if "turns" in entry and entry.get("category") not in excluded:
                yield "\n\n".join(entry["turns"])
            elif "prompt" in entry:
                yield entry["prompt"] + entry.get("canonical_solution", "")


def answers(target: TorchModel, texts: list[str], tokenizer: Any, num_tokens: int, samples: int) -> list[list[int]]:
    """Return each text as a chat prompt with the target's own answers to it, `samples` of each, as ids."""
    prompts = []
    for text in texts:
        message = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts += [tokenizer(chat, add_special_tokens=False)["input_ids"][-1024:]] * samples
    prompts.sort(key=len)  # rows of a batch are about equally long
    whole = []
    for begin in tqdm(range(0, len(prompts), 16), desc="answers", unit="batch"):
        batch = prompts[begin : begin + 16]
        ends = [tokenizer.eos_token_id]
        result = specsampling.generate(target, None, batch, max_new_tokens=num_tokens, end_tokens=ends, seed=begin)
        whole += [[*prompt, *tokens] for prompt, tokens in zip(batch, result.tokens, strict=True)]
    return whole


def make_blocks(sequences: list[list[int]], length: int) -> torch.Tensor:
    """Return the ids as ``(N, length)``, one sequence after the other, in an order that one seed gives."""
    joined = torch.tensor([token for sequence in sequences for token in sequence])
    blocks = joined[: len(joined) // length * length].reshape(-1, length)
    return blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))]


def truncated(target: Any, layers: list[int]) -> Any:
    """Return a model of some of the target's layers, weights copied."""
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": len(layers)})
    draft = type(target)(config).to(next(target.parameters()).dtype)
    renamed = {}
    for name, tensor in target.state_dict().items():
        parts = name.split(".")
        if "layers" in parts:
            place = parts.index("layers") + 1
            if int(parts[place]) not in layers:
                continue
            parts[place] = str(layers.index(int(parts[place])))
        renamed[".".join(parts)] = tensor
    draft.load_state_dict(renamed)
    draft.tie_weights()
    return draft


def compare(target: Any, draft: Any, blocks: torch.Tensor) -> dict[str, float]:
    """Return how far the two models agree on text, averaged over positions."""
    overlap, agreement = [], []
    for block in blocks:
        with torch.no_grad():
            p, q = (model(input_ids=block[None], use_cache=False).logits[0].float() for model in (target, draft))
        overlap.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
        agreement.append((p.argmax(-1) == q.argmax(-1)).float())
    return {"overlap": float(torch.cat(overlap).mean()), "greedy_agreement": float(torch.cat(agreement).mean())}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that an interruption leaves either the old or the new one."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    """Train, measure, and write the draft down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--exclude-kinds", nargs="*", default=["rag", "summarization", "coding"], metavar="KIND")
    parser.add_argument(
        "--continuations", type=int, default=0, metavar="N", help="tokens that the target answers each text with"
    )
    parser.add_argument("--samples", type=int, default=2, help="answers to each text")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 28, 29])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0, help="train no longer than that, in this run")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=24, help="blocks that are measured and never trained on")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--save-every", type=int, default=25)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.target)
    module = transformers.AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    draft = truncated(module, arguments.layers)
    packed = TorchModel(module, pack_weights=True)  # the same laws, sooner
    target = packed.module
    arguments.output.mkdir(parents=True, exist_ok=True)
    texts = [text for path in arguments.text for text in read_texts(path, frozenset(arguments.exclude_kinds))]
    answered = arguments.output / "answers.json"
    if not arguments.continuations:
        sequences = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    elif answered.exists():
        sequences = json.loads(answered.read_text(encoding="utf-8"))
    else:
        sequences = answers(packed, texts, tokenizer, arguments.continuations, arguments.samples)
        answered.write_text(json.dumps(sequences), encoding="utf-8")
    blocks = make_blocks(sequences, arguments.length)
    held_out, blocks = blocks[: arguments.held_out], blocks[arguments.held_out :]
    draft.requires_grad_(False)
    draft.model.layers.requires_grad_(True)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.0)

    checkpoint = arguments.output / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["layers"] != arguments.layers:
            raise SystemExit(f"{checkpoint} is of the layers {state['layers']}: choose another --output")
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        step, before = state["step"], state["before"]
    else:
        before = compare(target, draft, held_out)
    print(f"before, on {held_out.numel()} tokens held out: {before}", flush=True)

    def snapshot() -> dict[str, Any]:
        return {
            "step": step,
            "layers": arguments.layers,
            "before": before,
            "draft": draft.state_dict(),
            "optimizer": optimizer.state_dict(),
        }

    began = time.monotonic()
    progress = tqdm(total=arguments.steps, initial=step, unit="step")
    while step < arguments.steps and time.monotonic() - began < 60 * arguments.minutes:
        rows = torch.arange(step * arguments.batch, (step + 1) * arguments.batch) % len(blocks)
        batch = blocks[rows]
        # A short rise, then a fall to a tenth, by the steps that were asked for.
        share = min((step + 1) / 20, 1.0) * (1 - 0.9 * step / arguments.steps)
        optimizer.param_groups[0]["lr"] = arguments.rate * share
        with torch.no_grad():
            law = target(input_ids=batch, use_cache=False).logits.softmax(-1)
        scores = draft(input_ids=batch, use_cache=False).logits.log_softmax(-1)
        loss = -(law * scores).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        progress.update()
        progress.set_postfix(loss=f"{loss.item():.3f}")
        if step % arguments.save_every == 0:
            save_checkpoint(checkpoint, snapshot())
    progress.close()
    save_checkpoint(checkpoint, snapshot())
    draft.eval()
    after = compare(target, draft, held_out)
    print(f"after {step} steps: {after}")
    draft.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    report = {
        "layers": arguments.layers,
        "steps": step,
        "tokens_trained_on": step * arguments.batch * arguments.length,
        "tokens_held_out": held_out.numel(),
        "before": before,
        "after": after,
        "texts": [path.name for path in arguments.text],
        "answered_by_the_target": arguments.continuations,
        "kinds_left_out": arguments.exclude_kinds,
    }
    (arguments.output / "acceptance.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
