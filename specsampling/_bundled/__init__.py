"""The pair of small byte-level models that ships inside the package."""

from pathlib import Path

__all__ = ["bundled"]

_NAMES = ("target", "draft")


def bundled(name: str) -> Path:
    """Return the checkpoint directory of a bundled model.

    Parameters
    ----------
    name : str
        ``"target"`` or ``"draft"``.

    Returns
    -------
    Path
        A directory in Hugging Face's Llama format: config.json and model.safetensors (float16). Read it, don't write.

    Raises
    ------
    ValueError
        If there is no bundled model of that name.

    Examples
    --------
    >>> import json, specsampling
    >>> config = json.loads((specsampling.bundled("target") / "config.json").read_text())
    >>> config["architectures"], config["vocab_size"]
    (['LlamaForCausalLM'], 256)
    """
    if name not in _NAMES:
        raise ValueError(f"`name` must be one of {', '.join(map(repr, _NAMES))}, got {name!r}")
    return Path(__file__).parent / name
