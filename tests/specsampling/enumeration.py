"""The exact law of one verification or one round: every way of answering its random decisions, in one batch.

A row of the batch is one path: what was drafted, where the first rejection is, what was drawn last. `Prescribed` gives
these answers and multiplies up how probable they were, so one call gives the whole law, with nothing sampled. Its only
notion of the rule is the contract of `Randomness`: accept with probability min(1, numerator / denominator), and draw in
proportion to the weights.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specsampling import Label, Proposal, Purpose, verify


class Prescribed:
    """A `Randomness` whose answers are given; `probability` is that of each row's answers, as far as they were asked.

    Slots after a row's first rejection are answered "accept": whoever reads them accepts too much.
    """

    def __init__(self, drafted: np.ndarray, first_rejected: np.ndarray, resampled: np.ndarray) -> None:
        self.drafted = drafted
        self.first_rejected = first_rejected
        self.resampled = resampled
        self.probability = np.ones(len(resampled))
        self.asked: list[Label] = []

    def where(self, mask: Any) -> "Prescribed":
        """Return the paths that the mask keeps, before any question."""
        mask = np.asarray(mask, dtype=bool)
        return Prescribed(self.drafted[mask], self.first_rejected[mask], self.resampled[mask])

    def accept(self, numerator: Any, denominator: Any, label: Label) -> np.ndarray:
        """Reject in the slot of the first rejection, accept in every other."""
        self.asked.append(label)
        numerator, denominator = (np.asarray(x, dtype=np.float64) for x in (numerator, denominator))
        with np.errstate(all="ignore"):
            chance = np.where(numerator > 0, np.where(numerator >= denominator, 1.0, numerator / denominator), 0.0)
        slots = label.slot + np.arange(chance.shape[1])
        rejects = slots == self.first_rejected[:, None]
        is_decision = slots <= self.first_rejected[:, None]
        self.probability *= np.where(is_decision, np.where(rejects, 1 - chance, chance), 1.0).prod(axis=1)
        return ~rejects

    def categorical(self, weights: Any, label: Label) -> np.ndarray:
        """Draw the token of the path; rows must have mass, and no entry may be negative."""
        self.asked.append(label)
        weights = np.asarray(weights, dtype=np.float64)
        total = weights.sum(axis=1)
        assert (weights >= 0).all()
        assert (total > 0).all()
        answers = self.drafted[:, label.slot] if label.purpose == Purpose.DRAFT else self.resampled
        self.probability *= weights[np.arange(len(answers)), answers] / total
        return answers


def every_path(vocab_size: int, lookahead: int) -> Prescribed:
    """Return a row for every drafted block, first rejection (K: none) and last token."""
    ids = range(vocab_size)
    paths = np.array(list(itertools.product(*[ids] * lookahead, range(lookahead + 1), ids)), dtype=np.int64)
    return Prescribed(paths[:, :lookahead], paths[:, lookahead], paths[:, lookahead + 1])


def laws_after(tables: Sequence[np.ndarray], blocks: np.ndarray) -> np.ndarray:
    """Return for each block, shape ``(N, n)``, the laws of its tokens and of the next one, ``(N, len(tables), V)``.

    ``tables[t]`` has t + 1 axes: the law of token t given the t tokens before it.
    """
    shape = (len(blocks), len(tables[0]))
    laws = [np.broadcast_to(table[tuple(blocks[:, :t].T)], shape) for t, table in enumerate(tables)]
    return np.stack(laws, axis=1)


def block_law(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the joint law of as many tokens as there are tables."""
    law = np.ones(())
    for table in tables:
        law = law[..., None] * table
    return law


def emitted_law(
    tables: Sequence[np.ndarray], tokens: np.ndarray, num_emitted: np.ndarray, probability: np.ndarray
) -> np.ndarray:
    """Return the joint law of K + 1 tokens: those that each path emitted, continued by the target itself."""
    law = np.zeros(tables[-1].shape)
    for block, count, weight in zip(tokens.tolist(), num_emitted.tolist(), probability.tolist(), strict=True):
        if weight == 0:
            continue
        emitted = tuple(block[:count])
        rest = np.array(weight)
        for table in tables[count:]:
            rest = rest[..., None] * table[emitted]
        law[emitted] += rest
    return law


def verified_law(
    target: Sequence[np.ndarray],
    draft: Sequence[np.ndarray] | Callable[[tuple[int, ...]], int],
    *,
    num_tokens: int | None = None,
    dtype: Any = np.float64,
) -> np.ndarray:
    """Return the joint law of the next K + 1 tokens where `verify` judges the first `num_tokens` drafted ones.

    `target` has K + 1 tables. `draft` has K, or is a function of the prefix that chooses the token (a point mass).
    Whatever `verify` must not read is NaN, or an id out of range.
    """
    lookahead, vocab_size = len(target) - 1, len(target[0])
    num_tokens = lookahead if num_tokens is None else num_tokens
    paths = every_path(vocab_size, lookahead)
    # Nothing is drawn after the tokens proposed, and nothing there can be accepted.
    paths = paths.where((paths.drafted[:, num_tokens:] == 0).all(axis=1) & (paths.first_rejected <= num_tokens))
    if callable(draft):
        draft_probs = None
        prefixes = [tuple(block) for block in paths.drafted.tolist()]
        paths = paths.where([all(draft(block[:t]) == block[t] for t in range(num_tokens)) for block in prefixes])
    elif lookahead == 0:
        draft_probs = np.empty((len(paths.drafted), 0, vocab_size), dtype)
    else:
        draft_probs = laws_after(draft, paths.drafted)
        for slot in range(num_tokens):
            paths.probability *= draft_probs[np.arange(len(draft_probs)), slot, paths.drafted[:, slot]]
        draft_probs[:, num_tokens:] = np.nan
        draft_probs = draft_probs.astype(dtype)
    target_probs = laws_after(target, paths.drafted).astype(dtype)
    target_probs[:, num_tokens + 1 :] = np.nan
    tokens = paths.drafted.copy()
    tokens[:, num_tokens:] = 97
    verdict = verify(Proposal(tokens, np.full(len(tokens), num_tokens), draft_probs), target_probs, paths)
    emitted = np.concatenate([tokens, paths.resampled[:, None]], axis=1)
    emitted[np.arange(len(emitted)), verdict.num_accepted] = verdict.next_token
    return emitted_law(target, emitted, verdict.num_accepted + 1, paths.probability)


def distance(law: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation between two laws, or more: mass that is missing counts whole."""
    return float(np.abs(law - other).sum())
