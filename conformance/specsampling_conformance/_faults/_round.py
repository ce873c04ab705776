"""A round in plain NumPy, written to be broken on purpose: every decision that a fault may get wrong is a method.

The class as it stands is right, and the suite's own tests hold it to `decode_round`. The real `Decoder` runs it,
because a target that has `compile_round` brings the round it is run with.
"""
# ruff: noqa: ARG002 - a method is given what a fault may look at, and the right one does not

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specsampling import Context, Label, Model, Purpose, Randomness, RoundCarry, RoundOutput, Sampling, to_probs
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults._registry import Fault, plant
from specsampling_conformance._wrappers import EagerModel

__all__ = ["PlainRound", "RoundEngine", "Slots", "round_control", "round_fault"]

Floats: TypeAlias = Any
Ints: TypeAlias = Any
"""Arrays of NumPy, floating and integer."""


class Slots(NamedTuple):
    """What a round knows once the target has scored: B rows, K slots, V ids.

    Attributes
    ----------
    tokens, num_tokens : array
        What was proposed, ``(B, K)``, and how much of it, ``(B,)``.
    target_probs, draft_probs : array
        Laws ``(B, K + 1, V)`` and ``(B, K, V)``; chosen tokens have a law with one id.
    is_chosen : bool
        Whether the tokens were chosen rather than drawn.
    logits : array
        The target's, ``(B, K + 1, V)``.
    context : Context
        Committed text.
    sampling, draft_sampling : Sampling
        Settings.
    drafter : Drafter or None
        The drafter.
    """

    tokens: Ints
    num_tokens: Ints
    target_probs: Floats
    draft_probs: Floats
    is_chosen: bool
    logits: Floats
    context: Context
    sampling: Sampling
    draft_sampling: Sampling
    drafter: Any

    @property
    def rows(self) -> Ints:
        """Indices of the rows."""
        return np.arange(self.num_tokens.size)

    def at_tokens(self, probs: Floats) -> Floats:
        """Return the probability of each proposed token, 0 where there is none."""
        picked = np.take_along_axis(probs[:, : self.tokens.shape[1]], self.tokens[:, :, None], axis=2)[:, :, 0]
        is_proposed = np.arange(self.tokens.shape[1]) < self.num_tokens[:, None]
        return np.where(is_proposed, picked, 0.0)


class PlainRound:
    """One round; its signature is that of `decode_round`. A fault is a subclass that overrides one method."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def __call__(
        self,
        target: Model[Any],
        drafter: Any,
        carry: RoundCarry,
        context: Context,
        limits: Any,
        end_bans: Any,
        randomness: Randomness,
        /,
        *,
        lookahead: int,
        sampling: Sampling,
        draft_sampling: Sampling | None = None,
        **options: Any,
    ) -> tuple[RoundOutput, RoundCarry]:
        """Draft, score, verify."""
        draft_sampling = self.draft_settings(sampling if draft_sampling is None else draft_sampling)
        batch_size = context.lengths.shape[0]
        tokens, num_tokens = np.zeros((batch_size, lookahead), dtype=np.int64), np.zeros(batch_size, dtype=np.int64)
        probs, drafter_state = None, None
        if drafter is not None:
            proposal, drafter_state = drafter.propose(
                carry.drafter_state, context, lookahead, draft_sampling, randomness
            )
            tokens, num_tokens = (np.asarray(x, dtype=np.int64) for x in proposal[:2])
            probs = proposal.probs
        num_tokens = np.where(limits > 0, np.minimum(num_tokens, limits - 1), 0)
        last = context.tokens[np.arange(batch_size), context.lengths - 1]
        cache = target.rollback(carry.target_cache, self.kept(context))
        # An id that the target does not know is always rejected, and nothing after it is read.
        known = np.where(tokens < target.vocab_size, tokens, 0)
        logits, cache = target.score(cache, self.block(last, known))
        if end_bans is not None:
            logits = self.ban(logits, np.asarray(end_bans), options["end_tokens"])
        target_probs = self.target_probs(logits, sampling)
        draft_probs = np.eye(target.vocab_size)[tokens] if probs is None else np.asarray(probs, dtype=np.float64)
        vocab_size = max(target.vocab_size, draft_probs.shape[2])
        slots = Slots(
            tokens,
            num_tokens,
            self.align(target_probs, vocab_size),
            self.align(draft_probs, vocab_size),
            probs is None,
            logits,
            context,
            sampling,
            draft_sampling,
            drafter,
        )
        accepted = np.zeros((batch_size, 0), dtype=bool)
        if lookahead:
            accepted = self.decide(slots, *self.ratio(slots), randomness)
        num_accepted = self.count(accepted)
        is_all = num_accepted >= num_tokens
        weights = np.where(is_all[:, None], self.bonus(slots), self.residual(slots, num_accepted, accepted))
        next_token = self.draw(slots, weights, is_all, randomness)
        emitted, num_accepted = self.emit(slots, num_accepted, next_token)
        output = RoundOutput(
            tokens=emitted,
            num_proposed=num_tokens,
            num_accepted=num_accepted,
            bad_target_slot=np.full(batch_size, -1),
            bad_draft_slot=np.full(batch_size, -1),
            logprobs=None,
            overlap=np.zeros((batch_size, lookahead)),
            draft_calls=0,
            is_point_mass=probs is None,
        )
        return output, RoundCarry(cache, drafter_state, carry.like)

    def kept(self, context: Context) -> Ints:
        """How much of each row the target's cache keeps: all but the last token, which is fed again."""
        kept: Ints = context.lengths - 1
        return kept

    def block(self, last: Ints, tokens: Ints) -> Ints:
        """Return what the target scores: the last committed token and the proposed ones."""
        return np.concatenate([last[:, None], tokens], axis=1)

    def draft_settings(self, sampling: Sampling) -> Sampling:
        """Return the settings that the drafter is given."""
        return sampling

    def ban(self, logits: Floats, end_bans: Ints, end_tokens: tuple[int, ...]) -> Floats:
        """Forbid the end tokens in the first ``end_bans[b]`` slots of each row."""
        is_banned = np.arange(logits.shape[1]) < end_bans[:, None]
        is_end = np.isin(np.arange(logits.shape[2]), end_tokens)
        return np.where(is_banned[:, :, None] & is_end, -np.inf, logits)

    def align(self, probs: Floats, vocab_size: int) -> Floats:
        """Give laws an entry for every id that target or draft knows; the ids that are new have probability zero."""
        missing = vocab_size - probs.shape[2]
        return np.pad(probs, ((0, 0), (0, 0), (0, missing))) if missing else probs

    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        """Laws of the target."""
        return np.asarray(to_probs(logits, sampling), dtype=np.float64)

    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        """Numerator and denominator of the probability that a token is kept."""
        return slots.at_tokens(slots.target_probs), slots.at_tokens(slots.draft_probs)

    def decide(self, slots: Slots, numerator: Floats, denominator: Floats, randomness: Randomness) -> NDArray[Any]:
        """Ask which tokens are kept."""
        accepted: NDArray[Any] = np.asarray(randomness.accept(numerator, denominator, Label(Purpose.ACCEPT, 0)))
        return accepted

    def count(self, accepted: NDArray[Any]) -> Ints:
        """How many tokens are kept: those before the first rejection."""
        return np.cumprod(accepted, axis=1, dtype=np.int64).sum(axis=1)

    def bonus(self, slots: Slots) -> Floats:
        """Weights of the token after a block that was kept whole."""
        return slots.target_probs[slots.rows, slots.num_tokens]

    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        """Weights of the token in place of a rejected one, from the two laws of its slot."""
        return np.maximum(target - draft, 0.0)

    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        """Weights of the token in place of the first rejected one; anything for rows that rejected none."""
        target = slots.target_probs[slots.rows, np.minimum(num_accepted, slots.target_probs.shape[1] - 1)]
        if slots.draft_probs.shape[1] == 0:
            return target
        draft = slots.draft_probs[slots.rows, np.minimum(num_accepted, slots.draft_probs.shape[1] - 1)]
        weights = self.excess(slots, target, draft)
        return np.where(weights.sum(axis=1, keepdims=True) > 0, weights, target)

    def draw(self, slots: Slots, weights: Floats, is_all: NDArray[np.bool_], randomness: Randomness) -> Ints:
        """Draw the token after those that were kept."""
        drawn = randomness.categorical(weights.astype(slots.logits.dtype), Label(Purpose.RESAMPLE, 0))
        return np.asarray(drawn, dtype=np.int64)

    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        """Put the block together; return it with how many of its tokens were kept."""
        block = np.concatenate([slots.tokens, np.zeros_like(next_token)[:, None]], axis=1)
        block[slots.rows, num_accepted] = next_token
        return block, num_accepted


class _PlantedModel(EagerModel):
    """A target that brings its own round."""

    def __init__(self, model: Model[Any], decode: PlainRound) -> None:
        super().__init__(model)
        self._round = decode
        self.init_cache = self._init_cache

    def _init_cache(self, batch_size: int, capacity: int) -> Any:
        self._round.memory.clear()
        # With room for what a faulty rollback leaves behind.
        return self.model.init_cache(batch_size, 4 * capacity)

    def compile_round(self, drafter: Any, sampling: Sampling, lookahead: int) -> PlainRound:
        return self._round


class RoundEngine(Engine):
    """The library with another round.

    Parameters
    ----------
    make_round : callable
        Returns the round.
    """

    def __init__(self, make_round: Callable[[], PlainRound]) -> None:
        self.make_round = make_round

    def target(self, model: Model[Any]) -> Model[Any]:
        """Return the target with the round in it."""
        return _PlantedModel(model, self.make_round())


def round_fault(
    name: str, description: str, *, tier: str = "T1", kind: str = "engine"
) -> Callable[[type[PlainRound]], type[PlainRound]]:
    """Register a subclass of `PlainRound` as a fault of the engine."""

    def register(decode: type[PlainRound]) -> type[PlainRound]:
        plant(Fault(name=name, description=description, tier=tier, kind=kind, planted=lambda: RoundEngine(decode)))
        return decode

    return register


def round_control(name: str, description: str) -> Callable[[type[PlainRound]], type[PlainRound]]:
    """Register a subclass of `PlainRound` as a control."""
    return round_fault(name, description, kind="control")
