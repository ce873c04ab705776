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
        if not (self.end_tokens or self.stop_sequences):
            return Commit(counts, np.zeros(counts.shape, dtype=np.bool_))
        slots = np.arange(int(counts.max()))
        is_candidate = slots < counts[:, None]
        block = tokens[rows[:, None], np.minimum(starts[:, None] + slots, tokens.shape[1] - 1)]
        ends_row = is_candidate & np.any(block[:, :, None] == np.asarray(self.end_tokens, dtype=np.int64), axis=2)
        for sequence in self.stop_sequences:
            # Text is looked back at only where a sequence's last id stands.
            index, slot = np.nonzero(is_candidate & (block == sequence[-1]))
            first = starts[index] + slot + 1 - len(sequence)
            window = np.maximum(first[:, None] + np.arange(len(sequence)), 0)
            is_match = np.all(tokens[rows[index][:, None], window] == np.asarray(sequence), axis=1)
            ends_row[index, slot] |= is_match & (first >= prompts[index])
        is_stopped = np.any(ends_row, axis=1)
        return Commit(np.where(is_stopped, np.argmax(ends_row, axis=1) + 1, counts), is_stopped)
