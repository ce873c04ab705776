"""A batch between two rounds, and how a round's tokens become part of it."""

from typing import Any, NamedTuple

import numpy as np

from specsampling._errors import NonFiniteLogitsError
from specsampling._results import PhaseTimes, RoundInfo
from specsampling._round import RoundCarry, RoundOutput
from specsampling._stopping import StopRules

__all__ = ["DecoderState", "LENGTH", "REASONS", "RUNNING", "STOP", "commit_round"]

RUNNING = 0
"""`DecoderState.status` of a row that goes on."""
STOP = 1
"""... of one that met an end token or stop sequence."""
LENGTH = 2
"""... of one at its limit."""
REASONS = np.array([None, "stop", "length"], dtype=object)
"""The same as users read it."""


class DecoderState(NamedTuple):
    """A batch between two rounds. Owned linearly: `step` takes it over, and refuses to take it twice.

    Attributes
    ----------
    tokens : ndarray
        Integer array ``(B, C)``: prompt and committed tokens of every row; what lies past its length is undefined.
    lengths : ndarray
        Integer array ``(B,)``: committed tokens per row, prompt included.
    prompt_lengths, max_new_tokens, row_ids, rounds : ndarray
        Integer arrays ``(B,)``: what the row began with, its limit, the id its randomness is drawn under and how many
        rounds it has had.
    status : ndarray
        Integer array ``(B,)``: 0 while a row goes on, 1 when it met an end token or stop sequence, 2 at its limit.
    rows : ndarray
        Integer array: the rows that the caches hold, in order. Finished rows are dropped from it where both models can
        select.
    carry : RoundCarry
        Caches.
    max_lookahead : int
        Largest K that the caches have room for.
    permit : list
        One entry while the state may still be given to `step`, none afterwards.

    Examples
    --------
    >>> from specsampling import Decoder
    >>> from specsampling_numpy import TableModel
    >>> decoder = Decoder(TableModel([0.0, 1.0]))
    >>> state = decoder.init([[0], [0, 0]], max_new_tokens=[1, 2])
    >>> while not state.is_done:
    ...     state, _ = decoder.step(state)
    >>> state.new_tokens(0), state.new_tokens(1), state.lengths.tolist()
    ([1], [1, 1], [2, 4])
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    max_new_tokens: np.ndarray
    row_ids: np.ndarray
    rounds: np.ndarray
    status: np.ndarray
    rows: np.ndarray
    carry: RoundCarry
    max_lookahead: int
    permit: list[bool]

    @property
    def is_done(self) -> bool:
        """Whether every row has finished."""
        return bool(np.count_nonzero(self.status) == self.status.size)

    def new_tokens(self, row: int) -> list[int]:
        """Return the tokens that `row` has committed after its prompt."""
        tokens: list[int] = self.tokens[row, self.prompt_lengths[row] : self.lengths[row]].tolist()
        return tokens

    def limits(self) -> np.ndarray:
        """Return how many tokens each of `rows` may still emit; 0 once it has finished."""
        left: np.ndarray = self.max_new_tokens - self.lengths + self.prompt_lengths
        left[self.status != RUNNING] = 0
        limits: np.ndarray = left[self.rows]
        return limits


def commit_round(
    state: DecoderState,
    output: RoundOutput,
    carry: RoundCarry,
    limits: np.ndarray,
    stop_rules: StopRules,
    min_new_tokens: int,
) -> tuple[DecoderState, RoundInfo]:
    """Write a round's tokens down, up to where each row ends, and report.

    Parameters
    ----------
    state : DecoderState
        The batch before the round, its text unchanged since. Must not be used again.
    output : RoundOutput
        What the round returned for ``state.rows``, on the host.
    carry : RoundCarry
        The caches after the round.
    limits : ndarray
        What the round was told of them: ``state.limits()``.
    stop_rules : StopRules
        Where rows end.
    min_new_tokens : int
        How many of a row's tokens were no end tokens, because these were forbidden.

    Returns
    -------
    DecoderState
        The batch after the round.
    RoundInfo
        What the round did, times left at zero.

    Raises
    ------
    NonFiniteLogitsError
        If a row of logits had no law; nothing is written then.
    """
    _check_finite(state, output, min_new_tokens)
    unfinished = limits.nonzero()[0]
    rows = state.rows[unfinished]
    active, index = _index(unfinished, limits.size), _index(rows, state.lengths.size)
    block = output.tokens[active]
    num_accepted = output.num_accepted[active].astype(np.int64)
    num_proposed = output.num_proposed[active].astype(np.int64)
    starts, prompts = state.lengths[index], state.prompt_lengths[index]
    slots = np.arange(block.shape[1])
    state.tokens[rows[:, None], starts[:, None] + slots] = block
    num_emitted, is_stopped = stop_rules.commit(state.tokens, rows, prompts, starts, num_accepted + 1)
    num_tested = np.minimum(np.minimum(num_accepted + 1, num_proposed), num_emitted)
    reasons = np.where(num_emitted == limits[active], LENGTH, RUNNING)
    reasons[is_stopped] = STOP

    lengths, status, rounds = state.lengths.copy(), state.status.copy(), state.rounds.copy()
    lengths[index] += num_emitted
    status[index] = reasons
    rounds[index] += 1
    is_tested = slots[:-1] < num_tested[:, None]
    info = RoundInfo(
        lookahead=block.shape[1] - 1,
        rows=rows,
        tokens=block * (slots < num_emitted[:, None]),
        num_emitted=num_emitted,
        num_proposed=num_proposed,
        num_tested=num_tested,
        num_accepted=np.minimum(num_accepted, num_emitted),
        overlap=np.add.reduce(output.overlap[active], axis=1, dtype=np.float64, where=is_tested),
        logprobs=None if output.logprobs is None else output.logprobs[unfinished],  # the caller's own
        finish_reasons=REASONS[reasons],
        draft_calls=int(output.draft_calls),
        is_point_mass=bool(output.is_point_mass),
        times=PhaseTimes(),
    )
    return state._replace(lengths=lengths, status=status, rounds=rounds, carry=carry, permit=[True]), info


def _index(rows: np.ndarray, num_rows: int) -> Any:
    """Return an index of `rows`, which are in order: a slice, which takes no copies, where they are all there are."""
    return slice(None) if rows.size == num_rows else rows


def _check_finite(state: DecoderState, output: RoundOutput, min_new_tokens: int) -> None:
    for model, slots in (("draft", output.bad_draft_slot), ("target", output.bad_target_slot)):
        if not np.count_nonzero(slots >= 0):
            continue
        index = int(np.argmax(slots >= 0))
        row = int(state.rows[index])
        position = int(state.lengths[row]) + int(slots[index])
        is_banned = model == "target" and position < int(state.prompt_lengths[row]) + min_new_tokens
        raise NonFiniteLogitsError(
            f"the {model} returned logits without a law (NaN, +inf, or nothing but -inf) for row {row}, position "
            f"{position}; nothing of this round was committed"
            + ("; `min_new_tokens` forbids end tokens there, if they were all that it left" if is_banned else ""),
            row=row,
            position=position,
            model=model,
        )
