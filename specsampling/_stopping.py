"""Where a row ends: end tokens, stop sequences and the length limit, at the exact token whatever the block."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Commit", "StopRules"]


class Commit(NamedTuple):
    """How much of a block is committed.

    Attributes
    ----------
    num_emitted : ndarray
        Integer array of shape ``(B,)``: tokens committed, from the block's first on.
    is_stopped : ndarray
        Boolean array of shape ``(B,)``: the last of them is an end token or completes a stop sequence.
    """

    num_emitted: np.ndarray
    is_stopped: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """End tokens and stop sequences, matched in the new tokens only; the earliest in the text wins.

    Attributes
    ----------
    end_tokens : tuple of int
        Ids that end a row.
    stop_sequences : tuple of tuple of int
        Runs of ids that end a row when they are complete.
    """

    end_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()

    def commit(
        self, tokens: np.ndarray, rows: np.ndarray, prompts: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> Commit:
        """Find how many of each row's next ``counts[b]`` tokens are committed.

        Parameters
        ----------
        tokens : ndarray
            Integer array ``(R, C)``: every row's text, the candidates written after the committed part.
        rows : ndarray
            Integer array ``(B,)``: the rows of `tokens` that are asked about.
        prompts, starts, counts : ndarray
            Integer arrays ``(B,)``: prompt lengths, committed lengths, and how many candidates follow.

        Returns
        -------
        Commit
            Up to and including the first token at which a row ends.
        """
        num_emitted = counts.copy()
        is_stopped = np.zeros(counts.shape, dtype=np.bool_)
        last_ids = [*self.end_tokens, *(sequence[-1] for sequence in self.stop_sequences)]
        if not last_ids or not counts.size:
            return Commit(num_emitted, is_stopped)
        slots = np.arange(int(counts.max()))
        block = tokens[rows[:, None], np.minimum(starts[:, None] + slots, tokens.shape[1] - 1)]
        candidates = (slots < counts[:, None]) & np.isin(block, last_ids)
        for index, slot in zip(*np.nonzero(candidates), strict=True):  # in order of rows, then of slots
            if is_stopped[index]:
                continue
            stop = starts[index] + slot + 1
            if block[index, slot] in self.end_tokens or self._ends_with_sequence(
                tokens[rows[index], prompts[index] : stop]
            ):
                num_emitted[index] = slot + 1
                is_stopped[index] = True
        return Commit(num_emitted, is_stopped)

    def _ends_with_sequence(self, text: np.ndarray) -> bool:
        return any(
            len(sequence) <= len(text) and tuple(text[len(text) - len(sequence) :].tolist()) == sequence
            for sequence in self.stop_sequences
        )
