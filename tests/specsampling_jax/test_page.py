"""The code of docs/jax.md runs, as it is read; in a process of its own, because it sets JAX's options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def test_the_pages_code_runs(tmp_path: Path):
    pytest.importorskip("equinox")
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = [block for block in blocks if "jax.distributed" not in block]
    assert len(code) == len(blocks) - 1 == 4
    code.append("assert len(generation.tokens) == 2 and len(generation.tokens[1]) == 20\n")
    code.append("assert gram(0).functions == gram(1).functions\n")
    code.append("assert specsampling.generate(target, draft, [1], max_new_tokens=3).stats.rounds\n")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "compiled").iterdir()), "nothing was kept on disk"
