"""What a model must do to be a target or a draft: three methods over a cache it owns."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

__all__ = ["Array", "Capabilities", "Model"]

Array: TypeAlias = Any
"""An array of any array-API namespace. No static type covers them all; docstrings give dtype kind and shape."""

CacheT = TypeVar("CacheT")


class Model(Protocol[CacheT]):
    """A causal language model with a cache that each row can roll back on its own.

    Everything the library asks of a model is here. Optional powers are found by the presence of the name, never by
    ``isinstance``:

    ``max_length : int``
        Context limit in tokens, prompt included. Padded columns may still lie past it, and must be accepted.
    ``select(cache, rows) -> cache``
        Keep only these rows (integer array, host or device), in this order.
    ``compile_round(drafter, sampling, lookahead) -> callable``
        A callable with exactly the signature of :func:`specsampling.decode_round`. The three arguments say what to
        prepare for; each call's own arguments, log-probabilities and end-token bans included, are what it must honour.
    ``capabilities : Capabilities``
        What the adapter declares about itself, for the conformance suite.

    Attributes
    ----------
    vocab_size : int
        Number of token ids, V.
    max_rollback : int or None
        How many tokens back a row can go from where it is; None means any number. Recurrent models keep snapshots and
        say how many.

    Examples
    --------
    Everything that a model must have, here for one law whatever came before:

    >>> import numpy as np
    >>> from specsampling import generate
    >>> class Coin:
    ...     vocab_size, max_rollback = 2, None
    ...     def init_cache(self, batch_size, capacity):
    ...         return np.zeros(batch_size, dtype=int)
    ...     def score(self, cache, tokens, /, *, num_logits=None):
    ...         batch_size, width = np.shape(tokens)
    ...         wanted = width if num_logits is None else num_logits
    ...         return np.zeros((batch_size, wanted, 2)), cache + width
    ...     def rollback(self, cache, lengths, /):
    ...         return np.array(lengths)
    >>> len(generate(Coin(), Coin(), [0], max_new_tokens=5).tokens[0])
    5
    """

    vocab_size: int
    max_rollback: int | None

    def init_cache(self, batch_size: int, capacity: int) -> CacheT:
        """Return an empty cache of `batch_size` rows, each with room for `capacity` tokens."""
        ...

    def score(self, cache: CacheT, tokens: Array, /, *, num_logits: int | None = None) -> tuple[Array, CacheT]:
        """Append a ``(B, T)`` block to every row and return ``(logits, cache)``.

        Logits have shape ``(B, num_logits, V)`` and belong to the block's last `num_logits` positions (None: all T;
        0: none are computed, which is how prompts are fed); row t is the law of the token *after* position t. The
        cache passed in must not be used again.
        """
        ...

    def rollback(self, cache: CacheT, lengths: Array, /) -> CacheT:
        """Keep the first ``lengths[b]`` tokens of each row b. The cache passed in must not be used again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an adapter says it can do; the conformance suite holds it to both its yes and its no.

    Attributes
    ----------
    dtypes : tuple of str
        Dtypes in which the adapter loads a checkpoint, for example ``("float32", "float64")``.
    per_row_rollback : bool
        Rows may be rolled back to different lengths. Without it only equal lengths are accepted.
    select : bool
        The adapter can drop rows from a cache. An adapter without a ``select`` method declares False.
    compile_round : bool
        The adapter can compile a whole round.
    max_batch_size : int or None
        Largest batch; None for any.

    Examples
    --------
    >>> from specsampling import Capabilities
    >>> Capabilities(dtypes=("float32", "float64"), select=True).compile_round
    False
    """

    dtypes: tuple[str, ...] = ("float32",)
    per_row_rollback: bool = True
    select: bool = False
    compile_round: bool = False
    max_batch_size: int | None = None
