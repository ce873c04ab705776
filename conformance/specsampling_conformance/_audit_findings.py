"""The two running tests of an audit, and what a rejection tells about the engine."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specsampling_conformance._audit_law import Cells, Law, Tokens
from specsampling_conformance._audit_report import WorstCell
from specsampling_conformance._evalue import EProcess, neighbour_counts

__all__ = ["Tests", "diagnosis", "worst_cells"]

_MOST_WORST = 5


class Tests:
    """The two tests of one audit, and what tells an engine that repeats itself from one that is merely wrong.

    Parameters
    ----------
    sequences, neighbours : EProcess
        The test of whole sequences, and of the first tokens of neighbouring ones.
    """

    def __init__(self, sequences: EProcess, neighbours: EProcess) -> None:
        self.sequences, self.neighbours = sequences, neighbours
        self.batches: Counter[tuple[Tokens, ...]] = Counter()

    @property
    def rejected(self) -> bool:
        """Whether either has rejected."""
        return self.sequences.rejected or self.neighbours.rejected

    @property
    def repeats(self) -> bool:
        """Whether several calls returned the same sequences, though they could have returned others."""
        calls = self.batches.total()
        return calls > 1 and len(self.batches) == 1 and int(np.count_nonzero(self.sequences.law)) > 1

    def update(self, batch: list[Tokens], cells: Cells) -> None:
        """Add a batch of sequences."""
        counts = Counter(batch)
        self.sequences.update(cells.array(counts).astype(np.int64))
        if len(batch) > 1:
            first = {tokens: cells.place(tokens)[0] for tokens in counts}
            self.neighbours.update(neighbour_counts([first[tokens] for tokens in batch], len(cells.ids) + 2))
        self.batches[tuple(batch[:64])] += 1


def worst_cells(process: EProcess, cells: Cells) -> tuple[WorstCell, ...]:
    """Return the sequences furthest from what was expected, worst first."""
    expected = process.law * process.num_samples
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.abs(process.counts - expected) / np.sqrt(expected)
    score = np.where((process.law == 0) & (process.counts == 0), -1.0, score)
    order = [np.unravel_index(int(i), score.shape) for i in np.argsort(-score, axis=None, kind="stable")[:_MOST_WORST]]
    return tuple(
        WorstCell(cells.sequence([int(i) for i in place]), float(expected[place]), int(process.counts[place]))
        for place in order
        if score[place] >= 0
    )


def diagnosis(tests: Tests, cells: Cells, ends: Tokens, others: Mapping[str, Law]) -> str:
    """Return what fits a rejection best, a line for each finding."""
    process = tests.sequences
    lines = []
    if process.impossible:
        seen = [cells.sequence(place) for place in process.impossible]
        lines.append(f"{len(seen)} sequences of probability 0 were drawn: {'; '.join(_why(seen, cells, ends))}")
    if tests.repeats:
        lines.append("every call began with the same sequences: the engine seems to be seeded anew in each call")
    if tests.neighbours.rejected and not process.rejected:
        lines.append("sequences have the right law, but neighbouring ones are not independent: do rows share uniforms?")
    drawn = process.counts / process.num_samples
    distance = _distance(drawn, process.law)
    # Laws with a sequence that is too long for the cells are no candidates.
    fits = {name: law for name, law in others.items() if max(map(len, law)) <= cells.length}
    distances = {name: _distance(drawn, cells.array(law)) for name, law in fits.items()}
    best = min(distances, key=lambda name: distances[name], default=None)
    if best is not None and process.rejected and distances[best] < distance / 2:
        lines.append(
            f"data most consistent with: {best} (total variation {distances[best]:.3g} from the samples, against"
            f" {distance:.3g} for the law asked for)"
        )
    elif process.rejected:
        lines.append(f"the samples are at a total variation of about {distance:.3g} from the law asked for")
    return "\n".join(lines)


def _distance(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    return 0.5 * float(np.sum(np.abs(one - two)))


def _why(sequences: Sequence[Tokens], cells: Cells, ends: Tokens) -> Iterator[str]:
    for tokens in sequences[:_MOST_WORST]:
        written = str([token if token >= 0 else "?" for token in tokens]).replace("'", "")
        if any(token in ends for token in tokens[:-1]):
            yield f"{written} goes on after an end token"
        elif len(tokens) < cells.length and (not tokens or tokens[-1] not in ends):
            yield f"{written} ended early"
        else:
            yield f"{written} was ruled out"
