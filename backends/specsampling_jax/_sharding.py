"""Where a model lives: on one device, or spread over a mesh by heads (tensor parallelism)."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specsampling_numpy import LlamaConfig

__all__ = [
    "Spec",
    "cache_sharding",
    "check_divides",
    "checked_mesh",
    "constrained",
    "devices_of",
    "named_device",
    "place",
    "replicated",
    "weight_sharding",
]

Spec: Any = jax.sharding.PartitionSpec  # typed, unlike the class

_BY_ROW = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
"""Layers whose outputs are split; their biases with them."""

_BY_COLUMN = ("o_proj.weight", "down_proj.weight")
"""Layers whose inputs are split, so that their outputs are sums over the devices; a bias is added after the sum."""

_BY_ID = ("model.embed_tokens.weight", "lm_head.weight")
"""Tables with a row per token id: each device holds some ids, and computes the logits of these."""


def checked_mesh(mesh: Any) -> Mesh:
    """Return `mesh` if it has one axis, with its placement left to the compiler.

    Raises
    ------
    TypeError
        If it is not a mesh.
    ValueError
        If it has another number of axes.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}")
    if len(mesh.axis_names) != 1:
        raise ValueError(f"`mesh` must have one axis, over which the heads are split, got axes {mesh.axis_names}")
    return Mesh(mesh.devices, mesh.axis_names)  # `jax.make_mesh` may have made its axes explicit


def check_divides(mesh: Mesh, config: LlamaConfig) -> None:
    """Raise `ValueError` where the mesh does not divide the heads or the inner size of the model."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % mesh.size:
            raise ValueError(
                f"`mesh` has {mesh.size} devices along its axis {mesh.axis_names[0]!r}, which must divide the model's "
                f"`{name}`, got {size}; take a smaller mesh, or `replicate=True`"
            )


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return how a tensor of a Llama checkpoint is split over a mesh of one axis."""
    axis = mesh.axis_names[0]
    if any(part in name for part in _BY_ROW) or (name in _BY_ID and shape[0] % mesh.size == 0):
        return NamedSharding(mesh, Spec(axis))
    return NamedSharding(mesh, Spec(None, axis) if name.endswith(_BY_COLUMN) else Spec())


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return how keys and values ``(B, kv_heads, capacity, head_dim)`` are split: by heads."""
    return NamedSharding(mesh, Spec(None, mesh.axis_names[0]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device has whole."""
    return NamedSharding(mesh, Spec())


def constrained(x: Any, sharding: NamedSharding) -> Any:
    """Return arrays that are split like that, inside a trace."""
    constrain: Any = jax.lax.with_sharding_constraint
    return constrain(x, sharding)


def place(tensor: Any, dtype: Any, where: Any) -> Any:
    """Return a tensor mapped from a file as an array on a device, or each part of it on its own: no more is read."""
    if not isinstance(where, NamedSharding):
        return jax.device_put(np.asarray(tensor).astype(dtype), where)
    return jax.make_array_from_callback(
        tensor.shape, where, lambda part: np.ascontiguousarray(tensor[part]).astype(dtype)
    )


def devices_of(where: Any) -> frozenset[Any]:
    """Return the devices that arrays placed there are on."""
    if isinstance(where, NamedSharding):
        return frozenset(where.device_set)
    return frozenset({jax.devices()[0] if where is None else where})


def named_device(name: str | None) -> Any:
    """Return the JAX device of that name; None for None.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name is None:
        return None
    platform, _, index = name.partition(":")
    try:
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(sorted({f"{device.platform}:{device.id}" for device in jax.devices()}))
        raise ValueError(f"`device` must be a device that JAX has ({known}), got {name!r}") from error
