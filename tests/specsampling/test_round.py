import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import (
    Context,
    CounterSource,
    ModelDrafter,
    PromptLookup,
    Proposal,
    RoundCarry,
    RoundOutput,
    Sampling,
    UniformRandomness,
    decode_round,
)
from specsampling_numpy import TableModel

TARGET = np.array([0.5, 0.3, 0.2])
DRAFT = np.array([0.2, 0.3, 0.5])
MANY = 99


class Given:
    """A drafter that proposes what it was built with."""

    def __init__(self, tokens: Any, probs: Any = None, num_tokens: Any = None) -> None:
        tokens = np.asarray(tokens)
        num_tokens = np.full(tokens.shape[0], tokens.shape[1]) if num_tokens is None else np.asarray(num_tokens)
        self.proposal = Proposal(tokens, num_tokens, probs)

    def init(self, batch_size: int, capacity: int) -> None:
        return None

    def propose(self, state: None, context: Context, lookahead: int, *_: Any) -> tuple[Proposal, None]:
        return self.proposal, None


class Foreign:
    """A table model with the arrays of another framework, which after its first answer takes no others."""

    max_rollback = None

    def __init__(self, model: TableModel, asarray: Any) -> None:
        self.model, self.asarray, self.vocab_size = model, asarray, model.vocab_size
        self.has_answered = False

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        return self.model.init_cache(batch_size, capacity)

    def _check(self, array: Any) -> None:
        like = self.asarray(np.zeros(1)) if self.has_answered else np.zeros(1)
        assert type(array) is type(like)
        assert getattr(array, "device", None) == getattr(like, "device", None)

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> tuple[Any, Any]:
        self._check(tokens)
        self.has_answered = True
        logits, cache = self.model.score(cache, to_numpy(tokens), num_logits=num_logits)
        return self.asarray(logits), cache

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        self._check(lengths)
        return self.model.rollback(cache, to_numpy(lengths))


def to_numpy(array: Any) -> np.ndarray:
    if "array_api_strict" in type(array).__module__:
        array = array.to_device(type(array.device)("CPU_DEVICE"))
    return np.asarray(array)


class Batch(NamedTuple):
    """A batch before a round."""

    carry: RoundCarry
    tokens: np.ndarray
    lengths: np.ndarray


def begin(target: Any, drafter: Any, prompts: Sequence[Sequence[int]], capacity: int = 24) -> Batch:
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    cache = target.init_cache(len(prompts), capacity)
    like = None
    if lengths.max(initial=0) > 1:
        logits, cache = target.score(cache, tokens[:, : lengths.max() - 1], num_logits=0)
        like = logits[:, :0, 0]
    state = None if drafter is None else drafter.init(len(prompts), capacity)
    return Batch(RoundCarry(cache, state, like), tokens, lengths)


def run(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]] = ((0,),),
    *,
    lookahead: int = 2,
    limits: Any = None,
    end_bans: Any = None,
    randomness: Any = None,
    sampling: Sampling | None = None,
    round_=decode_round,
    **options: Any,
) -> RoundOutput:
    """Run a batch's first round."""
    batch = begin(target, drafter, prompts)
    count = len(prompts)
    limits = np.full(count, MANY, np.int32) if limits is None else np.asarray(limits)
    randomness = (
        CounterSource(0).begin_round(range(count), [0] * count, lookahead) if randomness is None else randomness
    )
    output, _ = round_(
        target,
        drafter,
        batch.carry,
        Context(batch.tokens, batch.lengths),
        limits,
        None if end_bans is None else np.asarray(end_bans),
        randomness,
        lookahead=lookahead,
        sampling=Sampling() if sampling is None else sampling,
        **options,
    )
    return output


def random_table(vocab_size: int, order: int = 1, seed: int = 0) -> TableModel:
    logits = np.random.default_rng(seed).normal(0, 1.5, (vocab_size,) * (order + 1))
    return TableModel(logits, logits=True)


def by_position(laws: Sequence[Any], *, logits: bool = False) -> TableModel:
    """Return a model whose t-th token after a prompt of one has the law ``laws[t]``; the last repeats."""
    laws = np.asarray(laws, dtype=np.float64)
    return TableModel(lambda prefix: laws[min(len(prefix), len(laws)) - 1], vocab_size=laws.shape[1], logits=logits)


# --- The law -------------------------------------------------------------------------------------------------------


def tables(seed: int, vocab_size: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(vocab_size,) * (slot + 1) for slot in range(count)]
    laws = [rng.dirichlet(np.full(vocab_size, 0.7), shape[:-1]) for shape in shapes]
    return [np.where(law < 0.05, 0.0, law) / np.where(law < 0.05, 0.0, law).sum(-1, keepdims=True) for law in laws]


def model_of(laws: Sequence[np.ndarray]) -> TableModel:
    """After a prompt of one token, the t-th table is the law of the t-th token."""
    return TableModel(
        lambda prefix: laws[min(len(prefix), len(laws)) - 1][prefix[1 : len(laws)]], vocab_size=laws[0].shape[-1]
    )


def settings(
    law: np.ndarray, *, temperature: float = 1.0, min_p: float = 0.0, banned: Sequence[int] = ()
) -> np.ndarray:
    """Apply settings to probabilities, plainly."""
    law = law.copy()
    law[..., list(banned)] = 0
    if temperature == 0:
        return np.eye(law.shape[-1])[law.argmax(-1)]
    law = law ** (1 / temperature)
    law = law / law.sum(-1, keepdims=True)
    law = np.where(law < min_p * law.max(-1, keepdims=True), 0, law)
    return law / law.sum(-1, keepdims=True)


def round_law(
    enumeration: Any, target: list[np.ndarray], draft: Any, expected: list[np.ndarray], **options: Any
) -> Any:
    """Return the law of K + 1 tokens that one round emits, continued by the laws expected, and the possible rounds."""
    vocab_size, lookahead = target[0].shape[-1], len(target) - 1
    paths = enumeration.every_path(vocab_size, lookahead)
    if not isinstance(draft, list):
        paths = paths.where((paths.drafted == draft).all(axis=1))
    rows = len(paths.drafted)
    drafter = ModelDrafter(model_of(draft)) if isinstance(draft, list) else Given(paths.drafted)
    for name in ("limits", "end_bans"):
        if name in options:
            options[name] = np.full(rows, options[name])
    output = run(model_of(target), drafter, [[0]] * rows, lookahead=lookahead, randomness=paths, **options)
    is_possible = paths.probability > 0
    output = RoundOutput(*(x[is_possible] if isinstance(x, np.ndarray) else x for x in output))
    probability = paths.probability[is_possible]
    return enumeration.emitted_law(expected, output.tokens, output.num_accepted + 1, probability), output


@pytest.mark.parametrize("limit", [MANY, 3, 2, 1])
@pytest.mark.parametrize(("vocab_size", "lookahead"), [(4, 2), (3, 3), (2, 1), (1, 2)])
def test_one_round_emits_the_targets_law(enumeration, vocab_size, lookahead, limit):  # fault #2, #89
    target, draft = tables(1, vocab_size, lookahead + 1), tables(2, vocab_size, lookahead)
    law, output = round_law(enumeration, target, draft, target, limits=limit)
    assert enumeration.distance(law, enumeration.block_law(target)) < 2e-12
    assert set(output.num_proposed.tolist()) == {min(lookahead, limit - 1)}
    assert output.num_accepted.max() <= limit - 1
    assert not output.is_point_mass


@pytest.mark.parametrize("block", list(itertools.product(range(3), repeat=2)))
def test_chosen_tokens_leave_the_law_of_a_round_exact(enumeration, block):  # fault #11, #16
    target = tables(3, 3, 3)
    law, output = round_law(enumeration, target, np.array(block), target)
    assert enumeration.distance(law, enumeration.block_law(target)) < 2e-12
    assert output.is_point_mass


@pytest.mark.parametrize(
    ("sampling", "draft_sampling"),
    [
        ({"temperature": 0.5}, {"temperature": 1.0}),  # fault #7
        ({"temperature": 0.5}, {"temperature": 0.0}),
        ({"temperature": 0.0}, {"temperature": 1.0}),
        ({"temperature": 0.0}, None),  # fault #6
        ({"min_p": 0.3}, None),  # fault #107
        ({"min_p": 0.3}, {"temperature": 2.0}),  # fault #119: the draft proposes what the target masks
        ({"temperature": 1.7, "min_p": 0.2}, {"min_p": 0.9}),
    ],
)
def test_law_is_that_of_the_targets_settings_whatever_the_drafts(enumeration, sampling, draft_sampling):  # fault #4
    target, draft = tables(4, 3, 3), tables(5, 3, 2)
    expected = [settings(table, **sampling) for table in target]
    law, _ = round_law(
        enumeration,
        target,
        draft,
        expected,
        sampling=Sampling(**sampling),
        draft_sampling=None if draft_sampling is None else Sampling(**draft_sampling),
    )
    assert enumeration.distance(law, enumeration.block_law(expected)) < 1e-11


def test_draft_settings_change_how_much_is_accepted():  # fault #4
    for draft_sampling, overlap in ((None, 0.7), (Sampling(), 0.7), (Sampling(temperature=0.0), 0.2)):
        output = run(TableModel(TARGET), TableModelDrafter(DRAFT), draft_sampling=draft_sampling)
        assert np.allclose(output.overlap, overlap, atol=1e-15)


def test_target_temperature_holds_at_verification(enumeration):  # fault #7
    logits = np.array([2.0, 1.0, 0.0])
    laws = {t: np.exp(logits / t) / np.exp(logits / t).sum() for t in (0.5, 1.0)}
    target, draft = [laws[1.0], np.tile(laws[1.0], (3, 1))], [laws[1.0]]
    expected = [settings(table, temperature=0.5) for table in target]
    law, _ = round_law(
        enumeration, target, draft, expected, sampling=Sampling(temperature=0.5), draft_sampling=Sampling()
    )
    assert law.sum(axis=1).round(4).tolist() == [0.8668, 0.1173, 0.0159]
    assert laws[1.0].round(4).tolist() == [0.6652, 0.2447, 0.09]


def test_min_p_holds_at_verified_positions_as_at_the_bonus(enumeration):  # fault #107
    p = np.array([0.6, 0.3, 0.08, 0.02])
    target = [p, np.tile(p, (4, 1))]
    expected = [settings(table, min_p=0.2) for table in target]
    law, _ = round_law(enumeration, target, [np.full(4, 0.25)], expected, sampling=Sampling(min_p=0.2))
    assert np.allclose(law, np.outer([2 / 3, 1 / 3, 0, 0], [2 / 3, 1 / 3, 0, 0]), atol=1e-15)


@given(st.integers(0, 2**32))
def test_greedy_target_ignores_the_draft(seed):  # fault #6
    # The draft's argmax is another id than the target's, in every slot, for every answer of the randomness.
    u = np.random.default_rng(seed).random((1, 5, 3))
    output = run(
        TableModel([0.1, 0.9]),
        TableModelDrafter([0.9, 0.1]),
        randomness=UniformRandomness(u, 2),
        sampling=Sampling(temperature=0.0),
    )
    assert (output.num_accepted.tolist(), output.tokens.tolist()) == ([0], [[1, 0, 0]])


def TableModelDrafter(*arguments: Any, **options: Any) -> ModelDrafter:  # noqa: N802 (a constructor by another name)
    return ModelDrafter(TableModel(*arguments, **options))


@pytest.mark.parametrize("bans", [0, 1, 2, 3])
def test_end_tokens_are_forbidden_slot_by_slot(enumeration, bans):  # fault #97
    target, draft = tables(6, 3, 3), tables(7, 3, 2)
    target = [0.9 * table + 0.1 / 3 for table in target]  # no row lives by id 1 alone
    expected = [settings(table, banned=[1] if slot < bans else []) for slot, table in enumerate(target)]
    law, _ = round_law(enumeration, target, draft, expected, end_bans=bans, end_tokens=(1,))
    assert enumeration.distance(law, enumeration.block_law(expected)) < 1e-11


def test_end_bans_differ_from_row_to_row():
    target = TableModel([0.0, 1.0, 0.0, 0.0], logits=True)
    output = run(
        target,
        Given([[1, 1], [1, 1], [1, 1]]),
        [[0]] * 3,
        end_bans=[0, 1, 2],
        end_tokens=(1, 3),
        sampling=Sampling(temperature=0.0),
    )
    assert output.num_accepted.tolist() == [2, 0, 0]
    assert output.tokens.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    late = run(
        target, Given([[0, 1]]), end_bans=[1], end_tokens=(1, 3), sampling=Sampling(temperature=0.0)
    )  # forbidden in slot 0 only
    assert (late.num_accepted.tolist(), late.tokens.tolist()) == ([2], [[0, 1, 1]])


def test_masked_id_that_is_drafted_is_replaced_in_silence():  # fault #119
    logits = np.array([0.0, -np.inf, 1.0])
    output = run(TableModel(logits, logits=True), Given([[1, 1]]))
    assert output.num_accepted.tolist() == [0]
    assert output.tokens[0, 0] in (0, 2)
    assert (output.bad_target_slot.tolist(), output.bad_draft_slot.tolist()) == ([-1], [-1])


# --- What is reported ----------------------------------------------------------------------------------------------


def test_overlap_is_the_expected_acceptance():  # fault #129
    target = TableModel(TARGET)
    drawn = run(target, TableModelDrafter(DRAFT))
    assert np.allclose(drawn.overlap, 0.7, atol=1e-15)
    chosen = np.array([run(target, Given([[token, token]])).overlap[0, 0] for token in range(3)])
    assert np.allclose(chosen, TARGET, atol=1e-15)
    assert chosen @ DRAFT == pytest.approx(0.29, abs=1e-15)


def test_overlap_of_every_slot_is_that_of_its_own_laws():
    drawn = run(by_position([TARGET, DRAFT, TARGET]), TableModelDrafter(DRAFT))
    assert np.allclose(drawn.overlap, [[0.7, 1.0]], atol=1e-15)
    chosen = run(by_position([TARGET, DRAFT, TARGET]), Given([[2, 2]]))
    assert np.allclose(chosen.overlap, [[0.2, 0.5]], atol=1e-15)


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logprobs_are_the_targets_for_every_kind_of_token(dtype, kind):  # fault #152, #154
    """Accepted, replacement and bonus tokens, against a plain computation over the token's own prefix."""
    vocab_size, lookahead = 5, 3
    target = random_table(vocab_size, order=2, seed=1)
    target = TableModel(target._table.reshape((vocab_size,) * 3), logits=True, dtype=dtype)
    prompts = [[row % vocab_size, row // vocab_size % vocab_size, 1] for row in range(40)]
    output = run(
        target,
        ModelDrafter(random_table(vocab_size, order=1, seed=2)),
        prompts,
        lookahead=lookahead,
        logprobs=kind,
        sampling=Sampling(temperature=0.5),
        draft_sampling=Sampling(),
    )
    assert output.logprobs.dtype == dtype
    assert set(output.num_accepted.tolist()) == {0, 1, 2, 3}
    table = random_table(vocab_size, order=2, seed=1)._table.reshape((vocab_size,) * 3)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for slot in range(output.num_accepted[row] + 1):
            logits = table[text[-2], text[-1]] / (0.5 if kind == "processed" else 1)
            token = int(output.tokens[row, slot])
            expected = logits[token] - np.log(np.exp(logits).sum())
            assert output.logprobs[row, slot] == pytest.approx(expected, abs=1e-6)
            text.append(token)


def test_raw_logprobs_are_before_the_ban():
    target = TableModel([0.2, 0.5, 0.3])
    for kind, expected in (("raw", 0.2), ("processed", 0.4)):
        output = run(
            target,
            Given([[1, 1]]),
            end_bans=[1],
            end_tokens=(1,),
            logprobs=kind,
            randomness=UniformRandomness(np.full((1, 5, 3), 0.1), 2),
        )
        assert output.tokens[0, 0] == 0
        assert output.logprobs[0, 0] == pytest.approx(np.log(expected), abs=1e-15)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_logprobs_of_padding_and_of_rows_without_a_law_raise_no_warning(kind):
    target = by_position([[0.0, 1.0], [np.nan, np.nan]], logits=True)
    output = run(TableModel([0.0, 1.0]), Given([[1, 0]]), logprobs=kind)
    assert (output.num_accepted.tolist(), output.logprobs[0, 0].tolist()) == ([1], 0.0)
    assert run(target, Given([[1, 1]], num_tokens=[0]), logprobs=kind).bad_target_slot.tolist() == [-1]


def test_logprobs_of_half_precision_logits_are_made_in_single(framework):  # fault #62
    # The largest float16 beside masked ids: its exponential alone would overflow.
    logits = np.array([65504.0, -np.inf, 65472.0, -65504.0])
    if framework.name not in ("numpy", "torch", "jax"):
        pytest.skip("array_api_strict has no float16, and table models are not traced")
    target = Foreign(TableModel(logits, logits=True, dtype="float16"), framework.asarray)
    for kind in ("raw", "processed"):
        output = run(target, Given([[0, 0]]), logprobs=kind)
        assert np.asarray(output.logprobs).tolist() == [[0.0, 0.0, 0.0]]
        assert "float32" in str(output.logprobs.dtype)
        assert np.asarray(output.bad_target_slot).tolist() == [-1]
        target.has_answered = False


def test_output_names_what_it_counts():  # fault #149
    output = run(TableModel([1.0, 0.0]), TableModelDrafter([1.0, 0.0]))
    assert output.num_proposed.tolist() == output.num_accepted.tolist() == [2]
    assert output.tokens.tolist() == [[0, 0, 0]]  # all K accepted, and one more
    assert output.draft_calls == 2
    assert run(TableModel([1.0, 0.0]), Given([[0, 0]])).draft_calls == 0


@pytest.mark.parametrize("lookahead", [0, 3])
def test_plain_sampling_is_a_round_that_proposes_nothing(lookahead):
    for drafter, width in ((None, 0), (PromptLookup(), lookahead)):
        output = run(TableModel(np.eye(3)[[1, 2, 0]]), drafter, [[0], [1]], lookahead=width)
        assert output.tokens[:, 0].tolist() == [1, 2]
        assert output.tokens.shape == (2, width + 1)
        assert output.overlap.shape == (2, width)
        assert output.num_proposed.tolist() == output.num_accepted.tolist() == [0, 0]
        assert output.bad_draft_slot.tolist() == [-1, -1]
        assert output.is_point_mass


@pytest.mark.parametrize("with_probs", [True, False])
def test_limits_cap_each_row_alone(with_probs):  # fault #89
    limits = [0, 1, 2, 3, 4, 9]
    probs = np.full((6, 3, 2), 0.5) if with_probs else None
    output = run(
        TableModel([0.5, 0.5]),
        Given(np.zeros((6, 3), int), probs, [3, 3, 3, 3, 3, 1]),
        [[0]] * 6,
        lookahead=3,
        limits=limits,
        randomness=UniformRandomness(np.full((6, 7, 3), 0.1), 3),
    )
    assert output.num_proposed.tolist() == [0, 0, 1, 2, 3, 1]
    assert output.num_accepted.tolist() == [0, 0, 1, 2, 3, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
@pytest.mark.parametrize("home", ["numpy", "torch", "jax"])
def test_a_finished_row_proposes_nothing_whatever_integers_say_so(dtype, home):
    asarray = asarrays()[home]()
    drafter = Given(np.zeros((2, 3), int), None, np.array([3, 3], dtype))
    drafter.proposal = drafter.proposal._replace(num_tokens=asarray(np.array([3, 3], dtype)))
    model = TableModel([0.5, 0.5])
    output = run(model, drafter, [[0], [0]], lookahead=3, limits=np.array([0, 3], dtype))
    assert output.num_proposed.tolist() == [0, 2]


def test_a_round_of_no_rows_gives_none():
    for lookahead in (0, 2):
        output = run(
            TableModel([0.5, 0.5]),
            Given(np.zeros((0, lookahead), int)),
            np.zeros((0, 1), int),
            lookahead=lookahead,
            randomness=UniformRandomness(np.zeros((0, 2 * lookahead + 1, 3)), lookahead),
        )
        assert output.tokens.shape == (0, lookahead + 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("home", ["numpy", "torch", "jax"])
def test_proposed_ids_need_not_fit_the_integers_of_the_text(dtype, home):
    asarray = asarrays()[home]()
    fed = []

    class Following:
        """The token after t is t + 1."""

        vocab_size, max_rollback = 1000, None

        def init_cache(self, batch_size: int, capacity: int) -> None: ...
        def rollback(self, cache: None, lengths: Any) -> None: ...
        def score(self, cache: None, tokens: Any, **_: Any) -> tuple[Any, None]:
            fed.append(to_numpy(tokens).tolist())
            return asarray(np.where(np.arange(1000) == np.array(fed[-1])[..., None] + 1, 0.0, -np.inf)), None

    context = Context(np.array([[1, 2, 99]], dtype), np.array([3], dtype))
    randomness = CounterSource(0).begin_round([0], [0], 2)
    output, _ = decode_round(
        *(Following(), Given([[100, 300]]), RoundCarry(None, None, asarray(np.zeros(0))), context),
        *(np.array([9]), None, randomness),
        lookahead=2,
        sampling=Sampling(),
    )
    assert fed == [[[99, 100, 300]]]
    assert to_numpy(output.num_accepted).tolist() == [1]
    assert to_numpy(output.tokens).tolist() == [[100, 101, 0]]


def test_row_does_not_depend_on_its_company():  # fault #126
    target, draft = random_table(5, 2, 1), random_table(5, 1, 2)
    prompts = [[row % 5, 3, row // 5] for row in range(12)]
    temperature = [0.0, 0.5, 1.0] * 4
    u = np.random.default_rng(0).random((12, 9, 3))
    together = run(
        target,
        ModelDrafter(draft),
        prompts,
        lookahead=4,
        randomness=UniformRandomness(u, 4),
        sampling=Sampling(temperature=temperature),
    )
    for row in range(12):
        alone = run(
            target,
            ModelDrafter(draft),
            prompts[row : row + 1],
            lookahead=4,
            randomness=UniformRandomness(u[row : row + 1], 4),
            sampling=Sampling(temperature=temperature[row]),
        )
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        assert alone.num_accepted[0] == together.num_accepted[row]


# --- Rows without a law --------------------------------------------------------------------------------------------

GOOD, NAN, INF, MASKED = [0.0, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]


@pytest.mark.parametrize("bad", [NAN, INF, MASKED], ids=["nan", "inf", "all masked"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_target_row_without_a_law_is_flagged_where_it_is_used(slot, temperature, bad):  # fault #51, #62
    target = by_position([bad if position == slot else GOOD for position in range(4)], logits=True)
    sampling = Sampling(temperature=temperature)
    for validate in (False, True):
        output = run(
            target,
            Given(np.zeros((4, 2), int), num_tokens=[2, 1, 0, 2]),
            [[0]] * 4,
            sampling=sampling,
            limits=[9, 9, 9, 0],
            validate=validate,
        )
        assert output.bad_target_slot.tolist() == [slot if slot <= used else -1 for used in (2, 1, 0)] + [-1]
        assert output.bad_draft_slot.tolist() == [-1] * 4
        assert ((output.tokens >= 0) & (output.tokens < 2)).all()


@pytest.mark.parametrize("bad", [NAN, INF, MASKED], ids=["nan", "inf", "all masked"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slot", [0, 1])
def test_draft_row_without_a_law_is_flagged_where_it_is_used(slot, temperature, bad):  # fault #51
    draft = by_position([bad if position == slot else GOOD for position in range(3)], logits=True)
    for validate in (False, True):
        output = run(
            TableModel(GOOD, logits=True),
            ModelDrafter(draft),
            [[0]] * 4,
            sampling=Sampling(temperature=temperature),
            limits=[9, 2, 1, 0],  # that is, 2, 1, 0 and 0 proposed
            validate=validate,
        )
        assert output.bad_draft_slot.tolist() == [slot if slot < used else -1 for used in (2, 1, 0, 0)]
        assert output.bad_target_slot.tolist() == [-1] * 4
        assert ((output.tokens >= 0) & (output.tokens < 2)).all()


def test_first_row_without_a_law_is_the_one_flagged():
    target = by_position([GOOD, NAN, NAN], logits=True)
    draft = by_position([NAN, NAN], logits=True)
    output = run(target, ModelDrafter(draft))
    assert (output.bad_target_slot.tolist(), output.bad_draft_slot.tolist()) == ([1], [0])


def test_lone_nan_in_a_draft_law_is_flagged():
    probs = np.array([[[0.5, 0.25, 0.25], [0.5, 0.5, np.nan]]])
    assert run(TableModel(TARGET), Given([[0, 0]], probs)).bad_draft_slot.tolist() == [1]


def test_validation_names_the_row_and_leaves_finished_rows_alone():
    probs = np.full((3, 2, 3), 1 / 3)
    probs[0] = probs[2, 1] = [0.5, 0.1, 0.1]  # row 0 has finished
    arguments = TableModel(TARGET), Given(np.zeros((3, 2), int), probs), [[0]] * 3
    with pytest.raises(ValueError, match=r"`draft_probs` must sum to one, got 0\.7 in row 2, slot 1"):
        run(*arguments, validate=True, limits=[0, 5, 5])
    run(*arguments, validate=True, limits=[0, 5, 2])
    run(*arguments, limits=[0, 5, 5])
    nan_after_id_1 = TableModel([GOOD, NAN], logits=True)
    output = run(nan_after_id_1, Given([[0, 0]] * 2), [[1], [0]], validate=True, limits=[0, 5])
    assert output.bad_target_slot.tolist() == [-1, -1]


@given(st.integers(0, 2**32))
def test_every_round_gives_at_least_one_id_and_none_out_of_range(seed):  # fault #52
    rng = np.random.default_rng(seed)
    vocab_size, lookahead, batch_size = rng.integers(1, [6, 5, 5]).tolist()
    special = np.array([np.nan, np.inf, -np.inf, -np.inf, 0.0])

    def model() -> TableModel:
        logits = rng.normal(0, 2, (vocab_size, vocab_size))
        logits = np.where(rng.random(logits.shape) < 0.3, rng.choice(special, logits.shape), logits)
        return TableModel(logits, logits=True, dtype=rng.choice(["float32", "float64"]))

    output = run(
        model(),
        ModelDrafter(model()),
        rng.integers(0, vocab_size, (batch_size, 2)).tolist(),
        lookahead=lookahead,
        limits=rng.integers(0, lookahead + 3, batch_size),
        sampling=Sampling(temperature=rng.choice([0.0, 1.0])),
        logprobs=rng.choice([None, "raw", "processed"]),
    )
    assert output.tokens.shape == (batch_size, lookahead + 1)
    assert ((output.tokens >= 0) & (output.tokens < vocab_size)).all()
    assert ((output.num_accepted >= 0) & (output.num_accepted <= output.num_proposed)).all()
    assert ((output.num_proposed >= 0) & (output.num_proposed <= lookahead)).all()


# --- Vocabularies of two sizes -------------------------------------------------------------------------------------


def test_ids_the_draft_lacks_are_emitted_at_the_targets_rate(enumeration):  # fault #44
    target = np.array([0.45, 0.45, 0.1])  # id 2 is padding in the draft's eyes
    paths = enumeration.every_path(3, 1)
    paths = paths.where(paths.drafted[:, 0] < 2)
    output = run(
        TableModel(target), TableModelDrafter([0.3, 0.7]), [[0]] * len(paths.drafted), lookahead=1, randomness=paths
    )
    tables = [target, np.tile(target, (3, 1))]
    law = enumeration.emitted_law(tables, output.tokens, output.num_accepted + 1, paths.probability)
    assert np.allclose(law.sum(axis=1), target, atol=1e-15)
    assert np.allclose(output.overlap, 0.3 + 0.45, atol=1e-15)


def test_ids_the_target_lacks_are_never_emitted(enumeration):
    target, draft = np.array([0.6, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])
    paths = enumeration.every_path(4, 1)
    output = run(
        TableModel(target), TableModelDrafter(draft), [[0]] * len(paths.drafted), lookahead=1, randomness=paths
    )
    possible = paths.probability > 0
    assert output.tokens[possible].max() == 1
    tables = [target, np.tile(target, (2, 1))]
    law = enumeration.emitted_law(
        tables, output.tokens[possible], output.num_accepted[possible] + 1, paths.probability[possible]
    )
    assert enumeration.distance(law, enumeration.block_law(tables)) < 1e-14
    assert np.allclose(output.overlap, 0.3, atol=1e-15)


@pytest.mark.parametrize("token", [-1, 3, 2**31 - 1])
def test_chosen_id_the_target_lacks_is_replaced(token):
    output = run(TableModel(TARGET), Given([[token, 0]]), logprobs="raw")
    assert output.num_accepted.tolist() == [0]
    assert 0 <= output.tokens[0, 0] < 3
    assert output.overlap.tolist() == [[0.0, pytest.approx(0.5)]]


# --- A pure function -----------------------------------------------------------------------------------------------


def test_same_inputs_give_the_same_outputs_and_stay_as_they_are():
    target, drafter = random_table(6, 2, 1), ModelDrafter(random_table(6, 1, 2))
    prompts = [[1, 2, 3], [4, 5, 0]]
    u = np.random.default_rng(0).random((2, 7, 3))
    outputs = []
    for _ in range(2):
        batch = begin(target, drafter, prompts)
        arguments = [batch.tokens, batch.lengths, np.array([5, 2], np.int32), np.array([1, 0], np.int32), u]
        before = [x.tobytes() for x in arguments]
        tokens, lengths, limits, end_bans, uniforms = arguments
        output, _ = decode_round(
            target,
            drafter,
            batch.carry,
            Context(tokens, lengths),
            limits,
            end_bans,
            UniformRandomness(uniforms, 3),
            lookahead=3,
            sampling=Sampling(temperature=0.7, top_k=4),
            end_tokens=(2,),
            logprobs="raw",
        )
        assert [x.tobytes() for x in arguments] == before
        outputs.append([x.tolist() if isinstance(x, np.ndarray) else x for x in output])
    assert outputs[0] == outputs[1]


def test_logits_are_left_as_they_are():  # fault #154
    kept = []

    class Keeping(TableModel):
        def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            logits.flags.writeable = False
            kept.append((logits, logits.copy()))
            return logits, cache

    output = run(
        Keeping(TARGET),
        ModelDrafter(Keeping(DRAFT)),
        end_bans=[2],
        end_tokens=(0,),
        sampling=Sampling(temperature=0.5, top_k=2, top_p=0.9, min_p=0.01),
        logprobs="raw",
    )
    assert len(kept) == 3
    assert all((logits == copy).all() for logits, copy in kept)
    assert np.allclose(output.logprobs[0, 0], np.log(TARGET[output.tokens[0, 0]]))


def test_round_begins_by_rolling_both_caches_back():
    """What the caches hold beyond the committed text, right or wrong, makes no difference."""
    target, draft = random_table(5, 2, 1), random_table(5, 2, 2)
    drafter = ModelDrafter(draft)
    batch = begin(target, drafter, [[1, 2, 3]])
    carry, tokens, lengths = batch.carry, batch.tokens, batch.lengths
    for step in range(4):
        u = np.random.default_rng(step).random((1, 7, 3))
        output, carry = decode_round(
            target,
            drafter,
            carry,
            Context(tokens, lengths),
            np.array([MANY]),
            None,
            UniformRandomness(u, 3),
            lookahead=3,
            sampling=Sampling(),
        )
        prompt = tokens[0, : lengths[0]].tolist()
        fresh = run(target, ModelDrafter(draft), [prompt], lookahead=3, randomness=UniformRandomness(u, 3))
        assert output.tokens.tolist() == fresh.tokens.tolist()
        # Commit less than was accepted, as a stop rule would.
        count = max(1, int(output.num_accepted[0]))
        tokens[0, lengths[0] : lengths[0] + count] = output.tokens[0, :count]
        lengths = lengths + count


def test_drafter_that_proposes_too_few_columns_is_named():
    with pytest.raises(ValueError, match=r"drafter must propose `tokens` of shape \(B, K\) = \(1, 3\).* got \(1, 2\)"):
        run(TableModel(TARGET), Given([[0, 0]]), lookahead=3)


# --- Frameworks ----------------------------------------------------------------------------------------------------


def asarrays() -> dict[str, Any]:
    def strict(device: str) -> Any:
        module = pytest.importorskip("array_api_strict")
        return partial(module.asarray, device=module.Device(device))

    return {
        "numpy": lambda: np.asarray,
        "strict": lambda: strict("CPU_DEVICE"),
        "strict device1": lambda: strict("device1"),
        "torch": lambda: pytest.importorskip("torch").asarray,
        "jax": lambda: pytest.importorskip("jax").numpy.asarray,
    }


@pytest.mark.parametrize("draft_home", [*asarrays(), "lookup", "none"])
@pytest.mark.parametrize("target_home", list(asarrays()))
def test_models_of_two_frameworks_decode_together(target_home, draft_home):  # fault #142
    """Every pair gives NumPy's tokens, where the target's framework works, and each model sees arrays of its own."""
    target, draft = (
        TableModel(random_table(6, 2, seed)._table.reshape(6, 6, 6), logits=True, dtype="float32") for seed in (1, 2)
    )
    asarray = asarrays()[target_home]()
    on_host = draft_home == "numpy" or target_home in ("numpy", "torch")
    if "device1" in draft_home and (on_host or target_home == "strict"):
        pytest.skip("array_api_strict's second device gives its memory to other frameworks only")

    def drafter(home: str) -> Any:
        if home == "lookup":
            return PromptLookup()
        return None if home == "none" else ModelDrafter(Foreign(draft, asarrays()[home]()))

    lookahead = 0 if draft_home == "none" else 3
    validate = "device1" not in target_home + draft_home
    on_numpy = draft_home if draft_home in ("lookup", "none") else "numpy"
    expected = rounds(target, drafter(on_numpy), lookahead, validate=True)
    found = rounds(Foreign(target, asarray), drafter(draft_home), lookahead, validate=validate)
    kind = np.ndarray if target_home == "torch" else type(asarray(np.zeros(1)))  # PyTorch's numbers are on the host
    for output, wanted in zip(found, expected, strict=True):
        for name in ("tokens", "num_proposed", "num_accepted", "bad_target_slot", "bad_draft_slot"):
            answer = getattr(output, name)
            assert type(answer) is kind
            assert to_numpy(answer).tolist() == getattr(wanted, name).tolist(), name
        for name in ("logprobs", "overlap"):
            assert np.allclose(to_numpy(getattr(output, name)), getattr(wanted, name), atol=1e-5), name


class Likeliest:
    """A `Randomness` that answers in the likeliest way, and only in its own framework."""

    def __init__(self, xp: Any, kind: type) -> None:
        self.xp, self.kind = xp, kind
        self.asked: list[Any] = []

    def accept(self, numerator: Any, denominator: Any, label: Any) -> Any:
        assert type(numerator) is type(denominator) is self.kind
        self.asked.append(label)
        return numerator * 2 > denominator

    def categorical(self, weights: Any, label: Any) -> Any:
        assert type(weights) is self.kind
        self.asked.append(label)
        return self.xp.argmax(weights, -1)


def test_randomness_of_someone_else_is_asked_in_the_models_framework():
    torch = pytest.importorskip("torch")
    tables = [random_table(5, 2, seed) for seed in (1, 2)]

    def outcome(models: Any, randomness: Likeliest) -> Any:
        output = run(models[0], ModelDrafter(models[1]), [[0, 1], [3, 2]], randomness=randomness)
        return [*(getattr(output, name).tolist() for name in ("tokens", "num_accepted")), randomness.asked]

    expected = outcome(tables, Likeliest(np, np.ndarray))
    assert outcome([Foreign(table, torch.asarray) for table in tables], Likeliest(torch, torch.Tensor)) == expected
    assert len(expected[-1]) == 4


def test_our_uniforms_with_an_answer_of_ones_own_are_asked_in_the_models_framework():
    torch = pytest.importorskip("torch")

    class Largest(UniformRandomness):
        def categorical(self, weights: Any, label: Any) -> Any:
            return torch.argmax(weights, dim=-1)

    target, draft = (Foreign(random_table(5, 2, seed), torch.asarray) for seed in (1, 2))
    uniforms = CounterSource(0).begin_round([0, 1], [0, 0], 2).uniforms
    output = run(target, ModelDrafter(draft), [[0, 1], [3, 2]], randomness=Largest(uniforms, 2))
    assert output.tokens.shape == (2, 3)


def test_laws_in_bfloat16_serve_a_target_in_torch():
    torch = pytest.importorskip("torch")
    probs = torch.full((1, 2, 4), 0.25, dtype=torch.bfloat16)
    target = Foreign(TableModel(np.full(4, 0.25)), torch.asarray)
    output = run(target, Given([[1, 2]], probs), [[0]], lookahead=2)
    assert output.num_accepted.tolist() == [2]


def test_integer_logits_of_torch_are_named():
    torch = pytest.importorskip("torch")
    target = Foreign(TableModel(np.full(4, 0.25)), lambda x: torch.asarray(x).to(torch.int64))
    with pytest.raises(TypeError, match=r"`logits` must be float16, bfloat16, float32 or float64, got torch.int64"):
        run(target, None, [[0]], lookahead=0)


def rounds(target: Any, drafter: Any, lookahead: int, *, validate: bool, count: int = 3) -> list[RoundOutput]:
    """Run a few rounds of a batch, committing what each emits."""
    batch = begin(target, drafter, [[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]])
    carry, tokens, lengths = batch
    outputs = []
    for step in range(count):
        output, carry = decode_round(
            target,
            drafter,
            carry,
            Context(tokens, lengths),
            np.full(2, MANY, np.int32),
            np.array([0, 2], np.int32),
            CounterSource(1).begin_round([0, 1], [step, step], lookahead),
            lookahead=lookahead,
            sampling=Sampling(temperature=[1.0, 0.5], top_k=5),
            end_tokens=(5,),
            logprobs="raw",
            validate=validate,
        )
        outputs.append(output)
        for row in range(2):
            emitted = to_numpy(output.tokens)[row, : int(output.num_accepted[row]) + 1]
            tokens[row, lengths[row] : lengths[row] + len(emitted)] = emitted
            lengths[row] += len(emitted)
    return outputs


class JaxTable:
    """A model in JAX that can be traced: logits by the last two tokens, read from a functional cache."""

    max_rollback = None

    def __init__(self, table: np.ndarray) -> None:
        import jax.numpy as jnp

        self.jnp = jnp
        self.table = jnp.asarray(table, dtype=jnp.float32)
        self.vocab_size = table.shape[0]

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        return self.jnp.zeros((batch_size, capacity), self.jnp.int32), self.jnp.zeros(batch_size, self.jnp.int32)

    def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
        held, lengths = cache
        tokens = self.jnp.asarray(tokens, dtype=self.jnp.int32)
        width = tokens.shape[1]
        at = lengths[:, None] + self.jnp.arange(width)
        rows = self.jnp.arange(tokens.shape[0])[:, None]
        held = held.at[rows, at].set(tokens)
        at = at[:, width - (width if num_logits is None else num_logits) :]
        before = self.jnp.where(at > 0, held[rows, self.jnp.maximum(at - 1, 0)], 0)
        return self.table[before, held[rows, at]], (held, lengths + width)

    def rollback(self, cache: Any, lengths: Any, /) -> Any:
        return cache[0], self.jnp.asarray(lengths, dtype=self.jnp.int32)


@pytest.mark.parametrize("logprobs", [None, "raw", "processed"])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_compiled_round_gives_the_tokens_of_the_eager_one(lookahead, logprobs):
    jax = pytest.importorskip("jax")
    target, draft = (JaxTable(random_table(6, 2, seed)._table.reshape(6, 6, 6)) for seed in (1, 2))
    prompts = [[0, 1, 2], [3, 4, 5], [5, 5, 5]]
    sampling = Sampling(temperature=[1.0, 0.0, 0.7], top_p=0.9)
    num_traces = 0

    def compiled(target, drafter, carry, context, limits, end_bans, randomness, **options):
        return traced(carry, context, limits, end_bans, randomness.uniforms)

    drafter = ModelDrafter(draft)

    @jax.jit
    def traced(carry, context, limits, end_bans, uniforms):
        nonlocal num_traces
        num_traces += 1
        randomness = UniformRandomness(uniforms, lookahead)
        return decode_round(target, drafter, carry, context, limits, end_bans, randomness, lookahead=lookahead,
                            sampling=sampling, end_tokens=(0,), logprobs=logprobs)  # fmt: skip

    kinds = {"eager": decode_round, "compiled": compiled}
    # Both begin where a round's end would leave them, so that the shapes of all rounds agree.
    states = {}
    for kind in kinds:
        batch = begin(target, drafter, prompts)
        cache = draft.init_cache(3, 24)
        _, cache = draft.score(cache, batch.tokens[:, :2], num_logits=0)
        like = jax.numpy.zeros(0, np.float32)
        state = drafter.init(3, 24)._replace(cache=cache, num_held=np.full(3, 2, np.int32), like=like)
        states[kind] = RoundCarry(batch.carry.target_cache, state, like), batch.tokens, batch.lengths
    for step in range(4):
        outputs = {}
        for kind, function in kinds.items():
            carry, tokens, lengths = states[kind]
            randomness = CounterSource(2).begin_round([0, 1, 2], [step] * 3, lookahead)
            randomness = UniformRandomness(randomness.uniforms_like(np.zeros(1, np.float32)), lookahead)
            context = Context(tokens, lengths)
            if kind == "compiled":
                context = Context(*(jax.numpy.asarray(x) for x in context))
            output, carry = function(
                target, drafter, carry, context, np.array([9, 9, 2], np.int32), np.array([0, 2, 1], np.int32),
                randomness, lookahead=lookahead, sampling=sampling, end_tokens=(0,), logprobs=logprobs,
            )  # fmt: skip
            counts = np.minimum(np.asarray(output.num_accepted) + 1, [9, 9, 2])
            for row, count in enumerate(counts):
                tokens[row, lengths[row] : lengths[row] + count] = np.asarray(output.tokens)[row, :count]
            states[kind] = carry, tokens, lengths + counts.astype(np.int32)
            outputs[kind] = output
        for name in ("tokens", "num_proposed", "num_accepted", "bad_target_slot", "bad_draft_slot"):
            assert getattr(outputs["eager"], name).tolist() == getattr(outputs["compiled"], name).tolist(), name
        assert np.allclose(outputs["eager"].overlap, outputs["compiled"].overlap, atol=1e-6)
        if logprobs:
            assert np.allclose(outputs["eager"].logprobs, outputs["compiled"].logprobs, atol=1e-5)
        assert int(outputs["compiled"].draft_calls) == lookahead
    assert num_traces == 1


class Answering:
    """A drafter that returns what it was built with, whatever that is."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def init(self, batch_size: int, capacity: int) -> None:
        return None

    def propose(self, *_: Any) -> Any:
        return self.answer


IDS, COUNTS = np.zeros((1, 2), np.int32), np.full(1, 2)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (None, TypeError, "`propose` must return a Proposal of arrays and its new state, got None"),
        ((None, None), TypeError, "`propose` must return a Proposal"),
        (([IDS, COUNTS, None], None), TypeError, "`propose` must return a Proposal"),
        ((IDS, COUNTS, None), TypeError, "`propose` must return a Proposal"),
        (((IDS, COUNTS), None), TypeError, "`propose` must return a Proposal"),
        (((IDS.tolist(), COUNTS, None), None), TypeError, "`propose` must return a Proposal of arrays"),
        (((IDS, np.full(2, 2), None), None), ValueError, r"`num_tokens` of shape \(B,\) = \(1,\), got \(2,\)"),
        (((IDS, np.array(2), None), None), ValueError, r"`num_tokens` of shape \(B,\) = \(1,\), got \(\)"),
        (((IDS.astype(float), COUNTS, None), None), TypeError, "`tokens` of an integer dtype, got float64"),
        (((IDS, COUNTS.astype(float), None), None), TypeError, "`num_tokens` of an integer dtype, got float64"),
    ],
)
def test_what_is_no_proposal_is_refused_before_the_target_scores(answer: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        run(TableModel(TARGET), Answering(answer))


def test_a_plain_tuple_of_three_is_a_proposal() -> None:
    plain = run(TableModel(TARGET), Answering(((IDS, COUNTS, None), None)))
    named = run(TableModel(TARGET), Answering((Proposal(IDS, COUNTS, None), None)))
    assert plain.tokens.tolist() == named.tokens.tolist()
