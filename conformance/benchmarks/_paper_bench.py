"""Models, and the three things that are done with them: write a text, time a call, hold a greedy text to its law."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _paper_journal import CallsStep, RunKey
from _paper_tasks import Codec, Task, Text, cut, num_kept

import specsampling
from specsampling_conformance import compare_greedy

__all__ = ["Bench", "describe_checkpoint", "resolve_checkpoint"]

_SAMPLES = 5


def resolve_checkpoint(name: str, role: str) -> tuple[str, Path]:
    """Return the name and the folder of what the command line calls a model; "bundled" is the pair of the package."""
    if name == "bundled":
        return "bundled", specsampling.bundled("target" if role == "target" else "draft")
    folder = Path(name).resolve()
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"`--{role}` must be a checkpoint directory with config.json, got {name}")
    return folder.name, folder


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """Return what identifies a checkpoint: its size, its shape and the digest of its weights."""
    digest, parameters = hashlib.sha256(), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            parameters += sum(int(np.prod(shape)) for shape in shapes)
            file.seek(0)
            while chunk := file.read(2**24):
                digest.update(chunk)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    return {"parameters": parameters, "sha256": digest.hexdigest(), **{name: config.get(name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One backend with a target and its drafters, loaded.

    Attributes
    ----------
    target : Model
        The target.
    drafters : mapping
        Draft models and drafters, by name.
    tasks : mapping
        Tasks, by name.
    codec : Codec
        The target's.
    lookaheads : tuple of int
        All K that are run, for which calls are timed.
    seed : int
        Of all runs; a row id of its own tells each from the others.
    clock : callable
        Returns the time, in seconds.
    """

    target: Any
    drafters: Mapping[str, Any]
    tasks: Mapping[str, Task]
    codec: Codec
    lookaheads: tuple[int, ...]
    seed: int
    clock: Callable[[], float] = time.perf_counter

    def warm_up(self, key: RunKey) -> None:
        """Take two rounds of a run and forget them: whatever compiles does so here."""
        decoder, state = self._begin(key)
        for _ in range(2):
            if not state.is_done:
                state, _ = decoder.step(state)

    def run(self, *keys: RunKey) -> list[dict[str, Any]]:
        """Write the text of each of `keys`, and return what it cost and what it is worth.

        Several are written as one batch, whose times are then those of all of it: for texts alone. They must differ in
        their prompt only.

        The first round, which also reads the prompt into the draft, is kept apart: `decode_seconds` are those of the
        rounds after it, in which `decoded` tokens came.
        """
        task = self.tasks[keys[0].task]
        began = self.clock()
        decoder, state = self._begin(*keys)
        prefill = self.clock() - began
        texts = [_Written() for _ in keys]
        seconds: list[float] = []
        phases = specsampling.PhaseTimes()
        while not state.is_done:
            start = self.clock()
            state, info = decoder.step(state)
            seconds.append(self.clock() - start)
            phases = specsampling.PhaseTimes(*(a + b for a, b in zip(phases, info.times, strict=True)))
            for index, row in enumerate(info.rows.tolist()):
                texts[row].add(info, index)
                if info.logprobs is not None:
                    texts[row].kept = num_kept(texts[row].tokens, self.codec.decode, task.stops)
            # A text that is complete before its limit ends here, and its row is dropped from the batch.
            is_complete = np.array([text.kept is not None for text in texts])
            state = state._replace(status=np.where(is_complete & (state.status == 0), 1, state.status))
        times = {
            "prefill_seconds": prefill,
            "first_round_seconds": seconds[0],
            "decode_seconds": sum(seconds[1:]),
            "phases": phases._asdict(),
        }
        results = []
        for key, text in zip(keys, texts, strict=True):
            prompt = task.prompts[key.prompt]
            result = {"row_id": key.row_id, "prompt_tokens": len(prompt.ids), **text.report(), **times}
            results.append(result)
            if key.study == "quality":
                written = text.text(self.codec, task.stops)
                result |= {
                    "batch_size": len(keys),
                    "logprobs": [round(value, 5) for value in written.logprobs],
                    "text": written.text,
                    "score": task.score(prompt, written),
                    "trivial_score": None if task.trivial is None else task.trivial(prompt),
                }
        return results

    def _begin(self, *keys: RunKey) -> tuple[specsampling.Decoder, Any]:
        key = keys[0]
        task = self.tasks[key.task]
        decoder = specsampling.Decoder(
            self.target,
            self.drafters[key.drafter] if key.lookahead else None,
            lookahead=key.lookahead,
            sampling=task.settings[key.setting],
            end_tokens=self.codec.end_tokens,
            logprobs="raw" if key.study == "quality" else None,
            seed=self.seed,
        )
        prompts = [task.prompts[key.prompt].ids for key in keys]
        return decoder, decoder.init(prompts, max_new_tokens=key.max_new_tokens, row_ids=[key.row_id for key in keys])

    def time_calls(self, step: CallsStep, max_new_tokens: int) -> dict[str, Any]:
        """Time the target's blocks and one step of each draft model, apart from any decoding.

        All calls are made at one length, that of the middle of a typical text, by turns.

        Returns
        -------
        dict
            ``length``, and ``seconds``: for "target" and each draft model a mapping from width to samples.
        """
        prompts = self.tasks[step.task].prompts
        middle = sorted(prompts, key=lambda prompt: len(prompt.ids))[len(prompts) // 2].ids
        text = np.array([(middle * (1 + max_new_tokens // (2 * len(middle)) + 1))], dtype=np.int32)
        length = len(middle) + max_new_tokens // 2
        models = {"target": (self.target, [lookahead + 1 for lookahead in self.lookaheads])}
        models |= {name: (model, [1]) for name, model in self.drafters.items() if hasattr(model, "score")}
        samples: dict[str, dict[int, list[float]]] = {}
        caches = {}
        for name, (model, widths) in models.items():
            cache = model.init_cache(1, length + max(widths))
            _, caches[name] = model.score(cache, text[:, :length], num_logits=0)
            samples[name] = {width: [] for width in sorted({1, *widths})}
        block = np.resize(text, (1, max(self.lookaheads) + 1))
        for sample in range(_SAMPLES + 2):
            for name, (model, _) in models.items():
                for width, taken in samples[name].items():
                    start = self.clock()
                    cache = model.rollback(caches[name], np.array([length]))
                    logits, caches[name] = model.score(cache, block[:, :width])
                    _wait(logits)
                    if sample >= 2:  # what compiles has compiled
                        taken.append(self.clock() - start)
        by_name = {name: {str(width): taken for width, taken in widths.items()} for name, widths in samples.items()}
        return {"length": length, "seconds": by_name}

    def compare_greedy(self, task: str, prompt: int, plain: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
        """Say of two greedy texts that differ where they do, and whether either is more than a numeric tie away."""
        ids = self.tasks[task].prompts[prompt].ids
        where = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
        verdicts = {
            name: compare_greedy(self.target, ids, tokens) for name, tokens in (("plain", plain), ("other", other))
        }
        return {
            "first_difference": where,
            **{
                name: {"verdict": found.verdict, "margin": found.margin, "tolerance": found.tolerance}
                for name, found in verdicts.items()
            },
        }


class _Written:
    """What one row has written, round by round."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.emitted: list[int] = []
        self.counts = dict.fromkeys(("tested", "accepted", "proposed", "undrafted"), 0)
        self.overlap = 0.0
        self.kept: int | None = None

    def add(self, info: specsampling.RoundInfo, index: int) -> None:
        """Add a round, of which the row is the one at `index`."""
        count = int(info.num_emitted[index])
        self.emitted.append(count)
        self.tokens += info.tokens[index, :count].tolist()
        self.counts["tested"] += int(info.num_tested[index])
        self.counts["accepted"] += int(info.num_accepted[index])
        self.counts["proposed"] += int(info.num_proposed[index])
        self.counts["undrafted"] += int(info.lookahead > 0 and info.num_proposed[index] == 0)
        self.overlap += float(info.overlap[index])
        if info.logprobs is not None:
            self.logprobs += info.logprobs[index, :count].tolist()

    def report(self) -> dict[str, Any]:
        """Return what is counted."""
        tokens = self.tokens[: self.kept]
        return {
            "tokens": tokens,
            "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
            "rounds": len(self.emitted),
            "emitted": sum(self.emitted),
            **self.counts,
            "expected_accepted": self.overlap,
            "decoded": sum(self.emitted[1:]),
        }

    def text(self, codec: Codec, stops: Sequence[str]) -> Text:
        """Return the text up to where it is complete."""
        tokens = self.tokens[: self.kept]
        return Text(tokens, self.logprobs[: self.kept], cut(codec.decode(tokens), stops))


def _wait(logits: Any) -> None:
    """Return once the logits are there."""
    if hasattr(logits, "block_until_ready"):
        logits.block_until_ready()
    elif getattr(logits, "is_cuda", False):
        import torch

        torch.cuda.synchronize()


def load_options(backend: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a backend is loaded with; ONNX Runtime is told the threads that the others read."""
    options = dict(extra)
    threads = os.environ.get("OMP_NUM_THREADS")
    if backend == "onnxruntime" and threads and "session_options" not in options:
        import onnxruntime

        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = int(threads)
        options["session_options"] = session_options
    return options


def median_seconds(entries: Sequence[Mapping[str, Any]], model: str, width: int) -> float | None:
    """Return the median time of a call over all repeats; None where it was not timed."""
    found = [x for entry in entries for x in entry["seconds"].get(model, {}).get(str(width), [])]
    return statistics.median(found) if found else None
