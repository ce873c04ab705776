"""The situations in which T1 enumerates: which models, which prompts and settings, how many tokens are drafted when."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specsampling import CapabilityError, PromptLookup, RandomSource, Sampling
from specsampling_conformance._cast import EXACT, PAIRS, Cast, cast, eager, sequence_tolerance
from specsampling_conformance._checks import NotApplicable, Subject
from specsampling_conformance._engine import Engine
from specsampling_conformance._enumeration import ExactLaw, Outcome, Scenario, enumerate_laws
from specsampling_conformance._faults import Fault, ReferenceModel
from specsampling_conformance._oracle import lookup_proposal, outcome_law, reference_probs
from specsampling_conformance._trial import tolerance_for

__all__ = [
    "Enumerated",
    "Row",
    "SITUATIONS",
    "Situation",
    "Suspicion",
    "enumerated",
    "sampling_of",
    "suspicion",
]

_BATCH_SIZE = 192
_SMALL_BATCH = 8
"""Below this each path takes a run of its own, and horizons are made shorter by one token."""


class Row(NamedTuple):
    """A kind of row: its scenario, and its sampling settings as the oracle takes them."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    settings: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is enumerated together.

    Attributes
    ----------
    claim : str
        The clause: when the law holds.
    rows : tuple of Row
        Kinds of rows in the batch.
    pair : str
        The frozen pair.
    target, drafter : str
        Who plays: ``"target"``, ``"draft"``, ``"own_target"``, ``"own_draft"``; for the drafter also ``"lookup"``,
        ``"none"``.
    schedule : tuple of int
        K of each round, repeated.
    end_tokens : tuple of int
        Ids that end a row.
    draft_settings : mapping or None
        The draft's settings; None for the target's.
    every_column : bool
        Branch in the accept decisions after the first rejection too.
    compiled : bool
        Let the decoder use the adapter's compiled round where there is one.
    requires : tuple of str
        Capabilities that the situation's checks require.
    """

    claim: str
    rows: tuple[Row, ...]
    pair: str = "three_a"
    target: str = "target"
    drafter: str = "draft"
    schedule: tuple[int, ...] = (2,)
    end_tokens: tuple[int, ...] = ()
    draft_settings: Mapping[str, Any] | None = None
    every_column: bool = False
    compiled: bool = True
    requires: tuple[str, ...] = ()


_PLAIN = (Row((1,), 3), Row((2, 0, 1), 3))

SITUATIONS = {
    "fixed_lookahead": Situation(claim="with the same lookahead in every round", rows=_PLAIN),
    "lookahead_then_none": Situation(
        claim="when rounds of K = 2 and K = 0 alternate, so that a stale cache is not overwritten",
        rows=(Row((1,), 4), Row((0, 2), 3)),
        pair="three_b",
        schedule=(2, 0),
    ),
    "none_then_lookahead": Situation(
        claim="when rounds of K = 0 and K = 2 alternate, so that the draft has tokens to catch up on",
        rows=(Row((2,), 4), Row((0, 1), 3)),
        schedule=(0, 2),
    ),
    "growing_lookahead": Situation(
        claim="when K changes from round to round",
        rows=(Row((1, 2), 4, {"top_k": 2}),),
        pair="three_b",
        schedule=(1, 3),
    ),
    "four_ids": Situation(
        claim="with four ids and prompts and limits of different lengths in one batch",
        rows=(Row((3,), 2), Row((0, 2, 1, 3), 2), Row((1, 1), 1)),
        pair="four",
        schedule=(2, 1),
    ),
    "every_answer": Situation(
        claim="whatever is answered after a row's first rejection",
        rows=(Row((2, 1), 3),),
        pair="three_b",
        every_column=True,
    ),
    "self_draft": Situation(
        claim="when the target drafts for itself, and every token drafted is accepted",
        rows=_PLAIN,
        pair="three_b",
        drafter="target",
        schedule=(2, 0, 1),
    ),
    "no_drafter": Situation(claim="with no drafter", rows=_PLAIN, drafter="none", schedule=(0,)),
    "prompt_lookup": Situation(
        claim="when tokens are chosen by prompt lookup (point masses)",
        rows=(Row((1, 0, 1), 4), Row((2, 2), 3), Row((0, 1, 2), 3)),
        pair="three_b",
        drafter="lookup",
        schedule=(2, 0, 2),
    ),
    "end_tokens": Situation(
        claim="with end tokens, which end a row wherever in the block they are accepted or drawn",
        rows=(Row((1,), 4), Row((0, 2), 3)),
        schedule=(2, 1),
        end_tokens=(2,),
    ),
    "settings": Situation(
        claim="when each row has a temperature, top-k, top-p and min-p of its own, greedy rows among them",
        rows=(
            Row((1, 0), 3, {"temperature": 0.6}),
            Row((1, 0), 3, {"top_k": 2}),
            Row((1, 0), 3, {"top_p": 0.7}),
            Row((1, 0), 3, {"temperature": 0.5, "top_p": 0.7}),
            Row((1, 0), 3, {"min_p": 0.3}),
            Row((1, 0), 3, {"temperature": 0.0}),
            Row((1, 0), 2, {"temperature": 1.7, "top_k": 3, "top_p": 0.8, "min_p": 0.1}),
        ),
    ),
    "draft_settings": Situation(
        claim="when the draft has settings of its own",
        rows=(Row((0,), 3, {"temperature": 0.8}), Row((2, 1), 3, {"top_p": 0.9})),
        schedule=(2, 1),
        draft_settings={"temperature": 1.5},
    ),
    "greedy_draft": Situation(
        claim="when the draft is greedy and the target is not",
        rows=_PLAIN,
        pair="three_b",
        draft_settings={"temperature": 0.0},
    ),
    "other_draft": Situation(
        claim="with a draft of another backend", rows=_PLAIN, pair="three_b", drafter="own_draft", schedule=(2, 0)
    ),
    "as_draft": Situation(
        claim="with the adapter's model as the draft of another backend's target",
        rows=_PLAIN,
        target="own_target",
        schedule=(2, 0),
    ),
    "not_compiled": Situation(
        claim="without the compiled round, too",
        # Few shapes: an eager framework compiles every operation for each.
        rows=(Row((1,), 3),),
        schedule=(1, 0),
        compiled=False,
        requires=("compile_round",),
    ),
}
"""Every situation by the last part of its checks' ids."""


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
        Total variation of tokens that rounding may account for.
    note : str
        What was left out, and why.
    """

    rows: tuple[Row, ...]
    laws: list[ExactLaw]
    expected: list[dict[Outcome, float]]
    tolerances: list[float]
    note: str


def enumerated(subject: Subject, name: str) -> Enumerated:
    """Return the laws of a situation; enumerated once, for all the clauses about it."""
    return subject.once(("enumerated", name), lambda: _enumerate(subject, SITUATIONS[name]))


def _enumerate(subject: Subject, situation: Situation) -> Enumerated:
    models = cast(subject, situation.pair)
    rows, batch_size, note = _fitted(subject, situation, models)
    target = getattr(models, situation.target)
    drafter = _drafter(situation, models._asdict(), target)
    if situation.compiled and hasattr(target, "compile_round"):
        try:
            laws = _laws(subject, situation, target, drafter, rows, batch_size)
        except CapabilityError as error:
            note = f"{note} the compiled round was left out, because it cannot ask the host ({error})".strip()
            laws = _laws(subject, situation, eager(target), drafter, rows, batch_size)
    else:
        laws = _laws(subject, situation, eager(target), drafter, rows, batch_size)
    expected = [_expected(situation, models, row) for row in rows]
    tolerances = [sequence_tolerance(subject, models, row.max_new_tokens) for row in rows]
    return Enumerated(rows, laws, expected, tolerances, note)


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
    situation = SITUATIONS[name]
    models = cast(subject, situation.pair)
    row = enumerated(subject, name).rows[index]
    row = row._replace(max_new_tokens=min(row.max_new_tokens, 3))
    batch_size = _fitted(subject, situation, models)[1]

    def enumerate_row(adapter: Subject, roles: Mapping[str, Any]) -> dict[Outcome, float]:
        target = roles[situation.target]
        target = target if situation.compiled else eager(target)
        return _laws(adapter, situation, target, _drafter(situation, roles, target), [row], batch_size)[0].outcomes

    def law_under(fault: Fault) -> dict[Outcome, float]:
        pair = PAIRS[situation.pair]
        is_adapter = fault.kind == "cache"
        load = fault.planted if is_adapter else ReferenceModel
        roles: dict[str, Any] = {"target": load(pair.target, "float64"), "draft": load(pair.draft, "float64")}
        roles |= {"own_target": roles["target"], "own_draft": roles["draft"]}
        engine = Engine() if is_adapter else fault.planted()
        return enumerate_row(dataclasses.replace(subject, engine=engine), roles)

    return Suspicion(enumerate_row(subject, models._asdict()), _expected(situation, models, row), law_under)


def _fitted(subject: Subject, situation: Situation, models: Cast) -> tuple[tuple[Row, ...], int, str]:
    """Return the rows that the adapter's models can play, and how many at a time."""
    largest = subject.capabilities.max_batch_size or _BATCH_SIZE
    batch_size = min(_BATCH_SIZE, largest) if subject.capabilities.per_row_rollback else 1
    vocab_size = min(models.target.vocab_size, PAIRS[situation.pair].vocab_size)
    rows = situation.rows
    note = ""
    if batch_size < _SMALL_BATCH:
        rows = tuple(row._replace(max_new_tokens=min(row.max_new_tokens, 2)) for row in rows)
        note = "two tokens a row, because batches are small"
    rows = tuple(row._replace(prompt=tuple(token % vocab_size for token in row.prompt)) for row in rows)
    if not (models.hosted and subject.dtype in EXACT):
        stable = tuple(row for row in rows if _is_stable(models, situation, row, tolerance_for(subject.dtype)))
        if len(stable) < len(rows):
            note = f"{note} {len(rows) - len(stable)} rows left out, whose settings keep ids by a hair".strip()
        rows = stable
    if not rows:
        raise NotApplicable("every row has settings that keep or drop an id by less than rounding")
    return rows, batch_size, note


def _is_stable(models: Cast, situation: Situation, row: Row, cap: float) -> bool:
    """Whether rounding leaves the ids that a row's settings keep as they are, after every text it may meet.

    On the frozen pairs no id is near a threshold; another model's may be, and in half precision ties are common.
    """
    if not row.settings:
        return True
    scores = models.scores[situation.target]
    delta = min(4 * models.delta, cap) + 1e-12
    rng = np.random.default_rng(0)
    vocab_size = models.target.vocab_size
    for length in range(row.max_new_tokens):
        for new in itertools.product(range(vocab_size), repeat=length):
            logits = scores.logits((*row.prompt, *new))
            kept = reference_probs(logits, **row.settings) > 0
            for _ in range(8):
                moved = logits + delta * rng.choice((-1.0, 1.0), size=logits.shape)
                if not np.array_equal(kept, reference_probs(moved, **row.settings) > 0):
                    return False
    return True


def _end_tokens(situation: Situation, vocab_size: int) -> tuple[int, ...]:
    return tuple(token % vocab_size for token in situation.end_tokens)


def _drafter(situation: Situation, models: Mapping[str, Any], target: Any) -> Any:
    if situation.drafter == "none":
        return None
    if situation.drafter == "lookup":
        return PromptLookup()
    return target if situation.drafter == situation.target else models[situation.drafter]


def _laws(
    subject: Subject, situation: Situation, target: Any, drafter: Any, rows: Sequence[Row], batch_size: int
) -> list[ExactLaw]:
    # A row of the batch has its settings by its number, so the batch holds every kind equally often; where it cannot,
    # the kinds take turns.
    groups = [rows] if batch_size >= len(rows) else [[row] for row in rows]
    laws: list[ExactLaw] = []
    for group in groups:
        size = batch_size // len(group) * len(group)

        def make(source: RandomSource, group: Sequence[Row] = group, size: int = size) -> Any:
            options: dict[str, Any] = {"end_tokens": _end_tokens(situation, target.vocab_size)}
            if situation.draft_settings is not None:
                options["draft_sampling"] = Sampling(**situation.draft_settings)
            sampling = sampling_of([group[row % len(group)].settings for row in range(size)])
            return subject.engine.decoder(target, drafter, sampling=sampling, randomness=source, **options)

        laws += enumerate_laws(
            make,
            [Scenario(row.prompt, row.max_new_tokens) for row in group],
            schedule=situation.schedule,
            batch_size=size,
            every_column=situation.every_column,
        )
    return laws


def sampling_of(settings: Sequence[Mapping[str, Any]]) -> Sampling:
    """Return the settings of a batch from those of its rows; a single number where all rows agree."""
    chosen: dict[str, Any] = {}
    for name, default in (("temperature", 1.0), ("top_k", None), ("top_p", None), ("min_p", None)):
        values = [row.get(name, default) for row in settings]
        chosen[name] = values if len(set(values)) > 1 else values[0]
    return Sampling(**chosen)


def _expected(situation: Situation, models: Cast, row: Row) -> dict[Outcome, float]:
    target = models.scores[situation.target].law(**row.settings)
    draft, propose = None, None
    if situation.drafter == "lookup":
        propose = lookup_proposal
    elif situation.drafter != "none":
        settings = row.settings if situation.draft_settings is None else situation.draft_settings
        draft = models.scores[situation.drafter].law(**settings)
    return outcome_law(
        target,
        draft,
        row.prompt,
        max_new_tokens=row.max_new_tokens,
        schedule=situation.schedule,
        end_tokens=_end_tokens(situation, models.target.vocab_size),
        propose=propose,
    )
