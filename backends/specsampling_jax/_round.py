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
from ._functions import COMPILER_OPTIONS, Functions, JaxCache, TracedModel, capacity_bucket
from ._model import JaxModel
from ._packing import WIDTH, Numbers, pack, pack_rows, unpack, unpack_rows, wide
from ._randomness import AskingRandomness, answering
from ._sharding import constrained, replicated

__all__ = ["compile_round"]


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
    asks_host: bool


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
    `Randomness` other than `UniformRandomness` is asked by callbacks to the host, which on one device keep their order.

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
            draft_sampling=None,
            end_tokens=end_tokens,  # bans that have run out are zeros, and compile nothing anew
            logprobs=logprobs,
            capacity=capacity_bucket(context.tokens.shape[1]),
            # A subclass may answer in another way.
            asks_host=type(randomness) is not UniformRandomness,
        )

        calls_before = getattr(drafter, "num_calls", 0)
        state, proposal = carry.drafter_state, None
        draft: Any = None
        if drafter is not None and _is_traceable(drafter, self._target):
            draft = drafter
            state = draft.catch_up(state, context, WIDTH)
            fixed = fixed._replace(draft=draft.model.functions, draft_sampling=draft_sampling)
            _check_room("draft", state.cache, np.minimum(state.num_held, context.lengths - 1), WIDTH)
            _check_room("draft", state.cache, None, context.lengths + lookahead - 1)
        elif drafter is not None:
            settings = sampling if draft_sampling is None else draft_sampling
            proposed, state = drafter.propose(state, context, lookahead, settings, randomness)
            if lookahead or proposed.tokens.shape[1] or proposed.probs is not None:
                proposal = _as_arguments(proposed, self._target)
            # else this is the round of no drafter, which may be compiled already
        _check_room("target", carry.target_cache, context.lengths - 1, lookahead + 1)
        params = (self._target.params, None if draft is None else draft.model.params)
        arrays = (carry.target_cache.arrays, None if draft is None else state.cache.arrays)
        rows = pack_rows(context, None if draft is None else state.num_held, limits, end_bans)
        if isinstance(randomness, UniformRandomness) and not fixed.asks_host:
            packed, like, arrays = _run(fixed, params, arrays, rows, _uniforms(randomness), proposal)
            answer = np.asarray(packed)  # the one transfer, and where the host waits
        else:
            with answering(randomness) as round_id:
                packed, like, arrays = _run(fixed, params, arrays, rows, round_id, proposal)
                answer = np.asarray(packed)

        output, numbers = unpack(answer, lookahead, logprobs is not None)
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
        context: Context,  # noqa: ARG002 (any drafter's signature)
        lookahead: int,  # noqa: ARG002 (any drafter's signature)
        sampling: Sampling,  # noqa: ARG002 (any drafter's signature)
        randomness: Randomness,  # noqa: ARG002 (any drafter's signature)
    ) -> tuple[Proposal, None]:
        """Propose what was proposed."""
        return self._proposal, state


@functools.partial(jax.jit, static_argnames=("fixed",), donate_argnames=("arrays",), compiler_options=COMPILER_OPTIONS)
def _run(
    fixed: _Fixed, params: Any, arrays: Any, rows: Array, decisions: Array, proposal: Proposal | None
) -> tuple[Array, Array, Any]:
    """Trace a round; return what the host needs in one array, the carry's `like` (which is empty), and both caches.

    `decisions` is the round's uniforms, or the id under which the host answers.
    """
    row = unpack_rows(rows)
    lengths = row.lengths
    zeros = jnp.zeros_like(lengths)
    columns = jnp.maximum(lengths - WIDTH, 0)[:, None] + jnp.arange(WIDTH, dtype=lengths.dtype)
    tokens = jnp.zeros((len(lengths), fixed.capacity), jnp.int32)
    tokens = tokens.at[jnp.arange(len(lengths))[:, None], columns].set(row.recent, mode="drop")
    sharding = fixed.target.sharding
    randomness: Randomness
    if fixed.asks_host:
        randomness = AskingRandomness(decisions, ordered=sharding is None)
    else:
        randomness = UniformRandomness(decisions, (decisions.shape[1] - 1) // 2)

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
    numbers = Numbers(
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
    packed = pack(output, numbers)
    if sharding is not None:
        packed = constrained(packed, replicated(sharding.mesh))
    return packed, carry.like, (carry.target_cache.arrays, None if state is None else state.cache.arrays)


def _uniforms(randomness: UniformRandomness) -> Any:
    """Return the uniforms on the host, in the widest dtype of JAX: narrower ones are made of them in the trace."""
    return randomness.uniforms_like(np.zeros(0, wide()))


def _is_traceable(drafter: Drafter[Any], target: JaxModel) -> bool:
    # Not a subclass, which may propose in another way.
    return type(drafter) is ModelDrafter and type(drafter.model) is JaxModel and drafter.model.devices == target.devices


def _as_arguments(proposal: Proposal, target: JaxModel) -> Proposal:
    """Return a drafter's proposal as arrays that jit takes beside those of `target`."""

    def argument(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x
        if isinstance(x, jax.Array):  # jit refuses arrays of other devices than the rest
            return x if x.devices() == target.devices else np.asarray(x)
        try:
            return jax.dlpack.from_dlpack(x)  # device to device
        except (TypeError, ValueError, RuntimeError, BufferError):
            return on_host(x)

    tokens, num_tokens = (argument(x).astype(np.int32) for x in proposal[:2])
    return Proposal(tokens, num_tokens, None if proposal.probs is None else argument(proposal.probs))


def _check_room(name: str, cache: JaxCache, kept: Any, more: Any) -> None:
    """Refuse a round that needs more of a cache than it holds or has room for; XLA would drop or clamp the index.

    `kept` is what each row is rolled back to first; None for whatever the round makes of it.
    """
    if kept is not None:
        short = kept > cache.lengths
        if short.any():
            row = int(short.argmax())
            raise CacheError(
                f"row {row} of the {name}'s cache holds {cache.lengths[row]} tokens and cannot be rolled back to "
                f"{kept[row]}"
            )
    needed = more if kept is None else kept + more
    if (needed > cache.capacity).any():
        row = int(needed.argmax())
        raise CacheError(
            f"row {row} of the {name}'s cache needs room for {needed[row]} tokens in this round, and the cache's "
            f"capacity is {cache.capacity}; ask `init_cache` for a larger one"
        )
