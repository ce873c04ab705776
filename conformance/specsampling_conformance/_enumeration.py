"""T1: answer every random decision in every possible way, and so get the exact law of what the decoder puts out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from specsampling import Decoder, Label, Purpose, Randomness, RandomSource
from specsampling_conformance._host import Array, host_copy

__all__ = [
    "BranchingSource",
    "ExactLaw",
    "LabelReusedError",
    "MOST_PATHS",
    "Scenario",
    "TooManyPathsError",
    "enumerate_laws",
    "row_shares",
]

MOST_PATHS = 100_000
"""Ways of answering that are followed for one row; the situations of the suite have a few thousand."""

Outcome: TypeAlias = tuple[tuple[int, ...], int]
"""New tokens of a row, and how many rounds they took."""


class LabelReusedError(AssertionError):
    """One row was asked about the same label twice in one round: two decisions would have shared their randomness."""


class TooManyPathsError(AssertionError):
    """A row's ways of answering have no end: what it is asked depends on the company that it is in."""


class Scenario(NamedTuple):
    """One row whose law is wanted.

    Attributes
    ----------
    prompt : tuple of int
        Token ids.
    max_new_tokens : int
        The row's limit.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int


class ExactLaw(NamedTuple):
    """Every outcome of a row with its probability.

    Attributes
    ----------
    outcomes : dict
        Probability of each (tokens, rounds).
    num_paths : int
        Ways of answering the decisions that were followed to the end.
    drift : float
        Largest difference between the probability of a prefix of answers and that of the same prefix replayed in other
        company: what a row owes to its neighbours.
    """

    outcomes: dict[Outcome, float]
    num_paths: int
    drift: float

    @property
    def mass(self) -> float:
        """Sum of all probabilities: one, up to rounding."""
        return float(sum(self.outcomes.values()))

    @property
    def tokens(self) -> dict[tuple[int, ...], float]:
        """Law of the tokens alone."""
        law: dict[tuple[int, ...], float] = {}
        for (tokens, _), probability in self.outcomes.items():
            law[tokens] = law.get(tokens, 0.0) + probability
        return law


@dataclasses.dataclass(slots=True)
class _Path:
    """A way of answering: what is decided already, and where a row that follows it stands.

    `answers` grows as the row meets new questions, each with a sibling path left behind for every other answer.
    """

    answers: list[int]
    probability_at: float = 1.0  # of the answers it began with, as the run that left it behind saw it
    counts: bool = True
    position: int = 0
    probability: float = 1.0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.num_given = len(self.answers)

    num_given: int = dataclasses.field(init=False, default=0)


class BranchingSource(RandomSource):
    """Answers every decision of every row by following that row's path, and leaves the other answers for later.

    Parameters
    ----------
    every_column : bool, default: False
        Branch in the accept decisions after a row's first rejection too. They cannot matter to a sampler that stops
        there, and multiply the paths of one that does not.
    """

    def __init__(self, *, every_column: bool = False) -> None:
        self.every_column = every_column
        self.pending: list[list[_Path]] = []
        self.paths: dict[int, _Path] = {}
        self.scenario_of: dict[int, int] = {}
        self.active: set[int] = set()
        self.most_drafted: dict[int, int] = {}
        self.drift = 0.0

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> Randomness:  # noqa: ARG002 - the signature is the protocol's
        """Begin a round; rows that are not active (finished, but still in the batch) are answered without branching."""
        rows = [int(row) for row in row_ids]
        for row in rows:
            if row in self.active:
                self.paths[row].rounds += 1
        return _BranchingRound(self, rows)

    def decide(self, row: int, label: Label, probabilities: Sequence[float]) -> int:
        """Return this row's answer to a question with these probabilities, which need not sum to one."""
        total = float(sum(probabilities))
        # What is drawn for a row past its draft's context keeps other rows company, and is not proposed: whether it is
        # asked at all, and from which law, is up to them.
        is_idle = label.purpose == Purpose.DRAFT and label.slot >= self.most_drafted.get(row, label.slot + 1)
        if row not in self.active or is_idle or not total > 0:
            return max(range(len(probabilities)), key=lambda answer: probabilities[answer])
        path = self.paths[row]
        if path.position < len(path.answers):
            answer = path.answers[path.position]
        else:
            possible = [answer for answer, probability in enumerate(probabilities) if probability > 0]
            answer = possible[0]
            if path.counts:
                for other in possible[1:]:
                    probability_at = path.probability * probabilities[other] / total
                    sibling = _Path([*path.answers, other], probability_at)
                    self.pending[self.scenario_of[row]].append(sibling)
            path.answers.append(answer)
        path.position += 1
        path.probability *= probabilities[answer] / total
        if path.position == path.num_given and path.counts:
            self.drift = max(self.drift, abs(path.probability - path.probability_at))
        return answer


class _BranchingRound(Randomness):
    def __init__(self, source: BranchingSource, rows: list[int]) -> None:
        self._source = source
        self._rows = rows
        self._asked: set[Label] = set()

    def accept(self, numerator: Array, denominator: Array, label: Label) -> Array:
        """Decide each column in turn."""
        answers = self.host_accept(host_copy(numerator), host_copy(denominator), label)
        return _beside(answers, numerator)

    def categorical(self, weights: Array, label: Label) -> Array:
        """Decide each row."""
        return _beside(self.host_categorical(host_copy(weights), label), weights)

    def host_accept(self, numerator: NDArray[Any], denominator: NDArray[Any], label: Label) -> NDArray[np.bool_]:
        """Decide on host arrays; a compiled round calls back here."""
        self._audit(label, numerator.shape[1])
        answers = np.zeros(numerator.shape, dtype=np.bool_)
        labels = [Label(label.purpose, label.slot + column) for column in range(numerator.shape[1])]
        asked_of = zip(self._rows, numerator.tolist(), denominator.tolist(), strict=True)
        for index, (row, numerators, denominators) in enumerate(asked_of):
            for column, (p, q, asked) in enumerate(zip(numerators, denominators, labels, strict=True)):
                chance = 0.0 if not p > 0 else 1.0 if p >= q else p / q
                answer = self._source.decide(row, asked, (1.0 - chance, chance)) == 1
                answers[index, column] = answer
                if not answer and not self._source.every_column:
                    break
        return answers

    def host_categorical(self, weights: NDArray[Any], label: Label) -> NDArray[np.int32]:
        """Decide on host arrays; a compiled round calls back here."""
        self._audit(label, 1)
        asked_of = zip(self._rows, weights.tolist(), strict=True)
        return np.array([self._source.decide(row, label, law) for row, law in asked_of], dtype=np.int32)

    def _audit(self, label: Label, num_slots: int) -> None:
        for slot in range(label.slot, label.slot + num_slots):
            asked = Label(label.purpose, slot)
            if asked in self._asked:
                raise LabelReusedError(f"label {asked} was asked twice in one round")
            self._asked.add(asked)


def _beside(answers: NDArray[Any], like: Array) -> Array:
    """Return host answers in the namespace and on the device of the question."""
    if isinstance(like, np.ndarray):
        return answers
    xp = array_api_compat.array_namespace(like)
    if array_api_compat.is_jax_array(like):
        return xp.asarray(answers)
    return xp.asarray(answers, device=array_api_compat.device(like))


def enumerate_laws(
    make_decoder: Callable[[RandomSource], Decoder],
    scenarios: Sequence[Scenario],
    *,
    schedule: Sequence[int] = (2,),
    batch_size: int = 192,
    scenario_of: Sequence[int] | None = None,
    every_column: bool = False,
    draft_limit: int | None = None,
    most_paths: int = MOST_PATHS,
) -> list[ExactLaw]:
    """Return the exact law of (tokens, rounds) that a decoder puts out, for each scenario.

    The rows of a batch are different ways of answering; all scenarios are in every batch, so that they keep company. A
    row that has nothing left to explore follows its first path again and is not counted.

    Parameters
    ----------
    make_decoder : callable
        Builds the decoder around a `RandomSource`. Per-row settings, if it has any, are for `batch_size` rows.
    scenarios : sequence of Scenario
        What the rows begin with.
    schedule : sequence of int
        K of each round, repeated. At a fixed K a stale cache is invisible, because the next block overwrites it.
    batch_size : int
        Rows per run.
    scenario_of : sequence of int, optional
        Which scenario each row is of; by default row r is of scenario ``r % len(scenarios)``. Settings per row, if the
        decoder has any, are those of the row's scenario.
    every_column : bool, default: False
        See `BranchingSource`.
    draft_limit : int, optional
        Tokens that fit the draft's context, where rows outgrow it.
    most_paths : int, default: 100,000
        Ways of answering, per scenario, after which to give up.

    Returns
    -------
    list of ExactLaw
        One per scenario.

    Raises
    ------
    LabelReusedError
        If one decision was asked for twice in a round.
    TooManyPathsError
        If there is no end to the ways of answering.
    """
    source = BranchingSource(every_column=every_column)
    decoder = make_decoder(source)
    source.pending = [[_Path([])] for _ in scenarios]
    outcomes: list[dict[Outcome, float]] = [{} for _ in scenarios]
    num_paths = [0] * len(scenarios)
    numbers = [row % len(scenarios) for row in range(batch_size)] if scenario_of is None else scenario_of
    source.scenario_of = dict(enumerate(numbers))
    chosen = [scenarios[number] for number in numbers]
    while any(source.pending):
        queues = [source.pending[number] for number in numbers]
        source.paths = {row: queue.pop() if queue else _Path([], counts=False) for row, queue in enumerate(queues)}
        state = decoder.init(
            [scenario.prompt for scenario in chosen],
            max_new_tokens=[scenario.max_new_tokens for scenario in chosen],
            max_lookahead=max(schedule),
        )
        step = 0
        while not state.is_done:
            source.active = set(np.nonzero(state.status == 0)[0].tolist())
            if draft_limit is not None:
                source.most_drafted = dict(enumerate((draft_limit + 1 - state.lengths).tolist()))
            state, _ = decoder.step(state, lookahead=schedule[step % len(schedule)])
            step += 1
        for row, path in source.paths.items():
            if path.counts:
                number = source.scenario_of[row]
                outcome = (tuple(state.new_tokens(row)), path.rounds)
                outcomes[number][outcome] = outcomes[number].get(outcome, 0.0) + path.probability
                num_paths[number] += 1
                if num_paths[number] > most_paths:
                    raise TooManyPathsError(f"more than {most_paths} ways of answering: rows disturb each other")
    return [ExactLaw(law, paths, source.drift) for law, paths in zip(outcomes, num_paths, strict=True)]


def row_shares(weights: Sequence[float], batch_size: int) -> list[int]:
    """Deal the rows of a batch out to scenarios in proportion to their weights, at least one each, well mixed.

    Parameters
    ----------
    weights : sequence of float
        Positive, one per scenario.
    batch_size : int
        Number of rows, at least that of scenarios.

    Returns
    -------
    list of int
        The scenario of each row.
    """
    spare, total = batch_size - len(weights), sum(weights)
    counts = [1 + int(spare * weight / total) for weight in weights]
    heaviest = max(range(len(weights)), key=lambda number: weights[number])
    counts[heaviest] += batch_size - sum(counts)
    places = [((index + 0.5) / count, number) for number, count in enumerate(counts) for index in range(count)]
    return [number for _, number in sorted(places)]
