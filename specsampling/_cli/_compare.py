"""Time speculative against plain decoding."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from specsampling._results import Generation

__all__ = ["Comparison", "compare"]


class Comparison(NamedTuple):
    """Seconds per emitted token, prompt included, with and without a drafter.

    Attributes
    ----------
    runs : int
        Runs of each kind, taken in turns.
    speculative : float
        Median seconds per token with the drafter.
    plain : float
        Median seconds per token without.
    speedup : float
        Plain over speculative.
    slowest, fastest : float
        Smallest and largest speed-up of any two runs taken one after the other.
    """

    runs: int
    speculative: float
    plain: float
    speedup: float
    slowest: float
    fastest: float

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.speedup:.2f} times plain decoding: {1e3 * self.speculative:.3f} against {1e3 * self.plain:.3f} ms "
            f"a token (medians of {self.runs} interleaved runs; {self.slowest:.2f} to {self.fastest:.2f})"
        )


def compare(
    speculative: Callable[[int], Generation], plain: Callable[[int], Generation], *, seed: int, runs: int
) -> Comparison:
    """Time two ways of generating on the same seeds, in turns, so that a drift of the machine meets both.

    Each seed gives another text, since acceptance varies from text to text. Whatever runs for the first time (caches,
    compilation) is not timed.
    """
    plain(seed)
    seeds = [(seed + run) % 2**64 for run in range(runs)]
    pairs = [(_seconds_per_token(speculative, each), _seconds_per_token(plain, each)) for each in seeds]
    ratios = [without / with_draft for with_draft, without in pairs]
    fast, slow = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Comparison(runs, fast, slow, slow / fast, min(ratios), max(ratios))


def _seconds_per_token(generate: Callable[[int], Generation], seed: int) -> float:
    start = time.perf_counter()
    result = generate(seed)
    return (time.perf_counter() - start) / max(1, result.stats.emitted)
