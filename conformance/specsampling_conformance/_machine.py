"""Random calls on a cache, shrunk to the shortest that fails; and the sequences once shrunk, for slow adapters."""

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from specsampling_conformance._checks import CheckFailure, Subject
from specsampling_conformance._trial import Oracle, Trial

__all__ = ["FIXED_SEQUENCES", "FixedSequence", "run_fixed_sequence", "run_random_sequences"]

_MOST_ROWS = 3
_MOST_TOKENS = 3
_CAPACITIES = (3, 8)


class FixedSequence(NamedTuple):
    """A call sequence that once told a faulty cache from a right one.

    Attributes
    ----------
    name : str
        What it is good at.
    batch_size, capacity : int
        Of the cache.
    calls : tuple of (str, object)
        Method and argument.
    """

    name: str
    batch_size: int
    capacity: int
    calls: tuple[tuple[str, Any], ...]


FIXED_SEQUENCES = (
    FixedSequence(
        "a shorter block after a rollback meets stale entries",
        2,
        8,
        (("score", [[1, 2, 0], [2, 0, 1]]), ("rollback", [1, 2]), ("score", [[2], [0]]), ("score", [[1], [1]])),
    ),
    FixedSequence(
        "rows of different lengths swap places",
        2,
        8,
        (("score", [[1, 1], [2, 2]]), ("rollback", [2, 0]), ("score", [[0, 1], [1, 0]]), ("rollback", [2, 2])),
    ),
    FixedSequence(
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
    FixedSequence(
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
    FixedSequence(
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
"""Where a state machine is too slow: each call costs a compilation or a device round trip."""


def run_fixed_sequence(sequence: FixedSequence, subject: Subject, oracle: Oracle) -> float:
    """Run one sequence, as far as the adapter's limits allow, and return the largest difference from the oracle.

    A rollback is moved to the nearest that the adapter declares it can do, all rows alike where it cannot tell them
    apart.
    """
    trial = Trial(subject, min(sequence.batch_size, _most_rows(subject)), sequence.capacity, oracle)
    rows = len(trial.rows)
    for method, argument in sequence.calls:
        if method == "score":
            if trial.room >= len(argument[0]):
                trial.score(argument[:rows])
            continue
        wanted = argument[:rows]
        if not subject.capabilities.per_row_rollback:
            wanted = [min(wanted)] * rows
        trial.rollback(
            [
                min(max(length, floor), held)
                for length, floor, held in zip(wanted, trial.floors, trial.lengths, strict=True)
            ]
        )
    if trial.room:
        trial.score([[1]] * rows)
    return trial.largest


def run_random_sequences(subject: Subject, seed: int) -> float:
    """Run the state machine, and raise its shortest counterexample as a :class:`CheckFailure`.

    Returns
    -------
    float
        The largest difference of logits from the oracle in any example.
    """
    effort = subject.effort
    machine = _machine_for(subject)
    hypothesis.seed(seed)(machine)
    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if effort.shrink else [])
    settings = hypothesis.settings(
        max_examples=effort.examples,
        stateful_step_count=effort.steps,
        phases=phases,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_state_machine_as_test(machine, settings=settings)
    except Flaky as flaky:
        raise CheckFailure(
            "the same calls on a fresh cache gave another result the second time",
            expected="results that depend on nothing but the calls",
            worst=[str(flaky).splitlines()[0]],
        ) from flaky
    return machine.largest


def _most_rows(subject: Subject) -> int:
    return min(_MOST_ROWS, subject.capabilities.max_batch_size or _MOST_ROWS)


def _machine_for(subject: Subject) -> Any:
    """Return a state machine over the adapter's declared operations."""
    model = subject.model()
    oracle = Oracle(model)
    ids = st.integers(0, min(model.vocab_size, 3) - 1)
    most_rows = _most_rows(subject)

    class CacheMachine(RuleBasedStateMachine):
        largest = 0.0
        trial: Trial

        @initialize(rows=st.integers(min(2, most_rows), most_rows), capacity=st.integers(*_CAPACITIES))
        def start(self, rows: int, capacity: int) -> None:
            self.trial = Trial(subject, rows, capacity, oracle)

        @precondition(lambda self: self.trial.room > 0)
        @rule(data=st.data())
        def score(self, data: st.DataObject) -> None:
            width = data.draw(st.integers(1, min(_MOST_TOKENS, self.trial.room)))
            row = st.lists(ids, min_size=width, max_size=width)
            self.trial.score([data.draw(row) for _ in self.trial.rows])
            type(self).largest = max(self.largest, self.trial.largest)

        @rule(data=st.data())
        def rollback(self, data: st.DataObject) -> None:
            floors, lengths = self.trial.floors, self.trial.lengths
            if subject.capabilities.per_row_rollback:
                kept = [data.draw(st.integers(f, n)) for f, n in zip(floors, lengths, strict=True)]
            else:
                kept = [data.draw(st.integers(max(floors), min(lengths)))] * len(lengths)
            self.trial.rollback(kept)

    if not subject.capabilities.select:
        return CacheMachine

    class SelectingMachine(CacheMachine):
        @precondition(lambda self: len(self.trial.rows) > 1)
        @rule(data=st.data())
        def select(self, data: st.DataObject) -> None:
            rows = st.lists(st.sampled_from(range(len(self.trial.rows))), min_size=1, unique=True)
            self.trial.select(data.draw(rows))

    return SelectingMachine
