"""Faults of the loop around the rejection step: rows, positions, settings, what is emitted and where a row ends."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import Context, Randomness, Sampling, to_probs
from specsampling_conformance._faults._round import Floats, Ints, PlainRound, Slots, round_fault

__all__: list[str] = []


@round_fault("q shifted one step", "Each token's ratio and residual use the draft's law of the slot before.")
class _DraftShifted(PlainRound):
    def _shifted(self, slots: Slots) -> Slots:
        probs = slots.draft_probs
        return slots._replace(draft_probs=np.concatenate([probs[:, :1], probs[:, :-1]], axis=1)[:, : probs.shape[1]])

    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        return super().ratio(self._shifted(slots))

    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        return super().residual(self._shifted(slots), num_accepted, accepted)


@round_fault("p shifted one step", "Row t of the target's laws is taken for slot t + 1.")
class _TargetShifted(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        probs = super().target_probs(logits, sampling)
        return np.concatenate([probs[:, :1], probs[:, :-1]], axis=1)


@round_fault("p one step ahead", "Row t + 1 of the target's laws is taken for slot t.")
class _TargetAhead(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        probs = super().target_probs(logits, sampling)
        return np.concatenate([probs[:, 1:], probs[:, -1:]], axis=1)


@round_fault(
    "first row reused from the last round", "Row 0 of the target's laws is the one that the round before ended with."
)
class _FirstRowReused(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        probs = super().target_probs(logits, sampling)
        if "last" in self.memory:
            probs[:, 0] = self.memory["last"]
        return probs

    def draw(self, slots: Slots, weights: Floats, is_all: NDArray[np.bool_], randomness: Randomness) -> Ints:
        self.memory["last"] = slots.target_probs[slots.rows, slots.num_tokens].copy()
        return super().draw(slots, weights, is_all, randomness)


@round_fault("target rows swapped", "Every row is judged by the target's laws of its neighbour.")
class _RowsSwapped(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        return np.roll(super().target_probs(logits, sampling), 1, axis=0)


@round_fault("draft laws of another row", "Every row's ratio uses the draft's laws of its neighbour.")
class _DraftRowsSwapped(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        return super().ratio(slots)[0], super().ratio(slots._replace(draft_probs=np.roll(slots.draft_probs, 1, 0)))[1]


@round_fault("every row accepts as many as the shortest", "All rows keep the smallest number of accepted tokens.")
class _Levelled(PlainRound):
    def count(self, accepted: NDArray[Any]) -> Ints:
        counts = super().count(accepted)
        return np.full_like(counts, counts.min())


@round_fault(
    "q rounded to 8 bits", "The ratio takes the draft's probability to the nearest 256th; the residual does not."
)
class _EightBitDraft(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        numerator, denominator = super().ratio(slots)
        return numerator, np.round(denominator * 256) / 256


@round_fault("p rounded to 8 bits", "The target's laws are taken to the nearest 256th.")
class _EightBitTarget(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        return np.round(super().target_probs(logits, sampling) * 256) / 256


@round_fault("last two tokens swapped", "The round's last two tokens come out in the wrong order.")
class _LastTwoSwapped(PlainRound):
    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        block, num_accepted = super().emit(slots, num_accepted, next_token)
        rows = slots.rows[num_accepted > 0]
        last = num_accepted[rows]
        block[rows, last], block[rows, last - 1] = block[rows, last - 1], block[rows, last].copy()
        return block, num_accepted


@round_fault("rejected token emitted", "The rejected token is put out instead of the one drawn in its place.")
class _RejectedEmitted(PlainRound):
    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        is_rejected = num_accepted < slots.num_tokens
        proposed = np.concatenate([slots.tokens, next_token[:, None]], axis=1)[slots.rows, num_accepted]
        return super().emit(slots, num_accepted, np.where(is_rejected, proposed, next_token))


@round_fault(
    "token after a rejection emitted too", "After the token in place of a rejected one the next drafted one is kept."
)
class _OneTooMany(PlainRound):
    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        block, num_accepted = super().emit(slots, num_accepted, next_token)
        return block, np.where(num_accepted + 1 < slots.num_tokens, num_accepted + 1, num_accepted)


@round_fault("target fed the wrong last token", "The target scores the block after the last token but one, fed twice.")
class _LastTokenLost(PlainRound):
    def __call__(self, target: Any, drafter: Any, carry: Any, context: Context, /, *others: Any, **options: Any) -> Any:
        tokens = np.array(context.tokens)
        rows = np.arange(context.lengths.size)
        kept = tokens[rows, context.lengths - 1].copy()
        self.lost = np.where(context.lengths > 1, tokens[rows, np.maximum(context.lengths - 2, 0)], kept)
        return super().__call__(target, drafter, carry, context, *others, **options)

    def block(self, last: Ints, tokens: Ints) -> Ints:
        return super().block(self.lost, tokens)


@round_fault("target scores the block shifted", "The target is fed the proposed tokens one place late.")
class _BlockShifted(PlainRound):
    def block(self, last: Ints, tokens: Ints) -> Ints:
        return np.concatenate([last[:, None], super().block(last, tokens)[:, :-1]], axis=1)


@round_fault("target not rolled back", "The target's cache keeps what was rejected.")
class _NotRolledBack(PlainRound):
    def kept(self, context: Context) -> Ints:
        kept = super().kept(context)
        return np.maximum(self.memory["held"], kept) if "held" in self.memory else kept

    def block(self, last: Ints, tokens: Ints) -> Ints:
        self.memory["width"] = 1 + tokens.shape[1]
        return super().block(last, tokens)

    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        self.memory["held"] = self.kept(slots.context) + self.memory["width"]
        return super().emit(slots, num_accepted, next_token)


@round_fault("target rolled back one too many", "The target's cache loses one committed token a round.")
class _RolledBackTooFar(PlainRound):
    def kept(self, context: Context) -> Ints:
        return (
            np.maximum(super().kept(context) - 1, 0) if self.memory.setdefault("rounds", 0) else super().kept(context)
        )

    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        self.memory["rounds"] = 1
        return super().emit(slots, num_accepted, next_token)


def _settings_fault(name: str, description: str) -> Callable[[Callable[[Floats, Any], Floats]], None]:
    """Register a fault of how the target's laws are made, one row at a time: ``(logits (T, V), settings) -> laws``."""

    def register(laws: Callable[[Floats, Any], Floats]) -> None:
        class _Settings(PlainRound):
            def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
                rows = [laws(np.asarray(row), sampling.rows(np.array([index]))) for index, row in enumerate(logits)]
                return np.stack(rows).astype(np.float64)

        round_fault(name, description)(_Settings)

    return register


def _made(logits: Floats, settings: Sampling) -> Floats:
    return np.asarray(to_probs(logits[None], settings))[0]


def _first(value: Any) -> Any:
    """Return a setting of a batch of one as a scalar."""
    return value if value is None or np.ndim(value) == 0 else next(iter(value))


def _changed(settings: Sampling, **changes: Any) -> Sampling:
    held = {field.name: _first(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}
    return Sampling(**{**held, **changes})


@_settings_fault("temperature on the draft only", "The target is judged at temperature 1.")
def _no_temperature(logits: Floats, settings: Sampling) -> Floats:
    return _made(logits, _changed(settings, temperature=1.0))


@_settings_fault("temperature applied twice", "The target's logits are divided by the temperature twice.")
def _twice(logits: Floats, settings: Sampling) -> Floats:
    temperature = _first(settings.temperature)
    return _made(logits, _changed(settings, temperature=temperature**2))


@_settings_fault("greedy rows sampled", "A row of temperature 0 is sampled at temperature 1.")
def _greedy_sampled(logits: Floats, settings: Sampling) -> Floats:
    return _made(logits, _changed(settings, temperature=_first(settings.temperature) or 1.0))


@_settings_fault("top-p only on the bonus", "Every slot but the last is judged without top-p.")
def _top_p_on_bonus(logits: Floats, settings: Sampling) -> Floats:
    return np.concatenate([_made(logits, _changed(settings, top_p=None))[:-1], _made(logits, settings)[-1:]])


@_settings_fault("top-p missing on the bonus", "The block's last slot is judged without top-p.")
def _top_p_not_on_bonus(logits: Floats, settings: Sampling) -> Floats:
    return np.concatenate([_made(logits, settings)[:-1], _made(logits, _changed(settings, top_p=None))[-1:]])


@_settings_fault("top-p without the id that crosses", "Ids are kept while their sum stays below top-p.")
def _top_p_short(logits: Floats, settings: Sampling) -> Floats:
    top_p = _first(settings.top_p)
    probs = _made(logits, _changed(settings, top_p=None))
    if top_p is None:
        return probs
    order = np.argsort(-probs, axis=1)
    sums = np.cumsum(np.take_along_axis(probs, order, 1), axis=1)
    keep = np.empty(probs.shape, dtype=bool)
    np.put_along_axis(keep, order, (sums < top_p) | (np.arange(probs.shape[1]) == 0), axis=1)
    kept = np.where(keep, probs, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


@_settings_fault("top-k keeps one more", "One id more than top-k is kept.")
def _top_k_more(logits: Floats, settings: Sampling) -> Floats:
    top_k = _first(settings.top_k)
    return _made(logits, _changed(settings, top_k=None if top_k is None else int(top_k) + 1))


@_settings_fault("min-p against one", "An id is kept when its probability is min-p, not min-p times the largest.")
def _min_p_absolute(logits: Floats, settings: Sampling) -> Floats:
    min_p = _first(settings.min_p)
    probs = _made(logits, _changed(settings, min_p=None))
    if min_p is None:
        return probs
    kept = np.where((probs >= min_p) | (probs == probs.max(axis=1, keepdims=True)), probs, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


@_settings_fault("filtered but not renormalised", "Top-k, top-p and min-p zero entries, and the rest keeps its mass.")
def _not_renormalised(logits: Floats, settings: Sampling) -> Floats:
    free = _made(logits, _changed(settings, top_k=None, top_p=None, min_p=None))
    return np.where(_made(logits, settings) > 0, free, 0.0)


@_settings_fault("top-p before the temperature", "Top-p is applied to the law at temperature 1.")
def _top_p_first(logits: Floats, settings: Sampling) -> Floats:
    allowed = _made(logits, _changed(settings, temperature=1.0, top_k=None, min_p=None)) > 0
    return _made(np.where(allowed, logits, -np.inf), _changed(settings, top_p=None))


@round_fault("first row's settings for all", "Every row is sampled under the settings of row 0.")
class _FirstRowsSettings(PlainRound):
    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        return super().target_probs(logits, _changed(sampling.rows(np.array([0]))))


@round_fault("end tokens forbidden by the block", "While a row is short of its minimum no slot may end it.")
class _BannedBlock(PlainRound):
    def ban(self, logits: Floats, end_bans: Ints, end_tokens: tuple[int, ...]) -> Floats:
        return super().ban(logits, np.where(end_bans > 0, logits.shape[1], 0), end_tokens)


@round_fault("end tokens forbidden in the first slot only", "Every slot but a round's first may end a row too early.")
class _BannedOnce(PlainRound):
    def ban(self, logits: Floats, end_bans: Ints, end_tokens: tuple[int, ...]) -> Floats:
        return super().ban(logits, np.minimum(end_bans, 1), end_tokens)


@round_fault("end tokens forbidden to the first row's minimum", "All rows count the tokens that row 0 lacks.")
class _BannedAsFirst(PlainRound):
    def ban(self, logits: Floats, end_bans: Ints, end_tokens: tuple[int, ...]) -> Floats:
        return super().ban(logits, np.full_like(end_bans, end_bans[0]), end_tokens)


@round_fault("end tokens forbidden after the filters", "Top-k and top-p choose among ids that are then taken away.")
class _BannedLate(PlainRound):
    def ban(self, logits: Floats, end_bans: Ints, end_tokens: tuple[int, ...]) -> Floats:
        self.allowed = np.isfinite(super().ban(logits, end_bans, end_tokens))
        return logits

    def target_probs(self, logits: Floats, sampling: Sampling) -> Floats:
        probs = super().target_probs(logits, sampling)
        allowed, self.allowed = getattr(self, "allowed", None), None
        if allowed is None:
            return probs
        rest = np.where(allowed, probs, 0.0)
        some = rest.sum(axis=2, keepdims=True) > 0
        rest = np.where(some, rest, allowed.astype(np.float64))
        return rest / rest.sum(axis=2, keepdims=True)


@round_fault(
    "draft's law cut to the target's ids",
    "Ids that the target lacks are cut from the draft's law; the rest is scaled.",
)
class _CutToTarget(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        return super().ratio(self._cut(slots))

    def residual(self, slots: Slots, num_accepted: Ints, accepted: NDArray[Any]) -> Floats:
        return super().residual(self._cut(slots), num_accepted, accepted)

    def _cut(self, slots: Slots) -> Slots:
        kept = slots.draft_probs[:, :, : slots.logits.shape[2]]
        scaled = kept / np.maximum(kept.sum(axis=2, keepdims=True), 1e-300)
        return slots._replace(draft_probs=self.align(scaled, slots.draft_probs.shape[2]))


@round_fault("unknown id taken for the last", "An id that the target lacks is judged as if it were its last one.")
class _UnknownClipped(PlainRound):
    def ratio(self, slots: Slots) -> tuple[Floats, Floats]:
        known = np.minimum(slots.tokens, slots.logits.shape[2] - 1)
        return super().ratio(slots._replace(tokens=known))

    def emit(self, slots: Slots, num_accepted: Ints, next_token: Ints) -> tuple[Ints, Ints]:
        known = np.minimum(slots.tokens, slots.logits.shape[2] - 1)
        return super().emit(slots._replace(tokens=known), num_accepted, next_token)


@round_fault("ids new to the draft never drawn", "Ids that only the target knows lose their probability.")
class _NewIdsLost(PlainRound):
    def excess(self, slots: Slots, target: Floats, draft: Floats) -> Floats:
        weights = super().excess(slots, target, draft)
        known = getattr(getattr(slots.drafter, "model", None), "vocab_size", weights.shape[1])
        weights[:, known:] = 0.0
        return weights


@round_fault("first row's draft settings for all", "Every row is drafted under the draft's settings of row 0.")
class _FirstRowsDraftSettings(PlainRound):
    def draft_settings(self, sampling: Sampling) -> Sampling:
        return _changed(sampling.rows(np.array([0])))
