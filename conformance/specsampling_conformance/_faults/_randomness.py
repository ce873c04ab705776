"""Faults of the random streams: every row's own enumerated law stays exact, so only samples can show them."""
# ruff: noqa: ARG002 - a fault overrides one method, and ignores what the right one looks at

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsampling import CounterSource, Drafter, Generation, Model, RandomSource, UniformRandomness, generate
from specsampling_conformance._engine import Engine
from specsampling_conformance._faults._registry import Fault, plant

__all__ = ["FaultySource", "SourceEngine", "source_fault"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class FaultySource(RandomSource):
    """A counter source whose rows, rounds or uniforms are changed; as it stands it is right.

    Parameters
    ----------
    seed : int
        The seed.
    """

    def __init__(self, seed: int) -> None:
        self._source = CounterSource(seed)

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> UniformRandomness:
        """Return the round's uniforms, changed."""
        row_ids, rounds = np.asarray(row_ids, dtype=np.int64), np.asarray(rounds, dtype=np.int64)
        good = self._source.begin_round(self.row_ids(row_ids), self.rounds(rounds), lookahead)
        changed = self.uniforms(np.array(good.uniforms), lookahead)
        tiny = 2.0**-53
        return UniformRandomness(np.clip(changed, tiny, 1 - tiny), lookahead)

    def row_ids(self, row_ids: Ints) -> Ints:
        """Return the ids that the rows are drawn under."""
        return row_ids

    def rounds(self, rounds: Ints) -> Ints:
        """Return the rounds that are drawn."""
        return rounds

    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        """Return the uniforms ``(B, 2 K + 1, 3)``: DRAFT slots, ACCEPT slots, RESAMPLE."""
        return uniforms


class SourceEngine(Engine):
    """The library with another source of randomness.

    Parameters
    ----------
    make_source : callable
        Returns the source of a seed.
    """

    def __init__(self, make_source: Callable[[int], RandomSource]) -> None:
        self.make_source = make_source

    def source(self, seed: int) -> RandomSource:
        """Return the source."""
        return self.make_source(seed)

    def generate(
        self, target: Model[Any], drafter: Model[Any] | Drafter[Any] | None, prompts: Any, *, seed: int, **options: Any
    ) -> Generation:
        """Return what `generate` returns with the source in place of the seed's."""
        return generate(target, drafter, prompts, randomness=self.source(seed), **options)


def source_fault(
    name: str, description: str, kind: str = "randomness"
) -> Callable[[type[FaultySource]], type[FaultySource]]:
    """Register a subclass of `FaultySource` as a fault that T2 must kill."""

    def register(source: type[FaultySource]) -> type[FaultySource]:
        plant(Fault(name=name, description=description, tier="T2", kind=kind, planted=lambda: SourceEngine(source)))
        return source

    return register


@source_fault("plain source", "The source that the faults are made of, as it stands.", "control")
class _Right(FaultySource):
    pass


@source_fault("stream restarted each round", "Every round of a row uses the uniforms of its first.")
class _Restarted(FaultySource):
    def rounds(self, rounds: Ints) -> Ints:
        return np.zeros_like(rounds)


@source_fault("rounds share uniforms in twos", "The lowest bit of the round is lost.")
class _RoundsInTwos(FaultySource):
    def rounds(self, rounds: Ints) -> Ints:
        return rounds // 2


@source_fault("uniforms shared by all rows", "Every row uses the uniforms of row 0.")
class _SharedByAll(FaultySource):
    def row_ids(self, row_ids: Ints) -> Ints:
        return np.zeros_like(row_ids)


@source_fault("uniforms shared by neighbours", "The lowest bit of the row id is lost.")
class _SharedByNeighbours(FaultySource):
    def row_ids(self, row_ids: Ints) -> Ints:
        return row_ids // 2 * 2


@source_fault("row ids cut to 8 bits", "Rows 256 apart use the same uniforms.")
class _EightBitRows(FaultySource):
    def row_ids(self, row_ids: Ints) -> Ints:
        return row_ids % 256


@source_fault("8-bit uniforms", "Uniforms are multiples of 1/256.")
class _EightBits(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        return np.floor(uniforms * 256) / 256


@source_fault("half-precision uniforms", "Uniforms are rounded to bfloat16's 8 bits, those near one to one.")
class _HalfPrecision(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        mantissa, exponent = np.frexp(uniforms)
        return np.ldexp(np.round(mantissa * 256) / 256, exponent)


@source_fault(
    "accept uniform used again for the residual", "The last token is drawn with the first slot's accept uniform."
)
class _AcceptReused(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        if lookahead:
            uniforms[:, 2 * lookahead] = uniforms[:, lookahead]
        return uniforms


@source_fault("draft uniform used again in recovery", "The last token is drawn with the first slot's draft uniform.")
class _DraftReused(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        if lookahead:
            uniforms[:, 2 * lookahead] = uniforms[:, 0]
        return uniforms


@source_fault("draft uniform used again to accept", "A slot's token is drawn and judged with the same uniform.")
class _PurposeIgnored(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        uniforms[:, lookahead : 2 * lookahead] = uniforms[:, :lookahead]
        return uniforms


@source_fault("slots share their accept uniform", "One uniform decides on every slot of a round.")
class _SlotsShared(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        uniforms[:, lookahead : 2 * lookahead] = uniforms[:, lookahead : lookahead + 1]
        return uniforms


@source_fault("slots share their draft uniform", "One uniform draws every token of a block.")
class _DraftsShared(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        uniforms[:, :lookahead] = uniforms[:, :1]
        return uniforms


@source_fault("antithetic slots", "Every second draft uniform is one minus the one before.")
class _Antithetic(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        even = lookahead // 2 * 2
        uniforms[:, 1:even:2] = 1.0 - uniforms[:, 0:even:2]
        return uniforms


@source_fault("uniforms squeezed", "Uniforms lie between 0.02 and 0.98.")
class _Squeezed(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        return 0.02 + 0.96 * uniforms


@source_fault("uniforms bent", "Uniforms are raised to the power 1.1.")
class _Bent(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        bent: Floats = uniforms**1.1
        return bent


@source_fault("overlapping streams", "Every second row begins its drafts with the last uniform of the row before.")
class _Overlapping(FaultySource):
    def uniforms(self, uniforms: Floats, lookahead: int) -> Floats:
        if uniforms.shape[0] > 1:
            uniforms[1::2, 0] = uniforms[0 : uniforms.shape[0] // 2 * 2 : 2, -1]
        return uniforms


@source_fault("seed ignored", "Every seed gives the same streams.")
class _SeedIgnored(FaultySource):
    def __init__(self, seed: int) -> None:
        super().__init__(0)


@source_fault("random but not repeatable", "The streams differ from run to run under one seed.")
class _NotRepeatable(FaultySource):
    runs = 0

    def __init__(self, seed: int) -> None:
        type(self).runs += 1
        super().__init__((seed + type(self).runs) % 2**64)
