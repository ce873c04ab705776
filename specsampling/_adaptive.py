"""A lookahead that follows what was accepted."""

import dataclasses
import math
import statistics
import time
import weakref
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from specsampling._decoding import Decoder
from specsampling._drafting import Drafter
from specsampling._model import Model
from specsampling._requests import as_count
from specsampling._sampling import Sampling
from specsampling._state import RUNNING, STOP, DecoderState
from specsampling._theory import best_lookahead, expected_speedup

__all__ = ["AdaptiveLookahead"]

_ASSUMED = 0.7
"""Acceptance before anything was seen, worth as much as `_PRIOR` tested tokens."""
_PRIOR = 2.0
_KEPT = 1 - 1 / 12
"""What a round leaves of the weight of those before it: about a dozen rounds count."""
_TIMED_ROUNDS = 5
_PAUSES = (4, 16)
"""Rounds without a draft between two trials of it: at first, and at most."""


class AdaptiveLookahead:
    """Pick K from what was accepted lately, and draft nothing for a while where that does not pay.

    Before each round the acceptance of about the last dozen rounds, over all rows, goes into `best_lookahead`. Where
    that says 0, rounds are plain, but for one in five that tries again; one in seventeen where trials keep failing.

    Parameters
    ----------
    draft_cost : float
        Time of one draft step, in units of one single-token pass of the target; 0 for prompt lookup.
    block_costs : mapping of int to float
        For each K that may be picked, the time of the target's block of K + 1 tokens in the same units. K = 0, which
        costs 1, may be picked too.

    Attributes
    ----------
    choices : tuple of int
        Every value it may return.

    Raises
    ------
    ValueError
        If there is no K above 0, one is negative, or a cost is out of range.
    TypeError
        If `block_costs` is no mapping, a K no integer, or a cost no real number.

    Notes
    -----
    K depends on tokens that were verified before the round, so every row's law stays the target's, and rows stay
    independent of each other in law. But all rows share one K: with other rows beside it, the same seed gives a row
    other tokens. The same batch repeats.

    What was seen of each run is kept apart, so that decoders and threads may share a rule, and a copy begins anew.

    References
    ----------
    The rule behind it is equation 1 and theorem 3.8 of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), with the
    acceptance measured as the text goes on.

    Examples
    --------
    >>> from specsampling import AdaptiveLookahead, generate
    >>> from specsampling_numpy import TableModel
    >>> target, poor_draft = TableModel([0.01, 0.99]), TableModel([0.99, 0.01])
    >>> adaptive = AdaptiveLookahead(draft_cost=0.2, block_costs={2: 1.1, 4: 1.2})
    >>> counts = {}
    >>> for lookahead in (4, adaptive):
    ...     stats = generate(target, poor_draft, [0], max_new_tokens=64, lookahead=lookahead).stats
    ...     counts[lookahead] = stats.proposed
    >>> counts[adaptive] < counts[4] / 4
    True
    """

    def __init__(self, *, draft_cost: float, block_costs: Mapping[int, float]) -> None:
        if not isinstance(block_costs, Mapping):
            raise TypeError(f"`block_costs` must be a mapping of K to the cost of K + 1 tokens, got {block_costs!r}")
        costs = {as_count("block_costs", lookahead): cost for lookahead, cost in block_costs.items()}
        costs.pop(0, None)
        if not costs:
            raise ValueError("`block_costs` must have the cost of at least one K above 0")
        self.draft_cost = _as_cost("draft_cost", draft_cost)
        self.block_costs = {k: _as_cost(f"block_costs[{k}]", costs[k]) for k in sorted(costs)}
        self.choices: tuple[int, ...] = (0, *self.block_costs)
        self._best(_ASSUMED)  # refuses costs that are out of range
        self._records: dict[int, _Record] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: the costs, and nothing of runs under way."""
        return {**self.__dict__, "_records": {}}

    @classmethod
    def measured(
        cls,
        target: Model[Any],
        drafter: Model[Any] | Drafter[Any],
        *,
        lookaheads: Iterable[int] = (1, 2, 4, 8),
        batch_size: int = 1,
        prompt_length: int = 64,
        sampling: Sampling | None = None,
    ) -> "AdaptiveLookahead":
        """Return a rule with the costs that rounds have here, by the median of five rounds of each K.

        Parameters
        ----------
        target : Model
            The target.
        drafter : Model or Drafter
            What will propose.
        lookaheads : iterable of int
            Each K above 0 that may be picked.
        batch_size : int, default: 1
            Rows of the batches to come: a block of more rows costs more.
        prompt_length : int, default: 64
            Tokens before the rounds that are timed; at least 1.
        sampling : Sampling, optional
            Settings of the rounds to come.

        Returns
        -------
        AdaptiveLookahead
            Its `block_costs` are whole rounds, drafting included, in units of a plain round; `draft_cost` is 0.

        Raises
        ------
        ValueError, TypeError, CapabilityError
            If the models cannot decode such batches or so many tokens (see `Decoder`), or nothing was proposed in a
            round that was timed.
        NonFiniteLogitsError
            If a model returned a row of logits without a law.

        Notes
        -----
        The text is one token over and over, in which `PromptLookup` always finds something. A drafter that finds
        nothing in it, or whose model cannot hold so much of it, has to be given costs.

        Costs that are measured differ from run to run, and with them K: the same seed repeats its tokens with the same
        rule, and not with one measured anew.

        Examples
        --------
        >>> import specsampling
        >>> from specsampling import AdaptiveLookahead
        >>> target = specsampling.load_model("numpy", specsampling.bundled("target"))
        >>> draft = specsampling.load_model("numpy", specsampling.bundled("draft"))
        >>> adaptive = AdaptiveLookahead.measured(target, draft, lookaheads=(2, 4))
        >>> adaptive.choices
        (0, 2, 4)
        """
        wanted = sorted({as_count("lookaheads", lookahead) for lookahead in lookaheads} - {0})
        if not wanted:
            raise ValueError("`lookaheads` must have at least one K above 0")
        batch_size = as_count("batch_size", batch_size, minimum=1)
        prompt_length = as_count("prompt_length", prompt_length, minimum=1)
        decoder = Decoder(target, drafter, lookahead=wanted[-1], sampling=sampling)
        seconds = {lookahead: _seconds(decoder, lookahead, batch_size, prompt_length) for lookahead in (0, *wanted)}
        return cls(draft_cost=0.0, block_costs={k: seconds[k] / seconds[0] for k in wanted})

    def __call__(self, state: DecoderState, /) -> int:
        """Return K for the next round.

        Parameters
        ----------
        state : DecoderState
            The batch before the round.

        Returns
        -------
        int
            One of `choices`.
        """
        record = self._record(state)
        record.observe(state)
        acceptance = record.accepted / record.tested
        lookahead = self._best(acceptance)
        if lookahead:
            record.pause, record.left = _PAUSES[0], _PAUSES[0]
        elif record.left:
            record.left -= 1
        else:
            record.pause = min(2 * record.pause, _PAUSES[1])
            record.left = record.pause
            lookahead = max(self.choices[1:], key=lambda k: self._gain(acceptance, k))
        record.remember(state, lookahead)
        return lookahead

    def _best(self, acceptance: float) -> int:
        return best_lookahead(acceptance, draft_cost=self.draft_cost, block_costs=self.block_costs)

    def _gain(self, acceptance: float, lookahead: int) -> float:
        return expected_speedup(
            acceptance, lookahead, draft_cost=self.draft_cost, block_cost=self.block_costs[lookahead]
        )

    def _record(self, state: DecoderState) -> "_Record":
        """Return what was seen of a run; its states have the array of prompt lengths in common."""
        key, records = id(state.prompt_lengths), self._records
        record = records.get(key)
        if record is None:
            # Forgotten with the array, before another can have its id.
            run = weakref.ref(state.prompt_lengths, lambda _: records.pop(key, None))
            record = records[key] = _Record(run)
        return record


def _as_cost(name: str, cost: Any) -> float:
    if isinstance(cost, bool) or not isinstance(cost, Real):
        raise TypeError(f"`{name}` must be a real number, got {cost!r}")
    try:
        value = float(cost)
    except OverflowError:  # an integer or a fraction
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return value


def _seconds(decoder: Decoder, lookahead: int, batch_size: int, prompt_length: int) -> float:
    """Return the time of a round. The first two also read the prompt into the draft, and compile."""
    num_rounds = 2 + _TIMED_ROUNDS
    state = decoder.init([[0] * prompt_length] * batch_size, max_new_tokens=num_rounds * (lookahead + 1))
    times = []
    for number in range(num_rounds):
        # A lookup finds nothing in what a target makes of this, and the round would be a plain one.
        state.tokens[...] = 0
        began = time.perf_counter()
        state, info = decoder.step(state, lookahead=lookahead)
        times.append(time.perf_counter() - began)
        if lookahead and number >= num_rounds - _TIMED_ROUNDS and not info.num_proposed.any():
            raise ValueError(
                f"`drafter` proposed nothing after a prompt of {prompt_length} equal tokens, so that no block was "
                "timed; pass a `prompt_length` that its model can hold, or measure otherwise and pass `block_costs`"
            )
    return statistics.median(times[2:])


@dataclasses.dataclass(slots=True)
class _Record:
    """What was seen of one run, and where its rows stood before its last round."""

    run: weakref.ref[Any]
    accepted: float = _ASSUMED * _PRIOR
    tested: float = _PRIOR
    pause: int = _PAUSES[0]
    left: int = _PAUSES[0]
    lookahead: int = 0
    lengths: Any = None
    rounds: Any = None
    telling: Any = None  # rows that run and may emit all of a block

    def remember(self, state: DecoderState, lookahead: int) -> None:
        """Keep what the next call compares with; no caches."""
        left = state.max_new_tokens - (state.lengths - state.prompt_lengths)
        self.lookahead, self.lengths, self.rounds = lookahead, state.lengths, state.rounds
        self.telling = (state.status == RUNNING) & (left > lookahead)

    def observe(self, state: DecoderState) -> None:
        """Count the tokens of the round since the last call, in rows whose text neither it nor their limit cut."""
        if not self.lookahead:
            return
        # Rounds that `step` was given a K for say nothing of this one.
        telling = self.telling & (state.status != STOP) & (state.rounds - self.rounds == 1)
        num_rows = int(np.count_nonzero(telling))
        if not num_rows:
            return
        emitted = (state.lengths - self.lengths)[telling]
        # A rule around this one may have made the round longer.
        accepted = np.minimum(emitted - 1, self.lookahead)
        self.accepted = _KEPT * self.accepted + float(np.sum(accepted)) / num_rows
        self.tested = _KEPT * self.tested + float(np.sum(np.minimum(emitted, self.lookahead))) / num_rows
