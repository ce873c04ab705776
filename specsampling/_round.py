"""One round, draft to verdict, as one pure function: what a backend may compile whole."""

from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from specsampling._arrays import (
    device,
    is_host,
    marker,
    move,
    namespace,
    pad_last,
    pick,
    take_along_axis,
    to_host,
    workable,
)
from specsampling._drafting import Context, Drafter
from specsampling._model import Array, Model
from specsampling._random import Randomness, asked_like
from specsampling._rejection import Proposal, check_values, verify
from specsampling._sampling import Sampling, to_probs

__all__ = ["DecodeRound", "LogprobsKind", "RoundCarry", "RoundOutput", "decode_round"]

LogprobsKind = Literal["raw", "processed"]


class RoundCarry(NamedTuple):
    """What one round hands to the next; owned linearly, like the caches in it.

    Attributes
    ----------
    target_cache : object
        The target's cache.
    drafter_state : object
        The drafter's state; None without a drafter.
    like : array or None
        An array of the target's namespace and device; None before the target's first answer.

    Examples
    --------
    >>> from specsampling import RoundCarry
    >>> from specsampling_numpy import TableModel
    >>> first = RoundCarry(TableModel([0.5, 0.5]).init_cache(1, 8), drafter_state=None, like=None)
    >>> first.target_cache.lengths.tolist()
    [0]
    """

    target_cache: Any
    drafter_state: Any
    like: Array | None


class RoundOutput(NamedTuple):
    """What the host needs to know of a round: small arrays, fetched together.

    They are where the round worked: in the target's namespace and on its device, or in NumPy where PyTorch's are on the
    host.

    Attributes
    ----------
    tokens : array
        Integer array of shape ``(B, K + 1)``: a row's accepted tokens and the one after them, then padding.
    num_proposed, num_accepted : array
        Integer arrays of shape ``(B,)``.
    bad_target_slot, bad_draft_slot : array
        Integer arrays of shape ``(B,)``: the first slot whose row of logits has no law, or -1.
    logprobs : array or None
        Real floating array of shape ``(B, K + 1)``: the target's log-probability of each token, where asked for.
    overlap : array
        Real floating array of shape ``(B, K)``: the probability, over the draft's law, that a slot's token is kept:
        the sum of min(p, q) over the vocabulary, or p of the token itself for a point mass.
    draft_calls : int
        Scoring calls that the drafter made.
    is_point_mass : bool
        Whether the tokens were verified as chosen rather than drawn.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Context, CounterSource, RoundCarry, Sampling, decode_round
    >>> from specsampling_numpy import TableModel
    >>> target = TableModel([0.0, 1.0])
    >>> output, _ = decode_round(
    ...     target, None, RoundCarry(target.init_cache(1, 4), None, None), Context(np.array([[0]]), np.array([1])),
    ...     np.array([1]), None, CounterSource(0).begin_round([0], [0], 0), lookahead=0, sampling=Sampling())
    >>> output.tokens.tolist(), output.num_accepted.tolist(), output.bad_target_slot.tolist()
    ([[1]], [0], [-1])
    """

    tokens: Array
    num_proposed: Array
    num_accepted: Array
    bad_target_slot: Array
    bad_draft_slot: Array
    logprobs: Array | None
    overlap: Array
    draft_calls: int
    is_point_mass: bool


class DecodeRound(Protocol):
    """The signature of :func:`decode_round`, which a model's ``compile_round`` returns a callable of.

    Examples
    --------
    >>> import inspect
    >>> from specsampling import DecodeRound, decode_round
    >>> asked = list(inspect.signature(DecodeRound.__call__).parameters)[1:]
    >>> asked == list(inspect.signature(decode_round).parameters)
    True
    """

    def __call__(
        self,
        target: Model[Any],
        drafter: Drafter[Any] | None,
        carry: RoundCarry,
        context: Context,
        limits: Array,
        end_bans: Array | None,
        randomness: Randomness,
        /,
        *,
        lookahead: int,
        sampling: Sampling,
        draft_sampling: Sampling | None = None,
        end_tokens: tuple[int, ...] = (),
        logprobs: LogprobsKind | None = None,
        validate: bool = False,
    ) -> tuple[RoundOutput, RoundCarry]:
        """See :func:`decode_round`."""
        ...


def decode_round(
    target: Model[Any],
    drafter: Drafter[Any] | None,
    carry: RoundCarry,
    context: Context,
    limits: Array,
    end_bans: Array | None,
    randomness: Randomness,
    /,
    *,
    lookahead: int,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    end_tokens: tuple[int, ...] = (),
    logprobs: LogprobsKind | None = None,
    validate: bool = False,
) -> tuple[RoundOutput, RoundCarry]:
    """Draft, score, verify: one round for every row of a batch.

    Pure and static in shape, so that it can be jitted, compiled or captured as it stands; nothing in it looks at a
    value on the host, unless it is there already: then the drafter's first block is as wide as it needs to be, and
    where no row proposes more than one token the target is fed two instead of K + 1, and one where none does.

    Parameters
    ----------
    target : Model
        The model whose law the output follows.
    drafter : Drafter or None
        What proposes tokens; None for plain autoregressive sampling (Algorithm 1), through the same code.
    carry : RoundCarry
        Caches from the round before. Must not be used again.
    context : Context
        Every row's committed text, ``(B, C)`` and ``(B,)`` integer arrays. The round *begins* by rolling the target's
        cache back to these lengths less one, so that caches and host cannot disagree about what was committed.
    limits : array
        Integer array of shape ``(B,)``: how many tokens each row may still emit; 0 masks a finished row. A row
        proposes at most one less.
    end_bans : array or None
        Integer array of shape ``(B,)``: in how many slots from the first `end_tokens` are forbidden; None for none.
    randomness : Randomness
        This round's random decisions.
    lookahead : int
        Tokens drafted, K.
    sampling, draft_sampling : Sampling
        Settings of the target and of the draft; None gives the draft the target's.
    end_tokens : tuple of int
        The ids that `end_bans` forbids.
    logprobs : {"raw", "processed"} or None
        Whether to return the tokens' log-probabilities: of the logits as they came, or after `sampling`.
    validate : bool
        Check the numbers as :func:`verify` does, of unfinished rows; not inside a trace. Rows without a law are left to
        the flags.

    Returns
    -------
    RoundOutput
        Small arrays for the host.
    RoundCarry
        Caches that hold up to K + 1 tokens that were not committed.

    Raises
    ------
    ValueError
        If the drafter's proposal is not K wide; with `validate` also for numbers that cannot be laws.
    TypeError
        If the drafter does not return a proposal and its state, or proposes what are not integers.

    References
    ----------
    Chen et al. 2023, Algorithm 2 (arXiv 2302.01318).

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Context, CounterSource, PromptLookup, RoundCarry, Sampling, decode_round
    >>> from specsampling_numpy import TableModel
    >>> target, drafter = TableModel(np.eye(3)[[1, 2, 0]]), PromptLookup()  # after 0 comes 1, then 2, then 0 again
    >>> carry = RoundCarry(target.init_cache(1, 9), drafter.init(1, 9), None)
    >>> _, cache = target.score(carry.target_cache, np.array([[0, 1, 2]]), num_logits=0)
    >>> context = Context(np.array([[0, 1, 2, 0, 0, 0, 0, 0, 0]]), np.array([4]))
    >>> out, carry = decode_round(
    ...     target, drafter, carry._replace(target_cache=cache), context, np.array([5]), None,
    ...     CounterSource(0).begin_round([0], [0], 2), lookahead=2, sampling=Sampling())
    >>> out.tokens.tolist(), out.num_accepted.tolist()
    ([[1, 2, 0]], [2])
    """
    calls_before = getattr(drafter, "num_calls", 0)
    settings = sampling if draft_sampling is None else draft_sampling
    proposal, drafter_state = _propose(drafter, carry.drafter_state, context, lookahead, settings, randomness)
    draft_calls = getattr(drafter, "num_calls", 0) - calls_before

    num_tokens, num_fed = proposal.num_tokens, lookahead
    is_counted = is_host(num_tokens) and is_host(limits)
    if is_counted:
        num_tokens = _num_usable(num_tokens.astype(np.int64), limits.astype(np.int64), lookahead)
        num_fed = _num_fed(num_tokens, lookahead)
    tokens, logits, cache = _score(target, carry, context, proposal.tokens, num_fed)
    like, logits = marker(logits), workable(logits)
    if is_host(logits):
        randomness = asked_like(randomness, like)
    xp = namespace(logits)
    tokens = move(tokens, logits)
    # Signed, because 1 is taken from a limit that may be 0.
    num_tokens, limits = (xp.astype(move(x, logits), xp.int32, copy=False) for x in (num_tokens, limits))
    if not is_counted:
        num_tokens = _num_usable(num_tokens, limits, lookahead)
    num_tokens = xp.astype(num_tokens, tokens.dtype, copy=False)
    processed_logits = logits if end_bans is None else _ban(logits, move(end_bans, logits), end_tokens)
    target_probs = to_probs(processed_logits, sampling)
    if num_fed < lookahead:
        # Slots that nobody reads, so that verification asks for the same random decisions as ever.
        target_probs = _widened(target_probs, lookahead + 1)
        logits = logits if logprobs is None else _widened(logits, lookahead + 1)
    draft_probs, padded_probs = proposal.probs, target_probs
    if draft_probs is not None:
        vocab_size = max(target_probs.shape[-1], draft_probs.shape[-1])
        draft_probs = pad_last(move(draft_probs, logits), vocab_size)
        padded_probs = pad_last(target_probs, vocab_size)
    proposal = Proposal(tokens, num_tokens, draft_probs)

    slots = xp.arange(lookahead + 1, dtype=tokens.dtype, device=device(tokens))
    bad_target_slot, bad_draft_slot = _bad_slots(proposal, target_probs, limits, slots)
    if validate and int(xp.max(bad_target_slot)) < 0 and int(xp.max(bad_draft_slot)) < 0:
        check_values(proposal, padded_probs, np.flatnonzero(to_host(limits)).tolist())
    verdict = verify(proposal, padded_probs, randomness)

    num_accepted, next_token = verdict.num_accepted[:, None], verdict.next_token[:, None]
    emitted = xp.concat([tokens, next_token], axis=1)
    emitted = xp.where(slots < num_accepted, emitted, xp.where(slots == num_accepted, next_token, 0))
    token_logprobs = None
    if logprobs is not None:
        token_logprobs = _token_logprobs(logits if logprobs == "raw" else target_probs, emitted, logprobs)
    output = RoundOutput(
        tokens=emitted,
        num_proposed=num_tokens,
        num_accepted=verdict.num_accepted,
        bad_target_slot=bad_target_slot,
        bad_draft_slot=bad_draft_slot,
        logprobs=token_logprobs,
        overlap=_overlap(tokens, draft_probs, padded_probs),
        draft_calls=draft_calls,
        is_point_mass=draft_probs is None,
    )
    return output, RoundCarry(cache, drafter_state, like)


def _propose(
    drafter: Drafter[Any] | None,
    state: Any,
    context: Context,
    lookahead: int,
    sampling: Sampling,
    randomness: Randomness,
) -> tuple[Proposal, Any]:
    batch_size = context.lengths.shape[0]
    if drafter is None:
        xp = namespace(context.lengths)
        empty = xp.zeros((batch_size, 0), dtype=context.lengths.dtype)
        return Proposal(empty, xp.zeros_like(context.lengths), None), None
    answer = drafter.propose(state, context, lookahead, sampling, randomness)
    return _checked_answer(answer, batch_size, lookahead)


def _num_usable(num_tokens: Array, limits: Array, lookahead: int) -> Array:
    """Return how many of each row's proposed tokens may be used.

    What a drafter claims beyond its block does not exist; one token of the limit is left for the target's own.
    """
    xp = namespace(limits)
    return xp.clip(xp.minimum(num_tokens, limits - 1), 0, lookahead)


def _num_fed(num_tokens: np.ndarray, lookahead: int) -> int:
    """Return how many of the proposed tokens the target is to score: K, unless fewer will do.

    Two shorter blocks are enough, and each width is compiled once: none where no row may use a proposal, one where no
    row may use more.
    """
    most = int(num_tokens.max()) if num_tokens.size else lookahead
    return most if most < 2 else lookahead


def _score(
    target: Model[Any], carry: RoundCarry, context: Context, tokens: Array, num_fed: int
) -> tuple[Array, Array, Any]:
    """Roll the target back to the committed text less its last token; feed it that and the first of the proposed ones.

    Returns the proposed tokens, in the dtype of the committed ones, the logits and the cache.
    """
    num_held = context.lengths - 1
    last = take_along_axis(context.tokens, num_held[:, None], 1)
    last, num_held, tokens = (move(x, carry.like) for x in (last, num_held, tokens))
    xp = namespace(last)
    if xp.iinfo(last.dtype).bits < 32:  # the text's ids fit, but others may come
        last = xp.astype(last, xp.int32)
    tokens = xp.astype(tokens, last.dtype, copy=False)
    # A drafter may know ids that the target lacks (`pad_vocab`); they have probability zero when they are verified, and
    # any valid id can stand in for them here, because nothing after a rejected token is read.
    fed = xp.clip(tokens, 0, target.vocab_size - 1)
    cache = target.rollback(carry.target_cache, num_held)
    return (tokens, *target.score(cache, xp.concat([last, fed[:, :num_fed]], axis=1)))


def _widened(x: Array, width: int) -> Array:
    """Return ``(B, T, V)`` with its last row repeated up to `width` rows."""
    xp = namespace(x)
    batch_size, held, vocab_size = x.shape
    if held == 1:
        return xp.broadcast_to(x, (batch_size, width, vocab_size))
    last = xp.broadcast_to(x[:, -1:, :], (batch_size, width - held, vocab_size))
    return xp.concat([x, last], axis=1)


def _bad_slots(proposal: Proposal, target_probs: Array, limits: Array, slots: Array) -> tuple[Array, Array]:
    """Return, per row, the first slot in use whose target row, and whose draft row, is no law; -1 for none."""
    xp = namespace(target_probs)
    num_tokens, draft_probs = proposal.num_tokens, proposal.probs
    # `to_probs` makes a row without a law NaN throughout, so that its first entry tells. A drafter's rows may come from
    # anywhere: NaN or infinity in any entry shows in the sum.
    is_bad = [xp.isnan(target_probs[:, :, 0])]
    if draft_probs is not None and draft_probs.shape[1]:
        with np.errstate(over="ignore"):  # of what stands in slots that are not in use
            is_bad.append(~xp.isfinite(xp.sum(draft_probs, axis=-1)))
    none = xp.full_like(num_tokens, -1, dtype=xp.int32)  # the context may be unsigned
    if is_host(target_probs) and not any(map(np.count_nonzero, is_bad)):
        return none, none
    slots = xp.astype(slots, xp.int32, copy=False)
    # Behind an id that the target lacks stands what it says of the stand-in.
    is_known = (proposal.tokens >= 0) & (proposal.tokens < target_probs.shape[-1])
    num_read = xp.sum(xp.cumulative_prod(xp.astype(is_known, xp.int32), axis=1), axis=1, dtype=xp.int32)
    num_read = xp.minimum(num_read, xp.astype(num_tokens, xp.int32))
    bad_target_slot = _first(is_bad[0] & (limits[:, None] > 0), slots, num_read + 1)
    return bad_target_slot, _first(is_bad[1], slots[:-1], num_tokens) if len(is_bad) > 1 else none


def _checked_answer(answer: Any, batch_size: int, lookahead: int) -> tuple[Proposal, Any]:
    """Return what `propose` returned, once its structure is known to be right; nothing looks at a value."""
    parts = answer[0] if isinstance(answer, tuple) and len(answer) == 2 else None
    if not isinstance(parts, tuple) or len(parts) != 3 or not all(hasattr(x, "shape") for x in parts[:2]):
        raise TypeError(f"the drafter's `propose` must return a Proposal of arrays and its new state, got {answer!r}")
    proposal = Proposal(*parts)
    if tuple(proposal.tokens.shape) != (batch_size, lookahead):
        raise ValueError(
            f"the drafter must propose `tokens` of shape (B, K) = {(batch_size, lookahead)}, padded where it has "
            f"fewer, got {tuple(proposal.tokens.shape)}"
        )
    if tuple(proposal.num_tokens.shape) != (batch_size,):
        raise ValueError(
            f"the drafter must propose `num_tokens` of shape (B,) = {(batch_size,)}, "
            f"got {tuple(proposal.num_tokens.shape)}"
        )
    for name, x in (("tokens", proposal.tokens), ("num_tokens", proposal.num_tokens)):
        if not namespace(x).isdtype(x.dtype, "integral"):
            raise TypeError(f"the drafter must propose `{name}` of an integer dtype, got {x.dtype}")
    return proposal, answer[1]


def _ban(logits: Array, end_bans: Array, end_tokens: tuple[int, ...]) -> Array:
    """Return `logits` with `end_tokens` at -inf in each row's first ``end_bans[b]`` slots."""
    xp = namespace(logits)
    mask = np.zeros(logits.shape[-1], dtype=np.bool_)
    mask[list(end_tokens)] = True
    is_end = move(mask, logits)
    slots = xp.arange(logits.shape[1], dtype=end_bans.dtype, device=device(end_bans))
    is_banned = (slots[None, :] < end_bans[:, None])[:, :, None] & is_end[None, None, :]
    return xp.where(is_banned, xp.asarray(-xp.inf, dtype=logits.dtype, device=device(logits)), logits)


def _first(flags: Array, slots: Array, num_used: Array) -> Array:
    """Return the slot of the first True of each row of ``(B, n)`` flags, of which ``num_used[b]`` count, or -1."""
    xp = namespace(flags)
    width = flags.shape[1]
    first = xp.min(xp.where(flags & (slots < num_used[:, None]), slots, width), axis=1)
    return xp.where(first < width, first, -1)


def _overlap(tokens: Array, draft_probs: Array | None, target_probs: Array) -> Array:
    xp = namespace(target_probs)
    target_probs = target_probs[:, :-1, :]
    if draft_probs is not None:
        return xp.sum(xp.minimum(target_probs, draft_probs), axis=-1)
    is_known = (tokens >= 0) & (tokens < target_probs.shape[-1])
    return xp.where(is_known, pick(target_probs, xp.where(is_known, tokens, 0)), 0.0)


def _token_logprobs(scores: Array, tokens: Array, kind: LogprobsKind) -> Array:
    """Return the log-probability of each token ``(B, T)`` under logits or probabilities ``(B, T, V)``."""
    xp = namespace(scores)
    # NumPy would warn of padding that has probability zero, and of rows without a law that nobody reads.
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "processed":
            return xp.log(pick(scores, tokens))
        if xp.finfo(scores.dtype).bits < 32:
            scores = xp.astype(scores, xp.float32)
        top = xp.max(scores, axis=-1, keepdims=True)
        return pick(scores, tokens) - top[:, :, 0] - xp.log(xp.sum(xp.exp(scores - top), axis=-1))
