r"""Decode the same prompts with this library and with onnxruntime-genai, side by side in one run on the CPU.

    python -m onnxruntime_genai.models.builder -i CHECKPOINT -o GENAI -p fp32 -e cpu
    python conformance/benchmarks/onnxruntime_speed.py --target CHECKPOINT --draft DRAFT --genai GENAI \
        --prompts spec_bench.jsonl --json onnxruntime.json --markdown onnxruntime.md

For each group of prompts all ways of decoding take turns, so that whatever else the machine does meets all alike:
``session loop`` is greedy decoding written by hand around one session with bound buffers; ``plain``, ``lookup`` and
``draft`` are this library's at batch 1 and at the whole group; ``genai …`` are onnxruntime-genai's, which decode one
text at a time. Our lookup proposes a block only where two tokens or more match (`block_ngram=2`). All are greedy, run
the same float32 weights and end a text where the model does. What is timed begins once the prompt is in the target's
cache and ends with the last token; medians are over groups, ratios are taken within a group. ``overhead`` is the time
of a way of decoding over that of its session runs, ``accepted`` the part of tested tokens that was, and ``expected``
the gain that `specsampling.expected_speedup` finds from that and from what a block and a draft's step cost, which the
ladder measures. Without ``--draft`` and ``--genai`` what needs them is left out.
Run it on an otherwise idle machine.
"""

import argparse
import functools
import importlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

import specsampling
from specsampling_onnxruntime import OnnxModel, load

GREEDY = specsampling.Sampling(temperature=0)


class Run(NamedTuple):
    """Seconds of decoding, seconds of these inside sessions (None where unknown), and the new tokens of each row.

    The counts are sums over rows: how often a row took part in a round, tokens that were proposed to it, those that
    were tested (up to the first that was rejected), and those that were accepted.
    """

    seconds: float
    in_sessions: float | None
    tokens: list[list[int]]
    rounds: int = 0
    proposed: int = 0
    tested: int = 0
    accepted: int = 0


class TimedSession:
    """A session that adds up the time of its runs."""

    def __init__(self, session: Any) -> None:
        self._session, self.seconds = session, 0.0

    def io_binding(self) -> Any:
        """Pass through."""
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        """Run and time it."""
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - start


def timed(model: OnnxModel) -> TimedSession:
    """Have a model run its session through one that keeps time."""
    session = TimedSession(model.session)
    model._runner = model._runner._replace(session=session)
    return session


class Ours:
    """The library's ways of decoding."""

    def __init__(self, target: OnnxModel, draft: OnnxModel | None, end_token: int) -> None:
        self.target, self._end_token = target, end_token
        self._sessions = [timed(model) for model in (target, draft) if model is not None]

    def decode(self, drafter: Any, prompts: list[list[int]], num_tokens: int, lookahead: int) -> Run:
        """Decode a batch."""
        decoder = specsampling.Decoder(
            self.target, drafter, lookahead=lookahead, sampling=GREEDY, end_tokens=[self._end_token]
        )
        state = decoder.init(prompts, max_new_tokens=num_tokens)
        before, start = self._in_sessions(), time.perf_counter()
        infos = []
        while not state.is_done:
            state, info = decoder.step(state)
            infos.append(info)
        seconds, inside = time.perf_counter() - start, self._in_sessions() - before
        rows: list[list[int]] = [[] for _ in prompts]
        for info in infos:
            for row, tokens, emitted in zip(info.rows, info.tokens, info.num_emitted, strict=True):
                rows[row] += tokens[: int(emitted)].tolist()
        names = ("num_proposed", "num_tested", "num_accepted")
        counts = (sum(int(getattr(info, name).sum()) for info in infos) for name in names)
        return Run(seconds, inside, rows, sum(len(info.rows) for info in infos), *counts)

    def decode_one(self, drafter: Any, num_tokens: int, lookahead: int, prompt: list[int]) -> Run:
        """Decode one text."""
        return self.decode(drafter, [prompt], num_tokens, lookahead)

    def _in_sessions(self) -> float:
        return sum(session.seconds for session in self._sessions)


def session_loop(model: OnnxModel, num_tokens: int, end_token: int, prompt: list[int]) -> Run:
    """Decode greedily by hand: buffers bound once, a token in and an argmax out."""
    capacity, session = len(prompt) + num_tokens, model.session
    binding = session.io_binding()
    for cache in model._runner.layout.caches:
        buffer = np.zeros((1, cache.heads, capacity, cache.size), cache.dtype)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
        binding.bind_ortvalue_input(cache.past, value)
        binding.bind_ortvalue_output(cache.present, value)
    logits = np.empty((1, 1, model.vocab_size), np.float32)
    binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))

    def feed(block: list[int], length: int) -> int:
        binding.bind_cpu_input("input_ids", np.array([block]))
        binding.bind_cpu_input("past_lengths", np.array([length]))
        binding.bind_cpu_input("logit_positions", np.array([len(block) - 1]))
        session.run_with_iobinding(binding)
        return int(logits[0, 0].argmax())

    feed(prompt[:-1], 0)
    start, tokens = time.perf_counter(), [prompt[-1]]
    for length in range(len(prompt) - 1, capacity - 1):
        tokens.append(feed(tokens[-1:], length))
        if tokens[-1] == end_token:
            break
    return Run(time.perf_counter() - start, None, [tokens[1:]])


class Genai:
    """onnxruntime-genai's ways of decoding, one text at a time."""

    def __init__(self, folder: Path, draft: Path | None, lookahead: int, threads: int, scratch: Path) -> None:
        onnxruntime_genai = importlib.import_module("onnxruntime_genai")
        self.api, self._lookahead, self._threads = onnxruntime_genai, lookahead, threads
        self.models = {"plain": self._load(folder)}
        self.models["n-gram"] = self.models["plain"]
        if draft is not None:
            self.models["draft"] = self._load(self._composite(folder, draft, scratch))

    def _load(self, folder: Path) -> Any:
        """Load a model with as many threads as ours has."""
        config = self.api.Config(str(folder))
        parts = json.loads((folder / "genai_config.json").read_text())["model"]
        options = {"session_options": {"intra_op_num_threads": self._threads}}
        config.overlay(json.dumps({"model": {part: options for part in ("decoder", "draft") if part in parts}}))
        return self.api.Model(config)

    @staticmethod
    def _composite(target: Path, draft: Path, scratch: Path) -> Path:
        """Write the folder of a pair: the target's config, with the draft's decoder beside its own."""
        config, other = (json.loads((folder / "genai_config.json").read_text()) for folder in (target, draft))
        for name, source, folder in (("target", config, target), ("draft", other, draft)):
            (scratch / name).symlink_to(folder.resolve())  # paths may not lead out of the folder
            decoder = source["model"]["decoder"]
            decoder["filename"] = f"{name}/{decoder['filename']}"
        config["model"]["draft"] = other["model"]["decoder"]
        for file in target.glob("tokenizer*"):
            (scratch / file.name).write_bytes(file.read_bytes())
        (scratch / "genai_config.json").write_text(json.dumps(config))
        return scratch

    def decode(self, way: str, num_tokens: int, prompt: list[int]) -> Run:
        """Decode one text."""
        model = self.models[way]
        params = self.api.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + num_tokens, do_sample=False)
        if way != "plain":
            options = {"ngram_size": 4} if way == "n-gram" else {}
            params.set_speculative_options(max_draft_tokens=self._lookahead, **options)
        generator = self.api.Generator(model, params)
        generator.append_tokens(np.array(prompt, np.int32))
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return Run(seconds, None, [generator.get_sequence(0)[len(prompt) :].tolist()])


def read_groups(arguments: argparse.Namespace, tokenizer: Any) -> list[tuple[str, list[list[int]]]]:
    """Return groups of prompts of one kind, as ids of a chat's first turn."""
    by_kind: dict[str, list[list[int]]] = {kind: [] for kind in arguments.kinds}
    for line in arguments.prompts.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["category"] not in by_kind:
            continue
        message = [{"role": "user", "content": record["turns"][0]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= arguments.max_prompt_tokens:
            by_kind[record["category"]].append(ids)
    size, groups = arguments.rows, []
    for turn in range(arguments.groups):  # kinds take turns too
        groups += [(kind, found[turn * size : (turn + 1) * size]) for kind, found in by_kind.items()]
    return [(kind, prompts) for kind, prompts in groups if len(prompts) == size]


def ladder(model: OnnxModel, length: int, batch_size: int, widths: list[int], repeats: int = 15) -> dict[int, float]:
    """Return the median time of a block of each width, the widths taking turns."""
    _, cache = model.score(model.init_cache(batch_size, length + 32), np.ones((batch_size, length), int), num_logits=0)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats):
        for width in widths:
            start = time.perf_counter()
            _, cache = model.score(cache, np.ones((batch_size, width), int))
            seconds[width].append(time.perf_counter() - start)
            cache = model.rollback(cache, np.full(batch_size, length))
    return {width: statistics.median(times) for width, times in seconds.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all ways take turns, and return all figures."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", "2000")  # as a model does by itself
    target = load(arguments.target, session_options=options)
    draft = None if arguments.draft is None else load(arguments.draft, session_options=options)
    lookaheads = {1: arguments.lookahead, arguments.rows: arguments.batch_lookahead or arguments.lookahead}
    widths = sorted({1, 2, 3, 5, *(lookahead + 1 for lookahead in lookaheads.values())})
    steps = {rows: ladder(target, 256, rows, widths) for rows in lookaheads}
    draft_steps = {} if draft is None else {rows: ladder(draft, 256, rows, [1])[1] for rows in lookaheads}
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(arguments.target)
    end_token = tokenizer.eos_token_id
    ours = Ours(target, draft, end_token)
    drafters: dict[str, Any] = {"plain": None, "lookup": specsampling.PromptLookup(block_ngram=2)}
    drafters |= {} if draft is None else {"draft": draft}
    num_tokens = arguments.max_new_tokens
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        genai = None
        if arguments.genai is not None:
            genai = Genai(arguments.genai, arguments.genai_draft, arguments.lookahead, arguments.threads, Path(scratch))
        for kind, prompts in read_groups(arguments, tokenizer):
            single: dict[str, Callable[[list[int]], Run]] = {
                "session loop": functools.partial(session_loop, target, num_tokens, end_token)
            }
            single |= {
                name: functools.partial(ours.decode_one, d, num_tokens, lookaheads[1]) for name, d in drafters.items()
            }
            if genai is not None:
                single |= {f"genai {way}": functools.partial(genai.decode, way, num_tokens) for way in genai.models}
            # Ways take turns prompt by prompt.
            done_one = [[decode(prompt) for decode in single.values()] for prompt in prompts[: arguments.singles]]
            turns = [(name, 1, list(done)) for name, done in zip(single, zip(*done_one, strict=True), strict=True)]
            many = arguments.rows
            turns += [
                (name, many, [ours.decode(d, prompts, num_tokens, lookaheads[many])]) for name, d in drafters.items()
            ]
            texts = {(name, rows): [row for run in done for row in run.tokens] for name, rows, done in turns}
            for name, rows, done in turns:
                seconds = sum(run.seconds for run in done)
                inside = [run.in_sessions for run in done if run.in_sessions is not None]
                same = [a == b for a, b in zip(texts[name, rows], texts["plain", rows], strict=True)]
                tokens = sum(len(row) for row in texts[name, rows])
                runs.append({"kind": kind, "way": name, "rows": rows, "seconds": seconds, "tokens": tokens})
                runs[-1] |= {"overhead": seconds / sum(inside) if inside else None, "same_text": sum(same) / len(same)}
                runs[-1] |= counted(done)
                if runs[-1]["tested"]:
                    by_width = steps[rows]
                    runs[-1]["expected"] = specsampling.expected_speedup(
                        runs[-1]["accepted"] / runs[-1]["tested"],
                        lookaheads[rows],
                        draft_cost=draft_steps[rows] / by_width[1] if name == "draft" else 0.0,
                        block_cost=by_width[lookaheads[rows] + 1] / by_width[1],
                    )
            print(
                kind,
                *(f"{r['way']}/{r['rows']}: {r['tokens'] / r['seconds']:.1f}" for r in runs[-len(turns) :]),
                sep="  ",
                flush=True,
            )
    return {
        "lookaheads": lookaheads,
        "threads": arguments.threads,
        "versions": {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()},
        "milliseconds_by_rows_and_block": {r: {w: s * 1e3 for w, s in by.items()} for r, by in steps.items()},
        "draft_milliseconds_by_rows": {rows: seconds * 1e3 for rows, seconds in draft_steps.items()},
        "runs": runs,
        "summary": summarise(runs),
    }


def counted(done: list[Run]) -> dict[str, int]:
    """Return the sums of the counts."""
    return {name: sum(getattr(run, name) for run in done) for name in ("rounds", "proposed", "tested", "accepted")}


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each kind, way and batch, the medians over groups."""
    rows_of_table = []
    for kind in (*dict.fromkeys(run["kind"] for run in runs), "all"):
        chosen = [run for run in runs if kind in (run["kind"], "all")]
        for way, rows in dict.fromkeys((run["way"], run["rows"]) for run in chosen):
            mine = [run for run in chosen if (run["way"], run["rows"]) == (way, rows)]
            plain = [run for run in chosen if (run["way"], run["rows"]) == ("plain", rows)]
            gains = [a["seconds"] / a["tokens"] * b["tokens"] / b["seconds"] for a, b in zip(plain, mine, strict=True)]
            overheads = [run["overhead"] for run in mine if run["overhead"] is not None]
            counts = {name: sum(run[name] for run in mine) for name in ("rounds", "tested", "accepted")}
            expected = [run["expected"] for run in mine if "expected" in run]
            rows_of_table.append(
                {
                    "kind": kind,
                    "rows": rows,
                    "way": way,
                    "tokens_per_second": statistics.median(run["tokens"] / run["seconds"] for run in mine),
                    "over_plain": statistics.median(gains),
                    "overhead": statistics.median(overheads) if overheads else None,
                    "same_text": statistics.mean(run["same_text"] for run in mine),
                    "accepted": counts["accepted"] / counts["tested"] if counts["tested"] else None,
                    "tokens_per_round": sum(r["tokens"] for r in mine) / counts["rounds"] if counts["rounds"] else None,
                    "expected": statistics.median(expected) if expected else None,
                }
            )
    return rows_of_table


def as_markdown(figures: dict[str, Any]) -> str:
    """Return the summary as tables."""
    heads = ["prompts", "batch", "way", "tokens/s", "over plain", "expected", "accepted", "tokens a round"]
    heads += ["over its session runs", "texts as plain's"]
    lines = [f"| {' | '.join(heads)} |", "| --- | ---: | --- |" + " ---: |" * 7]
    for row in figures["summary"]:
        places = {"expected": ".2f", "accepted": ".0%", "tokens_per_round": ".2f", "overhead": ".3f"}
        cells = ["" if row[name] is None else format(row[name], form) for name, form in places.items()]
        lines.append(
            f"| {row['kind']} | {row['rows']} | {row['way']} | {row['tokens_per_second']:.1f} | "
            f"{row['over_plain']:.2f} | {' | '.join(cells)} | {row['same_text']:.0%} |"
        )
    lines += ["", "| batch | block | ms | over one token |", "| ---: | ---: | ---: | ---: |"]
    for rows, by_width in figures["milliseconds_by_rows_and_block"].items():
        lines += [f"| {rows} | {width} | {ms:.1f} | {ms / by_width[1]:.2f} |" for width, ms in by_width.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description="Speed of the ONNX Runtime backend beside onnxruntime-genai's.")
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="checkpoint with a tokenizer and chat template"
    )
    parser.add_argument("--draft", type=Path, metavar="DIR", help="checkpoint of a draft")
    parser.add_argument("--genai", type=Path, metavar="DIR", help="the target as onnxruntime-genai's builder makes it")
    parser.add_argument("--genai-draft", type=Path, metavar="DIR", help="the draft as the builder makes it")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="lines of JSON: category and turns")
    parser.add_argument(
        "--kinds", nargs="+", default=["rag", "summarization", "coding"], help="categories (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=8, help="prompts in a group, and rows of a batch (%(default)s)")
    parser.add_argument("--singles", type=int, default=2, help="prompts of a group decoded one by one (%(default)s)")
    parser.add_argument("--groups", type=int, default=1, help="groups of each kind (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of a text (%(default)s)")
    parser.add_argument("--lookahead", type=int, default=5, help="K (%(default)s)")
    parser.add_argument("--batch-lookahead", type=int, help="K of the whole group, where it is another")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="for each way (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    arguments = parser.parse_args()
    figures = measure(arguments)
    text = as_markdown(figures)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
