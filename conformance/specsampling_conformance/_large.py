"""T1 at the vocabularies of real models: selection and draws on the adapter's own device, against float64 on the host.

The enumerated laws have three or four ids. Neither a top-p cut among 100 000 ids nor a draw by levels shows in those;
and both run where the adapter's logits are, on code of that framework.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsampling import Label, Proposal, Purpose, verify
from specsampling_conformance._cast import cast
from specsampling_conformance._checks import CheckFailure, Measured, Subject, check
from specsampling_conformance._enumerated import sampling_of
from specsampling_conformance._host import Array, host_copy, native_floats, native_integers
from specsampling_conformance._oracle import reference_probs

__all__ = ["Drawn", "drawn_by_levels", "level_blocks"]

Floats = NDArray[np.float64]

_SIZES = (32_000, 128_256)
"""Vocabulary sizes that are drawn from in two levels and in three, as real models have them."""

_LAW_ERRORS = {"float64": 1e-12}
_LAW_ERROR = 1e-5
"""Total variation that a law over so many ids may be off by, in float64 and in anything narrower (float32 sums)."""

_BOUNDARY_ERRORS = {"float64": 1e-13}
_BOUNDARY_ERROR = 4e-6
"""How far a boundary between two blocks or ids may be from where it is in float64.

Sums of a few hundred float32 numbers are off by some units of 6e-8, the whole numbers they are cut to by 2**-30 for
each, and a uniform of 23 bits is compared with a product that is rounded again.
"""

_ROWS = 8

_GROUP = "T1.large"
"""Arrays of these checks have the same shapes where they can: eager frameworks compile every operation for each."""


class Drawn(NamedTuple):
    """A draw replayed in float64.

    Attributes
    ----------
    token : int
        The id.
    margin : float
        Distance of the nearest uniform from a boundary of its level.
    """

    token: int
    margin: float


def level_blocks(vocab_size: int) -> list[int]:
    """Return into how many blocks a draw divides what is left, level by level; block j of n has every n-th id from j.

    Part of what a seed means: the same uniforms give the same ids on every backend.
    """
    levels = 1 if vocab_size <= 320 else 2 if vocab_size <= 32_768 else 3
    blocks = []
    for left in range(levels, 1, -1):
        vocab_size = math.ceil(vocab_size / round(math.pow(vocab_size, 1 / left)))
        blocks.append(vocab_size)
    return blocks


def _levels(weights: Floats) -> list[Floats]:
    """Return the weights, and the sums of their blocks at each level up, coarsest first."""
    found = [weights]
    for blocks in level_blocks(weights.size):
        finer = found[0]
        found.insert(0, np.pad(finer, (0, -finer.size % blocks)).reshape(-1, blocks).sum(axis=0))
    return found


def drawn_by_levels(weights: Floats, uniforms: Floats) -> Drawn:
    """Replay a draw from weights ``(V,)`` with the uniforms of its levels, coarsest first."""
    token, margin, blocks = 0, 1.0, 1
    for sums, uniform in zip(_levels(weights), uniforms, strict=False):
        members = sums[token::blocks]
        bounds = np.cumsum(members) / members.sum()
        index = min(int(np.argmax(bounds > uniform)), members.size - 1)
        margin = min(margin, float(np.min(np.abs(bounds[:-1] - uniform), initial=1.0)))
        token, blocks = token + blocks * index, sums.size
    return Drawn(token, margin)


def _beside_boundaries(weights: Floats, uniforms: Floats, level: int, distance: float) -> Floats:
    """Move the uniform of one level beside the boundary nearest to it, below or above as it was."""
    token, blocks = 0, 1
    moved = uniforms.copy()
    for depth, sums in enumerate(_levels(weights)):
        members = sums[token::blocks]
        bounds = np.cumsum(members) / members.sum()
        if depth == level:
            inner = bounds[:-1][(bounds[:-1] > 2 * distance) & (bounds[:-1] < 1 - 2 * distance)]
            if inner.size:
                nearest = inner[int(np.argmin(np.abs(inner - uniforms[depth])))]
                moved[depth] = nearest + math.copysign(distance, uniforms[depth] - nearest)
        index = min(int(np.argmax(bounds > moved[depth])), members.size - 1)
        token, blocks = token + blocks * index, sums.size
    return moved


def _like(subject: Subject) -> Array:
    """Return logits of the adapter: what every array of these checks is put beside."""
    model = cast(subject, "four").target
    logits, _ = model.score(model.init_cache(1, 8), np.array([[0]], dtype=np.int32))
    return logits


def _sizes(subject: Subject) -> tuple[int, ...]:
    """Return the vocabulary sizes: the larger alone in dtypes in which a run does not go through everything."""
    return _SIZES if subject.leads(cast(subject, "four").target) else _SIZES[-1:]


def _shapes(vocab_size: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Return logits of laws as language models have them, their ids in random order."""
    ranks = rng.permutation(vocab_size) + 1.0
    heavy = np.where(ranks == 1, 0.0, math.log(0.01 / 0.99 / (vocab_size - 1)) + 1e-3 * np.sin(ranks))
    return {
        "Zipf": -np.log(ranks),
        "nearly flat": 0.5 * np.sin(ranks),
        "0.99 on one id": heavy,
        "a few hundred ids": -ranks / 40,
    }


def _between(logits: Floats, wanted: float) -> float:
    """Return the top-p nearest to `wanted` that lies half-way between two sums, ties taken together."""
    values, counts = np.unique(logits, return_counts=True)
    masses = (np.exp(values - values[-1]) * counts)[::-1]
    sums = np.cumsum(masses) / masses.sum()
    last = int(np.argmax(sums >= wanted))
    return float((sums[last] + (sums[last - 1] if last else 0.0)) / 2)


def _under(logits: Floats, rank: int) -> float:
    """Return the min-p that lies half-way between the logits of two ranks."""
    ordered = np.unique(logits)[::-1]
    rank = min(rank, ordered.size - 1)
    return math.exp((ordered[rank] + ordered[rank - 1]) / 2 - ordered[0])


def _settings(logits: Floats) -> list[Mapping[str, Any]]:
    """Return settings whose edges lie between two ids of these logits."""
    return [
        {},
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_p": _between(logits, 0.5)},
        {"top_p": _between(logits, 0.9)},
        {"top_p": _between(logits, 0.995)},
        {"min_p": _under(logits, 40)},
        {"temperature": 0.0},
    ]


@check(
    "T1.large.selection",
    "Among 32 000 and 128 256 ids, on the adapter's own device and in its dtype, temperature, top-k, top-p and min-p"
    " keep the ids that a float64 reference keeps, and give its law.",
    group=_GROUP,
)
def _selection(subject: Subject) -> Measured:
    like = _like(subject)
    tolerance, worst = _LAW_ERRORS.get(subject.dtype, _LAW_ERROR), 0.0
    rng = subject.rng("T1.large.selection")
    for vocab_size in _sizes(subject):
        for shape, wanted in _shapes(vocab_size, rng).items():
            # As the dtype holds them: ids that were apart may be tied there.
            row = host_copy(native_floats(wanted, like))
            settings = _settings(row)
            logits = native_floats(np.broadcast_to(row, (len(settings), vocab_size)), like)
            got = host_copy(subject.engine.probs(logits, sampling_of(settings)))
            for index, kept in enumerate(settings):
                worst = max(
                    worst, _compared(f"{shape}, V = {vocab_size}, {dict(kept)}", row, got[index], kept, tolerance)
                )
    return Measured(exact_tv=worst, tolerance=tolerance)


def _compared(what: str, logits: Floats, got: Floats, settings: Mapping[str, Any], tolerance: float) -> float:
    expected = reference_probs(logits, **settings)
    distance = 0.5 * float(np.abs(got - expected).sum())
    lost, added = (expected > 0) & ~(got > 0), (got > 0) & ~(expected > 0)
    # Where ids are as improbable as rounding, one of them may be on the other side of a sum's edge.
    odd = max(float(expected[lost].sum()), float(got[added].sum()))
    if not distance <= tolerance or odd > tolerance:
        raise CheckFailure(
            f"{what}: total variation {distance:.3g}, {int(lost.sum())} ids lost and {int(added.sum())} added",
            expected=f"{int((expected > 0).sum())} ids and a total variation of at most {tolerance:g}",
            measured=Measured(exact_tv=distance, tolerance=tolerance),
        )
    return distance


def _grid(uniforms: Floats, dtype: str) -> Floats:
    """Return the uniforms as they arrive: cut to 23 bits, and half a step, where laws are float32."""
    return uniforms if dtype == "float64" else (np.floor(uniforms * 2.0**23) + 0.5) * 2.0**-23


@check(
    "T1.large.draws",
    "A draw among 32 000 and 128 256 ids, on the adapter's own device, takes the id that its uniforms fall to, close to"
    " the boundaries too; an id of weight zero is never drawn.",
    group=_GROUP,
)
def _draws(subject: Subject) -> Measured:
    like = _like(subject)
    rng = subject.rng("T1.large.draws")
    allowed = _BOUNDARY_ERRORS.get(subject.dtype, _BOUNDARY_ERROR)
    held = unsure = 0
    for vocab_size in _sizes(subject):
        for shape, row in _shapes(vocab_size, rng).items():
            wanted = np.where(rng.random(vocab_size) < 0.3, -np.inf, row)
            wanted[int(np.argmax(row))] = row.max()
            logits = native_floats(np.broadcast_to(wanted, (_ROWS, vocab_size)), like)
            probs = subject.engine.probs(logits, sampling_of([{}]))
            weights = host_copy(probs)
            uniforms = rng.uniform(0.0, 1.0, (_ROWS, 1, 3))
            for index in range(1, _ROWS):
                level = index % (1 + len(level_blocks(vocab_size)))
                uniforms[index, 0] = _beside_boundaries(weights[index], uniforms[index, 0], level, 3 * allowed)
            randomness = subject.engine.randomness(uniforms, 0)
            got = host_copy(randomness.categorical(probs, Label(Purpose.RESAMPLE, 0)))
            for index, token in enumerate(got.tolist()):
                drawn = drawn_by_levels(weights[index], _grid(uniforms[index, 0], subject.dtype))
                _judge(f"{shape}, V = {vocab_size}, row {index}", int(token), drawn, weights[index], allowed)
                held, unsure = held + 1, unsure + (drawn.margin <= allowed)
    _check_sure(held, unsure)
    return Measured(n=held, values={"at_a_boundary": unsure})


def _judge(what: str, token: int, drawn: Drawn, weights: Floats, allowed: float) -> None:
    if not 0 <= token < weights.size or not weights[token] > 0:
        raise CheckFailure(f"{what}: drew id {token}", expected="an id of positive weight")
    if token != drawn.token and drawn.margin > allowed:
        raise CheckFailure(
            f"{what}: drew id {token}, and its uniforms fall to {drawn.token}",
            expected=f"the same id: the nearest boundary is {drawn.margin:.3g} away, and rounding explains {allowed:g}",
        )


def _check_sure(held: int, unsure: int) -> None:
    if unsure > held // 2:
        raise CheckFailure(f"{unsure} of {held} draws lie at a boundary", expected="at most half of them")


@check(
    "T1.large.verification",
    "Among 32 000 and 128 256 ids, on the adapter's own device, a drafted token is kept, or replaced from the residual,"
    " as the uniforms say.",
    group=_GROUP,
)
def _verification(subject: Subject) -> Measured:
    like = _like(subject)
    rng = subject.rng("T1.large.verification")
    allowed = 4 * _BOUNDARY_ERRORS.get(subject.dtype, _BOUNDARY_ERROR)
    held = unsure = 0
    for vocab_size in _sizes(subject):
        shapes = list(_shapes(vocab_size, rng).values())
        rows = np.stack([shapes[index % len(shapes)] for index in range(_ROWS)])
        others = rows + rng.normal(0.0, 1.0, rows.shape)
        probs = subject.engine.probs(native_floats(np.stack([rows, others, others], axis=1), like), sampling_of([{}]))
        target_probs, draft_probs = probs[:, :2], probs[:, 2:]
        p, q = host_copy(target_probs), host_copy(draft_probs)[:, 0]
        proposed = [int(np.argmax(np.cumsum(row) > u * row.sum())) for row, u in zip(q, rng.random(_ROWS), strict=True)]
        uniforms = rng.uniform(0.0, 1.0, (_ROWS, 3, 3))
        uniforms[: _ROWS // 2, 1, 0] = 1 - 2.0**-20  # rejected, unless the target finds the token as likely
        tokens = native_integers(np.array(proposed)[:, None], "int32", like)
        counts = native_integers(np.ones(_ROWS), "int32", like)
        proposal = Proposal(tokens, counts, draft_probs)
        verdict = verify(proposal, target_probs, subject.engine.randomness(uniforms, 1))
        accepted, drawn_tokens = host_copy(verdict.num_accepted), host_copy(verdict.next_token)
        for index, token in enumerate(proposed):
            here = _grid(uniforms[index], subject.dtype)
            margin = abs(here[1, 0] * q[index, token] - p[index, 0, token]) / q[index, token]
            is_kept = p[index, 0, token] >= q[index, token] or here[1, 0] * q[index, token] < p[index, 0, token]
            weights = p[index, 1] if is_kept else np.maximum(p[index, 0] - q[index], 0.0)
            drawn = drawn_by_levels(weights, here[2])
            is_sure = margin > allowed
            held, unsure = held + 1, unsure + (not is_sure or drawn.margin <= allowed)
            if is_sure and int(accepted[index]) != int(is_kept):
                raise CheckFailure(
                    f"V = {vocab_size}, row {index}: {'rejected' if is_kept else 'kept'} id {token}",
                    expected=f"the contrary at u = {here[1, 0]:.6g}, {p[index, 0, token]:.3g} / {q[index, token]:.3g}",
                )
            if is_sure:
                what = f"V = {vocab_size}, row {index}, {'bonus' if is_kept else 'residual'}"
                _judge(what, int(drawn_tokens[index]), drawn, weights, allowed)
    _check_sure(held, unsure)
    return Measured(n=held, values={"at_a_boundary": unsure})
