"""Models around an adapter's model: one whose round is not compiled, and one with a vocabulary of a few ids."""

from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from specsampling import Capabilities, Model
from specsampling_conformance._host import Array, host_copy, native_integers

__all__ = ["EagerModel", "MaskedModel", "masked"]


class EagerModel:
    """The same model with nothing compiled.

    Parameters
    ----------
    model : Model
        The model.
    """

    def __init__(self, model: Model[Any]) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_rollback = model.max_rollback
        self.init_cache = model.init_cache
        self.rollback = model.rollback
        self.score: Callable[..., tuple[Array, Any]] = model.score
        for name in ("max_length", "select"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))


class MaskedModel(EagerModel):
    """A model that knows a few ids of another's vocabulary, renumbered from 0; the law is the other's, given those.

    Parameters
    ----------
    model : Model
        The model behind it.
    ids : sequence of int
        The ids of `model` that are kept.
    capabilities : Capabilities, optional
        What the model behind it declares.
    """

    def __init__(self, model: Model[Any], ids: Sequence[int], capabilities: Capabilities | None = None) -> None:
        super().__init__(model)
        self.ids = np.array(ids, dtype=np.int32)
        self.vocab_size = len(ids)
        self.capabilities = capabilities
        self.score = self._score

    def _score(self, cache: Any, tokens: Array, /, *, num_logits: int | None = None) -> tuple[Array, Any]:
        shape: tuple[int, ...] = np.shape(tokens) if isinstance(tokens, list) else tokens.shape
        is_foreign: bool = array_api_compat.is_array_api_obj(tokens) and not array_api_compat.is_numpy_array(tokens)
        if not is_foreign:
            logits, cache = self.model.score(cache, self.ids[np.asarray(tokens)], num_logits=num_logits)
        else:
            xp = array_api_compat.array_namespace(tokens)
            flat = xp.reshape(xp.astype(tokens, xp.int32), (-1,))
            asked = xp.reshape(xp.take(native_integers(self.ids, "int32", tokens), flat), shape)
            logits, cache = self.model.score(cache, asked, num_logits=num_logits)
        xp = array_api_compat.array_namespace(logits)
        return xp.take(logits, native_integers(self.ids, "int32", logits), axis=-1), cache


def masked(model: Model[Any], vocab_size: int) -> MaskedModel:
    """Return the model masked to the ids that it finds likeliest after id 0, so that no law is degenerate."""
    logits, _ = model.score(model.init_cache(1, 16), np.array([[0]], dtype=np.int32))
    best = np.argsort(-host_copy(logits)[0, -1], kind="stable")[:vocab_size]
    return MaskedModel(model, sorted(int(token) for token in best))
