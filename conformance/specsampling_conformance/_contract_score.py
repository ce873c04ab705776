"""T0, the clauses about one `score` call: what comes back, what it may touch, and how much a cache holds."""

import math
from typing import Any

import numpy as np

from specsampling import CacheError, CapabilityError
from specsampling_conformance._cast import FEWEST_IDS, is_hosted
from specsampling_conformance._checks import CheckFailure, Measured, NotApplicable, Subject, check
from specsampling_conformance._host import host_copy, native_integers
from specsampling_conformance._trial import Oracle, Trial, largest_difference

__all__ = ["random_block", "rows_for"]

_MOST_COLUMNS = 4096

_SPACINGS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of the numbers from 1 to 2, by dtype; of a dtype that is not here nothing is said."""


def rows_for(subject: Subject, wanted: int) -> int:
    """Return the batch size to use: `wanted`, or the largest that the adapter declares."""
    return min(wanted, subject.capabilities.max_batch_size or wanted)


def random_block(subject: Subject, rng: np.random.Generator, rows: int, width: int) -> list[list[int]]:
    """Return a block of token ids; ids beyond the first few dozen are left to :func:`every_id`."""
    block: list[list[int]] = rng.integers(0, min(subject.model().vocab_size, 32), size=(rows, width)).tolist()
    return block


@check(
    "T0.model.members",
    "A model has `vocab_size` (a positive integer), `max_rollback` (None or a positive integer), `init_cache`, `score`"
    " and `rollback`; `max_length`, where it is present, is a positive integer.",
)
def _members(subject: Subject) -> None:
    model: Any = subject.model()
    for method in ("init_cache", "score", "rollback"):
        if not callable(getattr(model, method, None)):
            raise CheckFailure(f"the model has no method `{method}`", expected="the three methods of the contract")
    for name, optional in (("vocab_size", False), ("max_rollback", True), ("max_length", True)):
        if not hasattr(model, name):
            if name == "max_length":
                continue
            raise CheckFailure(f"the model has no attribute `{name}`", expected="see the clause")
        value = getattr(model, name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0
        if not whole and not (optional and value is None):
            raise CheckFailure(f"`{name}` is {value!r}", expected=f"a positive integer{' or None' if optional else ''}")
    if model.vocab_size < FEWEST_IDS and not is_hosted(subject):
        raise CheckFailure(
            f"the model has {model.vocab_size} ids, and is none of the suite's checkpoints",
            expected=f"a checkpoint of your own with at least {FEWEST_IDS} ids, of which the suite uses a few",
        )


@check(
    "T0.score.shape",
    "`score` returns a pair: real floating logits of shape `(B, T, V)`, row t being the law of the token after position"
    " t, and the cache.",
)
def _shape(subject: Subject) -> None:
    rng = subject.rng("T0.score.shape")
    for rows in (1, rows_for(subject, 3)):
        trial = Trial(subject, rows, 8)
        for width in (1, 3, 2):
            trial.score(random_block(subject, rng, rows, width))


@check(
    "T0.score.dtype",
    "Logits are no coarser than the dtype that was loaded: float64 is answered in float64, and bfloat16 or float16 may"
    " be answered in float32.",
)
def _dtype(subject: Subject) -> None:
    trial = Trial(subject, 1, 4)
    trial.score(random_block(subject, subject.rng("T0.score.dtype"), 1, 2))
    got = str(trial.logits.dtype).rpartition(".")[2]  # PyTorch's names begin with its own
    if _SPACINGS.get(got, 0.0) > _SPACINGS.get(subject.dtype, math.inf):
        raise trial.failure(
            f"logits of dtype {got}", expected=f"{subject.dtype} or finer, as loaded; does `load` honour `dtype`?"
        )


@check(
    "T0.score.block_equals_steps",
    "One call with T tokens equals T calls with one token, to rounding; the largest difference of logits, delta, is"
    " measured and may not exceed the cap of its dtype.",
)
def _block_equals_steps(subject: Subject) -> Measured:
    rng = subject.rng("T0.score.block_equals_steps")
    oracle, largest, tolerance = Oracle(subject.model()), 0.0, 0.0
    influence = 0.0
    for widths in ((6,), (1, 5), (3, 3), (2, 4), (4, 1, 1)):
        rows = rows_for(subject, 2)
        trial = Trial(subject, rows, 8, oracle)
        for width in widths:
            trial.score(random_block(subject, rng, rows, width))
        largest, tolerance = max(largest, trial.largest), trial.tolerance
        influence = max(influence, *(_influence(oracle, row) for row in trial.rows))
    return Measured(tolerance=tolerance, values={"delta": largest, "influence": influence})


def _influence(oracle: Oracle, text: list[int]) -> float:
    """Return how far logits move, relative to the largest or 1, when the token before the last one is lost."""
    whole, without = oracle.logits(text), oracle.logits([*text[:-2], text[-1]])
    scale = max(1.0, float(np.max(np.abs(whole[np.isfinite(whole)]), initial=0.0)))
    return largest_difference(whole, without) / scale


@check(
    "T0.score.causal",
    "The logits at a position do not depend on the tokens after it, in the same block or in later ones.",
)
def _causal(subject: Subject) -> None:
    rng = subject.rng("T0.score.causal")
    rows = rows_for(subject, 2)
    first = random_block(subject, rng, rows, 4)
    second = [row[:2] + [(token + 1) % subject.model().vocab_size for token in row[2:]] for row in first]
    one, two = Trial(subject, rows, 8), Trial(subject, rows, 8)
    one.score(random_block(subject, np.random.default_rng(0), rows, 1))
    two.score(random_block(subject, np.random.default_rng(0), rows, 1))
    difference = largest_difference(one.score(first)[:, :2], two.score(second)[:, :2])
    if difference > one.tolerance:
        raise two.failure(
            f"the first two positions differ by {difference:.2g} when the last two tokens change",
            expected=f"no difference beyond {one.tolerance:g}",
        )


@check(
    "T0.score.num_logits",
    "`num_logits` asks for the block's last positions: all T by default, any fewer, or none (shape `(B, 0, V)`); the"
    " block is appended whole in every case.",
)
def _num_logits(subject: Subject) -> None:
    rng = subject.rng("T0.score.num_logits")
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    for num_logits in (None, 3, 2, 1, 0):
        trial = Trial(subject, rows, 8, oracle)
        trial.score(random_block(subject, rng, rows, 3), num_logits)
        trial.score(random_block(subject, rng, rows, 1), None if num_logits is None else min(num_logits, 1))
        trial.score(random_block(subject, rng, rows, 2))


@check(
    "T0.score.empty_block",
    "A block may have no tokens, T = 0, on an empty cache as on a full one: its logits have shape `(B, 0, V)`, and"
    " every row stays as it is.",
)
def _empty_block(subject: Subject) -> None:
    rng = subject.rng("T0.score.empty_block")
    rows = rows_for(subject, 2)
    trial = Trial(subject, rows, 4)
    trial.score(random_block(subject, rng, rows, 0))
    trial.score(random_block(subject, rng, rows, 3))
    trial.score(random_block(subject, rng, rows, 0), 0)
    trial.score(random_block(subject, rng, rows, 1))
    trial.score(random_block(subject, rng, rows, 0))


@check(
    "T0.score.every_id",
    "Every id from 0 to V - 1 is a token like any other; id 0 is what padding is made of, and is never masked.",
)
def _every_id(subject: Subject) -> None:
    vocab_size = subject.model().vocab_size
    ids = np.unique(np.linspace(0, vocab_size - 1, 8).astype(np.int64)).tolist()
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    for start in range(0, len(ids), 2):
        trial = Trial(subject, rows, 8, oracle)
        trial.score([[0, ids[start], 0], [ids[-1], 0, ids[start]]][:rows])
        trial.score([[ids[start]], [0]][:rows])


@check(
    "T0.score.integers",
    "Tokens and lengths may be int32 or int64, NumPy or of the namespace and device that the logits came in, at every"
    " call.",
)
def _integers(subject: Subject) -> None:
    rng = subject.rng("T0.score.integers")
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    for dtype in ("int32", "int64"):
        for host in (True, False):
            trial = Trial(subject, rows, 8, oracle)
            trial.score(random_block(subject, rng, rows, 2), dtype=dtype, host=host)
            trial.score(random_block(subject, rng, rows, 2), dtype=dtype, host=host)
            trial.rollback([3] * rows, dtype=dtype, host=host)
            trial.score(random_block(subject, rng, rows, 1), dtype=dtype, host=host)


@check(
    "T0.score.inputs_unchanged", "`score`, `rollback` and `select` do not write to the integer arrays they are given."
)
def _inputs_unchanged(subject: Subject) -> None:
    rng = subject.rng("T0.score.inputs_unchanged")
    rows = rows_for(subject, 2)
    model: Any = subject.model()
    cache, logits = model.init_cache(rows, 8), None
    calls: list[str] = []
    arguments: list[tuple[str, list[Any]]] = [("score", random_block(subject, rng, rows, 3)), ("rollback", [2] * rows)]
    if subject.capabilities.select:
        arguments.append(("select", list(range(rows))[::-1]))
    arguments.append(("score", random_block(subject, rng, rows, 1)))
    for name, values in arguments:
        given = native_integers(values, "int64", logits)
        before = host_copy(given)
        calls.append(f"{name} {values}")
        result = getattr(model, name)(cache, given)
        if name == "score":
            logits, cache = result
        else:
            cache = result
        if not np.array_equal(before, host_copy(given)):
            raise CheckFailure(
                f"its argument was changed to {host_copy(given).tolist()}",
                expected="the argument as given",
                calls=calls,
            )


@check(
    "T0.score.logits_kept",
    "Logits that were returned stay as they are: no later call overwrites them.",
)
def _logits_kept(subject: Subject) -> None:
    rng = subject.rng("T0.score.logits_kept")
    rows = rows_for(subject, 2)
    trial = Trial(subject, rows, 8)
    kept: list[tuple[Any, Any]] = []

    def look() -> None:
        for call, (logits, copy) in enumerate(kept, start=1):
            if not np.array_equal(host_copy(logits), copy, equal_nan=True):
                raise trial.failure(f"the logits that `score` number {call} returned have changed")

    for _ in range(3):
        trial.score(random_block(subject, rng, rows, 2))
        look()
        kept.append((trial.logits, host_copy(trial.logits)))
        trial.rollback([len(row) - 1 for row in trial.rows])
        look()


@check(
    "T0.capacity.exact", "A cache holds as many tokens in each row as its capacity says, again after every rollback."
)
def _capacity_exact(subject: Subject) -> None:
    rng = subject.rng("T0.capacity.exact")
    rows, oracle = rows_for(subject, 2), Oracle(subject.model())
    for capacity in (1, 4, 7):
        trial = Trial(subject, rows, capacity, oracle)
        trial.score(random_block(subject, rng, rows, capacity))
        trial.rollback([capacity - 1] * rows)
        trial.score(random_block(subject, rng, rows, 1))
        for _ in range(2):
            trial.rollback([max(trial.floors[0], capacity - 2, 0)] * rows)
            trial.score(random_block(subject, rng, rows, trial.room))


def _overflow(subject: Subject, check_id: str, lengths: list[int], width: int) -> None:
    rng = subject.rng(check_id)
    rows = len(lengths)
    trial = Trial(subject, rows, 4)
    trial.score(random_block(subject, rng, rows, max(lengths)))
    if len(set(lengths)) > 1:
        trial.rollback(lengths)
    block = random_block(subject, rng, rows, width)
    model, cache = trial.model, trial.cache
    trial.refused(f"score {block}", lambda: model.score(cache, trial.integers(block)), (CacheError,))
    if trial.room:
        trial.score(random_block(subject, rng, rows, trial.room))
    if len(set(lengths)) == 1:  # else that is call number four, and a counterexample has five at most
        trial.rollback([3] * rows)
        trial.score(random_block(subject, rng, rows, 1))


@check(
    "T0.capacity.overflow",
    "A block that does not fit raises `CacheError` before anything is written: the cache passed in is as it was.",
)
def _capacity_overflow(subject: Subject) -> None:
    rows = rows_for(subject, 2)
    for length, width in ((4, 1), (3, 2), (2, 3)):
        _overflow(subject, "T0.capacity.overflow", [length] * rows, width)


@check(
    "T0.capacity.overflow_of_one_row",
    "A block that does not fit one row raises `CacheError`, though it fits the others.",
    requires=("rows", "per_row_rollback"),
)
def _capacity_overflow_of_one_row(subject: Subject) -> None:
    for lengths in ([3, 1], [1, 3], [2, 3]):
        if min(lengths) < max(lengths) - (subject.model().max_rollback or max(lengths)):
            continue
        _overflow(subject, "T0.capacity.overflow_of_one_row", lengths, 2)


@check(
    "T0.capacity.past_max_length",
    "Where the model has a `max_length`, padded columns may lie past it: they are accepted, and rolled back they leave"
    " no trace.",
)
def _past_max_length(subject: Subject) -> None:
    model: Any = subject.model()
    limit = getattr(model, "max_length", None)
    if limit is None or limit > _MOST_COLUMNS:
        raise NotApplicable("the model has no `max_length`, or one too long to be reached here")
    rng = subject.rng("T0.capacity.past_max_length")
    rows = rows_for(subject, 2)
    padding = 2 if model.max_rollback is None else min(2, model.max_rollback)
    text = random_block(subject, rng, rows, limit - 2)
    trial = Trial(subject, rows, limit + padding)
    trial.score(text, 0)
    trial.score([row + [0] * padding for row in random_block(subject, rng, rows, 1)], 0)
    trial.rollback([limit - 1] * rows)
    trial.score(random_block(subject, rng, rows, 1))
    trial.rollback([limit - 1] * rows)
    cache = trial.cache
    padded = [row + [0] * padding for row in random_block(subject, rng, rows, 1)]
    trial.calls.append(f"score {padded}")
    trial.attempt(lambda: model.score(cache, trial.integers(padded)))


@check(
    "T0.rows.limit",
    "A batch larger than the declared `max_batch_size` raises `CapabilityError` when its cache is asked for.",
    requires=("max_batch_size",),
)
def _rows_limit(subject: Subject) -> None:
    most = subject.capabilities.max_batch_size or 0
    trial = Trial(subject, most, 4)
    trial.refused(f"init_cache({most + 1}, 4)", lambda: trial.model.init_cache(most + 1, 4), (CapabilityError,))


@check("T0.compile.declared", "A model that declares `compile_round` has the method.", requires=("compile_round",))
def _compile_declared(subject: Subject) -> None:
    if not callable(getattr(subject.model(), "compile_round", None)):
        raise CheckFailure("the model has no method `compile_round`", expected="what the capabilities declare")
