"""What the law should be: a plain reading of the paper, in float64, over one-token scores of the models themselves."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specsampling import Model
from specsampling_conformance._host import host_copy

__all__ = [
    "NextTokenLaw",
    "Scores",
    "block_logits",
    "keeps_ids",
    "lookup_proposal",
    "one_token_law",
    "outcome_law",
    "padded_length",
    "reference_probs",
    "sequence_law",
    "total_variation",
]

NextTokenLaw: TypeAlias = Callable[[tuple[int, ...]], NDArray[np.float64]]
"""From a text (prompt included) to the law of the token after it, ``(V,)`` in float64."""

Proposer: TypeAlias = Callable[[tuple[int, ...], int], tuple[int, ...]]
"""From a text and K to the tokens that a drafter chooses (point masses)."""

_PADDING = 64
"""What the lengths of padded texts are multiples of."""


def reference_probs(
    logits: NDArray[np.float64],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> NDArray[np.float64]:
    """Return the law of one row of logits ``(V,)`` under sampling settings, by sorting, in float64.

    Order: temperature, top-k, top-p, min-p; ties are kept. Temperature 0 is the lowest id of the largest logit.
    """
    if temperature == 0:
        probs = np.zeros(logits.size)
        probs[int(np.argmax(logits))] = 1.0
        return probs
    scaled = (logits - logits.max()) / temperature
    keep = np.isfinite(scaled)
    if top_k is not None and top_k < logits.size:
        keep &= scaled >= np.sort(scaled)[-top_k]
    probs = _normalised(scaled, keep)
    if top_p is not None and top_p < 1:
        descending = np.sort(probs)[::-1]
        last = int(np.argmax(np.cumsum(descending) >= top_p - 1e-12))
        keep &= probs >= descending[last]
        probs = _normalised(scaled, keep)
    if min_p is not None:
        keep &= probs >= min_p * probs.max()
        probs = _normalised(scaled, keep)
    return probs


def _normalised(scaled: NDArray[np.float64], keep: NDArray[np.bool_]) -> NDArray[np.float64]:
    weights = np.where(keep, np.exp(np.where(keep, scaled, 0.0)), 0.0)
    result: NDArray[np.float64] = weights / weights.sum()
    return result


class Scores:
    """A model's own scores of one token at a time, in a batch of one that starts from an empty cache.

    Parameters
    ----------
    model : Model
        The model. Every text is scored once, and remembered.
    capacity : int, optional
        Of every cache asked for: one number, so that compiled adapters trace once.

    Attributes
    ----------
    model : Model
        As given.
    """

    def __init__(self, model: Model[Any], capacity: int = 16) -> None:
        self.model = model
        self._capacity = capacity
        self._known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def logits(self, text: tuple[int, ...]) -> NDArray[np.float64]:
        """Return the logits of the token after `text`, ``(V,)``."""
        if text not in self._known:
            cache = self.model.init_cache(1, max(self._capacity, len(text)))
            for end, token in enumerate(text, start=1):
                logits, cache = self.model.score(cache, np.array([[token]], dtype=np.int32))
                self._known[text[:end]] = host_copy(logits)[0, -1]
        return self._known[text]

    def law(self, *, banned: Sequence[int] = (), until: int = 0, **settings: Any) -> NextTokenLaw:
        """Return the law under sampling settings; `banned` ids are forbidden after texts shorter than `until`."""
        known: dict[tuple[int, ...], NDArray[np.float64]] = {}

        def after(text: tuple[int, ...]) -> NDArray[np.float64]:
            if text not in known:
                logits = self.logits(text)
                if len(text) < until:
                    logits = np.where(np.isin(np.arange(logits.size), banned), -np.inf, logits)
                known[text] = reference_probs(logits, **settings)
            return known[text]

        return after


def padded_length(length: int) -> int:
    """Return the number of tokens that a text is padded to: few numbers, so that compiled adapters trace few times."""
    return -(-length // _PADDING) * _PADDING


def block_logits(model: Model[Any], text: Sequence[int]) -> NDArray[np.float64]:
    """Return the logits after each token of a text that is fed as one block, ``(T, V)``.

    The block is padded: no position sees what comes after it.
    """
    block = np.zeros((1, padded_length(len(text))), dtype=np.int32)
    block[0, : len(text)] = text
    logits, _ = model.score(model.init_cache(*block.shape), block)
    found: NDArray[np.float64] = host_copy(logits)[0, : len(text)]
    return found


def one_token_law(model: Model[Any], **settings: Any) -> NextTokenLaw:
    """Return a model's law under sampling settings, from its own scores of one token at a time."""
    return Scores(model).law(**settings)


def sequence_law(law: NextTokenLaw, prompt: tuple[int, ...], length: int) -> NDArray[np.float64]:
    """Return the joint law of the next `length` tokens, one axis a position."""
    if length == 0:
        return np.ones(())
    first = law(prompt)
    return np.stack(
        [
            probability * sequence_law(law, (*prompt, token), length - 1)
            if probability > 0
            else np.zeros((first.size,) * (length - 1))
            for token, probability in enumerate(first)
        ]
    )


def keeps_ids(
    logits: NDArray[np.float64],
    delta: float,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> bool:
    r"""Return whether settings keep the same ids of a row of logits ``(V,)`` when each may move by up to `delta`.

    Two logits change places only where they are within :math:`2 \delta` of each other, and the probability of a set
    of ids moves by at most :math:`\tanh(\delta / 2 T)`. A yes is certain; a row that is near an edge is a no.
    """
    finite = logits[np.isfinite(logits)]
    ordered = np.sort(finite)[::-1]
    if temperature == 0:
        return ordered.size == 1 or bool(ordered[0] - ordered[1] > 2 * delta)
    kept = ordered.size
    if top_k is not None and top_k < kept:
        if ordered[top_k - 1] - ordered[top_k] <= 2 * delta:
            return False
        kept = top_k
    scaled = (ordered[:kept] - ordered[0]) / temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    if top_p is not None and top_p < 1 and kept > 1:
        moved = math.tanh(delta / temperature / 2) + 1e-12
        sums = np.cumsum(probs)
        last = int(np.argmax(sums >= top_p - 1e-12))
        while last + 1 < kept and scaled[last + 1] == scaled[last]:
            last += 1  # ties with the last are kept, too
        is_clear = last + 1 == kept or ordered[last] - ordered[last + 1] > 2 * delta
        # Whichever of the ids that may come last does, without it the sum has to be short of top-p.
        if not (is_clear and sums[last] - moved >= top_p > sums[last] - probs[last] + moved):
            return False
        scaled = scaled[: last + 1]
    if min_p is not None and min_p > 0:
        # The likeliest id is always kept.
        return bool(np.all(np.abs(scaled[1:] - math.log(min_p)) > 2 * delta / temperature))
    return True


def lookup_proposal(text: tuple[int, ...], lookahead: int, max_ngram: int = 3, min_ngram: int = 1) -> tuple[int, ...]:
    """Return what prompt lookup proposes, by searching the whole text anew."""
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                continued = list(text)
                for offset in range(lookahead):
                    continued.append(continued[end + offset])
                return tuple(continued[len(text) :])
    return ()


def outcome_law(
    target: NextTokenLaw,
    draft: NextTokenLaw | None,
    prompt: tuple[int, ...],
    *,
    max_new_tokens: int,
    schedule: Sequence[int] = (2,),
    end_tokens: Sequence[int] = (),
    stop_sequences: Sequence[tuple[int, ...]] = (),
    draft_limit: int | None = None,
    propose: Proposer | None = None,
) -> dict[tuple[tuple[int, ...], int], float]:
    """Return the law of (tokens, rounds) of speculative sampling, as the paper's Algorithm 2 has it.

    Drawn proposals come from `draft`, chosen ones from `propose`, none from neither. In slot t a token x is emitted
    from the draft with probability min(p(x), q(x)), and the round ends there with max(0, p(x) - q(x)): no uniform is
    needed to say so. Ids that only one of the two knows have probability zero in the other. `end_tokens` and
    `stop_sequences` end a row, the latter matched in its new tokens; a draft with a context of `draft_limit` tokens
    has laws after texts of that length and no more.
    """
    result: dict[tuple[tuple[int, ...], int], float] = {}

    def ends(new: tuple[int, ...]) -> bool:
        return bool(new) and (new[-1] in end_tokens or any(new[-len(stop) :] == tuple(stop) for stop in stop_sequences))

    def emit(new: tuple[int, ...], rounds: int, mass: float, left: tuple[int, ...] | int | None) -> None:
        """Go on with what is left of the round: chosen tokens, or how many are to be drawn; None where it is over."""
        if mass <= 0:
            return
        if len(new) == max_new_tokens or ends(new):
            result[new, rounds] = result.get((new, rounds), 0.0) + mass
        elif left is None:
            begin(new, rounds, mass)
        else:
            slot(new, rounds, mass, left)

    def begin(new: tuple[int, ...], rounds: int, mass: float) -> None:
        lookahead = min(schedule[rounds % len(schedule)], max_new_tokens - len(new) - 1)
        if draft_limit is not None:
            lookahead = max(0, min(lookahead, draft_limit + 1 - len(prompt) - len(new)))
        if propose is not None:
            slot(new, rounds + 1, mass, propose((*prompt, *new), lookahead)[:lookahead])
        else:
            slot(new, rounds + 1, mass, 0 if draft is None else lookahead)

    def slot(new: tuple[int, ...], rounds: int, mass: float, left: tuple[int, ...] | int) -> None:
        p = target((*prompt, *new))
        kept = np.zeros_like(p)
        rest: tuple[int, ...] | int
        if isinstance(left, int):
            rest = left - 1
            if left and draft is not None:
                q = draft((*prompt, *new))[: p.size]
                kept[: q.size] = np.minimum(p[: q.size], q)
        else:
            rest = left[1:]
            if left:
                kept[left[0]] = p[left[0]]
        for token, probability in enumerate(p):
            emit((*new, token), rounds, mass * kept[token], rest)
            emit((*new, token), rounds, mass * (probability - kept[token]), None)

    emit((), 0, 1.0, None)
    return result


def total_variation(first: dict[Any, float], second: dict[Any, float]) -> float:
    """Return half the sum of absolute differences of two laws."""
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})
