"""Who plays in the checks of T1 to T3: the frozen pairs, or, for a model that hosts no weights but its own, that model.

The frozen pairs are tiny Llama checkpoints that ship with the suite, chosen by a search (`_search`) so that the planted
fault that is hardest to see shows as much as it can. An adapter that can load them is tested on them, as target and as
draft. Of any other the suite asks only what it has: a model with a law, masked to a few ids, beside a draft of the
suite's own; with no draft but itself nothing would ever be rejected.
"""

import importlib.resources
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling import Model
from specsampling_conformance._checks import EXACT, Subject
from specsampling_conformance._host import host_copy
from specsampling_conformance._oracle import Scores
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._trial import tolerance_for
from specsampling_conformance._wrappers import EagerModel, masked

__all__ = [
    "Cast",
    "Difference",
    "FEWEST_IDS",
    "PAIRS",
    "Pair",
    "Player",
    "SHORT_CONTEXT",
    "cast",
    "eager",
    "is_hosted",
    "logit_delta",
    "pair",
    "rounds_tolerance",
    "sequence_tolerance",
]


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

_SHORT = PAIRS["three_a"]._replace(name="short", draft=PAIRS["three_a"].draft.parent / "short_draft")
"""The first pair, its draft's context limited to `SHORT_CONTEXT` tokens."""

FEWEST_IDS = 5
"""Ids that a model which hosts no foreign weights must have: one more than the suite masks it to at most."""

SHORT_CONTEXT = 4
"""Tokens that fit the context of a pair's short draft."""

_MOST_ROWS = 192
"""Rows of the batch in which logits are compared: as many as where laws are enumerated."""

_BLOCKS = (5, 4)
"""Widths of the blocks in which logits are compared."""

_ROOM = 2
"""How much further apart logits may be than they were on the texts that were measured."""

_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of the numbers from 1 to 2 of narrow dtypes."""


class Difference(NamedTuple):
    """How far the logits of blocks in a full batch are from those of single tokens of single rows, on a few texts.

    Attributes
    ----------
    delta : float
        The largest difference.
    scale : float
        The largest logit, at least 1.
    """

    delta: float
    scale: float


class _Differences(dict[str, Difference]):
    """By role; measured when it is first asked for."""

    def __init__(self, scores: dict[str, Scores], rows: int) -> None:
        self._scores, self._rows = scores, rows

    def __missing__(self, role: str) -> Difference:
        self[role] = _difference(self._scores[role], self._rows)
        return self[role]


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
    differences : mapping of str to Difference
        By role, how far a model's blocks are from its single tokens; measured when it is first asked for.
    scores : mapping
        One-token scores of each model, remembered, by the model's role.
    """

    target: Model[Any]
    draft: Model[Any]
    own_target: Model[Any]
    own_draft: Model[Any]
    hosted: bool
    differences: "_Differences"
    scores: dict[str, Scores]

    @property
    def delta(self) -> float:
        """Largest difference of the target's logits, as measured."""
        return self.differences["target"].delta


def pair(name: str) -> Pair:
    """Return a frozen pair; ``"short"`` is the first one with a draft of short context."""
    return _SHORT if name == "short" else PAIRS[name]


def is_hosted(subject: Subject) -> bool:
    """Whether the adapter loads the weights it is given: its vocabularies are those of two pairs of different size."""
    return all(subject.model(one.target).vocab_size == one.vocab_size for one in PAIRS.values())


def cast(subject: Subject, name: str) -> Cast:
    """Return the models of a frozen pair for an adapter, loaded once; ``"short"`` has a draft of short context."""
    return subject.once(("cast", name), lambda: _cast(subject, pair(name)))


def _cast(subject: Subject, played: Pair) -> Cast:
    own_dtype = subject.dtype if subject.dtype in EXACT else "float32"
    target: Model[Any] = subject.model(played.target)
    own_target: Model[Any] = ReferenceModel(played.target, own_dtype)
    own_draft: Model[Any] = ReferenceModel(played.draft, own_dtype)
    hosted = is_hosted(subject)
    if hosted:
        draft: Model[Any] = subject.model(played.draft)
    else:
        size = min(played.vocab_size, target.vocab_size)
        target = masked(target, size) if target.vocab_size > size else target
        if own_draft.vocab_size > size:
            own_target, own_draft = masked(own_target, size), masked(own_draft, size)
        draft = own_draft
    models = {"target": target, "draft": draft, "own_target": own_target, "own_draft": own_draft}
    scores = {role: Scores(model) for role, model in models.items()}
    largest = subject.capabilities.max_batch_size or _MOST_ROWS
    rows = min(_MOST_ROWS, largest) if subject.capabilities.per_row_rollback else 1
    return Cast(target, draft, own_target, own_draft, hosted, _Differences(scores, rows), scores)


def _difference(scores: Scores, rows: int) -> Difference:
    """Measure on texts that begin with each id, in a batch as large as those in which laws are enumerated, and ragged.

    Two blocks, between which rows are rolled back each to its own length: how a kernel adds up depends on the longest
    row, too.
    """
    model = scores.model
    size = model.vocab_size
    furthest = _BLOCKS[0] - 1 if model.max_rollback is None else min(_BLOCKS[0] - 1, model.max_rollback)
    texts = [
        [(first + place * step) % size for place in range(sum(_BLOCKS))]
        for first in range(min(size, 4))
        for step in range(1, 4)
    ]
    delta, scale = 0.0, 1.0
    for start in range(0, len(texts), rows):
        numbers = [(start + row) % len(texts) for row in range(rows)]
        back = np.arange(rows) // len(texts) % (furthest + 1)
        lengths = np.zeros(rows, dtype=np.int32)
        cache = model.init_cache(rows, 16)
        for width in _BLOCKS:
            places = lengths[:, None] + np.arange(width)
            block = np.array(texts, dtype=np.int32)[np.array(numbers)[:, None], places]
            logits, cache = model.score(cache, block)
            got = host_copy(logits)
            steps = np.stack(
                [
                    [scores.logits(tuple(texts[number][: place + 1])) for place in row]
                    for number, row in zip(numbers, places.tolist(), strict=True)
                ]
            )
            delta = max(delta, float(np.max(np.abs(got - steps), initial=0.0)))
            scale = max(scale, float(np.max(np.abs(steps), initial=0.0)))
            lengths = (lengths + width - back).astype(np.int32)
            if back.any():
                cache = model.rollback(cache, lengths)
    return Difference(delta, scale)


def logit_delta(subject: Subject, models: Cast, role: str) -> float:
    """Return what differences of a model's logits are put down to: as measured, with room, up to the cap of its dtype.

    A fault must not widen its own tolerance. On the frozen pairs in float32 and float64 no room is given: the texts
    that are enumerated are about as many as those measured. In narrow dtypes it is one unit in the last place of the
    largest logit at least: what lies between two numbers rounds to either, and on the texts measured may have rounded
    alike.
    """
    is_exact = _is_exact(subject, models)
    found = models.differences[role]
    unit = _UNITS.get(subject.dtype, 0.0) * 2.0 ** math.floor(math.log2(found.scale))
    return min(max(found.delta * (1 if is_exact else _ROOM), unit), tolerance_for(subject.dtype) * found.scale)


def _law_shift(delta: float, temperature: float) -> float:
    r"""Return the largest total variation of a token's law when no logit moves by more than `delta`.

    Division by the temperature makes that :math:`\varepsilon = \delta / T`. For any set of ids :math:`A` the log-odds
    of :math:`P(A)` then move by at most :math:`2 \varepsilon`, numerator and complement by :math:`\varepsilon` each;
    the worst case is :math:`\sigma(\varepsilon) - \sigma(-\varepsilon) = \tanh(\varepsilon / 2)`. Top-k, top-p and
    min-p leave a softmax over the ids they keep, to which the same applies as long as they keep the same ids, which
    :func:`keeps_ids` answers for; so do argmax and temperature 0, where nothing moves at all.
    """
    return 0.0 if temperature == 0 else math.tanh(delta / temperature / 2)


class Player(NamedTuple):
    """A model of a cast by its role, and the temperature it is sampled at."""

    models: Cast
    role: str
    temperature: float


def sequence_tolerance(
    subject: Subject, models: Cast, length: int, *, role: str = "target", temperature: float = 1.0
) -> float:
    r"""Return the total variation of `length` tokens' joint law that rounding may account for.

    That of the arithmetic, or what the logits' differences come to where that is more: the total variation of a chain
    is at most the sum of that of its links, :math:`L \tanh(\delta / 2 T)`. Neither is ever nearly reached where
    nothing is wrong: the errors of different logits do not conspire.
    """
    if _is_exact(subject, models):
        return _arithmetic(subject)
    return max(_arithmetic(subject), length * _law_shift(logit_delta(subject, models, role), temperature))


def rounds_tolerance(subject: Subject, target: Player, draft: Player | None, length: int) -> float:
    r"""Return the same for the joint law of tokens and rounds, which hangs on the draft's law, too.

    A token comes out of a slot accepted with probability :math:`\min(p, q)`, and in a rejected one's place with
    :math:`\max(0, p - q)`: together these move by at most :math:`|\Delta p| + 2 |\Delta q|`.
    """
    if all(_is_exact(subject, player.models) for player in (target, draft) if player is not None):
        return 2 * _arithmetic(subject)
    shift = 0.0
    for player, weight in ((target, 1), (draft, 2)):
        if player is not None:
            shift += weight * _law_shift(logit_delta(subject, player.models, player.role), player.temperature)
    return max(2 * _arithmetic(subject), length * shift)


def _is_exact(subject: Subject, models: Cast) -> bool:
    """Whether laws are held to the arithmetic alone: the frozen pairs' weights in float32 or float64."""
    return models.hosted and subject.dtype in EXACT


def _arithmetic(subject: Subject) -> float:
    # Laws are made in float32 at least, whatever the dtype of the logits.
    return EXACT.get(subject.dtype, EXACT["float32"])


def eager(model: Model[Any]) -> Model[Any]:
    """Return the model without its compiled round."""
    return EagerModel(model) if hasattr(model, "compile_round") else model
