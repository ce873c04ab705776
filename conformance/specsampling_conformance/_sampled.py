"""T2: are the random streams right? Importing this module registers the clauses.

Real streams through the real `generate`, in batches of thousands of rows, and an anytime-valid test of the counts of
whole sequences: it looks after every batch and stops at the first rejection. T1 has shown that the law is right for
ideal randomness; what is left to see here is what real uniforms do to it, and whether rows share any.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling import CounterSource, PromptLookup, Sampling, UniformRandomness, generate
from specsampling_conformance._cast import Cast, cast
from specsampling_conformance._certify import certified_tv, certify
from specsampling_conformance._checks import EXACT, CheckFailure, Measured, Subject, check
from specsampling_conformance._diagnosis import best_fitting_stream, with_diagnosis
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._evalue import (
    ALPHA,
    EProcess,
    log_sum_exp,
    neighbour_counts,
    neighbour_law,
    sequence_counts,
)
from specsampling_conformance._faults import Fault
from specsampling_conformance._oracle import sequence_law

__all__ = [
    "BATCH_SIZE",
    "SAMPLED",
    "Sample",
    "SampledSetting",
    "counts_under",
    "draw",
    "law_of",
    "sample",
    "setting_for",
]

BATCH_SIZE = 4096
_MOST_SMALL = 512
"""Sequences drawn from an adapter whose batches are small: each row costs a run of its own."""

_SMALL_BATCH = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledSetting:
    """What is sampled.

    Attributes
    ----------
    claim : str
        The clause: when the samples follow the law.
    pair : str
        The frozen pair.
    drafter : str
        ``"draft"``, ``"target"`` or ``"lookup"``.
    prompt : tuple of int
        Prompt of every row.
    length : int
        Tokens a row.
    lookahead : int
        K.
    temperature : float
        Sharp laws have small probabilities, which coarse uniforms cannot give.
    most : float or None
        What the likeliest sequence is to have, about: the temperature of a model with weights of its own follows from
        it. That of the frozen pair would leave a sharper model a single sequence.
    leading : bool
        Whether it is sampled in a run's leading dtypes only; see `Subject.leads`.
    """

    claim: str
    pair: str
    drafter: str = "draft"
    prompt: tuple[int, ...] = (1,)
    length: int = 4
    lookahead: int = 2
    temperature: float = 1.0
    most: float | None = None
    leading: bool = True


SAMPLED = {
    "model_draft": SampledSetting(claim="with a draft model", pair="three_a", leading=False),
    "second_pair": SampledSetting(claim="with another draft model and a longer lookahead", pair="three_b", lookahead=3),
    "sharp": SampledSetting(
        claim="where some probabilities are small", pair="four", length=3, temperature=0.2, most=0.9, prompt=(0,)
    ),
    "prompt_lookup": SampledSetting(
        claim="with prompt lookup", pair="three_b", drafter="lookup", prompt=(0, 2, 0, 1, 0)
    ),
}
"""Every sampled setting by the last part of its check's id."""


class Sample(NamedTuple):
    """What was drawn, and the tests of it.

    Attributes
    ----------
    process : EProcess
        The test of whole sequences.
    neighbours : EProcess
        The test of the first two tokens of neighbouring rows.
    num_cells : int
        Sequences of positive probability.
    accepted : list of float
        Fraction of tested tokens that were accepted, by slot.
    seed : int
        Seed of the first batch; each later batch has the next.
    """

    process: EProcess
    neighbours: EProcess
    num_cells: int
    accepted: list[float]
    seed: int


def law_of(subject: Subject, setting: SampledSetting, models: Cast) -> NDArray[np.float64]:
    """Return the law of the sequences: from one-token scores, or enumerated where the dtype is too coarse for that."""
    if subject.dtype in EXACT:
        return sequence_law(
            models.scores["target"].law(temperature=setting.temperature), setting.prompt, setting.length
        )
    (enumerated,) = enumerate_laws(
        lambda source: subject.engine.decoder(
            models.target,
            _drafter(setting, models),
            sampling=Sampling(temperature=setting.temperature),
            randomness=source,
        ),
        [Scenario(setting.prompt, setting.length)],
        schedule=(setting.lookahead,),
        batch_size=_batch_size(subject, 192),
    )
    law = np.zeros((models.target.vocab_size,) * setting.length)
    for tokens, probability in enumerated.tokens.items():
        law[tokens] = probability
    return law


def setting_for(subject: Subject, name: str) -> SampledSetting:
    """Return what is sampled under a name: in dtypes whose law has to be enumerated, texts of three tokens at most.

    Paths grow tenfold with every token, and streams, which are what is tested here, are of the same uniforms. A model
    with weights of its own is as sharp as it is; the temperature makes up for it.
    """
    setting = SAMPLED[name]
    models = cast(subject, setting.pair)
    if setting.most is not None and not models.hosted:
        fitted = subject.once(("temperature", name), lambda: _fitted_temperature(setting, models))
        setting = dataclasses.replace(setting, temperature=fitted)
    return setting if subject.dtype in EXACT else dataclasses.replace(setting, length=min(setting.length, 3))


def _fitted_temperature(setting: SampledSetting, models: Cast) -> float:
    """Return the temperature at which the likeliest sequence has about as much as `most` says, to two digits.

    No lower than 0.05, where rounding of the logits would begin to count.
    """
    scores, (low, high) = models.scores["target"], (0.05, 20.0)
    for _ in range(12):
        middle = math.sqrt(low * high)
        law = sequence_law(scores.law(temperature=middle), setting.prompt, setting.length)
        low, high = (middle, high) if float(law.max()) > (setting.most or 0.0) else (low, middle)
    return float(f"{low:.2g}")


def sample(subject: Subject, name: str) -> Sample:
    """Draw until the total variation that the effort asks for is certified, or the test rejects; drawn once."""
    return subject.once(("sampled", name, subject.seed, subject.effort.tv), lambda: _sample(subject, name))


def _sample(subject: Subject, name: str) -> Sample:
    setting = setting_for(subject, name)
    models = cast(subject, setting.pair)
    if setting.leading:
        subject.check_leads(models.target)
    law = law_of(subject, setting, models)
    process = EProcess(law)
    # Two tokens of each row, taken as one of V * V ids: the second shows what the first row's last uniform has done.
    two = law.sum(axis=tuple(range(2, law.ndim))).reshape(-1)
    neighbours = EProcess(neighbour_law(two))
    num_cells = int(np.count_nonzero(law))
    batch_size = _batch_size(subject, BATCH_SIZE)
    wanted = certify(num_cells, subject.effort.tv) if batch_size >= _SMALL_BATCH else _MOST_SMALL
    seed = subject.check_seed(f"T2.sequences.{name}")
    accepted, tested = np.zeros(setting.lookahead), np.zeros(setting.lookahead)
    number = 0
    while process.num_samples < wanted and not process.rejected:
        tokens, stats = draw(subject, setting, models, batch_size, seed + number)
        process.update_sequences(tokens)
        if batch_size > 1:
            vocab_size = models.target.vocab_size
            neighbours.update(neighbour_counts(tokens[:, 0] * vocab_size + tokens[:, 1], vocab_size**2))
        accepted += _padded(stats.accepted_per_slot, setting.lookahead)
        tested += _padded(stats.tested_per_slot, setting.lookahead)
        number += 1
    rates = (accepted / np.maximum(tested, 1)).tolist()
    return Sample(process, neighbours, num_cells, rates, seed)


def draw(
    subject: Subject, setting: SampledSetting, models: Cast, batch_size: int, seed: int
) -> tuple[NDArray[np.int64], Any]:
    """Return one batch of sequences ``(B, L)`` and the run's stats."""
    result = subject.engine.generate(
        models.target,
        _drafter(setting, models),
        [list(setting.prompt)] * batch_size,
        max_new_tokens=setting.length,
        lookahead=setting.lookahead,
        sampling=Sampling(temperature=setting.temperature),
        seed=seed,
    )
    return np.array(result.tokens, dtype=np.int64), result.stats


def _drafter(setting: SampledSetting, models: Cast) -> Any:
    return PromptLookup() if setting.drafter == "lookup" else getattr(models, setting.drafter)


def _batch_size(subject: Subject, wanted: int) -> int:
    capabilities = subject.capabilities
    return min(wanted, capabilities.max_batch_size or wanted) if capabilities.per_row_rollback else 1


def _padded(counts: Any, length: int) -> NDArray[np.float64]:
    return np.array([*counts, *[0] * length][:length], dtype=np.float64)


def _tested(process: EProcess, what: str, num_cells: int, values: dict[str, Any]) -> Measured:
    path = [[look.num_samples, look.log_e] for look in process.looks]
    if process.rejected:
        raise _failure(process, what)
    certified = certified_tv(num_cells, process.num_samples) if num_cells > 1 else None
    plot = {"e_path": path, "threshold": process.threshold, **values.pop("plot", {})}
    return Measured(ln_e=process.log_e, n=process.num_samples, certified_tv=certified, values={**values, "plot": plot})


def _failure(process: EProcess, what: str) -> CheckFailure:
    return CheckFailure(
        f"{what}: ln E = {process.log_e:.1f} after {process.num_samples} samples",
        expected=f"ln E below ln(1 / {ALPHA:g}) = {process.threshold:.1f}",
        worst=_worst(process),
    )


def counts_under(subject: Subject, name: str, fault: Fault) -> NDArray[np.int64]:
    """Return the counts of a sample that is drawn under a planted fault of the streams."""
    setting = setting_for(subject, name)
    models = cast(subject, setting.pair)
    faulty = dataclasses.replace(subject, engine=fault.planted())
    seed = subject.check_seed(f"diagnosis.{name}")
    shape = (models.target.vocab_size,) * setting.length
    batch_size = _batch_size(subject, BATCH_SIZE)
    return sum(
        (sequence_counts(draw(faulty, setting, models, batch_size, seed + step)[0], shape) for step in range(3)),
        np.zeros(shape, dtype=np.int64),
    )


def _worst(process: EProcess) -> list[str]:
    if process.impossible:
        return [f"{' '.join(map(str, cell))}: probability 0, and was drawn" for cell in process.impossible[:5]]
    expected = process.law * process.num_samples
    score = (process.counts - expected) / np.sqrt(np.maximum(expected, 1e-300))
    order = np.argsort(-np.abs(score), axis=None)[:5]
    cells = [np.unravel_index(int(index), score.shape) for index in order]
    return [f"{' '.join(str(int(i)) for i in c)}: expected {expected[c]:.0f}, got {process.counts[c]}" for c in cells]


_NEIGHBOURS = ("model_draft", "second_pair")
"""What the rows of are held against each other."""


def _group(name: str) -> str:
    return "T2.neighbours" if name in _NEIGHBOURS else f"T2.{name}"


def _sequences_check(name: str, setting: SampledSetting) -> None:
    @check(
        f"T2.sequences.{name}",
        f"Sequences drawn from fresh seeds follow the exact joint law {setting.claim}; the test may stop after any"
        " batch and is wrong with probability at most 2e-8.",
        group=_group(name),
    )
    def run(subject: Subject) -> Measured:
        drawn = sample(subject, name)
        plot = {"acceptance_per_slot": drawn.accepted, "exact_law": _bars(drawn.process)}
        if drawn.process.rejected and subject.effort.shrink:
            failure = _failure(drawn.process, "sequences")
            counts = drawn.process.counts
            raise with_diagnosis(
                failure,
                best_fitting_stream(counts, drawn.process.law, lambda fault: counts_under(subject, name, fault)),
            )
        return _tested(drawn.process, "sequences", drawn.num_cells, {"plot": plot, "seed": drawn.seed})


def _bars(process: EProcess) -> list[list[Any]]:
    order = np.argsort(-process.law, axis=None)[:27]
    cells = [np.unravel_index(int(index), process.law.shape) for index in order]
    total = max(process.num_samples, 1)
    return [[" ".join(str(int(i)) for i in c), float(process.law[c]), float(process.counts[c] / total)] for c in cells]


for _name, _setting in SAMPLED.items():
    _sequences_check(_name, _setting)


@check(
    "T2.rows.neighbours",
    "The first two tokens of neighbouring rows are independent of each other: rows share no uniforms.",
    requires=("rows", "per_row_rollback"),
    group="T2.neighbours",
)
def _neighbours(subject: Subject) -> Measured:
    leads = subject.leads(cast(subject, SAMPLED[_NEIGHBOURS[0]].pair).target)
    names = [name for name in _NEIGHBOURS if leads or not SAMPLED[name].leading]
    tests = [sample(subject, name).neighbours for name in names]
    # The mean of two e-values is an e-value.
    log_e = float(log_sum_exp(np.array([test.log_e for test in tests]), axis=0)) - math.log(len(tests))
    if log_e >= tests[0].threshold:
        worst = max(tests, key=lambda test: test.log_e)
        raise CheckFailure(
            f"first tokens of two rows: ln E = {log_e:.1f} after {sum(test.num_samples for test in tests)} samples",
            expected=f"ln E below {worst.threshold:.1f}",
            worst=_worst(worst),
        )
    pairs = sum(test.num_samples for test in tests)
    return Measured(ln_e=log_e, n=pairs, values={"plot": {"threshold": tests[0].threshold}})


@check("T2.streams.seeds", "A seed repeats its tokens, and another seed gives others.", group=_group("model_draft"))
def _seeds(subject: Subject) -> Measured:
    setting = SAMPLED["model_draft"]
    models = cast(subject, setting.pair)
    batch_size = _batch_size(subject, BATCH_SIZE if subject.spares(models.target) else 256)
    repeats = max(1, 16 // batch_size)
    seed = subject.check_seed("T2.streams.seeds")
    runs = [
        np.concatenate([draw(subject, setting, models, batch_size, start + step)[0] for step in range(repeats)])
        for start in (seed, seed, seed + 1000)
    ]
    if not np.array_equal(runs[0], runs[1]):
        raise CheckFailure("the same seed gave other tokens the second time", expected="the same tokens")
    # At least 16 sequences: that all of them agree by chance has a probability far below any that T2 allows for.
    if np.array_equal(runs[0], runs[2]):
        raise CheckFailure("another seed gave the same tokens", expected="other tokens")
    return Measured(n=runs[0].shape[0])


class _Bent(CounterSource):
    """Streams whose uniforms are too small: what the control draws from."""

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> UniformRandomness:
        good = super().begin_round(row_ids, rounds, lookahead)
        return UniformRandomness(good.uniforms**1.5, lookahead)


@check(
    "T2.control.biased_stream",
    "The test can say no: sequences drawn from streams that were bent on purpose are rejected.",
    group=_group("model_draft"),
)
def _control(subject: Subject) -> Measured:
    setting = setting_for(subject, "model_draft")
    models = cast(subject, setting.pair)
    law = law_of(subject, setting, models)
    process = EProcess(law)
    batch_size = _batch_size(subject, BATCH_SIZE)
    seed = subject.check_seed("T2.control.biased_stream")
    while process.num_samples < 5 * BATCH_SIZE and not process.rejected:
        result = generate(
            models.target,
            _drafter(setting, models),
            [list(setting.prompt)] * batch_size,
            max_new_tokens=setting.length,
            lookahead=setting.lookahead,
            randomness=_Bent(seed + process.num_samples),
        )
        process.update(sequence_counts(np.array(result.tokens), law.shape))
    if not process.rejected:
        raise CheckFailure(
            f"biased samples were not rejected: ln E = {process.log_e:.1f} after {process.num_samples}",
            expected=f"ln E above {process.threshold:.1f}",
        )
    return Measured(n=process.num_samples, values={"control_ln_e": process.log_e})
