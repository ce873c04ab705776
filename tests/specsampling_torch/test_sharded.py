"""Two processes, each with half of every layer, commit the same tokens though they exchange no samples."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specsampling import generate

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specsampling_torch import TorchModel  # noqa: E402 (after importorskip)

PROMPTS = [[1, 2, 3], [4]]
SCRIPT = """
import json, os, sys
import torch
from specsampling import generate
from specsampling_torch import load

target, draft = (load(checkpoint, dtype="float64", tp_plan="auto") for checkpoint in sys.argv[1:3])
shapes = [tuple(layer.keys.shape) for model in (target, draft) for layer in model.init_cache(1, 1).store.layers]


def refused(*arguments, **options):
    raise AssertionError("a rank sent another what it should know by itself")


# Parts of products are summed over ranks; nothing that one rank has drawn goes to another.
for name in ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "send", "isend"):
    setattr(torch.distributed, name, refused)
result = generate(target, draft, json.loads(sys.argv[3]), max_new_tokens=20, seed=3)
with open(os.path.join(sys.argv[4], os.environ["RANK"]), "w") as file:
    json.dump([shapes, result.tokens, result.from_draft], file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_every_rank_commits_the_same_tokens_as_one_process(tmp_path: Path, build: Any):
    target, draft = (build("Llama", seed=seed, vocab_size=12) for seed in (0, 1))
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    whole = generate(TorchModel(target), TorchModel(draft), PROMPTS, max_new_tokens=20, seed=3)
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = (tmp_path / "script.py", tmp_path / "target", tmp_path / "draft", json.dumps(PROMPTS), tmp_path)
    # Without CUDA in sight the ranks talk through gloo.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launcher, *map(str, arguments)], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in "01":
        shapes, tokens, from_draft = json.loads((tmp_path / rank).read_text())
        assert len(shapes) == 4, "two layers of the target and two of the draft"
        assert {shape[1] for shape in shapes} == {1}, (
            "each process should hold one of the two key heads of either model"
        )
        assert (tokens, from_draft) == (whole.tokens, whole.from_draft)
    assert whole.stats.accepted > 0
