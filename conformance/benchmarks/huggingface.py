r"""Decode the same prompts with this library and with transformers' ``generate``, side by side in one run.

    python conformance/benchmarks/huggingface.py --target DIR --draft DIR --prompts spec_bench.jsonl \
        --kinds rag summarization coding --humaneval HumanEval.jsonl.gz --json huggingface.json
    python conformance/benchmarks/huggingface.py --target bundled --draft bundled --data DIR-OF-tinyshakespeare.txt

For every prompt all modes run one after the other, so that whatever else the machine does meets all of them alike. What
counts is the *decode rate*: tokens after a mode's first emission, divided by the time after it. The time up to then
(prefill, and the draft's prefill) and whole runs are reported beside it; loading, packing and compiling come before.
Rates are compared prompt by prompt; the tables give medians over prompts, with quartiles. Every text ends at the end
token or at `--max-new-tokens`. Both sides run the same weights; transformers has its own defaults, but for the number
of tokens looked up, which it has none for, and beside its own schedule for drafts a constant one of K tokens.
Our prompt lookup proposes a block only where two tokens or more match (`block_ngram=2`).
"""

import argparse
import functools
import gzip
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from _paper_tasks import load_tasks, read_codec
from tqdm import tqdm

import specsampling
from specsampling_torch import TorchModel


class Prompt(NamedTuple):
    """A prompt as token ids, and the kind of text it is."""

    kind: str
    ids: list[int]


class Clock:
    """What all times are taken from."""

    is_cpu_time = False

    @classmethod
    def now(cls) -> float:
        """Return seconds: of the CPU that this thread used, or of the clock on the wall."""
        return time.thread_time() if cls.is_cpu_time else time.perf_counter()


class Measured(NamedTuple):
    """One run: seconds until the first emission, seconds after it, tokens after it, and all tokens of each row."""

    first: float
    decode: float
    num_decoded: int
    tokens: list[list[int]]


class Timed:
    """A model that adds up the time of its forward passes; everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
        """Score and time it."""
        began = Clock.now()
        result = self._model.score(cache, tokens, num_logits=num_logits)
        if result[0].is_cuda:
            torch.cuda.synchronize()
        self.seconds += Clock.now() - began
        return result


class Ours:
    """A way of decoding of this library's."""

    def __init__(self, target: Any, drafter: Any, lookahead: int | None, end_tokens: list[int]) -> None:
        self.models: list[Any] = [Timed(target)]
        if isinstance(drafter, TorchModel):
            drafter = Timed(drafter)
            self.models.append(drafter)
        self.drafter, self.lookahead, self.end_tokens = drafter, lookahead, end_tokens
        self.round_ratios: list[float] = []
        self.accepted = self.tested = 0

    def __call__(self, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int) -> Measured:
        """Decode and time it."""
        decoder = specsampling.Decoder(
            self.models[0],
            self.drafter,
            lookahead=self._adaptive(len(prompts)) if self.lookahead is None else self.lookahead,
            sampling=specsampling.Sampling(temperature=temperature),
            end_tokens=self.end_tokens,
            seed=seed,
        )
        began = Clock.now()
        state = decoder.init(prompts, max_new_tokens=num_tokens)
        first, counted = 0.0, 0
        while not state.is_done:
            start, in_models = Clock.now(), sum(model.seconds for model in self.models)
            state, info = decoder.step(state)
            end = Clock.now()
            emitted = int(np.sum(info.num_emitted))
            if not first:  # the first round also reads the prompt into the draft
                first, counted = end, emitted
                continue
            self.round_ratios.append((end - start) / (sum(model.seconds for model in self.models) - in_models))
            self.accepted += int(np.sum(info.num_accepted))
            self.tested += int(np.sum(info.num_proposed))
        done = Clock.now()
        spans = zip(state.prompt_lengths.tolist(), state.lengths.tolist(), strict=True)
        tokens = [state.tokens[row, slice(*span)].tolist() for row, span in enumerate(spans)]
        return Measured(first - began, done - first, sum(map(len, tokens)) - counted, tokens)

    @functools.cache  # noqa: B019 (as many as there are modes and batch sizes, to the end of the program)
    def _adaptive(self, batch_size: int) -> specsampling.AdaptiveLookahead:
        return specsampling.AdaptiveLookahead.measured(self.models[0], self.drafter, batch_size=batch_size)


class Emissions:
    """A streamer that notes when tokens came, and how many; transformers hands over the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        """Take note."""
        self.times.append(Clock.now())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Take note."""
        self.times.append(Clock.now())


class Theirs:
    """A way of decoding of transformers'."""

    def __init__(self, module: Any, end_tokens: list[int], **options: Any) -> None:
        self.module, self.end_tokens, self.options = module, end_tokens, options

    def __call__(self, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int) -> Measured:
        """Decode and time it."""
        longest = max(map(len, prompts))
        device = self.module.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        emissions = Emissions()
        began = Clock.now()
        output = self.module.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            eos_token_id=self.end_tokens or None,
            pad_token_id=self.end_tokens[0] if self.end_tokens else 0,
            streamer=emissions,
            **sampling,
            **self.options,
        )
        tokens = [self._until_end(row[longest:].tolist()) for row in output]
        first = emissions.times[1]
        counted = emissions.counts[1]
        return Measured(first - began, emissions.times[-1] - first, sum(map(len, tokens)) - counted, tokens)

    def _until_end(self, row: list[int]) -> list[int]:
        return next((row[: i + 1] for i, token in enumerate(row) if token in self.end_tokens), row)


Mode = Callable[[list[list[int]], int, float, int], Measured]


def read_prompts(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[Prompt]:
    """Yield the prompts asked for, kinds in turn."""
    if arguments.data:
        codec = read_codec(arguments.target)
        for prompt in load_tasks(["text"], arguments.data, codec)["text"].prompts[: arguments.per_kind]:
            yield Prompt("text", prompt.ids)
    if arguments.prompts:
        entries = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
        for kind in arguments.kinds:
            for entry in [entry for entry in entries if entry["category"] == kind][: arguments.per_kind]:
                message = [{"role": "user", "content": entry["turns"][0]}]
                text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
                yield Prompt(kind, tokenizer(text, add_special_tokens=False)["input_ids"])
    if arguments.humaneval:
        with gzip.open(arguments.humaneval, "rt", encoding="utf-8") as file:
            for line, _ in zip(file, range(arguments.per_kind), strict=False):
                yield Prompt("humaneval", tokenizer(json.loads(line)["prompt"], add_special_tokens=False)["input_ids"])


def make_modes(arguments: argparse.Namespace, ends: list[int]) -> tuple[dict[str, Mode], dict[str, float], bool]:
    """Return the modes, the seconds that each variant of ours took to make, and whether there is a draft."""
    options: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype}
    dtype = getattr(torch, arguments.dtype)
    paths = {"target": arguments.target, **({"draft": arguments.draft} if arguments.draft else {})}
    theirs = {
        name: transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(arguments.device).eval()
        for name, path in paths.items()
    }
    modes: dict[str, Mode] = {"HF plain": Theirs(theirs["target"], ends)}
    modes["HF lookup"] = Theirs(theirs["target"], ends, prompt_lookup_num_tokens=arguments.hf_lookup)
    if arguments.draft:
        modes["HF assisted"] = Theirs(theirs["target"], ends, assistant_model=theirs["draft"])
        constant = transformers.AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=dtype)
        constant = constant.to(arguments.device).eval()
        constant.generation_config.num_assistant_tokens = arguments.lookahead
        constant.generation_config.num_assistant_tokens_schedule = "constant"
        constant.generation_config.assistant_confidence_threshold = 0.0
        modes["HF assisted, K"] = Theirs(theirs["target"], ends, assistant_model=constant)
    making = {}
    for variant in arguments.ours:
        began = time.perf_counter()
        extra: dict[str, Any] = {"packed": {"pack_weights": True}, "compiled": {"compile": True}}.get(variant, {})
        ours = {name: TorchModel.from_pretrained(path, **options, **extra) for name, path in paths.items()}
        modes[f"{variant} plain"] = Ours(ours["target"], None, 0, ends)
        lookup = specsampling.PromptLookup(block_ngram=2)
        modes[f"{variant} lookup"] = Ours(ours["target"], lookup, arguments.lookup, ends)
        modes[f"{variant} lookup, adaptive"] = Ours(ours["target"], lookup, None, ends)
        if arguments.draft:
            modes[f"{variant} draft"] = Ours(ours["target"], ours["draft"], arguments.lookahead, ends)
            modes[f"{variant} draft, adaptive"] = Ours(ours["target"], ours["draft"], None, ends)
        if variant == "compiled":
            for model in ours.values():
                for batch_size, lookahead in {(1, arguments.lookup), (1, arguments.lookahead)}:
                    model.warm_up(batch_size=batch_size, capacity=arguments.warm_up, lookahead=lookahead)
        making[variant] = time.perf_counter() - began
    return modes, making, bool(arguments.draft)


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [float(x) for x in np.percentile(values, [25, 50, 75])]


def spread(values: list[float], digits: int = 2) -> str:
    """Return a median with its quartiles, in words."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compare(runs: dict[str, list[Measured]], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Print the rates of all modes and the ratios of some; return both."""
    rates = {name: [run.num_decoded / run.decode for run in measured] for name, measured in runs.items()}
    print("| mode | tokens a second, decode | seconds to the first token | tokens a second, whole run | tokens |")
    print("|---|---|---|---|---|")
    report: dict[str, Any] = {"modes": {}, "ratios": {}}
    for name, measured in runs.items():
        whole = [sum(map(len, run.tokens)) / (run.first + run.decode) for run in measured]
        firsts = [run.first for run in measured]
        total = sum(len(row) for run in measured for row in run.tokens)
        print(f"| {name} | {spread(rates[name])} | {spread(firsts)} | {spread(whole)} | {total} |")
        report["modes"][name] = {
            "decode_tokens_per_second": quartiles(rates[name]),
            "seconds_to_first": quartiles(firsts),
            "tokens_per_second_whole_run": quartiles(whole),
            "tokens": total,
            "runs": [[run.first, run.decode, run.num_decoded] for run in measured],
        }
    print("\n| ratio of decode rates, by prompt | median (quartiles) |\n|---|---|")
    for ours, other in pairs:
        ratios = [x / y for x, y in zip(rates[ours], rates[other], strict=True)]
        print(f"| {ours} / {other} | {spread(ratios)} |")
        report["ratios"][f"{ours} / {other}"] = quartiles(ratios)
    print()
    return report


def main() -> None:
    """Measure, print the tables, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--draft", type=Path, metavar="DIR")
    parser.add_argument("--prompts", type=Path, metavar="JSONL", help="lines with `category` and `turns`")
    parser.add_argument("--kinds", nargs="+", default=["rag", "summarization", "coding"], metavar="KIND")
    parser.add_argument("--humaneval", type=Path, metavar="JSONL.GZ")
    parser.add_argument("--data", type=Path, metavar="DIR", help="of tinyshakespeare.txt, for models of bytes")
    parser.add_argument("--per-kind", type=int, default=5, help="prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ours", nargs="+", choices=["eager", "packed", "compiled"], default=["eager", "packed"])
    parser.add_argument("--lookahead", type=int, default=4, help="K, with a draft model")
    parser.add_argument("--lookup", type=int, default=7, help="K, with prompt lookup")
    parser.add_argument("--hf-lookup", type=int, default=10, help="`prompt_lookup_num_tokens`")
    parser.add_argument("--warm-up", type=int, default=2048, help="tokens that compiled models are warmed up to")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of this thread alone: for one thread (OMP_NUM_THREADS=1) on a machine that others use",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        Clock.is_cpu_time = True
    transformers.logging.set_verbosity_error()
    for name in ("target", "draft"):
        if str(getattr(arguments, name)) == "bundled":
            setattr(arguments, name, specsampling.bundled(name))
    tokenizer = None if arguments.data else transformers.AutoTokenizer.from_pretrained(arguments.target)
    ends = [] if tokenizer is None else [tokenizer.eos_token_id]
    prompts = list(read_prompts(arguments, tokenizer))
    if not prompts:
        parser.error("no prompts: give --prompts, --humaneval or --data")
    modes, making, has_draft = make_modes(arguments, ends)
    for mode in modes.values():  # warm-up
        mode([prompts[-1].ids], 8, 0.0, 0)
    report: dict[str, Any] = {"seconds_to_load_pack_and_compile": making, "tables": {}}
    for batch_size in arguments.batch_sizes:
        names = [name for name in modes if batch_size == 1 or name == "HF plain" or not name.startswith("HF")]
        step = batch_size
        batches = [prompts[i : i + step] for i in range(0, len(prompts) - step + 1, step)]
        if not batches:
            print(f"batch {batch_size}: only {len(prompts)} prompts")
            continue
        for temperature in arguments.temperatures:
            runs: dict[str, list[Measured]] = {name: [] for name in names}
            for mode in modes.values():
                if isinstance(mode, Ours):
                    mode.round_ratios, mode.accepted, mode.tested = [], 0, 0
            title = f"batch {batch_size}, temperature {temperature:g}"
            with tqdm(total=len(batches) * len(names), desc=title, unit="run") as progress:
                for index, batch in enumerate(batches):
                    # The order turns from prompt to prompt: none always follows the same one.
                    for name in names[index % len(names) :] + names[: index % len(names)]:
                        ids = [prompt.ids for prompt in batch]
                        runs[name].append(modes[name](ids, arguments.max_new_tokens, temperature, index))
                        progress.update()
            kinds = sorted({prompt.kind for prompt in prompts})
            print(f"\n## {title} ({', '.join(kinds)}; {len(batches)} runs of each mode)\n")
            pairs = []
            for variant, rule in itertools.product(arguments.ours, ("", ", adaptive")):
                if not rule:
                    pairs.append((f"{variant} plain", "HF plain"))
                pairs.append((f"{variant} lookup{rule}", "HF plain"))
                if batch_size == 1:
                    pairs.append((f"{variant} lookup{rule}", "HF lookup"))
                    if has_draft:
                        pairs += [(f"{variant} draft{rule}", name) for name in ("HF assisted", "HF assisted, K")]
            if batch_size == 1:
                pairs.append(("HF lookup", "HF plain"))
            table = compare(runs, pairs)
            print("| mode | round / sum of its forward passes | accepted of proposed |\n|---|---|---|")
            for name in names:
                mode = modes[name]
                if isinstance(mode, Ours) and mode.round_ratios:
                    share = f"{mode.accepted / mode.tested:.2f}" if mode.tested else "-"
                    print(f"| {name} | {spread(mode.round_ratios, 3)} | {share} |")
                    table["modes"][name]["round_over_forwards"] = quartiles(mode.round_ratios)
                    table["modes"][name]["accepted_of_proposed"] = mode.accepted / max(mode.tested, 1)
            if temperature == 0:
                differ = [
                    name
                    for name in names
                    if any(a.tokens != b.tokens for a, b in zip(runs[name], runs["HF plain"], strict=True))
                ]
                print(f"\ngreedy texts other than HF plain's: {', '.join(differ) or 'none'}")
                table["greedy_texts_differ"] = differ
            report["tables"][title] = table
    if arguments.json:
        report["settings"] = {name: str(value) for name, value in vars(arguments).items()}
        report["machine"] = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "load": os.getloadavg(),
            "median_prompt_tokens": statistics.median(len(prompt.ids) for prompt in prompts),
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
