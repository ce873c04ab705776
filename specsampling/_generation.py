"""Whole runs: `generate` and `stream`, thin loops over the decoder's rounds."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specsampling._decoding import Decoder, Lookahead
from specsampling._drafting import Drafter
from specsampling._model import Model
from specsampling._random import RandomSource
from specsampling._results import Generation, RoundInfo, StatsBuilder, StreamEvent
from specsampling._round import LogprobsKind
from specsampling._sampling import Sampling
from specsampling._state import REASONS

__all__ = ["Run", "generate", "start", "stream"]


class Run:
    """A batch on its way, and everything reported so far: the loop behind `generate` and `stream`.

    Parameters
    ----------
    decoder : Decoder
        What takes the steps.
    prompts, max_new_tokens, row_ids
        As in `Decoder.init`, which is called here.
    config : mapping
        What `Stats.config` is to say.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Any,
        *,
        max_new_tokens: int | Sequence[int],
        row_ids: Sequence[int] | None,
        config: Mapping[str, Any],
    ) -> None:
        self.decoder = decoder
        began = time.perf_counter()
        self.state = decoder.init(prompts, max_new_tokens=max_new_tokens, row_ids=row_ids)
        self._stats = StatsBuilder(config, prefill=time.perf_counter() - began)
        # As wide as the text, and so that a whole block fits after the last token.
        self._from_draft = np.zeros(self.state.tokens.shape, dtype=np.bool_)
        self._logprobs = None if decoder.logprobs is None else np.zeros(self.state.tokens.shape)

    def rounds(self) -> Iterator[RoundInfo]:
        """Step until every row has finished, yielding each round's report."""
        while not self.state.is_done:
            lengths = self.state.lengths
            self.state, info = self.decoder.step(self.state)
            where = info.rows[:, None], lengths[info.rows][:, None] + np.arange(info.lookahead + 1)
            self._from_draft[where] = info.from_draft
            if self._logprobs is not None:
                self._logprobs[where] = info.logprobs
            self._stats.add(info)
            yield info

    def result(self) -> Generation:
        """Return what `generate` does; every row must have finished."""
        state = self.state
        spans = [slice(*span) for span in zip(state.prompt_lengths.tolist(), state.lengths.tolist(), strict=True)]

        def new(text: np.ndarray) -> list[list[Any]]:
            return [text[row, span].tolist() for row, span in enumerate(spans)]

        return Generation(
            tokens=new(state.tokens),
            finish_reasons=REASONS[state.status].tolist(),
            logprobs=None if self._logprobs is None else new(self._logprobs),
            from_draft=new(self._from_draft),
            seed=self.decoder.seed,
            stats=self._stats.build(),
        )


def start(
    target: Model[Any], drafter: Model[Any] | Drafter[Any] | None, prompts: Any, options: Mapping[str, Any]
) -> Run:
    """Build the decoder and lay the batch out; `options` are all the keyword arguments of `generate`."""
    batch = {name: options[name] for name in ("max_new_tokens", "row_ids")}
    decoder = Decoder(target, drafter, **{name: value for name, value in options.items() if name not in batch})
    # As the decoder holds them: an iterator that was passed in has been used up.
    rules = decoder.stop_rules
    used = {"end_tokens": rules.end_tokens, "stop_sequences": rules.stop_sequences, "seed": decoder.seed}
    return Run(decoder, prompts, **batch, config={**options, **used})


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
    target : Model
        The model whose law the output follows.
    drafter : Model, Drafter or None
        What proposes tokens: a smaller model, a `PromptLookup`, or any other drafter. None is plain sampling.
    prompts : sequence of int, or sequence of those
        Token ids, one sequence a row, of any lengths but 0.
    max_new_tokens : int or sequence of int
        Most tokens that a row may emit, for all rows or for each.
    lookahead : int or Lookahead, default: 4
        Tokens drafted per round, K, or a rule that picks it before each round.
    sampling : Sampling
        Temperature, top-k, top-p and min-p, for all rows or for each.
    draft_sampling : Sampling, optional
        Settings of the draft's own. They change speed, never the law.
    end_tokens : sequence of int
        Ids that end a row; they are part of the output.
    stop_sequences : sequence of sequences of int
        Runs of ids that end a row once complete, matched in the new tokens only; part of the output.
    min_new_tokens : int, default: 0
        End tokens are forbidden, at the target, until this many tokens were emitted.
    seed : int or None, default: 0
        Repeats the run; None draws one, which the result records.
    row_ids : sequence of int, optional
        The ids that the rows' randomness is drawn under; 0 … B - 1 by default.
    randomness : RandomSource, optional
        Answers every random decision in place of `seed`.
    logprobs : {"raw", "processed"} or None
        Whether to report the target's log-probability of each token: of its logits as they came, or after `sampling`.
    pad_vocab : bool, default: False
        Accept vocabularies of different sizes whose shared ids agree.
    validate : bool, default: False
        Check every law on the host; slow, and never compiled.

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
    options = locals()
    run = start(options.pop("target"), options.pop("drafter"), options.pop("prompts"), options)
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
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen, so that it can be shared)
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

    Returns
    -------
    Generation
        As the generator's value (of ``yield from``). Arguments are checked, and the prompts fed, when `stream` is
        called, not at the first event. Closing the generator early is harmless.

    Yields
    ------
    StreamEvent
        One per unfinished row and round.

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
    options = locals()
    return _events(start(options.pop("target"), options.pop("drafter"), options.pop("prompts"), options))


def _events(run: Run) -> Generator[StreamEvent, None, Generation]:
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
