"""Matrix products with weights in floating point, or in blocks of integers (MatMulNBits)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._graph import CONTRIBUTED, GraphWriter

__all__ = ["BITS", "add_product", "pack"]

BITS = {"int4": 4, "int8": 8}
"""Bits of a stored weight."""

_BLOCK = 32


def add_product(
    graph: GraphWriter,
    x: str,
    name: str,
    weight: NDArray[Any],
    bias: NDArray[Any] | None,
    *,
    bits: int | None,
    output: str | None = None,
) -> str:
    """Add ``x @ weight.T + bias`` for a weight ``(outputs, inputs)``."""
    bias_name = None if bias is None else graph.add_weight(f"{name}.bias", bias)
    outputs, inputs = weight.shape
    if bits is None:
        matrix = graph.add_weight(f"{name}.weight", np.ascontiguousarray(weight.T))
        last = output if bias is None else None
        product = graph.add("MatMul", x, matrix, output=last)
        return product if bias_name is None else graph.add("Add", product, bias_name, output=output)
    packed, scales = pack(weight, bits)
    operands = [graph.add_weight(f"{name}.packed", packed), graph.add_weight(f"{name}.scales", scales)]
    if bias_name is not None:
        operands += ["", "", bias_name]
    return graph.add(
        "MatMulNBits", x, *operands, output=output, domain=CONTRIBUTED,
        K=inputs, N=outputs, bits=bits, block_size=_BLOCK, accuracy_level=1,
    )  # fmt: skip


def pack(weight: NDArray[Any], bits: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Round a matrix ``(outputs, inputs)`` to integers with a scale for every 32 inputs.

    Returns
    -------
    packed : array
        Bytes ``(outputs, blocks, 32 * bits / 8)``; zero is stored as half the range, and of two 4-bit weights that
        share a byte the first has the lower half.
    scales : array
        ``(outputs, blocks)``, in the weight's dtype.
    """
    outputs, inputs = weight.shape
    blocks = -(-inputs // _BLOCK)
    padded = np.zeros((outputs, blocks * _BLOCK), weight.dtype)
    padded[:, :inputs] = weight
    padded = padded.reshape(outputs, blocks, _BLOCK)
    half = 2 ** (bits - 1)
    scales = abs(padded).max(axis=-1) / (half - 1)
    integers = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]) + half
    packed = integers.astype(np.uint8)
    if bits == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    return np.ascontiguousarray(packed), scales.astype(weight.dtype)
