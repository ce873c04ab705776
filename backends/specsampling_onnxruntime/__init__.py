"""The ONNX Runtime backend: graphs of four layouts, with a cache that stays on the device.

The modules, in reading order:

``_checks``
    What every cache refuses, before a session runs.
``_graph``, ``_quantization``, ``_build``
    `build`: from a Llama-family checkpoint to a graph whose cache is written in place.
``_layouts``
    How a graph keeps its keys and values, told from its inputs and outputs.
``_device``
    Providers, and memory that is rearranged where it is.
``_stores``
    A batch's memory for each layout.
``_model``
    `OnnxModel`: the three methods of the contract over all that.

Examples
--------
>>> import specsampling
>>> from specsampling_onnxruntime import load
>>> model = load(specsampling.bundled("draft"))
>>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=16), [list(b"ROMEO")], num_logits=1)
>>> logits.shape
(1, 1, 256)
"""

from os import PathLike
from pathlib import Path
from typing import Any

from ._build import build
from ._export import export
from ._model import OnnxCache, OnnxModel

__all__ = ["OnnxCache", "OnnxModel", "build", "export", "load"]


def load(
    checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None, **options: Any
) -> OnnxModel:
    """Load a graph, or build that of a checkpoint: what ``specsampling.load_model("onnxruntime", …)`` calls.

    Parameters
    ----------
    checkpoint : path
        An ONNX file, or a directory with config.json and safetensors of the Llama family.
    dtype : str
        What to build: "float32", "float16", "int8" or "int4", the last two of weights only. Of a file it is the dtype
        of the logits, which is not changed.
    device : str, optional
        ``"cpu"``, the default, ``"cuda"`` or ``"cuda:N"``.
    **options
        As in `OnnxModel`.

    Returns
    -------
    OnnxModel
        The model, ready to score.

    Raises
    ------
    FileNotFoundError
        If there is no such file or directory.
    ValueError
        If a file's logits have another dtype.

    Notes
    -----
    `OnnxModel` and `build` say what else is refused.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_onnxruntime import load
    >>> load(specsampling.bundled("target"), device="cpu").vocab_size
    256
    """
    place = "cpu" if device is None else device
    if Path(checkpoint).is_dir():
        return OnnxModel.from_checkpoint(checkpoint, dtype=dtype, device=place, **options)
    model = OnnxModel(checkpoint, device=place, **options)
    if model.dtype != dtype:
        raise ValueError(f"{checkpoint} gives logits in {model.dtype}, got `dtype` {dtype!r}: a graph has but one")
    return model
