r"""Repeat the experiments of Chen et al. 2023 (arXiv 2302.01318): their Table 1 and Figure 1, on models that run here.

    python conformance/benchmarks/paper.py --backend numpy torch --target bundled --draft bundled --tasks text \
        --data DIR --lookahead 0-7 --repeats 5 --out DIR
    python conformance/benchmarks/paper.py --backend torch --target DIR --draft lookup DIR --tasks summarization code \
        --data DIR --lookahead 0-7 --repeats 5 --out DIR
    python conformance/benchmarks/paper.py --report DIR --profile 1.8:14.1

Everything measured goes to ``journal.jsonl`` in the output directory, one line at a time: killed in the middle, the
same command goes on where it was, and several commands may fill one directory. Whenever one ends, and with
``--report``, ``results.json`` (every run, and the machine, software and threads), ``table.md``, ``by-lookahead.md``,
``time.svg`` and ``acceptance.svg`` are made from it.

Times come from `--repeats` times `--prompts` prompts, all K by turns on each; scores and the comparison of texts come
from all prompts, once, at `--quality-lookahead`, in batches of `--quality-batch`. `--data` is a directory with
spec_bench.jsonl, HumanEval.jsonl.gz and tinyshakespeare.txt, or those of them that the tasks need. A model is a
checkpoint directory, or "bundled"; a drafter may also be "lookup", which takes the text's own n-grams. Threads are what
the environment says (OMP_NUM_THREADS).
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _paper_analysis import Profile, analyse, parse_profile
from _paper_bench import Bench, describe_checkpoint, load_options, resolve_checkpoint
from _paper_journal import (
    MOST_PROMPTS,
    CallsStep,
    Journal,
    RunKey,
    Sizes,
    kind_and_key,
    make_batches,
    make_plan,
    parse_lookaheads,
)
from _paper_sandbox import isolation
from _paper_tables import by_lookahead_table, tables
from _paper_tasks import FILES, SETTINGS, Task, load_tasks, read_codec
from tqdm import tqdm

import specsampling

__all__ = ["build_parser", "main", "report", "run"]

_PACKAGES = (
    *("specsampling", "numpy", "torch", "transformers", "jax", "jaxlib", "onnxruntime", "tokenizers", "rouge-score"),
)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["numpy"], metavar="NAME")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="for `load_model`")
    parser.add_argument("--target", default="bundled", metavar="DIR")
    parser.add_argument("--draft", nargs="+", default=["bundled"], metavar="DIR", help='or "bundled", or "lookup"')
    parser.add_argument("--tasks", nargs="+", choices=sorted(FILES), default=["text"])
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="only these sampling settings, of any task")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the prompts are")
    parser.add_argument("--lookahead", type=parse_lookaheads, default=parse_lookaheads("0-7"), metavar="0-7")
    parser.add_argument("--repeats", type=int, default=5, help="of all times, each on other prompts; 0: no times")
    parser.add_argument("--prompts", type=int, default=1, help="of each task and repeat, for times")
    parser.add_argument("--quality-prompts", type=int, default=MOST_PROMPTS, help="of each task, for scores")
    parser.add_argument("--quality-lookahead", type=parse_lookaheads, default=(0, 4), metavar="0,4")
    parser.add_argument("--quality-batch", type=int, default=8, metavar="N", help="texts for scores written together")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's CPU time in place of wall time: for one thread on a machine that others use too",
    )
    parser.add_argument("--minutes", type=float, help="stop after this long; the same command then goes on")
    parser.add_argument("--out", type=Path, metavar="DIR", help="what is measured goes there")
    parser.add_argument("--report", type=Path, metavar="DIR", help="measure nothing: report on what is there")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where the report goes, if not to the same directory")
    parser.add_argument(
        "--profile",
        action="append",
        type=parse_profile,
        default=[],
        metavar="DRAFT:TARGET[:FURTHER]",
        help="also compute what the measured rounds would take with these call times, in ms",
    )
    return parser


def _machine() -> dict[str, Any]:
    cores = os.cpu_count()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": cores,
        "cores_allowed": allowed,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _threads() -> dict[str, Any]:
    counts: dict[str, Any] = {name: os.environ.get(name) for name in _THREADS}
    if "torch" in sys.modules:
        counts["torch"] = sys.modules["torch"].get_num_threads()
    return counts


def run(arguments: argparse.Namespace, journal: Journal) -> None:
    """Take every step of the plan that is not in the journal."""
    began = time.monotonic()
    target_name, target_folder = resolve_checkpoint(arguments.target, "target")
    folders = dict(map(_drafter, arguments.draft))
    codec = read_codec(target_folder)
    if not (arguments.data and arguments.data.is_dir()):
        raise SystemExit(f"`--data` must be the directory with {', '.join(FILES[name] for name in arguments.tasks)}")
    tasks = load_tasks(arguments.tasks, arguments.data, codec)
    sizes = {name: _sizes(task, arguments) for name, task in tasks.items()}
    models = {target_name: describe_checkpoint(target_folder)}
    models |= {f"{name} (draft)": describe_checkpoint(folder) for name, folder in folders.items() if folder is not None}
    _check_same(journal, models, {name: task.digest for name, task in tasks.items()}, arguments)
    label = "".join(f" {name}={value}" for name, value in arguments.options.items())
    plans = {
        backend: list(
            make_plan(
                backend=backend + label,
                target=target_name,
                drafters=list(folders),
                tasks=sizes,
                lookaheads=arguments.lookahead,
                quality_lookaheads=arguments.quality_lookahead,
                repeats=arguments.repeats,
            )
        )
        for backend in arguments.backend
    }
    total = sum(map(len, plans.values()))
    done = sum(journal.has_step(step) for plan in plans.values() for step in plan)
    with tqdm(total=total, initial=done, unit="step", smoothing=0.05) as progress:
        for backend, plan in plans.items():
            steps = [step for step in plan if not journal.has_step(step)]
            if not steps and not _differing(journal, plan):
                continue
            progress.set_description(f"{backend}: loading")
            options = load_options(backend, arguments.options)
            bench = Bench(
                target=specsampling.load_model(backend, target_folder, **options),
                drafters={
                    name: specsampling.PromptLookup()
                    if folder is None
                    else specsampling.load_model(backend, folder, **options)
                    for name, folder in folders.items()
                },
                tasks=tasks,
                codec=codec,
                lookaheads=tuple(sorted({*arguments.lookahead, 0})),
                seed=arguments.seed,
                clock=time.process_time if arguments.cpu_time else time.perf_counter,
            )
            journal.append(
                "session",
                None,
                models=models,
                data={name: task.digest for name, task in tasks.items()},
                seed=arguments.seed,
                clock=_clock_name(arguments),
                machine=_machine(),
                versions=_versions(),
                threads=_threads(),
                load_average=list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
                isolation=isolation() if "code" in tasks else None,
            )
            batches = make_batches(steps, arguments.quality_batch)
            _take(bench, batches, journal, progress, sizes, began, arguments.minutes)
            if _is_over(began, arguments.minutes):
                break
            _compare_greedy(bench, plan, journal, progress)
    if _is_over(began, arguments.minutes):
        tqdm.write("out of time: the same command goes on from here")


def _clock_name(arguments: argparse.Namespace) -> str:
    return "CPU time" if arguments.cpu_time else "wall time"


def _drafter(name: str) -> tuple[str, Path | None]:
    return ("lookup", None) if name == "lookup" else resolve_checkpoint(name, "draft")


def _sizes(task: Task, arguments: argparse.Namespace) -> Sizes:
    settings = [name for name in SETTINGS[task.name] if arguments.settings is None or name in arguments.settings]
    most = len(task.prompts)
    return Sizes(
        settings=settings,
        speed_prompts=min(arguments.prompts, most // arguments.repeats) if arguments.repeats else 0,
        quality_prompts=min(arguments.quality_prompts, most),
        max_new_tokens=arguments.max_new_tokens,
    )


def _check_same(
    journal: Journal, models: Mapping[str, Any], data: Mapping[str, str], arguments: argparse.Namespace
) -> None:
    """Refuse to go on with other weights, prompts, seeds or clocks than those of the journal's runs."""
    for session in journal.of("session"):
        for name, model in models.items():
            if session["models"].get(name, model)["sha256"] != model["sha256"]:
                raise SystemExit(f"{journal.path} is of another model called {name!r}: choose another --out")
        for name, digest in data.items():
            if session["data"].get(name, digest) != digest:
                raise SystemExit(f"{journal.path} is of other prompts for {name!r}: choose another --out")
        if session["seed"] != arguments.seed:
            raise SystemExit(f"{journal.path} is of the seed {session['seed']}: choose another --out")
        if session["clock"] != _clock_name(arguments):
            raise SystemExit(f"{journal.path} is of {session['clock']}: choose another --out")


def _is_over(began: float, minutes: float | None) -> bool:
    return minutes is not None and time.monotonic() - began > 60 * minutes


def _take(
    bench: Bench,
    batches: Iterable[CallsStep | Sequence[RunKey]],
    journal: Journal,
    progress: Any,
    sizes: Mapping[str, Sizes],
    began: float,
    minutes: float | None,
) -> None:
    # Where rounds are compiled, each prompt has shapes of its own; elsewhere the first calls are all there is to warm.
    compiles = hasattr(bench.target, "compile_round")
    warm: set[tuple[Any, ...]] = set()
    for batch in batches:
        if _is_over(began, minutes):
            return
        steps: Sequence[CallsStep | RunKey] = [batch] if isinstance(batch, CallsStep) else batch
        progress.set_description(f"{steps[0].backend}: {steps[0].task}")
        if isinstance(batch, CallsStep):
            results = [bench.time_calls(batch, sizes[batch.task].max_new_tokens)]
        else:
            key = batch[0]
            mode = key.drafter, key.lookahead, key.task, key.setting, key.prompt if compiles else 0
            if key.study == "speed" and mode not in warm:
                bench.warm_up(key)
                warm.add(mode)
            results = bench.run(*batch)
        for step, result in zip(steps, results, strict=True):
            journal.append(*kind_and_key(step), **result)
            progress.update()


def _differing(journal: Journal, plan: Sequence[RunKey | CallsStep]) -> list[tuple[dict[str, Any], Any, Any]]:
    """Return, for greedy texts that differ from plain ones and were not compared yet, the key and both texts."""
    planned = {json.dumps(kind_and_key(step)[1], sort_keys=True) for step in plan if isinstance(step, RunKey)}
    runs = {
        json.dumps(entry["key"], sort_keys=True): entry
        for entry in journal.of("run")
        if entry["key"]["study"] == "quality" and entry["key"]["setting"] == "greedy"
    }
    found = []
    for name, entry in runs.items():
        key = entry["key"]
        plain = runs.get(json.dumps({**key, "drafter": "plain", "lookahead": 0}, sort_keys=True))
        if name in planned and key["lookahead"] and plain is not None and plain["digest"] != entry["digest"]:
            found.append((key, plain["tokens"], entry["tokens"]))
    return [item for item in found if not journal.has("greedy", item[0])]


def _compare_greedy(bench: Bench, plan: Sequence[RunKey | CallsStep], journal: Journal, progress: Any) -> None:
    for key, plain, other in _differing(journal, plan):
        progress.set_description(f"{key['backend']}: ties")
        journal.append("greedy", key, **bench.compare_greedy(key["task"], key["prompt"], plain, other))


def report(journal: Journal, into: Path, profiles: Sequence[Profile]) -> None:
    """Write the JSON, the tables and the figures."""
    from _paper_figures import draw_acceptance, draw_times

    into.mkdir(parents=True, exist_ok=True)
    sessions = journal.of("session")
    if not sessions:
        raise SystemExit(f"{journal.path} is empty: nothing was measured")
    analysis = analyse(journal.entries, profiles)
    results = {
        "format": 1,
        "profiles": [profile._asdict() for profile in profiles],
        "analysis": analysis,
        "sessions": [_without(entry, "kind", "key") for entry in sessions],
        "runs": _as_table(journal.of("run")),
        "calls": [_without(entry, "kind") for entry in journal.of("calls")],
        "greedy_texts_that_differ": [_without(entry, "kind") for entry in journal.of("greedy")],
    }
    (into / "results.json").write_text(_one_entry_a_line(results) + "\n", encoding="utf-8")
    (into / "table.md").write_text(tables(analysis, sessions), encoding="utf-8")
    if analysis["speed"]:
        (into / "by-lookahead.md").write_text(by_lookahead_table(analysis), encoding="utf-8")
        draw_times(analysis["speed"], into / "time.svg")
        draw_acceptance(analysis["speed"], into / "acceptance.svg")


def _without(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def _as_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return runs as names of columns and rows of values; texts stay in the journal, digests tell them apart."""
    flat = []
    for run in runs:
        entry = {**run["key"], **_without(run, "kind", "key", "tokens", "logprobs", "text", "phases")}
        flat.append(entry | {f"{phase}_phase_seconds": seconds for phase, seconds in run["phases"].items()})
    columns = list(dict.fromkeys(name for entry in flat for name in entry))

    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {"columns": columns, "rows": [[short(entry.get(name)) for name in columns] for entry in flat]}


def _one_entry_a_line(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each member down to the second level, so that versions can be compared."""
    margin = "\n" + " " * (depth + 1)
    if depth < 3 and isinstance(value, dict) and value:
        members = [f"{json.dumps(name)}: {_one_entry_a_line(member, depth + 1)}" for name, member in value.items()]
        return "{" + margin + f",{margin}".join(members) + "\n" + " " * depth + "}"
    if depth < 3 and isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[" + margin + f",{margin}".join(map(json.dumps, value)) + "\n" + " " * depth + "]"
    return json.dumps(value)


def main(command: Sequence[str] | None = None) -> None:
    """Measure, and report."""
    parser = build_parser()
    arguments = parser.parse_args(command)
    if (arguments.out is None) == (arguments.report is None):
        parser.error("give either --out or --report")
    known = set(itertools.chain.from_iterable(SETTINGS.values()))
    if unknown := set(arguments.settings or ()) - known:
        parser.error(f"--settings must be of {sorted(known)}, got {sorted(unknown)}")
    folder = arguments.out or arguments.report
    journal = Journal(folder / "journal.jsonl")
    if arguments.out:
        run(arguments, journal)
    report(journal, arguments.into or folder, arguments.profile)


if __name__ == "__main__":
    main()
