"""Faults of the stop rules: where a row ends, and what of a block is kept."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from specsampling import Decoder, Drafter, Model
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults._registry import Fault, plant

__all__: list[str] = []

Ints: TypeAlias = Any
"""Integer arrays of NumPy."""


class _StopEngine(Engine):
    """The library with other rules about where a row ends."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap

    def decoder(self, target: Model[Any], drafter: Model[Any] | Drafter[Any] | None = None, **options: Any) -> Decoder:
        """Return a decoder with its rules replaced."""
        decoder = super().decoder(target, drafter, **options)
        decoder.stop_rules = self.wrap(decoder.stop_rules)
        return decoder


class _Stops:
    """The stop rules of the library; a fault overrides `commit`."""

    def __init__(self, rules: Any) -> None:
        self.rules = rules
        self.end_tokens = rules.end_tokens

    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        """Return how many of each row's next tokens are committed, and whether the row ends."""
        return self.rules.commit(tokens, rows, prompts, starts, counts)


def _stop_fault(name: str, description: str) -> Callable[[type[_Stops]], type[_Stops]]:
    def register(rules: type[_Stops]) -> type[_Stops]:
        plant(Fault(name=name, description=description, tier="T1", kind="engine", planted=lambda: _StopEngine(rules)))
        return rules

    return register


@_stop_fault(
    "end token accepted unchecked", "Only a round's last token is looked at; an accepted end token is passed over."
)
class _LastOnly(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        found = self.rules.commit(tokens, rows, prompts, starts + counts - 1, np.ones_like(counts))
        return found._replace(num_emitted=counts)


@_stop_fault("tokens kept after the end token", "A row that ends keeps the whole block.")
class _KeptAfterEnd(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        return super().commit(tokens, rows, prompts, starts, counts)._replace(num_emitted=counts)


@_stop_fault("end token in the prompt ends the row", "The last committed token is looked at too.")
class _PromptEnds(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        found = super().commit(tokens, rows, prompts, starts, counts)
        in_prompt = np.isin(tokens[rows, starts - 1], self.end_tokens)
        return found._replace(
            num_emitted=np.where(in_prompt, 1, found.num_emitted), is_stopped=found.is_stopped | in_prompt
        )


@_stop_fault("end token not emitted", "A row that ends at an end token of its block loses the token before it, too.")
class _EndLost(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        found = super().commit(tokens, rows, prompts, starts, counts)
        shorter = found.is_stopped & (found.num_emitted > 1)
        return found._replace(num_emitted=np.where(shorter, found.num_emitted - 1, found.num_emitted))


@_stop_fault("stop sequence seen within a block only", "A stop sequence that began in the round before is passed over.")
class _WithinBlock(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        return super().commit(tokens, rows, starts, starts, counts)


@_stop_fault("stop sequence begun in the prompt", "A stop sequence is matched in the prompt's last tokens, too.")
class _BegunInPrompt(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        return super().commit(tokens, rows, np.zeros_like(prompts), starts, counts)


@_stop_fault("stop sequence looked for at a round's end only", "A stop sequence in mid-block is passed over.")
class _AtTheEnd(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        if not self.rules.stop_sequences:
            return super().commit(tokens, rows, prompts, starts, counts)
        last = self.rules.commit(tokens, rows, prompts, starts + counts - 1, np.ones_like(counts))
        return last._replace(num_emitted=counts)


@_stop_fault("stop sequence cut off", "The tokens of a stop sequence are taken back when it is complete.")
class _CutOff(_Stops):
    def commit(self, tokens: Ints, rows: Ints, prompts: Ints, starts: Ints, counts: Ints) -> Any:
        found = super().commit(tokens, rows, prompts, starts, counts)
        if not self.rules.stop_sequences:
            return found
        shortest = min(map(len, self.rules.stop_sequences))
        shorter = np.maximum(found.num_emitted - shortest, 1)
        return found._replace(num_emitted=np.where(found.is_stopped, shorter, found.num_emitted))
