"""Faults that show only at large vocabularies: selection and draws that were tried on a few ids."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from specsampling import Label, Randomness, Sampling, UniformRandomness, to_probs
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults._registry import Fault, plant

__all__: list[str] = []

Floats: TypeAlias = Any
"""Real floating arrays of NumPy."""


class _ProbsEngine(Engine):
    """The library with other laws."""

    def __init__(self, laws: Callable[[Floats, Sampling], Floats]) -> None:
        self.laws = laws

    def probs(self, logits: Any, sampling: Sampling) -> Any:
        """Return the faulty laws."""
        return self.laws(np.asarray(logits), sampling)


class _DrawEngine(Engine):
    """The library with another way of drawing ids."""

    def __init__(self, draws: type[UniformRandomness]) -> None:
        self.draws = draws

    def randomness(self, uniforms: Any, lookahead: int) -> Randomness:
        """Return the faulty draws."""
        return self.draws(uniforms, lookahead)


def _probs_fault(name: str, description: str) -> Callable[[Callable[[Floats, Sampling], Floats]], None]:
    def register(laws: Callable[[Floats, Sampling], Floats]) -> None:
        plant(Fault(name=name, description=description, tier="T1", kind="engine", planted=lambda: _ProbsEngine(laws)))

    return register


def _draw_fault(name: str, description: str) -> Callable[[type[UniformRandomness]], type[UniformRandomness]]:
    def register(draws: type[UniformRandomness]) -> type[UniformRandomness]:
        plant(Fault(name=name, description=description, tier="T1", kind="engine", planted=lambda: _DrawEngine(draws)))
        return draws

    return register


def _scaled(weights: Floats) -> Floats:
    return weights / weights.sum(axis=-1, keepdims=True)


@_probs_fault("ids past 65 536 cut", "Selection works in 16-bit ids: those beyond are lost.")
def _cut(logits: Floats, sampling: Sampling) -> Floats:
    probs = np.array(to_probs(logits, sampling))
    probs[..., 2**16 :] = 0.0
    return probs / np.maximum(probs.sum(axis=-1, keepdims=True), 1e-300)


@_probs_fault("law in half precision", "Probabilities are rounded to 11 bits, and the smallest to zero.")
def _half(logits: Floats, sampling: Sampling) -> Floats:
    return _scaled(np.asarray(to_probs(logits, sampling)).astype(np.float16).astype(logits.dtype))


@_probs_fault("selection among the likeliest 1 000", "Top-p and min-p look at the thousand likeliest ids only.")
def _thousand(logits: Floats, sampling: Sampling) -> Floats:
    probs = np.asarray(to_probs(logits, sampling))
    edge = -np.partition(-logits, 999, axis=-1)[..., 999:1000]
    is_filtered = (probs == 0).any(axis=-1, keepdims=True)
    return _scaled(np.where(is_filtered & (logits < edge), 0.0, probs))


@_draw_fault("one uniform for all levels", "A draw takes a block and the id in it by the same uniform.")
class _OneUniform(UniformRandomness):
    def categorical(self, weights: Any, label: Label) -> Any:
        first = np.repeat(np.asarray(self.uniforms)[..., :1], 3, axis=-1)
        return UniformRandomness(first, self.lookahead).categorical(weights, label)


@_draw_fault("running sum over all ids", "A draw inverts one running sum in float32 over the whole vocabulary.")
class _OneSum(UniformRandomness):
    def categorical(self, weights: Any, label: Label) -> Any:
        slot = label.purpose * self.lookahead + label.slot
        sums = np.cumsum(_scaled(np.asarray(weights)), axis=-1, dtype=np.float32)
        uniform = np.asarray(self.uniforms)[:, slot, :1].astype(np.float32)
        return np.argmax(sums > uniform, axis=-1)


@_draw_fault("draw in half precision", "The weights that an id is drawn by are rounded to 11 bits.")
class _HalfWeights(UniformRandomness):
    def categorical(self, weights: Any, label: Label) -> Any:
        return super().categorical(_scaled(np.asarray(weights)).astype(np.float16).astype(weights.dtype), label)
