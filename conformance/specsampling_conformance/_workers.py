"""Run checks, here one after the other or in processes of their own; what comes out is the same.

A check depends on the adapter and the run's seed and on no other check. So checks may run anywhere and in any order;
those of one group share what is costly (an enumeration, a sample), and stay together.
"""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from specsampling_conformance._checks import Check, CheckResult

__all__ = ["Checker", "Groups", "Outcome", "in_processes", "num_cores", "one_after_another"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Outcome(NamedTuple):
    """What came of a check.

    Attributes
    ----------
    result : CheckResult
        Its result in all dtypes.
    ends_run : bool
        Whether there is no model to go on with.
    peak_mib : float or None
        Largest memory so far of the process that ran it; None where the system does not tell.
    """

    result: CheckResult
    ends_run: bool
    peak_mib: float | None


class Checker(Protocol):
    """Runs a check by its id."""

    def __call__(self, check_id: str, /) -> Outcome:
        """Run a check in all dtypes."""
        ...

    def lost(self, check_id: str, why: str, /) -> Outcome:
        """Return the outcome of a check whose process is gone."""
        ...


Groups = Sequence[Sequence[Check]]
Needed = Callable[[Check], bool]


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def one_after_another(checker: Checker, groups: Groups, needed: Needed) -> Iterator[Outcome]:
    """Run the checks in this process, in order; `needed` is asked before each."""
    for group in groups:
        for entry in group:
            if needed(entry):
                yield checker(entry.id)


def in_processes(
    checker: Checker, groups: Groups, needed: Needed, jobs: int, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Run the checks in `jobs` processes, with these variables of the environment, and yield outcomes as they come.

    Half of the processes go from the first group on and half from the last one back, until they meet: neighbours have
    much in common, such as what a framework has compiled for them, and no core is idle to the end. A check that is no
    longer `needed` is given up.
    """
    queue = deque(list(group) for group in groups)
    shared = {**dict.fromkeys(_THREADS, str(max(1, num_cores() // jobs))), **environment}
    workers = [_Worker(checker, shared, from_the_end=bool(number % 2)) for number in range(jobs)]
    try:
        while True:
            for worker in workers:
                if worker.task is None:
                    worker.begin(queue, needed)
            for worker in [worker for worker in workers if worker.task is None or not needed(worker.task)]:
                worker.end()
                workers.remove(worker)
            if not workers:
                return
            ready = wait([worker.connection for worker in workers])
            for worker in workers:
                if worker.connection in ready:
                    yield worker.outcome()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs one check at a time, and the checks of its group that are left."""

    def __init__(self, checker: Checker, environment: dict[str, str], *, from_the_end: bool) -> None:
        self._checker, self._environment, self._from_the_end = checker, environment, from_the_end
        self._left: deque[Check] = deque()
        self.task: Check | None = None
        self._start()

    def _start(self) -> None:
        # A fork would inherit the threads of frameworks in an unknown state.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._checker), daemon=True)
        with _by_default(self._environment):
            self._process.start()
        theirs.close()

    def begin(self, queue: deque[list[Check]], needed: Needed) -> None:
        """Begin the next check of the group at hand or of the next group, where one is needed."""
        while self._left or queue:
            if not self._left:
                self._left.extend(queue.pop() if self._from_the_end else queue.popleft())
            entry = self._left.popleft()
            if needed(entry):
                self.task = entry
                self.connection.send(entry.id)
                return

    def outcome(self) -> Outcome:
        """Return what came of the check at hand."""
        assert self.task is not None
        task, self.task = self.task, None
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):  # an adapter may take its whole process with it
            self._process.join()
            why = f"the process that ran it is gone (exit status {self._process.exitcode})"
            self._start()
            return self._checker.lost(task.id, why)
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        outcome: Outcome = answer
        return outcome

    def end(self) -> None:
        """End the process, whatever it is at."""
        self.connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: "Connection[Any, Any]", checker: Checker) -> None:
    """Run the checks that are asked for; the life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one is interrupted too, and ends it
    with contextlib.suppress(EOFError):
        while True:
            check_id = connection.recv()
            try:
                answer: Any = checker(check_id)
            except KeyboardInterrupt as interrupt:
                answer = interrupt
            connection.send(answer)


@contextlib.contextmanager
def _by_default(environment: dict[str, str]) -> Iterator[None]:
    """Give processes started in the body these variables, where nobody has said otherwise."""
    unset = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]
