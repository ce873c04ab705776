"""A draft model's proposals against the laws it has when it reads the whole text anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsampling import Context, CounterSource, ModelDrafter, Sampling, UniformRandomness, to_probs
from specsampling_numpy import TableModel

SETTINGS = Sampling(temperature=0.8)


class Texts:
    """A batch of texts beside a drafter, with proposals accepted as a test wants."""

    def __init__(self, drafter, texts, capacity=60):
        self.drafter, self.texts, self.capacity = drafter, [list(text) for text in texts], capacity
        self.state = drafter.init(len(texts), capacity)
        self.num_rounds = 0

    def propose(self, lookahead):
        tokens = np.full((len(self.texts), self.capacity), 1, dtype=np.int32)
        for row, text in enumerate(self.texts):
            tokens[row, : len(text)] = text
        lengths = np.array([len(text) for text in self.texts], dtype=np.int32)
        ids, rounds = np.arange(len(lengths)), np.full(len(lengths), self.num_rounds)
        randomness = CounterSource(5).begin_round(ids, rounds, lookahead)
        self.num_rounds += 1
        proposal, self.state = self.drafter.propose(
            self.state, Context(tokens, lengths), lookahead, SETTINGS, randomness
        )
        return proposal

    def accept(self, proposal, counts, last=0):
        for row, count in enumerate(counts):
            self.texts[row] += [*proposal.tokens[row, :count].tolist(), last]


def check_laws(toys, model, texts, proposal):
    """Hold each proposed token's row to the law after the whole text before it."""
    for row, count in enumerate(proposal.num_tokens.tolist()):
        for slot in range(count):
            prefix = texts[row] + proposal.tokens[row, :slot].tolist()
            known = [token if token < model.vocab_size else 0 for token in prefix]
            expected = to_probs(toys.logits_after(model, known), SETTINGS)
            assert np.array_equal(proposal.probs[row, slot], expected), (row, slot)


@st.composite
def runs(draw):
    texts = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3))
    rounds = draw(
        st.lists(
            st.integers(0, 3).flatmap(
                lambda lookahead: st.tuples(
                    st.just(lookahead),
                    st.lists(st.integers(0, lookahead), min_size=len(texts), max_size=len(texts)),
                )
            ),
            min_size=1,
            max_size=7,
        )
    )
    return texts, rounds


@given(runs(), st.sampled_from([4, 5, 50]))
@settings(max_examples=150)
def test_every_token_is_drawn_from_the_law_after_the_whole_text(toys, run, rollback):  # fault #29, #71, #72, #74, #77
    texts, rounds = run
    model = toys.RecurrentModel(5, rollback)
    batch = Texts(ModelDrafter(model), texts)
    for lookahead, counts in rounds:
        proposal = batch.propose(lookahead)
        assert proposal.tokens.shape == (len(texts), lookahead)
        assert proposal.num_tokens.tolist() == [lookahead] * len(texts)
        check_laws(toys, model, batch.texts, proposal)
        batch.accept(proposal, counts, last=4)
    assert model.widest <= rollback


@pytest.mark.parametrize("count", range(4))
def test_cache_keeps_what_was_accepted_and_is_fed_the_rest(toys, count):  # fault #71, #72, #82
    model = toys.Strict(toys.random_table(5, order=3))
    batch = Texts(ModelDrafter(model), [[1, 2]])
    first = batch.propose(3)
    batch.accept(first, [count], last=(int(first.tokens[0, count]) + 1) % 5 if count < 3 else 0)
    model.blocks.clear()
    proposal = batch.propose(3)
    fed = model.blocks[0]
    # The last drafted token was never fed: after a fully accepted block it is, with the bonus token.
    assert fed.tolist() == [batch.texts[0][-2:] if count == 3 else batch.texts[0][-1:]]
    check_laws(toys, toys.random_table(5, order=3), batch.texts, proposal)


def test_a_draft_is_never_given_the_array_that_holds_the_lengths():
    given = []

    class Recorded(TableModel):
        def rollback(self, cache, lengths, /):
            given.append(lengths)
            return super().rollback(cache, lengths)

    drafter = ModelDrafter(Recorded([0.5, 0.5]))
    tokens, lengths = np.zeros((2, 16), np.int32), np.array([3, 1], np.int32)
    state = drafter.init(2, 16)
    for round_index in range(2):
        randomness = CounterSource(0).begin_round([0, 1], [round_index] * 2, 2)
        _, state = drafter.propose(state, Context(tokens, lengths), 2, SETTINGS, randomness)
        assert given
        assert not any(np.shares_memory(array, lengths) for array in given)
        lengths = lengths + 3


def test_round_without_drafting_takes_rejected_tokens_back(toys):  # fault #74
    model = toys.RecurrentModel(5, 6)
    batch = Texts(ModelDrafter(model), [[1]])
    first = batch.propose(3)
    batch.accept(first, [0], last=(int(first.tokens[0, 0]) + 1) % 5)  # the cache holds two tokens that were rejected
    for _ in range(2):
        batch.accept(batch.propose(0), [0])  # the text grows to where the stale tokens would look like its own
    check_laws(toys, model, batch.texts, batch.propose(3))


def test_drafting_nothing_costs_no_call(toys):
    model = toys.Strict(toys.random_table(5))
    batch = Texts(ModelDrafter(model), [[1, 2, 3]])
    proposal = batch.propose(0)
    assert (model.num_scores, proposal.tokens.shape, proposal.num_tokens.tolist()) == (0, (1, 0), [0])


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 530, 1100])
def test_calls_are_counted_for_prompts_of_any_length(toys, length):
    model = toys.Strict(toys.random_table(5, order=1))
    drafter = ModelDrafter(model)
    text = np.random.default_rng(0).integers(0, 5, length).tolist()
    batch = Texts(drafter, [text, [1]], capacity=length + 9)
    proposal = batch.propose(3)
    check_laws(toys, toys.random_table(5, order=1), batch.texts, proposal)
    prefills = 0 if length <= 16 else -(-(length - 1) // 512)
    assert drafter.num_calls == model.num_scores == 3 + prefills
    assert model.num_prefills == prefills


def nan_past(limit):
    """Return a draft whose laws past its context limit are not to be used."""

    def law(prefix):
        return [np.nan] * 5 if len(prefix) > limit else [float((7 * sum(prefix) + token) % 3) for token in range(5)]

    return TableModel(law, vocab_size=5, logits=True, max_length=limit)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_rows_near_the_context_limit_propose_fewer_and_past_it_none(toys, lookahead):  # fault #57, #59
    model = nan_past(8)
    batch = Texts(ModelDrafter(model), [[1] * length for length in (3, 6, 7, 8, 9, 20)])
    for _ in range(6):
        proposal = batch.propose(lookahead)
        lengths = [len(text) for text in batch.texts]
        # The last token proposed is never fed, so one more can be proposed than there is room for.
        assert proposal.num_tokens.tolist() == [min(lookahead, max(0, 8 - length + 1)) for length in lengths]
        check_laws(toys, model, batch.texts, proposal)
        batch.accept(proposal, [1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("length", range(4, 11))
@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_row_alone_proposes_up_to_the_context_limit(toys, lookahead, length):  # fault #57, #59
    model = nan_past(8)
    batch = Texts(ModelDrafter(model), [[1] * length])
    proposal = batch.propose(lookahead)
    assert proposal.num_tokens.tolist() == [min(lookahead, max(0, 8 - length + 1))]
    check_laws(toys, model, batch.texts, proposal)


def test_draft_that_no_row_fits_is_left_alone(toys):  # fault #59
    model = toys.Strict(toys.random_table(5), max_length=4)
    batch = Texts(ModelDrafter(model), [[1] * 5, [1] * 9])
    proposal = batch.propose(2)
    assert (model.num_scores, proposal.num_tokens.tolist(), proposal.tokens.shape) == (0, [0, 0], (2, 2))


def test_rows_past_the_limit_keep_a_bounded_model_within_its_rollback(toys):
    model = toys.RecurrentModel(5, 4)
    model.max_length = 6
    batch = Texts(ModelDrafter(model), [[1, 2], [1, 2, 3, 4, 0]])
    for count in (0, 0, 1, 0, 0):
        proposal = batch.propose(3)
        check_laws(toys, model, batch.texts, proposal)
        batch.accept(proposal, [0, count])


def test_what_is_believed_held_of_a_row_past_the_limit_is_its_text(toys):
    model = toys.random_table(5, order=2)
    model.max_length = 6
    batch = Texts(ModelDrafter(model), [[1, 2], [1, 2, 3, 4, 0, 1]])
    for _ in range(4):  # the second row has its last proposal in the first round
        proposal = batch.propose(3)
        check_laws(toys, model, batch.texts, proposal)
        batch.accept(proposal, [0, 0])
    state, text = batch.state, batch.texts[1]
    assert state.cache.tokens[1, : state.num_held[1]].tolist() == text[: state.num_held[1]]


def test_tokens_the_draft_lacks_are_read_as_id_zero(toys):
    model = toys.random_table(3, order=2)
    batch = Texts(ModelDrafter(model), [[4, 1, 3], [2] * 20 + [4]])
    for _ in range(2):
        proposal = batch.propose(2)
        check_laws(toys, model, batch.texts, proposal)
        batch.accept(proposal, [1, 0], last=4)


def test_finished_row_with_a_full_cache_does_not_stop_one_that_lags(toys):
    model = toys.random_table(5, order=2)
    batch = Texts(ModelDrafter(model), [[1, 2], [3] * 28], capacity=32)
    batch.accept(batch.propose(2), [0, 0])
    batch.texts[1] = [3] * 29
    for length in (12, 29):  # a few tokens behind, which one block makes up for, and many
        batch.texts[0] += [4] * (length - len(batch.texts[0]))
        check_laws(toys, model, batch.texts, batch.propose(2))


def test_two_missing_tokens_are_no_block_where_another_row_has_no_room_for_it(toys):
    model = toys.random_table(5, order=2)
    drafter, texts = ModelDrafter(model), [[1, 2, 3, 4], [0, 1, 2]]
    context = Context(np.array([[1, 2, 3, 4], [0, 1, 2, 0]]), np.array([4, 3]))
    _, cache = model.score(model.init_cache(2, 4), np.array([[1, 2, 3], [0, 4, 0]]), num_logits=0)
    state = drafter.init(2, 4)._replace(cache=model.rollback(cache, np.array([3, 1])), num_held=np.array([3, 1]))
    randomness = CounterSource(0).begin_round([0, 1], [0, 0], 1)
    proposal, _ = drafter.propose(state, context, 1, SETTINGS, randomness)
    check_laws(toys, model, texts, proposal)


def test_select_is_there_only_if_the_model_has_it(toys):
    assert not hasattr(ModelDrafter(toys.Strict(toys.random_table(5), select=False)), "select")
    model = toys.random_table(5, order=3)
    drafter = ModelDrafter(model)
    batch = Texts(drafter, [[1, 2, 3, 4], [3], [4, 4]])
    batch.accept(batch.propose(3), [0, 3, 1])
    batch.state = drafter.select(batch.state, np.array([1, 2]))
    batch.texts = batch.texts[1:]
    check_laws(toys, model, batch.texts, batch.propose(3))


def test_drafter_says_what_its_model_says(toys):
    drafter = ModelDrafter(toys.RecurrentModel(7, 5))
    assert (drafter.vocab_size, drafter.max_rollback) == (7, 5)


def test_only_a_model_drafts():
    with pytest.raises(TypeError, match="`model` must be a Model, got 'draft'"):
        ModelDrafter("draft")


def test_catching_up_leaves_no_row_more_than_the_width_behind(toys):
    model = toys.Strict(toys.random_table(5, order=2))
    drafter = ModelDrafter(model)
    tokens = np.random.default_rng(0).integers(0, 5, (3, 12)).astype(np.int32)
    context = Context(tokens, np.array([9, 2, 1], dtype=np.int32))
    state = drafter.catch_up(drafter.init(3, 12), context, 2)
    assert state.cache.lengths.tolist() == state.num_held.tolist() == [8, 1, 0]
    assert drafter.num_calls == model.num_scores == 1
    again = drafter.catch_up(state, context, 2)
    assert again is state


def test_traced_block_is_two_wide_whatever_is_lacking(toys):
    jax = pytest.importorskip("jax")
    table = np.random.default_rng(0).normal(0, 1, (5, 5))

    class JaxModel:
        vocab_size, max_rollback = 5, None

        def init_cache(self, batch_size, capacity):
            return jax.numpy.zeros(batch_size, int)

        def score(self, cache, tokens, /, *, num_logits=None):
            return jax.numpy.asarray(table)[tokens], cache + tokens.shape[1]

        def rollback(self, cache, lengths, /):
            return jax.numpy.asarray(lengths)

    drafter = ModelDrafter(JaxModel())
    widths = []

    def propose(state, context, uniforms):
        proposal, state = drafter.propose(state, context, 2, SETTINGS, UniformRandomness(uniforms, 2))
        widths.append(context.tokens.shape)
        return proposal, state

    tokens = jax.numpy.asarray([[1, 2, 3, 4, 0, 0], [3, 1, 0, 0, 0, 0]])
    lengths = jax.numpy.asarray([4, 2])
    state = drafter.init(2, 6)._replace(num_held=jax.numpy.asarray([2, 1]), like=jax.numpy.zeros(0))
    uniforms = CounterSource(0).begin_round([0, 1], [0, 0], 2).uniforms_like(np.zeros(1, np.float32))
    proposal, state = jax.jit(propose)(state, Context(tokens, lengths), uniforms)
    expected = to_probs(table[[4, 1]].astype(np.float32), SETTINGS)
    np.testing.assert_allclose(np.asarray(proposal.probs[:, 0]), expected, rtol=1e-5)
    assert np.asarray(state.cache).tolist() == np.asarray(state.num_held).tolist() == [5, 3]
    empty, state = jax.jit(lambda *a: drafter.propose(*a, 0, SETTINGS, None))(state, Context(tokens, lengths + 1))
    assert empty.tokens.shape == (2, 0)
    assert np.asarray(state.num_held).tolist() == [5, 3]


def test_constants_are_made_on_the_device_of_the_text():
    strict = pytest.importorskip("array_api_strict")
    where = strict.Device("device1")

    class Uniform:
        vocab_size, max_rollback = 4, None

        def init_cache(self, batch_size, capacity):
            return None

        def score(self, cache, tokens, /, *, num_logits=None):
            return strict.zeros((*tokens.shape, 4), device=where), cache

        def rollback(self, cache, lengths, /):
            return cache

    drafter = ModelDrafter(Uniform())
    tokens, lengths, num_held, u = (
        strict.asarray(x, device=where)
        for x in (np.array([[1, 2, 3, 0], [2, 0, 0, 0]]), np.array([3, 1]), np.array([1, 0]), np.full((2, 5, 3), 0.6))
    )
    state = drafter.init(2, 4)._replace(num_held=num_held, like=lengths)
    proposal, state = drafter.propose(state, Context(tokens, lengths), 2, Sampling(), UniformRandomness(u, 2))
    assert {x.device for x in (*proposal, state.num_held)} == {where}
