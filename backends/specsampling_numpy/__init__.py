"""The reference backend: a Llama-family decoder and a table of next-token laws, in plain NumPy.

Read it first and copy it for an adapter of your own. A model owes the library three methods over a cache of its own
making (`specsampling.Model`), and here they are, as short as they get:

``init_cache(batch_size, capacity)``
    Allocate once. A cache is a NamedTuple: memory for `capacity` tokens a row, and how many each row holds.
``score(cache, tokens, num_logits=None)``
    Write the block behind each row's own length, let every position attend to its own row up to itself, return logits
    for the last positions only, and the cache with longer lengths.
``rollback(cache, lengths)``
    Shorten the lengths. Nothing is erased: what lies past a row's length is never read and is overwritten next time.
    That one rule is all there is to speculation's bookkeeping.

The modules, in reading order:

``_table``
    `TableModel`, the contract with nothing around it: laws written down in an array or a function.
``_cache``
    What every cache refuses, before it writes anything.
``_llama``
    `NumpyModel`, a decoder of the Llama family with a key-value cache.
``_config``
    config.json: sizes, constants, windows and rotations, checked as they are read.
``_json``
    What of a JSON file is refused, and how it is named.
``_checkpoint``
    config.json and safetensors, held against each other before a weight is read.

Examples
--------
>>> import specsampling
>>> from specsampling_numpy import load
>>> model = load(specsampling.bundled("draft"))
>>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=16), [list(b"ROMEO")], num_logits=1)
>>> logits.shape
(1, 1, 256)
"""

from os import PathLike
from pathlib import Path
from typing import Any

from ._checkpoint import Weights, open_weights
from ._config import FAMILIES, LlamaConfig, read_config
from ._llama import NumpyModel
from ._table import TableModel

__all__ = ["FAMILIES", "LlamaConfig", "NumpyModel", "TableModel", "Weights", "load", "open_weights", "read_config"]


def load(
    checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None, **options: Any
) -> NumpyModel:
    """Load a Llama-family checkpoint: what ``specsampling.load_model("numpy", …)`` calls.

    Parameters
    ----------
    checkpoint : path
        Directory with config.json and model.safetensors, as Hugging Face writes it.
    dtype : str
        "float32" or "float64"; weights stored in another floating dtype are converted.
    device : str, optional
        None or "cpu".
    **options
        None are known; any is refused.

    Returns
    -------
    NumpyModel
        The model, ready to score.

    Raises
    ------
    FileNotFoundError
        If the directory or a file in it is missing.
    ValueError
        If `dtype` or `device` is another, or the files do not agree with each other.
    TypeError
        If there are options.
    CapabilityError
        If the architecture is not supported.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_numpy import load
    >>> load(specsampling.bundled("target"), dtype="float64").vocab_size
    256
    """
    if device not in (None, "cpu"):
        raise ValueError(f"`device` must be 'cpu' or None, got {device!r}: this backend computes with NumPy")
    if options:
        raise TypeError(f"unknown options {', '.join(map(repr, sorted(options)))}: the numpy backend takes none")
    return NumpyModel(Path(checkpoint), dtype=dtype)
