"""Measure what a round costs beyond its model calls, and what speculation gains, with the bundled pair.

    python conformance/benchmarks/overhead.py --json overhead.json

Both are ratios or differences within one run: rounds of speculative and of plain decoding are interleaved, and figures
are medians over rounds. The target is 0.5 ms a round at B = 1, V = 256, K = 4 and default settings. Run it on an
otherwise idle machine.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import specsampling


class Timed:
    """A model that adds up the time and number of its calls; a drafter or decoder sees nothing else of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0
        self.vocab_size = model.vocab_size
        self.max_rollback = model.max_rollback

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """Pass through."""
        return self.model.init_cache(batch_size, capacity)

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
        """Score and time it."""
        start = time.perf_counter()
        result = self.model.score(cache, tokens, num_logits=num_logits)
        self.seconds += time.perf_counter() - start
        return result

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        """Roll back and time it."""
        start = time.perf_counter()
        cache = self.model.rollback(cache, lengths)
        self.seconds += time.perf_counter() - start
        return cache


class Timings:
    """Rounds of one way of decoding: wall time, time in model calls, tokens."""

    def __init__(self, target: Any, draft: Any, lookahead: int) -> None:
        self.target, self.draft = Timed(target), None if draft is None else Timed(draft)
        self.decoder = specsampling.Decoder(self.target, self.draft, lookahead=lookahead, seed=0)
        self.overheads: list[float] = []
        self.per_token: list[float] = []

    def run(self, prompt: list[int], num_tokens: int, row_id: int) -> None:
        """Decode one text and record each round's overhead and the whole text's time per token."""
        state = self.decoder.init(prompt, max_new_tokens=num_tokens, row_ids=[row_id])
        began = time.perf_counter()
        first = True
        while not state.is_done:
            start, in_models = time.perf_counter(), self._model_seconds()
            state, _ = self.decoder.step(state)
            spent = time.perf_counter() - start
            if not first:  # the first round also reads the prompt into the draft
                self.overheads.append(spent - (self._model_seconds() - in_models))
            first = False
        self.per_token.append((time.perf_counter() - began) / num_tokens)

    def _model_seconds(self) -> float:
        return self.target.seconds + (0.0 if self.draft is None else self.draft.seconds)


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, draft = (
        specsampling.load_model(arguments.backend, specsampling.bundled(name)) for name in ("target", "draft")
    )
    ways = {
        "speculative": Timings(target, draft, arguments.lookahead),
        "plain": Timings(target, None, 0),
    }
    for repeat in range(arguments.repeats + 1):
        for way in ways.values():
            way.run(list(b"ROMEO:"), arguments.max_new_tokens, repeat)
            if repeat == 0:  # warm-up
                way.overheads.clear()
                way.per_token.clear()
    ratios = [
        plain / speculative
        for plain, speculative in zip(ways["plain"].per_token, ways["speculative"].per_token, strict=True)
    ]
    quartiles = {
        name: np.percentile(np.array(way.overheads) * 1e3, [25, 50, 75]).tolist() for name, way in ways.items()
    }
    for name, way in ways.items():
        low, median, high = quartiles[name]
        print(
            f"{name:12} {median:.3f} ms a round beyond model calls (quartiles {low:.3f} to {high:.3f}, "
            f"{len(way.overheads)} rounds); {statistics.median(way.per_token) * 1e3:.3f} ms a token"
        )
    print(f"speed-up     {statistics.median(ratios):.2f} times plain (from {min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.json:
        report = {
            "backend": arguments.backend,
            "lookahead": arguments.lookahead,
            "overhead_ms_quartiles": quartiles,
            "speedup_median": statistics.median(ratios),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "load": os.getloadavg(),
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
