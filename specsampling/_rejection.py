"""The accept/resample step of speculative sampling: which drafted tokens stay, and what follows them."""

from typing import NamedTuple

import numpy as np

from specsampling._arrays import device, namespace, pick, take_along_axis, take_rows, to_host
from specsampling._model import Array
from specsampling._random import Label, Purpose, Randomness

__all__ = ["Proposal", "Verdict", "verify"]


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
        target's own law (the bonus token, when every proposed token was kept).
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
    if validate:
        _check_values(proposal, target_probs)
    xp = namespace(target_probs)
    tokens, num_tokens, draft_probs = proposal
    lookahead = tokens.shape[1]
    if lookahead == 0:
        weights = target_probs[:, 0, :]
        next_token = randomness.categorical(weights, Label(Purpose.RESAMPLE, 0))
        return Verdict(xp.zeros_like(num_tokens), xp.astype(next_token, tokens.dtype, copy=False))
    if draft_probs is not None:
        # One dtype for both sides: a float32 law is exactly a float64 one, never the other way round.
        dtype = xp.result_type(target_probs, draft_probs)
        target_probs = xp.astype(target_probs, dtype, copy=False)
        draft_probs = xp.astype(draft_probs, dtype, copy=False)

    slots = xp.arange(lookahead, dtype=num_tokens.dtype, device=device(tokens))
    # A slot that holds no proposal, or an id that the target lacks, has probability zero and is rejected with
    # certainty: neither needs a mask of its own further on.
    is_known = (slots[None, :] < num_tokens[:, None]) & (tokens >= 0) & (tokens < target_probs.shape[-1])
    ids = xp.where(is_known, tokens, xp.zeros_like(tokens))
    target_prob = pick(target_probs[:, :lookahead, :], ids)
    target_prob = xp.where(is_known, target_prob, xp.zeros_like(target_prob))
    if draft_probs is None:
        draft_prob = xp.ones_like(target_prob)
    else:
        draft_prob = pick(draft_probs, ids)
    is_accepted = randomness.accept(target_prob, draft_prob, Label(Purpose.ACCEPT, 0))
    leading = xp.cumulative_prod(xp.astype(is_accepted, num_tokens.dtype), axis=1)
    num_accepted = xp.sum(leading, axis=1, dtype=num_tokens.dtype)

    weights = take_rows(target_probs, num_accepted)
    rejected_slot = xp.where(num_accepted < lookahead, num_accepted, lookahead - 1)
    if draft_probs is None:
        rejected = take_along_axis(tokens, rejected_slot[:, None], 1)
        vocabulary = xp.arange(weights.shape[-1], dtype=tokens.dtype, device=device(tokens))
        residual = xp.where(vocabulary[None, :] == rejected, xp.zeros_like(weights), weights)
    else:
        excess = weights - take_rows(draft_probs, rejected_slot)
        residual = xp.where(excess > 0, excess, xp.zeros_like(excess))
    use_residual = (num_accepted < num_tokens) & (xp.max(residual, axis=-1) > 0)
    weights = xp.where(use_residual[:, None], residual, weights)
    next_token = randomness.categorical(weights, Label(Purpose.RESAMPLE, 0))
    return Verdict(num_accepted, xp.astype(next_token, tokens.dtype, copy=False))


def _check_shapes(proposal: Proposal, target_probs: Array) -> None:
    tokens, num_tokens, draft_probs = proposal
    if tokens.ndim != 2:
        raise ValueError(f"`tokens` must have shape (B, K), got {tokens.shape}")
    batch_size, lookahead = tokens.shape
    if num_tokens.shape != (batch_size,):
        raise ValueError(f"`num_tokens` must have shape (B,) = ({batch_size},), got {num_tokens.shape}")
    if target_probs.ndim != 3 or target_probs.shape[:2] != (batch_size, lookahead + 1):
        raise ValueError(
            f"`target_probs` must have shape (B, K + 1, V) with B = {batch_size} and K = {lookahead}, "
            f"got {target_probs.shape}"
        )
    expected = (batch_size, lookahead, target_probs.shape[-1])
    if draft_probs is not None and draft_probs.shape != expected:
        raise ValueError(f"`draft_probs` must have shape (B, K, V) = {expected}, got {draft_probs.shape}")


def _check_values(proposal: Proposal, target_probs: Array) -> None:
    tokens, num_tokens = to_host(proposal.tokens), to_host(proposal.num_tokens)
    target = to_host(target_probs)
    draft = None if proposal.probs is None else to_host(proposal.probs)
    vocab_size = target.shape[-1]
    for row, count in enumerate(num_tokens.tolist()):
        if not 0 <= count <= tokens.shape[1]:
            raise ValueError(f"`num_tokens` must lie in 0 to {tokens.shape[1]}, got {count} in row {row}")
        for slot in range(count + 1):
            _check_law("target_probs", target[row, slot], row, slot)
        for slot in range(count):
            token = int(tokens[row, slot])
            if not 0 <= token < vocab_size:
                raise ValueError(f"`tokens` must lie in 0 to {vocab_size - 1}, got {token} in row {row}, slot {slot}")
            if draft is None:
                continue
            _check_law("draft_probs", draft[row, slot], row, slot)
            if draft[row, slot, token] == 0:
                raise ValueError(
                    f"`draft_probs` gives probability 0 to the proposed token {token} in row {row}, slot {slot}; report "
                    "the law that the token was drawn from, or None for a token that was chosen"
                )


def _check_law(name: str, law: np.ndarray, row: int, slot: int) -> None:
    where = f"in row {row}, slot {slot}"
    if np.isnan(law).any():
        raise ValueError(f"`{name}` must not be NaN, got NaN for id {int(np.argmax(np.isnan(law)))} {where}")
    if (law < 0).any():
        raise ValueError(f"`{name}` must not be negative, got {law.min()} for id {int(np.argmin(law))} {where}")
    total = float(np.sum(law, dtype=np.float64))
    # Rounding of a normalised row: half a unit in the last place an entry, which adds up like a random walk.
    tolerance = float(np.finfo(law.dtype).eps) * (8 + law.shape[-1] ** 0.5)
    if not abs(total - 1) <= tolerance:
        raise ValueError(f"`{name}` must sum to one, got {total} {where}")
