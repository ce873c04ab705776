"""T0, the clauses about what a cache remembers: rollback, select, rows that do not know of one another."""

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from specsampling import CacheError, CapabilityError
from specsampling_conformance._checks import CheckFailure, Measured, NotApplicable, Subject, check
from specsampling_conformance._contract_score import random_block, rows_for
from specsampling_conformance._digest import replay_digest
from specsampling_conformance._machine import run_random_sequences
from specsampling_conformance._sequences import FIXED_SEQUENCES, run_sequence
from specsampling_conformance._trial import LONGEST_TEXT, Oracle, Trial, largest_difference

__all__: list[str] = []

_DEEPEST = 256
"""Deepest rollback that is tried."""


def _scored(subject: Subject, check_id: str, rows: int, width: int, capacity: int = 10) -> tuple[Trial, Any]:
    """Return a trial with one random block in it, and a function that scores another of a given width."""
    rng = subject.rng(check_id)
    trial = Trial(subject, rows, capacity)
    trial.score(random_block(subject, rng, rows, width))
    return trial, lambda more: trial.score(random_block(subject, rng, rows, more))


def _back(subject: Subject, tokens: int) -> int:
    """Return how far a row that far along may go back, at most `tokens`."""
    limit = subject.model().max_rollback
    return tokens if limit is None else min(tokens, limit)


@check("T0.rollback.to_zero", "A row rolled back to length 0 is an empty row.")
def _to_zero(subject: Subject) -> None:
    rows, width = rows_for(subject, 2), _back(subject, 3)
    trial, score = _scored(subject, "T0.rollback.to_zero", rows, width)
    trial.rollback([0] * rows)
    score(1)
    score(2)


@check("T0.rollback.no_op", "A rollback to the length a row has changes nothing, on an empty cache as on a full one.")
def _no_op(subject: Subject) -> None:
    rows = rows_for(subject, 2)
    trial = Trial(subject, rows, 4)
    trial.rollback([0] * rows)
    rng = subject.rng("T0.rollback.no_op")
    for width in (1, 2, 1):
        trial.score(random_block(subject, rng, rows, width))
        trial.rollback(trial.lengths)
    trial.rollback([trial.lengths[0] - 1] * rows)
    trial.score(random_block(subject, rng, rows, 1))


@check(
    "T0.rollback.per_row",
    "Each row is rolled back to its own length, and goes on from there.",
    requires=("rows", "per_row_rollback"),
)
def _per_row(subject: Subject) -> None:
    for lengths in ((4, 2), (1, 3), (3, 4)):
        kept = [max(length, 4 - _back(subject, 4)) for length in lengths]
        trial, score = _scored(subject, f"T0.rollback.per_row{lengths}", 2, 4)
        trial.rollback(kept)
        score(1)
        score(2)


@check("T0.rollback.twice", "A second rollback goes on from where the first one ended.")
def _twice(subject: Subject) -> None:
    rows, deep = rows_for(subject, 2), _back(subject, 4)
    if deep < 2:
        raise NotApplicable("the model goes back one token at most")
    trial, score = _scored(subject, "T0.rollback.twice", rows, 5)
    trial.rollback([5 - deep // 2] * rows)
    trial.rollback([5 - deep] * rows)
    score(1)
    score(2)


@check(
    "T0.rollback.then_shorter_block",
    "What was rolled back is never seen again, though a shorter block leaves some of it unwritten.",
)
def _then_shorter_block(subject: Subject) -> None:
    rows, deep = rows_for(subject, 2), _back(subject, 3)
    trial, score = _scored(subject, "T0.rollback.then_shorter_block", rows, 2)
    score(3)
    trial.rollback([5 - deep] * rows)
    score(1)
    score(1)


@check("T0.rollback.then_longer_block", "After a rollback a block may be longer than what was taken back.")
def _then_longer_block(subject: Subject) -> None:
    rows = rows_for(subject, 2)
    trial, score = _scored(subject, "T0.rollback.then_longer_block", rows, 2)
    score(1)
    trial.rollback([2] * rows)
    score(3)
    score(1)


@check(
    "T0.rollback.every_depth",
    "A row may go back to any length up to `max_rollback` tokens behind the furthest that it has had.",
)
def _every_depth(subject: Subject) -> None:
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    rng = subject.rng("T0.rollback.every_depth")
    for filled in (1, 3, 6):
        for depth in range(1, _back(subject, filled) + 1):
            trial = Trial(subject, rows, 8, oracle)
            trial.score(random_block(subject, rng, rows, filled))
            trial.rollback([filled - depth] * rows)
            trial.score(random_block(subject, rng, rows, 1))
    limit = subject.model().max_rollback
    if limit is not None and 6 <= limit <= _DEEPEST:  # not reached above
        trial = Trial(subject, rows, limit + 3, oracle)
        trial.score(random_block(subject, rng, rows, limit + 2))
        trial.rollback([2] * rows)
        trial.score(random_block(subject, rng, rows, 1))


@check(
    "T0.rollback.ragged_prefill",
    "Prompts of different lengths are fed as right-padded blocks with `num_logits=0`, each row rolled back to its own"
    " length after each: padding leaves no trace.",
    requires=("rows", "per_row_rollback"),
)
def _ragged_prefill(subject: Subject) -> None:
    rng = subject.rng("T0.rollback.ragged_prefill")
    prompts = [random_block(subject, rng, 1, length)[0] for length in (1, 4, 7)][-rows_for(subject, 3) :]
    chunk = _back(subject, 3)
    trial = Trial(subject, len(prompts), 10)
    for start in range(0, 6, chunk):
        padded = [(prompt[:-1][start : start + chunk] + [0] * chunk)[:chunk] for prompt in prompts]
        trial.score(padded, 0)
        trial.rollback([min(len(prompt) - 1, start + chunk) for prompt in prompts])
    trial.score([prompt[-1:] for prompt in prompts])
    trial.score(random_block(subject, rng, len(prompts), 2))


@check(
    "T0.rollback.beyond_row",
    "A rollback to more tokens than a row holds raises `CacheError` and leaves the cache as it was.",
)
def _beyond_row(subject: Subject) -> None:
    _check_refused(subject, "T0.rollback.beyond_row", held=2, every_row=3, last_row=5)


def _check_refused(subject: Subject, check_id: str, *, held: int, every_row: int, last_row: int) -> None:
    """Try to roll rows that hold `held` tokens to lengths that none has: every row, and the last one alone."""
    rows = rows_for(subject, 2)
    trial, score = _scored(subject, check_id, rows, held)
    model, cache = trial.model, trial.cache
    for lengths in ([every_row] * rows, [held] * (rows - 1) + [last_row]):
        if len(set(lengths)) > 1 and not subject.capabilities.per_row_rollback:
            continue
        call = functools.partial(model.rollback, cache, trial.integers(lengths))
        trial.refused(f"rollback {lengths}", call, (CacheError,))
    score(1)


@check(
    "T0.rollback.negative",
    "A negative length raises `CacheError` and leaves the cache as it was: lengths do not count from the end of a row.",
)
def _negative(subject: Subject) -> None:
    _check_refused(subject, "T0.rollback.negative", held=1, every_row=-1, last_row=-1)


@check(
    "T0.rollback.beyond_limit",
    "A rollback by more than `max_rollback` tokens raises `CapabilityError` or `CacheError`, and is never ignored.",
)
def _beyond_limit(subject: Subject) -> None:
    limit = subject.model().max_rollback
    if limit is None:
        raise NotApplicable("`max_rollback` is None: any rollback is allowed")
    rows = rows_for(subject, 2)
    trial, score = _scored(subject, "T0.rollback.beyond_limit", rows, limit + 3, capacity=limit + 6)
    model, cache = trial.model, trial.cache
    kept = [2] * rows
    trial.refused(
        f"rollback {kept}", lambda: model.rollback(cache, trial.integers(kept)), (CapabilityError, CacheError)
    )
    score(1)
    for selecting in (False, True) if subject.capabilities.select else (False,):
        trial, score = _scored(subject, "T0.rollback.beyond_limit", rows, limit + 3, capacity=limit + 6)
        if selecting:
            trial.select(list(range(rows)))
        # As far back as is allowed, and then one more: a model that can do that must do it right.
        trial.rollback([3] * rows)
        with contextlib.suppress(CapabilityError, CacheError):
            trial.cache = trial.model.rollback(trial.cache, trial.integers(kept))
            trial.calls.append(f"rollback {kept}")
            trial.rows = [row[:2] for row in trial.rows]
        score(1)


@check(
    "T0.rollback.unequal_refused",
    "An adapter that declares `per_row_rollback=False` raises `CapabilityError` when rows are given different lengths.",
    requires=("rows", "!per_row_rollback"),
)
def _unequal_refused(subject: Subject) -> None:
    trial, score = _scored(subject, "T0.rollback.unequal_refused", 2, 3)
    model, cache = trial.model, trial.cache
    trial.refused("rollback [2,3]", lambda: model.rollback(cache, trial.integers([2, 3])), (CapabilityError,))
    score(1)


@check(
    "T0.select.keeps_rows",
    "`select` keeps the rows it is given, whole: lengths, positions and every layer's entries.",
    requires=("rows", "select"),
)
def _select_keeps_rows(subject: Subject) -> None:
    rows = rows_for(subject, 3)
    for kept in ([0], [rows - 1], [0, rows - 1]):
        rng = subject.rng(f"T0.select.keeps_rows{kept}")
        trial = Trial(subject, rows, 8)
        trial.score(random_block(subject, rng, rows, 4))
        if subject.capabilities.per_row_rollback:
            trial.rollback([4 - _back(subject, row) for row in range(rows)])
        trial.select(kept)
        trial.score(random_block(subject, rng, len(kept), 1))
        trial.rollback(trial.lengths)
        trial.score(random_block(subject, rng, len(kept), 2))


@check("T0.select.in_order", "`select` returns the rows in the order it is given.", requires=("rows", "select"))
def _select_in_order(subject: Subject) -> None:
    rows = rows_for(subject, 3)
    trial, score = _scored(subject, "T0.select.in_order", rows, 3)
    trial.select(list(range(rows))[::-1])
    score(2)


@check(
    "T0.select.absent",
    "An adapter that declares `select=False` has no `select`, or one that raises `CapabilityError`.",
    requires=("!select",),
)
def _select_absent(subject: Subject) -> None:
    trial, score = _scored(subject, "T0.select.absent", rows_for(subject, 2), 2)
    select = getattr(trial.model, "select", None)
    if select is None:
        return
    trial.refused("select [0]", lambda: select(trial.cache, trial.integers([0])), (CapabilityError,))
    score(1)


@check("T0.rows.single", "A batch of one row is a batch: nothing is squeezed out of shapes.")
def _single(subject: Subject) -> None:
    trial, score = _scored(subject, "T0.rows.single", 1, 3)
    trial.rollback([3 - _back(subject, 2)])
    score(1)
    score(2)


def _two_batches(
    subject: Subject, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]
) -> tuple[Any, Trial]:
    logits = []
    for tokens in (first, second):
        trial = Trial(subject, len(tokens), 10)
        trial.score([row[:3] for row in tokens])
        if subject.capabilities.per_row_rollback:
            trial.rollback([3 - _back(subject, 1 + row[0] % 2) for row in tokens])
        logits.append(
            np.concatenate([trial.score([row[3:5] for row in tokens]), trial.score([r[5:] for r in tokens])], 1)
        )
    return logits, trial


@check(
    "T0.rows.neighbours",
    "A row's logits do not depend on the tokens or lengths of the other rows.",
    requires=("rows",),
)
def _neighbours(subject: Subject) -> Measured:
    rng = subject.rng("T0.rows.neighbours")
    rows = rows_for(subject, 3)
    first, second = random_block(subject, rng, rows, 6), random_block(subject, rng, rows, 6)
    second[0] = first[0]
    (one, two), trial = _two_batches(subject, first, second)
    return _same(trial, one[:1], two[:1], "row 0 beside other neighbours")


@check("T0.rows.order", "Rows in another order give the same logits in that order.", requires=("rows",))
def _order(subject: Subject) -> Measured:
    tokens = random_block(subject, subject.rng("T0.rows.order"), rows_for(subject, 3), 6)
    (one, two), trial = _two_batches(subject, tokens, tokens[::-1])
    return _same(trial, one, two[::-1], "the same rows in the opposite order")


@check("T0.rows.batch_size", "A row gives the same logits alone as in a batch.", requires=("rows",))
def _batch_size(subject: Subject) -> Measured:
    tokens = random_block(subject, subject.rng("T0.rows.batch_size"), rows_for(subject, 3), 6)
    (one, two), trial = _two_batches(subject, tokens, tokens[-1:])
    return _same(trial, one[-1:], two, "the last row alone")


def _same(trial: Trial, one: Any, two: Any, what: str) -> Measured:
    difference = largest_difference(two, one)
    scale = max(1.0, float(np.max(np.abs(one[np.isfinite(one)]), initial=0.0)))
    if difference > trial.tolerance * scale:
        raise trial.failure(f"{what}: logits differ by {difference:.2g}", expected="the same logits")
    return Measured(tolerance=trial.tolerance, values={"difference": difference})


@check("T0.cache.independent", "Caches of one model do not know of one another, and calls on them may interleave.")
def _independent(subject: Subject) -> None:
    rng = subject.rng("T0.cache.independent")
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    first, second = Trial(subject, rows, 8, oracle), Trial(subject, rows, 8, oracle)
    for width in (2, 1, 3):
        first.score(random_block(subject, rng, rows, width))
        second.score(random_block(subject, rng, rows, 1))
        first.rollback([first.lengths[0] - 1] * rows)


@check(
    "T0.cache.own_arrays",
    "A cache keeps nothing of the arrays that calls are given: written over afterwards, tokens, lengths and rows change"
    " nothing.",
)
def _own_arrays(subject: Subject) -> None:
    rows = rows_for(subject, 2)
    for host in (False, True):
        rng = subject.rng("T0.cache.own_arrays")
        trial = Trial(subject, rows, 8, overwrites=True)
        trial.score(random_block(subject, rng, rows, 4), host=host)
        trial.rollback([4 - _back(subject, 2)] * rows, host=host)
        trial.score(random_block(subject, rng, rows, 1), host=host)
        if subject.capabilities.select:
            trial.select(list(range(rows))[::-1])
        trial.score(random_block(subject, rng, rows, 2), host=host)


@check(
    "T0.cache.long_texts",
    "What holds of short texts and blocks holds of texts of dozens of tokens, blocks wider than any tile of eight or"
    " sixteen, and rows of different lengths that were rolled back deep.",
)
def _long_texts(subject: Subject) -> Measured:
    longest = LONGEST_TEXT
    limit = getattr(subject.model(), "max_length", None)
    if limit is not None and limit < longest:
        raise NotApplicable(f"the model's texts have {limit} tokens at most")
    rng, oracle = subject.rng("T0.cache.long_texts"), Oracle(subject.model(), longest)
    rows = rows_for(subject, 2)
    text = random_block(subject, rng, rows, 60)
    ragged = subject.capabilities.per_row_rollback
    largest = 0.0
    # Widths of blocks, and between the first two how deep each row goes back.
    for widths, depths in (((33, 15, 9, 5), (0, 13)), ((60, 9, 1), (40, 57)), ((20, 1, 40), (1, 0))):
        trial = Trial(subject, rows, longest, oracle)
        trial.score([row[: widths[0]] for row in text])
        back = [_back(subject, depth if ragged else max(depths)) for depth in depths[:rows]]
        trial.rollback([widths[0] - depth for depth in back])
        for width in widths[1:]:
            if trial.room:  # a model that goes back a few tokens only keeps more of the text
                trial.score(random_block(subject, rng, rows, min(width, trial.room)))
        largest = max(largest, trial.largest)
    return Measured(values={"delta": largest})


@check("T0.cache.repeatable", "The same calls on a fresh cache give the same logits, bit for bit.")
def _repeatable(subject: Subject) -> None:
    first, second = (replay_digest(subject.model(), rows_for(subject, 2)) for _ in range(2))
    if first != second:
        raise CheckFailure("the same calls gave other bits the second time", expected="the same bits")


@check("T0.cache.fresh_processes", "Two fresh processes give the same logits for the same calls, bit for bit.")
def _fresh_processes(subject: Subject) -> None:
    if subject.backend is None:
        raise NotApplicable("the loader is a closure, which a fresh process cannot import; name an entry point")
    dtypes = tuple(dict.fromkeys((*subject.dtypes, subject.dtype)))
    answers = subject.once(("fresh", dtypes), lambda: _fresh_answers(subject, dtypes), for_all_dtypes=True)
    found = [answer[subject.dtype] for answer in answers]
    for answer in found:
        if "error" in answer:
            raise CheckFailure(f"a fresh process failed: {answer['error']}", expected="a digest of logits")
    digests = [answer["digest"] for answer in found]
    if digests[0] != digests[1]:
        raise CheckFailure("two fresh processes gave other bits", expected="the same bits", worst=digests)


def _fresh_answers(subject: Subject, dtypes: tuple[str, ...]) -> list[dict[str, dict[str, str]]]:
    """Return what two fresh processes answer, by dtype: to start one takes longer than all that it does."""
    request = {
        "backend": subject.backend,
        "checkpoint": str(subject.checkpoint),
        "dtypes": dtypes,
        "device": subject.device,
        "rows": rows_for(subject, 2),
    }
    command = [sys.executable, "-m", "specsampling_conformance._digest", json.dumps(request)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = []
    for process in running:
        output, errors = process.communicate()
        if process.returncode != 0:
            lines = errors.strip().splitlines() or ["no message"]
            raise CheckFailure(f"a fresh process failed: {lines[-1]}", expected="a digest of logits")
        answers.append(json.loads(output.splitlines()[-1]))
    return answers


@check(
    "T0.cache.fixed_sequences",
    "After any sequence of `score`, `rollback` and `select` a row's logits are those of its tokens in a fresh cache:"
    " a fixed list of sequences, each once the shortest counterexample to a faulty cache.",
)
def _fixed_sequences(subject: Subject) -> Measured:
    oracle = Oracle(subject.model())
    largest = 0.0
    for sequence in FIXED_SEQUENCES:
        trial = run_sequence(sequence, subject, oracle)
        largest = largest if trial is None else max(largest, trial.largest)
    return Measured(n=len(FIXED_SEQUENCES), values={"delta": largest})


@check(
    "T0.cache.random_sequences",
    "After any sequence of `score`, `rollback` and `select` a row's logits are those of its tokens in a fresh cache:"
    " random sequences, shrunk to the shortest that fails.",
)
def _random_sequences(subject: Subject) -> Measured:
    largest = run_random_sequences(subject, subject.check_seed("T0.cache.random_sequences"))
    return Measured(n=subject.effort.examples, values={"delta": largest})
