r"""Measure what a block of K + 1 tokens costs beside a single token: the premise of speculative decoding.

    python conformance/benchmarks/block_cost.py --backend torch --checkpoint DIR \
        --variant eager '{}' --variant packed '{"pack_weights": true}' --json block_cost.json

A variant is a name and the options, as JSON, that ``specsampling.load_model`` is given for it. All variants, and all
widths of each, are measured in one interleaved run, on a text of `--length` tokens; figures are medians over repeats,
with quartiles. Reading the weights once, which is all that a small block has to do, would make every ratio about 1.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import specsampling


def wait(logits: Any) -> None:
    """Return once the logits are there."""
    np.asarray(logits[0, -1, :1].tolist())


def main() -> None:
    """Measure, print the table, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--checkpoint", default=str(specsampling.bundled("target")), metavar="DIR")
    parser.add_argument("--variant", nargs=2, action="append", metavar=("NAME", "OPTIONS"))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=512, help="tokens that each row holds before the block")
    parser.add_argument("--lookahead", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of this thread alone: for one thread (OMP_NUM_THREADS=1) on a machine that others use",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    variants = dict(arguments.variant or [("default", "{}")])
    widths = [1, *(lookahead + 1 for lookahead in arguments.lookahead)]
    models, caches, first_calls = {}, {}, {}
    text: Any = None
    for name, options in variants.items():
        began = time.perf_counter()
        model: Any = specsampling.load_model(arguments.backend, arguments.checkpoint, **json.loads(options))
        size = (arguments.batch_size, arguments.length + max(widths))
        text = np.random.default_rng(0).integers(model.vocab_size, size=size) if text is None else text
        cache = model.init_cache(*size)
        _, cache = model.score(cache, text[:, : arguments.length], num_logits=0)
        for width in widths:
            for _ in range(3):  # warm-up: some backends compile what comes again
                cache = model.rollback(cache, np.full(arguments.batch_size, arguments.length))
                logits, cache = model.score(cache, text[:, arguments.length : arguments.length + width])
                wait(logits)
        models[name], caches[name] = model, cache
        first_calls[name] = time.perf_counter() - began
    seconds: dict[tuple[str, int], list[float]] = {(name, width): [] for name in variants for width in widths}
    for _ in tqdm(range(arguments.repeats), unit="repeat"):
        for width in widths:
            block = text[:, arguments.length : arguments.length + width]
            for name, model in models.items():
                cache = model.rollback(caches[name], np.full(arguments.batch_size, arguments.length))
                began = clock()
                logits, caches[name] = model.score(cache, block)
                wait(logits)
                seconds[name, width].append(clock() - began)
    report: dict[str, Any] = {}
    print("| variant | t(1) in ms (quartiles) | " + " | ".join(f"K = {width - 1}" for width in widths[1:]) + " |")
    print("|---|---|" + "---|" * len(widths[1:]))
    for name, options in variants.items():
        quartiles = {width: (np.percentile(seconds[name, width], [25, 50, 75]) * 1e3).tolist() for width in widths}
        one = quartiles[1][1]
        ratios = {width - 1: quartiles[width][1] / one for width in widths[1:]}
        report[name] = {
            "options": json.loads(options),
            "ms_quartiles": quartiles,
            "ms_fastest": {width: min(seconds[name, width]) * 1e3 for width in widths},
            "ratios": ratios,
            "seconds_to_load_and_warm_up": first_calls[name],
        }
        print(
            f"| {name} | {one:.1f} ({quartiles[1][0]:.1f} to {quartiles[1][2]:.1f}) | "
            + " | ".join(f"{ratio:.2f}" for ratio in ratios.values())
            + " |"
        )
    print("\nt(K + 1) / t(1), by medians.")
    if arguments.json:
        machine = {
            "backend": arguments.backend,
            "batch_size": arguments.batch_size,
            "length": arguments.length,
            "repeats": arguments.repeats,
            "cpu_time": arguments.cpu_time,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "load": os.getloadavg(),
        }
        arguments.json.write_text(json.dumps({**machine, "variants": report}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
