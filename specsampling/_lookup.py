"""Prompt lookup: draft by copying what followed the last words the last time they occurred."""

from typing import NamedTuple

import numpy as np

from specsampling._arrays import to_host
from specsampling._drafting import Context
from specsampling._random import Randomness
from specsampling._rejection import Proposal
from specsampling._requests import as_count
from specsampling._sampling import Sampling

__all__ = ["PromptLookup", "PromptLookupState"]


class PromptLookupState(NamedTuple):
    """One index per row; each only ever grows, because committed tokens are never taken back.

    Attributes
    ----------
    rows : list of dict
        For each row, from an n-gram (a tuple of ids) to the position just after its last occurrence.
    num_indexed : list of int
        For each row, how many tokens its index covers.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Context, PromptLookup, Sampling
    >>> drafter = PromptLookup(max_ngram=1)
    >>> context = Context(np.array([[5, 6, 5]]), np.array([3]))
    >>> _, state = drafter.propose(drafter.init(1, 8), context, 2, Sampling(), None)
    >>> state.rows, state.num_indexed
    ([{(5,): 1, (6,): 2}], [2])
    """

    rows: list[dict[tuple[int, ...], int]]
    num_indexed: list[int]


class PromptLookup:
    """Propose what followed the row's last n-gram when it last occurred in the row's own prompt or output.

    The tokens are chosen, not drawn: the proposal is a point mass (``probs=None``). No model is called.

    Parameters
    ----------
    max_ngram : int, default: 3
        Longest n-gram to look for; longer matches are preferred.
    min_ngram : int, default: 1
        Shortest n-gram that is enough to propose.
    block_ngram : int, default: 1
        Shortest n-gram that is enough to propose more than one token. With 2, a match of the last token alone costs the
        target a block of two tokens and not one of K + 1, of which little would be accepted.

    Raises
    ------
    TypeError
        If one of them is not an integer.
    ValueError
        Unless ``1 <= min_ngram <= max_ngram``, or if `block_ngram` is below 1.

    Notes
    -----
    A row without a match proposes nothing. A match near the end of the text is continued through its own copy, as in
    LZ77, so that a text with a period is drafted to the full lookahead. Every token enters the index once: the work of
    a round does not grow with the text.

    References
    ----------
    Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import Context, PromptLookup, Sampling
    >>> drafter = PromptLookup()
    >>> context = Context(np.array([[5, 6, 7, 8, 5, 6]]), np.array([6]))
    >>> proposal, state = drafter.propose(drafter.init(1, 16), context, 3, Sampling(), None)
    >>> proposal.tokens.tolist(), proposal.num_tokens.tolist()
    ([[7, 8, 5]], [3])
    """

    ignores_sampling = True

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, block_ngram: int = 1) -> None:
        self.max_ngram = as_count("max_ngram", max_ngram, minimum=1)
        self.min_ngram = as_count("min_ngram", min_ngram, minimum=1)
        self.block_ngram = as_count("block_ngram", block_ngram, minimum=1)
        if min_ngram > max_ngram:
            raise ValueError(f"`min_ngram` must be at most `max_ngram`, got {min_ngram} and {max_ngram}")

    def init(self, batch_size: int, capacity: int) -> PromptLookupState:  # noqa: ARG002 (what the protocol passes)
        """Return an empty index for each row; `capacity` is not needed."""
        return PromptLookupState([{} for _ in range(batch_size)], [0] * batch_size)

    def propose(
        self,
        state: PromptLookupState,
        context: Context,
        lookahead: int,
        sampling: Sampling,  # noqa: ARG002 (what the protocol passes)
        randomness: Randomness | None,  # noqa: ARG002 (what the protocol passes)
    ) -> tuple[Proposal, PromptLookupState]:
        """Look every row's last n-gram up; neither `sampling` nor `randomness` is used."""
        lengths = to_host(context.lengths)
        all_tokens = to_host(context.tokens)
        tokens = np.zeros((lengths.shape[0], lookahead), dtype=np.int32)
        num_tokens = np.zeros(lengths.shape[0], dtype=np.int32)
        for row, length in enumerate(lengths.tolist()):
            start = max(0, state.num_indexed[row] - self.max_ngram)
            recent = all_tokens[row, start:length].tolist()
            self._extend(state, row, recent, start, length)
            source, count = self._find(state.rows[row], recent, lookahead)
            draft = all_tokens[row, source : min(length, source + count)].tolist()
            period = length - source
            while len(draft) < count:
                draft.append(draft[len(draft) - period])
            tokens[row, :count] = draft
            num_tokens[row] = count
        return Proposal(tokens, num_tokens, None), state

    def select(self, state: PromptLookupState, rows: np.ndarray) -> PromptLookupState:
        """Keep only the indices of these rows."""
        kept = [int(row) for row in to_host(rows)]
        return PromptLookupState([state.rows[row] for row in kept], [state.num_indexed[row] for row in kept])

    def _extend(self, state: PromptLookupState, row: int, recent: list[int], start: int, length: int) -> None:
        """Index every n-gram that ends before the last token: what follows it is known."""
        index = state.rows[row]
        for end in range(state.num_indexed[row] + 1, length):
            for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
                index[tuple(recent[end - size - start : end - start])] = end
        state.num_indexed[row] = max(state.num_indexed[row], length - 1)

    def _find(self, index: dict[tuple[int, ...], int], recent: list[int], lookahead: int) -> tuple[int, int]:
        """Return from where to copy, and how many tokens: none without a match."""
        for size in range(min(self.max_ngram, len(recent)), self.min_ngram - 1, -1):
            source = index.get(tuple(recent[-size:]))
            if source is not None:
                return source, lookahead if size >= self.block_ngram else min(1, lookahead)
        return 0, 0
