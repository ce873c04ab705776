"""What has to be known of a transformers model before it can be called right: argument names, masks, limits."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import cache_utils

from specsampling import CapabilityError

from ._masks import FULL, MaskKind, Visibility

__all__ = ["CausalLM", "PROVEN", "context_limit", "device_of", "refuse_config", "refuse_quantization"]

PROVEN = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mamba2",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_next",
    }
)
"""Model types that the tests cover. Any other is held against its own forward pass when it is loaded."""

_ATTENTION = ("eager", "sdpa")


def refuse_config(config: Any) -> None:
    """Raise `CapabilityError` for what the config alone shows to be impossible."""
    name = f"`{getattr(config, 'model_type', type(config).__name__)}`"
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(f"{name} is an encoder-decoder model: this library samples from causal language models")
    text = config.get_text_config()
    if getattr(text, "position_embedding_type", None) in ("relative_key", "relative_key_query") or getattr(
        text, "alibi", False
    ):
        raise CapabilityError(f"{name} derives its positions from padding masks, which rows of unequal length have not")
    refuse_quantization(getattr(config, "quantization_config", None))


def refuse_quantization(quantization: Any) -> None:
    """Raise `CapabilityError` for quantised weights that make a token's law depend on what it is computed with.

    bitsandbytes computes in float16 all columns with an outlier *anywhere in the block*: with its default threshold
    a block of draft tokens gave logits 0.1 away from those of its tokens one by one, so that no text would follow
    either law.
    """
    if quantization is None:
        return
    options = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if options.get("load_in_8bit") and options.get("llm_int8_threshold", 6.0) > 0:
        raise CapabilityError(
            "`quantization_config` asks bitsandbytes for int8 with `llm_int8_threshold` "
            f"{options.get('llm_int8_threshold', 6.0)}: outliers are then looked for across the whole block, and the "
            "law of a token would depend on the tokens drafted after it; set `llm_int8_threshold=0.0`"
        )


def context_limit(config: Any) -> int | None:
    """Return how long a text may be, or None where the config knows no limit.

    RoPE of the types "dynamic" and "longrope" turns *every* position differently once the text is longer than the
    original context, so that what a cache holds would be wrong from then on; texts end before that.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        limit = original or limit
    return limit


def device_of(module: Any) -> Any:
    """Return the device that a module takes its tokens on."""
    first = next(module.parameters()).device
    if first.type != "meta":
        return first
    # Weights that accelerate keeps on disk, or beside the device, are brought to where its hook computes.
    execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution is None:
        raise CapabilityError(f"`module` must have its weights in memory, got a {type(module).__name__} without any")
    return torch.device(execution)


class CausalLM:
    """A transformers causal language model, called with its own argument names and the masks that its layers need.

    Parameters
    ----------
    module : transformers.PreTrainedModel
        The model.

    Attributes
    ----------
    name : str
        How messages call it.
    is_proven : bool
        Whether its model type is one that the tests cover.
    max_length : int or None
        Its context limit.
    config : transformers.PreTrainedConfig
        The model's own.
    dtype : torch.dtype
        That of its weights, and so of masks.
    layers : list
        Transformers' own layer caches, which tell what kind each layer is.

    Raises
    ------
    CapabilityError
        If the architecture cannot be served, by name and with the reason.

    Notes
    -----
    `TorchModel` calls its module through this. It is public for those who bring a cache of their own, as the exporter
    of ``specsampling_onnxruntime`` does.

    Examples
    --------
    >>> import specsampling, torch, transformers
    >>> from specsampling_torch import CausalLM
    >>> path = specsampling.bundled("draft")
    >>> model = CausalLM(transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32"))
    >>> cache, tokens = transformers.DynamicCache(config=model.config), torch.tensor([[82, 79, 77]])
    >>> with torch.no_grad():
    ...     logits = model.logits(tokens, torch.tensor([[0, 1, 2]]), cache, span=3, wanted=torch.tensor([0, 2]))
    >>> tuple(logits.shape)
    (1, 2, 256)
    """

    def __init__(self, module: Any) -> None:
        config = module.config
        self.name = f"`{config.model_type}` ({type(module).__name__})"
        refuse_config(config)
        text = config.get_text_config()
        self.is_proven = config.model_type in PROVEN
        self.max_length = context_limit(config)
        self.config = config
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._module = module
        # The part without the head, which prompts are fed to.
        self._base = module.base_model
        names = inspect.signature(module.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "")
        if not self._cache_name or not hasattr(cache_utils, "LinearAttentionLayer"):
            why = "takes no cache: every step would compute the whole text again"
            if self._cache_name:
                why = f"needs a newer transformers: its cache is unknown to version {transformers.__version__}"
            raise CapabilityError(f"{self.name} {why}")
        if "logits_to_keep" not in names and self._base is module:
            raise CapabilityError(f"{self.name} is no language model: it has no head that returns logits")
        self._has_logits_to_keep = "logits_to_keep" in names
        self._base_names = inspect.signature(self._base.forward).parameters
        self.layers = cache_utils.DynamicCache(config=config).layers
        if any(hasattr(layer, "recurrent_states") and not hasattr(layer, "number_of_states") for layer in self.layers):
            raise CapabilityError(
                f"{self.name} needs a newer transformers: version {transformers.__version__} keeps recurrent states in "
                "another way"
            )
        self._kinds, self._takes_mapping = self._mask_kinds(text)
        attention = getattr(config, "_attn_implementation", None) or "eager"
        if self._kinds and attention not in _ATTENTION:
            raise CapabilityError(
                f"{self.name} is set to {attention!r} attention, which cannot take a mask for rows of unequal length; "
                f"load it with `attn_implementation` 'sdpa' or 'eager'"
            )

    def _mask_kinds(self, config: Any) -> tuple[dict[str, MaskKind | None], bool]:
        """Return the mask of each layer type (None: that type wants none), and whether they are passed by type."""
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        types = getattr(config, "layer_types", None)
        if types is None:
            return {"": MaskKind(window) if window is not None else MaskKind(None, chunk)}, False
        known = {
            "full_attention": FULL,
            "sliding_attention": MaskKind(window),
            "chunked_attention": MaskKind(None, chunk),
            "linear_attention": None,
            "conv": None,
        }
        types = set(types) - {"moe", "mlp", "dummy"}
        strange = sorted(types - known.keys())
        if strange:
            raise CapabilityError(f"{self.name} has layers of an unknown kind, {strange[0]!r}")
        kinds = {kind: known[kind] for kind in types}
        if len(set(kinds.values())) == 1:  # models of one kind of layer take its mask as it is, or none
            return kinds, False
        if "attention_mask, dict)" not in inspect.getsource(inspect.unwrap(type(self._base).forward)):
            raise CapabilityError(f"{self.name} has layers of several kinds and takes no mask for each")
        return kinds, True

    def _masks(self, visibility: Visibility) -> Any:
        if not self._takes_mapping:
            return next((visibility.mask(kind) for kind in self._kinds.values() if kind is not None), None)
        return {name: None if kind is None else visibility.mask(kind) for name, kind in self._kinds.items()}

    def logits(self, tokens: Any, positions: Any, cache: Any, *, span: int, wanted: Any) -> Any:
        """Feed a block of rows that each stand at their own place.

        Parameters
        ----------
        tokens : tensor
            Integers of shape ``(B, T)``.
        positions : tensor
            Integers of shape ``(B, T)``: where each token stands in its row.
        cache : transformers.Cache
            Takes every layer's keys and values of the block, and gives back those of positions 0 to `span`. What lies
            past a token's own position in its row is masked, whatever it is.
        span : int
            How many keys that is.
        wanted : int or tensor
            How many of the block's last positions need logits; or which, integers of shape ``(n,)``.

        Returns
        -------
        tensor or None
            Floats of shape ``(B, n, V)``; None where `wanted` is 0.
        """
        visibility = Visibility(positions, span, self.dtype)
        if isinstance(wanted, int):
            return self(tokens, positions, visibility, cache, wanted)
        named = self._arguments(tokens, positions, visibility, cache)
        if self._has_logits_to_keep:
            return self._module(**named, logits_to_keep=wanted).logits
        return self._module(**named).logits.index_select(1, wanted)

    def _arguments(self, tokens: Any, positions: Any, visibility: Visibility, store: Any) -> dict[str, Any]:
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._masks(visibility),
            self._cache_name: store,
            "use_cache": True,
        }
        return {name: value for name, value in arguments.items() if name in self._base_names}

    def __call__(self, tokens: Any, positions: Any, visibility: Visibility, store: Any, num_logits: int) -> Any:
        """Feed a block through every layer and return the logits of its last `num_logits` positions; None for 0."""
        named = self._arguments(tokens, positions, visibility, store)
        # 0 means "all" to transformers: the head is left out by calling what is below it.
        if num_logits == 0:
            self._base(**named)
            return None
        if self._has_logits_to_keep:
            return self._module(**named, logits_to_keep=num_logits).logits
        return self._module(**named).logits[:, -num_logits:]
