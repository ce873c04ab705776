"""T3: do real models, mixed backends and replayed uniforms agree? Importing this module registers the clauses."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling import CounterSource, Model, PromptLookup, Sampling, bundled
from specsampling_conformance._cast import PAIRS, is_hosted
from specsampling_conformance._checks import EXACT, CheckFailure, Measured, NotApplicable, Subject, check
from specsampling_conformance._greedy import compare_greedy
from specsampling_conformance._host import host_copy
from specsampling_conformance._oracle import block_logits, padded_length
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._replays import BlockScores, Players, hold, rounding_for, run_rounds
from specsampling_conformance._trial import tolerance_for

__all__: list[str] = []

_GROUP = "T3"
"""All of them share models, and what is compiled for them."""

_STRANGERS = 1_000
"""Id of the first row that is there for company."""

_PROMPT = b"ROMEO:\nWhat light through yonder"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Real weights in the adapter, and the same in the suite's own model.

    Attributes
    ----------
    target, draft : Model
        The adapter's.
    own_target, own_draft : Model
        The suite's, in the same dtype or float32.
    scores : mapping of str to BlockScores
        By the names above, what each model's decisions are replayed from: the suite's own models in float64. In narrow
        dtypes the adapter's own scores for its own models, because logits a tenth apart decide nothing.
    delta : float
        Largest difference of logits, adapter against suite.
    spread : float
        Largest difference of logits from `scores`, in narrow dtypes.
    scale : float
        Largest logit, at least 1.
    prompts : list of list of int
        Prompts of different lengths.
    """

    target: Model[Any]
    draft: Model[Any]
    own_target: Model[Any]
    own_draft: Model[Any]
    scores: Mapping[str, BlockScores]
    delta: float
    spread: float
    scale: float
    prompts: list[list[int]]


def _stage(subject: Subject, name: str) -> _Stage:
    """Return the stage of a frozen pair, or of the bundled pair under the name ``"bundled"``."""
    if not is_hosted(subject):
        raise NotApplicable("the adapter hosts no foreign weights, so there is nothing to compare it with")
    return subject.once(("stage", name), lambda: _make_stage(subject, name))


def _make_stage(subject: Subject, name: str) -> _Stage:
    paths: tuple[Path, Path]
    if name == "bundled":
        paths = bundled("target"), bundled("draft")
        prompts = [list(_PROMPT), list(_PROMPT[:7]), list(_PROMPT[3:4]), list(_PROMPT[::-1])]
    else:
        paths = PAIRS[name].target, PAIRS[name].draft
        size = PAIRS[name].vocab_size
        prompts = [[row % size, (row * row + 1) % size, row // 2 % size][: 1 + row % 3] for row in range(16)]
    target, draft = (subject.model(path) for path in paths)
    own_dtype = "float64" if subject.dtype == "float64" else "float32"
    own = [ReferenceModel(path, own_dtype) for path in paths]
    reference_scores = [_reference_scores(subject, path) for path in paths]
    scores = dict(zip(("own_target", "own_draft"), reference_scores, strict=True))
    if subject.dtype in EXACT:
        scores |= {"target": scores["own_target"], "draft": scores["own_draft"]}
    else:
        scores |= {"target": BlockScores(target), "draft": BlockScores(draft)}
    delta, scale, spread = 0.0, 1.0, 0.0
    for role, model, reference in (("target", target, reference_scores[0]), ("draft", draft, reference_scores[1])):
        for prompt in prompts[:4]:
            expected = np.stack([reference.logits(tuple(prompt[: end + 1])) for end in range(len(prompt))])
            delta = max(delta, float(np.max(np.abs(block_logits(model, prompt) - expected))))
            scale = max(scale, float(np.max(np.abs(expected))))
            if subject.dtype not in EXACT:
                spread = max(spread, _spread(model, scores[role], prompt))
    return _Stage(
        target=target,
        draft=draft,
        own_target=own[0],
        own_draft=own[1],
        scores=scores,
        delta=delta,
        spread=spread,
        scale=scale,
        prompts=prompts,
    )


def _spread(model: Model[Any], scores: BlockScores, prompt: list[int]) -> float:
    """Return how far the logits of single steps are from those of a block."""
    cache, steps = model.init_cache(1, padded_length(len(prompt))), []
    for token in prompt:
        logits, cache = model.score(cache, np.array([[token]], dtype=np.int32))
        steps.append(host_copy(logits)[0, 0])
    block = np.stack([scores.logits(tuple(prompt[: end + 1])) for end in range(len(prompt))])
    return float(np.max(np.abs(np.stack(steps) - block)))


def _reference_scores(subject: Subject, path: Path) -> BlockScores:
    def score() -> BlockScores:
        return BlockScores(ReferenceModel(path, "float64"))

    return subject.once(("reference", path), score, for_all_dtypes=True)


def _bundled_pair(subject: Subject) -> tuple[str, ...]:
    """Return the stage of the bundled pair, or none: its layers take long to compile, in one dtype after another."""
    model = subject.model(PAIRS["four"].target)
    return () if subject.spares(model) and not subject.leads(model) else ("bundled",)


def _rows(subject: Subject, prompts: list[list[int]]) -> list[list[int]]:
    capabilities = subject.capabilities
    return prompts[: capabilities.max_batch_size or len(prompts)] if capabilities.per_row_rollback else prompts[:1]


def _delta(subject: Subject, stage: _Stage) -> float:
    """Return the difference that is put down to rounding: as measured, with room for other texts, up to the cap."""
    found = stage.delta if subject.dtype in EXACT else stage.spread
    return min(4 * found, tolerance_for(subject.dtype) * stage.scale)


def _held(subject: Subject, *arguments: Any, **options: Any) -> Measured:
    """Hold rounds against their replay; in narrow dtypes rounding may leave nothing to judge, which is no one's fault.

    How far apart a block's logits and those of single steps may be is the matter of T0, which caps it.
    """
    if subject.dtype in EXACT:
        return hold(*arguments, **options)
    held = hold(*arguments, **options, most_unsure=1.0)
    unsure, rounds = held.values["at_a_boundary"], held.values["rounds"]
    if 2 * unsure > rounds:
        raise NotApplicable(
            f"in {unsure} of {rounds} rounds a uniform is nearer to a boundary than rounding: a block's logits and"
            f" those of single steps are {held.values['delta']:.2g} apart"
        )
    return held


@check(
    "T3.logits.reference",
    "A checkpoint's logits are those of the reference, to the cap of the dtype: the frozen pairs and the bundled pair.",
    group=_GROUP,
)
def _logits(subject: Subject) -> Measured:
    worst, allowed = 0.0, tolerance_for(subject.dtype)
    for name in (*PAIRS, *_bundled_pair(subject)):
        stage = _stage(subject, name)
        worst = max(worst, stage.delta / stage.scale)
        if not stage.delta <= allowed * stage.scale:
            raise CheckFailure(
                f"{name}: logits differ by {stage.delta:.3g} from the reference's, whose largest is {stage.scale:.3g}",
                expected=f"at most {allowed:g} of the largest",
            )
    return Measured(tolerance=allowed, values={"delta": worst})


class _Run(NamedTuple):
    """What is run: a stage by its name, who plays, K of each round, and the temperature of the rows that are held."""

    stage: str
    target: str
    drafter: str
    schedule: tuple[int, ...]
    temperature: float = 1.0


_RUNS = {
    "pair": _Run("four", "target", "draft", (3, 0, 2)),
    "tempered": _Run("three_a", "target", "draft", (2, 1), 0.7),
    "bundled": _Run("bundled", "target", "draft", (4, 2)),
    "prompt_lookup": _Run("bundled", "target", "lookup", (3,)),
    "reference_draft": _Run("bundled", "target", "own_draft", (3, 0)),
    "reference_target": _Run("bundled", "own_target", "draft", (3, 0)),
}
_FEW_RUNS = {
    "pair": _Run("four", "target", "draft", (3, 0)),
    "tempered": _Run("four", "target", "draft", (3, 0), 0.7),
    "bundled": _Run("bundled", "target", "draft", (4,)),
    "prompt_lookup": _Run("four", "target", "lookup", (3,)),
    "reference_draft": _Run("four", "target", "own_draft", (3,)),
    "reference_target": _Run("four", "own_target", "draft", (3,)),
}
"""Where shapes are to be few: what is fed from elsewhere runs on a frozen pair, and the bundled pair at one K."""

_CLAIMS = {
    "pair": "on a frozen pair",
    "tempered": "at a temperature of its own",
    "bundled": "on the bundled pair",
    "prompt_lookup": "with prompt lookup",
    "reference_draft": "with the reference's model as the draft",
    "reference_target": "as the draft of the reference's target",
}

_MIXED = (1.0, 0.7)
"""Temperatures of a mixed batch: all prompts at each, and two greedy rows."""


class _Batch(NamedTuple):
    """The rows of a run, and the first of those that a check is about.

    Where a model is compiled anew for every shape and setting, the checks of a stage have one batch in common, in which
    rows of every temperature keep each other company.
    """

    prompts: list[list[int]]
    sampling: Sampling
    start: int
    num_rows: int


def _is_mixed(subject: Subject, stage: _Stage) -> bool:
    whole = len(_rows(subject, stage.prompts)) == len(stage.prompts)
    fits = len(_MIXED) * len(stage.prompts) + 2 <= (subject.capabilities.max_batch_size or math.inf)
    return whole and fits and subject.spares(stage.target, stage.draft)


def _batch(subject: Subject, stage: _Stage, temperature: float) -> _Batch:
    prompts = _rows(subject, stage.prompts)
    if not _is_mixed(subject, stage):
        prompts = prompts[:2] if temperature == 0 else prompts
        return _Batch(prompts, Sampling(temperature=temperature), 0, len(prompts))
    temperatures = [one for one in _MIXED for _ in prompts] + [0.0] * 2
    rows = [*prompts * len(_MIXED), *prompts[:2]]
    return _Batch(
        rows, Sampling(temperature=temperatures), temperatures.index(temperature), temperatures.count(temperature)
    )


def _replay_check(name: str) -> None:
    @check(
        f"T3.replay.{name}",
        "Every token follows from the seed's uniforms and the reference's logits, decision by decision,"
        f" {_CLAIMS[name]}; one that differs counts only where its uniform is farther from the boundary than rounding.",
        group=_GROUP,
    )
    def run(subject: Subject) -> Measured:
        # In narrow dtypes of a run's later ones, too: there rounding leaves little to judge on the bundled pair.
        few = subject.spares(subject.model(PAIRS["four"].target)) or not subject.leads(None)
        played = (_FEW_RUNS if few else _RUNS)[name]
        if played.stage == "bundled" and is_hosted(subject) and not _bundled_pair(subject):
            subject.check_leads(subject.model(PAIRS["four"].target))
        stage = _stage(subject, played.stage)
        batch = _batch(subject, stage, played.temperature)
        source = CounterSource(subject.check_seed(f"T3.replay.{name}"))
        settings: dict[str, Any] = {"temperature": played.temperature}
        is_lookup = played.drafter == "lookup"
        players = Players(
            getattr(stage, played.target),
            PromptLookup() if is_lookup else getattr(stage, played.drafter),
            stage.scores[played.target].law(**settings),
            "lookup" if is_lookup else stage.scores[played.drafter].law(**settings),
        )
        rounds = run_rounds(
            subject,
            players.target,
            players.drafter,
            batch.prompts,
            max_new_tokens=16,
            schedule=played.schedule,
            source=source,
            sampling=batch.sampling,
        )
        held = [one for one in rounds if batch.start <= one.row < batch.start + batch.num_rows]
        rounding = rounding_for(subject.dtype, _delta(subject, stage) / played.temperature)
        return _held(subject, held, players, source, rounding)


for _name in _RUNS:
    _replay_check(_name)


@check(
    "T3.rows.company",
    "A row's tokens depend on its seed, id and prompt, and not on which rows it is batched with or in what order.",
    requires=("rows", "per_row_rollback"),
    group=_GROUP,
)
def _company(subject: Subject) -> Measured:
    stage = _stage(subject, "four")
    source = CounterSource(subject.check_seed("T3.rows.company"))
    players = Players(stage.target, stage.draft, stage.scores["target"].law(), stage.scores["draft"].law())
    rounding = rounding_for(subject.dtype, _delta(subject, stage))
    batch = _batch(subject, stage, 1.0)
    prompts = batch.prompts[:6]
    last = len(prompts) - 1
    orders = [list(range(len(prompts))), list(range(len(prompts)))[::-1], [last]]
    is_mixed = _is_mixed(subject, stage)
    texts: list[dict[int, list[int]]] = []
    tokens = 0
    for order in orders:
        # Strangers make up the batch where it is always as large; each row has others of them beside it.
        strangers = batch.prompts[len(order) :] if is_mixed else []
        row_ids = [*order, *range(_STRANGERS, _STRANGERS + len(strangers))]
        rounds = run_rounds(
            subject,
            stage.target,
            stage.draft,
            [*(prompts[row] for row in order), *strangers],
            max_new_tokens=10,
            schedule=(3, 0) if is_mixed else (3, 1),
            source=source,
            row_ids=row_ids,
            sampling=batch.sampling,
        )
        rounds = [one for one in rounds if one.row < len(order)]
        texts.append({row: [] for row in order})
        for one in rounds:
            texts[-1][order[one.row]] += one.tokens
        tokens += _held(subject, rounds, players, source, rounding, row_ids=order).n or 0
    differing = sum(texts[0][row] != run[row] for run in texts[1:] for row in run)
    return Measured(n=tokens, values={"rows_with_numeric_ties": differing})


@check(
    "T3.greedy.text",
    "At temperature 0 the text is the model's greedy text whatever the lookahead, or differs from it in numeric ties"
    " only: a frozen pair at K = 0, 1, 2, 3, 4 and 8 (0 and 3 where a round is compiled for each, but for the nightly"
    " tier), and the bundled pair at K = 4.",
    group=_GROUP,
)
def _greedy(subject: Subject) -> Measured:
    ties = tokens = 0
    largest = 0.0
    # A compiled round is compiled for every lookahead, which takes long where layers are many.
    few = _is_mixed(subject, _stage(subject, "four"))
    lookaheads = (0, 3) if few else (0, 1, 2, 3, 4, 8)
    for name, lookahead in (
        *(("four", lookahead) for lookahead in lookaheads),
        *((one, 4) for one in _bundled_pair(subject)),
    ):
        stage = _stage(subject, name)
        batch = _batch(subject, stage, 0.0)
        rounds = run_rounds(
            subject,
            stage.target,
            stage.draft,
            batch.prompts,
            max_new_tokens=12,
            schedule=(lookahead,),
            source=CounterSource(0),
            sampling=batch.sampling,
        )
        for row in range(batch.start, batch.start + batch.num_rows):
            text = [token for one in rounds if one.row == row for token in one.tokens]
            found = compare_greedy(stage.target, batch.prompts[row], text)
            tokens, largest = tokens + len(text), max(largest, found.delta)
            if found.verdict == "bug":
                raise CheckFailure(
                    f"{name}, K = {lookahead}, row {row}: {found}", expected="the likeliest token each time"
                )
            ties += found.verdict == "numeric tie"
    return Measured(n=tokens, values={"texts_with_numeric_ties": ties, "delta": largest})
