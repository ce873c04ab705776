"""Random calls on a cache: a Hypothesis state machine over `score`, `rollback` and `select`."""

import contextlib
import io
import itertools
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from specsampling_conformance._checks import CheckFailure, Subject
from specsampling_conformance._sequences import CallSequence, shrink_sequence
from specsampling_conformance._trial import Oracle, Trial

__all__ = ["run_random_sequences"]

_MOST_ROWS = 3
_MOST_TOKENS = 3
_CAPACITIES = (3, 8)
_ALL = 99
# How slow an adapter is, and what else runs in the process, is none of Hypothesis's business.
_HEALTH_CHECKS = (
    hypothesis.HealthCheck.data_too_large,
    hypothesis.HealthCheck.differing_executors,
    hypothesis.HealthCheck.filter_too_much,
    hypothesis.HealthCheck.large_base_example,
    hypothesis.HealthCheck.nested_given,
    hypothesis.HealthCheck.too_slow,
)


def run_random_sequences(subject: Subject, seed: int) -> float:
    """Run the state machine, and raise the shortest counterexample that comes of it as a :class:`CheckFailure`.

    Parameters
    ----------
    subject : Subject
        The adapter; its `effort` says how many sequences, how long, and whether to shrink.
    seed : int
        Seed of the sequences.

    Returns
    -------
    float
        The largest difference of logits from the oracle in any example.
    """
    oracle = Oracle(subject.model())
    found: list[tuple[CheckFailure, CallSequence]] = []
    machine = _machine_for(subject, oracle, found)
    hypothesis.seed(seed)(machine)
    settings = hypothesis.settings(
        max_examples=subject.effort.examples,
        stateful_step_count=subject.effort.steps,
        phases=[hypothesis.Phase.generate],
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=_HEALTH_CHECKS,
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_state_machine_as_test(machine, settings=settings)
    except (CheckFailure, Flaky):
        failure, sequence = found[0]
        if subject.effort.shrink:
            failure = shrink_sequence(sequence, subject, oracle) or _once_only(failure)
        raise failure from None
    return float(machine.largest)


def _once_only(failure: CheckFailure) -> CheckFailure:
    return CheckFailure(
        f"{failure.summary}, and not when the same calls were made again",
        expected=failure.expected,
        worst=failure.worst,
        calls=failure.calls,
        setting=failure.setting,
    )


def _most_rows(subject: Subject) -> int:
    return min(_MOST_ROWS, subject.capabilities.max_batch_size or _MOST_ROWS)


def _machine_for(subject: Subject, oracle: Oracle, found: list[tuple[CheckFailure, CallSequence]]) -> Any:
    """Return a state machine over the adapter's declared operations, which adds its failures to `found`."""
    model = subject.model()
    ids = st.integers(0, min(model.vocab_size, 3) - 1)
    most_rows = _most_rows(subject)
    # Nothing that is drawn depends on what was drawn before: rows that are not there and tokens that do not fit are
    # drawn too and left out. So Hypothesis can vary an example without its later steps changing their meaning.
    blocks = st.lists(st.tuples(*[ids] * _MOST_ROWS), min_size=1, max_size=_MOST_TOKENS)
    drops = st.tuples(*[st.sampled_from((0, 1, 2, 3, _ALL))] * _MOST_ROWS)
    choices = st.sampled_from([rows for size in (1, 2, 3) for rows in itertools.permutations(range(_MOST_ROWS), size)])

    class CacheMachine(RuleBasedStateMachine):
        """Every rule ends with a score: what a rollback or a selection broke is seen at once or never."""

        largest = 0.0
        trial: Trial

        @initialize(rows=st.integers(min(2, most_rows), most_rows), capacity=st.integers(*_CAPACITIES), block=blocks)
        def start(self, rows: int, capacity: int, block: list[tuple[int, ...]]) -> None:
            self.trial = Trial(subject, rows, capacity, oracle)
            self.calls: list[tuple[str, list[Any]]] = []
            self.score(block)

        def call(self, method: str, argument: list[Any]) -> None:
            self.calls.append((method, argument))
            try:
                getattr(self.trial, method)(argument)
            except CheckFailure as failure:
                calls = tuple(self.calls)
                found.append((failure, CallSequence("", self.trial.batch_size, self.trial.capacity, calls)))
                raise

        def score(self, block: list[tuple[int, ...]]) -> None:
            width = min(len(block), self.trial.room)
            if width:
                rows = range(len(self.trial.rows))
                self.call("score", [[column[row] for column in block[:width]] for row in rows])
                type(self).largest = max(self.largest, self.trial.largest)

        def roll_back(self, drop: tuple[int, ...]) -> None:
            floors, lengths = self.trial.floors, self.trial.lengths
            kept = [max(length - by, floor) for length, by, floor in zip(lengths, drop, floors, strict=False)]
            if not subject.capabilities.per_row_rollback:
                kept = [max(*floors, min(kept))] * len(kept)
            self.call("rollback", kept)

        @rule(block=blocks)
        def go_on(self, block: list[tuple[int, ...]]) -> None:
            self.score(block)

        @rule(drop=drops, block=blocks)
        def go_back(self, drop: tuple[int, ...], block: list[tuple[int, ...]]) -> None:
            self.roll_back(drop)
            self.score(block)

        @rule(first=drops, second=drops, block=blocks)
        def go_back_twice(self, first: tuple[int, ...], second: tuple[int, ...], block: list[tuple[int, ...]]) -> None:
            self.roll_back(first)
            self.roll_back(second)
            self.score(block)

    if not subject.capabilities.select:
        return CacheMachine

    class SelectingMachine(CacheMachine):
        @rule(drop=drops, choice=choices, block=blocks)
        def select(self, drop: tuple[int, ...], choice: tuple[int, ...], block: list[tuple[int, ...]]) -> None:
            rows = [row for row in choice if row < len(self.trial.rows)]
            if any(drop):
                self.roll_back(drop)
            if rows and rows != [0]:
                self.call("select", rows)
            self.score(block)

    return SelectingMachine
