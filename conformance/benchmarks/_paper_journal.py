"""The journal of a study: one line of JSON for everything that was measured, so that a run can be killed and go on."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CallsStep", "Journal", "RunKey", "Sizes", "make_batches", "make_plan", "parse_lookaheads"]

MOST_PROMPTS = 1000
MOST_LOOKAHEAD = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """What one text was written for, with and by: two runs of one key write the same text.

    Attributes
    ----------
    study : {"speed", "quality"}
        Times are taken from "speed", texts from "quality".
    backend, target, drafter : str
        Names; the drafter of plain decoding is "plain".
    task, setting : str
        As in the tasks.
    lookahead, prompt, repeat, max_new_tokens : int
        K, which prompt of the task, how many times before, and the limit.
    """

    study: str
    backend: str
    target: str
    drafter: str
    task: str
    setting: str
    lookahead: int
    prompt: int
    repeat: int
    max_new_tokens: int

    @property
    def row_id(self) -> int:
        """The row id that its random draws are made under: its own for each prompt, repeat and K."""
        return (self.repeat * MOST_PROMPTS + self.prompt) * (MOST_LOOKAHEAD + 1) + self.lookahead


class CallsStep(NamedTuple):
    """Time the calls of both models, on a text as long as the task's, once per repeat."""

    backend: str
    target: str
    task: str
    repeat: int


class Sizes(NamedTuple):
    """What of a task is run: its settings, prompts for times in each repeat, prompts for quality, and tokens."""

    settings: Sequence[str]
    speed_prompts: int
    quality_prompts: int
    max_new_tokens: int


def parse_lookaheads(text: str) -> tuple[int, ...]:
    """Return the values of K that a list such as ``0-3,6`` names, in rising order.

    Examples
    --------
    >>> parse_lookaheads("0-3,6")
    (0, 1, 2, 3, 6)
    """
    values: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        values.update(range(int(low), int(high or low) + 1))
    if not values or max(values) > MOST_LOOKAHEAD:
        raise ValueError(f"lookaheads must be 0 to {MOST_LOOKAHEAD}, got {text!r}")
    return tuple(sorted(values))


def make_plan(
    *,
    backend: str,
    target: str,
    drafters: Sequence[str],
    tasks: Mapping[str, Sizes],
    lookaheads: Sequence[int],
    quality_lookaheads: Sequence[int],
    repeats: int,
) -> Iterator[RunKey | CallsStep]:
    """Yield every step, in the order in which it is taken.

    For times, each repeat goes through all tasks and settings with prompts of its own, since acceptance varies far more
    between prompts than between runs, and with each prompt through all modes, one after the other, beginning with
    another one each time: whatever else the machine does meets all modes alike. What a run that is stopped early lacks
    are whole repeats. Plain decoding, K = 0, is there once for all drafters.
    """

    def run(study: str, task: str, setting: str, mode: tuple[str, int], prompt: int, repeat: int) -> RunKey:
        drafter, lookahead = mode
        return RunKey(
            study=study,
            backend=backend,
            target=target,
            drafter=drafter,
            task=task,
            setting=setting,
            lookahead=lookahead,
            prompt=prompt,
            repeat=repeat,
            max_new_tokens=tasks[task].max_new_tokens,
        )

    for repeat in range(repeats):
        for task, sizes in tasks.items():
            if sizes.speed_prompts:
                yield CallsStep(backend, target, task, repeat)
            modes = _modes(drafters, lookaheads)
            prompts = range(repeat * sizes.speed_prompts, (repeat + 1) * sizes.speed_prompts)
            for setting, prompt in itertools.product(sizes.settings, prompts):
                start = prompt % len(modes)
                for mode in modes[start:] + modes[:start]:
                    yield run("speed", task, setting, mode, prompt, repeat)
    most = max((sizes.quality_prompts for sizes in tasks.values()), default=0)
    # Prompt by prompt through all tasks: a run that is stopped early has some of each.
    for prompt, (task, sizes) in itertools.product(range(most), tasks.items()):
        if prompt >= sizes.quality_prompts:
            continue
        for setting, mode in itertools.product(sizes.settings, _modes(drafters, quality_lookaheads)):
            yield run("quality", task, setting, mode, prompt, 0)


def make_batches(steps: Iterable[RunKey | CallsStep], size: int) -> Iterator[CallsStep | list[RunKey]]:
    """Yield `steps` as they come, but those that are not timed in batches of texts that differ in their prompt only."""
    waiting: dict[RunKey, list[RunKey]] = {}
    for step in steps:
        if isinstance(step, CallsStep):
            yield step
        elif step.study == "speed":
            yield [step]
        else:
            alike = replace(step, prompt=0)
            batch = waiting.setdefault(alike, [])
            batch.append(step)
            if len(batch) == size:
                yield waiting.pop(alike)
    yield from waiting.values()


def _modes(drafters: Sequence[str], lookaheads: Sequence[int]) -> list[tuple[str, int]]:
    plain = [("plain", 0)] if 0 in lookaheads else []
    return plain + [(drafter, lookahead) for lookahead in lookaheads if lookahead for drafter in drafters]


class Journal:
    """A file of entries, each on a line of its own and on disk before the next step begins.

    Parameters
    ----------
    path : Path
        The file; made if it is not there. A last line that was cut off by a kill is dropped.

    Attributes
    ----------
    entries : list of dict
        Everything in it. The key ``kind`` says what an entry is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        whole = path.read_bytes()
        complete = whole[: whole.rfind(b"\n") + 1]
        if len(complete) < len(whole):
            os.truncate(path, len(complete))
        self.entries = [json.loads(line) for line in complete.splitlines()]
        self._done = {self._identity(entry) for entry in self.entries}

    @staticmethod
    def _identity(entry: Mapping[str, Any]) -> str:
        return json.dumps([entry["kind"], entry.get("key")], sort_keys=True)

    def has(self, kind: str, key: Mapping[str, Any]) -> bool:
        """Whether there is such an entry."""
        return self._identity({"kind": kind, "key": key}) in self._done

    def has_step(self, step: RunKey | CallsStep) -> bool:
        """Whether a step of the plan was taken."""
        return self.has(*kind_and_key(step))

    def append(self, kind: str, key: Mapping[str, Any] | None, **content: Any) -> None:
        """Write an entry down."""
        entry = {"kind": kind, "key": key, **content}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)
        self._done.add(self._identity(entry))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of a kind, in the order in which they were written."""
        return [entry for entry in self.entries if entry["kind"] == kind]


def kind_and_key(step: RunKey | CallsStep) -> tuple[str, dict[str, Any]]:
    """Return under which kind and key a step is written down."""
    return ("run", asdict(step)) if isinstance(step, RunKey) else ("calls", step._asdict())
