"""Feeding texts in padded chunks leaves what feeding them token by token leaves."""

import numpy as np
import pytest

from specsampling._feeding import CHUNK, feed, gather_block


class Probe:
    """Passes on to a model, keeping the blocks and how far every block reached."""

    def __init__(self, model):
        self._model = model
        self.vocab_size, self.max_rollback = model.vocab_size, model.max_rollback
        self.widths, self.asked = [], []

    def init_cache(self, batch_size, capacity):
        return self._model.init_cache(batch_size, capacity)

    def score(self, cache, tokens, /, *, num_logits=None):
        self.widths.append(tokens.shape[1])
        self.asked.append(num_logits)
        return self._model.score(cache, tokens, num_logits=num_logits)

    def rollback(self, cache, lengths, /):
        return self._model.rollback(cache, lengths)


def ragged(lengths, capacity, vocab_size, seed=0):
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (len(lengths), capacity)).astype(np.int32)
    return tokens, np.array(lengths, dtype=np.int32)


def next_logits(model, cache, tokens, lengths):
    logits, _ = model.score(cache, tokens[np.arange(len(lengths)), lengths][:, None])
    return logits[:, 0]


@pytest.mark.parametrize("lengths", [[0], [1, 7, 3], [4, 4], [2, 9, 0, 5]])
@pytest.mark.parametrize("rollback", [1, 2, 3, 8, 20])
def test_bounded_model_ends_where_one_token_at_a_time_ends(toys, lengths, rollback):  # fault #36
    model = Probe(toys.RecurrentModel(5, rollback))
    tokens, stop = ragged(lengths, 12, 5)
    fed = feed(model, model.init_cache(len(lengths), 12), tokens, np.zeros_like(stop), stop, None)
    assert max(model.widths, default=0) <= rollback
    assert fed.num_calls == len(model.widths) == -(-max(lengths) // rollback)
    assert set(model.asked) <= {0}
    logits = next_logits(model, fed.cache, tokens, stop)
    for row, length in enumerate(lengths):
        expected = toys.logits_after(toys.RecurrentModel(5, 1), tokens[row, : length + 1].tolist())
        assert np.array_equal(logits[row], expected)


def test_unbounded_model_is_fed_in_chunks(toys):
    model = Probe(toys.random_table(5, order=1))
    tokens, stop = ragged([2 * CHUNK + 1, CHUNK, 1], 2 * CHUNK + 2, 5)
    fed = feed(model, model.init_cache(3, 2 * CHUNK + 2), tokens, np.zeros_like(stop), stop, None)
    assert model.widths == [CHUNK, CHUNK, 1]
    assert fed.cache.lengths.tolist() == stop.tolist()


@pytest.mark.parametrize("rollback", [3, 10])
def test_rows_may_start_anywhere_and_want_nothing(toys, rollback):
    model = toys.RecurrentModel(5, rollback)
    tokens, _ = ragged([0, 0, 0], 9, 5)
    cache = model.init_cache(3, 9)
    start, stop = np.array([2, 5, 0], dtype=np.int32), np.array([7, 4, 6], dtype=np.int32)
    cache = feed(model, cache, tokens, np.zeros(3, np.int32), start, None).cache
    cache = feed(model, cache, tokens, start, stop, None).cache
    logits = next_logits(model, cache, tokens, np.array([7, 5, 6]))
    for row, length in enumerate([7, 5, 6]):
        assert np.array_equal(logits[row], toys.logits_after(model, tokens[row, : length + 1].tolist()))


def test_no_block_reaches_past_the_end_of_the_cache(toys):
    model = Probe(toys.random_table(5, order=1))
    tokens, _ = ragged([0, 0], 9, 5)
    full, behind = np.array([7, 0], dtype=np.int32), np.array([7, 8], dtype=np.int32)
    cache = feed(model, model.init_cache(2, 9), tokens, np.zeros(2, np.int32), full, None).cache
    model.widths.clear()
    fed = feed(model, cache, tokens, full, behind, None)  # the model raises where a row would pass its capacity
    assert model.widths == [2, 2, 2, 2]
    assert fed.cache.lengths.tolist() == behind.tolist()


def test_constants_are_made_on_the_device_of_the_text():
    strict = pytest.importorskip("array_api_strict")
    where = strict.Device("device1")
    tokens, start, stop = (
        strict.asarray(x, device=where) for x in (np.arange(6).reshape(2, 3), np.array([0, 2]), np.array([2, 3]))
    )
    block = gather_block(tokens, start, stop, 2)
    assert block.device == where
    assert np.asarray(block.to_device(strict.Device("CPU_DEVICE"))).tolist() == [[0, 1], [5, 0]]


def test_block_is_each_rows_own_span_padded_with_id_zero():
    tokens = np.arange(1, 13).reshape(2, 6)
    block = gather_block(tokens, np.array([1, 4]), np.array([4, 5]), 4)
    assert block.tolist() == [[2, 3, 4, 0], [11, 0, 0, 0]]
