"""`AdaptiveLookahead`: the law stays exact whatever it picks, and it picks what pays."""

import copy
import gc
import itertools
import pickle
import sys
import threading
import time
from fractions import Fraction

import numpy as np
import pytest

from specsampling import AdaptiveLookahead, Decoder, PromptLookup, Sampling, generate
from specsampling_numpy import TableModel

LAWS = [[0.5, 0.5], [0.2, 0.8]]
TARGET = TableModel(LAWS)
DRAFT = TableModel([[0.9, 0.1], [0.6, 0.4]])
COSTS = {1: 1.02, 2: 1.05}


class Joint:
    """Takes another way through the decisions of all rows together on each run, until none is left."""

    def __init__(self):
        self.choices = []
        self.position = 0
        self.probability = 1.0

    def runs(self, run):
        while True:
            self.position, self.probability = 0, 1.0
            yield run(), self.probability
            while self.choices and len(self.choices[-1]) == 1:
                self.choices.pop()
            if not self.choices:
                return
            self.choices[-1].pop(0)

    def decide(self, chances):
        if self.position == len(self.choices):
            self.choices.append([(answer, chance) for answer, chance in enumerate(chances) if chance > 0])
        answer, chance = self.choices[self.position][0]
        self.position += 1
        self.probability *= chance
        return answer

    def begin_round(self, row_ids, rounds, lookahead):
        return self

    def accept(self, numerator, denominator, label):
        answers = np.zeros(numerator.shape, dtype=bool)
        for row, slot in itertools.product(*map(range, numerator.shape)):
            if slot and not answers[row, slot - 1]:
                continue
            p, q = float(numerator[row, slot]), float(denominator[row, slot])
            chance = 0.0 if p == 0 else 1.0 if p >= q else p / q
            answers[row, slot] = self.decide((1 - chance, chance)) == 1
        return answers

    def categorical(self, weights, label):
        weights = np.asarray(weights, dtype=np.float64)
        return np.array([self.decide((row / row.sum()).tolist()) for row in weights])


def text_law(laws, prompt, length):
    law = {}
    for text in itertools.product(range(2), repeat=length):
        probability, last = 1.0, prompt[-1]
        for token in text:
            probability *= laws[last][token]
            last = token
        law[text] = probability
    return law


@pytest.mark.parametrize("drafter", [DRAFT, PromptLookup()], ids=["draft", "lookup"])
def test_the_joint_law_of_two_rows_that_share_a_lookahead_is_the_targets(drafter, monkeypatch):
    # From the first round on K depends on what was accepted: 2 while it seems to pay, then 1 or 0, and trials.
    monkeypatch.setattr("specsampling._adaptive._PAUSES", (1, 2))
    prompts, lengths = [[0], [1, 0]], [3, 2]
    picked = set()

    def run():
        adaptive = AdaptiveLookahead(draft_cost=0.2, block_costs=COSTS)
        decoder = Decoder(TARGET, drafter, lookahead=adaptive, randomness=source)
        state = decoder.init(prompts, max_new_tokens=lengths)
        while not state.is_done:
            state, info = decoder.step(state)
            picked.add(info.lookahead)
        return tuple(state.new_tokens(0)), tuple(state.new_tokens(1))

    source, law = Joint(), {}
    for texts, probability in source.runs(run):
        law[texts] = law.get(texts, 0.0) + probability
    first, second = (text_law(LAWS, prompt, length) for prompt, length in zip(prompts, lengths, strict=True))
    expected = {(a, b): first[a] * second[b] for a in first for b in second}
    assert set(law) <= set(expected)
    assert 0.5 * sum(abs(expected[texts] - law.get(texts, 0.0)) for texts in expected) < 1e-12
    assert len(picked) > 1


def rounds_of(target, drafter, adaptive, num_tokens=200, prompts=((0,),), seed=1):
    decoder = Decoder(target, drafter, lookahead=adaptive, seed=seed)
    state = decoder.init([list(prompt) for prompt in prompts], max_new_tokens=num_tokens)
    picked = []
    while not state.is_done:
        state, info = decoder.step(state)
        picked.append(info.lookahead)
    return picked


def test_a_draft_that_is_always_right_gets_the_largest_lookahead_that_pays():
    adaptive = AdaptiveLookahead(draft_cost=0.05, block_costs={1: 1.0, 4: 1.1, 8: 4.0})
    picked = rounds_of(TARGET, TARGET, adaptive)
    assert set(picked[5:]) == {4}


def test_a_draft_that_is_never_right_is_tried_ever_more_rarely():
    target, draft = TableModel([0.0, 1.0]), TableModel([1.0, 0.0])
    picked = rounds_of(target, draft, AdaptiveLookahead(draft_cost=0.1, block_costs={2: 1.1, 4: 1.2}))
    trials = [number for number, lookahead in enumerate(picked) if lookahead]
    gaps = np.diff([number for number in trials if number > 10])
    assert len(trials) < 25
    assert set(gaps[-5:].tolist()) == {17}


def test_a_draft_that_becomes_right_is_found_again():
    # After 60 tokens the target begins to repeat itself, which prompt lookup then foretells.
    rng = np.random.default_rng(3)
    text = [*rng.integers(0, 50, 60).tolist(), *([50, 51, 52, 53, 54, 55] * 30)]

    class Recites:
        vocab_size, max_rollback = 56, None

        def init_cache(self, batch_size, capacity):
            return np.zeros(batch_size, dtype=int)

        def score(self, cache, tokens, /, *, num_logits=None):
            width = np.shape(tokens)[1]
            wanted = width if num_logits is None else num_logits
            places = cache[:, None] + width - wanted + np.arange(wanted)
            following = np.array([*text, 0])[np.minimum(places, len(text))]
            return np.where(np.arange(56) == following[..., None], 0.0, -np.inf), cache + width

        def rollback(self, cache, lengths, /):
            return np.array(lengths)

    adaptive = AdaptiveLookahead(draft_cost=0.0, block_costs={2: 1.2, 6: 1.5})
    result = generate(Recites(), PromptLookup(), [0], max_new_tokens=220, lookahead=adaptive)
    assert result.tokens[0] == text[:220]
    assert result.stats.rounds < 60 + 17 + 160 / 5


def test_runs_that_take_turns_do_not_disturb_each_other():
    target, draft = TableModel([0.0, 1.0]), TableModel([1.0, 0.0])
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs={2: 1.1})
    expected = {drafter: rounds_of(target, drafter, adaptive, 40) for drafter in (draft, target)}
    decoders = {drafter: Decoder(target, drafter, lookahead=adaptive) for drafter in (draft, target)}
    states = {drafter: decoder.init([0], max_new_tokens=40) for drafter, decoder in decoders.items()}
    picked = {drafter: [] for drafter in decoders}
    while not all(state.is_done for state in states.values()):
        for drafter, decoder in decoders.items():
            if not states[drafter].is_done:
                states[drafter], info = decoder.step(states[drafter])
                picked[drafter].append(info.lookahead)
    assert picked == expected


def test_nothing_of_a_run_is_kept_after_it():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs={2: 1.1})
    for _ in range(5):
        rounds_of(TARGET, DRAFT, adaptive, 10)
        gc.collect()
        assert len(adaptive._records) <= 1


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda adaptive: pickle.loads(pickle.dumps(adaptive))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_has_the_costs_and_nothing_of_the_runs(copied):
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs=COSTS)
    expected = rounds_of(TARGET, DRAFT, adaptive, 40)
    runs = []
    for rule in (adaptive, copied(adaptive)):
        decoder = Decoder(TARGET, DRAFT, lookahead=rule, seed=1)
        runs.append((decoder, decoder.init([[0]], max_new_tokens=40), []))
    while any(not state.is_done for _, state, _ in runs):
        for index, (decoder, state, picked) in enumerate(runs):
            if not state.is_done:
                after, info = decoder.step(state)
                runs[index] = decoder, after, [*picked, info.lookahead]
    assert [picked for _, _, picked in runs] == [expected, expected]


def test_a_result_can_be_pickled():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs=COSTS)
    result = generate(TARGET, DRAFT, [0], max_new_tokens=8, lookahead=adaptive)
    assert pickle.loads(pickle.dumps(result)).tokens == result.tokens


def test_threads_may_share_a_rule():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs=COSTS)
    expected = [
        generate(TARGET, DRAFT, [0], max_new_tokens=8, lookahead=adaptive, seed=seed).tokens for seed in range(30)
    ]
    found = []

    def run():
        for seed in range(30):
            result = generate(TARGET, DRAFT, [0], max_new_tokens=8, lookahead=adaptive, seed=seed)
            found.append((seed, result.tokens))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a race is then lost within a few runs
    try:
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 240
    assert all(tokens == expected[seed] for seed, tokens in found)


def test_the_same_batch_repeats():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs=COSTS)
    runs = [generate(TARGET, DRAFT, [[0], [1]], max_new_tokens=50, lookahead=adaptive, seed=4).tokens for _ in range(2)]
    assert runs[0] == runs[1]


def test_rounds_with_a_lookahead_of_their_own_say_nothing():
    target, draft = TableModel([0.0, 1.0]), TableModel([1.0, 0.0])
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs={2: 1.7})  # which pays at 0.7, and not at one of two
    decoder = Decoder(target, draft, lookahead=adaptive)
    state = decoder.init([0], max_new_tokens=60)
    for _ in range(12):
        assert adaptive(state) == 2
        state, _ = decoder.step(state, lookahead=2)
        state, _ = decoder.step(state, lookahead=2)


def test_a_round_that_was_longer_than_it_said_counts_up_to_what_it_said():
    class AtLeastSix:
        choices = (2, 6)

        def __init__(self, rule):
            self.rule = rule

        def __call__(self, state):
            return max(self.rule(state), 6)

    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs={2: 1.1})
    decoder = Decoder(TARGET, TARGET, lookahead=AtLeastSix(adaptive))
    state = decoder.init([0], max_new_tokens=60)
    while not state.is_done:
        state, _ = decoder.step(state)
    (record,) = adaptive._records.values()
    assert record.tested - 0.6 <= record.accepted < record.tested


@pytest.mark.parametrize(
    ("options", "prompts", "limits"),
    [({}, [[0]], 60), ({}, [[0]] * 9, [2, 3, 4, 5, 6, 7, 8, 9, 60]), ({"end_tokens": [1]}, [[0]] * 64, 60)],
    ids=["alone", "limits", "end tokens"],
)
@pytest.mark.parametrize("lookahead", [1, 8])
def test_where_a_text_is_cut_is_no_rejection(options, prompts, limits, lookahead):
    target = TableModel([0.9, 0.1])
    adaptive = AdaptiveLookahead(draft_cost=0.0, block_costs={lookahead: 1.0})
    decoder = Decoder(target, target, lookahead=adaptive, **options)
    state = decoder.init(prompts, max_new_tokens=limits)
    while not state.is_done:
        state, _ = decoder.step(state)
    (record,) = adaptive._records.values()
    assert record.tested > 2.5  # more than was assumed
    # Whatever was tested was accepted; what is missing is left of the assumption.
    assert record.tested - record.accepted <= 2 * (1 - 0.7)


def test_greedy_text_is_plain_greedy_text():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs=COSTS)
    runs = [
        generate(TARGET, drafter, [0], max_new_tokens=30, lookahead=lookahead, sampling=Sampling(temperature=0)).tokens
        for drafter, lookahead in ((DRAFT, adaptive), (None, 0))
    ]
    assert runs[0] == runs[1]


class Slow:
    """A model whose every position takes a while."""

    def __init__(self, model, seconds):
        self.model, self.seconds = model, seconds
        self.vocab_size, self.max_rollback = model.vocab_size, model.max_rollback

    def __getattr__(self, name):
        return getattr(self.model, name)

    def score(self, cache, tokens, /, *, num_logits=None):
        time.sleep(self.seconds * np.shape(tokens)[1])
        return self.model.score(cache, tokens, num_logits=num_logits)


def test_costs_are_those_of_whole_rounds():
    adaptive = AdaptiveLookahead.measured(
        Slow(TARGET, 0.004), Slow(TARGET, 0.002), lookaheads=(1, 3), prompt_length=2, batch_size=3
    )
    assert adaptive.choices == (0, 1, 3)
    assert adaptive.draft_cost == 0
    # Two positions of the target, and a step of the draft after the token that it has not seen.
    assert 2 < adaptive.block_costs[1] < adaptive.block_costs[3] < 12


class Watched(TableModel):
    """A table that notes how wide its blocks were."""

    def __init__(self, table):
        super().__init__(table)
        self.widths = []

    def score(self, cache, tokens, /, *, num_logits=None):
        self.widths.append(tokens.shape[1])
        return super().score(cache, tokens, num_logits=num_logits)


def test_every_round_that_is_timed_has_a_block():
    # A lookup finds nothing in a text that it has not seen before, and the round is then a plain one.
    rng = np.random.default_rng(0)
    target = Watched(rng.dirichlet(np.ones(500), 500))
    AdaptiveLookahead.measured(target, PromptLookup(), lookaheads=(1, 3), prompt_length=8)
    feeding = target.widths.count(7)  # a prompt's, once for each K
    rounds = [width for width in target.widths if width != 7]
    assert feeding == 3
    assert rounds == sorted(rounds)
    assert {width: rounds.count(width) for width in rounds} == dict.fromkeys((1, 2, 4), len(rounds) // 3)


class Short(Slow):
    max_length = 16


@pytest.mark.parametrize("drafter", [Short(DRAFT, 0), None], ids=["past its context", "none"])
def test_rounds_without_a_draft_are_not_taken_for_rounds_with_one(drafter):
    with pytest.raises(ValueError, match="`drafter` proposed nothing after a prompt of 64 equal"):
        AdaptiveLookahead.measured(TARGET, drafter, lookaheads=(2,))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lookaheads": ()}, ValueError, "`lookaheads` must have at least one K above 0"),
        ({"lookaheads": (0,)}, ValueError, "`lookaheads` must have at least one K above 0"),
        ({"lookaheads": (-1, 2)}, ValueError, "`lookaheads` must be at least 0, got -1"),
        ({"lookaheads": "12"}, TypeError, "`lookaheads` must be an integer, got '1'"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        ({"batch_size": 2.0}, TypeError, "`batch_size` must be an integer"),
        ({"prompt_length": 0}, ValueError, "`prompt_length` must be at least 1"),
        ({"prompt_length": 1.5}, TypeError, "`prompt_length` must be an integer"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        AdaptiveLookahead.measured(TARGET, DRAFT, **options)


def test_lookaheads_may_come_from_an_iterator():
    adaptive = AdaptiveLookahead.measured(TARGET, DRAFT, lookaheads=iter([2, 1]))
    assert adaptive.choices == (0, 1, 2)


def test_costs_of_rounds_that_do_not_fit_are_not_measured():
    with pytest.raises(ValueError, match="shorter than the target's context of 16 tokens"):
        AdaptiveLookahead.measured(Short(TARGET, 0), DRAFT)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft_cost": 0.1, "block_costs": {}}, ValueError, "at least one K above 0"),
        ({"draft_cost": 0.1, "block_costs": {0: 1.0}}, ValueError, "at least one K above 0"),
        ({"draft_cost": 0.1, "block_costs": [1.0, 1.1]}, TypeError, "must be a mapping"),
        ({"draft_cost": 0.1, "block_costs": {1.5: 1.0}}, TypeError, "must be an integer"),
        ({"draft_cost": 0.1, "block_costs": {-1: 1.0}}, ValueError, "at least 0"),
        ({"draft_cost": -0.1, "block_costs": {1: 1.0}}, ValueError, "`draft_cost` must not be negative"),
        ({"draft_cost": float("nan"), "block_costs": {1: 1.0}}, ValueError, "`draft_cost` must be finite"),
        ({"draft_cost": "0.1", "block_costs": {1: 1.0}}, TypeError, "`draft_cost` must be a real number, got '0.1'"),
        (
            {"draft_cost": 0.1, "block_costs": {1: None}},
            TypeError,
            r"`block_costs\[1\]` must be a real number, got None",
        ),
        ({"draft_cost": True, "block_costs": {1: 1.0}}, TypeError, "`draft_cost` must be a real number, got True"),
        ({"draft_cost": 0.1, "block_costs": {1: 0.0}}, ValueError, "`block_cost` must be positive"),
        ({"draft_cost": 0.1, "block_costs": {1: float("inf")}}, ValueError, r"`block_costs\[1\]` must be finite"),
        ({"draft_cost": 10**400, "block_costs": {1: 1.0}}, ValueError, "`draft_cost` must be finite"),
        ({"draft_cost": 0.1, "block_costs": {1: Fraction(10**400)}}, ValueError, r"`block_costs\[1\]` must be finite"),
    ],
)
def test_costs_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AdaptiveLookahead(**options)


class Three:
    """An integer whose hash is not that of 3, as an array's is not."""

    def __index__(self):
        return 3


def test_lookaheads_may_be_any_integers():
    adaptive = AdaptiveLookahead(draft_cost=0.1, block_costs={Three(): 1.5, np.int64(1): 1.25, 2**31 - 1: 2.0})
    assert adaptive.block_costs == {1: 1.25, 3: 1.5, 2**31 - 1: 2.0}
    assert adaptive.choices == (0, 1, 3, 2**31 - 1)
