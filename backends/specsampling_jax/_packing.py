"""What goes into a compiled round and what comes out of it: one array each way, so one transfer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsampling import Array, Context, ModelDrafter, RoundOutput

from ._checks import on_host

__all__ = ["Numbers", "Rows", "WIDTH", "pack", "pack_rows", "unpack", "unpack_rows", "wide"]

WIDTH = ModelDrafter.traced_width
"""Tokens of each row's text that go in: a draft lacks one or, after a fully accepted block, two."""


class Rows(NamedTuple):
    """Columns of the integer array ``(B, 4 + WIDTH)`` that goes in: one transfer for all of them."""

    lengths: Array
    num_held: Array
    limits: Array
    end_bans: Array
    recent: Array  # (B, WIDTH): the last tokens, from position ``max(lengths - WIDTH, 0)`` on


class Numbers(NamedTuple):
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


def wide() -> Any:
    """Return the widest floating dtype there is: float32 unless ``jax_enable_x64`` is set."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def unpack_rows(rows: Array) -> Rows:
    """Take apart what `pack_rows` has put together, inside a trace; of a NumPy array, views."""
    return Rows(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:])


def pack(output: RoundOutput, numbers: Numbers) -> Array:
    """Return what the host needs to know as int32 ``(B, n)``, inside a trace."""
    parts = [output.tokens, jnp.stack(numbers, axis=1)]
    parts += [_as_bits(x) for x in (output.overlap, output.logprobs) if x is not None]
    return jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1)


def _as_bits(x: Array) -> Array:
    """Return ``(B, n)`` floating-point numbers as int32."""
    bits = jax.lax.bitcast_convert_type(x.astype(wide()), jnp.int32)
    return bits.reshape(len(x), -1)


def unpack(answer: Any, lookahead: int, has_logprobs: bool) -> tuple[RoundOutput, Numbers]:
    """Take apart what `pack` has put together, on the host."""
    stop = lookahead + 1 + len(Numbers._fields)
    numbers = Numbers(*np.ascontiguousarray(answer[:, lookahead + 1 : stop].T))
    floats = np.ascontiguousarray(answer[:, stop:]).view(wide())
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


def pack_rows(context: Context, num_held: Any, limits: Any, end_bans: Any) -> Any:
    """Return what a round must know of each row as int32 ``(B, n)``, on the host."""
    tokens, lengths = context
    batch_size, width = tokens.shape
    rows = np.zeros((batch_size, 4 + WIDTH), np.int32)
    columns = unpack_rows(rows)
    columns.lengths[:] = lengths
    columns.limits[:] = on_host(limits)
    if num_held is not None:
        columns.num_held[:] = on_host(num_held)
    if end_bans is not None:
        columns.end_bans[:] = on_host(end_bans)
    positions = np.maximum(lengths - WIDTH, 0)[:, None] + np.arange(WIDTH)
    columns.recent[:] = tokens[np.arange(batch_size)[:, None], np.minimum(positions, width - 1)]
    return rows
