"""The accept/resample step of speculative sampling: which drafted tokens stay, and what follows them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specsampling._arrays import device, namespace, pick, take_along_axis, take_rows, to_host, zeroed_at
from specsampling._model import Array
from specsampling._random import Label, Purpose, Randomness

__all__ = ["Proposal", "Verdict", "check_values", "verify"]


class Proposal(NamedTuple):
    """Tokens that a drafter puts forward, with the law each was drawn from.

    Attributes
    ----------
    tokens : array
        Integer array of shape ``(B, K)``. Entries past a row's `num_tokens` are padding (id 0).
    num_tokens : array
        Integer array of shape ``(B,)``: how many of each row's entries are proposed, 0 to K.
    probs : array or None
        Real floating array of shape ``(B, K, V)``: for each token, bitwise the row of probabilities that it was drawn
        from. None says that the tokens were *chosen*, not drawn (a point mass: prompt lookup, beam search, argmax). An
        argmax reported with its softmax row is biased; a drawn token reported as a point mass is exact, only slower.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Proposal
    >>> drawn = Proposal(np.array([[1, 0]]), np.array([2]), np.array([[[0.2, 0.8], [0.6, 0.4]]]))
    >>> chosen = Proposal(np.array([[1, 0]]), np.array([1]), None)  # one token; the second entry is padding
    """

    tokens: Array
    num_tokens: Array
    probs: Array | None


class Verdict(NamedTuple):
    """What became of a proposal.

    Attributes
    ----------
    num_accepted : array
        Integer array of shape ``(B,)``: how many proposed tokens are kept, from the first on.
    next_token : array
        Integer array of shape ``(B,)``: the token after them, from the residual (after a rejection) or from the
        target's own law (the bonus token, when every proposed token was kept). Of the proposed tokens' dtype, but never
        narrower than int32, since any id of the target may come.

    Examples
    --------
    The text that a row gets is its kept tokens and the one after them:

    >>> import numpy as np
    >>> from specsampling import Verdict
    >>> drafted, verdict = np.array([[5, 3, 8]]), Verdict(num_accepted=np.array([2]), next_token=np.array([6]))
    >>> [*drafted[0, : verdict.num_accepted[0]].tolist(), int(verdict.next_token[0])]
    [5, 3, 6]
    """

    num_accepted: Array
    next_token: Array


def verify(proposal: Proposal, target_probs: Array, randomness: Randomness, *, validate: bool = False) -> Verdict:
    r"""Accept or reject proposed tokens so that the output follows the target's law exactly.

    Slot by slot a proposed token x is accepted with probability :math:`\min(1, p(x) / q(x))`, where p is the target's
    law and q the law it was drawn from. At the first rejection one token is drawn from the residual
    :math:`\max(0, p - q)`, normalised; after a fully accepted block one is drawn from the next target row.

    Parameters
    ----------
    proposal : Proposal
        Drafted tokens ``(B, K)``, their number per row and their laws; K may be 0. In the namespace of `target_probs`.
    target_probs : array
        Real floating array of shape ``(B, K + 1, V)``; each row sums to one. Row t is the target's law of the token in
        slot t, given the proposed tokens before it.
    randomness : Randomness
        Is asked `accept` once for all slots (only where K > 0) and `categorical` once per row, never with zero mass.
    validate : bool, default: False
        Look at the numbers first, on the host. Cannot be used inside a traced function.

    Returns
    -------
    Verdict
        Number of tokens kept and the token after them, each ``(B,)``. Inputs are not modified.

    Raises
    ------
    TypeError
        If `proposal.tokens` or `proposal.num_tokens` are not integers.
    ValueError
        If shapes do not fit. With `validate` also if the draft gives a proposed token probability zero, or if a row
        that is used has NaN or negative entries or does not sum to one; the message names row and slot.

    Notes
    -----
    The test is ``p > 0 and (p >= q or u * q < p)``: no division and no epsilon. A token the target forbids is never
    kept, and where the two rows are bitwise equal the token is kept with certainty. Where the residual has no mass (p
    equals q up to rounding) the token is drawn from p. Only the one row per batch entry that is needed is gathered
    before the residual is formed: O(B V) work, not O(B K V).

    References
    ----------
    Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", Algorithm 2 and Theorem 1
    (arXiv 2302.01318); Leviathan, Kalman and Matias 2023, Algorithm 1 (arXiv 2211.17192).

    Examples
    --------
    The draft was certain of token 1, which the target forbids:

    >>> import numpy as np
    >>> from specsampling import CounterSource, Proposal, verify
    >>> proposal = Proposal(np.array([[1]]), np.array([1]), np.array([[[0.0, 1.0]]]))
    >>> target_probs = np.array([[[1.0, 0.0], [0.5, 0.5]]])
    >>> verdict = verify(proposal, target_probs, CounterSource(0).begin_round([0], [0], 1))
    >>> int(verdict.num_accepted[0]), int(verdict.next_token[0])
    (0, 0)
    """
    _check_shapes(proposal, target_probs)
    tokens, num_tokens, draft_probs = proposal
    xp = namespace(*(x for x in (*proposal, target_probs) if x is not None))
    for name, x in (("tokens", tokens), ("num_tokens", num_tokens)):
        if not xp.isdtype(x.dtype, "integral"):
            raise TypeError(f"`{name}` must be of an integer dtype, got {x.dtype}")
    if validate:
        check_values(proposal, target_probs)
    tokens = tokens if xp.iinfo(tokens.dtype).bits >= 32 else xp.astype(tokens, xp.int32)
    lookahead = tokens.shape[1]
    if lookahead == 0:
        weights = target_probs[:, 0, :]
        next_token = randomness.categorical(weights, Label(Purpose.RESAMPLE, 0))
        return Verdict(xp.zeros_like(num_tokens), xp.astype(next_token, tokens.dtype, copy=False))
    if draft_probs is not None:
        # One dtype for both sides, in which their difference is precise: a float32 law is exactly a float64 one, never
        # the other way round.
        dtype = xp.result_type(target_probs.dtype, draft_probs.dtype, xp.float32)
        target_probs = xp.astype(target_probs, dtype, copy=False)
        draft_probs = xp.astype(draft_probs, dtype, copy=False)

    vocab_size = target_probs.shape[-1]
    # A drafter that claims more than it wrote would have the bonus token drawn from a residual.
    num_tokens = xp.clip(num_tokens, 0, lookahead)
    slots = xp.arange(lookahead, device=device(tokens))
    # A slot that holds no proposal, or an id that the target lacks, has probability zero and is rejected with
    # certainty: neither needs a mask of its own further on.
    ids = xp.clip(tokens, 0, vocab_size - 1)
    is_known = (slots < num_tokens[:, None]) & (ids == tokens)
    target_prob = xp.where(is_known, pick(target_probs[:, :lookahead, :], ids), 0.0)
    draft_prob = xp.ones_like(target_prob) if draft_probs is None else pick(draft_probs, ids)
    is_accepted = randomness.accept(target_prob, draft_prob, Label(Purpose.ACCEPT, 0))
    leading = xp.cumulative_prod(xp.astype(is_accepted, num_tokens.dtype), axis=1)
    num_accepted = xp.sum(leading, axis=1, dtype=num_tokens.dtype)

    weights = take_rows(target_probs, num_accepted)
    # Any slot will do where nothing was rejected: the residual is then not used.
    rejected_slot = xp.minimum(num_accepted, lookahead - 1)
    if draft_probs is None:
        residual = zeroed_at(weights, take_along_axis(tokens, rejected_slot[:, None], 1)[:, 0])
    else:
        residual = xp.maximum(weights - take_rows(draft_probs, rejected_slot), 0.0)
    use_residual = (num_accepted < num_tokens) & (xp.max(residual, axis=-1) > 0)
    weights = xp.where(use_residual[:, None], residual, weights)
    next_token = randomness.categorical(weights, Label(Purpose.RESAMPLE, 0))
    return Verdict(num_accepted, xp.astype(next_token, tokens.dtype, copy=False))


def _check_shapes(proposal: Proposal, target_probs: Array) -> None:
    tokens, num_tokens, draft_probs = proposal
    if tokens.ndim != 2:
        raise ValueError(f"`tokens` must have shape (B, K), got {tuple(tokens.shape)}")
    batch_size, lookahead = tokens.shape
    if tuple(num_tokens.shape) != (batch_size,):
        raise ValueError(f"`num_tokens` must have shape (B,) = ({batch_size},), got {tuple(num_tokens.shape)}")
    if target_probs.ndim != 3 or tuple(target_probs.shape[:2]) != (batch_size, lookahead + 1):
        raise ValueError(
            f"`target_probs` must have shape (B, K + 1, V) with B = {batch_size} and K = {lookahead}, "
            f"got {tuple(target_probs.shape)}"
        )
    expected = (batch_size, lookahead, target_probs.shape[-1])
    if draft_probs is not None and tuple(draft_probs.shape) != expected:
        raise ValueError(f"`draft_probs` must have shape (B, K, V) = {expected}, got {tuple(draft_probs.shape)}")


def check_values(proposal: Proposal, target_probs: Array, rows: Iterable[int] | None = None) -> None:
    """Raise ValueError for what :func:`verify` trusts and a law or a proposal cannot hold; looks on the host.

    Parameters
    ----------
    proposal : Proposal
        As for :func:`verify`, shapes checked.
    target_probs : array
        As for :func:`verify`.
    rows : iterable of int, optional
        The rows to look at; None looks at all.
    """
    tokens, num_tokens = to_host(proposal.tokens), to_host(proposal.num_tokens)
    target = _HostLaws("target_probs", target_probs)
    draft = None if proposal.probs is None else _HostLaws("draft_probs", proposal.probs)
    lookahead, vocab_size = tokens.shape[1], target_probs.shape[-1]
    for row in range(tokens.shape[0]) if rows is None else rows:
        count = int(num_tokens[row])
        if not 0 <= count <= lookahead:
            raise ValueError(f"`num_tokens` must lie in 0 to {lookahead}, got {count} in row {row}")
        for slot in range(count + 1):
            target.check(row, slot)
        for slot in range(count):
            token = int(tokens[row, slot])
            if not 0 <= token < vocab_size:
                raise ValueError(f"`tokens` must lie in 0 to {vocab_size - 1}, got {token} in row {row}, slot {slot}")
            if draft is None:
                continue
            draft.check(row, slot)
            if draft.probs[row, slot, token] == 0:
                raise ValueError(
                    f"`draft_probs` gives probability 0 to the proposed token {token} in row {row}, slot {slot}; "
                    "report the law that the token was drawn from, or None for a token that was chosen"
                )


class _HostLaws:
    """Rows of probabilities on the host, and how far from one their sums may be."""

    def __init__(self, name: str, probs: Array) -> None:
        xp = namespace(probs)
        info = xp.finfo(probs.dtype)
        self.name = name
        # NumPy has no bfloat16.
        self.probs = to_host(xp.astype(probs, xp.float32) if info.bits < 32 else probs)
        # Rounding of the entries, and of the sum they were divided by: made in single precision at least, each addition
        # is off by half a unit in the last place, which adds up like a random walk.
        self.tolerance = 8 * float(info.eps) + probs.shape[-1] ** 0.5 * min(float(info.eps), 2.0**-23)

    def check(self, row: int, slot: int) -> None:
        law, where = self.probs[row, slot], f"in row {row}, slot {slot}"
        if np.isnan(law).any():
            raise ValueError(f"`{self.name}` must not be NaN, got NaN for id {int(np.argmax(np.isnan(law)))} {where}")
        if (law < 0).any():
            raise ValueError(
                f"`{self.name}` must not be negative, got {law.min()} for id {int(np.argmin(law))} {where}"
            )
        total = float(np.sum(law, dtype=np.float64))
        if not abs(total - 1) <= self.tolerance:
            raise ValueError(f"`{self.name}` must sum to one, got {total} {where}")
