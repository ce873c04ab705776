"""The exact law of the loop that users run: every answer to every random decision, followed to the end."""

import itertools

import numpy as np
import pytest

from specsampling import ModelDrafter, PromptLookup, Sampling, generate, to_probs
from specsampling_numpy import TableModel

ALL = Sampling()


class Branching:
    """A RandomSource for one row that takes another way through its decisions on each run, until none is left."""

    def __init__(self):
        self.choices = []  # for each decision on the way: the answers left to take, the one taken now first
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
        for slot, (p, q) in enumerate(zip(numerator[0].tolist(), denominator[0].tolist(), strict=True)):
            chance = 0.0 if p == 0 else 1.0 if p >= q else p / q
            answers[0, slot] = self.decide((1 - chance, chance)) == 1
            if not answers[0, slot]:
                break
        return answers

    def categorical(self, weights, label):
        weights = weights[0].astype(np.float64)
        return np.array([self.decide((weights / weights.sum()).tolist())])


def law_of(run):
    law = {}
    source = Branching()
    for tokens, probability in source.runs(lambda: tuple(run(source))):
        law[tokens] = law.get(tokens, 0.0) + probability
    return law


def law_of_target(toys, target, prompt, limit, sampling, end_tokens=(), banned_below=0):
    law, open_prefixes = {}, {(): 1.0}
    while open_prefixes:
        following = {}
        for new, mass in open_prefixes.items():
            logits = toys.logits_after(target, [*prompt, *new])
            if len(new) < banned_below:
                logits[list(end_tokens)] = -np.inf
            for token, chance in enumerate(to_probs(logits[None], sampling)[0].tolist()):
                if chance > 0:
                    text = (*new, token)
                    is_over = len(text) == limit or token in end_tokens
                    (law if is_over else following)[text] = mass * chance
        open_prefixes = following
    return law


def distance(law, other):
    return sum(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in {*law, *other}) / 2


class Schedule:
    def __init__(self, *values):
        self.choices = values

    def __call__(self, state):
        return self.choices[int(state.rounds[0]) % len(self.choices)]


def positional(seed, vocab_size=3):
    """Return a model whose law depends on the whole text, its length included."""
    rng = np.random.default_rng(seed)
    laws = {}

    def law(prefix):
        if prefix not in laws:
            laws[prefix] = rng.dirichlet(np.full(vocab_size, 0.7))
        return laws[prefix]

    return law


def table(seed, vocab_size=3, **options):
    weights = np.random.default_rng(seed).dirichlet(np.full(vocab_size, 0.7), size=(vocab_size, vocab_size))
    return TableModel(weights, **options)


def check(toys, target, drafter, prompt=(0, 1), limit=3, sampling=ALL, end_tokens=(), **options):
    minimum = options.get("min_new_tokens", 0)

    def run(source):
        result = generate(
            target,
            drafter,
            [list(prompt)],
            max_new_tokens=limit,
            sampling=sampling,
            end_tokens=end_tokens,
            randomness=source,
            **options,
        )
        return result.tokens[0]

    law = law_of(run)
    assert abs(sum(law.values()) - 1) < 1e-12
    assert distance(law, law_of_target(toys, target, prompt, limit, sampling, end_tokens, minimum)) <= 1e-12


DRAFTERS = {
    "model": lambda: ModelDrafter(table(1)),
    "itself": lambda: ModelDrafter(table(0)),
    "lookup": PromptLookup,
    "none": lambda: None,
}


@pytest.mark.parametrize("end_tokens", [(), (2,)], ids=["", "ends"])
@pytest.mark.parametrize("schedule", [(2, 0), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_has_exactly_the_targets_law(toys, drafter, schedule, end_tokens):  # fault #1, #2, #12, #126
    check(toys, table(0), DRAFTERS[drafter](), lookahead=Schedule(*schedule), end_tokens=end_tokens, prompt=(0, 1, 0))


def test_text_has_the_law_of_a_target_that_depends_on_all_of_it(toys):
    law, draft = positional(0), positional(1)
    target, drafter = TableModel(law, vocab_size=3), TableModel(draft, vocab_size=3)
    check(toys, target, drafter, lookahead=Schedule(2, 0, 1), prompt=(1,))


@pytest.mark.parametrize(("target_size", "draft_size"), [(2, 3), (3, 2)])
def test_padded_vocabularies_keep_the_law(toys, target_size, draft_size):  # fault #44, #47
    options = {"pad_vocab": True, "lookahead": Schedule(2, 1)}
    check(toys, table(0, target_size), table(1, draft_size), **options)


@pytest.mark.parametrize("draft_sampling", [None, Sampling(temperature=0.0), Sampling(temperature=2.0, top_k=2)])
def test_settings_of_the_draft_never_change_the_law(toys, draft_sampling):  # fault #4, #6
    sampling = Sampling(temperature=0.7, top_p=0.8)
    check(toys, table(0), table(1), sampling=sampling, draft_sampling=draft_sampling, lookahead=Schedule(2, 1))


def test_settings_of_the_draft_change_what_is_accepted(toys):  # fault #4
    rates = {
        temperature: generate(
            table(0),
            table(0),
            [[0]] * 200,
            max_new_tokens=20,
            draft_sampling=Sampling(temperature=temperature),
        ).stats.acceptance_rate
        for temperature in (1.0, 5.0)
    }
    assert rates[1.0] == 1.0
    assert rates[5.0] < 0.9


@pytest.mark.parametrize("minimum", [1, 2, 3])
def test_end_tokens_are_banned_by_position_and_the_rest_renormalised(toys, minimum):  # fault #97
    check(toys, table(0), table(1), end_tokens=(2,), min_new_tokens=minimum, lookahead=Schedule(2, 0), prompt=(0,))


def test_draft_with_a_shorter_context_keeps_the_law(toys):  # fault #57
    check(toys, table(0), table(1, max_length=3), lookahead=Schedule(2))


def test_law_is_kept_through_a_bounded_rollback(toys):  # fault #74, #77
    target, draft = toys.RecurrentModel(3, 3), toys.RecurrentModel(3, 3, seed=1)
    check(toys, target, draft, lookahead=Schedule(2, 0), prompt=(0, 1, 2, 0))


def test_enumeration_sees_a_biased_loop(toys):
    class Argmax:
        """Proposes its most probable token and reports the law it did not draw from."""

        def init(self, batch_size, capacity):
            return None

        def propose(self, state, context, lookahead, sampling, randomness):
            drafter = ModelDrafter(table(1))
            state = drafter.init(1, 32)
            proposal, _ = drafter.propose(state, context, lookahead, Sampling(), _Top())
            return proposal, None

    class _Top:
        def categorical(self, weights, label):
            return weights.argmax(axis=-1)

    with pytest.raises(AssertionError):
        check(toys, table(0), Argmax(), lookahead=Schedule(2))


def test_every_text_of_the_horizon_is_reached(toys):
    law = law_of_target(toys, table(0), (0,), 3, Sampling())
    assert set(law) == set(itertools.product(range(3), repeat=3))
