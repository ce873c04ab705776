"""Load a module through transformers: safetensors only, every weight accounted for, no code that was not asked for."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from ._architecture import refuse_config, refuse_quantization

__all__ = ["load_module"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")


def load_module(
    path_or_id: Any, *, device: str | None, dtype: str, attn_implementation: str | None, hf_kwargs: dict[str, Any]
) -> Any:
    """Return a causal language model of transformers in evaluation mode, on its device.

    Raises
    ------
    FileNotFoundError
        If a directory is missing.
    ValueError
        If an option is wrong, or the weights do not agree with the config.
    CapabilityError
        If the config alone shows that the model cannot be served; nothing was loaded by then.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    name = os.fspath(path_or_id)
    # A hub id has one slash at most; whatever else is not there is a path that is wrong.
    if not Path(name).exists() and (Path(name).is_absolute() or name.count("/") > 1 or name.startswith(".")):
        raise FileNotFoundError(f"no checkpoint directory {name!r}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {name!r}: a checkpoint is a directory with that and safetensors")
    is_placed = any(option in hf_kwargs for option in ("device_map", "tp_plan", "distributed_config"))
    if device is not None and is_placed:
        raise ValueError(
            "`device` cannot be combined with `device_map`, `tp_plan` or `distributed_config`, which place the weights"
        )
    target = None if is_placed else _device(device)
    for_config = {key: hf_kwargs[key] for key in ("trust_remote_code", "revision", "token") if key in hf_kwargs}
    config = transformers.AutoConfig.from_pretrained(name, **for_config)
    refuse_config(config)
    refuse_quantization(hf_kwargs.get("quantization_config"))
    options: dict[str, Any] = {"use_safetensors": True, **hf_kwargs}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if dtype == "float64" and _has_experts(config):
        options.setdefault("experts_implementation", "eager")  # the fused kernels know no float64
    try:
        with _quiet():
            module, report = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=getattr(torch, dtype), output_loading_info=True, **options
            )
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        raise ValueError(
            f"{name}: weights have other shapes than config.json says; transformers listed them"
        ) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"{name}: the checkpoint has no {missing[0]} ({len(missing)} such), which its config asks for")
    module.requires_grad_(False)
    if target is not None and not getattr(module, "is_quantized", False):
        module.to(target)
    return module.eval()


def _device(name: str | None) -> torch.device:
    """Return the device named, or the one there is; one that is not there is refused before anything is loaded."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch built without CUDA
        raise ValueError(f"`device` must name a device of this PyTorch, got {name!r}: {error}") from error
    return device


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars to those who asked for them: a library and a command line print nothing of their own."""
    logging = transformers.utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
