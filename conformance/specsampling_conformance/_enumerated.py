"""Enumerate a situation on an adapter, and say what should have come out."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling import CapabilityError, PromptLookup, RandomSource, Sampling
from specsampling_conformance._cast import (
    SHORT_CONTEXT,
    Cast,
    Player,
    cast,
    eager,
    logit_delta,
    pair,
    rounds_tolerance,
    sequence_tolerance,
)
from specsampling_conformance._checks import NotApplicable, Subject
from specsampling_conformance._engine import Engine
from specsampling_conformance._enumeration import (
    MOST_PATHS,
    ExactLaw,
    Outcome,
    Scenario,
    enumerate_laws,
    row_shares,
)
from specsampling_conformance._faults import Fault
from specsampling_conformance._oracle import NextTokenLaw, Scores, keeps_ids, lookup_proposal, outcome_law
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._situations import SITUATIONS, Row, Situation

__all__ = [
    "Enumerated",
    "Suspicion",
    "enumerated",
    "keeps_settings",
    "sampling_of",
    "situation_for",
    "stable_rows",
    "suspicion",
]

Floats = NDArray[np.float64]

_BATCH_SIZE = 192
_FEW_PATHS = 10_000
"""A fault with more of them in a short row is left out of a diagnosis, which tries all of them."""
_SMALL_BATCH = 8
"""Below this each path takes a run of its own, and horizons are made shorter by one token."""


class Enumerated(NamedTuple):
    """What was enumerated, and what it should have been.

    Attributes
    ----------
    rows : tuple of Row
        The rows enumerated.
    laws : list of ExactLaw
        Each one's law.
    expected : list of dict
        Each one's law of (tokens, rounds) from one-token scores of the models themselves.
    tolerances : list of float
        Total variation of the law of tokens that rounding may account for.
    rounds_tolerances : list of float
        The same of the law of (tokens, rounds).
    note : str
        What was left out, and why.
    """

    rows: tuple[Row, ...]
    laws: list[ExactLaw]
    expected: list[dict[Outcome, float]]
    tolerances: list[float]
    rounds_tolerances: list[float]
    note: str


def enumerated(subject: Subject, name: str) -> Enumerated:
    """Return the laws of a situation; enumerated once, for all the clauses about it."""
    return subject.once(("enumerated", name), lambda: _enumerate(subject, name))


def situation_for(subject: Subject, name: str) -> Situation:
    """Return a situation as it is gone through: with fewer shapes where one of its models is compiled for each."""
    situation = SITUATIONS[name]
    roles = _stage(subject, situation).roles
    models = [roles[role] for role in (situation.target, situation.drafter) if role in roles]
    return dataclasses.replace(situation, **situation.few) if subject.spares(*models) else situation


def _enumerate(subject: Subject, name: str) -> Enumerated:
    situation = situation_for(subject, name)
    if situation.leading:
        subject.check_leads(cast(subject, situation.pair).target)
    stage = _stage(subject, situation)
    if _draft_limit(situation) is not None and getattr(stage.roles["draft"], "max_length", None) is None:
        raise NotApplicable("the models have no `max_length`, past which a draft proposes nothing")
    rows, batch_size, note = _fitted(subject, situation, stage)
    target = stage.roles[situation.target]
    drafter = _drafter(situation, stage.roles, target)
    expected = [_expected(situation, stage, row) for row in rows]
    weights = [_weight(situation, stage, row, law) for row, law in zip(rows, expected, strict=True)]
    kinds = [_Kind(row, weight) for row, weight in zip(rows, weights, strict=True)]
    if situation.compiled and hasattr(target, "compile_round"):
        try:
            laws = _laws(subject, situation, target, drafter, kinds, batch_size)
        except CapabilityError as error:
            note = f"{note} the compiled round was left out, because it cannot ask the host ({error})".strip()
            laws = _laws(subject, situation, eager(target), drafter, kinds, batch_size)
    else:
        laws = _laws(subject, situation, eager(target), drafter, kinds, batch_size)
    tolerances = [_tolerance(subject, situation, stage, row) for row in rows]
    rounds_tolerances = [_rounds_tolerance(subject, situation, stage, row) for row in rows]
    return Enumerated(rows, laws, expected, tolerances, rounds_tolerances, note)


class _Kind(NamedTuple):
    """A kind of row, and how much there is to enumerate of it, compared with others."""

    row: Row
    weight: float


class _Stage(NamedTuple):
    """Who plays: the casts that target and draft come from, and the models by role."""

    models: Cast
    draft_models: Cast
    roles: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.models.target.vocab_size


def _stage(subject: Subject, situation: Situation) -> _Stage:
    models = cast(subject, situation.pair)
    draft_models = cast(subject, situation.draft_pair or situation.pair)
    drafts = {role: getattr(draft_models, role) for role in ("draft", "own_draft")}
    return _Stage(models, draft_models, models._asdict() | drafts)


def _side(situation: Situation, stage: _Stage) -> Cast | None:
    """Return the cast that the drafter comes from, None where it has no law."""
    if situation.drafter in ("none", "lookup"):
        return None
    return stage.draft_models if "draft" in situation.drafter else stage.models


def _tolerance(subject: Subject, situation: Situation, stage: _Stage, row: Row) -> float:
    temperature = row.settings.get("temperature", 1.0)
    return sequence_tolerance(subject, stage.models, row.max_new_tokens, role=situation.target, temperature=temperature)


def _rounds_tolerance(subject: Subject, situation: Situation, stage: _Stage, row: Row) -> float:
    side = _side(situation, stage)
    return rounds_tolerance(
        subject,
        Player(stage.models, situation.target, row.settings.get("temperature", 1.0)),
        None if side is None else Player(side, situation.drafter, _draft_settings(row).get("temperature", 1.0)),
        row.max_new_tokens,
    )


def _draft_settings(row: Row) -> Mapping[str, Any]:
    return row.settings if row.draft_settings is None else row.draft_settings


class Suspicion(NamedTuple):
    """What a diagnosis compares, for one kind of row in a situation, at most three tokens of it.

    Attributes
    ----------
    found, expected : dict
        The law of (tokens, rounds) enumerated, and what it should be.
    law_under : callable
        Returns the law under a planted fault, on the suite's own models.
    """

    found: dict[Outcome, float]
    expected: dict[Outcome, float]
    law_under: Callable[[Fault], dict[Outcome, float]]


def suspicion(subject: Subject, name: str, index: int) -> Suspicion:
    """Enumerate one kind of row again, on its own and short, so that every planted fault can be tried on it."""
    situation = situation_for(subject, name)
    stage = _stage(subject, situation)
    row = enumerated(subject, name).rows[index]
    row = row._replace(max_new_tokens=min(row.max_new_tokens, 3))
    batch_size = _fitted(subject, situation, stage)[1]

    def enumerate_row(adapter: Subject, roles: Mapping[str, Any]) -> dict[Outcome, float]:
        target = roles[situation.target]
        target = target if situation.compiled else eager(target)
        drafter = _drafter(situation, roles, target)
        return _laws(adapter, situation, target, drafter, [_Kind(row, 1)], batch_size, _FEW_PATHS)[0].outcomes

    def law_under(fault: Fault) -> dict[Outcome, float]:
        is_adapter = fault.kind == "cache"
        load = fault.planted if is_adapter else ReferenceModel
        roles: dict[str, Any] = {
            "target": load(pair(situation.pair).target, "float64"),
            "draft": load(pair(situation.draft_pair or situation.pair).draft, "float64"),
        }
        roles |= {"own_target": roles["target"], "own_draft": roles["draft"]}
        engine = Engine() if is_adapter else fault.planted()
        return enumerate_row(dataclasses.replace(subject, engine=engine), roles)

    return Suspicion(enumerate_row(subject, stage.roles), _expected(situation, stage, row), law_under)


def _fitted(subject: Subject, situation: Situation, stage: _Stage) -> tuple[tuple[Row, ...], int, str]:
    """Return the rows that the adapter's models can play, and how many at a time."""
    largest = subject.capabilities.max_batch_size or _BATCH_SIZE
    batch_size = min(_BATCH_SIZE, largest) if subject.capabilities.per_row_rollback else 1
    rows = situation.rows
    note = ""
    if batch_size < _SMALL_BATCH:
        shortest = max(2, situation.min_new_tokens)
        rows = tuple(row._replace(max_new_tokens=min(row.max_new_tokens, shortest)) for row in rows)
        note = f"{shortest} tokens a row, because batches are small"
    rows = tuple(row._replace(prompt=tuple(token % stage.vocab_size for token in row.prompt)) for row in rows)
    stable = stable_rows(subject, dataclasses.replace(situation, rows=rows))
    if len(stable) < len(rows):
        note = f"{note} {len(rows) - len(stable)} rows left out, whose settings keep ids by a hair".strip()
    if not stable:
        raise NotApplicable("every row has settings that keep or drop an id by less than rounding")
    return stable, batch_size, note


def stable_rows(subject: Subject, situation: Situation) -> tuple[Row, ...]:
    """Return the rows of a situation whose settings keep the same ids whatever rounding does."""
    stage = _stage(subject, situation)
    return tuple(row for row in situation.rows if _is_stable(subject, situation, stage, row))


def _is_stable(subject: Subject, situation: Situation, stage: _Stage, row: Row) -> bool:
    """Whether rounding leaves the ids that a row's settings keep as they are, after every text it may meet.

    On the frozen pairs no id is near a threshold, which a test makes sure of; another model's may be, and in half
    precision ties are common.
    """
    side = _side(situation, stage)
    players = [(stage.models, situation.target, row.settings)]
    if side is not None:
        players.append((side, situation.drafter, _draft_settings(row)))
    banned = _end_tokens(situation, stage.vocab_size)
    return all(
        keeps_settings(
            *(subject, models, role, row.prompt, row.max_new_tokens, settings),
            vocab_size=stage.vocab_size,
            banned=banned if role == situation.target else (),
            until=len(row.prompt) + situation.min_new_tokens,
        )
        for models, role, settings in players
    )


def keeps_settings(
    subject: Subject,
    models: Cast,
    role: str,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    settings: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    banned: tuple[int, ...] = (),
    until: int = 0,
) -> bool:
    """Return whether rounding leaves the ids that settings keep as they are, after every text of new tokens.

    Texts are made of `vocab_size` ids, the model's own by default; `banned` ids are forbidden after texts shorter than
    `until`.
    """
    if not set(settings) - {"temperature"} and settings.get("temperature") != 0:
        return True
    scores = models.scores[role]
    delta = logit_delta(subject, models, role) + 1e-12
    for length in range(max_new_tokens):
        for new in itertools.product(range(vocab_size or scores.model.vocab_size), repeat=length):
            text = (*prompt, *new)
            logits = _known(scores, text)
            if len(text) < until:
                logits = np.where(np.isin(np.arange(logits.size), banned), -np.inf, logits)
            if not keeps_ids(logits, delta, **settings):
                return False
    return True


def _known(scores: Scores, text: tuple[int, ...]) -> Floats:
    """Return the logits after `text`, in which a model is fed id 0 for those that it does not know."""
    return scores.logits(tuple(token if token < scores.model.vocab_size else 0 for token in text))


def _end_tokens(situation: Situation, vocab_size: int) -> tuple[int, ...]:
    return tuple(token % vocab_size for token in situation.end_tokens)


def _stop_sequences(situation: Situation, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(token % vocab_size for token in sequence) for sequence in situation.stop_sequences)


def _drafter(situation: Situation, models: Mapping[str, Any], target: Any) -> Any:
    if situation.drafter == "none":
        return None
    if situation.drafter == "lookup":
        return PromptLookup()
    return target if situation.drafter == situation.target else models[situation.drafter]


def _laws(
    subject: Subject,
    situation: Situation,
    target: Any,
    drafter: Any,
    kinds: Sequence[_Kind],
    batch_size: int,
    most_paths: int = MOST_PATHS,
) -> list[ExactLaw]:
    # A row of the batch has its settings by its number, so a batch holds all kinds; where it cannot, they take turns.
    groups = [kinds] if batch_size >= len(kinds) else [[kind] for kind in kinds]
    laws: list[ExactLaw] = []
    for group in groups:
        numbers = row_shares([kind.weight for kind in group], batch_size)
        batch = [group[number].row for number in numbers]

        def make(source: RandomSource, batch: Sequence[Row] = batch) -> Any:
            return subject.engine.decoder(
                target, drafter, randomness=source, **_options(situation, batch, target.vocab_size)
            )

        laws += enumerate_laws(
            make,
            [Scenario(kind.row.prompt, kind.row.max_new_tokens) for kind in group],
            schedule=situation.schedule,
            batch_size=batch_size,
            scenario_of=numbers,
            every_column=situation.every_column,
            draft_limit=_draft_limit(situation),
            most_paths=most_paths,
        )
    return laws


def _draft_limit(situation: Situation) -> int | None:
    return SHORT_CONTEXT if situation.draft_pair == "short" else None


def _options(situation: Situation, rows: Sequence[Row], vocab_size: int) -> dict[str, Any]:
    """Return the decoder's options for a batch of these rows."""
    options: dict[str, Any] = {
        "sampling": sampling_of([row.settings for row in rows]),
        "end_tokens": _end_tokens(situation, vocab_size),
    }
    if any(row.draft_settings is not None for row in rows):
        options["draft_sampling"] = sampling_of([_draft_settings(row) for row in rows])
    if situation.min_new_tokens:
        options["min_new_tokens"] = situation.min_new_tokens
    if situation.stop_sequences:
        options["stop_sequences"] = _stop_sequences(situation, vocab_size)
    if situation.draft_pair not in (None, "short"):
        options["pad_vocab"] = True
    return options


def sampling_of(settings: Sequence[Mapping[str, Any]]) -> Sampling:
    """Return the settings of a batch from those of its rows; a single number where all rows agree."""
    chosen: dict[str, Any] = {}
    for name, default in (("temperature", 1.0), ("top_k", None), ("top_p", None), ("min_p", None)):
        values = [row.get(name, default) for row in settings]
        chosen[name] = values if len(set(values)) > 1 else values[0]
    return Sampling(**chosen)


def _draft_law(situation: Situation, stage: _Stage, row: Row) -> NextTokenLaw | None:
    """Return the law that a row's proposals are drawn from, None where they are not drawn."""
    side = _side(situation, stage)
    if side is None:
        return None
    scores = side.scores[situation.drafter]
    law = scores.law(**_draft_settings(row))
    return lambda text: law(tuple(token if token < scores.model.vocab_size else 0 for token in text))


def _expected(situation: Situation, stage: _Stage, row: Row) -> dict[Outcome, float]:
    end_tokens = _end_tokens(situation, stage.vocab_size)
    target = stage.models.scores[situation.target].law(
        banned=end_tokens, until=len(row.prompt) + situation.min_new_tokens, **row.settings
    )
    return outcome_law(
        target,
        _draft_law(situation, stage, row),
        row.prompt,
        max_new_tokens=row.max_new_tokens,
        schedule=situation.schedule,
        end_tokens=end_tokens,
        stop_sequences=_stop_sequences(situation, stage.vocab_size),
        draft_limit=_draft_limit(situation),
        propose=lookup_proposal if situation.drafter == "lookup" else None,
    )


def _weight(situation: Situation, stage: _Stage, row: Row, expected: Mapping[Outcome, float]) -> float:
    """Return about how many ways of answering there are: for each outcome, one for each proposal that may go before."""
    draft = _draft_law(situation, stage, row)
    proposals = 1 if draft is None else np.count_nonzero(draft(row.prompt)) ** row.max_new_tokens
    return float(len(expected) * proposals)
