"""The exact law that an audit holds samples against: sequences, their probabilities, and the cells to count them in."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsampling import Model, Sampling
from specsampling_conformance._oracle import NextTokenLaw, Scores

__all__ = ["Cells", "Law", "Reference", "Sampler", "Tokens", "alternative_laws", "as_model", "law_of_reference"]

Tokens: TypeAlias = tuple[int, ...]
"""New tokens of one sequence, without the prompt."""

Law: TypeAlias = dict[Tokens, float]
"""Probability of each sequence that can occur."""

Reference: TypeAlias = Model[Any] | Mapping[Tokens, float] | ArrayLike
"""Where a law comes from: a model, a mapping of sequences, or an array with one axis a position."""

Sampler: TypeAlias = Callable[[list[int], int], Any]
"""A callable ``sample(prompt_ids, num_samples) -> token sequences``."""

_MOST_SEQUENCES = 2**16
_MOST_CELLS = 2**22
_SETTINGS: tuple[tuple[str, Any], ...] = (("temperature", 1.0), ("top_k", None), ("top_p", None), ("min_p", None))


def law_of_reference(
    reference: Reference,
    prompt: Tokens,
    length: int | None,
    sampling: Sampling | None,
    end_tokens: Tokens,
) -> Law:
    """Return the law of the sequences, each cut after its first end token.

    Raises
    ------
    TypeError, ValueError
        If the law is no law, or `length` or `sampling` do not go with the kind of reference.
    """
    model = as_model(reference)
    if model is not None:
        if length is None or length < 1:
            raise ValueError(f"`length` must be a positive integer where `reference` is a model, got {length!r}")
        law = Scores(model).law(**_scalars(sampling or Sampling()))
        return dict(_limited(_sequences(law, prompt, length, end_tokens)))
    for name, value in (("length", length), ("sampling", sampling)):
        if value is not None:
            raise ValueError(f"`{name}` must be left out where `reference` is an explicit law, got {value!r}")
    return _explicit(reference, end_tokens)


def as_model(reference: Reference) -> Model[Any] | None:
    """Return the reference where it is a model, else None."""
    return cast(Model[Any], reference) if hasattr(reference, "score") else None


def _scalars(sampling: Sampling) -> dict[str, Any]:
    settings = {name: getattr(sampling, name) for name, _ in _SETTINGS}
    if any(isinstance(value, tuple) for value in settings.values()):
        raise ValueError(f"`sampling` must have one value of each setting, not one per row, got {sampling}")
    return settings


def _sequences(law: NextTokenLaw, text: Tokens, left: int, end_tokens: Tokens) -> Iterator[tuple[Tokens, float]]:
    for token, probability in enumerate(law(text).tolist()):
        if probability == 0:
            continue
        if left == 1 or token in end_tokens:
            yield (token,), probability
            continue
        for rest, chance in _sequences(law, (*text, token), left - 1, end_tokens):
            yield (token, *rest), probability * chance


def _limited(sequences: Iterator[tuple[Tokens, float]]) -> Iterator[tuple[Tokens, float]]:
    for number, sequence in enumerate(sequences):
        if number >= _MOST_SEQUENCES:
            raise ValueError(
                f"`reference` gives more than {_MOST_SEQUENCES} sequences a probability, too many to be tested one by"
                " one: ask for fewer tokens, or bound the choice with `Sampling(top_k=…)`"
            )
        yield sequence


def _explicit(reference: Any, end_tokens: Tokens) -> Law:
    if isinstance(reference, Mapping):
        entries = [(tuple(operator.index(t) for t in tokens), float(value)) for tokens, value in reference.items()]
    else:
        probs = np.asarray(reference, dtype=np.float64)
        if probs.ndim == 0 or len(set(probs.shape)) != 1:
            raise ValueError(f"`reference` must have shape (V,) * length where it is an array, got {probs.shape}")
        entries = [(tuple(map(int, cell)), float(probs[tuple(cell)])) for cell in np.argwhere(probs != 0)]
    total = sum(value for _, value in entries)
    wrong = [(tokens, value) for tokens, value in entries if not 0 <= value < np.inf or min(tokens, default=0) < 0]
    if wrong:
        tokens, value = wrong[0]
        raise ValueError(f"`reference` must give non-negative ids probabilities, got {value} for {list(tokens)}")
    if not abs(total - 1.0) <= 1e-5:
        raise ValueError(f"`reference` must sum to one, got a sum of {total!r}")
    law: Law = {}
    for tokens, value in entries:
        cut = next((end for end, token in enumerate(tokens, 1) if token in end_tokens), len(tokens))
        if value > 0:
            law[tokens[:cut]] = law.get(tokens[:cut], 0.0) + value / total
    return law


def alternative_laws(
    reference: Reference, prompt: Tokens, length: int | None, sampling: Sampling | None, end_tokens: Tokens
) -> dict[str, Law]:
    """Return the laws that an engine which goes wrong in a common way would have, by what is wrong with it."""
    model = as_model(reference)
    if model is None or length is None:
        return {}
    settings, scores = _scalars(sampling or Sampling()), Scores(model)
    changed: dict[str, tuple[dict[str, Any], Tokens, Tokens]] = {
        f"{name} ignored": ({**settings, name: default}, prompt, end_tokens)
        for name, default in _SETTINGS
        if settings[name] != default
    }
    changed["greedy decoding"] = ({"temperature": 0.0}, prompt, end_tokens)
    if len(prompt) > 1:
        changed["the prompt's last token missing"] = (settings, prompt[:-1], end_tokens)
        changed["the prompt's first token missing"] = (settings, prompt[1:], end_tokens)
    if end_tokens:
        changed["end tokens ignored"] = (settings, prompt, ())
    laws = {}
    for name, (these, text, ends) in changed.items():
        try:
            laws[name] = dict(_limited(_sequences(scores.law(**these), text, length, ends)))
        except ValueError:  # too many sequences without the setting
            continue
    return laws


class Cells(NamedTuple):
    """How sequences become cells of an array: one axis a position, two places more than there are ids.

    Ids outside the law share a place, and so do positions after a sequence's end: so sequences of different lengths
    fit one array, whatever the vocabulary.

    Attributes
    ----------
    ids : tuple of int
        The ids that occur in the law; the place of each is its index.
    length : int
        Most tokens in a sequence.
    """

    ids: Tokens
    length: int

    @classmethod
    def of(cls, law: Law) -> "Cells":
        """Return the cells that hold a law."""
        ids = tuple(sorted({token for tokens in law for token in tokens}))
        cells = cls(ids, max(map(len, law)))
        if cells.length == 0:
            raise ValueError("`reference` must have a sequence of at least one token")
        if len(cells.shape) > 30 or np.prod(cells.shape, dtype=np.float64) > _MOST_CELLS:
            raise ValueError(
                f"`reference` has sequences of {cells.length} tokens out of {len(ids)} ids, which take more than"
                f" {_MOST_CELLS} cells: ask for fewer tokens, or bound the choice with `Sampling(top_k=…)`"
            )
        return cells

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (len(self.ids) + 2,) * self.length

    def place(self, tokens: Tokens) -> tuple[int, ...]:
        """Return the index of a sequence of at most `length` tokens."""
        other, ended = len(self.ids), len(self.ids) + 1
        places = [self.ids.index(token) if token in self.ids else other for token in tokens]
        return tuple(places + [ended] * (self.length - len(tokens)))

    def array(self, law: Mapping[Tokens, float]) -> NDArray[np.float64]:
        """Return probabilities, or any other numbers by sequence, as an array."""
        held = np.zeros(self.shape)
        for tokens, value in law.items():
            held[self.place(tokens)] += value
        return held

    def sequence(self, place: Sequence[int]) -> Tokens:
        """Return the sequence of a place; -1 stands for an id that is not in the law."""
        ended = len(self.ids) + 1
        return tuple(self.ids[index] if index < len(self.ids) else -1 for index in place if index != ended)
