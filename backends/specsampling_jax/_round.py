"""Whole rounds in one compiled function.

What a round is stays where it is: `specsampling.decode_round` is traced as it stands. This module decides what comes in
as an argument and what is fixed: shapes, settings and the models' functions are fixed; weights, caches, uniforms and
three numbers a row are arguments. So nothing that a round's outcome changes compiles anything anew.

A row's text does not go in. A round reads the last two tokens only, which arrive beside the lengths.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsampling import (
    Array,
    CacheError,
    CapabilityError,
    Context,
    DecodeRound,
    Drafter,
    Model,
    ModelDrafter,
    ModelDrafterState,
    Proposal,
    Randomness,
    RoundCarry,
    RoundOutput,
    Sampling,
    UniformRandomness,
    decode_round,
)

from ._checks import on_host
from ._model import Functions, JaxCache, JaxModel, TracedModel, capacity_bucket
from ._randomness import AskingRandomness, Desk

__all__ = ["compile_round"]

_WIDTH = 2
"""Tokens of each row's text that go in: a draft lacks one or, after a fully accepted block, two."""


class _Fixed(NamedTuple):
    """What a compiled round is specialised to, shapes apart."""

    target: Functions
    draft: Functions | None  # None: the proposal comes in as an argument, or there is none
    lookahead: int
    sampling: Sampling
    draft_sampling: Sampling | None
    end_tokens: tuple[int, ...]
    logprobs: Any
    capacity: int
    desk: Desk | None


class _Rows(NamedTuple):
    """Columns of the integer array ``(B, 4 + _WIDTH)`` that goes in: one transfer for all of them."""

    lengths: Array
    num_held: Array
    limits: Array
    end_bans: Array
    recent: Array  # (B, _WIDTH): the last tokens, from position ``max(lengths - _WIDTH, 0)`` on


class _Numbers(NamedTuple):
    """Columns of the integer array that comes out, before the bits of the floating-point ones."""

    num_proposed: Array
    num_accepted: Array
    bad_target_slot: Array
    bad_draft_slot: Array
    draft_calls: Array  # the same in every row, as is the next; fixed, but found out while tracing
    is_point_mass: Array
    target_lengths: Array
    draft_lengths: Array
    num_held: Array


def compile_round(target: JaxModel, drafter: Drafter[Any] | None, sampling: Sampling, lookahead: int) -> DecodeRound:
    """Return a function like `specsampling.decode_round`, for this target, that runs as one compiled function.

    Parameters
    ----------
    target : JaxModel
        The target.
    drafter : Drafter or None
        The drafter that rounds will be called with. A `ModelDrafter` over a `JaxModel` on the same device becomes part
        of the compiled function; any other proposes on the host, and the rest is compiled.
    sampling : Sampling
        The settings that rounds will be called with; others compile again.
    lookahead : int
        Tokens drafted, K; others compile again.

    Returns
    -------
    callable
        With exactly the signature of `specsampling.decode_round`. `context`, `limits` and `end_bans` are host arrays,
        and the output is on the host: it comes in one transfer. Both caches in the carry are donated.

    Raises
    ------
    CapabilityError
        From the function returned, for ``validate=True``: a trace cannot look at numbers.

    Notes
    -----
    Equal functions, settings and shapes share their compiled code, whatever decoder asks; capacities come in buckets. A
    `Randomness` other than `UniformRandomness` is asked by ordered callbacks to the host.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_jax import load
    >>> target, draft = (load(specsampling.bundled(name)) for name in ("target", "draft"))
    >>> generation = specsampling.generate(target, draft, list(b"ROMEO:"), max_new_tokens=8)  # compiles
    >>> len(generation.tokens[0])
    8
    """
    del drafter, sampling, lookahead  # jit keeps the code by what a round is called with
    return _CompiledRound(target)


class _CompiledRound:
    """Rounds of one target; compiled code is shared by all of them."""

    def __init__(self, target: JaxModel) -> None:
        self._target = target

    def __call__(
        self,
        target: Model[Any],
        drafter: Drafter[Any] | None,
        carry: RoundCarry,
        context: Context,
        limits: Array,
        end_bans: Array | None,
        randomness: Randomness,
        /,
        *,
        lookahead: int,
        sampling: Sampling,
        draft_sampling: Sampling | None = None,
        end_tokens: tuple[int, ...] = (),
        logprobs: Any = None,
        validate: bool = False,
    ) -> tuple[RoundOutput, RoundCarry]:
        """Run a round; see `specsampling.decode_round`."""
        if validate:
            raise CapabilityError("`validate` must be False in a compiled round: a trace cannot look at numbers")
        if target is not self._target:
            raise ValueError("`target` must be the model that the round was compiled for")
        context = Context(on_host(context.tokens), on_host(context.lengths).astype(np.int32))
        fixed = _Fixed(
            target=self._target.functions,
            draft=None,
            lookahead=lookahead,
            sampling=sampling,
            draft_sampling=draft_sampling,
            end_tokens=end_tokens,  # bans that have run out are zeros, and compile nothing anew
            logprobs=logprobs,
            capacity=capacity_bucket(context.tokens.shape[1]),
            desk=None,
        )
        is_answered = type(randomness) is UniformRandomness
        uniforms = _uniforms(randomness) if isinstance(randomness, UniformRandomness) and is_answered else None
        if not is_answered:
            fixed = fixed._replace(desk=self._target.desk)

        calls_before = getattr(drafter, "num_calls", 0)
        state, proposal = carry.drafter_state, None
        draft: Any = None
        if drafter is not None and _is_traceable(drafter, self._target):
            draft = drafter
            state = draft.catch_up(state, context, _WIDTH)
            fixed = fixed._replace(draft=draft.model.functions)
            _check_room("draft", state.cache, np.minimum(state.num_held, context.lengths - 1), _WIDTH)
            _check_room("draft", state.cache, None, context.lengths + lookahead - 1)
        elif drafter is not None:
            settings = sampling if draft_sampling is None else draft_sampling
            proposed, state = drafter.propose(state, context, lookahead, settings, randomness)
            proposal = _as_arguments(proposed)
        _check_room("target", carry.target_cache, context.lengths - 1, lookahead + 1)
        arguments = (
            (self._target.params, None if draft is None else draft.model.params),
            (carry.target_cache.arrays, None if draft is None else state.cache.arrays),
            _pack_rows(context, None if draft is None else state.num_held, limits, end_bans),
            uniforms,
            proposal,
        )
        if fixed.desk is None:
            packed, like, arrays = _run(fixed, *arguments)
            answer = np.asarray(packed)  # the one transfer, and where the host waits
        else:
            with fixed.desk.open(randomness):
                packed, like, arrays = _run(fixed, *arguments)
                answer = np.asarray(packed)

        output, numbers = _unpack(answer, lookahead, logprobs is not None)
        if draft is not None:
            draft.num_calls += output.draft_calls
            cache = JaxCache(arrays[1], numbers.draft_lengths, state.cache.capacity)
            state = ModelDrafterState(cache, numbers.num_held, like)
        output = output._replace(draft_calls=getattr(drafter, "num_calls", 0) - calls_before)
        cache = JaxCache(arrays[0], numbers.target_lengths, carry.target_cache.capacity)
        return output, RoundCarry(cache, state, like)


class _Given:
    """A drafter inside a trace whose proposal was made outside."""

    def __init__(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def init(self, batch_size: int, capacity: int) -> None:
        """Hold nothing."""

    def propose(
        self,
        state: None,
        context: Context,  # noqa: ARG002
        lookahead: int,  # noqa: ARG002
        sampling: Sampling,  # noqa: ARG002
        randomness: Randomness,  # noqa: ARG002
    ) -> tuple[Proposal, None]:
        """Propose what was proposed."""
        return self._proposal, state


@functools.partial(jax.jit, static_argnames=("fixed",), donate_argnames=("arrays",))
def _run(
    fixed: _Fixed, params: Any, arrays: Any, rows: Array, uniforms: Array | None, proposal: Proposal | None
) -> tuple[Array, Array, Any]:
    """Trace a round; return what the host needs in one array, the rows' next tokens, and both caches."""
    row = _Rows(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:])
    lengths = row.lengths
    zeros = jnp.zeros_like(lengths)
    columns = jnp.maximum(lengths - _WIDTH, 0)[:, None] + jnp.arange(_WIDTH, dtype=lengths.dtype)
    tokens = jnp.zeros((len(lengths), fixed.capacity), jnp.int32)
    tokens = tokens.at[jnp.arange(len(lengths))[:, None], columns].set(row.recent, mode="drop")
    randomness: Randomness
    if fixed.desk is None:
        assert uniforms is not None
        randomness = UniformRandomness(uniforms, (uniforms.shape[1] - 1) // 2)
    else:
        randomness = AskingRandomness(fixed.desk)

    drafter: Drafter[Any] | None = None
    state: Any = None
    if fixed.draft is not None:
        drafter = ModelDrafter(TracedModel(fixed.draft, params[1]))
        state = ModelDrafterState(JaxCache(arrays[1], lengths, fixed.capacity), row.num_held, zeros)
    elif proposal is not None:
        drafter = _Given(proposal)
    output, carry = decode_round(
        TracedModel(fixed.target, params[0]),
        drafter,
        RoundCarry(JaxCache(arrays[0], lengths, fixed.capacity), state, zeros),
        Context(tokens, lengths),
        row.limits,
        row.end_bans if fixed.end_tokens else None,
        randomness,
        lookahead=fixed.lookahead,
        sampling=fixed.sampling,
        draft_sampling=fixed.draft_sampling,
        end_tokens=fixed.end_tokens,
        logprobs=fixed.logprobs,
    )
    state = carry.drafter_state
    numbers = _Numbers(
        num_proposed=output.num_proposed,
        num_accepted=output.num_accepted,
        bad_target_slot=output.bad_target_slot,
        bad_draft_slot=output.bad_draft_slot,
        draft_calls=zeros + output.draft_calls,
        is_point_mass=zeros + int(output.is_point_mass),
        target_lengths=carry.target_cache.lengths,
        draft_lengths=zeros if state is None else state.cache.lengths,
        num_held=zeros if state is None else state.num_held,
    )
    parts = [output.tokens, jnp.stack(numbers, axis=1)]
    parts += [_as_bits(x) for x in (output.overlap, output.logprobs) if x is not None]
    packed = jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1)
    return packed, carry.like, (carry.target_cache.arrays, None if state is None else state.cache.arrays)


def _wide() -> Any:
    """Return the widest floating dtype there is: float32 unless ``jax_enable_x64`` is set."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def _as_bits(x: Array) -> Array:
    """Return ``(B, n)`` floating-point numbers as int32."""
    bits = jax.lax.bitcast_convert_type(x.astype(_wide()), jnp.int32)
    return bits.reshape(len(x), -1)


def _unpack(answer: Any, lookahead: int, has_logprobs: bool) -> tuple[RoundOutput, _Numbers]:
    """Take apart what `_run` has put together, on the host."""
    stop = lookahead + 1 + len(_Numbers._fields)
    numbers = _Numbers(*np.ascontiguousarray(answer[:, lookahead + 1 : stop].T))
    floats = np.ascontiguousarray(answer[:, stop:]).view(_wide())
    output = RoundOutput(
        tokens=answer[:, : lookahead + 1],
        num_proposed=numbers.num_proposed,
        num_accepted=numbers.num_accepted,
        bad_target_slot=numbers.bad_target_slot,
        bad_draft_slot=numbers.bad_draft_slot,
        logprobs=floats[:, lookahead:] if has_logprobs else None,
        overlap=floats[:, :lookahead],
        draft_calls=int(numbers.draft_calls[0]),
        is_point_mass=bool(numbers.is_point_mass[0]),
    )
    return output, numbers


def _pack_rows(context: Context, num_held: Any, limits: Any, end_bans: Any) -> Any:
    tokens, lengths = context
    zeros = np.zeros_like(lengths)
    columns = np.maximum(lengths - _WIDTH, 0)[:, None] + np.arange(_WIDTH)
    rows = _Rows(
        lengths=lengths,
        num_held=zeros if num_held is None else on_host(num_held),
        limits=on_host(limits),
        end_bans=zeros if end_bans is None else on_host(end_bans),
        recent=tokens[np.arange(len(lengths))[:, None], np.minimum(columns, tokens.shape[1] - 1)],
    )
    return np.column_stack(rows).astype(np.int32)


def _uniforms(randomness: UniformRandomness) -> Any:
    """Return the uniforms on the host, in the widest dtype of JAX: narrower ones are made of them in the trace."""
    return randomness.uniforms_like(np.zeros(0, _wide()))


def _is_traceable(drafter: Drafter[Any], target: JaxModel) -> bool:
    # Not a subclass, which may propose in another way.
    return type(drafter) is ModelDrafter and type(drafter.model) is JaxModel and drafter.model.device == target.device


def _as_arguments(proposal: Proposal) -> Proposal:
    """Return a drafter's proposal as arrays that jit takes."""

    def argument(x: Any) -> Any:
        if isinstance(x, np.ndarray | jax.Array):
            return x
        try:
            return jax.dlpack.from_dlpack(x)  # device to device
        except (TypeError, ValueError, RuntimeError):
            return on_host(x)

    tokens, num_tokens = (argument(x).astype(np.int32) for x in proposal[:2])
    return Proposal(tokens, num_tokens, None if proposal.probs is None else argument(proposal.probs))


def _check_room(name: str, cache: JaxCache, kept: Any, more: Any) -> None:
    """Refuse a round that needs more of a cache than it holds or has room for; XLA would drop or clamp the index.

    `kept` is what each row is rolled back to first; None for whatever the round makes of it.
    """
    if kept is not None:
        short = kept > cache.lengths
        if np.any(short):
            row = int(np.argmax(short))
            raise CacheError(
                f"row {row} of the {name}'s cache holds {cache.lengths[row]} tokens and cannot be rolled back to "
                f"{kept[row]}"
            )
    needed = more if kept is None else kept + more
    if np.any(needed > cache.capacity):
        row = int(np.argmax(needed))
        raise CacheError(
            f"row {row} of the {name}'s cache needs room for {needed[row]} tokens in this round, and the cache's "
            f"capacity is {cache.capacity}; ask `init_cache` for a larger one"
        )
