"""T1: is the output law the target's? Importing this module registers the clauses."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from specsampling_conformance._cast import cast, is_hosted
from specsampling_conformance._checks import CheckFailure, Measured, Subject, check
from specsampling_conformance._diagnosis import best_fitting_law, with_diagnosis
from specsampling_conformance._enumerated import enumerated, suspicion
from specsampling_conformance._enumeration import LabelReusedError
from specsampling_conformance._law_compare import compare, tokens_of
from specsampling_conformance._situations import SITUATIONS, Situation

__all__: list[str] = []

Law: TypeAlias = Mapping[Any, float]


_DRIFTING = ("fixed_lookahead", "lookahead_then_none", "four_ids", "settings")
_LABELLED = ("fixed_lookahead", "lookahead_then_none", "prompt_lookup")


_ALIKE = ("none_then_lookahead", "growing_lookahead", "every_answer", "self_draft", "end_tokens", "stop_sequences")
"""Situations whose rounds are compiled for those above already."""


def _group(name: str) -> str:
    """Return the group of the checks about a situation; some checks are about several."""
    return "T1.several" if name in {*_DRIFTING, *_LABELLED, *_ALIKE} else f"T1.{name}"


def _tokens_check(name: str, situation: Situation) -> None:
    @check(
        f"T1.law.{name}",
        f"The tokens follow the target's law exactly {situation.claim}: probabilities sum to one, the same sequences"
        " are possible, and the total variation from the law of the model's own one-token scores is rounding.",
        requires=situation.requires,
        group=_group(name),
    )
    def run(subject: Subject) -> Measured:
        found = enumerated(subject, name)
        expected: list[Law] = [tokens_of(law) for law in found.expected]
        got: list[Law] = [law.tokens for law in found.laws]
        return _compared(subject, name, expected, got, found.tolerances, forbidden=True)


def _rounds_check(name: str, situation: Situation) -> None:
    @check(
        f"T1.rounds.{name}",
        f"The joint law of tokens and number of rounds is that of the paper's algorithm {situation.claim}; a fault in"
        " the draft's cache changes nothing else.",
        requires=situation.requires,
        group=_group(name),
    )
    def run(subject: Subject) -> Measured:
        found = enumerated(subject, name)
        got: list[Law] = [law.outcomes for law in found.laws]
        return _compared(subject, name, list(found.expected), got, found.rounds_tolerances, forbidden=False)


def _compared(
    subject: Subject,
    name: str,
    expected: Sequence[Law],
    got: Sequence[Law],
    tolerances: Sequence[float],
    *,
    forbidden: bool,
) -> Measured:
    found = enumerated(subject, name)
    measured = []
    for index, row in enumerate(found.rows):
        what = f"prompt {list(row.prompt)}, {dict(row.settings) or 'default settings'}"
        try:
            measured.append(compare(what, expected[index], got[index], tolerances[index], forbidden=forbidden))
        except CheckFailure as failure:
            raise with_diagnosis(failure, _diagnosis(subject, name, index)) from None
    worst = max(measured, key=lambda one: (one.exact_tv or 0.0) / (one.tolerance or 1.0))
    values = {**worst.values, "paths": sum(law.num_paths for law in found.laws)}
    return worst._replace(values=values | ({"note": found.note} if found.note else {}))


def _diagnosis(subject: Subject, name: str, index: int) -> str | None:
    """Name the planted fault that fits best; not for failures that were expected, and only with known weights.

    One fault makes many checks fail: the first of them is looked into, and the others have the same line.
    """
    if not (subject.effort.shrink and is_hosted(subject)):
        return None
    return subject.once("diagnosis", lambda: best_fitting_law(*suspicion(subject, name, index)))


for _name, _situation in SITUATIONS.items():
    _tokens_check(_name, _situation)
for _name, _situation in SITUATIONS.items():
    _rounds_check(_name, _situation)


@check(
    "T1.labels.once",
    "No random decision is asked for twice in a round: two decisions never share their randomness.",
    group=_group(_LABELLED[0]),
)
def _labels_once(subject: Subject) -> Measured:
    paths = 0
    for name in _LABELLED:
        try:
            paths += sum(law.num_paths for law in enumerated(subject, name).laws)
        except LabelReusedError as error:
            raise CheckFailure(str(error), expected="each label once a round") from error
    return Measured(n=paths)


@check(
    "T1.drift.company",
    "The same answers have the same probabilities whatever the other rows of the batch do.",
    group=_group(_DRIFTING[0]),
)
def _drift(subject: Subject) -> Measured:
    drift = tolerance = 0.0
    for name in _DRIFTING:
        if SITUATIONS[name].leading and not subject.leads(cast(subject, SITUATIONS[name].pair).target):
            continue
        found = enumerated(subject, name)
        drift = max(drift, *(law.drift for law in found.laws))
        # Every one of a dozen decisions may be off by the rounding of its own row of logits.
        tolerance = max(tolerance, *(10 * bound for bound in found.tolerances))
    if drift > tolerance:
        raise CheckFailure(
            f"the probability of the same answers differs by {drift:.2g} between two batches",
            expected=f"no difference beyond {tolerance:.2g}",
        )
    return Measured(tolerance=tolerance, values={"drift": drift})
