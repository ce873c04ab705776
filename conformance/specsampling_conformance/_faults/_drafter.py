"""Faults of the drafter: tokens that were not drawn from the law that is reported, and a cache gone wrong."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specsampling import Context, Drafter, Label, Model, Proposal, Purpose, Randomness, Sampling, to_probs
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults._registry import Fault, plant

__all__ = ["DrafterEngine", "PlainDrafter", "PlainState", "drafter_fault"]

Floats: TypeAlias = Any
Ints: TypeAlias = Any
"""Arrays of NumPy, floating and integer."""


class PlainState(NamedTuple):
    """The draft's cache, and the tokens of each row in it."""

    cache: Any
    fed: list[list[int]]


class PlainDrafter:
    """Draft with a model in plain NumPy; as it stands it is right. A fault is a subclass that overrides one method.

    Parameters
    ----------
    model : Model
        The draft model.
    """

    def __init__(self, model: Model[Any]) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_rollback = model.max_rollback
        self.max_length: int | None = getattr(model, "max_length", None)

    def init(self, batch_size: int, capacity: int) -> PlainState:
        """Return an empty cache, with room for what a faulty rollback leaves behind."""
        return PlainState(self.model.init_cache(batch_size, 4 * capacity), [[] for _ in range(batch_size)])

    def propose(
        self, state: PlainState, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, PlainState]:
        """Feed what the cache lacks, then draw token by token."""
        lengths = np.asarray(context.lengths)
        batch_size = lengths.size
        if lookahead == 0:
            empty = np.zeros((batch_size, 0), dtype=np.int32)
            return Proposal(empty, np.zeros_like(lengths), None), state
        # It is fed id 0 in place of those that it does not know.
        known = np.where(np.asarray(context.tokens) < self.vocab_size, context.tokens, 0)
        texts = [known[row, :length].tolist() for row, length in enumerate(lengths)]
        kept = [self.keep(fed, text) for fed, text in zip(state.fed, texts, strict=True)]
        cache = self.model.rollback(state.cache, np.array(kept))
        fed = [list(row[:count]) for row, count in zip(state.fed, kept, strict=True)]
        lacking = [self.lacking(text, count) for text, count in zip(texts, kept, strict=True)]
        width = max(map(len, lacking))
        block = np.array([[*tokens, *[0] * (width - len(tokens))] for tokens in lacking])
        logits, cache = self.model.score(cache, block)
        for row, tokens in zip(fed, lacking, strict=True):
            row.extend(tokens)
        cache = self.model.rollback(cache, np.array([len(row) for row in fed]))
        last = np.asarray(logits)[np.arange(batch_size), np.array([len(tokens) - 1 for tokens in lacking])]
        tokens, probs = [], []
        for slot in range(lookahead):
            if slot:
                followed = self.followed(tokens[-1], last)
                logits, cache = self.model.score(cache, followed[:, None])
                for row, token in zip(fed, followed.tolist(), strict=True):
                    row.append(token)
                last = np.asarray(logits)[:, 0]
            law = self.law(last, sampling)
            tokens.append(self.draw(law, slot, randomness))
            probs.append(self.reported(last, law, tokens[-1], sampling))
        proposal = Proposal(np.stack(tokens, axis=1), self.fitting(lengths, lookahead), np.stack(probs, axis=1))
        return self.finish(proposal), PlainState(cache, fed)

    def select(self, state: PlainState, rows: Any) -> PlainState:
        """Keep some rows."""
        model: Any = self.model
        kept = [int(row) for row in rows]
        return PlainState(model.select(state.cache, np.array(kept)), [state.fed[row] for row in kept])

    def keep(self, fed: Sequence[int], text: Sequence[int]) -> int:
        """How many of the tokens in the cache are kept."""
        return min(len(fed), len(text) - 1)

    def fitting(self, lengths: Ints, lookahead: int) -> Ints:
        """How many tokens each row proposes: the draft has a law after texts that fit its context, and no others."""
        if self.max_length is None:
            return np.full(lengths.shape, lookahead)
        return np.clip(self.max_length + 1 - lengths, 0, lookahead)

    def lacking(self, text: list[int], kept: int) -> list[int]:
        """Return the committed tokens that the cache lacks; the last one is always fed."""
        return text[kept:]

    def followed(self, token: Ints, logits: Floats) -> Ints:
        """Return the token that the next one is drafted after."""
        return token

    def law(self, logits: Floats, sampling: Sampling) -> Floats:
        """Return the law that tokens are drawn from."""
        return np.asarray(to_probs(logits, sampling))

    def draw(self, law: Floats, slot: int, randomness: Randomness) -> Ints:
        """Draw a token for each row."""
        return np.asarray(randomness.categorical(law, Label(Purpose.DRAFT, slot)), dtype=np.int64)

    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        """Return the law that is reported for the tokens just drawn."""
        return law

    def finish(self, proposal: Proposal) -> Proposal:
        """Return what is proposed in the end."""
        return proposal


class DrafterEngine(Engine):
    """The library with another drafter in place of `ModelDrafter`.

    Parameters
    ----------
    wrap : callable
        Returns a drafter over a draft model.
    """

    def __init__(self, wrap: Callable[[Model[Any]], Drafter[Any]]) -> None:
        self.wrap = wrap

    def drafter(self, drafter: Any) -> Any:
        """Return the drafter in place of a model; other drafters stay what they are."""
        return self.wrap(drafter) if hasattr(drafter, "score") else drafter


def drafter_fault(
    name: str, description: str, kind: str = "drafter"
) -> Callable[[type[PlainDrafter]], type[PlainDrafter]]:
    """Register a subclass of `PlainDrafter` as a fault."""

    def register(drafter: type[PlainDrafter]) -> type[PlainDrafter]:
        plant(Fault(name=name, description=description, tier="T1", kind=kind, planted=lambda: DrafterEngine(drafter)))
        return drafter

    return register


@drafter_fault("plain drafter", "The drafter that the faults are made of, as it stands.", "control")
class _Right(PlainDrafter):
    pass


@drafter_fault("greedy draft with its softmax law", "Tokens are the likeliest; the law reported is the softmax.")
class _GreedySoft(PlainDrafter):
    def draw(self, law: Floats, slot: int, randomness: Randomness) -> Ints:
        return np.argmax(law, axis=1)


@drafter_fault(
    "drawn tokens reported at temperature 1", "Tokens are drawn under the settings, the raw law is reported."
)
class _RawReported(PlainDrafter):
    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits, Sampling()))


@drafter_fault("drawn from the raw law", "Tokens are drawn from the raw law, the warped one is reported.")
class _RawDrawn(PlainDrafter):
    def law(self, logits: Floats, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits, Sampling()))

    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits, sampling))


@drafter_fault("drawn sharper than reported", "Tokens are drawn at 0.7 of the temperature reported.")
class _Sharper(PlainDrafter):
    def law(self, logits: Floats, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits / 0.7, sampling))

    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits, sampling))


@drafter_fault(
    "first row's draft settings reported", "Tokens are drawn under their row's settings, the law reported has row 0's."
)
class _FirstRowReported(PlainDrafter):
    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.asarray(to_probs(logits, sampling.rows(np.zeros(len(logits), dtype=np.int64))))


@drafter_fault("draft's context passed", "A row that has outgrown the draft's context is drafted for all the same.")
class _ContextPassed(PlainDrafter):
    def fitting(self, lengths: Ints, lookahead: int) -> Ints:
        return np.full(lengths.shape, lookahead)


@drafter_fault("draft's context one short", "The last token that the draft's context has room for is never proposed.")
class _ContextShort(PlainDrafter):
    def fitting(self, lengths: Ints, lookahead: int) -> Ints:
        return super().fitting(lengths + (super().fitting(lengths, lookahead) < lookahead), lookahead)


@drafter_fault("law of the step before reported", "Each token is reported with the law of the slot before it.")
class _StaleLaw(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        probs = np.asarray(proposal.probs)
        return proposal._replace(probs=np.concatenate([probs[:, :1], probs[:, :-1]], axis=1))


@drafter_fault("law of another row reported", "Every row is reported with the law of its neighbour.")
class _OtherRow(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        return proposal._replace(probs=np.roll(np.asarray(proposal.probs), 1, axis=0))


@drafter_fault("law reported in 8 bits", "The law reported is rounded to 256ths.")
class _EightBits(PlainDrafter):
    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.round(law * 256) / 256


@drafter_fault("uniform law reported", "The law reported is uniform, whatever the tokens were drawn from.")
class _Uniform(PlainDrafter):
    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return np.full_like(law, 1.0 / law.shape[1])


@drafter_fault("better of two draws", "Two tokens are drawn and the likelier one is proposed, as if it were one draw.")
class _BestOfTwo(PlainDrafter):
    def law(self, logits: Floats, sampling: Sampling) -> Floats:
        drawn = super().law(logits, sampling)
        # The likelier of two, in one draw: the chance that both are at most as likely, less that both are less likely.
        order = np.argsort(drawn, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(drawn, order, 1), axis=1)
        best = np.empty_like(drawn)
        np.put_along_axis(best, order, np.diff(sums**2, axis=1, prepend=0.0), axis=1)
        return best

    def reported(self, logits: Floats, law: Floats, token: Ints, sampling: Sampling) -> Floats:
        return super().law(logits, sampling)


def _shortened(proposal: Proposal, num_tokens: NDArray[Any]) -> Proposal:
    """Propose at most so many tokens: a row at the end of the draft's context may have fewer."""
    return proposal._replace(num_tokens=np.minimum(np.asarray(proposal.num_tokens), num_tokens))


@drafter_fault(
    "low-confidence token dropped", "A drawn token of probability below 0.4 is dropped after it was looked at."
)
class _LowDropped(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        drawn = np.take_along_axis(np.asarray(proposal.probs), np.asarray(proposal.tokens)[:, :, None], 2)[:, :, 0]
        return _shortened(proposal, np.cumprod(drawn >= 0.4, axis=1).sum(axis=1))


@drafter_fault(
    "stop after a low-confidence token", "A row proposes nothing after a token of probability below 0.4.", "control"
)
class _StopAfterLow(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        probs, tokens = np.asarray(proposal.probs), np.asarray(proposal.tokens)
        drawn = np.take_along_axis(probs, tokens[:, :, None], 2)[:, :, 0]
        going_on = np.concatenate([np.ones((tokens.shape[0], 1), dtype=bool), drawn[:, :-1] >= 0.4], axis=1)
        return _shortened(proposal, np.cumprod(going_on, axis=1).sum(axis=1))


@drafter_fault("repeated token dropped", "A drafted token equal to the one before it is taken back.")
class _RepeatDropped(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        tokens = np.asarray(proposal.tokens)
        fresh = np.concatenate([np.ones((len(tokens), 1), dtype=bool), tokens[:, 1:] != tokens[:, :-1]], axis=1)
        return _shortened(proposal, np.cumprod(fresh, axis=1).sum(axis=1))


@drafter_fault("drawn block sorted", "The drafted tokens of a row are put in another order than they were drawn in.")
class _Sorted(PlainDrafter):
    def finish(self, proposal: Proposal) -> Proposal:
        return proposal._replace(tokens=np.sort(np.asarray(proposal.tokens), axis=1))


@drafter_fault("draft cache never rolled back", "The draft keeps what was rejected in its cache.")
class _NeverBack(PlainDrafter):
    def keep(self, fed: Sequence[int], text: Sequence[int]) -> int:
        return len(fed)

    def lacking(self, text: list[int], kept: int) -> list[int]:
        return text if kept == 0 else text[-1:]


@drafter_fault(
    "draft rolled back one too many", "The draft's cache loses a committed token when something was rejected."
)
class _BackTooFar(PlainDrafter):
    def keep(self, fed: Sequence[int], text: Sequence[int]) -> int:
        kept = super().keep(fed, text)
        return kept - 1 if 0 < kept < len(fed) else kept

    def lacking(self, text: list[int], kept: int) -> list[int]:
        return text if kept == 0 else text[-1:]


@drafter_fault(
    "draft cache lacks a token after full acceptance", "Of two tokens that the draft lacks only the last is fed."
)
class _LastMissing(PlainDrafter):
    def lacking(self, text: list[int], kept: int) -> list[int]:
        return text if kept == 0 else text[-1:]


@drafter_fault("draft forgets the prompt", "The draft is fed only the last token of a prompt.")
class _NoPrompt(PlainDrafter):
    def lacking(self, text: list[int], kept: int) -> list[int]:
        return text[-1:] if kept == 0 else text[kept:]

    def keep(self, fed: Sequence[int], text: Sequence[int]) -> int:
        return max(0, len(fed) - 1)


@drafter_fault(
    "draft follows its likeliest token", "Each token is drafted after the likeliest one, not after the one drawn."
)
class _FollowsBest(PlainDrafter):
    def followed(self, token: Ints, logits: Floats) -> Ints:
        return np.argmax(logits, axis=1)


@drafter_fault("draft follows the row before", "Each token is drafted after the token of the neighbouring row.")
class _FollowsOther(PlainDrafter):
    def followed(self, token: Ints, logits: Floats) -> Ints:
        return np.roll(token, 1)


@drafter_fault("compaction forgets the draft cache", "`select` keeps the first rows of the draft's cache.")
class _SelectForgets(PlainDrafter):
    def select(self, state: PlainState, rows: Any) -> PlainState:
        return super().select(state, np.arange(len(list(rows))))
