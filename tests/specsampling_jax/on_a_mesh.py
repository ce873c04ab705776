"""What test_sharding.py runs in processes of its own, because a process has its number of devices for life.

``python on_a_mesh.py OUTPUT TARGET DRAFT WIDE`` decodes on eight devices and writes what it found as JSON, of WIDE only
what is compiled; with ``ADDRESS COUNT NUMBER`` in place of WIDE it is one of COUNT processes that have a mesh between
them.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specsampling import Decoder, Sampling, generate
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._oracle import one_token_law, outcome_law
from specsampling_jax import JaxModel, _round

PROMPTS = [[1, 2, 3, 1, 2], [5], [6, 6, 6]]
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 10,
    "lookahead": 3,
    "sampling": Sampling(temperature=[1.0, 0.0, 0.8], top_p=[None, None, 0.9]),
    "logprobs": "raw",
    "seed": 7,
}


def decoded(target: Any, draft: Any, **options: Any) -> dict[str, Any]:
    result = generate(target, draft, PROMPTS, **{**OPTIONS, **options})
    return {"tokens": result.tokens, "rounds": result.stats.rounds, "logprobs": [list(x) for x in result.logprobs]}


def law_distance(target: Any, draft: Any, plain: Any, plain_draft: Any) -> dict[str, float]:
    settings = {"top_k": 2}

    def make(source: Any) -> Decoder:
        return Decoder(target, draft, sampling=Sampling(**settings), randomness=source)

    schedule = (2, 0)
    scenarios = [Scenario((1,), 3), Scenario((0, 2), 3)]
    laws = enumerate_laws(make, scenarios, schedule=schedule, batch_size=48)
    worst = 0.0
    for law, scenario in zip(laws, scenarios, strict=True):
        expected = outcome_law(
            one_token_law(plain, **settings), one_token_law(plain_draft, **settings), scenario.prompt,
            max_new_tokens=scenario.max_new_tokens, schedule=schedule,
        )  # fmt: skip
        keys = set(expected) | set(law.outcomes)
        worst = max(worst, 0.5 * sum(abs(law.outcomes.get(key, 0) - expected.get(key, 0)) for key in keys))
    return {"distance": worst, "mass": laws[0].mass, "paths": laws[0].num_paths}


def compiled_text(target: Any, draft: Any, **options: Any) -> str:
    """Return the compiled module of the first round of a run."""
    run, texts = _round._run, []

    def lowered(*arguments: Any) -> Any:
        if not texts:
            texts.append(run.lower(*arguments).compile().as_text())
        return run(*arguments)

    _round._run = lowered
    try:
        generate(target, draft, PROMPTS, max_new_tokens=4, lookahead=3, **options)
    finally:
        _round._run = run
    return texts[0]


def collectives(text: str) -> list[tuple[str, list[int]]]:
    """Return the kind of each collective operation of a module, and every shape that it gives."""
    found = []
    for line in text.splitlines():
        operation = re.search(r"= (.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", line)
        if operation:
            shapes = re.findall(r"\w\d+\[([\d,]*)\]", operation[1])
            found += [(operation[2], [int(size) for size in shape.split(",") if size]) for shape in shapes]
    return found


def refusals(target: Path, draft: Path) -> dict[str, str]:
    mesh = jax.make_mesh((3,), ("model",), devices=jax.devices()[:3])
    square = jax.make_mesh((4, 2), ("data", "model"))
    calls = {
        "heads": lambda: JaxModel.from_pretrained(target, mesh=mesh),
        "axes": lambda: JaxModel.from_pretrained(target, mesh=square),
        "kind": lambda: JaxModel.from_pretrained(target, mesh=8),
        "both": lambda: JaxModel.from_pretrained(target, mesh=mesh, device="cpu"),
        "draft heads": lambda: JaxModel.from_pretrained(draft, mesh=jax.make_mesh((8,), ("model",))),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def on_eight_devices(paths: list[Path]) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("model",))
    plain, plain_draft = (JaxModel.from_pretrained(path, dtype="float64") for path in paths[:2])
    target = JaxModel.from_pretrained(paths[0], dtype="float64", mesh=mesh)
    replicated = JaxModel.from_pretrained(paths[1], dtype="float64", mesh=mesh, replicate=True)
    split = JaxModel.from_pretrained(paths[0], dtype="float64", mesh=mesh)
    layer = target.params["layers"][0]
    cache = target.init_cache(3, 20)
    wide = JaxModel.from_pretrained(paths[2], dtype="float64", mesh=mesh)
    wide_draft = JaxModel.from_pretrained(paths[2], dtype="float64", mesh=mesh, replicate=True)
    law = Sampling(top_p=0.9, min_p=0.01)
    return {
        "plain": decoded(plain, plain_draft),
        "replicated draft": decoded(target, replicated),
        "draft elsewhere": decoded(target, plain_draft),
        "plain self-draft": decoded(plain, plain),
        "split draft": decoded(target, split),
        "law": law_distance(target, replicated, plain, plain_draft),
        "shards": {
            "q": layer["self_attn.q_proj.weight"].addressable_shards[0].data.shape,
            "o": layer["self_attn.o_proj.weight"].addressable_shards[0].data.shape,
            "embedding": target.params["embedding"].addressable_shards[0].data.shape,
            "norm": target.params["norm"].addressable_shards[0].data.shape,
            "draft q": replicated.params["layers"][0]["self_attn.q_proj.weight"].addressable_shards[0].data.shape,
            "cache": cache.arrays[0][0].addressable_shards[0].data.shape,
        },
        "collectives": {
            "greedy, replicated draft": collectives(
                compiled_text(wide, wide_draft, sampling=Sampling(temperature=0.0))
            ),
            "replicated draft": collectives(compiled_text(wide, wide_draft, sampling=law, logprobs="raw")),
            "split draft": collectives(compiled_text(wide, wide, sampling=law, logprobs="raw")),
        },
        "refused": refusals(*paths[:2]),
    }


def one_of_several(paths: list[Path], address: str, count: int, number: int) -> dict[str, Any]:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    mesh = jax.make_mesh((len(jax.devices()),), ("model",))
    target = JaxModel.from_pretrained(paths[0], dtype="float64", mesh=mesh)
    draft = JaxModel.from_pretrained(paths[1], dtype="float64", mesh=mesh, replicate=True)
    logits, _ = target.score(target.init_cache(1, 8), np.array([[1, 2, 3]]))
    return {
        "devices": [len(jax.local_devices()), len(jax.devices())],
        "logits": np.asarray(logits).tolist(),
        "decoded": decoded(target, draft),
    }


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    if len(sys.argv) == 5:
        found = on_eight_devices([Path(path) for path in sys.argv[2:]])
    else:
        paths, (address, count, number) = [Path(path) for path in sys.argv[2:4]], sys.argv[4:]
        found = one_of_several(paths, address, int(count), int(number))
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
