"""Whole runs: against plain decoding, against each row on its own, and against a simulation of greedy rounds."""

import gc
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from specsampling import CounterSource, Decoder, ModelDrafter, PromptLookup, Sampling, Stats, generate, stream
from specsampling_numpy import NumpyModel, TableModel

GREEDY = Sampling(temperature=0.0)


def counting(vocab_size):
    """Return a model that counts up: after token i comes i + 1."""
    return TableModel(np.roll(np.eye(vocab_size), 1, axis=1))


def without_times(stats):
    return [getattr(stats, name) for name in Stats.__dataclass_fields__ if name not in ("times", "config")]


class ByRound:
    """A lookahead that goes through its choices, counting the rounds of row 0."""

    def __init__(self, *choices):
        self.choices = choices

    def __call__(self, state):
        return self.choices[int(state.rounds[0]) % len(self.choices)]


class Expected(NamedTuple):
    tokens: list[int]
    reason: str
    flags: list[bool]
    rounds: int
    proposed: int
    tested: int


def simulate(toys, target, draft, prompt, lookaheads, limit, end_tokens=(), stop_sequences=()):
    """Play greedy rounds by hand: propose, compare with the target's text, stop."""
    text, reason = toys.plain_greedy(target, prompt, limit, end_tokens, stop_sequences)
    endless = toys.plain_greedy(target, prompt, limit + max(lookaheads) + 1)[0]
    flags, rounds, proposed, tested = [], 0, 0, 0
    while len(flags) < len(text):
        done = len(flags)
        count = min(lookaheads[rounds % len(lookaheads)], limit - done - 1)
        drafted = toys.plain_greedy(draft, [*prompt, *endless[:done]], count)[0]
        agreed = 0
        while agreed < count and drafted[agreed] == endless[done + agreed]:
            agreed += 1
        emitted = min(agreed + 1, len(text) - done)
        flags += [True] * min(agreed, emitted) + [False] * (emitted - min(agreed, emitted))
        rounds, proposed, tested = rounds + 1, proposed + count, tested + min(agreed + 1, count, emitted)
    return Expected(text, reason, flags, rounds, proposed, tested)


def check_against(expected, result, state=None, row=0):
    assert result.tokens[row] == expected.tokens
    assert result.finish_reasons[row] == expected.reason
    assert result.from_draft[row] == expected.flags
    stats = result.stats
    assert (stats.rounds, stats.target_calls) == (expected.rounds, expected.rounds)
    assert (stats.proposed, stats.tested) == (expected.proposed, expected.tested)
    assert stats.accepted == sum(expected.flags) == sum(stats.accepted_per_slot)
    assert stats.emitted == len(expected.tokens)
    assert sum(stats.tested_per_slot) == stats.tested
    assert sum(stats.accepted_histogram) == stats.rounds
    assert sum(count * rows for count, rows in enumerate(stats.accepted_histogram)) == stats.accepted


def check_logprobs(toys, target, prompt, result, row=0):
    assert len(result.logprobs[row]) == len(result.tokens[row])
    text = list(prompt)
    for token, logprob in zip(result.tokens[row], result.logprobs[row], strict=True):
        logits = toys.logits_after(target, text)
        assert abs(logprob - (logits[token] - np.log(np.exp(logits).sum()))) < 1e-12
        text.append(token)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("ending", ["end tokens", "stop sequence", "both"])
def test_everything_ends_at_the_same_token(toys, ending, lookahead):  # fault #86, #87, #89, #91, #94, #144
    target, draft = toys.blended(6, seed=4)
    prompt = [3]
    text = toys.plain_greedy(target, prompt, 12)[0]
    for position, limit in itertools.product(range(9), [*range(1, lookahead + 3), 11]):
        ends = {} if ending == "stop sequence" else {"end_tokens": [text[position]]}
        if ending != "end tokens":
            ends["stop_sequences"] = [text[max(0, position - 1) : position + 1], [text[0]] * 5]
        expected = simulate(toys, target, draft, prompt, [lookahead], limit, **ends)
        options = {"max_new_tokens": limit, "lookahead": lookahead, "sampling": GREEDY, "logprobs": "raw", **ends}
        result = generate(target, draft, [prompt], **options)
        check_against(expected, result)
        check_logprobs(toys, target, prompt, result)
        # The state that step left holds no more than what was reported.
        options.pop("max_new_tokens")
        decoder = Decoder(target, draft, **options)
        state = decoder.init([prompt], max_new_tokens=limit)
        while not state.is_done:
            state, info = decoder.step(state)
        assert state.new_tokens(0) == expected.tokens
        assert state.lengths.tolist() == [len(prompt) + len(expected.tokens)]
        assert info.finish_reasons.tolist() == [expected.reason]


@pytest.mark.parametrize("drafter", ["model", "lookup", "none"])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 5])
def test_end_of_a_sampled_row_cuts_its_text_and_changes_nothing_before(toys, drafter, lookahead):  # fault #86, #87
    target, draft = toys.blended(6, seed=1)
    drafter = {"model": draft, "lookup": PromptLookup(), "none": None}[drafter]
    prompts = [[0], [1, 2, 1], [5, 4]]
    options = {"max_new_tokens": 30, "lookahead": lookahead, "seed": 11, "logprobs": "processed"}
    whole = generate(target, drafter, prompts, **options)
    cut = generate(target, drafter, prompts, **options, end_tokens=[4], stop_sequences=[[1, 0], [2, 2, 3]])
    for row, tokens in enumerate(whole.tokens):
        length = next(
            end
            for end in range(1, 31)
            if tokens[end - 1] == 4 or tokens[:end][-2:] == [1, 0] or tokens[:end][-3:] == [2, 2, 3] or end == 30
        )
        assert cut.tokens[row] == tokens[:length]
        assert cut.from_draft[row] == whole.from_draft[row][:length]
        assert cut.logprobs[row] == whole.logprobs[row][:length]
    assert "stop" in cut.finish_reasons
    assert cut.stats.emitted == sum(map(len, cut.tokens))
    assert cut.stats.accepted == sum(map(sum, cut.from_draft))


def test_stop_comes_before_length_where_both_hold():
    result = generate(counting(9), counting(9), [0], max_new_tokens=4, end_tokens=[4])
    assert (result.tokens, result.finish_reasons) == ([[1, 2, 3, 4]], ["stop"])


def test_limit_of_zero_gives_an_empty_row(toys):
    result = generate(toys.random_table(5), None, [[0], [1]], max_new_tokens=[0, 2], logprobs="raw")
    assert [len(row) for row in result.tokens] == [len(row) for row in result.logprobs] == [0, 2]
    assert result.finish_reasons == ["length", "length"]
    empty = generate(toys.random_table(5), None, [[0], [1]], max_new_tokens=0)
    assert (empty.tokens, empty.stats.rounds, empty.stats.tokens_per_target_call) == ([[], []], 0, None)


def test_stop_sequences_match_new_tokens_only():
    result = generate(counting(9), None, [1, 2, 3], max_new_tokens=8, stop_sequences=[[2, 3, 4], [6, 7]])
    assert result.tokens == [[4, 5, 6, 7]]


@pytest.mark.parametrize("stops", [[[3, 9], [4, 5]], [[4, 5], [3, 9]], [[5], [4, 5], [2, 3, 4, 5]]])
@pytest.mark.parametrize("lookahead", [0, 2, 8])
def test_earliest_stop_wins_whatever_the_list_order(stops, lookahead):  # fault #92
    options = {"max_new_tokens": 9, "stop_sequences": stops, "lookahead": lookahead}
    assert generate(counting(10), counting(10), [0], **options).tokens == [[1, 2, 3, 4, 5]]
    events = list(stream(counting(10), counting(10), [0], **options))
    assert [token for event in events for token in event.tokens] == [1, 2, 3, 4, 5]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


@pytest.mark.parametrize("minimum", [1, 2, 5, 10])
@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_no_end_token_comes_before_the_minimum(toys, minimum, lookahead):  # fault #97
    target, draft = toys.blended(4, seed=2)
    options = {"max_new_tokens": 14, "min_new_tokens": minimum, "end_tokens": [0, 2], "lookahead": lookahead}
    prompts = [[0], [3, 1], [2]]
    greedy = generate(target, draft, prompts, sampling=GREEDY, logprobs="raw", **options)
    for row, prompt in enumerate(prompts):
        expected = toys.plain_greedy(target, prompt, 14, [0, 2], min_new_tokens=minimum)
        assert (greedy.tokens[row], greedy.finish_reasons[row]) == expected
        check_logprobs(toys, target, prompt, greedy, row)  # raw: before the ban
    sampled = generate(target, draft, prompts, **options, logprobs="processed")
    for tokens, logprobs in zip(sampled.tokens, sampled.logprobs, strict=True):
        assert len(tokens) >= minimum
        assert not {0, 2} & set(tokens[:minimum])
        assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_greedy_text_is_plain_greedy_text(toys, lookahead, length):  # fault #29, #37
    target, draft = toys.blended(8, seed=3)
    prompts = [[7] * length, [1], [0, 2, 4, 6, 1, 3]]
    for drafter in (draft, PromptLookup(), toys.random_table(8, seed=9), None):
        result = generate(target, drafter, prompts, max_new_tokens=30, lookahead=lookahead, sampling=GREEDY)
        assert result.tokens == [toys.plain_greedy(target, prompt, 30)[0] for prompt in prompts]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3, 4, 8])
def test_greedy_text_of_a_network_is_its_plain_greedy_text(toys, checkpoint, write_checkpoint, tmp_path, lookahead):
    target = NumpyModel(checkpoint, dtype="float64")
    draft = NumpyModel(write_checkpoint(tmp_path / "draft", seed=1), dtype="float64")
    prompts = [[82], [10, 20, 30], list(range(20))]
    for drafter in (draft, target, PromptLookup()):
        result = generate(target, drafter, prompts, max_new_tokens=16, lookahead=lookahead, sampling=GREEDY)
        assert result.tokens == [toys.plain_greedy(target, prompt, 16)[0] for prompt in prompts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lookahead", [1, 4])
def test_model_that_drafts_for_itself_is_always_right(toys, checkpoint, lookahead, temperature):  # fault #41, #42, #151
    sampling = Sampling(temperature=temperature)
    for model, limit in ((toys.random_table(9, order=3), 200), (toys.RecurrentModel(9, 6), 60)):
        decoder = Decoder(model, model, lookahead=lookahead, sampling=sampling)
        state = decoder.init([[0], [1, 2, 3], [4] * 40], max_new_tokens=limit)
        while not state.is_done:
            state, info = decoder.step(state)
            assert (info.num_accepted == info.num_proposed).all()
            assert (info.num_emitted == info.num_proposed + 1).all()
            left = limit - (state.lengths - state.prompt_lengths)
            assert ((info.num_proposed == lookahead) | (left == 0)).all()
    result = generate(model, model, [[0]], max_new_tokens=limit, lookahead=lookahead, sampling=sampling)
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.expected_accepted == pytest.approx(result.stats.tested)
    if temperature == 0.0:
        assert result.tokens[0] == toys.plain_greedy(model, [0], limit)[0]
    round_flags = [True] * lookahead + [False]
    assert result.from_draft[0] == [*(round_flags * limit)[: limit - 1], False]
    network = NumpyModel(checkpoint, dtype="float64")
    first = Decoder(network, network, lookahead=lookahead, sampling=sampling)
    _, info = first.step(first.init([[65], [66, 67, 68]], max_new_tokens=20))
    assert info.num_accepted.tolist() == [lookahead] * 2


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("drafter", ["model", "lookup", "none"])
@pytest.mark.parametrize("select", [True, False], ids=["select", "mask"])
def test_each_row_is_what_it_is_alone(toys, batch_size, drafter, select):  # fault #99, #102, #124, #126, #127
    target, draft = toys.blended(7, seed=6)
    drafter = {"model": toys.Strict(draft, select=select), "lookup": PromptLookup(), "none": None}[drafter]
    target = toys.Strict(target, select=select)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 7, length).tolist() for length in (1, 4, 2, 30, 3, 1, 9, 6)]
    limits = [12, 30, 1, 9, 17, 25, 3, 8]
    temperatures = [1.0, 0.0, 0.7, 1.0, 0.0, 2.0, 1.0, 0.5]
    top_ps = [None, 0.9, 0.8, None, None, 0.95, 0.5, 1.0]
    options = {"lookahead": 3, "seed": 5, "end_tokens": [6], "logprobs": "processed", "stop_sequences": [[1, 2]]}

    def run(rows):
        result = generate(
            target,
            drafter,
            [prompts[row] for row in rows],
            max_new_tokens=[limits[row] for row in rows],
            row_ids=rows,
            sampling=Sampling(temperature=[temperatures[row] for row in rows], top_p=[top_ps[row] for row in rows]),
            **options,
        )
        return list(zip(result.tokens, result.finish_reasons, result.logprobs, result.from_draft, strict=True))

    alone = [run([row])[0] for row in range(8)]
    for _ in range(6):
        rows = rng.permutation(8)[:batch_size].tolist()
        assert run(rows) == [alone[row] for row in rows]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_rows_of_a_network_do_not_depend_on_the_batch(toys, checkpoint, batch_size):  # fault #127
    target = NumpyModel(checkpoint, dtype="float64")
    prompts = [[65 + row] * (row + 1) for row in range(batch_size)]
    result = generate(target, PromptLookup(), prompts, max_new_tokens=20, sampling=GREEDY)
    assert result.tokens == [toys.plain_greedy(target, prompt, 20)[0] for prompt in prompts]


def test_thousands_of_rows_are_what_they_are_alone(toys):
    target, draft = toys.blended(16, order=1, seed=8)
    options = {"lookahead": 4, "end_tokens": [3], "max_new_tokens": 24}
    result = generate(target, draft, [[row % 16] for row in range(4096)], **options)
    for row in (0, 1, 777, 4095):
        alone = generate(target, draft, [[row % 16]], row_ids=[row], **options)
        assert (result.tokens[row], result.from_draft[row]) == (alone.tokens[0], alone.from_draft[0])
    assert result.stats.emitted == sum(map(len, result.tokens))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rollback", [4, 5, 9])
def test_bounded_rollback_is_enough(toys, rollback, sampling):  # fault #74, #76, #77
    target, draft = toys.RecurrentModel(5, rollback), toys.RecurrentModel(5, rollback, seed=1)
    unbounded = toys.RecurrentModel(5, 200), toys.RecurrentModel(5, 200, seed=1)
    prompts = [[1], [2, 3, 4] * 7, [0, 1]]
    options = {"max_new_tokens": [50, 9, 33], "lookahead": ByRound(3, 2, 0, 0, 1), "sampling": sampling}
    for drafters in ((draft, unbounded[1]), (target, unbounded[0]), (PromptLookup(), PromptLookup()), (None, None)):
        result = generate(target, drafters[0], prompts, **options)
        assert result.tokens == generate(unbounded[0], drafters[1], prompts, **options).tokens
        if sampling is GREEDY:
            assert result.tokens == [
                toys.plain_greedy(unbounded[0], prompt, limit)[0]
                for prompt, limit in zip(prompts, [50, 9, 33], strict=True)
            ]
    assert max(target.widest, draft.widest) <= rollback
    assert generate(target, target, prompts, **options).stats.acceptance_rate == 1.0


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_draft_with_a_shorter_context_stops_proposing(toys, limit):  # fault #57, #59
    target = toys.random_table(5, max_length=64)

    def law(prefix):
        return [np.nan] * 5 if len(prefix) > limit else toys.logits_after(target, prefix)

    draft = TableModel(law, vocab_size=5, logits=True, max_length=limit)
    prompts = [[0], [1, 2, 3], [4] * 15, [4] * 16, [2] * 17, [3] * 40]
    room = [64 - len(prompt) for prompt in prompts]
    result = generate(target, draft, prompts, max_new_tokens=room, sampling=GREEDY, lookahead=3)
    assert result.tokens == [
        toys.plain_greedy(target, prompt, count)[0] for prompt, count in zip(prompts, room, strict=True)
    ]
    # What the draft proposes is right; the last token that its context can predict is drafted too.
    for prompt, flags in zip(prompts, result.from_draft, strict=True):
        assert sum(flags) == 0 or len(prompt) + max(np.nonzero(flags)[0]) <= limit
    assert any(map(any, result.from_draft))
    alone = generate(target, draft, [prompts[-1]], max_new_tokens=10, sampling=GREEDY, lookahead=3).stats
    assert (alone.undrafted, alone.rounds, alone.proposed, alone.draft_calls) == (10, 10, 0, 0)


def test_padded_vocabularies_give_the_same_text(toys):  # fault #47, #156
    logits = np.random.default_rng(0).normal(0, 2, (12, 12))
    for target_size, draft_size in ((12, 10), (10, 12)):
        target = TableModel(logits[:target_size, :target_size], logits=True)
        draft = TableModel(logits[:draft_size, :draft_size], logits=True)
        result = generate(target, draft, [[0], [9]], max_new_tokens=40, sampling=GREEDY, pad_vocab=True)
        assert result.tokens == [toys.plain_greedy(target, prompt, 40)[0] for prompt in ([0], [9])]
        assert max(map(max, result.tokens)) < target_size
        assert result.stats.accepted > 0


def test_padded_id_with_mass_comes_out_as_often_as_the_target_says():  # fault #44
    # False alarm: a binomial of 20000 trials, five standard deviations either way, 6e-7.
    target = TableModel([0.3, 0.3, 0.3, 0.1])
    result = generate(target, TableModel([0.4, 0.3, 0.3]), [[0]] * 200, max_new_tokens=100, pad_vocab=True)
    share = np.mean(np.array(result.tokens) == 3)
    assert abs(share - 0.1) < 5 * (0.1 * 0.9 / 20000) ** 0.5


@pytest.mark.parametrize("drafter", ["model", "lookup", "none"])
def test_logprobs_are_the_targets_for_every_kind_of_token(toys, drafter):  # fault #152, #154
    target, draft = toys.blended(6, seed=7)
    drafter = {"model": draft, "lookup": PromptLookup(), "none": None}[drafter]
    options = {"max_new_tokens": 40, "sampling": Sampling(temperature=0.5, top_k=4)}
    raw = generate(target, drafter, [[0], [1, 2]], logprobs="raw", **options)
    processed = generate(target, drafter, [[0], [1, 2]], logprobs="processed", **options)
    assert raw.tokens == processed.tokens == generate(target, drafter, [[0], [1, 2]], **options).tokens
    for row, prompt in enumerate([[0], [1, 2]]):
        check_logprobs(toys, target, prompt, raw, row)
        text = list(prompt)
        for token, logprob in zip(processed.tokens[row], processed.logprobs[row], strict=True):
            logits = 2 * toys.logits_after(target, text)
            kept = np.sort(logits)[-4:]
            assert abs(logprob - (logits[token] - np.log(np.exp(kept).sum()))) < 1e-12
            text.append(token)
    if drafter is not None:
        assert {True, False} == set(raw.from_draft[0])
    assert generate(target, drafter, [0], max_new_tokens=1).logprobs is None


def test_counts_of_a_run_are_those_of_a_script_written_by_hand():  # fault #146
    target = counting(20)

    def wrong_at_seven(prefix):
        following = 0 if len(prefix) == 7 else (prefix[-1] + 1) % 20
        return np.eye(20)[following]

    draft = TableModel(wrong_at_seven, vocab_size=20)
    result = generate(target, draft, [0], max_new_tokens=8, lookahead=ByRound(4, 2, 0))
    stats = result.stats
    assert result.tokens == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert result.from_draft == [[True] * 4 + [False, True, False, False]]
    assert (stats.rounds, stats.proposed, stats.tested, stats.accepted) == (3, 6, 6, 5)
    assert (stats.acceptance_rate, stats.tokens_per_target_call) == (5 / 6, 8 / 3)
    assert (stats.accepted_per_slot, stats.tested_per_slot) == ((2, 1, 1, 1), (2, 2, 1, 1))
    assert (stats.accepted_histogram, stats.expected_accepted) == ((1, 1, 0, 0, 1), 5.0)
    assert (stats.emitted, stats.target_calls, stats.draft_calls, stats.undrafted) == (8, 3, 6, 0)
    assert stats.point_mass_proposed == 0


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 18, 513, 600])
def test_draft_calls_are_the_score_calls_of_the_draft(toys, length):
    target, draft = toys.Strict(toys.random_table(5)), toys.Strict(toys.random_table(5, seed=1))
    prompts = [[0] * length, [1, 2]]
    result = generate(target, ModelDrafter(draft), prompts, max_new_tokens=12, lookahead=ByRound(3, 0, 0, 2))
    assert result.stats.draft_calls == draft.num_scores
    assert result.stats.target_calls == target.num_scores - target.num_prefills == result.stats.rounds


def test_rule_of_verification_shows_in_the_stats(toys):  # fault #11
    flat = TableModel([0.5, 0.5])
    drawn = generate(flat, flat, [[0]] * 50, max_new_tokens=20).stats
    assert (drawn.acceptance_rate, drawn.point_mass_proposed) == (1.0, 0)

    class Undeclared(ModelDrafter):
        def propose(self, *arguments):
            proposal, state = super().propose(*arguments)
            return proposal._replace(probs=None), state

    chosen = generate(flat, Undeclared(flat), [[0]] * 50, max_new_tokens=20).stats
    assert chosen.point_mass_proposed == chosen.proposed
    assert chosen.expected_accepted == chosen.tested / 2
    # False alarm: five standard deviations of a binomial of some 700 trials, 6e-7.
    assert abs(chosen.acceptance_rate - 0.5) < 5 * 0.5 / chosen.tested**0.5


def test_expected_acceptance_is_the_overlap_of_the_laws():  # fault #129
    target, draft = TableModel([0.5, 0.3, 0.2]), TableModel([0.2, 0.3, 0.5])
    stats = generate(target, draft, [[0]] * 1000, max_new_tokens=60, lookahead=1).stats
    assert stats.expected_accepted == pytest.approx(0.7 * stats.tested)
    # False alarm: five standard deviations, 6e-7.
    assert abs(stats.acceptance_rate - 0.7) < 5 * (0.7 * 0.3 / stats.tested) ** 0.5


def test_config_shows_every_option(toys):  # fault #159
    options = {
        "max_new_tokens": [5, 6],
        "lookahead": 2,
        "sampling": Sampling(temperature=0.5),
        "draft_sampling": Sampling(top_k=2),
        "end_tokens": [1],
        "stop_sequences": [[2, 3]],
        "min_new_tokens": 1,
        "seed": 9,
        "row_ids": [4, 2],
        "randomness": None,
        "logprobs": "raw",
        "pad_vocab": True,
        "validate": True,
    }
    model = toys.random_table(5)
    # As it took effect: token ids are kept as the tuples that the run compares with.
    in_effect = {**options, "end_tokens": (1,), "stop_sequences": ((2, 3),)}
    assert generate(model, model, [[0], [1]], **options).stats.config == in_effect
    fresh = generate(model, model, [[0], [1]], **{**options, "seed": None})
    assert fresh.stats.config["seed"] == fresh.seed is not None


def test_seed_repeats_a_run_and_none_is_recorded(toys):  # fault #101, #102
    flat = TableModel(np.full(8, 1 / 8))
    # False alarm: 8**-60.
    fresh = [generate(flat, None, [0], max_new_tokens=60, seed=None) for _ in range(2)]
    assert fresh[0].tokens != fresh[1].tokens
    for result in fresh:
        assert generate(flat, None, [0], max_new_tokens=60, seed=result.seed).tokens == result.tokens
    assert generate(flat, None, [0], max_new_tokens=60).seed == 0
    assert (
        generate(flat, None, [0], max_new_tokens=60, seed=1).tokens
        != generate(flat, None, [0], max_new_tokens=60).tokens
    )


def test_run_does_not_depend_on_what_ran_before(toys):  # fault #102, #136
    target, draft = toys.blended(6)
    decoder = Decoder(target, draft, seed=42)

    def run():
        state, lookaheads = decoder.init([[0], [1, 2]], max_new_tokens=10), []
        while not state.is_done:
            state, info = decoder.step(state)
            lookaheads.append(info.lookahead)
        return [state.new_tokens(row) for row in (0, 1)], lookaheads

    first = run()
    for _ in range(98):
        generate(target, draft, [3], max_new_tokens=3, seed=1)
    assert run() == first


def test_global_generator_is_neither_read_nor_moved(toys):  # fault #9, #104
    target, draft = toys.blended(6)
    np.random.seed(1)  # noqa: NPY002 (the global generator is what this is about)
    before = np.random.get_state()[1].tolist()  # noqa: NPY002 (the global generator is what this is about)
    first = generate(target, draft, [0], max_new_tokens=20)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002 (the global generator is what this is about)
    np.random.seed(2)  # noqa: NPY002 (the global generator is what this is about)
    assert generate(target, draft, [0], max_new_tokens=20).tokens == first.tokens


def test_randomness_replaces_the_seed(toys):
    target, draft = toys.blended(6)
    seeded = generate(target, draft, [0], max_new_tokens=20, seed=7)
    given = generate(target, draft, [0], max_new_tokens=20, randomness=CounterSource(7))
    assert given.tokens == seeded.tokens
    assert given.seed is None


@pytest.mark.parametrize("batch_size", [1, 3])
def test_stream_is_generate_in_pieces(toys, batch_size):  # fault #96, #151
    target, draft = toys.blended(6, seed=2)
    prompts = [[row, 1] for row in range(batch_size)]
    options = {"max_new_tokens": [9, 20, 1][:batch_size], "end_tokens": [5, 4], "logprobs": "raw", "seed": 3}
    expected = generate(target, draft, prompts, **options)
    events, iterator = [], stream(target, draft, prompts, **options)
    while True:
        try:
            events.append(next(iterator))
        except StopIteration as end:
            result = end.value
            break
    assert (result.tokens, result.from_draft, result.logprobs) == (
        expected.tokens,
        expected.from_draft,
        expected.logprobs,
    )
    assert without_times(result.stats) == without_times(expected.stats)
    for row in range(batch_size):
        own = [event for event in events if event.row == row]
        assert [token for event in own for token in event.tokens] == expected.tokens[row]
        assert [flag for event in own for flag in event.from_draft] == expected.from_draft[row]
        assert [logprob for event in own for logprob in event.logprobs] == expected.logprobs[row]
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [expected.finish_reasons[row]]
        assert all(event.tokens for event in own)
    assert sum(sum(event.from_draft) for event in events) == result.stats.accepted


def test_events_without_logprobs_have_none(toys):
    events = list(stream(toys.random_table(5), None, [0], max_new_tokens=2))
    assert [event.logprobs for event in events] == [None, None]


def test_stream_checks_its_arguments_when_called(toys):
    with pytest.raises(ValueError, match="`prompts` must not be empty"):
        stream(toys.random_table(5), None, [], max_new_tokens=2)


def test_stream_closed_early_leaves_nothing_broken(toys):  # fault #69
    target, draft = toys.Strict(toys.random_table(5)), toys.Strict(toys.random_table(5, seed=1))
    options = {"max_new_tokens": [6, 3], "lookahead": 4}
    expected = generate(target, draft, [[0], [1]], **options)
    count = len(list(stream(target, draft, [[0], [1]], **options)))
    for taken in range(count):
        iterator = stream(target, draft, [[0], [1]], **options)
        for _ in range(taken):
            next(iterator)
        iterator.close()
        assert generate(target, draft, [[0], [1]], **options).tokens == expected.tokens


def test_steps_may_be_taken_up_again_after_any_round(toys):  # fault #69, #82
    target, draft = toys.blended(6)
    decoder = Decoder(target, draft, sampling=GREEDY)
    state = decoder.init([[0, 1]], max_new_tokens=25)
    while not state.is_done:
        text = [*[0, 1], *state.new_tokens(0)]
        assert state.lengths.tolist() == [len(text)]
        # What is committed is a prompt like any other.
        rest = generate(target, draft, [text], max_new_tokens=25 - len(text) + 2, sampling=GREEDY)
        assert state.new_tokens(0) + rest.tokens[0] == toys.plain_greedy(target, [0, 1], 25)[0]
        state, _ = decoder.step(state)


def test_runs_on_the_same_models_may_be_interleaved(toys):
    target, draft = toys.blended(6)
    drafter = ModelDrafter(draft)
    expected = [generate(target, drafter, [[row]], max_new_tokens=15) for row in (0, 1)]
    streams = [stream(target, drafter, [[row]], max_new_tokens=15) for row in (0, 1)]
    tokens = [[], []]
    for events in itertools.zip_longest(*streams):
        for row, event in enumerate(events):
            tokens[row] += [] if event is None else event.tokens
    assert tokens == [result.tokens[0] for result in expected]


def test_models_are_never_copied(toys):  # fault #137
    target, draft = toys.Strict(toys.random_table(5)), toys.Strict(toys.random_table(5))
    generate(target, draft, [[0], [1]], max_new_tokens=[2, 6])  # a Strict raises where it is copied


def test_runs_leave_nothing_behind(toys):  # fault #134
    target, draft = toys.random_table(5, order=1), toys.random_table(5, order=1, seed=1)

    def run(times):
        for index in range(times):
            generate(target, draft, [[0], [1]], max_new_tokens=[2, 4], lookahead=3 * (index % 2))

    run(10)
    gc.collect()
    gc.disable()  # nothing may wait for the collector, for it may be a cache that waits
    try:
        before = len(gc.get_objects())
        run(1000)
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()


def test_inputs_are_left_as_they_were(toys):
    prompts = [np.array([1, 2]), np.array([3])]
    limits, ends = np.array([5, 6]), [4]
    generate(toys.random_table(5), PromptLookup(), prompts, max_new_tokens=limits, end_tokens=ends)
    assert [prompt.tolist() for prompt in prompts] == [[1, 2], [3]]
    assert (limits.tolist(), ends) == ([5, 6], [4])


def test_lookahead_may_exceed_everything_else(toys):  # fault #56
    target, draft = toys.blended(6)
    result = generate(target, draft, [[0]] * 3, max_new_tokens=2, lookahead=40, sampling=GREEDY)
    assert result.tokens == [toys.plain_greedy(target, [0], 2)[0]] * 3


def test_frameworks_may_differ_between_target_and_draft(toys):  # fault #141
    torch = pytest.importorskip("torch")

    class TorchModel:
        """A table that lives in PyTorch."""

        def __init__(self, model):
            self._model = model
            self.vocab_size, self.max_rollback = model.vocab_size, model.max_rollback
            self.init_cache, self.select = model.init_cache, model.select
            self.kinds = set()

        def score(self, cache, tokens, /, *, num_logits=None):
            self.kinds.add(type(tokens))
            logits, cache = self._model.score(cache, np.asarray(tokens), num_logits=num_logits)
            return torch.asarray(logits), cache

        def rollback(self, cache, lengths, /):
            self.kinds.add(type(lengths))
            return self._model.rollback(cache, np.asarray(lengths))

    target, draft = toys.blended(6)
    options = {"max_new_tokens": [12, 5], "lookahead": 3, "logprobs": "raw", "end_tokens": [2], "min_new_tokens": 4}
    expected = generate(target, draft, [[0], [1, 3, 4]], **options)
    for pair in ((TorchModel(target), draft), (target, TorchModel(draft)), (TorchModel(target), TorchModel(draft))):
        result = generate(*pair, [[0], [1, 3, 4]], **options)
        assert (result.tokens, result.from_draft) == (expected.tokens, expected.from_draft)
        np.testing.assert_allclose(np.concatenate(result.logprobs), np.concatenate(expected.logprobs), rtol=1e-12)
        for model in pair:
            if isinstance(model, TorchModel):
                # NumPy on the first call only; afterwards what the logits came in.
                assert torch.Tensor in model.kinds


def test_the_config_keeps_stop_rules_that_came_as_iterators():
    model = counting(4)
    stops = (iter(run) for run in [[3, 0]])
    result = generate(model, None, [0], max_new_tokens=9, end_tokens=iter([2]), stop_sequences=stops)
    assert (result.stats.config["end_tokens"], result.stats.config["stop_sequences"]) == ((2,), ((3, 0),))
