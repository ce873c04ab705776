"""Tiny checkpoints in JAX, and the switch to 64 bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run a test with 64-bit JAX."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """Write a checkpoint of V = 7 once for each set of changes to its config."""
    written: dict[str, Path] = {}

    def write(*, seed: int = 0, **config: Any) -> Path:
        name = repr((seed, sorted(config.items())))
        if name not in written:
            path = tmp_path_factory.mktemp("jax")
            written[name] = write_checkpoint(path, seed=seed, **{"vocab_size": 7, "num_hidden_layers": 2, **config})
        return written[name]

    return write
