"""The library as the suite calls it: one place where the suite's own tests can put a broken one."""

from typing import Any

from specsampling import (
    CounterSource,
    Decoder,
    Drafter,
    Generation,
    Model,
    Randomness,
    RandomSource,
    Sampling,
    UniformRandomness,
    generate,
    to_probs,
)

__all__ = ["Engine"]


class Engine:
    """The library itself. A planted fault is a subclass that overrides one method."""

    def target(self, model: Model[Any]) -> Model[Any]:
        """Return the target as the loop is given it."""
        return model

    def drafter(self, drafter: Model[Any] | Drafter[Any] | None) -> Model[Any] | Drafter[Any] | None:
        """Return the drafter as the loop is given it."""
        return drafter

    def source(self, seed: int) -> RandomSource:
        """Return the random streams of a seed."""
        return CounterSource(seed)

    def probs(self, logits: Any, sampling: Sampling) -> Any:
        """Return the laws of logits under settings."""
        return to_probs(logits, sampling)

    def randomness(self, uniforms: Any, lookahead: int) -> Randomness:
        """Return a round's random decisions, made of uniforms."""
        return UniformRandomness(uniforms, lookahead)

    def decoder(self, target: Model[Any], drafter: Model[Any] | Drafter[Any] | None = None, **options: Any) -> Decoder:
        """Return a `Decoder`."""
        return Decoder(self.target(target), self.drafter(drafter), **options)

    def generate(
        self, target: Model[Any], drafter: Model[Any] | Drafter[Any] | None, prompts: Any, *, seed: int, **options: Any
    ) -> Generation:
        """Return what `generate` returns."""
        return generate(self.target(target), self.drafter(drafter), prompts, seed=seed, **options)
