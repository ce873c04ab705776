"""The command line takes graphs and directories."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specsampling.__main__ import main


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[int]:
    prompt = ["--max-new-tokens", "8", "--seed", "3", "--end-token", "0", "--json", "ROMEO"]
    assert main(["generate", "--backend", "onnxruntime", *arguments, *prompt]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
    return tokens


def test_targets_and_drafts_are_files_or_directories_or_lookup(
    graph: Callable[..., Path], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, directory = str(graph("built")), str(tiny)
    assert text_of(capsys, "--target", file, "--draft", file) == text_of(capsys, "--target", directory, "--draft", file)
    assert text_of(capsys, "--target", file, "--draft", "lookup") == text_of(capsys, "--target", directory)
    assert text_of(capsys, "--target", file, "--draft", "none") == text_of(
        capsys, "--target", directory, "--draft", "none"
    )


def test_what_cannot_be_loaded_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tiny / "missing.onnx")
    assert main(["generate", "--backend", "onnxruntime", "--target", missing, "x"]) == 2
    assert "cannot load the target" in (message := capsys.readouterr().err)
    assert "no ONNX file" in message
    assert message.count("\n") == 1
    assert main(["generate", "--backend", "onnxruntime", "--device", "tpu", "--target", str(tiny), "x"]) == 2
    assert "`--device` must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'" in capsys.readouterr().err
