"""The decoder's own steps: laying a batch out, one round, what the state holds after it, and every refusal."""

import numpy as np
import pytest

from specsampling import (
    Capabilities,
    CapabilityError,
    CounterSource,
    Decoder,
    ModelDrafter,
    NonFiniteLogitsError,
    PromptLookup,
    Proposal,
    Sampling,
    decode_round,
    generate,
)
from specsampling_numpy import TableModel

GREEDY = Sampling(temperature=0.0)


def cycle(vocab_size, **options):
    """Return a model that counts up: after token i comes i + 1."""
    return TableModel(np.roll(np.eye(vocab_size), 1, axis=1), **options)


class Scripted:
    """A drafter that proposes what it is told, round by round, as chosen tokens."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)

    def init(self, batch_size, capacity):
        return 0

    def propose(self, state, context, lookahead, sampling, randomness):
        rows = self.rounds[state]
        tokens = np.zeros((len(rows), lookahead), dtype=np.int32)
        for row, draft in enumerate(rows):
            tokens[row, : len(draft)] = draft
        return Proposal(tokens, np.array([len(draft) for draft in rows]), None), state + 1


class Rule:
    def __init__(self, *choices, answer=None):
        self.choices = choices
        self.answer = choices[0] if answer is None else answer

    def __call__(self, state):
        return self.answer


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lookahead": -1}, ValueError, "`lookahead` must be at least 0, got -1"),
        ({"lookahead": 2.5}, TypeError, "`lookahead` must be an integer, got 2.5"),
        ({"lookahead": lambda state: 1}, TypeError, "must have an attribute `choices`"),
        ({"sampling": 0.7}, TypeError, "`sampling` must be a Sampling, got 0.7"),
        ({"draft_sampling": "greedy"}, TypeError, "`draft_sampling` must be a Sampling, got 'greedy'"),
        ({"end_tokens": 1}, TypeError, "`end_tokens` must be a sequence, got 1"),
        ({"end_tokens": [5]}, ValueError, "`end_tokens` must be at most 4, got 5"),
        ({"stop_sequences": [1]}, TypeError, "`stop_sequences` must be a sequence, got 1"),
        ({"stop_sequences": [[]]}, ValueError, "`stop_sequences` must not hold an empty sequence"),
        ({"min_new_tokens": -1}, ValueError, "`min_new_tokens` must be at least 0, got -1"),
        ({"min_new_tokens": 2}, ValueError, "`min_new_tokens` forbids end tokens, and `end_tokens` is empty"),
        (
            {"min_new_tokens": 1, "end_tokens": [4, 0, 1, 2, 3, 0]},
            ValueError,
            "`min_new_tokens` forbids end tokens, and `end_tokens` holds all 5 ids of the vocabulary",
        ),
        ({"seed": 1.5}, TypeError, "`seed` must be an integer or None, got 1.5"),
        ({"seed": -1}, ValueError, "`seed` must lie in 0 to"),
        ({"randomness": 7}, TypeError, "`randomness` must be a RandomSource, got 7"),
        ({"randomness": CounterSource(1), "seed": 1}, ValueError, "cannot be combined with `seed`"),
        ({"randomness": CounterSource(1), "seed": None}, ValueError, "cannot be combined with `seed`"),
        ({"logprobs": "x"}, ValueError, '`logprobs` must be None, "raw" or "processed", got \'x\''),
        ({"logprobs": True}, ValueError, '`logprobs` must be None, "raw" or "processed", got True'),
        ({"pad_vocab": 1}, TypeError, "`pad_vocab` must be True or False, got 1"),
        ({"validate": "yes"}, TypeError, "`validate` must be True or False, got 'yes'"),
        ({"temperature": 1.0}, TypeError, "unexpected keyword argument 'temperature'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    model = TableModel(np.full(5, 0.2))
    with pytest.raises(error, match=message):
        Decoder(model, model, **options)
    with pytest.raises(error, match=message):
        generate(model, model, [0], max_new_tokens=1, **options)


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["none", "lookup"])
def test_settings_for_a_draft_that_draws_nothing_are_refused(drafter):
    with pytest.raises(ValueError, match="`draft_sampling` has no effect"):
        Decoder(cycle(3), drafter, draft_sampling=GREEDY)


@pytest.mark.parametrize("drafter", ["draft", 3, object()])
def test_drafter_of_another_kind_is_refused(drafter):
    with pytest.raises(TypeError, match="`drafter` must be a Drafter, a Model or None, got"):
        Decoder(cycle(3), drafter)


def test_a_class_in_place_of_a_drafter_is_named():
    with pytest.raises(TypeError, match="`drafter` must be .*, got the class ModelDrafter itself"):
        Decoder(cycle(3), ModelDrafter)


def test_target_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="`target` must be a Model, got None, which has no vocab_size"):
        Decoder(None, None)


def test_vocabularies_of_different_sizes_are_refused_by_their_sizes():  # fault #44, #47, #156
    with pytest.raises(ValueError, match="the target has 12 ids, the draft 10; pass `pad_vocab=True`"):
        Decoder(cycle(12), cycle(10))
    assert Decoder(cycle(12), cycle(10), pad_vocab=True)
    assert Decoder(cycle(10), ModelDrafter(cycle(12)), pad_vocab=True)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_lookahead_beyond_the_rollback_is_refused_with_both_numbers(toys, role):  # fault #76, #162
    models = {"target": cycle(5), "draft": cycle(5), role: toys.RecurrentModel(5, 4)}
    message = f"`lookahead` = 5 needs the {role} to roll back 6 tokens, and its `max_rollback` is 4"
    with pytest.raises(CapabilityError, match=message):
        Decoder(models["target"], models["draft"], lookahead=5)
    with pytest.raises(CapabilityError, match=message):
        Decoder(models["target"], models["draft"], lookahead=Rule(0, 5))
    decoder = Decoder(models["target"], models["draft"], lookahead=3)
    with pytest.raises(CapabilityError, match=message):
        decoder.init([0], max_new_tokens=1, max_lookahead=5)
    with pytest.raises(CapabilityError, match="roll back 1 tokens, and its `max_rollback` is 0"):
        Decoder(toys.RecurrentModel(5, 0), None)


def test_what_has_no_effect_is_accepted_where_the_docs_say_so(toys):
    target = toys.random_table(5)
    plain = generate(target, None, [0], max_new_tokens=6)
    assert generate(target, None, [0], max_new_tokens=6, lookahead=9).tokens == plain.tokens
    assert generate(target, None, [0], max_new_tokens=6, pad_vocab=True).tokens == plain.tokens
    assert generate(target, target, [0], max_new_tokens=6, lookahead=0).tokens == plain.tokens
    assert generate(target, target, [0], max_new_tokens=6, lookahead=0, draft_sampling=GREEDY).tokens == plain.tokens
    greedy = [
        generate(target, None, [0], max_new_tokens=6, seed=seed, sampling=Sampling(temperature=0.0, top_k=2, top_p=0.5))
        for seed in (0, 1)
    ]
    assert greedy[0].tokens == greedy[1].tokens  # fault #104


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": "text"}, TypeError, "`prompts` must be token ids, got text"),
        ({"prompts": [[0], []]}, ValueError, "got none in row 1"),
        ({"prompts": [[0], [5]]}, ValueError, "ids from 0 to 4, got 5 in row 1, position 0"),
        ({"max_new_tokens": -1}, ValueError, "`max_new_tokens` must be at least 0, got -1"),
        ({"max_new_tokens": 1.0}, TypeError, "`max_new_tokens` must be an integer, got 1.0"),
        ({"max_new_tokens": [1]}, ValueError, "one for each of the 2 prompts, got 1"),
        (
            {"max_new_tokens": [4, 2]},
            ValueError,
            "must be at most `max_new_tokens`, got 3 and 2 in row 1",
        ),
        (
            {"max_new_tokens": [4, 9]},
            ValueError,
            "= 9 after a prompt of 2 tokens .* 10 tokens in row 1",
        ),
        ({"prompts": [[0], [1] * 10]}, ValueError, "`prompts` must be shorter than .* 10 tokens, got 10 .* in row 1"),
        ({"max_new_tokens": 2**31 - 1}, ValueError, "passes the target's context of 10 tokens in row 0"),
        ({"row_ids": [1, 1]}, ValueError, r"`row_ids` must differ, got 1 in rows \[0, 1\]"),
        ({"max_lookahead": -2}, ValueError, "`max_lookahead` must be at least 0, got -2"),
    ],
)
def test_batches_that_make_no_sense_are_refused_before_any_work(toys, options, error, message):  # fault #56
    target = toys.Strict(cycle(5), max_length=10)
    decoder = Decoder(target, None, end_tokens=[4], min_new_tokens=3)
    with pytest.raises(error, match=message):
        decoder.init(**{"prompts": [[0], [1, 2]], "max_new_tokens": 5, **options})
    assert target.num_scores == 0


@pytest.mark.parametrize("name", ["sampling", "draft_sampling"])
def test_settings_for_another_number_of_rows_are_refused(name):
    decoder = Decoder(cycle(5), cycle(5), **{name: Sampling(temperature=[0.0, 1.0])})
    with pytest.raises(ValueError, match="got values for 2 rows"):
        decoder.init([[0], [1], [2]], max_new_tokens=1)


@pytest.mark.parametrize("length", [1, 2, 512, 513, 514, 1026])
def test_first_token_is_the_same_however_the_prompt_is_cut(toys, length):  # fault #36
    target = toys.random_table(7, order=2)
    prompt = np.random.default_rng(length).integers(0, 7, length).tolist()
    expected = toys.plain_greedy(target, prompt[-3:], 3)[0]
    for drafter in (None, toys.random_table(7, order=2, seed=1)):
        assert generate(target, drafter, [prompt, [1]], max_new_tokens=3, sampling=GREEDY).tokens[0] == expected


def test_no_logits_are_asked_for_prompts(toys):
    target = toys.Strict(toys.random_table(5))
    state = Decoder(target, None).init([[1] * 600, [2]], max_new_tokens=2)
    assert (target.num_scores, target.num_prefills) == (2, 2)
    assert state.carry.target_cache.lengths.tolist() == [599, 0]


def test_state_begins_with_the_prompts():
    state = Decoder(cycle(5), None).init([[1, 2], [3]], max_new_tokens=[2, 0], row_ids=[7, 4])
    assert state.lengths.tolist() == state.prompt_lengths.tolist() == [2, 1]
    assert (state.row_ids.tolist(), state.rounds.tolist(), state.rows.tolist()) == ([7, 4], [0, 0], [0, 1])
    assert state.status.tolist() == [0, 2]  # nothing may be emitted: at its limit from the start
    assert not state.is_done
    assert state.new_tokens(0) == []


def test_round_reports_what_it_did():
    decoder = Decoder(cycle(6), Scripted([[1, 2, 5], [4], []]), lookahead=3, logprobs="raw")
    state = decoder.init([[0], [2, 3], [5]], max_new_tokens=9)
    state, info = decoder.step(state)
    assert info.lookahead == 3
    assert info.rows.tolist() == [0, 1, 2]
    assert info.tokens.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [0, 0, 0, 0]]
    assert info.num_emitted.tolist() == [3, 2, 1]
    assert info.num_proposed.tolist() == [3, 1, 0]
    assert info.num_tested.tolist() == [3, 1, 0]
    assert info.num_accepted.tolist() == [2, 1, 0]
    assert info.from_draft.tolist() == [[True, True, False, False], [True, False, False, False], [False] * 4]
    assert info.overlap.tolist() == [2.0, 1.0, 0.0]
    assert info.finish_reasons.tolist() == [None, None, None]
    assert (info.draft_calls, info.is_point_mass) == (0, True)
    assert [info.logprobs[row, :count].tolist() for row, count in enumerate([3, 2, 1])] == [[0.0] * 3, [0.0] * 2, [0.0]]
    assert state.lengths.tolist() == [4, 4, 2]
    assert [state.new_tokens(row) for row in range(3)] == [[1, 2, 3], [4, 5], [0]]
    assert state.rounds.tolist() == [1, 1, 1]


def test_time_of_a_round_goes_to_its_phases(toys):
    decoder = Decoder(toys.random_table(5), toys.random_table(5, seed=1))
    _, info = decoder.step(decoder.init([0], max_new_tokens=9))
    assert info.times.prefill == 0
    assert min(info.times.draft, info.times.target, info.times.other) > 0


def test_lookahead_of_a_step_is_its_own(toys):  # fault #37
    target = toys.random_table(5)
    decoder = Decoder(target, target, lookahead=2)
    state = decoder.init([[0]], max_new_tokens=30, max_lookahead=5)
    emitted = []
    for lookahead in (5, 0, None, 3, 1):
        state, info = decoder.step(state, lookahead=lookahead)
        emitted.append(int(info.num_emitted[0]))
    assert emitted == [6, 1, 3, 4, 2]  # a model that drafts for itself is always right: fault #41, #42
    with pytest.raises(ValueError, match="`lookahead` must be at most the 5 that `init` made room for, got 6"):
        decoder.step(state, lookahead=6)
    with pytest.raises(TypeError, match=r"`lookahead` must be an integer, got 1\.0"):
        decoder.step(state, lookahead=1.0)
    decoder.step(state)  # which refusals leave as it was


def test_decoders_lookahead_must_fit_what_init_made_room_for(toys):
    decoder = Decoder(toys.random_table(5), toys.random_table(5), lookahead=4)
    with pytest.raises(ValueError, match="must be at most the 2 that `init` made room for, got 4"):
        decoder.step(decoder.init([0], max_new_tokens=5, max_lookahead=2))


def test_no_drafter_makes_any_lookahead_zero(toys):
    decoder = Decoder(toys.random_table(5), None, lookahead=Rule(3))
    state, info = decoder.step(decoder.init([0], max_new_tokens=5, max_lookahead=7), lookahead=9)
    assert (info.lookahead, state.max_lookahead) == (0, 0)
    with pytest.raises(ValueError, match="`lookahead` must be at least 0, got -1"):
        decoder.step(state, lookahead=-1)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (4, ValueError, r"`lookahead` must return one of its `choices` \(1, 3\), got 4"),
        (1.0, TypeError, "`lookahead` must be an integer, got 1.0"),
        (True, TypeError, "`lookahead` must be an integer, got True"),
    ],
)
def test_rule_that_answers_what_is_not_among_its_choices_is_refused(toys, answer, error, message):
    decoder = Decoder(toys.random_table(5), toys.random_table(5), lookahead=Rule(1, 3, answer=answer))
    state = decoder.init([0], max_new_tokens=5)
    assert state.max_lookahead == 3
    with pytest.raises(error, match=message):
        decoder.step(state)


def test_rule_is_asked_before_each_round(toys):
    class ByRound(Rule):
        def __call__(self, state):
            return self.choices[int(state.rounds[0]) % 3]

    target = toys.random_table(5)
    decoder = Decoder(target, target, lookahead=ByRound(2, 0, 1))
    state, emitted = decoder.init([0], max_new_tokens=12), []
    while not state.is_done:
        state, info = decoder.step(state)
        emitted.append(int(info.num_emitted[0]))
    assert emitted == [3, 1, 2, 3, 1, 2]


def test_state_cannot_be_used_twice(toys):
    decoder = Decoder(toys.random_table(5), PromptLookup())
    first = decoder.init([0], max_new_tokens=20)
    second, _ = decoder.step(first)
    with pytest.raises(ValueError, match="`state` must not be used twice"):
        decoder.step(first)
    decoder.step(second)


def test_finished_batch_takes_no_step(toys):
    decoder = Decoder(toys.random_table(5), None)
    state = decoder.init([0], max_new_tokens=1)
    state, _ = decoder.step(state)
    assert state.is_done
    with pytest.raises(ValueError, match="every row of `state` has finished"):
        decoder.step(state)
    with pytest.raises(ValueError, match="every row of `state` has finished"):
        decoder.step(decoder.init([0], max_new_tokens=0))


@pytest.mark.parametrize("lookahead", [0, 1, 3, 6])
def test_blocks_fit_the_cache_up_to_the_last_token(toys, lookahead):
    target, draft = toys.Strict(toys.random_table(5)), toys.Strict(toys.random_table(5, seed=1))
    decoder = Decoder(target, draft, lookahead=lookahead, stop_sequences=[[1, 2, 3, 4, 0]])
    for limit in range(1, 9):
        state = decoder.init([[0] * 4, [1]], max_new_tokens=[limit, 3])
        while not state.is_done:
            state, _ = decoder.step(state)


@pytest.mark.parametrize(("target_selects", "draft_selects"), [(True, True), (True, False), (False, True)])
def test_finished_rows_are_dropped_where_both_can_else_masked(toys, target_selects, draft_selects):
    target = toys.Strict(toys.random_table(5), select=target_selects)
    draft = toys.Strict(toys.random_table(5, seed=1), select=draft_selects)
    decoder = Decoder(target, draft, lookahead=2)
    limits = [9, 1, 4, 9]
    state = decoder.init([[0], [1], [2, 3], [4]], max_new_tokens=limits)
    while not state.is_done:
        running = np.nonzero(state.status == 0)[0].tolist()
        target.blocks.clear()
        state, info = decoder.step(state)
        assert info.rows.tolist() == running
        assert len(target.blocks[-1]) == (len(running) if target_selects and draft_selects else 4)
    assert (state.lengths - state.prompt_lengths).tolist() == limits
    assert state.rounds[1] == 1 < state.rounds[0]
    assert bool(target.selected) == bool(draft.selected) == (target_selects and draft_selects)
    if draft.selected:
        assert target.selected == draft.selected


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["none", "lookup"])
def test_target_alone_decides_where_the_drafter_holds_no_cache(toys, drafter):
    target = toys.Strict(toys.random_table(5))
    generate(target, drafter, [[0], [1], [2]], max_new_tokens=[1, 6, 3])
    assert len(target.selected) == 2


def test_drafter_that_cannot_drop_rows_masks_them(toys):
    target = toys.Strict(cycle(6))
    decoder = Decoder(target, Scripted([[1], [4]], [[3], [0]], [[4], []]), lookahead=1)
    state = decoder.init([[0], [3]], max_new_tokens=[2, 5])
    while not state.is_done:
        state, _ = decoder.step(state)
    assert not target.selected
    assert [state.new_tokens(row) for row in (0, 1)] == [[1, 2], [4, 5, 0, 1, 2]]


@pytest.mark.parametrize("select", [True, False])
def test_masked_row_with_a_full_cache_does_not_stop_a_draft_that_lags(toys, select):
    class FastThenSlow(Rule):
        def __call__(self, state):
            return 0 if 2 <= state.rounds.max() < 40 else 4

    target, draft = toys.random_table(5), toys.random_table(5)
    models = toys.Strict(target, select=select), toys.Strict(draft, select=select)
    prompts, limits = [[1, 2, 3] * 4, [0]], [10, 60]
    result = generate(*models, prompts, max_new_tokens=limits, lookahead=FastThenSlow(0, 4), sampling=GREEDY)
    assert result.tokens == [
        toys.plain_greedy(target, prompt, limit)[0] for prompt, limit in zip(prompts, limits, strict=True)
    ]


def bad_at(length, value, vocab_size=5):
    """Return a model that counts up, and has no law for what follows a text of `length` tokens."""

    def law(prefix):
        logits = np.full(vocab_size, -50.0)
        logits[(prefix[-1] + 1) % vocab_size] = 0.0
        return np.full(vocab_size, value) if len(prefix) == length else logits

    return TableModel(law, vocab_size=vocab_size, logits=True)


def steps_until_error(decoder, state):
    """Return every state up to the error, and the error."""
    states = [state]
    while True:
        try:
            states.append(decoder.step(states[-1])[0])
        except NonFiniteLogitsError as error:
            return states, error


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("position", [2, 3, 4, 5, 6])
def test_target_without_a_law_is_named_by_row_and_position(value, lookahead, position):  # fault #51, #62
    target = bad_at(position, value)
    decoder = Decoder(target, cycle(5), lookahead=lookahead, sampling=GREEDY)
    state = decoder.init([[3], [1, 2]], max_new_tokens=[1, 9])  # the first row has finished by then, but for K = 0
    states, error = steps_until_error(decoder, state)
    assert str(error).startswith("the target returned logits without a law")
    assert f"for row 1, position {position}; nothing of this round was committed" in str(error)
    assert (error.row, error.position, error.model) == (1, position, "target")
    assert isinstance(error, ValueError)
    # Nothing of that round was committed: neither told nor written over what was.
    committed = states[-1].new_tokens(1)
    assert committed == [(3 + offset) % 5 for offset in range(len(committed))]
    assert position - lookahead <= 2 + len(committed) <= position


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_draft_without_a_law_is_named_by_row_and_position(value):
    decoder = Decoder(cycle(5), bad_at(5, value), lookahead=2)
    state = decoder.init([[0], [1, 2]], max_new_tokens=9)
    state, _ = decoder.step(state)
    with pytest.raises(NonFiniteLogitsError, match=r"the draft returned .* for row 0, position 5") as error:
        decoder.step(state)
    assert (error.value.row, error.value.position, error.value.model) == (0, 5, "draft")


def test_row_is_named_as_the_caller_gave_it_after_others_were_dropped(toys):
    decoder = Decoder(bad_at(7, np.nan), None)
    state = decoder.init([[0], [1], [2]], max_new_tokens=[1, 2, 9])
    _, error = steps_until_error(decoder, state)
    assert (error.row, error.position) == (2, 7)


def test_rows_that_are_not_used_may_be_anything():
    """Past a row's proposals, past its limit, and in a row that has finished."""

    def law(prefix):
        # Padding is id 0, which this model never emits.
        return [np.nan] * 4 if 0 in prefix else [-np.inf, 0.0, -1.0, -2.0]

    target = TableModel(law, vocab_size=4, logits=True)
    rounds = [[[1, 2], [1]], [[], [3]], [[], []], [[], []], [[], []], [[], []]]
    decoder = Decoder(target, Scripted(*rounds), lookahead=3)
    state = decoder.init([[1], [2]], max_new_tokens=[2, 6])
    while not state.is_done:
        state, _ = decoder.step(state)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_end_tokens_that_are_all_there_is_leave_no_law_and_the_ban_is_named(lookahead):
    target = TableModel([[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(NonFiniteLogitsError, match="row 1, position 1.*`min_new_tokens` forbids end tokens there"):
        generate(target, target, [[0], [1]], max_new_tokens=4, end_tokens=[1], min_new_tokens=2, lookahead=lookahead)


def test_the_ban_is_not_named_where_it_has_ended():
    target = TableModel(lambda prefix: [np.nan] * 3 if len(prefix) == 3 else [0.0] * 3, vocab_size=3, logits=True)
    with pytest.raises(NonFiniteLogitsError, match="position 3; nothing of this round was committed$"):
        generate(target, None, [0], max_new_tokens=4, end_tokens=[1], min_new_tokens=2)


class Compiled:
    """A model whose compiled round is the plain one, noted down."""

    def __init__(self, model):
        self._model = model
        self.vocab_size, self.max_rollback = model.vocab_size, model.max_rollback
        self.init_cache, self.score, self.rollback, self.select = (
            model.init_cache,
            model.score,
            model.rollback,
            model.select,
        )
        self.compiled, self.batch_sizes = [], []

    def compile_round(self, drafter, sampling, lookahead):
        self.compiled.append(lookahead)

        def round_(target, *arguments, **options):
            assert target is self
            assert arguments[0] is drafter
            assert (options["lookahead"], options["sampling"]) == (lookahead, sampling)
            self.batch_sizes.append(len(arguments[2].lengths))
            return decode_round(target, *arguments, **options)

        return round_


def test_rounds_are_compiled_once_for_each_lookahead(toys):
    class ByRound(Rule):
        def __call__(self, state):
            return self.choices[int(state.rounds.max()) % 2]

    target, draft = Compiled(toys.random_table(5)), toys.random_table(5, seed=1)
    options = {"max_new_tokens": [3, 9], "lookahead": ByRound(2, 1), "seed": 3}
    result = generate(target, draft, [[0], [1]], **options)
    assert sorted(target.compiled) == [1, 2]
    assert target.batch_sizes == [2] * result.stats.rounds  # a finished row stays: a new size would be a new trace
    assert result.tokens == generate(toys.random_table(5), draft, [[0], [1]], **options).tokens
    assert result.stats.times.draft == 0 < result.stats.times.target


def test_validation_does_not_compile(toys):
    target = Compiled(toys.random_table(5))
    generate(target, None, [0], max_new_tokens=3, validate=True)
    assert not target.compiled


def test_validation_finds_a_drafter_that_lies(toys):
    class Liar(Scripted):
        def propose(self, *arguments):
            proposal, state = super().propose(*arguments)
            probs = np.zeros((1, 1, 5))
            probs[..., 3] = 1.0
            return proposal._replace(probs=probs), state

    decoder = Decoder(toys.random_table(5), Liar([[1]]), lookahead=1, validate=True)
    with pytest.raises(ValueError, match="probability 0 to the proposed token 1 in row 0, slot 0"):
        decoder.step(decoder.init([0], max_new_tokens=4))


def test_validation_names_rows_of_the_whole_batch(toys):
    class LiarInTheSecondRound(Scripted):
        def propose(self, *arguments):
            proposal, state = super().propose(*arguments)
            return proposal._replace(probs=np.eye(5)[proposal.tokens + (state == 2)]), state

        def select(self, state, rows):
            return state

    drafter = LiarInTheSecondRound([[1], [1]], [[1], [1]])
    with pytest.raises(ValueError, match="probability 0 to the proposed token 1 in row 1"):
        generate(toys.random_table(5), drafter, [[0], [0]], max_new_tokens=[1, 9], lookahead=1, validate=True)


class Declared(TableModel):
    def __init__(self, **declared):
        super().__init__(np.array([0.5, 0.5]))
        self.capabilities = Capabilities(**declared)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("declared", [{"per_row_rollback": False}, {"max_batch_size": 2}])
def test_a_batch_that_a_model_says_it_cannot_hold_is_refused_before_the_first_round(role, declared):
    able, unable = TableModel(np.array([0.5, 0.5])), Declared(**declared)
    decoder = Decoder(unable, able) if role == "target" else Decoder(able, unable)
    assert decoder.init([0], max_new_tokens=2).lengths.tolist() == [1]
    with pytest.raises(CapabilityError, match=f"the {role} .*{next(iter(declared))}.* got 3 prompts"):
        decoder.init([[0], [1], [0]], max_new_tokens=2)


def test_a_batch_up_to_the_declared_limit_is_held():
    decoder = Decoder(Declared(max_batch_size=2), None)
    assert decoder.init([[0], [1]], max_new_tokens=2).lengths.tolist() == [1, 1]


def test_settings_for_another_number_of_rows_are_refused_by_their_own_name():
    model = TableModel(np.array([0.5, 0.5]))
    decoder = Decoder(model, model, draft_sampling=Sampling(temperature=[1.0, 0.5]))
    with pytest.raises(ValueError, match="`draft_sampling`"):
        decoder.init([0], max_new_tokens=2)
