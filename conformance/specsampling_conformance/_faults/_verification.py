"""Faults of the rejection step: what is accepted, what is drawn in place of it, what is drawn as the bonus."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import Label, Purpose, Randomness, to_probs
from specsampling_conformance._faults._round import Floats, Ints, PlainRound, Slots, round_control, round_fault

__all__: list[str] = []


@round_control("plain round", "The round that the faults are made of, as it stands.")
class _Right(PlainRound):
    pass


def _draft_law_after(slots: Slots) -> Floats:
    """Return the draft's own law after the whole block, from scratch."""
    tokens, lengths = np.asarray(slots.context.tokens), np.asarray(slots.context.lengths)
    texts = np.zeros((lengths.size, int(lengths.max()) + slots.tokens.shape[1]), dtype=np.int64)
    for row, length in enumerate(lengths):
        proposed = slots.tokens[row, : slots.num_tokens[row]]
        texts[row, : length + proposed.size] = [*tokens[row, :length], *proposed]
    model = slots.drafter.model
    logits, _ = model.score(model.init_cache(lengths.size, texts.shape[1]), texts)
    last = np.asarray(logits)[slots.rows, lengths + slots.num_tokens - 1]
    return np.asarray(to_probs(last, slots.draft_sampling), dtype=np.float64)


@round_fault(
    "bonus token drawn from the draft", "After a fully accepted block the draft's law is used, not the target's."
)
class _BonusFromDraft(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        return _draft_law_after(slots) if hasattr(slots.drafter, "model") else super().bonus(slots)


@round_fault(
    "bonus token drawn from the draft's last row", "The bonus is drawn from the last row that the draft reported."
)
class _BonusFromLastDraftRow(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        last = slots.draft_probs[slots.rows, slots.num_tokens - 1] if slots.tokens.shape[1] else super().bonus(slots)
        return np.where((slots.num_tokens > 0)[:, None], last, super().bonus(slots))


@round_fault("bonus token from the wrong row", "The bonus is drawn from the target's row before the last.")
class _BonusWrongRow(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        return slots.target_probs[slots.rows, np.maximum(slots.num_tokens - 1, 0)]


@round_fault("greedy bonus token", "The bonus is the target's likeliest token.")
class _BonusGreedy(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        return np.eye(slots.target_probs.shape[2])[np.argmax(super().bonus(slots), axis=1)]


@round_fault("bonus token from the residual", "After a fully accepted block the last slot's residual is used.")
class _BonusFromResidual(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        if slots.tokens.shape[1] == 0:
            return super().bonus(slots)
        last = np.maximum(slots.num_tokens - 1, 0)
        weights = np.maximum(slots.target_probs[slots.rows, last] - slots.draft_probs[slots.rows, last], 0.0)
        return np.where((slots.num_tokens > 0)[:, None] & (weights.sum(1) > 0)[:, None], weights, super().bonus(slots))


@round_fault("bonus token uniform", "The bonus is any id, all as likely.")
class _BonusUniform(PlainRound):
    def bonus(self, slots: Slots) -> Floats:
        return np.where((slots.num_tokens > 0)[:, None], 1.0 / slots.target_probs.shape[2], super().bonus(slots))


@round_fault("residual not renormalised", "What the residual's sum lacks to one goes to the last id.")
class _NotRenormalised(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        weights = super().excess(slots, target, draft)
        weights[:, -1] += 1.0 - weights.sum(axis=1)
        return weights


@round_fault("residual through a softmax", "The residual is normalised by a softmax.")
class _SoftmaxResidual(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return np.exp(super().excess(slots, target, draft))


@round_fault("residual is the target", "After a rejection a token is drawn from the target's law.")
class _ResidualTarget(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return target


@round_fault("residual is the draft", "After a rejection a token is drawn from the draft's law.")
class _ResidualDraft(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return draft


@round_fault("residual |p - q|", "The residual takes the absolute difference.")
class _ResidualAbsolute(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return np.abs(target - draft)


@round_fault("residual q - p", "The residual takes the difference the wrong way round.")
class _ResidualReversed(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return np.maximum(draft - target, 0.0)


@round_fault("residual squared", "The residual is squared before it is normalised.")
class _ResidualSquared(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return super().excess(slots, target, draft) ** 2


@round_fault("residual greedy", "After a rejection the residual's likeliest token is taken.")
class _ResidualGreedy(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return np.eye(target.shape[1])[np.argmax(super().excess(slots, target, draft), axis=1)]


@round_fault("residual with an epsilon", "A hundredth is added to every entry of the residual.")
class _ResidualEpsilon(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return super().excess(slots, target, draft) + 0.01


@round_fault("residual is the target without the token", "After a rejection only the rejected id is taken out.")
class _ResidualWithout(PlainRound):
    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        if slots.tokens.shape[1] == 0:
            return slots.target_probs[:, 0]
        slot = np.minimum(num_accepted, slots.tokens.shape[1] - 1)
        weights = slots.target_probs[slots.rows, slot].copy()
        weights[slots.rows, slots.tokens[slots.rows, slot]] = 0.0
        return np.where(weights.sum(axis=1, keepdims=True) > 0, weights, slots.target_probs[slots.rows, slot])


@round_fault("residual of the next row", "The residual uses the target's row after the rejected slot.")
class _ResidualNextRow(PlainRound):
    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        rolled = np.concatenate([slots.target_probs[:, 1:], slots.target_probs[:, -1:]], axis=1)
        return super().residual(slots._replace(target_probs=rolled), num_accepted, accepted)


@round_fault("residual of the first slot", "The residual is that of the block's first slot, whichever was rejected.")
class _ResidualFirstSlot(PlainRound):
    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        return super().residual(slots, np.zeros_like(num_accepted), accepted)


@round_fault("residual of another row of the batch", "The residual uses the draft's laws of the row before.")
class _ResidualOtherRow(PlainRound):
    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        moved = slots._replace(draft_probs=np.roll(slots.draft_probs, 1, axis=0))
        return super().residual(moved, num_accepted, accepted)


@round_fault("ratio inverted", "A token is accepted with probability q / p.")
class _RatioInverted(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return denominator, numerator


@round_fault("ratio squared", "A token is accepted with probability (p / q) squared.")
class _RatioSquared(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return numerator**2, denominator**2


@round_fault("ratio's root", "A token is accepted with the square root of its probability.")
class _RatioRoot(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return np.sqrt(numerator), np.sqrt(denominator)


@round_fault("deterministic accept p >= q", "A token is accepted when p >= q, and else never.")
class _Deterministic(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return np.where(numerator >= denominator, numerator, 0.0), denominator


@round_fault("lenient accept", "A token is accepted with probability 1.05 p / q.")
class _Lenient(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return 1.05 * numerator, denominator


@round_fault("epsilon in the ratio", "A token is accepted with probability p / (q + 0.01).")
class _RatioEpsilon(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return numerator, denominator + 0.01


@round_fault("every token accepted", "What is drafted is kept.")
class _AcceptAll(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, _ = super().ratio(slots)
        is_proposed = np.arange(numerator.shape[1]) < slots.num_tokens[:, None]
        return np.where(is_proposed, 1.0, 0.0), np.ones_like(numerator)


@round_fault("accepted with probability p", "A drawn token is accepted as if it had been chosen, its residual is not.")
class _AcceptWithP(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return numerator, np.ones_like(denominator)


@round_fault("accept iff likeliest", "A token is accepted when it is the target's likeliest.")
class _AcceptLikeliest(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, _ = super().ratio(slots)
        best = slots.target_probs[:, : numerator.shape[1]].max(axis=2)
        return np.where(numerator == best, 1.0, 0.0), np.ones_like(numerator)


@round_fault("typical acceptance", "A token is accepted when its probability is at least a third.")
class _AcceptTypical(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, _ = super().ratio(slots)
        return np.where(numerator >= 1 / 3, 1.0, 0.0), np.ones_like(numerator)


@round_fault(
    "accept iff equal to a fresh draw", "A token is kept if a draw from the target equals it; if not, another is made."
)
class _FreshDraw(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        # A draw from the target equals the token with the probability that it gives the token.
        numerator, denominator = super().ratio(slots)
        return numerator, np.ones_like(denominator)

    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        return target


@round_fault(
    "accepted tokens counted past a rejection", "The number of accepted tokens is counted, not where they stop."
)
class _CountedAll(PlainRound):
    def count(self, accepted: NDArray[Any]) -> Ints:
        return accepted.sum(axis=1, dtype=np.int64)


@round_fault("accept decisions read backwards", "The first rejection is looked for from the block's end.")
class _Backwards(PlainRound):
    def count(self, accepted: NDArray[Any]) -> Ints:
        width = accepted.shape[1]
        return (
            np.where(accepted.any(axis=1), width - np.argmax(accepted[:, ::-1], axis=1), 0)
            if width
            else super().count(accepted)
        )


@round_fault("block accepted by its joint ratio", "One decision for the whole block, by the product of the ratios.")
class _JointRatio(PlainRound):
    def decide(self, slots: Slots, numerator: Floats, denominator: Floats, randomness: Randomness) -> NDArray[Any]:
        is_proposed = np.arange(numerator.shape[1]) < slots.num_tokens[:, None]
        p = np.where(is_proposed, numerator, 1.0).prod(axis=1, keepdims=True)
        q = np.where(is_proposed, denominator, 1.0).prod(axis=1, keepdims=True)
        accepted: NDArray[Any] = np.asarray(randomness.accept(p, q, Label(Purpose.ACCEPT, 0))) & is_proposed
        return accepted


@round_fault("one uniform for all slots", "Every slot's decision is asked for under the first slot's label.")
class _OneLabel(PlainRound):
    def decide(self, slots: Slots, numerator: Floats, denominator: Floats, randomness: Randomness) -> NDArray[Any]:
        columns = [
            randomness.accept(numerator[:, slot : slot + 1], denominator[:, slot : slot + 1], Label(Purpose.ACCEPT, 0))
            for slot in range(numerator.shape[1])
        ]
        return np.concatenate(columns, axis=1)


@round_fault("draft label used again", "The last token is drawn under the label of the first drafted one.")
class _DraftLabel(PlainRound):
    def draw(self, slots: Slots, weights: Floats, is_all: NDArray[np.bool_], randomness: Randomness) -> Ints:
        if slots.is_chosen:
            return super().draw(slots, weights, is_all, randomness)
        return np.asarray(randomness.categorical(weights, Label(Purpose.DRAFT, 0)), dtype=np.int64)


@round_fault("last token drawn twice", "The last token is drawn, thrown away and drawn again under the same label.")
class _DrawnTwice(PlainRound):
    def draw(self, slots: Slots, weights: Floats, is_all: NDArray[np.bool_], randomness: Randomness) -> Ints:
        super().draw(slots, weights, is_all, randomness)
        return super().draw(slots, weights, is_all, randomness)


@round_fault("last accepted token redrawn", "The last accepted token is dropped and drawn again from the target.")
class _Redrawn(PlainRound):
    def count(self, accepted: NDArray[Any]) -> Ints:
        return np.maximum(super().count(accepted) - 1, 0)

    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        was_rejected = super().count(accepted) == 0
        redrawn = slots.target_probs[slots.rows, num_accepted]
        return np.where(was_rejected[:, None], super().residual(slots, num_accepted, accepted), redrawn)


@round_control(
    "bonus token dropped", "A fully accepted block of two or more gives up its bonus and ends with its last token."
)
class _BonusDropped(PlainRound):
    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        block, num_accepted = super().emit(slots, num_accepted, next_token)
        is_dropped = (num_accepted == slots.num_tokens) & (num_accepted > 1)
        # The last accepted token takes the place of the token after it: nothing follows.
        return block, np.where(is_dropped, num_accepted - 1, num_accepted)


@round_control("drawn tokens verified as chosen", "The point-mass rule on a drawn token: exact, and slower.")
class _AsChosen(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return numerator, np.ones_like(denominator)

    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        chosen = np.eye(slots.target_probs.shape[2])[slots.tokens]
        return super().residual(slots._replace(draft_probs=chosen), num_accepted, accepted)
