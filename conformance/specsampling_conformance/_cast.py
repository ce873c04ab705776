"""Who plays in the checks of T1 to T3: the frozen pairs, or, for a model that hosts no weights but its own, that model.

The frozen pairs are tiny Llama checkpoints that ship with the suite, chosen by a search (`_search`) so that the planted
fault that is hardest to see shows as much as it can. An adapter that can load them is tested on them, as target and as
draft. Of any other the suite asks only what it has: a model with a law, masked to a few ids, beside a draft of the
suite's own; with no draft but itself nothing would ever be rejected.
"""

import importlib.resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling import Model
from specsampling_conformance._checks import Subject
from specsampling_conformance._faults._reference import ReferenceModel
from specsampling_conformance._host import host_copy
from specsampling_conformance._oracle import Scores
from specsampling_conformance._trial import tolerance_for
from specsampling_conformance._wrappers import EagerModel, masked

__all__ = ["Cast", "EXACT", "PAIRS", "Pair", "cast", "eager", "is_hosted", "sequence_tolerance"]


class Pair(NamedTuple):
    """A frozen target and draft.

    Attributes
    ----------
    name : str
        Its folder.
    vocab_size : int
        Number of ids, V.
    target, draft : Path
        Checkpoint directories.
    """

    name: str
    vocab_size: int
    target: Path
    draft: Path


def _pair(name: str, vocab_size: int) -> Pair:
    folder = Path(str(importlib.resources.files("specsampling_conformance"))) / "pairs" / name
    return Pair(name, vocab_size, folder / "target", folder / "draft")


PAIRS = {name: _pair(name, size) for name, size in (("three_a", 3), ("three_b", 3), ("four", 4))}
"""The frozen pairs by name."""

EXACT = {"float64": 1e-12, "float32": 1e-6}
"""Total variation that is put down to rounding where the weights are the suite's own; twice that on rounds."""


class Cast(NamedTuple):
    """The models of one pair.

    Attributes
    ----------
    target, draft : Model
        The adapter's; where the adapter hosts no foreign weights the draft is the suite's own.
    own_target, own_draft : Model
        The suite's own, in the same dtype.
    hosted : bool
        Whether the adapter's models have the pair's weights.
    delta : float
        Largest difference of the target's logits between a block and single tokens, on a few texts.
    scores : mapping
        One-token scores of each model, remembered, by the model's role.
    """

    target: Model[Any]
    draft: Model[Any]
    own_target: Model[Any]
    own_draft: Model[Any]
    hosted: bool
    delta: float
    scores: dict[str, Scores]


def is_hosted(subject: Subject) -> bool:
    """Whether the adapter loads the weights it is given: its vocabularies are those of two pairs of different size."""
    return all(subject.model(pair.target).vocab_size == pair.vocab_size for pair in PAIRS.values())


def cast(subject: Subject, name: str) -> Cast:
    """Return the models of a frozen pair for an adapter, loaded once."""
    return subject.once(("cast", name), lambda: _cast(subject, PAIRS[name]))


def _cast(subject: Subject, pair: Pair) -> Cast:
    own_dtype = subject.dtype if subject.dtype in EXACT else "float32"
    target: Model[Any] = subject.model(pair.target)
    own_target: Model[Any] = ReferenceModel(pair.target, own_dtype)
    own_draft: Model[Any] = ReferenceModel(pair.draft, own_dtype)
    hosted = is_hosted(subject)
    if hosted:
        draft: Model[Any] = subject.model(pair.draft)
    else:
        size = min(pair.vocab_size, target.vocab_size)
        target = masked(target, size) if target.vocab_size > size else target
        if own_draft.vocab_size > size:
            own_target, own_draft = masked(own_target, size), masked(own_draft, size)
        draft = own_draft
    models = {"target": target, "draft": draft, "own_target": own_target, "own_draft": own_draft}
    scores = {role: Scores(model) for role, model in models.items()}
    return Cast(target, draft, own_target, own_draft, hosted, _block_delta(target, scores["target"]), scores)


def _block_delta(model: Model[Any], scores: Scores) -> float:
    """Measure how far a block's logits are from those of single tokens, on texts of each id."""
    largest = 0.0
    for first in range(min(model.vocab_size, 4)):
        text = [(first + step * (1 + first)) % model.vocab_size for step in range(4)]
        logits, _ = model.score(model.init_cache(1, 16), np.array([text], dtype=np.int32))
        steps = np.stack([scores.logits(tuple(text[: end + 1])) for end in range(len(text))])
        largest = max(largest, float(np.max(np.abs(host_copy(logits)[0] - steps), initial=0.0)))
    return largest


def sequence_tolerance(subject: Subject, models: Cast, length: int) -> float:
    r"""Return the total variation that rounding may account for, over `length` tokens.

    On the frozen pairs a constant of the dtype. Where block and single-step logits are further apart than that, and for
    any other model, the bound :math:`L \tanh(\delta / 2)`, delta never taken larger than the cap of its dtype: a fault
    must not widen its own tolerance.
    """
    # A foreign model's delta is that of a few texts, so it is given some room.
    delta = min(models.delta if models.hosted else 4 * models.delta, tolerance_for(subject.dtype))
    # Laws are made in float32 at least, whatever the dtype of the logits.
    return max(EXACT.get(subject.dtype, EXACT["float32"]), length * float(np.tanh(delta / 2)))


def eager(model: Model[Any]) -> Model[Any]:
    """Return the model without its compiled round."""
    return EagerModel(model) if hasattr(model, "compile_round") else model
