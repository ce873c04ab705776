"""The JAX backend: any pure function, or a Llama-family checkpoint, with whole rounds in one compiled function.

The modules, in reading order:

``_checks``
    What is refused before anything is traced.
``_functions``
    The three methods of the contract over a pure function, inside a trace.
``_model``
    `JaxModel`: the same outside of one, jitted in buckets of shapes.
``_llama``
    A decoder of the Llama family; `specsampling_numpy` reads its config.json and safetensors.
``_sharding``
    How weights and caches are split over a mesh.
``_randomness``
    A `specsampling.Randomness` that asks the host from inside a trace.
``_round``
    Draft, score, verify and roll back in one jitted function.
``_packing``
    What goes into it and comes out of it, in one array each.

Examples
--------
>>> import specsampling
>>> from specsampling_jax import load
>>> model = load(specsampling.bundled("draft"))
>>> logits, cache = model.score(model.init_cache(batch_size=1, capacity=16), [list(b"ROMEO")], num_logits=1)
>>> logits.shape
(1, 1, 256)
"""

from os import PathLike
from typing import Any

from ._functions import JaxCache
from ._model import JaxModel
from ._round import compile_round

__all__ = ["JaxCache", "JaxModel", "compile_round", "load"]


def load(
    checkpoint: str | PathLike[str], *, dtype: str = "float32", device: str | None = None, **options: Any
) -> JaxModel:
    """Load a Llama-family checkpoint: what ``specsampling.load_model("jax", …)`` calls.

    Parameters
    ----------
    checkpoint : path
        Directory with config.json and model.safetensors, as Hugging Face writes it.
    dtype : str
        "float32", "bfloat16", or "float64" where ``jax_enable_x64`` is set.
    device : str, optional
        A platform of JAX, with an index or without: ``"cpu"``, ``"cuda:1"``. None leaves it to JAX.
    **options
        ``mesh`` and ``replicate`` of `JaxModel.from_pretrained`; any other is refused.

    Returns
    -------
    JaxModel
        The model, ready to score.

    Raises
    ------
    TypeError
        If there are other options. `JaxModel.from_pretrained` raises what else can be wrong.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_jax import load
    >>> load(specsampling.bundled("target")).vocab_size
    256
    """
    unknown = sorted(options.keys() - {"mesh", "replicate"})
    if unknown:
        raise TypeError(f"unknown options {', '.join(map(repr, unknown))}: the jax backend takes `mesh`, `replicate`")
    return JaxModel.from_pretrained(checkpoint, dtype=dtype, device=device, **options)
