"""An adapter around a callable: anything that scores whole texts becomes a model, and the suite says that it is right.

The callable here is an n-gram model that backs off to shorter contexts, which no backend of the library knows. Its
adapter remembers the text and nothing else, so that there is no state to roll back wrongly. Every call scores its whole
text; see the page "Writing a backend" for what comes next.

    python docs/examples/custom_adapter.py --exact
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import specsampling
from specsampling import CacheError, Capabilities
from specsampling_conformance import check_backend


class Text(NamedTuple):
    """The tokens ``(B, capacity)``, and how many of them each row holds ``(B,)``."""

    tokens: np.ndarray
    lengths: np.ndarray


class CallableModel:
    """A model from ``score_texts``, which maps ids ``(B, n)`` to logits ``(B, n, V)`` and never looks to the right."""

    max_rollback: int | None = None

    def __init__(self, score_texts: Callable[[np.ndarray], np.ndarray], vocab_size: int) -> None:
        self.score_texts = score_texts
        self.vocab_size = vocab_size

    def init_cache(self, batch_size: int, capacity: int) -> Text:
        """Return an empty cache."""
        return Text(np.zeros((batch_size, capacity), dtype=np.int64), np.zeros(batch_size, dtype=np.int64))

    def score(self, cache: Text, tokens: Any, /, *, num_logits: int | None = None) -> tuple[np.ndarray, Text]:
        """Append a block and return the logits of its last positions."""
        block = np.asarray(tokens)
        width, capacity = block.shape[1], cache.tokens.shape[1]
        if cache.lengths.max() + width > capacity:
            raise CacheError(f"`tokens` must fit {capacity} tokens a row, got {cache.lengths.max()} and {width} more")
        texts, lengths = cache.tokens.copy(), cache.lengths + width
        np.put_along_axis(texts, cache.lengths[:, None] + np.arange(width), block, axis=1)
        wanted = width if num_logits is None else num_logits
        positions = lengths[:, None] - wanted + np.arange(wanted)
        logits = self.score_texts(texts[:, : lengths.max()])
        return np.take_along_axis(logits, positions[:, :, None], axis=1), Text(texts, lengths)

    def rollback(self, cache: Text, lengths: Any, /) -> Text:
        """Keep the first tokens of each row."""
        kept = np.array(lengths, dtype=np.int64)
        if ((kept < 0) | (kept > cache.lengths)).any():
            raise CacheError(f"`lengths` must be from 0 to {cache.lengths.tolist()}, got {kept.tolist()}")
        return Text(cache.tokens, kept)


class Backoff:
    """An n-gram model with interpolated backoff: each order's law is mixed with that of the next shorter context.

    Parameters
    ----------
    text : sequence of int
        What to count.
    vocab_size : int
        Number of token ids, V.
    order : int
        Longest n-gram.
    weight : float
        How many counts the shorter context's law is worth.
    """

    def __init__(self, text: Any, vocab_size: int, order: int = 4, weight: float = 2.0) -> None:
        self.vocab_size, self.order, self.weight = vocab_size, order, weight
        self.counts: dict[tuple[int, ...], np.ndarray] = {}
        ids = [int(token) for token in text]
        for end in range(len(ids)):
            for size in range(min(order, end + 1)):
                context = tuple(ids[end - size : end])
                self.counts.setdefault(context, np.zeros(vocab_size))[ids[end]] += 1

    def law(self, context: tuple[int, ...]) -> np.ndarray:
        """Return the law of the token after a context."""
        law = np.full(self.vocab_size, 1 / self.vocab_size)
        for size in range(min(self.order - 1, len(context)) + 1):
            counts = self.counts.get(context[len(context) - size :])
            if counts is None:
                break
            law = (counts + self.weight * law) / (counts.sum() + self.weight)
        return law

    def score_texts(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits ``(B, n, V)`` of texts ``(B, n)``."""
        laws = np.empty((*tokens.shape, self.vocab_size))
        for row, text in enumerate(tokens.tolist()):
            for last in range(len(text)):
                laws[row, last] = self.law(tuple(text[max(0, last + 2 - self.order) : last + 1]))
        return np.log(laws)


def load(checkpoint: str, dtype: str) -> CallableModel:  # noqa: ARG001 (no Llama: the suite's weights are not for us)
    """Return a small model of this kind for the suite, which masks it to a few ids."""
    text = np.random.default_rng(0).integers(6, size=400)
    counted = Backoff(text, 6, weight=0.3)
    return CallableModel(lambda tokens: counted.score_texts(tokens).astype(dtype), 6)


def main() -> None:
    """Use the model as a draft for the bundled target, and certify the adapter."""
    target = specsampling.load_model("numpy", specsampling.bundled("target"))
    prompt = list(b"ROMEO:\n")
    learnt = specsampling.generate(target, None, [prompt] * 4, max_new_tokens=200, seed=1).tokens
    draft = CallableModel(Backoff(itertools.chain.from_iterable(learnt), 256).score_texts, 256)
    stats = specsampling.generate(target, draft, prompt, max_new_tokens=48, lookahead=2, seed=0).stats
    print(f"as a draft, after 800 bytes of the target's own text: {stats.acceptance_rate:.2f} accepted")

    # "contract" is whether the cache does what it says, in seconds; "exact", in a minute, enumerates the output law.
    tier = "exact" if "--exact" in sys.argv else "contract"
    report = check_backend(load, Capabilities(dtypes=("float64",)), tier=tier)
    print(f"the suite: {report.level or report.failures}")
    if report.level != tier:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
