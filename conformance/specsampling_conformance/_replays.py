"""Run the real decoder on known uniforms and hold every round against its replay on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling import Decoder, Model, Randomness, RandomSource, Sampling, UniformRandomness
from specsampling_conformance._checks import CheckFailure, Measured, Subject
from specsampling_conformance._decisions import Rounding, first_mismatch, replay_round
from specsampling_conformance._oracle import NextTokenLaw, Scores, block_logits, lookup_proposal

__all__ = [
    "BlockScores",
    "FixedSource",
    "Players",
    "Replayed",
    "STEPS",
    "SwitchedSource",
    "hold",
    "play",
    "rounding_for",
    "run_rounds",
]

STEPS = {"float64": 1e-12}
"""Resolution of uniforms and running sums, by dtype; of the others that of float32."""

_STEP = 1e-6


class BlockScores(Scores):
    """Scores of whole texts, each in one block; see `block_logits`."""

    def logits(self, text: tuple[int, ...]) -> NDArray[np.float64]:
        """Return the logits after `text`, and remember those of everything it begins with."""
        if text not in self._known:
            for end, row in enumerate(block_logits(self.model, text), start=1):
                self._known[text[:end]] = row
        return self._known[text]


class FixedSource(RandomSource):
    """Every uniform of every round is the same number.

    Parameters
    ----------
    uniform : float
        The number, strictly between 0 and 1.
    """

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> UniformRandomness:  # noqa: ARG002 - the signature is the protocol's
        """Return the round's randomness."""
        return UniformRandomness(np.full((len(row_ids), 2 * lookahead + 1, 3), self.uniform), lookahead)


class SwitchedSource(RandomSource):
    """A source that passes on to another, which may be exchanged: a decoder compiles once for all of them.

    Parameters
    ----------
    source : RandomSource
        The first one.
    """

    def __init__(self, source: RandomSource) -> None:
        self.source = source

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> Randomness:
        """Return what the source of the moment returns."""
        return self.source.begin_round(row_ids, rounds, lookahead)


class Players(NamedTuple):
    """The models of a run, and the laws that they should follow.

    Attributes
    ----------
    target, drafter : Model, Drafter or None
        What the decoder is given.
    target_law : callable
        The target's law.
    draft_law : callable, ``"lookup"`` or None
        The draft's.
    """

    target: Model[Any]
    drafter: Any
    target_law: NextTokenLaw
    draft_law: NextTokenLaw | str | None


class Replayed(NamedTuple):
    """One row's round.

    Attributes
    ----------
    row, round : int
        Which.
    text : tuple of int
        What was committed before it.
    tokens : list of int
        What was emitted.
    lookahead, limit : int
        K, and how many tokens the row might still emit.
    """

    row: int
    round: int
    text: tuple[int, ...]
    tokens: list[int]
    lookahead: int
    limit: int


def run_rounds(
    subject: Subject,
    target: Model[Any],
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    schedule: Sequence[int],
    source: RandomSource,
    row_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
) -> list[Replayed]:
    """Build a decoder, run it to its end and return what every row did in every round."""
    decoder = subject.engine.decoder(target, drafter, randomness=source, sampling=sampling)
    return play(decoder, prompts, max_new_tokens=max_new_tokens, schedule=schedule, row_ids=row_ids)


def play(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    schedule: Sequence[int],
    row_ids: Sequence[int] | None = None,
) -> list[Replayed]:
    """Run a decoder to its end and return what every row did in every round."""
    state = decoder.init(prompts, max_new_tokens=max_new_tokens, max_lookahead=max(schedule), row_ids=row_ids)
    texts = [tuple(int(token) for token in prompt) for prompt in prompts]
    starts = [len(text) for text in texts]
    rounds: list[Replayed] = []
    number = 0
    while not state.is_done:
        lookahead = schedule[number % len(schedule)] if decoder.drafter is not None else 0
        state, info = decoder.step(state, lookahead=lookahead)
        for index, row in enumerate(info.rows.tolist()):
            tokens = info.tokens[index, : info.num_emitted[index]].tolist()
            limit = max_new_tokens - (len(texts[row]) - starts[row])
            rounds.append(Replayed(row, number, texts[row], tokens, lookahead, limit))
            texts[row] = (*texts[row], *tokens)
        number += 1
    return rounds


def hold(
    rounds: Sequence[Replayed],
    players: Players | Sequence[Players],
    source: RandomSource,
    rounding: Rounding | Sequence[Rounding],
    *,
    row_ids: Sequence[int] | None = None,
    most_unsure: float = 0.5,
) -> Measured:
    """Hold rounds against their replay from the same uniforms.

    `players` and `rounding` are those of all rows or of each. `most_unsure` is the largest part of the rounds that may
    lie at a boundary, where nothing can be said.

    Raises
    ------
    CheckFailure
        If a round emitted other tokens although every uniform was clear of its boundary.
    """
    unsure = tokens = 0
    for one in rounds:
        row_id = one.row if row_ids is None else row_ids[one.row]
        uniforms = _uniforms(source, row_id, one.round, one.lookahead)
        num_tokens = min(one.lookahead, one.limit - 1)
        playing = players if isinstance(players, Players) else players[one.row]
        allowed = rounding if isinstance(rounding, Rounding) else rounding[one.row]
        draft: Any = playing.draft_law
        if draft == "lookup":
            draft = lookup_proposal(one.text, num_tokens)
        expected, decisions = replay_round(
            one.text,
            uniforms,
            lookahead=one.lookahead,
            num_tokens=num_tokens,
            target=playing.target_law,
            draft=draft,
            rounding=allowed,
        )
        tokens += len(one.tokens)
        unsure += not all(decision.is_sure for decision in decisions)
        mismatch = first_mismatch(one.tokens, expected, decisions)
        if mismatch is None and len(one.tokens) != len(expected) and all(decision.is_sure for decision in decisions):
            mismatch = f"emitted {len(one.tokens)} tokens and not {len(expected)}", decisions[-1]
        if mismatch is not None:
            what, nearest = mismatch
            raise CheckFailure(
                f"row {one.row}, round {one.round}, after {list(one.text)}: {what}",
                expected="the same tokens, unless a uniform lies at the boundary of its decision: the nearest here is"
                f" {nearest.what}, {nearest.margin:.3g} away, and rounding explains {nearest.allowed:.3g}",
            )
    delta = rounding.delta if isinstance(rounding, Rounding) else max(one.delta for one in rounding)
    if unsure > most_unsure * len(rounds):
        raise CheckFailure(
            f"{unsure} of {len(rounds)} rounds cannot be judged: the logits are too far apart ({delta:.2g})",
            expected=f"at most {most_unsure:.0%} of them",
        )
    return Measured(n=tokens, values={"rounds": len(rounds), "at_a_boundary": unsure, "delta": delta})


def _uniforms(source: RandomSource, row_id: int, number: int, lookahead: int) -> NDArray[np.float64]:
    answers: Any = source.begin_round([row_id], [number], lookahead)
    uniforms: NDArray[np.float64] = np.asarray(answers.uniforms)[0]
    return uniforms


def rounding_for(dtype: str, delta: float) -> Rounding:
    """Return what differences are put down to in a dtype."""
    return Rounding(delta, STEPS.get(dtype, _STEP))
