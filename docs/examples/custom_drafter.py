"""A drafter that is no model: a table of which byte followed which, counted in the row's own text.

Two methods make a drafter, `init` and `propose`. What it proposes may be chosen or drawn, and it must say which: here
tokens are drawn from the counted law, so the law goes along. Return None for it when tokens are chosen, as
`specsampling.PromptLookup` does; never a law that they were not drawn from.

    python docs/examples/custom_drafter.py
"""

from typing import NamedTuple

import numpy as np

import specsampling
from specsampling import Context, Label, Proposal, Purpose, Randomness, Sampling


class Counts(NamedTuple):
    """Which token followed which in each row ``(B, V, V)``, and how many tokens were counted ``(B,)``."""

    pairs: np.ndarray
    num_counted: np.ndarray


class BigramDrafter:
    """Draw each token from the counts of what followed the one before it, beginning from a flat law."""

    def __init__(self, vocab_size: int, prior: float = 0.02) -> None:
        self.vocab_size = vocab_size  # compared with the target's when the decoder is built
        self.prior = prior

    def init(self, batch_size: int, capacity: int) -> Counts:  # noqa: ARG002 (counts need no room for tokens)
        """Return the state before anything was seen."""
        pairs = np.full((batch_size, self.vocab_size, self.vocab_size), self.prior)
        return Counts(pairs, np.ones(batch_size, dtype=np.int64))

    def propose(
        self, state: Counts, context: Context, lookahead: int, sampling: Sampling, randomness: Randomness
    ) -> tuple[Proposal, Counts]:
        """Propose `lookahead` tokens for each row."""
        pairs, num_counted = state
        for row, length in enumerate(context.lengths):
            text = context.tokens[row, :length]  # what lies beyond a row's length is undefined
            start = num_counted[row]
            np.add.at(pairs[row], (text[start - 1 : -1], text[start:]), 1.0)
        # All of it: committed tokens are never taken back.
        state = Counts(pairs, np.array(context.lengths, dtype=np.int64))

        rows = np.arange(len(context.lengths))
        if lookahead == 0:
            nothing = np.zeros((len(rows), 0), dtype=np.int32)
            return Proposal(nothing, np.zeros(len(rows), dtype=np.int32), None), state
        last = context.tokens[rows, context.lengths - 1]
        tokens, laws = [], []
        for slot in range(lookahead):
            # `to_probs` on log-counts: the settings that were asked for shape this law, too.
            law = specsampling.to_probs(np.log(pairs[rows, last]), sampling)
            last = randomness.categorical(law, Label(Purpose.DRAFT, slot))
            tokens.append(last)
            laws.append(law)
        proposal = Proposal(
            np.stack(tokens, axis=1).astype(np.int32),
            np.full(len(rows), lookahead, dtype=np.int32),
            np.stack(laws, axis=1),  # bitwise the rows that the tokens were drawn from
        )
        return proposal, state

    def select(self, state: Counts, rows: np.ndarray) -> Counts:
        """Keep some rows. Optional: without it finished rows are masked, and go on costing work."""
        return Counts(state.pairs[rows], state.num_counted[rows])


def main() -> None:
    """Compare the drafter with prompt lookup and with a model."""
    target = specsampling.load_model("numpy", specsampling.bundled("target"))
    drafters = {
        "bigram counts": BigramDrafter(target.vocab_size),
        "prompt lookup": specsampling.PromptLookup(),
        "a model": specsampling.load_model("numpy", specsampling.bundled("draft")),
    }
    prompts = [list(b"First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n"), list(b"ROMEO:\n")]
    for name, drafter in drafters.items():
        stats = specsampling.generate(target, drafter, prompts, max_new_tokens=96, lookahead=3, seed=0).stats
        print(f"{name:14} {stats.acceptance_rate:.2f} accepted, {stats.emitted / stats.rounds / 2:.2f} tokens a round")


if __name__ == "__main__":
    main()
