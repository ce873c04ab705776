"""The command line decodes with JAX, as it does with NumPy."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jax")

import specsampling
from specsampling.__main__ import main


@pytest.mark.parametrize("draft", ["directory", "lookup", "none"])
def test_the_command_line_generates_with_jax(capsys: pytest.CaptureFixture[str], checkpoint: Path, draft: str):
    arguments = ["generate", "abcabc", "--target", str(checkpoint), "--max-new-tokens", "9", "--seed", "4", "--json"]
    arguments += ["--draft", str(checkpoint) if draft == "directory" else draft]
    reports = []
    for backend in ("numpy", "jax"):
        assert main([*arguments, "--backend", backend]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[1]["backend"] == "jax"
    assert reports[0]["tokens"] == reports[1]["tokens"]
    assert [report["stats"]["proposed"] > 0 for report in reports] == [draft != "none"] * 2


def test_the_backend_is_listed_as_installed():
    status = {backend.name: backend for backend in specsampling.available_backends()}["jax"]
    assert status == ("jax", True, "specsampling_jax:load", "")
