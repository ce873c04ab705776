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
        How many tokens behind the furthest length that it has had a row can go back to; None means any number.
        Recurrent models keep snapshots and say how many.

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
        """Return an empty cache.

        Parameters
        ----------
        batch_size : int
            Number of rows, B.
        capacity : int
            Tokens that each row must have room for; may be larger than ``max_length``.

        Returns
        -------
        cache
            Whatever the model keeps. Nothing but the model looks into it.
        """
        ...

    def score(self, cache: CacheT, tokens: Array, /, *, num_logits: int | None = None) -> tuple[Array, CacheT]:
        """Append a block of tokens to every row and return the logits of its last positions.

        Parameters
        ----------
        cache
            Must not be used again.
        tokens : array
            Integers of shape ``(B, T)``, each in ``[0, V)``, of this or another framework. Blocks of any width come,
            T = 0 included.
        num_logits : int, optional
            How many of the block's last positions are wanted, from 0 to T. None is all of them; 0 is how prompts are
            fed.

        Returns
        -------
        logits : array
            Floats of shape ``(B, num_logits, V)``, no coarser than the dtype the model was loaded in: row t is the law
            of the token *after* position t.
        cache
            Holding T more tokens in every row.

        Raises
        ------
        CacheError
            If a row would hold more than its capacity; the cache is then as it was.
        """
        ...

    def rollback(self, cache: CacheT, lengths: Array, /) -> CacheT:
        """Keep the first ``lengths[b]`` tokens of each row b.

        Parameters
        ----------
        cache
            Must not be used again.
        lengths : array
            Integers of shape ``(B,)``, each from 0 to what the row holds, of this or another framework.

        Returns
        -------
        cache
            In which what comes next follows the tokens kept, as if no others had been.

        Raises
        ------
        CacheError
            If a length is negative or more than the row holds; the cache is then as it was.
        CapabilityError, CacheError
            If a length is more than `max_rollback` behind the furthest that the row has had; either will do.
        CapabilityError
            If rows cannot go back to different lengths, and these differ.
        """
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
