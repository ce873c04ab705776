"""Every program in docs/examples runs. `nox -s examples` has every framework; elsewhere what is missing is skipped."""

import subprocess
import sys
from pathlib import Path

import pytest

import specsampling

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HELPERS = {"small_llama.py"}

RUNS = {
    "acceptance_study.py": ["--out", "plot.svg", "--json", "study.json", "--repeats", "1", "--lookaheads", "1", "3"],
    "batch_with_seeds.py": [],
    "custom_adapter.py": [],
    "custom_drafter.py": [],
    "picture_of_a_run.py": ["--out", "run.svg", "--max-new-tokens", "32"],
}


def run(program, arguments, folder):
    done = subprocess.run(
        [sys.executable, EXAMPLES / program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,  # training takes a minute on an idle machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_program_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {
        *RUNS,
        *HELPERS,
        "use_a_backend.py",
        "train_bundled_pair.py",
    }


@pytest.mark.parametrize("program", RUNS)
def test_program_runs_and_writes_what_it_was_asked_for(program, tmp_path):
    assert run(program, RUNS[program], tmp_path)
    files = [argument for argument in RUNS[program] if "." in argument]
    assert [name for name in files if not (tmp_path / name).stat().st_size] == []


@pytest.mark.parametrize("status", specsampling.available_backends(), ids=lambda status: status.name)
def test_library_is_used_alike_on_each_backend(status, tmp_path):
    if not status.installed:
        pytest.skip(status.reason)
    assert f"{status.name}: 24 tokens" in run(
        "use_a_backend.py", ["--backend", status.name, "--max-new-tokens", "24"], tmp_path
    )
