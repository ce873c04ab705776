"""Examples of the package's docstrings and of its page run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import specsampling_torch

MODULES = [
    "specsampling_torch",
    *(f"specsampling_torch.{m.name}" for m in pkgutil.iter_modules(specsampling_torch.__path__)),
]
PAGE = Path(__file__).parents[2] / "docs" / "torch.md"


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("name", specsampling_torch.__all__)
def test_public_names_have_examples(name: str):
    """Records of arrays are shown where they are returned."""
    member = getattr(specsampling_torch, name)
    assert hasattr(member, "_fields") or ">>> " in member.__doc__


def test_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert len(capsys.readouterr().out) > 64


def test_the_page_names_every_proven_family():
    from specsampling_torch._architecture import PROVEN

    page = re.sub(r"[ \-]", "", PAGE.read_text(encoding="utf-8").lower())
    assert [name for name in sorted(PROVEN) if name.removesuffix("_text").replace("_", "") not in page] == []
