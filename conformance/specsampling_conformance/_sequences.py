"""Call sequences on a cache: run, made as short as possible, and the list of those once found useful."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from specsampling_conformance._checks import CheckFailure, Subject
from specsampling_conformance._trial import Oracle, Trial

__all__ = ["CallSequence", "FIXED_SEQUENCES", "run_sequence", "shrink_sequence"]


class CallSequence(NamedTuple):
    """Calls on a fresh cache.

    Attributes
    ----------
    name : str
        What it is good at.
    batch_size, capacity : int
        Of the cache.
    calls : tuple of (str, list)
        Method and argument: a block ``(B, T)`` for ``score``, lengths for ``rollback``, rows for ``select``.
    """

    name: str
    batch_size: int
    capacity: int
    calls: tuple[tuple[str, list[Any]], ...]


FIXED_SEQUENCES = (
    CallSequence(
        "a shorter block after a rollback meets stale entries",
        2,
        8,
        (("score", [[1, 2, 0], [2, 0, 1]]), ("rollback", [1, 2]), ("score", [[2], [0]]), ("score", [[1], [1]])),
    ),
    CallSequence(
        "rows of different lengths swap places",
        2,
        8,
        (("score", [[1, 1], [2, 2]]), ("rollback", [2, 0]), ("score", [[0, 1], [1, 0]]), ("rollback", [2, 2])),
    ),
    CallSequence(
        "nothing is rolled back, then everything",
        2,
        6,
        (
            ("score", [[2, 1], [0, 2]]),
            ("rollback", [2, 2]),
            ("score", [[1], [1]]),
            ("rollback", [0, 0]),
            ("score", [[0, 2], [2, 0]]),
        ),
    ),
    CallSequence(
        "two rollbacks in a row, of different rows",
        3,
        8,
        (
            ("score", [[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
            ("score", [[0], [1], [2]]),
            ("rollback", [3, 4, 2]),
            ("rollback", [3, 2, 1]),
            ("score", [[1, 0], [1, 1], [0, 2]]),
            ("score", [[2], [2], [2]]),
        ),
    ),
    CallSequence(
        "a full cache is emptied a little and filled again",
        2,
        5,
        (
            ("score", [[1, 0, 2], [2, 1, 1]]),
            ("score", [[0, 1], [0, 2]]),
            ("rollback", [4, 2]),
            ("score", [[2], [2]]),
            ("rollback", [4, 3]),
            ("score", [[1], [0]]),
        ),
    ),
)
"""Each is a short counterexample to a kind of faulty cache; for adapters whose every call is slow."""


def run_sequence(sequence: CallSequence, subject: Subject, oracle: Oracle) -> Trial | None:
    """Run a sequence, as far as the adapter's declared limits allow, and raise what it shows.

    A rollback is moved to the nearest that the contract allows, all rows alike where the adapter cannot tell them
    apart; a block that does not fit is left out.

    Returns
    -------
    Trial or None
        The trial after the last call; None where a call has the wrong number of rows, so that nothing can be said.
    """
    trial = Trial(
        subject, min(sequence.batch_size, subject.capabilities.max_batch_size or 3), sequence.capacity, oracle
    )
    for method, argument in sequence.calls:
        rows = len(trial.rows)
        if method == "select":
            kept = [row for row in argument if row < rows]
            if not kept:
                return None
            trial.select(kept)
            continue
        if len(argument) < rows:
            return None
        if method == "rollback":
            trial.rollback(_allowed(trial, argument[:rows], subject.capabilities.per_row_rollback))
        elif len(argument[0]) <= trial.room:
            trial.score(argument[:rows])
    return trial


def _allowed(trial: Trial, lengths: list[int], per_row: bool) -> list[int]:
    if not per_row:
        lengths = [max(min(lengths), *trial.floors)] * len(lengths) if len(lengths) > 1 else lengths
    limits = zip(lengths, trial.floors, trial.lengths, strict=True)
    return [min(max(length, floor), held) for length, floor, held in limits]


def shrink_sequence(sequence: CallSequence, subject: Subject, oracle: Oracle) -> CheckFailure | None:
    """Return the failure of the shortest sequence found by leaving things out, or None where it does not fail again.

    Calls are left out first, two at a time and then one; then blocks in a row are made one, columns are left out, and
    rows. Shrinking the calls themselves takes a few dozen runs; shrinking the draws that led to them, as Hypothesis
    would, takes hundreds and stops at longer sequences.
    """
    best = _failure(sequence, subject, oracle)
    if best is None:
        return None
    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in _shorter(sequence, len(best.calls)):
            failure = _failure(candidate, subject, oracle)
            if failure is not None:
                sequence, best, shrinking = candidate, failure, True
                break
    return best


def _failure(sequence: CallSequence, subject: Subject, oracle: Oracle) -> CheckFailure | None:
    try:
        run_sequence(sequence, subject, oracle)
    except CheckFailure as failure:
        return failure
    return None


def _shorter(sequence: CallSequence, failed_at: int) -> Iterator[CallSequence]:
    calls = sequence.calls
    if failed_at < len(calls):
        yield sequence._replace(calls=calls[:failed_at])
    for width in (2, 1):
        for start in range(len(calls) - width + 1):
            yield sequence._replace(calls=calls[:start] + calls[start + width :])
    for index, ((method, first), (following, second)) in enumerate(itertools.pairwise(calls)):
        if method == following == "score" and len(first) == len(second):
            block = [[*left, *right] for left, right in zip(first, second, strict=True)]
            yield sequence._replace(calls=(*calls[:index], ("score", block), *calls[index + 2 :]))
    for index, (method, argument) in enumerate(calls):
        if method == "score" and len(argument[0]) > 1:
            for column in range(len(argument[0])):
                block = [row[:column] + row[column + 1 :] for row in argument]
                yield sequence._replace(calls=(*calls[:index], (method, block), *calls[index + 1 :]))
    selections = [index for index, (method, _) in enumerate(calls) if method == "select"]
    if selections:
        # Without the first selection, but with its rows from the start.
        first_selection, rows = selections[0], calls[selections[0]][1]
        before = tuple((method, [argument[row] for row in rows]) for method, argument in calls[:first_selection])
        yield sequence._replace(batch_size=len(rows), calls=(*before, *calls[first_selection + 1 :]))
    elif sequence.batch_size > 2:
        for row in range(sequence.batch_size):
            fewer = tuple((method, argument[:row] + argument[row + 1 :]) for method, argument in calls)
            yield sequence._replace(batch_size=sequence.batch_size - 1, calls=fewer)
