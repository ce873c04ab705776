"""The script for machines with a GPU, tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "conformance" / "gpu.py"


@pytest.mark.slow
def test_a_section_runs_on_the_host_and_leaves_its_findings(tmp_path: Path):
    results = tmp_path / "deep" / "gpu.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--only", "memory", "--json", results]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(results.read_text())
    assert (found["passed"], found["device"]) == (True, "cpu")
    assert found["versions"].keys() >= {"python", "torch", "transformers"}
    (check,) = found["sections"]["torch: memory"]["checks"]
    assert "MiB" in check["values"]["message"]


@pytest.mark.slow
def test_one_section_that_fails_does_not_stop_the_rest(tmp_path: Path):
    results = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--only", "memory", "--only", "jax: contract", "--json", results]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    sections = json.loads(results.read_text())["sections"]
    assert sections["jax: contract"]["status"] == "skipped"
    assert sections["torch: memory"]["status"] == "failed"
