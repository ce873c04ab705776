"""Prompt lookup against a search of the whole text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import Context, PromptLookup, Sampling, generate


def search(text, lookahead, max_ngram, min_ngram, block_ngram):
    """Find the last earlier occurrence of the longest possible suffix, and copy what follows it, over itself."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                copied = list(text)
                for offset in range(lookahead if size >= block_ngram else min(lookahead, 1)):
                    copied.append(copied[end + offset])
                return copied[len(text) :]
    return []


def propose(drafter, state, texts, lookahead):
    lengths = np.array([len(text) for text in texts])
    tokens = np.full((len(texts), int(lengths.max()) + 3), 99)  # what lies past a row's length is not to be read
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    proposal, state = drafter.propose(state, Context(tokens, lengths), lookahead, Sampling(), None)
    assert proposal.probs is None
    assert proposal.tokens.shape == (len(texts), lookahead)
    rows = zip(proposal.tokens.tolist(), proposal.num_tokens.tolist(), strict=True)
    return [row[:count] for row, count in rows], state


@st.composite
def histories(draw):
    """Draw texts of a batch as they grow, round by round."""
    ids = st.integers(0, 2)
    texts = [draw(st.lists(ids, min_size=1, max_size=8)) for _ in range(draw(st.integers(1, 3)))]
    rounds = [[list(text) for text in texts]]
    for _ in range(draw(st.integers(0, 4))):
        texts = [text + draw(st.lists(ids, min_size=1, max_size=4)) for text in texts]
        rounds.append(texts)
    return rounds


@given(histories(), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_proposals_are_what_a_search_of_the_whole_text_finds(rounds, lookahead, first, second, block_ngram):
    sizes = {"max_ngram": max(first, second), "min_ngram": min(first, second), "block_ngram": block_ngram}
    drafter = PromptLookup(**sizes)
    state = drafter.init(len(rounds[0]), 64)
    for texts in rounds:
        drafts, state = propose(drafter, state, texts, lookahead)
        assert drafts == [search(text, lookahead, **sizes) for text in texts]


def test_rows_without_a_match_propose_nothing():  # fault #61
    drafter = PromptLookup()
    drafts, _ = propose(drafter, drafter.init(3, 16), [[1, 2, 3], [4], [5, 6, 5]], 2)
    assert drafts == [[], [], [6, 5]]


def test_a_match_shorter_than_asked_for_proposes_one_token():
    texts = [[5, 6, 7, 5], [5, 6, 7, 5, 6]]
    for block_ngram, drafts in ((1, [[6, 7, 5], [7, 5, 6]]), (2, [[6], [7, 5, 6]]), (3, [[6], [7]])):
        drafter = PromptLookup(block_ngram=block_ngram)
        assert propose(drafter, drafter.init(2, 16), texts, 3)[0] == drafts
        assert propose(drafter, drafter.init(2, 16), texts, 0)[0] == [[], []]


def test_a_period_is_drafted_to_the_full_lookahead():
    drafter = PromptLookup()
    drafts, _ = propose(drafter, drafter.init(1, 16), [[7, 8, 7, 8]], 5)
    assert drafts == [[7, 8, 7, 8, 7]]


def test_longer_matches_are_preferred_and_then_later_ones():
    drafter = PromptLookup(max_ngram=2)
    drafts, _ = propose(drafter, drafter.init(2, 16), [[1, 2, 5, 2, 6, 1, 2], [2, 5, 2, 6, 2]], 1)
    assert drafts == [[5], [6]]


def test_short_matches_below_the_minimum_do_not_count():
    drafter = PromptLookup(min_ngram=2)
    drafts, _ = propose(drafter, drafter.init(2, 16), [[1, 5, 1], [1, 2, 5, 1, 2]], 1)
    assert drafts == [[], [5]]


class CountingIndex(dict):
    """A dict that counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.num_operations = 0

    def __setitem__(self, key, value):
        self.num_operations += 1
        super().__setitem__(key, value)

    def get(self, key, default=None):
        self.num_operations += 1
        return super().get(key, default)


class CountingText(np.ndarray):
    """An array that counts the entries taken out of it."""

    num_read = 0

    def __getitem__(self, key):
        taken = np.asarray(self)[key]
        CountingText.num_read += taken.size
        return taken


def test_work_of_a_round_does_not_grow_with_the_text():
    drafter = PromptLookup(max_ngram=3)
    state = drafter.init(1, 4096)._replace(rows=[CountingIndex()])
    text = np.random.default_rng(0).integers(0, 50, (1, 3000)).view(CountingText)
    work = []
    for length in range(1000, 3000, 5):
        before = state.rows[0].num_operations, CountingText.num_read
        context = Context(text, np.array([length]))
        _, state = drafter.propose(state, context, 4, Sampling(), None)
        work.append((state.rows[0].num_operations - before[0], CountingText.num_read - before[1]))
    operations, reads = map(max, zip(*work[1:], strict=True))  # the first round reads the prompt
    assert operations <= 5 * 3 + 3
    assert reads <= 5 + 3 + 1 + 4


def test_dropped_rows_take_their_index_with_them():
    drafter = PromptLookup()
    texts = [[1, 2, 1, 1, 2, 2, 2], [3, 4, 3, 4, 3], [5, 6, 5]]
    _, state = propose(drafter, drafter.init(3, 16), texts, 2)
    kept = drafter.select(state, np.array([2, 1]))
    assert kept.num_indexed == [2, 4]
    drafts, _ = propose(drafter, kept, [texts[2] + [6], texts[1] + [4]], 2)
    assert drafts == [search(texts[2] + [6], 2, 3, 1, 1), search(texts[1] + [4], 2, 3, 1, 1)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_ngram": 0}, ValueError, "`max_ngram` must be at least 1, got 0"),
        ({"min_ngram": 0}, ValueError, "`min_ngram` must be at least 1, got 0"),
        ({"min_ngram": 4}, ValueError, "`min_ngram` must be at most `max_ngram`, got 4 and 3"),
        ({"block_ngram": 0}, ValueError, "`block_ngram` must be at least 1, got 0"),
        ({"max_ngram": 2.0}, TypeError, "`max_ngram` must be an integer, got 2.0"),
        ({"min_ngram": "1"}, TypeError, "`min_ngram` must be an integer, got '1'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        PromptLookup(**options)


@pytest.mark.parametrize("vocab_size", [2, 4])
def test_decoding_with_lookup_is_plain_decoding(toys, vocab_size):  # fault #61, #74
    target = toys.random_table(vocab_size, order=2)
    prompts = [[0], [1, 0, 1], [1, 1, 0, 1, 0, 0]]
    result = generate(target, PromptLookup(), prompts, max_new_tokens=40, sampling=Sampling(temperature=0.0))
    assert result.tokens == [toys.plain_greedy(target, prompt, 40)[0] for prompt in prompts]
    assert result.stats.accepted > 0
    assert result.stats.undrafted > 0
    assert result.stats.point_mass_proposed == result.stats.proposed > 0
    assert result.stats.draft_calls == 0
