"""Read the weights of a checkpoint directory, checked against its config.json.

Everything is checked on the headers, before a weight is read: a wrong file costs an error message, not memory.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ._config import LlamaConfig
from ._json import as_object, read_object

__all__ = ["Weights", "open_weights"]

# bfloat16 is the upper half of a float32, which NumPy lacks: it is read as integers and shifted.
_STORED: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Weights:
    """The tensors of a checkpoint, found and checked, each read when it is asked for.

    Parameters
    ----------
    found : dict
        File, stored dtype, shape and byte offset of each tensor.

    Attributes
    ----------
    has_head : bool
        Whether a head of its own is stored; without one ``lm_head.weight`` is the embedding.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import Weights, open_weights, read_config
    >>> checkpoint = specsampling.bundled("draft")
    >>> config = read_config(checkpoint)
    >>> weights = open_weights(checkpoint, config)
    >>> isinstance(weights, Weights), weights.read("lm_head.weight").shape == (256, config.hidden_size)
    (True, True)
    """

    def __init__(self, found: dict[str, tuple[Path, str, tuple[int, ...], int]]) -> None:
        self.has_head = _HEAD in found
        self._found = {_HEAD: found[_EMBEDDING], **found}

    def read(self, name: str, *, bfloat16: Any = None) -> NDArray[Any]:
        """Return a tensor as it is stored, mapped from its file: a part that is not used is never read.

        Parameters
        ----------
        name : str
            Its name in the file.
        bfloat16 : dtype, optional
            What to take bfloat16 for, from a framework that gives NumPy this dtype; by default it is raised to float32.
        """
        path, stored, shape, offset = self._found[name]
        dtype = _STORED[stored] if stored != "BF16" or bfloat16 is None else bfloat16
        # A plain array: each operation on a memmap would make another memmap, in Python, up to the logits.
        tensor: NDArray[Any] = np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape))
        if stored == "BF16" and bfloat16 is None:
            return (tensor.astype(np.uint32) << 16).view(np.float32)
        return tensor


def open_weights(checkpoint: Path, config: LlamaConfig) -> Weights:
    """Check every tensor's name, shape and dtype against `config`; nothing but safetensors headers is read.

    Parameters
    ----------
    checkpoint : Path
        Directory with model.safetensors, or with shards and model.safetensors.index.json.
    config : LlamaConfig
        What the tensors must fit.

    Returns
    -------
    Weights
        Which reads them by name.

    Raises
    ------
    FileNotFoundError
        If there is neither model.safetensors nor model.safetensors.index.json, or a shard is missing.
    ValueError
        If a file is broken, or a tensor missing, unexpected or of the wrong shape.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import open_weights, read_config
    >>> checkpoint = specsampling.bundled("draft")
    >>> weights = open_weights(checkpoint, read_config(checkpoint))
    >>> weights.has_head, weights.read("model.norm.weight").dtype.name
    (True, 'float16')
    """
    found: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
    for path in _weight_files(checkpoint):
        found |= _read_header(path)
    source = checkpoint / "model.safetensors"
    shapes = config.shapes()
    if config.tie_word_embeddings and _HEAD in found:
        shapes[_HEAD] = shapes[_EMBEDDING]
    for name, shape in shapes.items():
        if name not in found:
            raise ValueError(f"{source}: tensor {name!r} of shape {shape} is missing")
        path, stored, received, _ = found[name]
        if received != shape:
            raise ValueError(f"{path}: tensor {name!r} must have shape {shape} by config.json, got {received}")
        if stored not in _STORED:
            raise ValueError(f"{path}: tensor {name!r} must be one of {', '.join(_STORED)}, got {stored}")
    for name, (path, _, received, _) in found.items():
        # Old checkpoints store RoPE's frequencies.
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{path}: tensor {name!r} of shape {received} is not one that config.json calls for")
    return Weights(found)


def _weight_files(checkpoint: Path) -> list[Path]:
    single, index = checkpoint / "model.safetensors", checkpoint / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(
            f"no model.safetensors and no model.safetensors.index.json in {str(checkpoint)!r}: weights are read from "
            "safetensors only"
        )
    shards = as_object(read_object(index).get("weight_map"), f"{index}: `weight_map`")
    files = []
    for shard in sorted({str(file) for file in shards.values()}):
        if Path(shard).name != shard:
            raise ValueError(f"{index}: a shard must be a file beside the index, got {shard!r}")
        if not (checkpoint / shard).is_file():
            raise FileNotFoundError(f"{index} names {shard!r}, which is not there")
        files.append(checkpoint / shard)
    return files


def _read_header(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """Return file, stored dtype, shape and byte offset of each tensor, once safetensors has found the file sound."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a sound safetensors file: {error}") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: (path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
