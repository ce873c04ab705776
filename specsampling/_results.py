"""What a run reports: the text, where each token came from, and the counts with their one definition."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = ["FinishReason", "Generation", "PhaseTimes", "RoundInfo", "Stats", "StatsBuilder", "StreamEvent"]

FinishReason = Literal["stop", "length"]


class PhaseTimes(NamedTuple):
    """Wall time in seconds, by phase.

    On a device that runs asynchronously a phase is charged with the launch of its work and the last one with the wait:
    only the sum is then exact. A compiled round cannot be split and is charged to `target`.

    Attributes
    ----------
    prefill : float
        Feeding the prompts to the target. (The draft reads its prompts in its first round.)
    draft : float
        Proposing tokens.
    target : float
        The target's scoring and rollback.
    other : float
        Everything else: sampling, verification, the transfer to the host, stop checks.

    Examples
    --------
    >>> from specsampling import PhaseTimes
    >>> times = PhaseTimes(prefill=0.5, draft=1.0, target=2.0, other=0.25)
    >>> times.total, times.draft / times.total
    (3.75, 0.26666666666666666)
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the phases."""
        return sum(self)


class RoundInfo(NamedTuple):
    """What one round did, for the rows that took part; reported, never carried.

    Attributes
    ----------
    lookahead : int
        Tokens that the drafter was asked for, K.
    rows : ndarray
        Integer array ``(B,)``: the rows that took part, numbered as the prompts were given. The arrays below follow it.
    tokens : ndarray
        Integer array ``(B, K + 1)``: the committed tokens, then padding.
    num_emitted : ndarray
        Integer array ``(B,)``: how many of `tokens` were committed.
    num_proposed, num_tested, num_accepted : ndarray
        Integer arrays ``(B,)``, defined as in `Stats`.
    overlap : ndarray
        Real array ``(B,)``: the sum over tested slots of the chance that the slot's token was kept.
    logprobs : ndarray or None
        Real array ``(B, K + 1)`` beside `tokens`.
    finish_reasons : ndarray
        Object array ``(B,)`` of ``"stop"``, ``"length"`` or None for a row that goes on.
    draft_calls : int
        Scoring calls of the draft model.
    is_point_mass : bool
        Whether proposals were verified as chosen rather than drawn.
    times : PhaseTimes
        Wall time of the round.

    Examples
    --------
    >>> from specsampling import Decoder
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel([0.5, 0.5])
    >>> decoder = Decoder(model, model, lookahead=2)
    >>> _, info = decoder.step(decoder.init([[0], [1, 1]], max_new_tokens=[2, 8]))
    >>> info.num_emitted.tolist(), info.from_draft.tolist()
    ([2, 3], [[True, False, False], [True, True, False]])
    """

    lookahead: int
    rows: np.ndarray
    tokens: np.ndarray
    num_emitted: np.ndarray
    num_proposed: np.ndarray
    num_tested: np.ndarray
    num_accepted: np.ndarray
    overlap: np.ndarray
    logprobs: np.ndarray | None
    finish_reasons: np.ndarray
    draft_calls: int
    is_point_mass: bool
    times: PhaseTimes

    @property
    def from_draft(self) -> np.ndarray:
        """Boolean array ``(B, K + 1)``: whether each token was drafted and accepted."""
        return np.arange(self.tokens.shape[1]) < self.num_accepted[:, None]


class StreamEvent(NamedTuple):
    """The tokens that one row committed in one round.

    Attributes
    ----------
    row : int
        Row, numbered as the prompts were given.
    tokens : list of int
        The new tokens, the one that ends the row included.
    logprobs : list of float or None
        Their log-probabilities under the target, where asked for.
    from_draft : list of bool
        Whether each was drafted and accepted; the others are replacement or bonus tokens.
    finish_reason : {"stop", "length"} or None
        Why the row ended with this event; None if it goes on.

    Examples
    --------
    >>> from specsampling import stream
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel([0.0, 1.0])
    >>> [(event.tokens, event.from_draft) for event in stream(model, model, [0], max_new_tokens=3, lookahead=1)]
    [([1, 1], [True, False]), ([1], [False])]
    """

    row: int
    tokens: list[int]
    logprobs: list[float] | None
    from_draft: list[bool]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts of a run. These are the definitions; everything else that reports them refers here.

    A *row-round* is one unfinished row in one round.

    Attributes
    ----------
    rounds : int
        Rounds of the batch.
    target_calls : int
        Scoring calls of the target that returned logits: one a round. Feeding the prompts is not counted.
    draft_calls : int
        Scoring calls of the draft model, those that read the prompts included.
    proposed : int
        Tokens proposed: the sum of `num_tokens` over row-rounds, each after the cut to the room before the row's limit.
    tested : int
        Slots up to and including the first rejection or the token that ended the row.
    accepted : int
        Drafted tokens that were emitted: the number of True in `from_draft`.
    emitted : int
        Tokens emitted, in all.
    accepted_per_slot : tuple of int
        How many tokens were accepted in slot 0, 1, ….
    tested_per_slot : tuple of int
        How many were tested there.
    accepted_histogram : tuple of int
        Entry a counts the row-rounds in which exactly a drafted tokens were emitted.
    expected_accepted : float
        The sum over tested slots of the chance that the slot's token was kept: the sum of min(p, q) over the
        vocabulary, or p of the token itself for a point mass.
    undrafted : int
        Row-rounds with a lookahead of at least 1 in which the row proposed nothing: no match in the prompt, no room
        before its limit, or a text longer than the draft's context.
    point_mass_proposed : int
        How many of `proposed` were verified as chosen (point masses) rather than drawn from a law.
    times : PhaseTimes
        Wall time by phase, in seconds.
    config : mapping
        Every option of the run; `seed` is the one in use.

    Examples
    --------
    Three rounds, in which 4, 2 and 0 tokens were proposed and 4, 1 and 0 accepted:

    >>> from specsampling import Stats
    >>> stats = Stats(rounds=3, target_calls=3, proposed=6, tested=6, accepted=5, emitted=8)
    >>> stats.acceptance_rate == 5 / 6, stats.tokens_per_target_call == 8 / 3
    (True, True)
    >>> stats.emitted == stats.accepted + stats.rounds  # each round adds a token that was not drafted
    True
    """

    rounds: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    proposed: int = 0
    tested: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_slot: tuple[int, ...] = ()
    tested_per_slot: tuple[int, ...] = ()
    accepted_histogram: tuple[int, ...] = ()
    expected_accepted: float = 0.0
    undrafted: int = 0
    point_mass_proposed: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """``accepted / tested``; None before anything was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def tokens_per_target_call(self) -> float | None:
        """``emitted / target_calls``, over all rows together; None before the first round."""
        return self.emitted / self.target_calls if self.target_calls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of a run, one entry per prompt in each list.

    Attributes
    ----------
    tokens : list of list of int
        The new ids only, the end token or stop sequence included.
    finish_reasons : list of {"stop", "length"}
        Why each row ended; "stop" where both hold.
    logprobs : list of list of float, or None
        Log-probability of each token under the target, where asked for.
    from_draft : list of list of bool
        Whether each token was drafted and accepted.
    seed : int or None
        The seed that repeats the run; None when `randomness` was given.
    stats : Stats
        Counts and times.

    Examples
    --------
    >>> from specsampling import generate
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel([0.0, 1.0])
    >>> result = generate(model, model, [0], max_new_tokens=4, lookahead=2, logprobs="raw")
    >>> result.tokens, result.finish_reasons, result.from_draft
    ([[1, 1, 1, 1]], ['length'], [[True, True, False, False]])
    >>> result.logprobs
    [[0.0, 0.0, 0.0, 0.0]]
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    logprobs: list[list[float]] | None
    from_draft: list[list[bool]]
    seed: int | None
    stats: Stats


class StatsBuilder:
    """Adds up `RoundInfo` after `RoundInfo`."""

    def __init__(self, config: Mapping[str, Any], prefill: float) -> None:
        self._config = dict(config)
        names = "rounds draft_calls proposed tested accepted emitted undrafted point_mass_proposed"
        self._counts = dict.fromkeys(names.split(), 0)
        self._per_slot = np.zeros((3, 1), dtype=np.int64)  # accepted, tested, histogram
        self._overlap = 0.0
        self._times = PhaseTimes(prefill=prefill)

    def add(self, info: RoundInfo) -> None:
        """Count one round."""
        width = info.lookahead + 1
        if self._per_slot.shape[1] < width:
            missing = width - self._per_slot.shape[1]
            self._per_slot = np.concatenate([self._per_slot, np.zeros((3, missing), dtype=np.int64)], axis=1)
        slots = np.arange(width)
        self._per_slot[0, :width] += np.sum(slots < info.num_accepted[:, None], axis=0)
        self._per_slot[1, :width] += np.sum(slots < info.num_tested[:, None], axis=0)
        self._per_slot[2, :width] += np.bincount(info.num_accepted, minlength=width)
        proposed = int(info.num_proposed.sum())
        counts = self._counts
        counts["rounds"] += 1
        counts["draft_calls"] += info.draft_calls
        counts["proposed"] += proposed
        counts["tested"] += int(info.num_tested.sum())
        counts["accepted"] += int(info.num_accepted.sum())
        counts["emitted"] += int(info.num_emitted.sum())
        counts["undrafted"] += int(np.count_nonzero(info.num_proposed == 0)) if info.lookahead else 0
        counts["point_mass_proposed"] += proposed if info.is_point_mass else 0
        self._overlap += float(info.overlap.sum())
        self._times = PhaseTimes(*(a + b for a, b in zip(self._times, info.times, strict=True)))

    def build(self) -> Stats:
        """Return the counts so far."""
        return Stats(
            **self._counts,
            target_calls=self._counts["rounds"],
            accepted_per_slot=tuple(self._per_slot[0, :-1].tolist()),
            tested_per_slot=tuple(self._per_slot[1, :-1].tolist()),
            accepted_histogram=tuple(self._per_slot[2].tolist()),
            expected_accepted=self._overlap,
            times=self._times,
            config=self._config,
        )
