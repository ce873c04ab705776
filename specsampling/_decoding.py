"""The decoder: `init` lays a batch out, `step` runs one round; `generate` and `stream` are thin loops over it."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specsampling._arrays import to_host
from specsampling._compatibility import check_compatibility
from specsampling._drafting import Context, Drafter, ModelDrafter
from specsampling._errors import CapabilityError, NonFiniteLogitsError
from specsampling._feeding import feed
from specsampling._metering import MeteredDrafter, MeteredModel
from specsampling._model import Model
from specsampling._random import CounterSource, RandomSource
from specsampling._requests import as_choices, as_count, as_prompts, as_row_ids, as_token_ids, per_row
from specsampling._results import FinishReason, Generation, PhaseTimes, RoundInfo, StatsBuilder, StreamEvent
from specsampling._round import DecodeRound, LogprobsKind, RoundCarry, RoundOutput, decode_round
from specsampling._sampling import Sampling
from specsampling._stopping import StopRules

__all__ = ["Decoder", "DecoderState", "Lookahead", "generate", "stream"]

_REASONS = np.array([None, "stop", "length"], dtype=object)
_RUNNING, _STOP, _LENGTH = 0, 1, 2


class Lookahead(Protocol):
    """A rule that picks K before each round.

    Attributes
    ----------
    choices : tuple of int
        Every value it may return, so that compiled rounds can be warmed up.
    """

    choices: tuple[int, ...]

    def __call__(self, state: "DecoderState", /) -> int:
        """Return K for the next round; one that looks at other rows gives up the rows' independence."""
        ...


class DecoderState(NamedTuple):
    """A batch between two rounds. Owned linearly: a state passed to `step` must not be used again.

    Attributes
    ----------
    tokens : ndarray
        Integer array ``(B, C)``: prompt and committed tokens of every row; what lies past its length is undefined.
    lengths : ndarray
        Integer array ``(B,)``: committed tokens per row, prompt included.
    prompt_lengths, max_new_tokens, row_ids, rounds : ndarray
        Integer arrays ``(B,)``: what the row began with, its limit, the id its randomness is drawn under and how many
        rounds it has had.
    finished : ndarray
        Integer array ``(B,)``: 0 while a row goes on, 1 when it met an end token or stop sequence, 2 at its limit.
    rows : ndarray
        Integer array: the rows that the caches hold, in order. Finished rows are dropped from it where both models can
        select.
    carry : RoundCarry
        Caches.
    max_lookahead : int
        Largest K that the caches have room for.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    max_new_tokens: np.ndarray
    row_ids: np.ndarray
    rounds: np.ndarray
    finished: np.ndarray
    rows: np.ndarray
    carry: RoundCarry
    max_lookahead: int

    @property
    def is_done(self) -> bool:
        """Whether every row has finished."""
        return bool(np.all(self.finished != _RUNNING))

    def new_tokens(self, row: int) -> list[int]:
        """Return the tokens that `row` has committed after its prompt."""
        tokens: list[int] = self.tokens[row, self.prompt_lengths[row] : self.lengths[row]].tolist()
        return tokens


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
    sampling, draft_sampling : Sampling
        Settings of the target and of the draft (None: the same). The draft's change speed, never the law.
    end_tokens : sequence of int
        Ids that end a row; they are part of the output.
    stop_sequences : sequence of sequences of int
        Runs of ids that end a row once complete, matched in the new tokens only; part of the output.
    min_new_tokens : int, default: 0
        End tokens are forbidden, at the target, until this many tokens were emitted.
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
        if randomness is not None and seed != 0:
            raise ValueError("`randomness` answers every random decision: it cannot be combined with `seed`")
        if logprobs not in (None, "raw", "processed"):
            raise ValueError(f'`logprobs` must be None, "raw" or "processed", got {logprobs!r}')
        if drafter is None and draft_sampling is not None:
            raise ValueError("`draft_sampling` needs a drafter, and `drafter` is None")
        for name, settings in (("sampling", sampling), ("draft_sampling", draft_sampling)):
            if settings is not None and not isinstance(settings, Sampling):
                raise TypeError(f"`{name}` must be a Sampling, got {settings!r}")
        self.target = target
        self.drafter: Drafter[Any] | None = _as_drafter(drafter)
        self.lookahead = lookahead
        self.sampling = Sampling() if sampling is None else sampling
        self.draft_sampling = draft_sampling
        self.stop_rules = StopRules(
            end_tokens=as_token_ids("end_tokens", end_tokens, target.vocab_size),
            stop_sequences=tuple(as_token_ids("stop_sequences", s, target.vocab_size) for s in stop_sequences),
        )
        if () in self.stop_rules.stop_sequences:
            raise ValueError("`stop_sequences` must not hold an empty sequence")
        self.min_new_tokens = as_count("min_new_tokens", min_new_tokens)
        if self.min_new_tokens and not self.stop_rules.end_tokens:
            raise ValueError("`min_new_tokens` forbids end tokens, and `end_tokens` is empty")
        self.logprobs: LogprobsKind | None = logprobs
        self.validate = validate
        self.choices = as_choices(lookahead) if self.drafter is not None else (0,)
        reasons = check_compatibility(target, self.drafter, lookahead=0, pad_vocab=pad_vocab)
        if reasons:
            raise ValueError(reasons[0])
        self._check_rollback(max(self.choices))
        self.randomness: RandomSource = CounterSource(seed) if randomness is None else randomness
        self.seed = getattr(self.randomness, "seed", None) if randomness is None else None
        self._rounds: dict[int, DecodeRound] = {}
        self._metered_target = MeteredModel(target)
        self._metered_drafter = None if self.drafter is None else MeteredDrafter(self.drafter)
        self._can_compile = hasattr(target, "compile_round") and not validate
        self._can_select = (
            hasattr(target, "select")
            and (self.drafter is None or hasattr(self.drafter, "select"))
            and not self._can_compile  # a new batch size would be a new trace
        )

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
        ValueError
            For prompts that are empty or hold ids out of range, and for a row whose prompt and `max_new_tokens` pass
            the target's context limit; the message names the row.
        CapabilityError
            If a model cannot roll back far enough for `max_lookahead`.
        """
        ids = as_prompts(prompts, self.target.vocab_size)
        batch_size = len(ids)
        prompt_lengths = np.array([len(row) for row in ids], dtype=np.int32)
        limits = per_row("max_new_tokens", max_new_tokens, batch_size)
        keys = as_row_ids(row_ids, batch_size)
        largest = max(self.choices) if max_lookahead is None else as_count("max_lookahead", max_lookahead)
        if self.drafter is None:
            largest = 0
        self._check_rollback(largest)
        self.sampling.check_rows(batch_size)
        if self.draft_sampling is not None:
            self.draft_sampling.check_rows(batch_size)
        self._check_limits(prompt_lengths, limits)

        capacity = int(prompt_lengths.max()) + int(limits.max()) + largest + 1
        tokens = np.zeros((batch_size, capacity), dtype=np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        start = np.zeros(batch_size, dtype=np.int32)
        cache = self.target.init_cache(batch_size, capacity)
        fed = feed(self.target, cache, tokens, start, prompt_lengths - 1, None)
        drafter_state = None if self.drafter is None else self.drafter.init(batch_size, capacity)
        return DecoderState(
            tokens=tokens,
            lengths=prompt_lengths.copy(),
            prompt_lengths=prompt_lengths,
            max_new_tokens=limits,
            row_ids=keys,
            rounds=np.zeros(batch_size, dtype=np.int64),
            finished=np.where(limits == 0, _LENGTH, _RUNNING).astype(np.int8),
            rows=np.arange(batch_size),
            carry=RoundCarry(fed.cache, drafter_state, None if fed.like is None else fed.like[:, :0, 0]),
            max_lookahead=largest,
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
            If every row has finished or `lookahead` has no room in the caches.
        """
        if state.is_done:
            raise ValueError("every row of `state` has finished")
        lookahead = self._resolve_lookahead(state, lookahead)
        began = time.perf_counter()
        meters = (self._metered_target.seconds, self._draft_seconds)
        state = self._drop_finished(state)
        rows = state.rows
        everything = rows.size == state.lengths.size
        lengths = state.lengths[rows]
        is_active = state.finished[rows] == _RUNNING
        emitted = lengths - state.prompt_lengths[rows]
        limits = np.where(is_active, state.max_new_tokens[rows] - emitted, 0).astype(np.int32)
        end_bans = None
        if self.min_new_tokens and bool(np.any(is_active & (emitted < self.min_new_tokens))):
            end_bans = np.maximum(self.min_new_tokens - emitted, 0).astype(np.int32)
        randomness = self.randomness.begin_round(state.row_ids[rows], state.rounds[rows], lookahead)
        output, carry = self._round(lookahead)(
            self._metered_target if not self._can_compile else self.target,
            self._metered_drafter if not self._can_compile else self.drafter,
            state.carry,
            Context(state.tokens if everything else state.tokens[rows], lengths),
            limits,
            end_bans,
            randomness,
            lookahead=lookahead,
            sampling=self.sampling if everything else self.sampling.rows(rows),
            draft_sampling=self.draft_sampling
            if everything or self.draft_sampling is None
            else self.draft_sampling.rows(rows),
            end_tokens=self.stop_rules.end_tokens if end_bans is not None else (),
            logprobs=self.logprobs,
            validate=self.validate,
        )
        output = RoundOutput(*(x if x is None or isinstance(x, bool | int) else to_host(x) for x in output))
        self._check_finite(output, state)
        active = np.nonzero(is_active)[0]
        return self._commit(state._replace(carry=carry), output, active, limits, lookahead, (began, *meters))

    def _commit(
        self,
        state: DecoderState,
        output: RoundOutput,
        active: np.ndarray,
        limits: np.ndarray,
        lookahead: int,
        clocks: tuple[float, float, float],
    ) -> tuple[DecoderState, RoundInfo]:
        """Write the round's tokens down, one by one through the stop rules, and report."""
        rows = state.rows[active]
        block = output.tokens[active]
        num_accepted = output.num_accepted[active].astype(np.int64)
        num_proposed = output.num_proposed[active].astype(np.int64)
        starts = state.lengths[rows]
        counts = np.minimum(num_accepted + 1, limits[active])
        slots = np.arange(lookahead + 1)
        state.tokens[rows[:, None], starts[:, None] + slots] = block
        prompts = state.prompt_lengths[rows]
        commit = self.stop_rules.commit(state.tokens, rows, prompts, starts, counts)
        num_emitted = commit.num_emitted
        num_tested = np.minimum(np.minimum(num_accepted + 1, num_proposed), num_emitted)
        is_full = num_emitted == limits[active]
        reasons = np.where(commit.is_stopped, _STOP, np.where(is_full, _LENGTH, _RUNNING))

        lengths, finished, rounds = state.lengths.copy(), state.finished.copy(), state.rounds.copy()
        lengths[rows] += num_emitted.astype(lengths.dtype)
        finished[rows] = reasons
        rounds[rows] += 1
        overlap = np.where(slots[:-1] < num_tested[:, None], output.overlap[active], 0.0).sum(axis=1)
        total = time.perf_counter() - clocks[0]
        target, draft = self._metered_target.seconds - clocks[1], self._draft_seconds - clocks[2]
        if self._can_compile:
            target = total
        info = RoundInfo(
            lookahead=lookahead,
            rows=rows,
            tokens=np.where(slots < num_emitted[:, None], block, 0),
            num_emitted=num_emitted,
            num_proposed=num_proposed,
            num_tested=num_tested,
            num_accepted=np.minimum(num_accepted, num_emitted),
            overlap=overlap,
            logprobs=None if output.logprobs is None else output.logprobs[active],
            finish_reasons=_REASONS[reasons],
            draft_calls=int(output.draft_calls),
            is_point_mass=bool(output.is_point_mass),
            times=PhaseTimes(0.0, draft, target, total - draft - target),
        )
        return state._replace(lengths=lengths, finished=finished, rounds=rounds), info

    @property
    def _draft_seconds(self) -> float:
        return 0.0 if self._metered_drafter is None else self._metered_drafter.seconds

    def _round(self, lookahead: int) -> DecodeRound:
        if not self._can_compile:
            return decode_round
        if lookahead not in self._rounds:
            compile_round: Callable[..., DecodeRound] = self.target.compile_round  # type: ignore[attr-defined]
            self._rounds[lookahead] = compile_round(self.drafter, self.sampling, lookahead)
        return self._rounds[lookahead]

    def _resolve_lookahead(self, state: DecoderState, lookahead: int | None) -> int:
        if self.drafter is None:
            return 0
        if lookahead is None:
            if callable(self.lookahead):
                lookahead = self.lookahead(state)
                if lookahead not in self.choices:
                    raise ValueError(f"`lookahead` returned {lookahead}, which is not in its `choices` {self.choices}")
            else:
                lookahead = self.lookahead
        lookahead = as_count("lookahead", lookahead)
        if lookahead > state.max_lookahead:
            raise ValueError(
                f"`lookahead` must be at most the {state.max_lookahead} that `init` made room for, got {lookahead}; "
                "pass `max_lookahead` to `init`"
            )
        return lookahead

    def _drop_finished(self, state: DecoderState) -> DecoderState:
        if not self._can_select:
            return state
        kept = np.nonzero(state.finished[state.rows] == _RUNNING)[0]
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

    def _check_limits(self, prompt_lengths: np.ndarray, limits: np.ndarray) -> None:
        max_length = getattr(self.target, "max_length", None)
        for row in np.nonzero(limits < self.min_new_tokens)[0].tolist():
            raise ValueError(
                f"`min_new_tokens` must be at most `max_new_tokens`, got {self.min_new_tokens} and {limits[row]} in row "
                f"{row}"
            )
        if max_length is None:
            return
        for row in np.nonzero(prompt_lengths + limits > max_length)[0].tolist():
            raise ValueError(
                f"`max_new_tokens` = {limits[row]} after a prompt of {prompt_lengths[row]} tokens passes the target's "
                f"context of {max_length} tokens in row {row}"
            )

    def _check_finite(self, output: RoundOutput, state: DecoderState) -> None:
        for model, slots in (("draft", output.bad_draft_slot), ("target", output.bad_target_slot)):
            for index in np.nonzero(slots >= 0)[0].tolist():
                row = int(state.rows[index])
                position = int(state.lengths[row]) + int(slots[index])
                raise NonFiniteLogitsError(
                    f"the {model} returned logits without a law (NaN, +inf, or nothing but -inf) for row {row}, position "
                    f"{position}; nothing of this round was committed",
                    row=row,
                    position=position,
                    model=model,
                )


def _as_drafter(drafter: Model[Any] | Drafter[Any] | None) -> Any:
    if drafter is None or hasattr(drafter, "propose"):
        return drafter
    if hasattr(drafter, "score"):
        return ModelDrafter(drafter)  # type: ignore[arg-type]
    raise TypeError(f"`drafter` must be a Drafter, a Model or None, got {drafter!r}")


class _Run:
    """A decoder, its state and everything reported so far: the loop behind `generate` and `stream`."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Any,
        max_new_tokens: int | Sequence[int],
        row_ids: Sequence[int] | None,
        config: Mapping[str, Any],
    ) -> None:
        self.decoder = decoder
        began = time.perf_counter()
        self.state = decoder.init(prompts, max_new_tokens=max_new_tokens, row_ids=row_ids)
        self._stats = StatsBuilder(config, time.perf_counter() - began)
        self._infos: list[RoundInfo] = []

    def rounds(self) -> Iterator[RoundInfo]:
        while not self.state.is_done:
            self.state, info = self.decoder.step(self.state)
            self._stats.add(info)
            self._infos.append(info)
            yield info

    def result(self) -> Generation:
        state = self.state
        batch_size = state.lengths.size
        from_draft: list[list[bool]] = [[] for _ in range(batch_size)]
        logprobs: list[list[float]] = [[] for _ in range(batch_size)]
        for info in self._infos:
            flags = info.from_draft
            for index, (row, count) in enumerate(zip(info.rows.tolist(), info.num_emitted.tolist(), strict=True)):
                from_draft[row].extend(flags[index, :count].tolist())
                if info.logprobs is not None:
                    logprobs[row].extend(info.logprobs[index, :count].tolist())
        reasons: list[FinishReason] = _REASONS[state.finished].tolist()
        return Generation(
            tokens=[state.new_tokens(row) for row in range(batch_size)],
            finish_reasons=reasons,
            logprobs=None if self.decoder.logprobs is None else logprobs,
            from_draft=from_draft,
            seed=self.decoder.seed,
            stats=self._stats.build(),
        )


def generate(
    target: Model[Any],
    drafter: Model[Any] | Drafter[Any] | None,
    prompts: Any,
    *,
    max_new_tokens: int | Sequence[int],
    lookahead: int | Lookahead = 4,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen, and the signature says what the default is)
    draft_sampling: Sampling | None = None,
    end_tokens: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
    seed: int | None = 0,
    row_ids: Sequence[int] | None = None,
    randomness: RandomSource | None = None,
    logprobs: LogprobsKind | None = None,
    pad_vocab: bool = False,
    validate: bool = False,
) -> Generation:
    """Generate text for a batch of prompts by speculative sampling.

    Parameters
    ----------
    target, drafter, lookahead, sampling, draft_sampling, end_tokens, stop_sequences
        As in `Decoder`.
    prompts, max_new_tokens, row_ids
        As in `Decoder.init`.
    min_new_tokens, seed, randomness, logprobs, pad_vocab, validate
        As in `Decoder`.

    Returns
    -------
    Generation
        The new tokens of each row, why it ended, and what the run cost.

    Raises
    ------
    ValueError, TypeError, CapabilityError
        For what does not fit, before the first round.
    NonFiniteLogitsError
        If a model returned a row of logits without a law.

    References
    ----------
    Chen et al. 2023, Algorithm 2 (arXiv 2302.01318).

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import generate
    >>> from specsampling_numpy import TableModel
    >>> target = TableModel(np.array([0.6, 0.3, 0.1]))
    >>> draft = TableModel(np.array([0.4, 0.4, 0.2]))
    >>> result = generate(target, draft, [[0], [1, 2]], max_new_tokens=5, seed=7)
    >>> [len(row) for row in result.tokens], result.finish_reasons
    ([5, 5], ['length', 'length'])
    """
    run = _start(locals())
    for _ in run.rounds():
        pass
    return run.result()


def stream(
    target: Model[Any],
    drafter: Model[Any] | Drafter[Any] | None,
    prompts: Any,
    *,
    max_new_tokens: int | Sequence[int],
    lookahead: int | Lookahead = 4,
    sampling: Sampling = Sampling(),  # noqa: B008
    draft_sampling: Sampling | None = None,
    end_tokens: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
    seed: int | None = 0,
    row_ids: Sequence[int] | None = None,
    randomness: RandomSource | None = None,
    logprobs: LogprobsKind | None = None,
    pad_vocab: bool = False,
    validate: bool = False,
) -> Generator[StreamEvent, None, Generation]:
    """Generate as `generate` does, and yield each row's tokens as they are committed.

    Parameters
    ----------
    target, drafter, prompts, max_new_tokens, lookahead, sampling, draft_sampling, end_tokens, stop_sequences
        As in `generate`.
    min_new_tokens, seed, row_ids, randomness, logprobs, pad_vocab, validate
        As in `generate`.

    Yields
    ------
    StreamEvent
        One per unfinished row and round.

    Returns
    -------
    Generation
        As the generator's value (of ``yield from``). Arguments are checked, and the prompts fed, when `stream` is
        called, not at the first event. Closing the generator early is harmless.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import stream
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel(np.array([0.0, 1.0]))
    >>> for event in stream(model, None, [0], max_new_tokens=2):
    ...     print(event.row, event.tokens, event.finish_reason)
    0 [1] None
    0 [1] length
    """
    return _events(_start(locals()))


def _start(arguments: Mapping[str, Any]) -> _Run:
    """Build the decoder and lay the batch out from the arguments that `generate` and `stream` share."""
    options = dict(arguments)
    target, drafter, prompts = (options.pop(name) for name in ("target", "drafter", "prompts"))
    batch = {name: options.pop(name) for name in ("max_new_tokens", "row_ids")}
    decoder = Decoder(target, drafter, **options)
    return _Run(decoder, prompts, **batch, config={**options, **batch, "seed": decoder.seed})


def _events(run: _Run) -> Generator[StreamEvent, None, Generation]:
    for info in run.rounds():
        flags = info.from_draft
        for index, (row, count) in enumerate(zip(info.rows.tolist(), info.num_emitted.tolist(), strict=True)):
            yield StreamEvent(
                row=row,
                tokens=info.tokens[index, :count].tolist(),
                logprobs=None if info.logprobs is None else info.logprobs[index, :count].tolist(),
                from_draft=flags[index, :count].tolist(),
                finish_reason=info.finish_reasons[index],
            )
    return run.result()
