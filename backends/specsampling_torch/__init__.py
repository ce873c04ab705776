"""The PyTorch backend: causal language models of transformers, or any module through a function of your own.

The modules, in reading order:

``_checks``
    What every cache refuses, before it writes anything.
``_cache``
    Keys and values in preallocated tensors, each row's block written at that row's own positions.
``_masks``
    Which positions a block may attend to.
``_architecture``
    What has to be known of a transformers model before it can be called right.
``_model``
    `TorchModel`: the three methods of the contract over all that.
``_packing``
    Weights laid out for small blocks on the CPU, and attention that copies no keys.
``_compile``
    The whole forward pass as compiled graphs of static shape.
``_recurrent``
    Snapshots of recurrent states.
``_checkpoint``
    Loading.
``_text``
    `TextGenerator`: from text to text.

Examples
--------
>>> import specsampling
>>> from specsampling_torch import load
>>> model = load(specsampling.bundled("draft"), device="cpu")
>>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=16), [list(b"ROMEO")], num_logits=1)
>>> tuple(logits.shape)
(1, 1, 256)
"""

from os import PathLike
from typing import Any

from ._architecture import CausalLM
from ._model import TorchCache, TorchModel
from ._text import TextEvent, TextGeneration, TextGenerator

__all__ = ["CausalLM", "TextEvent", "TextGeneration", "TextGenerator", "TorchCache", "TorchModel", "load"]


def load(
    checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None, **options: Any
) -> TorchModel:
    """Load a causal language model: what ``specsampling.load_model("torch", …)`` calls.

    Parameters
    ----------
    checkpoint : path or str
        A directory, or the name of a model on the Hugging Face hub.
    dtype : str
        "float32", "float64", "bfloat16" or "float16".
    device : str, optional
        In PyTorch's words; by default ``"cuda"`` where there is one, else ``"cpu"``.
    **options
        As in `TorchModel.from_pretrained`.

    Returns
    -------
    TorchModel
        The model, ready to score.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import load
    >>> load(specsampling.bundled("target"), device="cpu").vocab_size
    256
    """
    return TorchModel.from_pretrained(checkpoint, dtype=dtype, device=device, **options)
