"""Drafters: what proposes the tokens that the target then checks."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from specsampling._arrays import is_host, marker, move, namespace, take_rows, to_host, workable
from specsampling._feeding import feed, gather_block
from specsampling._model import Array, Model
from specsampling._random import Label, Purpose, Randomness, asked_like
from specsampling._rejection import Proposal
from specsampling._requests import as_model
from specsampling._sampling import Sampling, to_probs

__all__ = ["Context", "Drafter", "ModelDrafter", "ModelDrafterState", "as_drafter"]

StateT = TypeVar("StateT")

_WIDEST_SCORED_BLOCK = 16
"""Catching up by more tokens than this is done without logits first: they cost a row of V numbers each."""


class Context(NamedTuple):
    """Every row's committed text, as a drafter sees it.

    Attributes
    ----------
    tokens : array
        Integer array of shape ``(B, C)``, right-padded; what lies past a row's length is undefined.
    lengths : array
        Integer array of shape ``(B,)``: committed tokens per row, prompt included, at least 1.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Context
    >>> context = Context(tokens=np.array([[7, 2, 0], [4, 1, 9]]), lengths=np.array([2, 3]))
    >>> [text[:length].tolist() for text, length in zip(context.tokens, context.lengths)]
    [[7, 2], [4, 1, 9]]
    """

    tokens: Array
    lengths: Array


class Drafter(Protocol[StateT]):
    """What proposes tokens. Needs two methods; others are found by the presence of the name.

    ``select(state, rows) -> state``
        Keep only these rows; without it finished rows are masked instead of dropped.
    ``vocab_size : int``
        Compared with the target's when the decoder is built.
    ``max_rollback : int or None``
        Like a model's; a lookahead with K + 1 past it raises `CapabilityError`.
    ``num_calls : int``
        Running count of the scoring calls of the drafter's model, from which the stats take differences.
    ``ignores_sampling : bool``
        True says that settings for the draft would have no effect, so that `draft_sampling` is refused.

    Examples
    --------
    A drafter that proposes the row's last token once more, as a choice and not as a draw:

    >>> import numpy as np
    >>> from specsampling import Proposal, generate
    >>> from specsampling_numpy import TableModel
    >>> class Repeat:
    ...     def init(self, batch_size, capacity):
    ...         return None
    ...     def propose(self, state, context, lookahead, sampling, randomness):
    ...         last = context.tokens[np.arange(len(context.lengths)), context.lengths - 1]
    ...         tokens = np.repeat(last[:, None], lookahead, axis=1)
    ...         return Proposal(tokens, np.full(len(last), lookahead), None), state
    >>> target = TableModel([[0.9, 0.1], [0.5, 0.5]])
    >>> generate(target, Repeat(), [0], max_new_tokens=40).stats.acceptance_rate > 0.5
    True
    """

    def init(self, batch_size: int, capacity: int) -> StateT:
        """Return the state before anything was seen: `batch_size` rows, each with room for `capacity` tokens."""
        ...

    def propose(
        self, state: StateT, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, StateT]:
        """Propose up to `lookahead` tokens for every row.

        The state passed in must not be used again. Whatever the drafter holds beyond a row's committed tokens is its
        own to take back: nothing else tells it what was accepted. Every random decision is asked of `randomness` with
        ``Label(Purpose.DRAFT, slot)``.
        """
        ...


class ModelDrafterState(NamedTuple):
    """The draft model's cache and how much of each row it holds.

    Attributes
    ----------
    cache : object
        The draft model's own cache.
    num_held : array
        Integer array of shape ``(B,)``: tokens of each row in the cache. On the host, or traced.
    like : array or None
        An array from the model's earlier answers, which tells where its arrays live.

    Examples
    --------
    >>> from specsampling import ModelDrafter
    >>> from specsampling_numpy import TableModel
    >>> state = ModelDrafter(TableModel([0.5, 0.5])).init(batch_size=2, capacity=8)
    >>> state.num_held.tolist()
    [0, 0]
    """

    cache: Any
    num_held: Array
    like: Array | None


class ModelDrafter:
    """Draft with a smaller model, token by token, each drawn from the model's own law.

    Parameters
    ----------
    model : Model
        The draft model; it may be the target object itself.

    Attributes
    ----------
    model : Model
        The draft model.
    num_calls : int
        Scoring calls of the model so far, prompts included.
    traced_width : int
        Tokens that a draft is fed first inside a trace, where shapes are fixed: 2. Fed every round it
        lacks one, or two after a fully accepted block.

    Raises
    ------
    TypeError
        If `model` lacks a member that every model has.

    Notes
    -----
    A round takes K calls: the first is fed the committed tokens that the cache lacks (one, or two after a fully
    accepted block) as one right-padded block, each later one the token just drawn. Rows whose text is longer than the
    model's ``max_length`` propose nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import ModelDrafter, generate
    >>> from specsampling_numpy import TableModel
    >>> target = TableModel(np.array([0.5, 0.3, 0.2]))
    >>> draft = TableModel(np.array([0.4, 0.4, 0.2]))
    >>> result = generate(target, ModelDrafter(draft), [0], max_new_tokens=8)
    >>> len(result.tokens[0])
    8
    """

    traced_width = 2

    def __init__(self, model: Model[Any]) -> None:
        self.model: Model[Any] = as_model("model", model)
        self.num_calls = 0
        self._max_length: int | None = getattr(model, "max_length", None)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the draft model."""
        return self.model.vocab_size

    @property
    def max_rollback(self) -> int | None:
        """How many tokens back the draft model can go."""
        return self.model.max_rollback

    @property
    def select(self) -> Callable[[ModelDrafterState, np.ndarray], ModelDrafterState]:
        """Keep only some rows, ``(state, rows) -> state``; absent where the model has no ``select``."""
        select_rows = self.model.select  # type: ignore[attr-defined]  # AttributeError: then this is absent too

        def select(state: ModelDrafterState, rows: np.ndarray) -> ModelDrafterState:
            return ModelDrafterState(select_rows(state.cache, rows), to_host(state.num_held)[rows], state.like)

        return select

    def init(self, batch_size: int, capacity: int) -> ModelDrafterState:
        """Return an empty draft cache."""
        cache = self.model.init_cache(batch_size, capacity)
        return ModelDrafterState(cache, np.zeros(batch_size, dtype=np.int32), None)

    def catch_up(self, state: ModelDrafterState, context: Context, width: int) -> ModelDrafterState:
        """Feed the host `context` until no row lacks more than `width` tokens; draws nothing.

        `propose` does this by itself where it sees host arrays. A compiled round calls it before the trace, with
        `traced_width`.
        """
        held, lengths = _span(context.lengths, to_host(state.num_held), self._max_length)
        return state if int((lengths - held).max()) <= width else self._fed(state, context, held, lengths)

    def _fed(
        self, state: ModelDrafterState, context: Context, held: np.ndarray, lengths: np.ndarray
    ) -> ModelDrafterState:
        # All but the last token, so that every row then lacks exactly one.
        cache = self.model.rollback(state.cache, move(held, state.like))
        tokens = np.where(context.tokens < self.vocab_size, context.tokens, 0)
        fed = feed(self.model, cache, tokens, held, lengths - 1, state.like)
        self.num_calls += fed.num_calls
        return ModelDrafterState(fed.cache, np.maximum(held, lengths - 1), fed.like)

    def propose(
        self, state: ModelDrafterState, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, ModelDrafterState]:
        """Draw `lookahead` tokens per row, one after another, from the draft model's law under `sampling`."""
        limit = self._max_length
        if is_host(context.lengths):
            if limit is not None and int(context.lengths.max()) + lookahead <= limit + 1:
                limit = None  # no row reaches it in this round
            held, lengths = _span(context.lengths, to_host(state.num_held), limit)
            if lookahead == 0 or (limit is not None and not (context.lengths <= limit).any()):
                # Nothing to draw: what the cache lacks can wait, but not the news of what in it was not committed.
                return _empty_proposal(context, lookahead), state._replace(num_held=held)
            width = int((lengths - held).max())
            if width > 1 and width > self._widest_block(context, held):
                state = self._fed(state, context, held, lengths)
                held, lengths = _span(context.lengths, to_host(state.num_held), limit)
                width = int((lengths - held).max())
        else:
            held, lengths = _span(context.lengths, state.num_held, limit)
            width = self.traced_width
        xp = namespace(lengths)
        cache = self.model.rollback(state.cache, move(held, state.like))
        block = gather_block(context.tokens, held, lengths, width)
        block = xp.where(block < self.vocab_size, block, 0)
        logits, cache = self._score(cache, move(block, state.like))
        like = marker(logits)
        last_logits = logits[:, 0, :]
        if width > 1:
            # A row that lacks nothing (past the context limit) reads any column: it will propose nothing.
            column = xp.clip(lengths - held - 1, 0, width - 1)
            last_logits = take_rows(logits, move(column, logits))
            # A copy: `lengths` can be the decoder's own array, and a careless cache counts in the one it is given.
            cache = self.model.rollback(cache, move(xp.asarray(lengths, copy=True), logits))

        tokens: list[Array] = []
        rows: list[Array] = []
        last_logits = workable(last_logits)
        if is_host(last_logits):
            randomness = asked_like(randomness, like)
        for slot in range(lookahead):
            if slot:
                logits, cache = self._score(cache, move(tokens[-1][:, None], like))
                last_logits = workable(logits[:, 0, :])
            probs = to_probs(last_logits, sampling)
            rows.append(probs)
            token = randomness.categorical(probs, Label(Purpose.DRAFT, slot))
            tokens.append(namespace(token).astype(token, namespace(token).int32, copy=False))
        num_held, num_tokens = lengths + max(lookahead - 1, 0), xp.full_like(lengths, lookahead)
        if limit is not None:
            is_within = context.lengths <= limit
            num_held = xp.where(is_within, num_held, held)
            # Token k + 1 is drawn after feeding the k before it: the last one proposed is never fed.
            num_tokens = xp.where(is_within, xp.clip(limit - lengths + 1, 0, lookahead), 0)
        state = ModelDrafterState(cache, num_held, like)
        if lookahead == 0:
            return _empty_proposal(context, 0), state
        ys = namespace(tokens[0])
        return Proposal(ys.stack(tokens, axis=1), num_tokens, ys.stack(rows, axis=1)), state

    def _score(self, cache: Any, tokens: Array) -> tuple[Array, Any]:
        self.num_calls += 1
        return self.model.score(cache, tokens)

    def _widest_block(self, context: Context, held: np.ndarray) -> int:
        """Return how wide a padded block may be: every row must have room for it, and be able to go back over it."""
        room: int = context.tokens.shape[1] - int(held.max())
        rollback = self.model.max_rollback
        return min(_WIDEST_SCORED_BLOCK, room, _WIDEST_SCORED_BLOCK if rollback is None else rollback)


def as_drafter(drafter: Any) -> Any:
    """Return `drafter`, with a ModelDrafter around what is a model."""
    if isinstance(drafter, type):
        raise TypeError(f"`drafter` must be a Drafter, a Model or None, got the class {drafter.__name__} itself")
    if drafter is None or hasattr(drafter, "propose"):
        return drafter
    if hasattr(drafter, "score"):
        return ModelDrafter(drafter)
    raise TypeError(f"`drafter` must be a Drafter, a Model or None, got {drafter!r}")


def _span(lengths: Array, num_held: Array, limit: int | None) -> tuple[Array, Array]:
    """Return, per row, how much of the cache is kept and up to what length the row is to be fed.

    The last committed token is always fed again, for its logits. A row past the context limit stays as it is.
    """
    xp = namespace(lengths)
    held = xp.minimum(num_held, lengths - 1)
    return held, lengths if limit is None else xp.where(lengths <= limit, lengths, held)


def _empty_proposal(context: Context, lookahead: int) -> Proposal:
    xp = namespace(context.lengths)
    tokens = xp.zeros((context.lengths.shape[0], lookahead), dtype=context.lengths.dtype)
    return Proposal(tokens, xp.zeros_like(context.lengths), None)
