"""Acceptance and time against the lookahead K: measured on a pair, beside what the formula predicts, as a plot.

    python docs/examples/acceptance_study.py --out acceptance.svg
    python docs/examples/acceptance_study.py --backend torch --target DIR --draft DIR --prompts prompts.txt

Runs of all K are interleaved, so that a change of the machine's speed meets every K. With --json the figures are
written down too.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import specsampling

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the choice of a backend that needs no display


def seconds_per_call(model: Any, prompt: list[int], width: int, repeats: int) -> float:
    """Return the median time of scoring a block of `width` tokens after the prompt."""
    cache = model.init_cache(1, len(prompt) + width)
    _, cache = model.score(cache, np.array([prompt]), num_logits=0)
    times = []
    for _ in range(repeats + 1):
        cache = model.rollback(cache, np.array([len(prompt)]))
        start = time.perf_counter()
        logits, cache = model.score(cache, np.zeros((1, width), dtype=np.int32))
        float(logits[0, -1, 0])  # a device that runs on its own has finished now
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first may compile


def study(target: Any, draft: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, float]]:
    """Return a record for each K."""
    runs: dict[int, list[specsampling.Stats]] = {k: [] for k in args.lookaheads}
    for repeat in range(args.repeats):
        for row, prompt in enumerate(prompts):
            for k in args.lookaheads:
                drafter = draft if k else None
                result = specsampling.generate(
                    target, drafter, prompt, max_new_tokens=args.max_new_tokens, lookahead=k, seed=repeat, row_ids=[row]
                )
                runs[k].append(result.stats)

    step = seconds_per_call(target, prompts[0], 1, args.repeats + 4)
    draft_cost = seconds_per_call(draft, prompts[0], 1, args.repeats + 4) / step
    plain = statistics.median(time_per_token(stats) for stats in runs[0])
    records = []
    for k in args.lookaheads:
        emitted = sum(stats.emitted for stats in runs[k])
        tested, accepted = (sum(getattr(stats, name) for stats in runs[k]) for name in ("tested", "accepted"))
        block_cost = seconds_per_call(target, prompts[0], k + 1, args.repeats + 4) / step
        acceptance = accepted / tested if tested else 0.0
        records.append(
            {
                "lookahead": k,
                "acceptance": acceptance,
                "tokens_per_target_call": emitted / sum(stats.target_calls for stats in runs[k]),
                "speedup": plain / statistics.median(time_per_token(stats) for stats in runs[k]),
                "block_cost": block_cost,
                "draft_cost": draft_cost,
                "predicted_speedup": specsampling.expected_speedup(
                    acceptance, k, draft_cost=draft_cost, block_cost=block_cost
                ),
            }
        )
    return records


def time_per_token(stats: specsampling.Stats) -> float:
    """Return seconds a token, prompt not counted."""
    return (stats.times.total - stats.times.prefill) / stats.emitted


def plot(records: list[dict[str, float]], file: Path) -> None:
    """Draw tokens per call and speed-up against K."""
    lookaheads = [record["lookahead"] for record in records]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(lookaheads, [record["tokens_per_target_call"] for record in records], "o-", label="measured")
    predicted = [specsampling.expected_tokens(record["acceptance"], int(record["lookahead"])) for record in records]
    left.plot(lookaheads, predicted, "--", label="from acceptance")
    left.set(xlabel="lookahead K", ylabel="tokens per target call")
    right.plot(lookaheads, [record["speedup"] for record in records], "o-", label="measured")
    right.plot(lookaheads, [record["predicted_speedup"] for record in records], "--", label="from call times")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xlabel="lookahead K", ylabel="times plain decoding")
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--target", default=specsampling.bundled("target"))
    parser.add_argument("--draft", default=specsampling.bundled("draft"))
    parser.add_argument("--prompts", type=Path, help="a text file, a prompt a line, read as bytes")
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[0, 1, 2, 3, 4, 6, 8])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("acceptance.svg"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    args.lookaheads = sorted({0, *args.lookaheads})  # plain decoding is what everything is compared with
    target, draft = (specsampling.load_model(args.backend, path) for path in (args.target, args.draft))
    prompts = [list(b"ROMEO:\n"), list(b"First Citizen:\nWe are "), list(b"KING RICHARD III:\n")]
    if args.prompts:
        prompts = [list(line) for line in args.prompts.read_bytes().splitlines() if line]

    records = study(target, draft, prompts, args)
    print(" K  accepted  tokens a call  speed-up  predicted")
    for record in records:
        print(
            f"{record['lookahead']:2}  {record['acceptance']:8.2f}  {record['tokens_per_target_call']:13.2f}  "
            f"{record['speedup']:8.2f}  {record['predicted_speedup']:9.2f}"
        )
    plot(records, args.out)
    if args.json:
        args.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
