"""Make a graph with a cache that is written in place from a causal language model of transformers."""

from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["export"]


def export(module: Any, out: str | PathLike[str]) -> Path:
    """Write the ONNX graph of a causal language model of transformers.

    Parameters
    ----------
    module : transformers.PreTrainedModel
        The model, on the CPU, in float32 or float16. Any that the PyTorch backend serves and whose layers all keep keys
        and values.
    out : path
        The file to write. Large weights go to a second file beside it.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    CapabilityError
        If the architecture cannot be served.

    Notes
    -----
    Needs torch, transformers and onnxscript. The model is traced by ``torch.onnx.export`` with at least two entries on
    every dynamic axis, because an axis of one would be taken to be always one.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import specsampling, transformers
    >>> from specsampling_onnxruntime import OnnxModel, export
    >>> module = transformers.AutoModelForCausalLM.from_pretrained(specsampling.bundled("draft"), dtype="float32")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = OnnxModel(export(module, pathlib.Path(folder) / "draft.onnx"))
    >>> model.layout, model.vocab_size
    ('in place', 256)
    """
    from ._tracing import trace  # needs torch

    trace(module, Path(out))
    return Path(out)
