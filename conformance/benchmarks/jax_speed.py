"""Measure what speculation gains under JAX, against plain decoding through the same path and a hand-written loop.

    python conformance/benchmarks/jax_speed.py --json jax.json --markdown jax.md
    python conformance/benchmarks/jax_speed.py --target DIR --draft lookup --lookahead 8 --text FILE

Three ways of decoding one text take turns within one run: a jitted greedy loop as anyone would write it, which leaves
its tokens on the device until the end; rounds of K = 0; and speculative rounds. Each is timed from its first tokens on:
prompts are no part of it. Before every turn the models' calls are timed on their own, in the shapes of a round, the K
draft steps as one compiled function. What speculation should gain follows from these and from the tokens that a round
emitted:

    tokens per round * (time of one token) / (time of K draft steps + time of a block of K + 1 tokens)

and `reached` is the measured gain over that. It counts nothing for the host, for sampling or for verification, which a
round does pay. All figures are medians over turns. Compilation is timed apart, and is read from ``--cache DIR`` where
an earlier run left it there. Run it on an otherwise idle machine.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specsampling
from specsampling_jax import JaxModel, load

TEXT = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    if shape.kind == "rectangle":
        return shape.width * shape.height


def perimeter(shape):
    if shape.kind == "circle":
        return 2 * 3.14159 * shape.radius
    if shape.kind == "square":
        return"""


class Run(NamedTuple):
    """A decoded text, and what a token of it took after the first."""

    text: list[int]
    seconds: float
    tokens_per_round: float = 1.0
    acceptance_rate: float | None = None


class Compilations:
    """What JAX says of compiling: seconds spent, and how much came from the persistent cache."""

    def __init__(self) -> None:
        self.seconds, self.cache_hits = 0.0, 0
        jax.monitoring.register_event_duration_secs_listener(self._add)
        jax.monitoring.register_event_listener(self._count)

    def _add(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):  # tracing, lowering, and XLA's own part
            self.seconds += seconds

    def _count(self, event: str, **_: Any) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"

    @contextmanager
    def during(self, spent: dict[str, float], name: str) -> Iterator[None]:
        """Add up under `name` what is spent meanwhile."""
        before = self.seconds
        yield
        spent[name] = spent.get(name, 0.0) + self.seconds - before


def likeliest(functions: Any, params: Any, arrays: Any, tokens: Any, lengths: Any) -> tuple[Any, Any]:
    """Feed ``(B, T)`` tokens; return the likeliest next one of every position, and the cache."""
    hidden, arrays = functions.apply_fn(params, arrays, tokens, lengths)
    return jnp.argmax(functions.head_fn(params, hidden), axis=-1).astype(jnp.int32), arrays


@functools.partial(jax.jit, static_argnames=("functions",), donate_argnames=("arrays",))
def feed(functions: Any, params: Any, arrays: Any, tokens: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """Feed a prompt and return what `greedy_step` goes on from."""
    hidden, arrays = functions.apply_fn(params, arrays, tokens, lengths)
    token = jnp.argmax(functions.head_fn(params, hidden[:, -1:]), axis=-1).astype(jnp.int32)
    return token, arrays, lengths + tokens.shape[1]


@functools.partial(jax.jit, static_argnames=("functions",), donate_argnames=("arrays", "lengths"))
def greedy_step(functions: Any, params: Any, arrays: Any, token: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """Feed a token; return the next one, the cache and its length, all of which stay on the device."""
    token, arrays = likeliest(functions, params, arrays, token, lengths)
    return token, arrays, lengths + 1


scored_block = jax.jit(likeliest, static_argnames=("functions",), donate_argnames=("arrays",))
"""What a round asks of the target."""


@functools.partial(jax.jit, static_argnames=("functions", "count"), donate_argnames=("arrays",))
def draft_steps(functions: Any, params: Any, arrays: Any, tokens: Any, lengths: Any, *, count: int) -> tuple[Any, Any]:
    """Take steps one after another, as a round asks of the draft: the first is fed two tokens, the others one."""
    drafted = []
    for step in range(count):
        best, arrays = likeliest(functions, params, arrays, tokens, lengths if step == 0 else lengths + step + 1)
        tokens = best[:, -1:]
        drafted.append(tokens)
    return jnp.concatenate(drafted, axis=1), arrays


def handwritten(model: JaxModel, prompt: list[int], num_tokens: int) -> Run:
    """Decode greedily in a plain loop."""
    arrays = model.init_cache(1, len(prompt) + num_tokens + 1).arrays
    functions, params = model.functions, model.params
    token, arrays, lengths = feed(functions, params, arrays, np.array([prompt], np.int32), np.zeros(1, np.int32))
    tokens = [jax.block_until_ready(token)]
    start = time.perf_counter()
    for _ in range(num_tokens - 1):
        token, arrays, lengths = greedy_step(functions, params, arrays, token, lengths)
        tokens.append(token)
    text = [int(token[0, 0]) for token in jax.device_get(tokens)]
    return Run(text, (time.perf_counter() - start) / (num_tokens - 1))


def decoded(target: JaxModel, drafter: Any, prompt: list[int], num_tokens: int, **options: Any) -> Run:
    """Decode by rounds of the library; the first of them, which feeds the draft its prompt, is not timed."""
    events = specsampling.stream(target, drafter, prompt, max_new_tokens=num_tokens, **options)
    text, first, rounds, start = [], 0, 0, 0.0
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            seconds = time.perf_counter() - start
            stats = end.value.stats
            break
        text += event.tokens
        if not first:
            first, start = len(event.tokens), time.perf_counter()
        else:
            rounds += 1
    return Run(text, seconds / (len(text) - first), (len(text) - first) / rounds, stats.acceptance_rate)


def call_seconds(model: JaxModel, call: Callable[..., Any], width: int, length: int, capacity: int) -> float:
    """Return the median time of a call that feeds a block of `width` tokens to one row that holds `length`."""
    arrays = model.init_cache(1, capacity).arrays
    tokens, lengths = np.zeros((1, width), np.int32), np.full(1, length, np.int32)
    times = []
    for _ in range(21):
        start = time.perf_counter()
        best, arrays = call(model.functions, model.params, arrays, tokens, lengths)
        np.asarray(best)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def read_prompt(arguments: argparse.Namespace, vocab_size: int) -> list[int]:
    """Return the prompt as ids: bytes for a byte-level model, else by the checkpoint's tokenizer."""
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else TEXT
    if vocab_size == 256:
        return list((text if arguments.text else "ROMEO:").encode())
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(arguments.target / "tokenizer.json")).encode(text).ids
    return ids


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the turns and return all figures."""
    compilations = Compilations()
    if arguments.cache:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    target = load(arguments.target or specsampling.bundled("target"), dtype=arguments.dtype)
    name = arguments.draft or ("lookup" if arguments.target else str(specsampling.bundled("draft")))
    draft = None if name == "lookup" else load(name, dtype=arguments.dtype)
    drafter: Any = specsampling.PromptLookup() if draft is None else draft
    prompt, lookahead = read_prompt(arguments, target.vocab_size), arguments.lookahead
    num_tokens = arguments.max_new_tokens
    capacity, middle = len(prompt) + num_tokens + lookahead + 1, len(prompt) + num_tokens // 2
    settings = specsampling.Sampling(temperature=arguments.temperature)
    ways: dict[str, Callable[[], Run]] = {
        "handwritten": lambda: handwritten(target, prompt, num_tokens),
        "plain": lambda: decoded(target, None, prompt, num_tokens, sampling=settings),
        "speculative": lambda: decoded(target, drafter, prompt, num_tokens, lookahead=lookahead, sampling=settings),
    }
    drafting = functools.partial(draft_steps, count=lookahead)
    calls: dict[str, Callable[[], float]] = {
        "target_token": lambda: call_seconds(target, scored_block, 1, middle, capacity),
        "target_block": lambda: call_seconds(target, scored_block, lookahead + 1, middle, capacity),
        "draft_steps": lambda: 0.0 if draft is None else call_seconds(draft, drafting, 2, middle, capacity),
    }
    compile_seconds: dict[str, float] = {}
    runs: dict[str, Run] = {}
    for way, run in ways.items():
        with compilations.during(compile_seconds, way):
            runs[way] = run()
    with compilations.during(compile_seconds, "calls"):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {way: [] for way in (*ways, *calls)}
    compiled = compilations.seconds
    for _ in range(arguments.repeats):
        for name_of_call, call in calls.items():
            seconds[name_of_call].append(call())
        for way, run in ways.items():
            seconds[way].append(run().seconds)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    token, block, drafted = (medians[name] for name in calls)
    _, _, tokens_per_round, acceptance = runs["speculative"]
    predicted = tokens_per_round * token / (drafted + block)
    gains = [plain / fast for plain, fast in zip(seconds["plain"], seconds["speculative"], strict=True)]
    by_hand = [plain / fast for plain, fast in zip(seconds["handwritten"], seconds["speculative"], strict=True)]
    formula = specsampling.expected_speedup(
        acceptance or 0.0, lookahead, draft_cost=drafted / (lookahead * token), block_cost=block / token
    )
    texts = {tuple(run.text) for run in runs.values()}
    return {
        "target": str(arguments.target or "bundled"),
        "draft": "bundled" if name == str(specsampling.bundled("draft")) else name,
        "dtype": arguments.dtype,
        "lookahead": lookahead,
        "temperature": arguments.temperature,
        "prompt_tokens": len(prompt),
        "new_tokens": num_tokens,
        "repeats": arguments.repeats,
        "milliseconds_per_token": {way: medians[way] * 1e3 for way in ways},
        "milliseconds_per_call": {way: medians[way] * 1e3 for way in calls},
        "acceptance_rate": acceptance,
        "tokens_per_round": tokens_per_round,
        "speedup": statistics.median(gains),
        "speedup_over_handwritten": statistics.median(by_hand),
        "speedup_range": [min(gains), max(gains)],
        "predicted": predicted,
        "predicted_from_acceptance_rate": formula,
        "reached": statistics.median(gains) / predicted,
        "reached_by_formula": statistics.median(gains) / formula,
        "reached_over_handwritten": statistics.median(by_hand) / predicted,
        "same_text": len(texts) == 1,
        "compile_seconds": compile_seconds,
        "compile_seconds_while_timing": compilations.seconds - compiled,
        "compilation_cache_hits": compilations.cache_hits,
        "machine": {
            "device": str(jax.devices()[0]),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "jax": jax.__version__,
        },
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Return the figures as a page."""
    per_token, calls = report["milliseconds_per_token"], report["milliseconds_per_call"]
    rows = [
        ("hand-written greedy loop, ms a token", f"{per_token['handwritten']:.3f}"),
        ("rounds of K = 0, ms a token", f"{per_token['plain']:.3f}"),
        ("speculative, ms a token", f"{per_token['speculative']:.3f}"),
        ("target, one token, ms a call", f"{calls['target_token']:.3f}"),
        ("target, K + 1 tokens, ms a call", f"{calls['target_block']:.3f}"),
        ("draft, K steps, ms a call", f"{calls['draft_steps']:.3f}"),
        ("tokens a round", f"{report['tokens_per_round']:.2f}"),
        ("speed-up over K = 0", f"{report['speedup']:.2f}"),
        ("speed-up over the hand-written loop", f"{report['speedup_over_handwritten']:.2f}"),
        ("predicted speed-up, from tokens a round", f"{report['predicted']:.2f}"),
        ("predicted speed-up, from the acceptance rate", f"{report['predicted_from_acceptance_rate']:.2f}"),
        ("reached of the former", f"{report['reached']:.3f}"),
        ("reached of it over the hand-written loop", f"{report['reached_over_handwritten']:.3f}"),
        ("compiling, s", f"{sum(report['compile_seconds'].values()):.1f}"),
    ]
    title = f"JAX: target {report['target']}, draft {report['draft']}, K = {report['lookahead']}, {report['dtype']}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"# {title}\n\n| | |\n|---|---|\n{table}\n"


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="checkpoint directory (default: the bundled pair)")
    parser.add_argument("--draft", help="checkpoint directory or 'lookup' (default with --target)")
    parser.add_argument("--text", type=Path, help="file with the prompt")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lookahead", type=int, default=4, help="at least 1")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cache", type=Path, help="directory of the persistent compilation cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    report = measure(arguments)
    page = as_markdown(report)
    print(page)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
