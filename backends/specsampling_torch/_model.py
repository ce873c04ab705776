"""A PyTorch module as a model of the library: blocks of tokens in, logits out, each row at its own length."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specsampling import Capabilities, CapabilityError

from ._architecture import CausalLM, device_of
from ._cache import KeyValueShape, RecordingLayer, RowStore, ShapeRecorder, out_of_memory
from ._checks import Ints, checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes
from ._compile import CompiledForward, bucket, refuse_compilation
from ._masks import Visibility
from ._packing import can_pack, group_heads, packed_copy
from ._recurrent import SnapshotStore, is_recurrent, snapshot_bytes

__all__ = ["TorchCache", "TorchModel"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")

# How far apart two ways of computing the same logits may be, relative to their standard deviation.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


class TorchCache(NamedTuple):
    """Keys and values, or states, of a batch of texts.

    Attributes
    ----------
    store : RowStore
        The memory. Written in place.
    lengths : ndarray
        Integers of shape ``(B,)``, on the host: how many tokens each row holds.
    capacity : int
        Tokens that each row has room for.
    floors : ndarray or None
        Integers of shape ``(B,)``: how far back each row may go; None where that is any number of tokens.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import load
    >>> model = load(specsampling.bundled("draft"), device="cpu")
    >>> _, cache = model.score(model.init_cache(batch_size=2, capacity=8), [[82, 79, 77], [74, 85, 0]], num_logits=0)
    >>> cache = model.rollback(cache, [3, 2])
    >>> cache.lengths.tolist(), cache.capacity, cache.floors
    ([3, 2], 8, None)
    """

    store: RowStore
    lengths: Ints
    capacity: int
    floors: Ints | None


class TorchModel:
    """A causal language model in PyTorch, with a cache that rolls each row back on its own.

    Parameters
    ----------
    module : torch.nn.Module
        A causal language model of transformers, or any module together with `forward`. It is put into evaluation mode.
    forward : callable, optional
        ``forward(module, tokens, positions, mask, cache, num_logits)`` for modules that are not of transformers. It
        returns logits ``(B, num_logits, V)`` of the block's last positions (anything where `num_logits` is 0), given
        tokens and positions ``(B, T)`` and an additive mask ``(B, 1, T, span)``; each layer calls
        ``cache.update(keys, values, layer)`` with ``(B, heads, T, size)`` tensors and attends to the ``span`` keys and
        values that it returns.
    max_length : int, optional
        Context limit, where it is not to be taken from the module's config.
    max_rollback : int, optional
        For recurrent models: how many tokens back a row can go, 8 by default. Each costs the memory of a state.
    pack_weights : bool, default: False
        On the CPU, in float32, bfloat16 or float16: keep the weights in the order that oneDNN multiplies by, so that a
        block of a few tokens costs what one token costs. The packed weights are a copy; the module given stays as it
        is, and can be dropped.
    compile : bool, default: False
        Compile the forward pass of blocks of up to 33 tokens, one graph per shape; weights are packed where they can
        be. See `warm_up`. A compiled model has no `select`: another number of rows would be another graph.

    Attributes
    ----------
    module : torch.nn.Module
        The module.
    vocab_size : int
        Number of token ids, V: as many as there are logits.
    max_length : int or None
        Context limit. A cache may be larger, because padding may lie past the limit.
    max_rollback : int or None
        None: rows go back any number of tokens. Recurrent models have a limit.
    capabilities : Capabilities
        What the conformance suite may ask for.

    Raises
    ------
    CapabilityError
        If the architecture cannot be served: encoder-decoder models, models without a cache, attention that takes no
        masks, layers of an unknown kind; and any model of transformers outside the tested families whose logits differ
        from those of its own forward pass, which is tried on a dozen tokens.

    Notes
    -----
    A cache is modified in place and must not be used again once passed in; the module is never modified.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_torch import TorchModel
    >>> model = TorchModel.from_pretrained(specsampling.bundled("draft"), device="cpu")
    >>> cache = model.init_cache(batch_size=2, capacity=8)
    >>> logits, cache = model.score(cache, [[82, 79, 77], [74, 85, 0]])  # the second row is padded,
    >>> tuple(logits.shape)
    (2, 3, 256)
    >>> cache = model.rollback(cache, [3, 2])  # and now the padding is gone
    >>> logits, cache = model.score(cache, [[69], [76]], num_logits=1)
    >>> cache.lengths.tolist()
    [4, 3]
    """

    def __init__(
        self,
        module: Any,
        *,
        forward: Callable[..., Any] | None = None,
        max_length: int | None = None,
        max_rollback: int | None = None,
        pack_weights: bool = False,
        compile: bool = False,  # noqa: A002 (what transformers and PyTorch call it)
    ) -> None:
        if pack_weights and not any(can_pack(part) for part in module.modules()):
            raise CapabilityError(
                f"`pack_weights` needs linear layers on the CPU, in float32 or in a 16-bit dtype that its oneDNN "
                f"multiplies; {type(module).__name__} has none"
            )
        if pack_weights or compile:
            module = packed_copy(module)
        self.module = module.eval()
        self._lm: CausalLM | None = None
        layers = None
        if forward is None:
            if not hasattr(module, "config") or not hasattr(module, "base_model"):
                raise CapabilityError(
                    f"`module` must be a causal language model of transformers, got {type(module).__name__}; any other "
                    "module needs `forward`, a function that calls it"
                )
            self._lm = CausalLM(module)
            self._call: Callable[..., Any] = self._lm
            layers = self._lm.layers
            if pack_weights or compile:
                group_heads(module)
            max_length = self._lm.max_length if max_length is None else max_length
        else:
            given = forward

            def call(tokens: Any, positions: Any, visibility: Visibility, store: Any, num_logits: int) -> Any:
                return given(module, tokens, positions, visibility.mask(), store, num_logits)

            self._call = call
        self._name = type(module).__name__ if self._lm is None else self._lm.name
        self.max_length = max_length
        self.device = device_of(module)
        is_proven = self._lm is None or self._lm.is_proven
        try:
            self._layers, logits = self._probe(layers)
        except Exception as error:  # whatever a model of another make raises when it is called like the tested ones
            if is_proven:
                raise
            raise CapabilityError(f"{self._name} cannot be called with a mask and positions: {error}") from error
        self.vocab_size: int = logits.shape[-1]
        self._logits_dtype, self._logits_device = logits.dtype, logits.device
        shapes = [layer for layer in self._layers if isinstance(layer, KeyValueShape)]
        self._mask_dtype = shapes[0].dtype if shapes else logits.dtype
        self.max_rollback: int | None = None
        if any(is_recurrent(layer) for layer in self._layers):
            self.max_rollback = 8 if max_rollback is None else max_rollback
            if self.max_rollback < 1:
                raise ValueError(f"`max_rollback` must be at least 1, got {max_rollback}")
        elif max_rollback is not None:
            raise ValueError(f"`max_rollback` is for recurrent models: {self._name} goes back any number of tokens")
        self._compiled: CompiledForward | None = None
        self.capabilities = Capabilities(dtypes=_DTYPES, select=not compile)
        if not is_proven:
            self._compare_with_own_forward("is outside the tested families")
        elif getattr(module, "is_quantized", False):
            self._compare_with_own_forward("has quantised weights")
        if compile:
            refuse_compilation(self._name, module, is_recurrent=self.max_rollback is not None)
            self._compiled = CompiledForward(self._name, self._call, self._layers, self._mask_dtype, max_length)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: Any,
        *,
        device: str | None = None,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        max_rollback: int | None = None,
        pack_weights: bool = False,
        compile: bool = False,  # noqa: A002 (as above)
        **hf_kwargs: Any,
    ) -> "TorchModel":
        """Load a checkpoint through transformers.

        Parameters
        ----------
        path_or_id : str or path
            A directory, or the name of a model on the Hugging Face hub.
        device : str, optional
            Where to put it: ``"cuda"`` where there is one, else ``"cpu"``. Not together with `device_map` or `tp_plan`.
        dtype : str
            "float32", "float64", "bfloat16" or "float16".
        attn_implementation : str, optional
            "sdpa" or "eager"; by default whichever transformers prefers for the architecture.
        max_rollback, pack_weights, compile
            As in `TorchModel`.
        **hf_kwargs
            Anything else that ``AutoModelForCausalLM.from_pretrained`` takes, such as `device_map`, `tp_plan` or
            `quantization_config`.

        Returns
        -------
        TorchModel
            The model, ready to score.

        Raises
        ------
        FileNotFoundError
            If the directory is missing.
        ValueError
            If an option is wrong, or weights are missing or of another shape than the config says.
        CapabilityError
            If the architecture cannot be served.

        Notes
        -----
        Weights are read from safetensors files only, and code from a checkpoint runs only with
        ``trust_remote_code=True``.
        """
        from ._checkpoint import load_module

        module = load_module(
            path_or_id, device=device, dtype=dtype, attn_implementation=attn_implementation, hf_kwargs=hf_kwargs
        )
        return cls(module, max_rollback=max_rollback, pack_weights=pack_weights, compile=compile)

    def _probe(self, layers: Sequence[Any] | None) -> tuple[list[Any], Any]:
        """Feed one token, and return what each layer keeps of it (recurrent layers as they are) and the logits."""
        recorder = ShapeRecorder(
            None if layers is None else [layer if _keeps_no_keys(layer) else RecordingLayer() for layer in layers]
        )
        zero = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with torch.no_grad():
            dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
            logits = self._call(zero, zero, Visibility(zero, 1, dtype), recorder, 1)
        kept = [layer if _keeps_no_keys(layer) else layer.shape for layer in recorder.layers]
        if not kept or any(layer is None for layer in kept):
            raise CapabilityError(f"{self._name} does not use the cache it is given in every layer")
        return kept, logits

    def _compare_with_own_forward(self, why: str) -> None:
        """Raise where ragged blocks give other logits than the module's own forward pass over the whole text."""
        text = np.random.default_rng(0).integers(self.vocab_size, size=(2, 6))
        with torch.no_grad():
            own = self.module(input_ids=torch.as_tensor(text, device=self.device), use_cache=False).logits
        # Row 1 is fed two tokens and padding, so that the next block stands at other positions than row 0's.
        padded = np.where(np.arange(4) < np.array([[4], [2]]), text[:, :4], 0)
        first, cache = self.score(self.init_cache(2, 8), padded)
        cache = self.rollback(cache, np.array([4, 2]))
        second, cache = self.score(cache, np.stack([text[0, 4:6], text[1, 2:4]]))
        pairs = ((first[0], own[0, :4]), (first[1, :2], own[1, :2]), (second[0], own[0, 4:]), (second[1], own[1, 2:4]))
        largest = max(float((got - expected).abs().max()) for got, expected in pairs)
        largest /= float(own.std(dim=-1).mean())
        if not largest <= _TOLERANCES.get(own.dtype, 0.1):
            raise CapabilityError(
                f"{self._name} {why}, and in blocks and rows of other lengths its logits are off by {largest:.2g} of "
                "their spread: it would be silently wrong"
            )

    def init_cache(self, batch_size: int, capacity: int) -> TorchCache:
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row has room for; may exceed `max_length`, as padding does.

        Returns
        -------
        TorchCache
            No row holds a token yet; all memory is allocated.

        Raises
        ------
        ValueError
            If either is negative.
        CacheError
            If there is not enough memory; the message says how much is needed.
        """
        checked_sizes(batch_size, capacity)
        lengths = np.zeros(batch_size, dtype=np.int64)
        try:
            if self._compiled is not None:
                room = bucket(capacity)  # a text that fills the capacity is given the whole bucket
                return TorchCache(RowStore(self._layers, batch_size, room, tokens_first=True), lengths, capacity, None)
            if self.max_rollback is None:
                return TorchCache(RowStore(self._layers, batch_size, capacity), lengths, capacity, None)
            store = SnapshotStore(self._layers, batch_size, capacity, self.max_rollback)
            return TorchCache(store, lengths, capacity, lengths.copy())
        except RuntimeError as error:  # on the CPU; torch.OutOfMemoryError of other devices is one too
            if "memory" not in str(error):
                raise
            per_token = sum(layer.num_bytes for layer in self._layers if isinstance(layer, KeyValueShape))
            per_row = snapshot_bytes(self._layers, self.max_rollback or 0)
            raise out_of_memory(per_token, per_row, batch_size, capacity) from error

    def score(self, cache: TorchCache, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Any, TorchCache]:
        """Append a block to every row and return the logits of its last positions.

        Parameters
        ----------
        cache : TorchCache
            Modified in place; use the one returned.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``; T may be 0.
        num_logits : int, optional
            How many of the block's last positions are wanted; None is all T, 0 none.

        Returns
        -------
        logits : tensor
            Floats of shape ``(B, num_logits, V)``: row t is the law of the token *after* position t. A fresh tensor.
        cache : TorchCache
            Holding T more tokens in every row.

        Raises
        ------
        TypeError
            If `tokens` are not integers.
        ValueError
            If `tokens` or `num_logits` are out of range or of the wrong shape.
        CacheError
            If a row would exceed the capacity; the cache is then as it was.
        """
        block = checked_block(tokens, cache.lengths, cache.capacity, self.vocab_size, self.device)
        batch_size, width = block.shape
        num_logits = checked_num_logits(num_logits, width)
        if not block.numel():
            return self._no_logits(batch_size, num_logits), cache
        with torch.no_grad():
            if self._compiled is not None and self._compiled.takes(width, num_logits):
                logits = self._compiled(cache.store, cache.lengths, block, num_logits)
            elif cache.floors is None:
                logits = self._feed(cache.store, cache.lengths, block, num_logits)
            else:
                logits = self._feed_steps(cache.store, cache.lengths, block, num_logits)
        lengths, floors = cache.lengths + width, cache.floors
        if floors is not None and self.max_rollback is not None:
            floors = np.maximum(floors, lengths - self.max_rollback)
        if logits is None:
            logits = self._no_logits(batch_size, 0)
        return logits, TorchCache(cache.store, lengths, cache.capacity, floors)

    def _no_logits(self, batch_size: int, num_logits: int) -> Any:
        return torch.empty(
            (batch_size, num_logits, self.vocab_size), dtype=self._logits_dtype, device=self._logits_device
        )

    def _feed(self, store: RowStore, lengths: Ints, block: Any, num_logits: int) -> Any:
        """Feed a block ``(B, T)`` to rows of these lengths."""
        width = block.shape[1]
        positions = torch.as_tensor(lengths[:, None] + np.arange(width)).to(self.device, non_blocking=True)
        store.place.set(lengths, width, positions)
        span = store.place.span
        visibility = Visibility(positions, span, self._mask_dtype)
        if self.max_length is not None and span > self.max_length:
            # Padding may lie past the limit, where a table of positions ends; nothing is read there.
            positions = positions.clamp(max=self.max_length - 1)
        return self._call(block, positions, visibility, store, num_logits)

    def _feed_steps(self, store: Any, lengths: Ints, block: Any, num_logits: int) -> Any:
        """Feed a block token by token, taking a snapshot after each."""
        store.restore(lengths)
        width = block.shape[1]
        logits = []
        for step in range(width):
            is_wanted = step >= width - num_logits
            result = self._feed(store, lengths + step, block[:, step : step + 1], int(is_wanted))
            store.record(lengths + step + 1)
            if is_wanted:
                logits.append(result)
        return torch.cat(logits, dim=1) if logits else None

    def rollback(self, cache: TorchCache, lengths: Any, /) -> TorchCache:
        """Keep the first ``lengths[b]`` tokens of row b.

        Nothing moves: what lies past a row's length is never attended to, and is overwritten by the next block.
        Recurrent layers take their snapshots out when the next block comes.

        Parameters
        ----------
        cache : TorchCache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds.

        Returns
        -------
        TorchCache
            Shares its memory with `cache`.

        Raises
        ------
        TypeError
            If `lengths` are not integers.
        ValueError
            If `lengths` are not of shape ``(B,)``.
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        CapabilityError
            If a row would go back farther than `max_rollback` allows.
        """
        kept = checked_lengths(lengths, cache.lengths, cache.floors, self.max_rollback)
        if isinstance(cache.store, SnapshotStore) and (kept < cache.lengths).any():
            cache.store.roll_back()
        return cache._replace(lengths=kept)

    @property
    def select(self) -> Callable[[TorchCache, Any], TorchCache]:
        """Return a cache of some rows, in the order given: ``select(cache, rows)``. Compiled models have none.

        `cache` must not be used again. `rows` are integers of shape ``(R,)``, each in ``[0, B)``; a row named twice is
        copied twice. The cache returned has memory of its own. A row that does not exist raises ValueError.
        """
        if self._compiled is not None:
            raise AttributeError("a compiled model keeps its batch size: each would be another graph")
        return _select

    def warm_up(self, *, batch_size: int = 1, capacity: int, lookahead: int = 4) -> int:
        """Compile whatever texts of up to `capacity` tokens will need, so that nothing is compiled on the way.

        Parameters
        ----------
        batch_size : int, default: 1
            Number of rows.
        capacity : int
            Longest text, prompt included.
        lookahead : int, default: 4
            Tokens drafted per round, K: the blocks are 1, 2 and K + 1 wide.

        Returns
        -------
        int
            How many graphs there are now.

        Raises
        ------
        CapabilityError
            If the model was not made with ``compile=True``.
        """
        if self._compiled is None:
            raise CapabilityError("`warm_up` is for models made with `compile=True`")
        longest = capacity + lookahead + 1  # a round may pass the text's end by as many
        cache = self.init_cache(batch_size, longest)
        with torch.no_grad():
            self._compiled.warm_up(cache.store, sorted({1, 2, lookahead + 1}), longest)
        return len(self._compiled.graphs)


def _select(cache: TorchCache, rows: Any) -> TorchCache:
    chosen = checked_rows(rows, len(cache.lengths))
    store = cache.store.select(torch.as_tensor(chosen))
    floors = None if cache.floors is None else cache.floors[chosen]
    return TorchCache(store, cache.lengths[chosen], cache.capacity, floors)


def _keeps_no_keys(layer: Any) -> bool:
    # Layers of some mixtures; older versions of transformers have no name for them.
    return is_recurrent(layer) or type(layer).__name__ == "DummyLayer"
