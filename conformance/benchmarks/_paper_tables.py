"""The analysis as Markdown: the paper's Table 1 beside ours, what explains it, quality, and everything by K."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _paper_analysis import solve_acceptance

__all__ = ["by_lookahead_table", "tables"]

# Chen et al. 2023, Table 1: task, setting, ms a token plain and speculative, and the speed-up as printed (for the first
# line the times give 1.88). K = 4, batch 1, a target of 70 B parameters on 16 TPU v4, a draft of 4 B.
PAPER = (
    ("summarization (XSum)", "nucleus 0.8", 14.1, 7.52, 1.92),
    ("summarization (XSum)", "greedy", 14.1, 7.00, 2.01),
    ("code (HumanEval)", "nucleus 0.95, T 0.8", 14.1, 5.73, 2.46),
)
PAPER_DRAFT_MS = 1.8
REFERENCE_LOOKAHEAD = 4
_FEWEST_SOLVED = 10


def tables(analysis: Mapping[str, Any], sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables but that by K."""
    speed, quality = analysis["speed"], analysis["quality"]
    parts = [_conditions(sessions)]
    if speed:
        parts += ["## Time", _time_table(speed), "## What explains it", _causes_table(speed)]
        if computed := _computed_table(speed):
            parts += ["## Computed for other call times", computed]
    if quality:
        parts += ["## Quality", _quality_table(quality), *_remarks(quality)]
        parts += ["### Greedy texts, token by token", _greedy_table(quality)]
        parts += ["### Sampled texts: can they be told apart?", _law_table(quality)]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_lookahead_table(analysis: Mapping[str, Any]) -> str:
    """Return what was measured for every K."""
    head = (
        *("backend", "target", "drafter", "task", "setting", "K", "ms a token [95 %]", "predicted", "speed-up [95 %]"),
        *("ms a round", "tokens a round", "acceptance [95 %]", "rounds drafted"),
    )
    lines = []
    for row in analysis["speed"]:
        for at in row["by_lookahead"]:
            acceptance = at["acceptance_by_text"]
            lines.append(
                (
                    *_names(row),
                    at["lookahead"],
                    _interval(at["ms_per_token"], row["prompts"]),
                    _number(at["predicted_ms_per_token"]),
                    _interval(at["speedup"], row["prompts"]),
                    _number(at["ms_per_round"]),
                    f"{at['tokens_per_round']:.2f}",
                    _interval(acceptance, row["prompts"]) if acceptance else "",
                    f"{at['coverage']:.0%}" if at["lookahead"] else "",
                )
            )
    return _markdown(head, lines) + "\n"


def _markdown(head: Iterable[Any], lines: Iterable[Iterable[Any]]) -> str:
    cells = [[str(cell) for cell in line] for line in lines]
    titles = list(head)
    rows = [titles, ["---"] * len(titles), *cells]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _interval(spread: Sequence[float], texts: int) -> str:
    """Return a value and its interval, which one text does not have."""
    value, low, high = spread
    return _number(value) if texts < 2 else f"{_number(value)} [{_number(low)}, {_number(high)}]"


def _names(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("backend", "target", "drafter", "task", "setting"))


def _reference(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the entry of K = 4, or of the K nearest to it."""
    drafted = [row for row in rows if row["lookahead"]]
    return min(drafted, key=lambda row: (abs(row["lookahead"] - REFERENCE_LOOKAHEAD), row["lookahead"]))


def _conditions(sessions: Sequence[Mapping[str, Any]]) -> str:
    loads = [session["load_average"][0] for session in sessions if session["load_average"]]
    last = sessions[-1]
    machine = last["machine"]
    cores = machine["cores_allowed"]
    threads = sorted({f"{name} {n}" for session in sessions for name, n in session["threads"].items() if n})
    lines = [
        (
            f"Machine: {machine['processor']}, {cores} cores in use of {machine['cores']}, {machine['system']}; "
            f"Python {machine['python']}. Threads: {', '.join(threads) or 'as by default'}. "
            f"Load average at the start of the sessions: {', '.join(f'{load:.1f}' for load in loads)}."
        )
    ]
    versions: dict[str, str] = {}
    models: dict[str, Any] = {}
    for session in sessions:
        versions |= session["versions"]
        models |= session["models"]
    lines.append("Software: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    lines.append(
        "Models: "
        + "; ".join(
            f"{name}, {model['parameters'] / 1e6:.3g} M parameters in {model['num_hidden_layers']} layers"
            for name, model in models.items()
        )
        + "."
    )
    clocks = {session["clock"] for session in sessions}
    if clocks == {"CPU time"}:
        lines.append(
            "**Times are CPU time of the process, not wall time:** the machine was shared, one thread was used."
        )
    elif loads and max(loads) > 0.5 * cores:
        lines.append(
            "**The machine was busy with other work.** Modes were interleaved, so that ratios mean something; times in "
            "milliseconds do not."
        )
    return "\n\n".join(lines)


def _time_table(speed: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *("backend", "target", "drafter", "task", "setting", "texts", "ms a token, plain", "ms a token, K", "speed-up"),
        *("K", "best K found (in share of resamples)", "best K predicted", "speed-up at the best K"),
    )
    lines: list[tuple[Any, ...]] = []
    for task, setting, plain, speculative, printed in PAPER:
        times = plain, speculative, f"{printed:.2f}"
        paper = ("*paper*", "70 B", "4 B", task, setting, "", *times, 4, "", "", "")
        lines.append(paper)
    for row in speed:
        rows = row["by_lookahead"]
        at = _reference(rows)
        best = next(entry for entry in rows if entry["lookahead"] == row["best_lookahead"])
        share = best["share_of_resamples_in_which_best"]
        lines.append(
            (
                *_names(row),
                row["prompts"],
                _interval(rows[0]["ms_per_token"], row["prompts"]),
                _interval(at["ms_per_token"], row["prompts"]),
                _interval(at["speedup"], row["prompts"]),
                at["lookahead"],
                f"{row['best_lookahead']} ({share:.0%})" if row["prompts"] > 1 else row["best_lookahead"],
                "" if row["predicted_best_lookahead"] is None else row["predicted_best_lookahead"],
                _interval(best["speedup"], row["prompts"]),
            )
        )
    return _markdown(head, lines)


def _causes_table(speed: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *(
            "backend",
            "target",
            "drafter",
            "task",
            "setting",
            "acceptance",
            "tokens a round",
            "draft step / target step",
        ),
        *("block of K + 1 / target step", "K", "speed-up by the formula", "measured"),
    )
    lines: list[tuple[Any, ...]] = []
    for task, setting, plain, speculative, printed in PAPER:
        # The paper says neither: they follow from its times, if a block costs what a step does.
        tokens = (4 * PAPER_DRAFT_MS + plain) / speculative
        implied = f"{solve_acceptance(tokens, 4):.2f} (implied)", f"{tokens:.2f} (implied)"
        ratio, gain = f"{PAPER_DRAFT_MS / plain:.2f}", f"{printed:.2f}"
        lines.append(("*paper*", "70 B", "4 B", task, setting, *implied, ratio, "1 (assumed)", 4, "", gain))
    for row in speed:
        plain, at = row["by_lookahead"][0], _reference(row["by_lookahead"])
        step, block, predicted = plain["target_block_ms"], at["target_block_ms"], at["predicted_ms_per_token"]
        lines.append(
            (
                *_names(row),
                _number(at["acceptance"]),
                f"{at['tokens_per_round']:.2f}",
                "" if step is None else f"{at['draft_step_ms'] / step:.3f}",
                "" if step is None else f"{block / step:.2f}",
                at["lookahead"],
                "" if step is None else f"{plain['predicted_ms_per_token'] / predicted:.2f}",
                _interval(at["speedup"], row["prompts"]),
            )
        )
    return _markdown(head, lines)


def _computed_table(speed: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in speed:
        for name, entries in row["computed"].items():
            at = _reference(entries)
            best = min(entries, key=lambda entry: entry["ms_per_token"][0])
            lines.append(
                (
                    *_names(row),
                    name,
                    _interval(at["ms_per_token"], row["prompts"]),
                    _interval(at["speedup"], row["prompts"]),
                    at["lookahead"],
                    best["lookahead"],
                    _interval(best["speedup"], row["prompts"]),
                )
            )
    if not lines:
        return ""
    head = (
        *("backend", "target", "drafter", "task", "setting", "draft : target ms", "ms a token, K (computed)"),
        *("speed-up (computed)", "K", "best K (computed)", "speed-up at the best K (computed)"),
    )
    note = (
        "Not measured: the rounds that were measured here, each taken to cost K draft steps and one pass of the "
        "target, whatever its width unless the profile says otherwise. Sampling, verification and all else are taken "
        "to be free."
    )
    return note + "\n\n" + _markdown(head, lines)


def _quality_table(quality: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *("backend", "target", "drafter", "task", "setting", "K", "texts", "score, plain", "score, speculative"),
        *("difference [95 %]", "without a model"),
    )
    lines = [
        (
            *_names(row),
            row["lookahead"],
            row["texts"],
            f"{row['score_plain']:.3f}",
            f"{row['score']:.3f}",
            _interval(row["score_difference"], row["texts"]),
            "" if row["score_without_a_model"] is None else f"{row['score_without_a_model']:.3f}",
        )
        for row in quality
    ]
    note = (
        "Scores: ROUGE-2 (F, times 100) for summarization, share of problems solved for code, bits per byte under the "
        "target for text, of which fewer are better. Without a model: the first three sentences of the article."
    )
    return _markdown(head, lines) + "\n\n" + note


def _remarks(quality: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must be said of scores that mean little."""
    remarks = []
    code = [row for row in quality if row["task"] == "code"]
    weak = sorted({row["target"] for row in code if row["score_plain"] * row["texts"] < _FEWEST_SOLVED})
    if weak:
        remarks.append(
            f"**Code, {', '.join(weak)}: plain decoding solves fewer than {_FEWEST_SOLVED} of these problems in "
            "a setting. That is too few for a difference in pass rates to show. What the texts can show is below.**"
        )
    summaries = [row for row in quality if row["score_without_a_model"] is not None]
    poor = sorted({row["target"] for row in summaries if row["score_plain"] < row["score_without_a_model"]})
    if poor:
        remarks.append(
            f"**Summaries, {', '.join(poor)}: scores lie below those of the article's first three sentences. The model "
            "is too small for ROUGE-2 to say much of a summary; it serves as a number that a change of the law could "
            "move.**"
        )
    return remarks


def _greedy_table(quality: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *("backend", "target", "drafter", "task", "K", "texts", "equal", "numeric ties", "bugs", "not examined"),
        "margins of the ties (what rounding explains)",
    )
    lines = []
    for row in quality:
        if "greedy" not in row:
            continue
        found = row["greedy"]
        backend, target, drafter, task, _ = _names(row)
        margins = [
            f"{_number(t['margin'])} ({_number(t['tolerance'])})" for t in found["ties"] if t["margin"] is not None
        ]
        lines.append(
            (
                *(backend, target, drafter, task, row["lookahead"], row["texts"], found["equal"]),
                found["examined"] - found["bugs"],
                found["bugs"],
                row["texts"] - found["equal"] - found["examined"],
                ", ".join(margins[:6]) + (" …" if len(margins) > 6 else ""),
            )
        )
    return _markdown(head, lines) if lines else "No greedy texts."


def _law_table(quality: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *("backend", "target", "drafter", "task", "setting", "K", "texts", "tokens", "mean difference in nats [95 %]"),
        *("p of the mean", "Kolmogorov-Smirnov distance", "p of the distance"),
    )
    lines = [
        (
            *_names(row),
            row["lookahead"],
            row["texts"],
            row["tokens"],
            _interval(row["law"]["mean_difference"], row["texts"]),
            f"{row['law']['p_mean']:.3f}",
            f"{row['law']['distance']:.3f}",
            f"{row['law']['p_distance']:.3f}",
        )
        for row in quality
        if "law" in row
    ]
    if not lines:
        return "No sampled texts."
    tests = 2 * len(lines)
    note = (
        f"{tests} tests: with nothing wrong, about {0.05 * tests:.1f} of the p-values lie below 0.05. Backends make "
        "the same random draws, so that lines which differ in nothing else are not independent: one that stands out "
        "does so on all backends."
    )
    return _markdown(head, lines) + "\n\n" + note
