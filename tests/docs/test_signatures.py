"""Signatures as the site shows them, made over stand-ins of the frameworks, are those of the real adapters."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[2] / "docs" / "_ext"
sys.path.insert(0, str(EXTENSIONS))

from stand_ins import PACKAGES, signatures  # noqa: E402 (the path is set first)


@pytest.fixture(scope="module")
def shown():
    """Return the signatures that the site shows, from a process without any framework."""
    asked = subprocess.run(
        [sys.executable, EXTENSIONS / "stand_ins.py"], check=True, capture_output=True, text=True, timeout=300
    )
    return json.loads(asked.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_signatures_on_the_site_are_the_true_ones(shown, package):
    framework = package.removeprefix("specsampling_")
    if framework in ("jax", "onnxruntime", "torch"):
        pytest.importorskip(framework)
    true = signatures({package: importlib.import_module(package)})
    assert {name: shown.get(name) for name in true} == true
    assert {name for name in shown if name.startswith(f"{package}.")} == set(true)
