"""The decoder: `init` lays a batch out, `step` runs one round."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from specsampling._arrays import fetch
from specsampling._compatibility import check_compatibility
from specsampling._counter import CounterSource
from specsampling._drafting import Context, Drafter, as_drafter
from specsampling._errors import CapabilityError
from specsampling._feeding import feed
from specsampling._metering import MeteredDrafter, MeteredModel
from specsampling._model import Capabilities, Model
from specsampling._random import RandomSource
from specsampling._requests import (
    as_choices,
    as_count,
    as_counts,
    as_flag,
    as_model,
    as_prompts,
    as_row_ids,
    as_stop_sequences,
    as_token_ids,
)
from specsampling._results import PhaseTimes, RoundInfo
from specsampling._round import DecodeRound, LogprobsKind, RoundCarry, RoundOutput, decode_round
from specsampling._sampling import Sampling
from specsampling._state import LENGTH, RUNNING, DecoderState, commit_round
from specsampling._stopping import StopRules

__all__ = ["Decoder", "Lookahead"]


class Lookahead(Protocol):
    """A rule that picks K before each round.

    Attributes
    ----------
    choices : tuple of int
        Every value it may return: the caches get room for the largest, and any other is refused.

    Examples
    --------
    >>> from specsampling import generate
    >>> from specsampling_numpy import TableModel
    >>> class OneThenThree:
    ...     choices = (1, 3)
    ...     def __call__(self, state):
    ...         return 1 if state.rounds.max() == 0 else 3
    >>> model = TableModel([0.5, 0.5])
    >>> generate(model, model, [0], max_new_tokens=6, lookahead=OneThenThree()).stats.rounds
    2
    """

    choices: tuple[int, ...]

    def __call__(self, state: DecoderState, /) -> int:
        """Return K for the next round; one that looks at other rows gives up the rows' independence."""
        ...


class Decoder:
    """Speculative decoding of a batch, one round at a time.

    Parameters
    ----------
    target : Model
        The model whose law the output follows.
    drafter : Drafter, Model or None
        What proposes tokens. A model is wrapped in `ModelDrafter` (it may be `target` itself); None is plain
        autoregressive sampling through the same code.
    lookahead : int or Lookahead, default: 4
        Tokens drafted per round, K, or a callable that picks it before each round.
    sampling : Sampling, optional
        Settings of the target; None is the default ones, ``Sampling()``.
    draft_sampling : Sampling, optional
        Settings of the draft; None is the target's. They change speed, never the law.
    end_tokens : sequence of int
        Ids that end a row; they are part of the output.
    stop_sequences : sequence of sequences of int
        Runs of ids that end a row once complete, matched in the new tokens only; part of the output.
    min_new_tokens : int, default: 0
        End tokens are forbidden, at the target, until this many tokens were emitted. Where the target leaves nothing
        else, that is a row without a law.
    seed : int or None, default: 0
        Repeats the run; None draws one, which the result records.
    randomness : RandomSource or None
        Answers every random decision in place of `seed`.
    logprobs : {"raw", "processed"} or None
        Whether to report the target's log-probability of each token: of its logits as they came, or after `sampling`.
    pad_vocab : bool, default: False
        Accept vocabularies of different sizes whose shared ids agree.
    validate : bool, default: False
        Check every law on the host; slow, and never compiled.

    Raises
    ------
    ValueError, TypeError
        For options that are unknown, out of range or contradict each other, vocabularies of different sizes included.
    CapabilityError
        If a model cannot roll back far enough for the lookahead.

    Notes
    -----
    Same seed, row id, prompt and lookahead give the same tokens whatever the rest of the batch is.

    Accepted without effect are, at temperature 0, top-k, top-p and min-p, and `seed` where the draft is greedy too;
    without a drafter `lookahead` and `pad_vocab`; at lookahead 0 the drafter and `draft_sampling`.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Decoder
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel(np.array([0.5, 0.3, 0.2]))
    >>> decoder = Decoder(model, model, lookahead=3)
    >>> state = decoder.init([[0], [1, 2]], max_new_tokens=4)
    >>> state, info = decoder.step(state)
    >>> info.num_accepted.tolist(), state.lengths.tolist()  # a model that drafts for itself is always right
    ([3, 3], [5, 6])
    """

    def __init__(
        self,
        target: Model[Any],
        drafter: Model[Any] | Drafter[Any] | None = None,
        *,
        lookahead: int | Lookahead = 4,
        sampling: Sampling | None = None,
        draft_sampling: Sampling | None = None,
        end_tokens: Sequence[int] = (),
        stop_sequences: Sequence[Sequence[int]] = (),
        min_new_tokens: int = 0,
        seed: int | None = 0,
        randomness: RandomSource | None = None,
        logprobs: LogprobsKind | None = None,
        pad_vocab: bool = False,
        validate: bool = False,
    ) -> None:
        self.target: Model[Any] = as_model("target", target)
        self.drafter: Drafter[Any] | None = as_drafter(drafter)
        self.lookahead = lookahead
        choices = as_choices(lookahead)
        self.choices = (0,) if self.drafter is None else choices
        self.sampling = Sampling() if sampling is None else _as_sampling("sampling", sampling)
        self.draft_sampling = None if draft_sampling is None else _as_sampling("draft_sampling", draft_sampling)
        if draft_sampling is not None and (drafter is None or getattr(drafter, "ignores_sampling", False)):
            raise ValueError("`draft_sampling` has no effect: `drafter` draws nothing from a law")
        self.stop_rules = StopRules(
            end_tokens=as_token_ids("end_tokens", end_tokens, target.vocab_size),
            stop_sequences=as_stop_sequences(stop_sequences, target.vocab_size),
        )
        self.min_new_tokens = as_count("min_new_tokens", min_new_tokens)
        if self.min_new_tokens and not self.stop_rules.end_tokens:
            raise ValueError("`min_new_tokens` forbids end tokens, and `end_tokens` is empty")
        if self.min_new_tokens and len(set(self.stop_rules.end_tokens)) == target.vocab_size:
            raise ValueError(
                f"`min_new_tokens` forbids end tokens, and `end_tokens` holds all {target.vocab_size} ids of the "
                "vocabulary: nothing could be emitted"
            )
        if logprobs not in (None, "raw", "processed"):
            raise ValueError(f'`logprobs` must be None, "raw" or "processed", got {logprobs!r}')
        self.logprobs: LogprobsKind | None = logprobs
        self.validate = as_flag("validate", validate)
        self._check_rollback(max(self.choices))
        reasons = check_compatibility(target, self.drafter, lookahead=0, pad_vocab=as_flag("pad_vocab", pad_vocab))
        if reasons:
            raise ValueError(reasons[0])
        if randomness is None:
            source = CounterSource(seed)
            self.randomness: RandomSource = source
            self.seed: int | None = source.seed
        else:
            if seed != 0:
                raise ValueError("`randomness` answers every random decision: it cannot be combined with `seed`")
            if not hasattr(randomness, "begin_round"):
                raise TypeError(f"`randomness` must be a RandomSource, got {randomness!r}")
            self.randomness, self.seed = randomness, None
        self._can_compile = hasattr(target, "compile_round") and not self.validate
        self._can_select = (
            hasattr(target, "select")
            and (self.drafter is None or hasattr(self.drafter, "select"))
            and not self._can_compile  # a new batch size would be a new trace
            and not self.validate  # whose messages name the rows of the whole batch
        )
        self._compiled: dict[int, DecodeRound] = {}
        # Of a model and of a drafter they have what a round calls, and no more.
        self._metered_target: Any = MeteredModel(target)
        self._metered_drafter: Any = None if self.drafter is None else MeteredDrafter(self.drafter)

    def init(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | Sequence[int],
        row_ids: Sequence[int] | None = None,
        max_lookahead: int | None = None,
    ) -> DecoderState:
        """Lay a batch out: check it, make room in the caches and feed the prompts to the target.

        Parameters
        ----------
        prompts : sequence of int, or sequence of those
            Token ids; never empty. A single sequence is a batch of one.
        max_new_tokens : int or sequence of int
            Most tokens that a row may emit, for all rows or for each.
        row_ids : sequence of int, optional
            The ids that the rows' randomness is drawn under; 0 … B - 1 by default.
        max_lookahead : int, optional
            Largest K that `step` will be called with; by default the largest of `lookahead`.

        Returns
        -------
        DecoderState
            The batch before its first round.

        Raises
        ------
        TypeError
            For prompts that are not token ids, and for numbers that are not integers.
        ValueError
            For prompts that are empty or hold ids out of range, for settings or numbers that are for another batch, and
            for a row whose prompt and `max_new_tokens` pass the target's context limit; the message names the row.
        CapabilityError
            If a model cannot roll back far enough for `max_lookahead`, or declares that it cannot hold such a batch.
        """
        ids = as_prompts(prompts, self.target.vocab_size)
        batch_size = len(ids)
        prompt_lengths = np.array([len(row) for row in ids], dtype=np.int32)
        limits = as_counts("max_new_tokens", max_new_tokens, batch_size)
        row_keys = as_row_ids(row_ids, batch_size)
        largest = max(self.choices) if max_lookahead is None else as_count("max_lookahead", max_lookahead)
        if self.drafter is None:
            largest = 0
        self._check_rollback(largest)
        self._check_batch(batch_size)
        self.sampling.check_rows(batch_size)
        if self.draft_sampling is not None:
            self.draft_sampling.check_rows(batch_size, "draft_sampling")
        self._check_limits(prompt_lengths, limits)

        capacity = int(prompt_lengths.max()) + int(limits.max()) + largest + 1
        tokens = np.zeros((batch_size, capacity), dtype=np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        cache = self.target.init_cache(batch_size, capacity)
        fed = feed(self.target, cache, tokens, np.zeros_like(prompt_lengths), prompt_lengths - 1, None)
        drafter_state = None if self.drafter is None else self.drafter.init(batch_size, capacity)
        return DecoderState(
            tokens=tokens,
            lengths=prompt_lengths.copy(),
            prompt_lengths=prompt_lengths,
            max_new_tokens=limits,
            row_ids=row_keys,
            rounds=np.zeros(batch_size, dtype=np.int64),
            status=np.where(limits == 0, LENGTH, RUNNING).astype(np.int8),
            rows=np.arange(batch_size),
            carry=RoundCarry(fed.cache, drafter_state, fed.like),
            max_lookahead=largest,
            permit=[True],
        )

    def step(self, state: DecoderState, *, lookahead: int | None = None) -> tuple[DecoderState, RoundInfo]:
        """Run one round for every unfinished row.

        Parameters
        ----------
        state : DecoderState
            The batch. Must not be used again.
        lookahead : int, optional
            K for this round, at most the state's `max_lookahead`; by default the decoder's own.

        Returns
        -------
        DecoderState
            The batch after the round.
        RoundInfo
            What the round did.

        Raises
        ------
        NonFiniteLogitsError
            If a model returned a row without a law; nothing of the round is committed.
        ValueError
            If every row has finished, `state` was used before, `lookahead` has no room in the caches, a rule returned
            none of its `choices`, or the drafter's proposal has another shape; with `validate` also for numbers that
            cannot be laws.
        TypeError
            If `lookahead`, or what a rule returned, is not an integer, or the drafter's answer is no proposal.
        """
        if state.is_done:
            raise ValueError("every row of `state` has finished")
        lookahead = self._resolve_lookahead(state, lookahead)
        if not state.permit:
            raise ValueError("`state` must not be used twice: go on from the state that `step` returned for it")
        state.permit.clear()
        began = time.perf_counter()
        target_before, draft_before = self._metered_target.seconds, self._draft_seconds
        state = self._drop_finished(state)
        limits = state.limits()
        output, carry = self._run_round(state, limits, lookahead)
        state, info = commit_round(state, output, carry, limits, self.stop_rules, self.min_new_tokens)
        total = time.perf_counter() - began
        draft = self._draft_seconds - draft_before
        target = total if self._can_compile else self._metered_target.seconds - target_before
        times = PhaseTimes(draft=draft, target=target, other=total - draft - target)
        return state, info._replace(times=times)

    def _run_round(self, state: DecoderState, limits: np.ndarray, lookahead: int) -> tuple[RoundOutput, RoundCarry]:
        """Run the round over the rows that the caches hold, and fetch what the host needs to know."""
        rows = state.rows
        tokens, lengths = state.tokens, state.lengths
        sampling, draft_sampling = self.sampling, self.draft_sampling
        if rows.size < lengths.size:
            tokens, lengths, sampling = tokens[rows], lengths[rows], sampling.rows(rows)
            draft_sampling = None if draft_sampling is None else draft_sampling.rows(rows)
        end_bans = None
        if self.min_new_tokens:
            end_bans = np.maximum(self.min_new_tokens - (lengths - state.prompt_lengths[rows]), 0).astype(np.int32)
            if not np.any(end_bans[limits > 0]):
                end_bans = None
        output, carry = self._round(lookahead)(
            self.target if self._can_compile else self._metered_target,
            self.drafter if self._can_compile else self._metered_drafter,
            state.carry,
            Context(tokens, lengths),
            limits,
            end_bans,
            self.randomness.begin_round(state.row_ids[rows], state.rounds[rows], lookahead),
            lookahead=lookahead,
            sampling=sampling,
            draft_sampling=draft_sampling,
            # Once no row has a ban left these are not looked at, but a compiled round must not become another one.
            end_tokens=self.stop_rules.end_tokens if self.min_new_tokens else (),
            logprobs=self.logprobs,
            validate=self.validate,
        )
        *arrays, draft_calls, is_point_mass = output
        return RoundOutput._make([*fetch(arrays), draft_calls, is_point_mass]), carry

    @property
    def _draft_seconds(self) -> float:
        seconds: float = 0.0 if self._metered_drafter is None else self._metered_drafter.seconds
        return seconds

    def _round(self, lookahead: int) -> DecodeRound:
        if not self._can_compile:
            return decode_round
        if lookahead not in self._compiled:
            compile_round: Callable[..., DecodeRound] = self.target.compile_round  # type: ignore[attr-defined]
            self._compiled[lookahead] = compile_round(self.drafter, self.sampling, lookahead)
        return self._compiled[lookahead]

    def _resolve_lookahead(self, state: DecoderState, lookahead: int | None) -> int:
        if lookahead is not None:
            lookahead = as_count("lookahead", lookahead)
        elif callable(self.lookahead) and self.drafter is not None:
            lookahead = as_count("lookahead", self.lookahead(state))
            if lookahead not in self.choices:
                raise ValueError(f"`lookahead` must return one of its `choices` {self.choices}, got {lookahead}")
        else:
            lookahead = self.choices[0]
        if self.drafter is None:
            return 0
        if lookahead > state.max_lookahead:
            raise ValueError(
                f"`lookahead` must be at most the {state.max_lookahead} that `init` made room for, got {lookahead}; "
                "pass `max_lookahead` to `init`"
            )
        return lookahead

    def _drop_finished(self, state: DecoderState) -> DecoderState:
        if not self._can_select:
            return state
        kept = np.nonzero(state.status[state.rows] == RUNNING)[0]
        if kept.size == state.rows.size:
            return state
        target: Any = self.target
        drafter: Any = self.drafter
        carry = state.carry._replace(target_cache=target.select(state.carry.target_cache, kept))
        if drafter is not None:
            carry = carry._replace(drafter_state=drafter.select(state.carry.drafter_state, kept))
        return state._replace(rows=state.rows[kept], carry=carry)

    def _check_rollback(self, lookahead: int) -> None:
        reasons = check_compatibility(self.target, self.drafter, lookahead=lookahead, pad_vocab=True)
        if reasons:
            raise CapabilityError(reasons[0])

    def _check_batch(self, batch_size: int) -> None:
        for name, model in (("target", self.target), ("draft", getattr(self.drafter, "model", None))):
            declared: Capabilities | None = getattr(model, "capabilities", None)
            if declared is None or batch_size == 1:
                continue
            if not declared.per_row_rollback:
                raise CapabilityError(
                    f"the {name} rolls all rows back together (`per_row_rollback` is False) and decodes only batches "
                    f"of one, got {batch_size} prompts"
                )
            if declared.max_batch_size is not None and batch_size > declared.max_batch_size:
                raise CapabilityError(
                    f"the {name} holds at most {declared.max_batch_size} rows (`max_batch_size`), "
                    f"got {batch_size} prompts"
                )

    def _check_limits(self, prompt_lengths: np.ndarray, limits: np.ndarray) -> None:
        for row in np.nonzero(limits < self.min_new_tokens)[0].tolist():
            raise ValueError(
                f"`min_new_tokens` must be at most `max_new_tokens`, got {self.min_new_tokens} and {limits[row]} "
                f"in row {row}"
            )
        max_length = getattr(self.target, "max_length", None)
        if max_length is None:
            return
        for row in np.nonzero(limits > max_length - prompt_lengths)[0].tolist():
            if prompt_lengths[row] >= max_length:
                raise ValueError(
                    f"`prompts` must be shorter than the target's context of {max_length} tokens, "
                    f"got {prompt_lengths[row]} tokens in row {row}"
                )
            raise ValueError(
                f"`max_new_tokens` = {limits[row]} after a prompt of {prompt_lengths[row]} tokens passes the target's "
                f"context of {max_length} tokens in row {row}"
            )


def _as_sampling(name: str, settings: Any) -> Sampling:
    if not isinstance(settings, Sampling):
        raise TypeError(f"`{name}` must be a Sampling, got {settings!r}")
    return settings
