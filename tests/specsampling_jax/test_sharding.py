"""Models spread over eight virtual devices, and over two processes; each in processes of their own."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import Sampling, generate
from specsampling_numpy import NumpyModel

pytest.importorskip("jax")

from specsampling_jax import load

PROGRAM = Path(__file__).with_name("on_a_mesh.py")
PROMPTS = [[1, 2, 3, 1, 2], [5], [6, 6, 6]]
# Ids are split too: eight of them, and two kept of each law, so that there are few paths.
TARGET = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
DRAFT = {"seed": 1, "vocab_size": 8, "num_hidden_layers": 1}
# No other axis is a multiple of eleven, so whatever has such a size is made of logits or probabilities.
IDS_PER_DEVICE = 11
WIDE = {**TARGET, "vocab_size": 8 * IDS_PER_DEVICE}


def start(num_devices: int, *arguments: Any) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], output: Path) -> dict[str, Any]:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def on_mesh(folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("mesh") / "found.json"
    return finish(start(8, output, folder(**TARGET), folder(**DRAFT), folder(**WIDE)), output)


@pytest.mark.parametrize(
    ("sharded", "plain"),
    [("replicated draft", "plain"), ("draft elsewhere", "plain"), ("split draft", "plain self-draft")],
)
def test_a_sharded_target_gives_the_unsharded_ones_tokens_in_float64(on_mesh: Any, sharded: str, plain: str):
    assert on_mesh[sharded]["tokens"] == on_mesh[plain]["tokens"]
    assert on_mesh[sharded]["rounds"] == on_mesh[plain]["rounds"]
    for ours, theirs in zip(on_mesh[sharded]["logprobs"], on_mesh[plain]["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11)


def test_the_law_of_the_sharded_compiled_round_is_the_targets(on_mesh: Any):
    assert on_mesh["law"]["distance"] < 1e-12
    assert abs(on_mesh["law"]["mass"] - 1) < 1e-12
    assert on_mesh["law"]["paths"] > 50


def test_each_device_holds_its_own_part_of_weights_and_cache(on_mesh: Any):
    assert on_mesh["shards"] == {
        "q": [8, 16],  # of (64, 16): one head of eight
        "o": [16, 8],  # of (16, 64)
        "embedding": [1, 16],  # of (8, 16)
        "norm": [16],
        "draft q": [16, 16],
        "cache": [3, 1, 32, 8],  # of (3, 8, 32, 8)
    }


@pytest.mark.parametrize(
    ("round_of", "rows_gathered"),
    [
        ("greedy, replicated draft", 0),  # the largest of a split row needs none
        ("replicated draft", 1),
        ("split draft", 1),
    ],
)
def test_logits_are_never_gathered_but_for_the_one_row_that_is_drawn_from(
    on_mesh: Any, round_of: str, rows_gathered: int
):
    collectives = [(kind, int(np.prod(shape, dtype=int))) for kind, shape in on_mesh["collectives"][round_of]]
    assert {kind for kind, _ in collectives} >= {"all-gather", "all-reduce"}, "nothing was split"
    of_ids = [size for _, size in collectives if size and size % IDS_PER_DEVICE == 0]
    assert max(of_ids, default=0) == rows_gathered * len(PROMPTS) * WIDE["vocab_size"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "ValueError: `mesh` has 3 devices along its axis 'model', which must divide .*`num_attention_heads`"),
        ("draft heads", "ValueError: `mesh` has 8 devices .* got 2; take a smaller mesh, or `replicate=True`"),
        ("axes", r"ValueError: `mesh` must have one axis, .* got axes \('data', 'model'\)"),
        ("kind", "TypeError: `mesh` must be a jax.sharding.Mesh, got 8"),
        ("both", "ValueError: `device` must be None where there is a `mesh`"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(on_mesh: Any, name: str, message: str):
    assert re.match(message, on_mesh["refused"][name])


def test_two_processes_decode_what_one_does(folder: Callable[..., Path], tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    paths, outputs = (folder(**TARGET), folder(**DRAFT)), [tmp_path / f"{number}.json" for number in range(2)]
    processes = [start(1, output, *paths, address, 2, number) for number, output in enumerate(outputs)]
    try:
        found = [finish(process, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()
    sampling = Sampling(temperature=[1.0, 0.0, 0.8], top_p=[None, None, 0.9])  # as on_a_mesh.py has it
    target, draft = (NumpyModel(path, dtype="float64") for path in paths)
    expected = generate(target, draft, PROMPTS, max_new_tokens=10, lookahead=3, sampling=sampling, seed=7)
    logits, _ = target.score(target.init_cache(1, 8), np.array([[1, 2, 3]]))
    for one in found:
        assert one["devices"] == [1, 2]
        assert one["decoded"]["tokens"] == expected.tokens
        np.testing.assert_allclose(one["logits"], logits, rtol=0, atol=1e-11)


def test_replicating_needs_a_mesh(folder: Callable[..., Path]):
    with pytest.raises(ValueError, match="`replicate` must be False without a `mesh`"):
        load(folder(), replicate=True)
