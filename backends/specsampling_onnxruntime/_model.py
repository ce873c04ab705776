"""An ONNX graph as a model of the library: blocks of tokens in, logits out, each row at its own length."""

import tempfile
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsampling import Capabilities, CapabilityError

from ._build import build
from ._checks import Ints, checked_block, checked_lengths, checked_num_logits, checked_rows, checked_sizes
from ._device import Device, as_array
from ._layouts import NO_CACHE, PAST_AND_PRESENT, SHARED_BUFFER, Layout, read_layout
from ._stores import Runner, Store, new_store

__all__ = ["OnnxCache", "OnnxModel"]


class OnnxCache(NamedTuple):
    """Keys and values of a batch of texts.

    Attributes
    ----------
    store : Store
        The memory, on the session's device. Written in place.
    lengths : ndarray
        Integers of shape ``(B,)``, on the host: how many tokens each row holds.
    capacity : int
        Tokens that each row may hold.

    Examples
    --------
    >>> import specsampling
    >>> from specsampling_onnxruntime import load
    >>> model = load(specsampling.bundled("draft"))
    >>> _, cache = model.score(model.init_cache(batch_size=2, capacity=8), [[82, 79, 77], [74, 85, 0]], num_logits=0)
    >>> cache = model.rollback(cache, [3, 2])
    >>> cache.lengths.tolist(), cache.capacity
    ([3, 2], 8)
    """

    store: Store
    lengths: Ints
    capacity: int


class OnnxModel:
    """A causal language model in an ONNX file, with a cache that rolls each row back on its own.

    Parameters
    ----------
    path : path
        A graph of one of four layouts, told apart by its inputs and outputs: that of `build`;
        ``past_key_values.N.key`` and ``present.N.key`` with ``attention_mask`` and ``position_ids``, as Optimum makes
        them; the same with GroupQueryAttention, as onnxruntime-genai's model builder makes them; or ``input_ids`` to
        ``logits`` and no cache.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    arrays : str, optional
        The framework that logits go to, "numpy", "torch", "cupy" or "jax". On the CPU that is NumPy by default; on CUDA
        the first of the others that is installed and sees the device, else NumPy, which costs a copy to the host.
    max_length : int, optional
        Context limit, where it is not to be taken from the file or from a config beside it.
    session_options : onnxruntime.SessionOptions, optional
        Threads, optimisations and the like.

    Attributes
    ----------
    session : onnxruntime.InferenceSession
        The session.
    layout : str
        "in place", "past and present", "shared buffer" or "no cache".
    dtype : str
        Dtype of the logits.
    vocab_size : int
        Number of token ids, V.
    max_length : int or None
        Context limit. A cache may be larger, because padding may lie past the limit.
    max_rollback : None
        Rows go back any number of tokens.
    capabilities : Capabilities
        What the conformance suite may ask for.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not an ONNX model, or an option is wrong.
    CapabilityError
        If the device is not available or the layout cannot be served; the message names the tensor, its shape and the
        remedy. Graphs whose activations are quantised dynamically are refused: a row would depend on its batch.

    Warns
    -----
    UserWarning
        If the graph has no cache.

    Notes
    -----
    A cache is modified in place and must not be used again once passed in, nor shared between threads. Memory is
    taken as texts grow, not by a cache's capacity.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import specsampling
    >>> from specsampling_onnxruntime import OnnxModel, build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = OnnxModel(build(specsampling.bundled("draft"), pathlib.Path(folder) / "draft.onnx"))
    >>> cache = model.init_cache(batch_size=2, capacity=8)
    >>> logits, cache = model.score(cache, [[82, 79, 77], [74, 85, 0]])  # the second row is padded,
    >>> logits.shape
    (2, 3, 256)
    >>> cache = model.rollback(cache, [3, 2])  # and now the padding is gone
    >>> logits, cache = model.score(cache, [[69], [76]], num_logits=1)
    >>> cache.lengths.tolist()
    [4, 3]
    """

    max_rollback: int | None = None

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        device: str = "cpu",
        arrays: str | None = None,
        max_length: int | None = None,
        session_options: Any = None,
    ) -> None:
        place = Device(device)
        framework = place.framework(arrays)
        layout = read_layout(Path(path))
        if layout.device not in (None, place.kind):
            raise CapabilityError(
                f"{path} was built for device {layout.device!r}, got {device!r}: build it anew with `device` "
                f"{place.kind!r}"
            )
        self.layout = layout.kind
        self.dtype = layout.dtype.name
        self.max_length = layout.max_length if max_length is None else max_length
        self.capabilities = Capabilities(dtypes=(self.dtype,), select=True, max_batch_size=layout.max_batch_size)
        self._path, self._max_batch_size = Path(path), layout.max_batch_size
        self.session = place.open(Path(path), session_options)
        self.vocab_size = layout.vocab_size or _probed_vocab_size(self.session, layout)
        self._runner = Runner(self.session, layout, place, self.vocab_size, framework, self.max_length)
        if layout.kind == NO_CACHE:
            warnings.warn(
                f"{path} has no cache (no inputs past_key_values.N.key): every step computes all of the text again, so "
                "its cost grows with the length of the text; export the model with its cache to mend that",
                stacklevel=2,
            )

    @classmethod
    def from_checkpoint(cls, checkpoint: str | PathLike[str], *, dtype: str = "float32", **options: Any) -> "OnnxModel":
        """Build the graph of a checkpoint of the Llama family, and load it; no file is left behind.

        Parameters
        ----------
        checkpoint, dtype
            As in :func:`build`.
        **options
            As in `OnnxModel`.

        Returns
        -------
        OnnxModel
            The model, ready to score.

        Examples
        --------
        >>> import specsampling
        >>> from specsampling_onnxruntime import OnnxModel
        >>> OnnxModel.from_checkpoint(specsampling.bundled("draft"), dtype="int8").dtype
        'float32'
        """
        place = Device(options.get("device", "cpu"))  # refused before anything is built
        with tempfile.TemporaryDirectory(prefix="specsampling-", ignore_cleanup_errors=True) as folder:
            model = cls(build(checkpoint, Path(folder) / "model.onnx", dtype=dtype, device=place.kind), **options)
        if model.dtype == "float32":
            # The CPU has no float16 arithmetic: such graphs run there, but by casting back and forth.
            dtypes = ("float32",) if model._runner.device.kind == "cpu" else ("float32", "float16")
            model.capabilities = Capabilities(dtypes=dtypes, select=True)
        model._path = Path(checkpoint)
        return model

    def init_cache(self, batch_size: int, capacity: int) -> OnnxCache:
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row may hold; may exceed `max_length`, as padding does.

        Returns
        -------
        OnnxCache
            No row holds a token yet.

        Raises
        ------
        ValueError
            If either is negative.
        CapabilityError
            If the graph takes one row only.
        """
        checked_sizes(batch_size, capacity)
        self._check_batch_size(batch_size)
        store = new_store(self._runner, batch_size, capacity)
        return OnnxCache(store, np.zeros(batch_size, dtype=np.int64), capacity)

    def _check_batch_size(self, batch_size: int) -> None:
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            reason = (
                "its GroupQueryAttention takes blocks of several tokens behind a past for one row only"
                if self.layout == SHARED_BUFFER
                else "its batch axis is fixed"
            )
            raise CapabilityError(
                f"{self._path} serves a batch of {self._max_batch_size}, got {batch_size} rows: {reason}; make the "
                "graph with `build` or `export`, or export it with a dynamic batch axis"
            )

    def score(self, cache: OnnxCache, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Any, OnnxCache]:
        """Append a block to every row and return the logits of its last positions.

        Parameters
        ----------
        cache : OnnxCache
            Modified in place; use the one returned.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``, of any framework; T may be 0.
        num_logits : int, optional
            How many of the block's last positions are wanted; None is all T, 0 none.

        Returns
        -------
        logits : array
            Floats of shape ``(B, num_logits, V)``: row t is the law of the token *after* position t. A fresh array.
        cache : OnnxCache
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
        block = checked_block(tokens, cache.lengths, cache.capacity, self.vocab_size)
        num_logits = checked_num_logits(num_logits, block.shape[1])
        if block.size == 0:
            empty = self._runner.device.empty((len(block), num_logits, self.vocab_size), self._runner.layout.dtype)
            return as_array(empty, self._runner.framework), cache
        logits = cache.store.feed(block, cache.lengths, num_logits)
        return logits, cache._replace(lengths=cache.lengths + block.shape[1])

    def rollback(self, cache: OnnxCache, lengths: Any, /) -> OnnxCache:
        """Keep the first ``lengths[b]`` tokens of row b; no key or value moves.

        Parameters
        ----------
        cache : OnnxCache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds.

        Returns
        -------
        OnnxCache
            Shares its memory with `cache`.

        Raises
        ------
        TypeError
            If `lengths` are not integers.
        ValueError
            If `lengths` are not of shape ``(B,)``.
        CacheError
            If a length is negative or more than the row holds; the message names the row and both numbers.
        """
        kept = checked_lengths(lengths, cache.lengths)
        cache.store.keep(kept)
        return cache._replace(lengths=kept)

    def select(self, cache: OnnxCache, rows: Any) -> OnnxCache:
        """Return a cache of some rows, in the order given.

        Parameters
        ----------
        cache : OnnxCache
            Must not be used again.
        rows : array
            Integers of shape ``(R,)``, each in ``[0, B)``; a row named twice is copied twice.

        Returns
        -------
        OnnxCache
            Of R rows. On the CPU it takes over the memory of `cache` where rows are in their order.

        Raises
        ------
        TypeError
            If `rows` are not integers.
        ValueError
            If `rows` are not of shape ``(R,)``, or one of them does not exist.
        CapabilityError
            If the graph takes fewer rows.
        """
        chosen = checked_rows(rows, len(cache.lengths))
        self._check_batch_size(len(chosen))
        lengths = cache.lengths[chosen]
        return OnnxCache(cache.store.select(chosen, lengths), lengths, cache.capacity)


def _probed_vocab_size(session: Any, layout: Layout) -> int:
    """Return the size of the logits of one token."""
    feeds: dict[str, Any] = {
        "input_ids": [[0]],
        "attention_mask": [[1]],
        "position_ids": [[0]],
        "past_lengths": [0],
        "logit_positions": [0],
    }
    inputs = {name: np.array(feeds[name], dtype=dtype) for name, dtype in layout.inputs.items()}
    # What is written in place needs room; a past has none, so that the mask is as long as it should be.
    room = 0 if layout.kind == PAST_AND_PRESENT else 1
    inputs |= {c.past: np.zeros((1, c.heads, room, c.size), c.dtype) for c in layout.caches}
    (logits,) = session.run(["logits"], inputs)
    return int(logits.shape[-1])
