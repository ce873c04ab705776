"""How the frozen pairs were chosen: ``python -m specsampling_conformance._search``.

One and the same fault needs a few hundred sequences on one pair of models and cannot be seen on another. So many random
pairs are made, every planted fault that changes the law of plain sampling is enumerated on each of them, and the
divergence of its law from the target's says how fast samples would show it. Of all sets of three pairs (two with three
ids, one with four) the one is kept whose worst fault is seen fastest by the pair that sees it best.
"""

import argparse
import itertools
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from specsampling import Model, RandomSource
from specsampling_conformance._cast import SHORT_CONTEXT
from specsampling_conformance._engine import Engine
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._faults import CRASHES, FAULTS
from specsampling_conformance._oracle import Scores, sequence_law
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._tiny import write_tiny_checkpoint

__all__ = ["Candidate", "best_three", "divergence", "divergences", "main"]

_HARD = (
    "epsilon in the ratio",
    "residual with an epsilon",
    "residual squared",
    "lenient accept",
    "residual of the first slot",
    "target rolled back one too many",
    "first row reused from the last round",
)
"""What is enumerated first: a candidate that hides one of these is not looked at further."""


_LEAST = 1e-4
"""Divergence that a test of some hundred thousand sequences can see."""


class Candidate(NamedTuple):
    """A pair of random checkpoints.

    Attributes
    ----------
    vocab_size : int
        V.
    seed : int
        Seed of the target's weights; the draft has the next.
    contrast : float
        Spread of the logits.
    """

    vocab_size: int
    seed: int
    contrast: float

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the two checkpoints, and the draft's with a short context; return the two's directories."""
        write_tiny_checkpoint(
            folder / "short_draft",
            vocab_size=self.vocab_size,
            seed=self.seed + 1,
            contrast=self.contrast,
            max_length=SHORT_CONTEXT,
        )
        return (
            write_tiny_checkpoint(
                folder / "target", vocab_size=self.vocab_size, seed=self.seed, contrast=self.contrast
            ),
            write_tiny_checkpoint(
                folder / "draft", vocab_size=self.vocab_size, seed=self.seed + 1, contrast=self.contrast
            ),
        )


def divergence(got: Mapping[tuple[int, ...], float], expected: Mapping[tuple[int, ...], float]) -> float:
    """Return the Kullback-Leibler divergence of `got` from `expected` in nats: what one sequence tells, on average.

    Infinite where something impossible may come out.
    """
    total = 0.0
    for cell, probability in got.items():
        if probability > 0:
            reference = expected.get(cell, 0.0)
            if reference == 0:
                return math.inf
            total += probability * math.log(probability / reference)
    return max(total, 0.0)


def divergences(
    target: Model[Any], draft: Model[Any], names: Sequence[str], *, prompt: tuple[int, ...] = (1,), length: int = 3
) -> dict[str, float]:
    """Return how far the law of the tokens is from the target's under each planted fault; a crash is infinitely far."""
    law = sequence_law(Scores(target).law(), prompt, length)
    expected = {cell: float(law[cell]) for cell in itertools.product(range(target.vocab_size), repeat=length)}
    found = {}
    for name in names:
        engine: Engine = FAULTS[name].planted()

        def make(source: RandomSource, engine: Engine = engine) -> Any:
            return engine.decoder(target, draft, randomness=source)

        try:
            (got,) = enumerate_laws(make, [Scenario(prompt, length)], schedule=(2, 0))
            found[name] = divergence(got.tokens, expected)
        except CRASHES:
            found[name] = math.inf
    return found


def best_three(
    tables: Mapping[Candidate, Mapping[str, float]],
) -> tuple[tuple[Candidate, Candidate, Candidate], dict[str, float]]:
    """Return the best two candidates with three ids and one with four, and what the best pair shows of each fault.

    Faults that no candidate shows to samples (those that change only the number of rounds, or probabilities by 1/256)
    are for T1 to kill, and are not counted.
    """
    first_table = next(iter(tables.values()))
    names = [name for name in first_table if any(table.get(name, 0.0) >= _LEAST for table in tables.values())]
    three = [one for one in tables if one.vocab_size == 3]
    four = [one for one in tables if one.vocab_size == 4]
    best: tuple[float, tuple[Candidate, Candidate, Candidate], dict[str, float]] | None = None
    for first, second in itertools.combinations(three, 2):
        for third in four:
            chosen = (first, second, third)
            shown = {name: max(tables[one].get(name, 0.0) for one in chosen) for name in names}
            worst = min(shown.values())
            if best is None or worst > best[0]:
                best = worst, chosen, shown
    if best is None:
        raise ValueError("`tables` must have two candidates with three ids and one with four")
    return best[1], best[2]


def _candidates(number: int, seed: int) -> Iterator[Candidate]:
    for index in range(number):
        yield Candidate(3 + (index % 3 == 2), seed + 2 * index, (0.8, 1.2, 1.6)[index // 3 % 3])


def _measured(candidate: Candidate, names: Sequence[str], floor: float) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory(prefix="specsampling-search-") as folder:
        paths = candidate.write(Path(folder))
        target, draft = (ReferenceModel(path, "float64") for path in paths)
        table = divergences(target, draft, _HARD)
        if min(table.values()) < floor:
            return None
        return table | divergences(target, draft, [name for name in names if name not in table])


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print what was found, and with ``--write`` replace the frozen pairs."""
    parser = argparse.ArgumentParser(prog="python -m specsampling_conformance._search", description=__doc__)
    parser.add_argument("--candidates", type=int, default=36, help="random pairs to look at")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the first one's weights")
    parser.add_argument(
        "--floor", type=float, default=2e-4, help="a pair on which a hard fault diverges less is passed over"
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write three_a, three_b and four here")
    arguments = parser.parse_args(argv)
    names = [fault.name for fault in FAULTS.values() if fault.kind in ("engine", "drafter") and fault.tier == "T1"]
    tables: dict[Candidate, dict[str, float]] = {}
    for candidate in tqdm(list(_candidates(arguments.candidates, arguments.seed)), unit="pair"):
        table = _measured(candidate, names, arguments.floor)
        if table is None:
            continue
        tables[candidate] = table
        # What one pair does not show at all (a fault of top-p, of end tokens) no pair shows.
        names = [name for name in names if table[name] > 0]
    chosen, shown = best_three(tables)
    sys.stdout.write(f"{len(tables)} of {arguments.candidates} pairs passed the floor\n")
    for name, value in sorted(shown.items(), key=lambda item: item[1]):
        sys.stdout.write(f"{value:10.3g}  {name}\n")
    for name, candidate in zip(("three_a", "three_b", "four"), chosen, strict=True):
        sys.stdout.write(f"{name}: {candidate}\n")
        if arguments.write:
            shutil.rmtree(arguments.write / name, ignore_errors=True)
            candidate.write(arguments.write / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
