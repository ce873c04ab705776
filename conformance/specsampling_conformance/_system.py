"""T3: do real models, mixed backends and replayed uniforms agree? Importing this module registers the clauses."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specsampling import CounterSource, Model, PromptLookup, Sampling, bundled
from specsampling_conformance._cast import EXACT, PAIRS, is_hosted
from specsampling_conformance._checks import CheckFailure, Measured, NotApplicable, Subject, check
from specsampling_conformance._greedy import compare_greedy
from specsampling_conformance._host import host_copy
from specsampling_conformance._oracle import block_logits, padded_length
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._replays import BlockScores, Players, hold, rounding_for, run_rounds
from specsampling_conformance._trial import tolerance_for

__all__: list[str] = []

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
        Largest difference of logits from `scores`.
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
    reference_scores = [BlockScores(ReferenceModel(path, "float64")) for path in paths]
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
            cache, steps = model.init_cache(1, padded_length(len(prompt))), []
            for token in prompt:
                logits, cache = model.score(cache, np.array([[token]], dtype=np.int32))
                steps.append(host_copy(logits)[0, 0])
            block = np.stack([scores[role].logits(tuple(prompt[: end + 1])) for end in range(len(prompt))])
            spread = max(spread, float(np.max(np.abs(np.stack(steps) - block))))
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
)
def _logits(subject: Subject) -> Measured:
    worst, allowed = 0.0, tolerance_for(subject.dtype)
    for name in (*PAIRS, "bundled"):
        stage = _stage(subject, name)
        worst = max(worst, stage.delta / stage.scale)
        if not stage.delta <= allowed * stage.scale:
            raise CheckFailure(
                f"{name}: logits differ by {stage.delta:.3g} from the reference's, whose largest is {stage.scale:.3g}",
                expected=f"at most {allowed:g} of the largest",
            )
    return Measured(tolerance=allowed, values={"delta": worst})


_RUNS: dict[str, tuple[str, str, str, tuple[int, ...], dict[str, Any]]] = {
    "pair": ("four", "target", "draft", (3, 0, 2), {}),
    "tempered": ("three_a", "target", "draft", (2, 1), {"temperature": 0.7}),
    "bundled": ("bundled", "target", "draft", (4, 2), {}),
    "prompt_lookup": ("bundled", "target", "lookup", (3,), {}),
    "reference_draft": ("bundled", "target", "own_draft", (3, 0), {}),
    "reference_target": ("bundled", "own_target", "draft", (3, 0), {}),
}
_CLAIMS = {
    "pair": "on a frozen pair",
    "tempered": "at a temperature of its own",
    "bundled": "on the bundled pair",
    "prompt_lookup": "with prompt lookup on the bundled target",
    "reference_draft": "with the reference's model as the draft",
    "reference_target": "as the draft of the reference's target",
}


def _replay_check(name: str) -> None:
    @check(
        f"T3.replay.{name}",
        "Every token follows from the seed's uniforms and the reference's logits, decision by decision,"
        f" {_CLAIMS[name]}; one that differs counts only where its uniform is farther from the boundary than rounding.",
    )
    def run(subject: Subject) -> Measured:
        pair, target, drafter, schedule, settings = _RUNS[name]
        stage = _stage(subject, pair)
        prompts = _rows(subject, stage.prompts)
        source = CounterSource(subject.check_seed(f"T3.replay.{name}"))
        players = Players(
            getattr(stage, target),
            PromptLookup() if drafter == "lookup" else getattr(stage, drafter),
            stage.scores[target].law(**settings),
            "lookup" if drafter == "lookup" else stage.scores[drafter].law(**settings),
        )
        rounds = run_rounds(
            subject,
            players.target,
            players.drafter,
            prompts,
            max_new_tokens=16,
            schedule=schedule,
            source=source,
            sampling=Sampling(**settings),
        )
        rounding = rounding_for(subject.dtype, _delta(subject, stage) / settings.get("temperature", 1.0))
        return _held(subject, rounds, players, source, rounding)


for _name in _RUNS:
    _replay_check(_name)


@check(
    "T3.rows.company",
    "A row's tokens depend on its seed, id and prompt, and not on which rows it is batched with or in what order.",
    requires=("rows", "per_row_rollback"),
)
def _company(subject: Subject) -> Measured:
    stage = _stage(subject, "four")
    source = CounterSource(subject.check_seed("T3.rows.company"))
    players = Players(stage.target, stage.draft, stage.scores["target"].law(), stage.scores["draft"].law())
    rounding = rounding_for(subject.dtype, _delta(subject, stage))
    prompts = _rows(subject, stage.prompts)[:6]
    orders = [list(range(len(prompts))), list(range(len(prompts)))[::-1], [len(prompts) - 1]]
    texts: list[dict[int, list[int]]] = []
    tokens = 0
    for order in orders:
        rounds = run_rounds(
            subject,
            stage.target,
            stage.draft,
            [prompts[row] for row in order],
            max_new_tokens=10,
            schedule=(3, 1),
            source=source,
            row_ids=order,
        )
        texts.append({row: [] for row in order})
        for one in rounds:
            texts[-1][order[one.row]] += one.tokens
        tokens += _held(subject, rounds, players, source, rounding, row_ids=order).n or 0
    differing = sum(texts[0][row] != run[row] for run in texts[1:] for row in run)
    return Measured(n=tokens, values={"rows_with_numeric_ties": differing})


@check(
    "T3.greedy.text",
    "At temperature 0 the text is the model's greedy text for every lookahead, or differs from it in numeric ties"
    " only: a frozen pair, and the bundled pair at K = 4.",
)
def _greedy(subject: Subject) -> Measured:
    ties = tokens = 0
    largest = 0.0
    # A compiled round is compiled for every lookahead, which takes long where layers are many.
    for name, lookahead in (*(("four", lookahead) for lookahead in (0, 1, 2, 3, 4, 8)), ("bundled", 4)):
        stage = _stage(subject, name)
        prompts = _rows(subject, stage.prompts)[:2]
        rounds = run_rounds(
            subject,
            stage.target,
            stage.draft,
            prompts,
            max_new_tokens=12,
            schedule=(lookahead,),
            source=CounterSource(0),
            sampling=Sampling(temperature=0.0),
        )
        for row, prompt in enumerate(prompts):
            text = [token for one in rounds if one.row == row for token in one.tokens]
            found = compare_greedy(stage.target, prompt, text)
            tokens, largest = tokens + len(text), max(largest, found.delta)
            if found.verdict == "bug":
                raise CheckFailure(
                    f"{name}, K = {lookahead}, row {row}: {found}", expected="the likeliest token each time"
                )
            ties += found.verdict == "numeric tie"
    return Measured(n=tokens, values={"texts_with_numeric_ties": ties, "delta": largest})
