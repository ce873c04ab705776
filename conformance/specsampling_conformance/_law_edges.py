"""T1 at the edges: the smallest and largest uniforms, and compiled rounds against eager ones on equal uniforms."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specsampling import CapabilityError, CounterSource, PromptLookup, RandomSource, UniformRandomness
from specsampling_conformance._cast import Cast, Player, cast, eager, logit_delta, rounds_tolerance
from specsampling_conformance._checks import EXACT, CheckFailure, Measured, NotApplicable, Subject, check
from specsampling_conformance._decisions import Rounding, replay_round
from specsampling_conformance._enumerated import keeps_settings, sampling_of
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._law_compare import compare
from specsampling_conformance._oracle import NextTokenLaw, outcome_law
from specsampling_conformance._replays import FixedSource, Players, SwitchedSource, hold, play, rounding_for

__all__ = ["EDGES"]

_BESIDE = 8
"""Rows of a batch whose uniforms lie beside boundaries."""

EDGES = (2.0**-53, 1 - 2.0**-53)
"""The smallest and the largest uniform that a source may give."""

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.6},
    {"min_p": 0.5},
    {"temperature": 0.0},
)

_REPLAYED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 2, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 1},
)

_GROUP = "T1.edges"
"""Rounds of these checks have the same shapes where they can, and are compiled once."""


def _rows(subject: Subject, wanted: int) -> int:
    capabilities = subject.capabilities
    return min(wanted, capabilities.max_batch_size or wanted) if capabilities.per_row_rollback else 1


@check(
    "T1.boundary.support",
    "At the smallest and the largest uniform no id of probability zero is emitted, and none out of range.",
    group=_GROUP,
)
def _support(subject: Subject) -> Measured:
    if subject.spares(cast(subject, "four").target):
        return _support_as_replayed(subject)
    models = cast(subject, "four")
    kinds = [(token, settings) for settings in _SETTINGS for token in range(models.target.vocab_size)]
    size, emitted = _rows(subject, len(kinds)), 0
    for drafter in (models.draft, PromptLookup(), None):
        for start in range(0, len(kinds), size):
            tokens, settings = zip(*kinds[start : start + size], strict=True)
            prompts = [[token, 0, token] for token in tokens]
            emitted += _num_possible(subject, models, drafter, prompts, settings, (2, 0))
    return Measured(n=emitted)


def _support_as_replayed(subject: Subject) -> Measured:
    """Emit from the rows, settings and shapes that are replayed, for which a round is compiled anyway."""
    models, prompts, settings = _replayed_rows(subject)
    emitted = 0
    for drafter, schedule in ((models.draft, (1, 0)), (PromptLookup(), (1,)), (None, (0,))):
        emitted += _num_possible(subject, models, drafter, prompts, settings, schedule)
    return Measured(n=emitted)


def _num_possible(
    subject: Subject,
    models: Cast,
    drafter: Any,
    prompts: list[list[int]],
    settings: Sequence[Mapping[str, Any]],
    schedule: tuple[int, ...],
) -> int:
    """Emit at both edges, look at every token, and return how many there were."""
    emitted = 0
    source = SwitchedSource(FixedSource(0.5))
    decoder = subject.engine.decoder(models.target, drafter, randomness=source, sampling=sampling_of(settings))
    for uniform in EDGES:
        source.source = FixedSource(uniform)
        for one in play(decoder, prompts, max_new_tokens=5, schedule=schedule):
            chosen = settings[one.row]
            law = models.scores["target"].law(**chosen)
            where = f"u = {uniform!r}, {chosen or 'defaults'}"
            _check_possible(one.text, one.tokens, law, models.target.vocab_size, where)
            emitted += len(one.tokens)
    return emitted


def _check_possible(text: tuple[int, ...], tokens: list[int], law: NextTokenLaw, vocab_size: int, where: str) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise CheckFailure(f"{where}: emitted id {token} after {list(text)}", expected=f"ids below {vocab_size}")
        if law(text)[token] == 0:
            raise CheckFailure(
                f"{where}: emitted id {token} after {list(text)}", expected="an id of positive probability"
            )
        text = (*text, token)


@check(
    "T1.boundary.self_draft",
    "A target that drafts for itself accepts every token, up to uniforms within rounding of one.",
    group=_GROUP,
)
def _self_draft(subject: Subject) -> Measured:
    models = cast(subject, "three_b")
    # Rounding between a block and single steps may cost this much of the last uniforms, and no more.
    top = 1.0 - max(
        1e-9, 8 * min(models.delta, 0.1), 8 * float(np.finfo(np.float32).eps) * (subject.dtype != "float64")
    )
    tested = 0
    source = SwitchedSource(FixedSource(0.5))
    decoder = subject.engine.decoder(models.target, models.target, randomness=source)
    # Where shapes are to be few, those of the next check.
    few = subject.spares(models.target)
    num_rows, schedule = (_BESIDE, (2,)) if few else (3, (3, 1))
    prompts = [[token % models.target.vocab_size] for token in range(_rows(subject, num_rows))]
    for uniform in (EDGES[0], 0.5, top):
        source.source = FixedSource(uniform)
        rounds = play(decoder, prompts, max_new_tokens=7, schedule=schedule)
        for one in rounds:
            whole = min(one.lookahead, one.limit - 1) + 1
            tested += whole - 1
            if len(one.tokens) != whole:
                raise CheckFailure(
                    f"u = {uniform!r}: row {one.row} accepted {len(one.tokens) - 1} of {whole - 1} tokens in round"
                    f" {one.round}, after {list(one.text)}",
                    expected="all of them",
                )
    return Measured(n=tested)


class _ScriptedSource(RandomSource):
    """Uniforms placed beside the boundaries of a round's decisions, the first row's below and the second's above."""

    def __init__(self, uniforms: dict[tuple[int, int], np.ndarray], fallback: float = 0.37) -> None:
        self.uniforms = uniforms
        self.fallback = fallback

    def begin_round(self, row_ids: Any, rounds: Any, lookahead: int) -> UniformRandomness:
        whole = np.full((len(row_ids), 2 * lookahead + 1, 3), self.fallback)
        for index, key in enumerate(zip(map(int, row_ids), map(int, rounds), strict=True)):
            if key in self.uniforms:
                whole[index] = self.uniforms[key]
        return UniformRandomness(whole, lookahead)


@check(
    "T1.boundary.decisions",
    "A uniform just below the boundary of a decision and one just above it decide differently: uniforms are neither"
    " rounded nor cut on their way to a comparison.",
    group=_GROUP,
)
def _decisions(subject: Subject) -> Measured:
    models = cast(subject, "three_a")
    # Far enough for rounding, near enough that uniforms of 12 bits would not tell the two apart.
    rounding = rounding_for(subject.dtype, min(logit_delta(subject, models, "target"), 1e-2))
    laws = models.scores["target"].law(), models.scores["draft"].law()
    held = 0
    source = SwitchedSource(FixedSource(0.5))
    decoder = subject.engine.decoder(models.target, models.draft, randomness=source)
    size = _rows(subject, _BESIDE)
    for text in ((0,), (1, 2), (2, 1, 0)):
        prompt = tuple(token % models.target.vocab_size for token in text)
        for side in (-1, 1):
            uniforms = _beside(prompt, laws, side, rounding)
            for start in range(0, len(uniforms), size):
                # Rows that have no uniforms of their own fill the batch, so that every batch is as large.
                chosen = dict(enumerate(uniforms[start : start + size]))
                source.source = scripted = _ScriptedSource({(row, 0): chosen[row] for row in chosen})
                rounds = play(decoder, [list(prompt)] * size, max_new_tokens=3, schedule=(2,))
                first = [one for one in rounds if one.round == 0 and one.row in chosen]
                hold(first, Players(models.target, models.draft, *laws), scripted, rounding)
                held += len(first)
    return Measured(n=held, values={"delta": models.delta})


def _beside(
    prompt: tuple[int, ...], laws: tuple[NextTokenLaw, NextTokenLaw], side: int, rounding: Rounding
) -> list[np.ndarray]:
    """Return uniforms of rounds in which one decision each lies beside its boundary."""
    found = []
    for slot in range(5):
        for base in (0.21, 0.58, 0.83):
            uniforms = np.full((5, 3), base)
            _, decisions = replay_round(
                prompt, uniforms, lookahead=2, num_tokens=2, target=laws[0], draft=laws[1], rounding=rounding
            )
            target, draft = laws
            first = int(np.argmax(np.cumsum(draft(prompt)) > base))
            if slot == 0:
                boundary = float(np.cumsum(draft(prompt))[0])
            elif slot == 2:
                boundary = float(target(prompt)[first] / draft(prompt)[first])
            elif slot == 4:
                uniforms[2:4] = 1e-9
                second = int(np.argmax(np.cumsum(draft((*prompt, first))) > base))
                boundary = float(np.cumsum(target((*prompt, first, second)))[0])
            else:
                continue
            distance = 4 * max(decision.allowed for decision in decisions) + 4 * rounding.step
            if distance < boundary < 1 - distance:
                uniforms[slot] = boundary + side * distance
                found.append(uniforms)
    return found


def _compiled(models: Cast) -> Any:
    if not hasattr(models.target, "compile_round"):
        raise NotApplicable(
            "the adapter hosts no foreign weights, and a masked model has no compiled round"
            if not models.hosted
            else "the model has no `compile_round`"
        )
    return models.target


@check(
    "T1.compiled.law",
    "A compiled round asks the `Randomness` it is given, by an ordered callback to the host where that is not made of"
    " uniforms, and its enumerated law is the target's; or it raises `CapabilityError`.",
    requires=("compile_round",),
    group="T1.several",  # enumerated with the same shapes
)
def _compiled_law(subject: Subject) -> Measured:
    models = cast(subject, "three_b")
    target = _compiled(models)
    rows = _rows(subject, 192)
    length = 3 if rows >= 8 else 2
    try:
        (law,) = enumerate_laws(
            lambda source: subject.engine.decoder(target, models.draft, randomness=source),
            [Scenario((1, 0), length)],
            schedule=(2, 0),
            batch_size=rows,
        )
    except CapabilityError as error:
        raise NotApplicable(f"a compiled round cannot ask the host: {error}") from error
    scores = models.scores
    expected = outcome_law(
        scores["target"].law(), scores["draft"].law(), (1, 0), max_new_tokens=length, schedule=(2, 0)
    )
    players = Player(models, "target", 1.0), Player(models, "draft", 1.0)
    tolerance = rounds_tolerance(subject, *players, length)
    measured = compare("compiled round", expected, law.outcomes, tolerance, forbidden=False)
    return measured._replace(values={**measured.values, "paths": law.num_paths})


@check(
    "T1.compiled.replay",
    "A compiled round emits what follows from its uniforms, as the eager round does, boundary uniforms included, each"
    " row under settings of its own, unless a uniform lies within rounding of its decision's boundary.",
    requires=("compile_round",),
    group=_GROUP,
)
def _compiled_replay(subject: Subject) -> Measured:
    target = _compiled(cast(subject, "three_b"))
    models, prompts, settings = _replayed_rows(subject)
    tokens = differing = unsure = 0
    source = SwitchedSource(FixedSource(0.5))
    rounding = [
        rounding_for(subject.dtype, logit_delta(subject, models, "target") / (one.get("temperature") or 1.0))
        for one in settings
    ]
    players = [
        Players(target, models.draft, models.scores["target"].law(**one), models.scores["draft"].law(**one))
        for one in settings
    ]
    # Eager frameworks compile every operation for its shape. The host's replay says as much, and needs none of them.
    few = subject.spares(target)
    decoders = [
        subject.engine.decoder(model, models.draft, randomness=source, sampling=sampling_of(settings))
        for model in ([target] if few else [target, eager(target)])
    ]
    for fixed in (CounterSource(subject.check_seed("T1.compiled.replay")), *map(FixedSource, EDGES)):
        source.source = fixed
        runs = [play(decoder, prompts, max_new_tokens=4, schedule=(1, 0)) for decoder in decoders]
        tokens += sum(len(one.tokens) for one in runs[0])
        if runs[0] == runs[-1] and not few:
            continue
        differing += not few
        for run in runs:
            # At the edges every uniform is beside a boundary, in narrow dtypes many are.
            can_judge = subject.dtype in EXACT and isinstance(fixed, CounterSource)
            held = hold(run, players, fixed, rounding, most_unsure=0.5 if can_judge else 1.0)
            unsure += held.values["at_a_boundary"]
    return Measured(n=tokens, values={"runs_with_differences": differing, "rounds_at_a_boundary": unsure})


def _replayed_rows(subject: Subject) -> tuple[Cast, list[list[int]], list[Mapping[str, Any]]]:
    """Return as many rows as where rounds are enumerated, and settings for each.

    They are the defaults where rounding might change which ids the row's own would keep.
    """
    models = cast(subject, "three_b")
    vocab_size = models.target.vocab_size
    prompts = [[row % vocab_size, 0, row % vocab_size] for row in range(_rows(subject, 192))]

    @functools.cache
    def is_stable(prompt: tuple[int, ...], number: int) -> bool:
        return all(keeps_settings(subject, models, role, prompt, 4, _REPLAYED[number]) for role in ("target", "draft"))

    numbers = [row // vocab_size % len(_REPLAYED) for row in range(len(prompts))]
    settings: list[Mapping[str, Any]] = [
        _REPLAYED[number] if is_stable(tuple(prompt), number) else {}
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    return models, prompts, settings
