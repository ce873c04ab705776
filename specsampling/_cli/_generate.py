"""``specsampling generate``: continue a prompt, and say what it took."""

import json
import os
import secrets
import stat
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specsampling._bundled import bundled
from specsampling._cli._compare import Comparison, compare
from specsampling._cli._display import Kind, Palette, describe, kinds_of, table
from specsampling._cli._text import TextStream, Tokenizer, end_tokens, load_tokenizer
from specsampling._errors import BackendError, SpecSamplingError
from specsampling._generation import generate, start
from specsampling._lookup import PromptLookup
from specsampling._model import Model
from specsampling._registry import load_model
from specsampling._results import Generation, RoundInfo
from specsampling._sampling import Sampling

__all__ = ["Task", "decode", "prepare", "report", "run"]

_DEFAULT_PROMPT = "ROMEO:"
_DEFAULT_MAX_NEW_TOKENS = 256
_COMPARE_RUNS = 5

# Seeds that every JSON reader keeps exact, those that know no integers included.
_SEED_BITS = 53


class Task(NamedTuple):
    """A run that has passed every check that comes before the first model call.

    Attributes
    ----------
    prompt : str
        The prompt as text.
    prompt_ids : list of int
        The prompt as ids.
    tokenizer : Tokenizer
        What turns ids into text.
    target : Model
        The target.
    drafter : Model, PromptLookup or None
        What proposes tokens.
    options : dict
        Keyword arguments of `specsampling.generate`.
    names : dict
        What was loaded: backend, target and draft.
    """

    prompt: str
    prompt_ids: list[int]
    tokenizer: Tokenizer
    target: Model[Any]
    drafter: Any
    options: dict[str, Any]
    names: dict[str, str]


def run(arguments: Namespace) -> int:
    """Run the command and return the exit status."""
    task = prepare(arguments)
    result, seconds, kinds = decode(task, quiet=arguments.json, color=arguments.color)
    comparison = None
    if arguments.compare:
        comparison = _compare(task, arguments.compare_runs or _COMPARE_RUNS)
    if arguments.json:
        print(json.dumps(report(task, result, seconds, kinds, comparison)))
        return 0
    palette = Palette(sys.stderr, arguments.color)
    lines = [describe(result, seconds)]
    if task.drafter is not None and palette.legend():
        lines.insert(0, palette.legend())
    if arguments.stats:
        lines.append(table(result.stats, result.finish_reasons[0]))
    if comparison is not None:
        lines.append(str(comparison))
    print("\n".join(lines), file=sys.stderr)
    return 0


def prepare(arguments: Namespace) -> Task:
    """Check the arguments, load the models and lay the run out."""
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p
    )
    prompt = _prompt(arguments.prompt)
    for option in ("target", "draft"):
        if getattr(arguments, option) == "":
            raise ValueError(f"`--{option}` must name a checkpoint, got ''")
    draft = arguments.draft or ("lookup" if arguments.target else str(bundled("draft")))
    if arguments.compare and draft == "none":
        raise ValueError("`--compare` needs a draft to compare with plain decoding, got --draft none")
    if arguments.compare_runs is not None:
        if arguments.compare_runs < 1:
            raise ValueError(f"`--compare-runs` must be at least 1, got {arguments.compare_runs}")
        if not arguments.compare:
            raise ValueError("`--compare-runs` has no effect without `--compare`")
    seed = secrets.randbits(_SEED_BITS) if arguments.seed is None else arguments.seed
    checkpoint = Path(arguments.target) if arguments.target else bundled("target")
    target = _load("target", arguments.backend, checkpoint, arguments)
    drafter: Any = None
    if draft == "lookup":
        drafter = PromptLookup()
    elif draft != "none":
        drafter = _load("draft", arguments.backend, Path(draft), arguments)
    tokenizer = load_tokenizer(checkpoint, target.vocab_size)
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        from_stdin = ", and standard input was" if arguments.prompt in (None, "-") else ""
        raise ValueError(f"`PROMPT` must not be empty{from_stdin}")
    ends = end_tokens(checkpoint, target.vocab_size) if arguments.end_token is None else arguments.end_token
    options = {
        "sampling": sampling,
        "max_new_tokens": arguments.max_new_tokens,
        "min_new_tokens": arguments.min_new_tokens,
        "end_tokens": tuple(ends),
        "stop_sequences": tuple(tuple(tokenizer.encode_bare(text)) for text in arguments.stop),
        "pad_vocab": arguments.pad_vocab,
        "seed": seed,
    }
    room = getattr(target, "max_length", None)
    if room is not None and len(prompt_ids) >= room and arguments.max_new_tokens != 0:
        raise ValueError(
            f"`PROMPT` must be shorter than the target's context of {room} tokens, got {len(prompt_ids)} tokens"
        )
    if arguments.max_new_tokens is None:
        left = _DEFAULT_MAX_NEW_TOKENS if room is None else min(_DEFAULT_MAX_NEW_TOKENS, room - len(prompt_ids))
        options["max_new_tokens"] = left
    # More than that can never be used, and would only be drafted.
    options["lookahead"] = min(arguments.lookahead, max(options["max_new_tokens"] - 1, 0))
    names = {"backend": arguments.backend, "target": str(checkpoint), "draft": draft}
    return Task(prompt, prompt_ids, tokenizer, target, drafter, options, names)


def decode(task: Task, *, quiet: bool, color: str) -> tuple[Generation, float, list[Kind]]:
    """Generate once, printing prompt and text as it comes unless `quiet`."""
    began = time.perf_counter()
    running = start(task.target, task.drafter, [task.prompt_ids], {**task.options, "row_ids": None})
    kinds: list[Kind] = []
    if quiet:
        for info in running.rounds():
            kinds.extend(_kinds(info))
        return running.result(), time.perf_counter() - began, kinds
    palette = Palette(sys.stdout, color)
    text = TextStream(task.tokenizer.decode, task.prompt_ids)
    last_piece = task.prompt
    _write(palette("prompt", task.prompt))
    for info in running.rounds():
        kinds.extend(round_kinds := _kinds(info))
        tokens = info.tokens[0, : info.num_emitted[0]].tolist()
        for kind, piece in _pieces(text, tokens, round_kinds):
            _write(palette(kind, piece))
            last_piece = piece
    seconds = time.perf_counter() - began
    if rest := text.flush():
        _write(palette(kinds[-1], rest))
        last_piece = rest
    if not last_piece.endswith("\n"):
        _write("\n")
    return running.result(), seconds, kinds


def report(
    task: Task, result: Generation, seconds: float, kinds: list[Kind], comparison: Comparison | None
) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    stats = result.stats
    counts = {name: getattr(stats, name) for name in stats.__dataclass_fields__ if name not in ("config", "times")}
    sampling = task.options["sampling"]
    settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        **task.names,
        "tokenizer": task.tokenizer.name,
        "prompt": task.tokenizer.decode(task.prompt_ids) if task.tokenizer.name == "bytes" else task.prompt,
        "text": task.tokenizer.decode(result.tokens[0]),
        "prompt_tokens": task.prompt_ids,
        "tokens": result.tokens[0],
        "from_draft": result.from_draft[0],
        "kinds": kinds,
        "finish_reason": result.finish_reasons[0],
        "seed": result.seed,
        "options": {**task.options, "sampling": settings},
        "seconds": seconds,
        "stats": {
            **counts,
            "acceptance_rate": stats.acceptance_rate,
            "tokens_per_target_call": stats.tokens_per_target_call,
            "times": stats.times._asdict(),
        },
        "compare": None if comparison is None else comparison._asdict(),
    }


def _compare(task: Task, runs: int) -> Comparison:
    def speculative(seed: int) -> Generation:
        return generate(task.target, task.drafter, [task.prompt_ids], **{**task.options, "seed": seed})

    def plain(seed: int) -> Generation:
        return generate(task.target, None, [task.prompt_ids], **{**task.options, "seed": seed})

    return compare(speculative, plain, seed=task.options["seed"], runs=runs)


def _load(role: str, backend: str, checkpoint: Path, arguments: Namespace) -> Model[Any]:
    try:
        return load_model(backend, checkpoint, dtype=arguments.dtype, device=arguments.device)
    except BackendError:
        raise
    except Exception as error:  # an adapter meets a broken checkpoint in ways of its own
        kind = "" if isinstance(error, SpecSamplingError | ValueError | OSError) else f"{type(error).__name__}: "
        remedy = "; `lookup` and `none` need no checkpoint" if role == "draft" and not checkpoint.exists() else ""
        raise ValueError(f"cannot load the {role} `{checkpoint}`: {kind}{error}{remedy}") from error


def _prompt(argument: str | None) -> str:
    """Return the prompt: as given, from a pipe, or one that the bundled models know."""
    if argument not in (None, "-"):
        return argument
    if argument is None and not _is_piped():
        return _DEFAULT_PROMPT
    if sys.stdin is None:
        raise ValueError("`PROMPT` must be text where standard input is closed, got '-'")
    return sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")


def _is_piped() -> bool:
    """Return whether somebody sends a text; a terminal and what programs in the background have do not."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError):  # there is none, or something that is no file stands in for it
        return False


def _kinds(info: RoundInfo) -> list[Kind]:
    return kinds_of(int(info.num_emitted[0]), int(info.num_accepted[0]), int(info.num_proposed[0]))


def _pieces(text: TextStream, tokens: Sequence[int], kinds: Sequence[Kind]) -> Iterator[tuple[Kind, str]]:
    """Yield text with its kind; neighbours of one kind come as one piece, a character belongs to its last token."""
    pending = ""
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        pending += text.push(token)
        if pending and (index + 1 == len(kinds) or kinds[index + 1] != kind):
            yield kind, pending
            pending = ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
