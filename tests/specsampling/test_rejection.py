import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsampling import CounterSource, Label, Proposal, Purpose, Sampling, UniformRandomness, to_probs, verify

RESAMPLE = Label(Purpose.RESAMPLE, 0)
JUST_BELOW_ONE = 1 - 2.0**-53

# fault #1, and the figures of #129
TARGET = np.array([0.5, 0.3, 0.2])
DRAFT = np.array([0.2, 0.3, 0.5])


class Recording(UniformRandomness):
    """The uniforms' answers, with the questions kept."""

    __slots__ = ("questions",)

    def __init__(self, uniforms: np.ndarray, lookahead: int) -> None:
        super().__init__(uniforms, lookahead)
        self.questions: list[tuple[Label, Any]] = []

    def accept(self, numerator: Any, denominator: Any, label: Label) -> Any:
        self.questions.append((label, (numerator, denominator)))
        return super().accept(numerator, denominator, label)

    def categorical(self, weights: Any, label: Label) -> Any:
        self.questions.append((label, weights))
        return super().categorical(weights, label)


def uniforms(batch_size: int, lookahead: int, value: float = 0.5) -> np.ndarray:
    return np.full((batch_size, 2 * lookahead + 1, 3), value)


def one_row(
    target: Any, draft: Any, token: int, *, u: float = 0.5, dtype: Any = np.float64, bonus: Any = None
) -> tuple[int, int]:
    """Verify one proposed token of one row; return whether it was kept, and the token after it."""
    target = np.asarray(target, dtype=dtype)
    bonus = target if bonus is None else np.asarray(bonus, dtype=dtype)
    draft = None if draft is None else np.asarray(draft, dtype=dtype)[None, None]
    proposal = Proposal(np.array([[token]]), np.array([1]), draft)
    verdict = verify(proposal, np.stack([target, bonus])[None], UniformRandomness(uniforms(1, 1, u), 1))
    return int(verdict.num_accepted[0]), int(verdict.next_token[0])


# --- The law -------------------------------------------------------------------------------------------------------


def as_law(weights: list[float]) -> np.ndarray:
    weights = np.array(weights)
    total = weights.sum()
    return np.eye(len(weights))[0] if total == 0 else weights / total


def laws(vocab_size: int) -> st.SearchStrategy[np.ndarray]:
    """Laws over V ids: plain, with zeros, one-hot, with entries that are denormal, tiny or all but one."""
    entries = st.one_of(
        st.sampled_from([0.0, 0.0, 1.0, 1.0, 5e-324, 1e-310, 1e-300, 1e-17, 1e-9]), st.floats(0.0, 1.0, width=32)
    )
    return st.lists(entries, min_size=vocab_size, max_size=vocab_size).map(as_law)


@st.composite
def near(draw: st.DrawFn, law: np.ndarray) -> np.ndarray:
    """A law beside another: unrelated, the same, the same up to rounding, or with no id in common."""
    kind = draw(st.sampled_from(["unrelated", "same", "rounded", "disjoint"]))
    if kind == "unrelated":
        return draw(laws(len(law)))
    if kind == "rounded":
        steps = draw(st.lists(st.integers(-2, 2), min_size=len(law), max_size=len(law)))
        return np.where(law > 0, law * (1 + np.array(steps) * 2.0**-52), 0.0)
    if kind == "disjoint" and (law == 0).any():
        return as_law((law == 0).astype(np.float64).tolist())
    return law.copy()


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the laws of K + 1 target tokens and K drafted ones, each given every prefix."""
    vocab_size, lookahead = draw(st.sampled_from([4, 3, 2, 1])), draw(st.sampled_from([3, 2, 1, 0]))
    pool = [(law, draw(near(law))) for law in draw(st.lists(laws(vocab_size), min_size=2, max_size=6))]
    choose = np.random.default_rng(draw(st.integers(0, 2**32)))
    target, draft = [], []
    for slot in range(lookahead + 1):
        chosen = choose.integers(len(pool), size=vocab_size**slot)
        shape = (vocab_size,) * (slot + 1)
        target.append(np.stack([pool[i][0] for i in chosen]).reshape(shape))
        draft.append(np.stack([pool[i][1] for i in chosen]).reshape(shape))
    return target, draft[:-1]


@given(tables(), st.data())
def test_emitted_tokens_have_exactly_the_targets_joint_law(enumeration, pair, data):  # fault #2, #19, #52, #126
    target, draft = pair
    num_tokens = len(draft) - data.draw(st.integers(0, len(draft)), label="slots without a proposal")
    law = enumeration.verified_law(target, draft, num_tokens=num_tokens)
    assert enumeration.distance(law, enumeration.block_law(target)) <= 2e-12


@given(tables(), st.data())
def test_chosen_tokens_leave_the_law_exact(enumeration, pair, data):  # fault #11, #16
    target, draft = pair
    num_tokens = len(draft) - data.draw(st.integers(0, len(draft)), label="slots without a proposal")
    law = enumeration.verified_law(
        target, lambda prefix: int(draft[len(prefix)][prefix].argmax()), num_tokens=num_tokens
    )
    assert enumeration.distance(law, enumeration.block_law(target)) <= 2e-12


def test_law_in_single_precision_is_the_targets_to_its_rounding(enumeration):
    rng = np.random.default_rng(0)
    target = [rng.dirichlet(np.ones(4), 4**slot).reshape((4,) * (slot + 1)).astype(np.float32) for slot in range(4)]
    draft = [rng.dirichlet(np.ones(4), 4**slot).reshape((4,) * (slot + 1)).astype(np.float32) for slot in range(3)]
    law = enumeration.verified_law(target, draft, dtype=np.float32)
    assert enumeration.distance(law, enumeration.block_law([table.astype(np.float64) for table in target])) < 1e-6


def test_drawn_token_verified_as_chosen_is_exact_and_only_slower(enumeration):  # fault #11
    law = np.array([0.5, 0.5])
    accepted = {}
    for name, reported in (("with its law", law), ("as a point mass", None)):
        joint, accepted[name] = np.zeros(2), 0.0
        for token in (0, 1):
            paths = enumeration.Prescribed(np.full((4, 1), token), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
            draft_probs = None if reported is None else np.broadcast_to(reported, (4, 1, 2))
            proposal = Proposal(paths.drafted, np.ones(4, np.int64), draft_probs)
            verdict = verify(proposal, np.broadcast_to(law, (4, 2, 2)), paths)
            weight = paths.probability * law[token]
            accepted[name] += weight[verdict.num_accepted == 1].sum()
            np.add.at(joint, np.where(verdict.num_accepted == 1, token, verdict.next_token), weight)
        assert np.allclose(joint, law, rtol=0, atol=1e-15)
    assert accepted == {"with its law": 1.0, "as a point mass": 0.5}


def test_argmax_reported_with_its_softmax_is_biased(enumeration):  # fault #16: why `probs` is None for chosen tokens
    target, softmax = np.array([0.1, 0.9]), np.array([0.9, 0.1])
    paths = enumeration.Prescribed(np.zeros((4, 1), np.int64), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))

    def first_token(draft_probs):
        paths.probability[:] = 1
        proposal = Proposal(paths.drafted, np.ones(4, np.int64), draft_probs)
        verdict = verify(proposal, np.broadcast_to(target, (4, 2, 2)), paths)
        return (
            paths.probability[verdict.num_accepted == 1].sum()
            + paths.probability[(verdict.num_accepted == 0) & (verdict.next_token == 0)].sum()
        )

    assert first_token(None) == pytest.approx(0.1, abs=1e-15)
    assert first_token(np.broadcast_to(softmax, (4, 1, 2))) == pytest.approx(1 / 9, abs=1e-15)
    # The other way round the drafted token is kept always, and the law is one-hot.
    target[:] = [0.6, 0.4]
    assert first_token(np.broadcast_to(np.array([0.6, 0.4]), (4, 1, 2))) == 1.0


def test_published_example_accepts_seven_tenths_and_replaces_by_id_0(enumeration):  # fault #1, #129
    paths = enumeration.every_path(3, 1)
    proposal = Proposal(
        paths.drafted, np.ones(len(paths.drafted), np.int64), np.tile(DRAFT, (len(paths.drafted), 1, 1))
    )
    verdict = verify(proposal, np.tile(TARGET, (len(paths.drafted), 2, 1)), paths)
    weight = paths.probability * DRAFT[paths.drafted[:, 0]]
    is_rejected = verdict.num_accepted == 0
    assert weight[is_rejected].sum() == pytest.approx(0.3, abs=1e-15)
    assert weight[is_rejected & (verdict.next_token == 0)].sum() == pytest.approx(0.3, abs=1e-15)
    chosen = verify(proposal._replace(probs=None), np.tile(TARGET, (len(paths.drafted), 2, 1)), paths)
    assert chosen.num_accepted.tolist() == verdict.num_accepted.tolist()  # the same answers, at other probabilities


def test_replacement_law_is_the_normalised_residual():  # fault #1
    randomness = Recording(uniforms(1, 1, 0.9), 1)
    verify(Proposal(np.array([[2]]), np.array([1]), DRAFT[None, None]), np.stack([TARGET, TARGET])[None], randomness)
    (_, weights) = randomness.questions[-1]
    assert (weights / weights.sum()).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.statistical
def test_measured_acceptance_is_the_analytic_one():  # fault #19, #129
    # Four standard deviations: one seed in 16 000 would fail, and the seed is fixed.
    count = 50_000
    proposed = np.random.default_rng(0).choice(3, size=(count, 1), p=DRAFT)
    target_probs = np.broadcast_to(TARGET, (count, 2, 3))
    for draft_probs, rate in ((np.broadcast_to(DRAFT, (count, 1, 3)), 0.7), (None, 0.29)):
        randomness = CounterSource(0).begin_round(np.arange(count), np.zeros(count, np.int64), 1)
        verdict = verify(Proposal(proposed, np.ones(count, np.int64), draft_probs), target_probs, randomness)
        assert abs(verdict.num_accepted.mean() - rate) < 4 * (rate * (1 - rate) / count) ** 0.5
        first = np.where(verdict.num_accepted == 1, proposed[:, 0], verdict.next_token)
        assert (abs(np.bincount(first) / count - TARGET) < 4 * (TARGET * (1 - TARGET) / count) ** 0.5).all()


# --- The accept rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@given(seed=st.integers(0, 2**32), vocab_size=st.integers(1, 300))
def test_bitwise_equal_rows_always_accept(dtype, seed, vocab_size):  # fault #19, #22
    rng = np.random.default_rng(seed)
    law = rng.dirichlet(np.full(vocab_size, 0.1)).astype(dtype)
    token = int(rng.choice(np.flatnonzero(law)))
    assert one_row(law, law, token, u=JUST_BELOW_ONE, dtype=dtype)[0] == 1


@pytest.mark.parametrize(("dtype", "smallest"), [(np.float32, 2.0**-149), (np.float64, 2.0**-1074)])
def test_equal_denormal_probabilities_always_accept(dtype, smallest):  # fault #19, #22
    # Of these, a uniform below one times the probability is rounded to the probability itself.
    assert one_row([1.0, smallest], [1.0, smallest], 1, u=JUST_BELOW_ONE, dtype=dtype)[0] == 1


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5])
@pytest.mark.parametrize("draft", [[0.5, 0.5], [0.0, 1.0], None], ids=["drawn", "certain", "chosen"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_token_the_target_forbids_is_never_kept(dtype, draft, u):  # fault #19
    assert one_row([1.0, 0.0], draft, 1, u=u, dtype=dtype) == (0, 0)


def test_token_is_kept_below_the_ratio_and_rejected_from_it_on():
    # p / q = 1/2 exactly: the comparison is strict.
    target, draft = [0.25, 0.75], [0.5, 0.5]
    assert one_row(target, draft, 0, u=0.5 - 2.0**-53)[0] == 1
    assert one_row(target, draft, 0, u=0.5) == (0, 1)
    assert one_row(target, None, 0, u=0.25 - 2.0**-53)[0] == 1
    assert one_row(target, None, 0, u=0.25) == (0, 1)


def test_nothing_after_the_first_rejection_is_kept():
    target_probs = np.broadcast_to(np.array([0.5, 0.5, 0.0]), (1, 4, 3))
    verdict = verify(
        Proposal(np.array([[0, 2, 0]]), np.array([3]), None), target_probs, UniformRandomness(uniforms(1, 3, 0.25), 3)
    )
    assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize(("dtype", "step"), [(np.float32, 2.0**-24), (np.float64, 2.0**-53)])
def test_rejection_with_an_empty_residual_draws_from_the_target(dtype, step):  # fault #22
    draft = np.full(4, 0.25, dtype=dtype)
    target = draft * dtype(1 - 2 * step)
    assert (target < draft).all()
    for u, expected in ((JUST_BELOW_ONE, 3), (1 - step, 3)):
        assert one_row(target, draft, 1, u=u, dtype=dtype) == (0, expected)
    target[3] = 0  # now an id that a draw from anything but the target could return
    assert one_row(target, draft, 1, u=JUST_BELOW_ONE, dtype=dtype) == (0, 2)


def test_point_mass_residual_without_mass_draws_from_the_target():
    # Rounding made the one law that leaves nothing: everything on the rejected id, and just less than one.
    assert one_row([0.0, 1 - 2.0**-53], None, 1, u=JUST_BELOW_ONE) == (0, 1)


@pytest.mark.parametrize("ratio", [1e-9, 1e-4, 0.5, 1 - 1e-6])
def test_residual_in_single_precision_is_precise(ratio):  # fault #21
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.ones(1000)).astype(np.float32)
    draft = (target * np.float32(ratio)).astype(np.float32)
    draft[-1] = 1.0
    target_probs = np.stack([target, target])[None]
    randomness = Recording(uniforms(1, 1, JUST_BELOW_ONE), 1)
    verdict = verify(Proposal(np.array([[999]]), np.array([1]), draft[None, None]), target_probs, randomness)
    assert verdict.num_accepted.tolist() == [0]
    (_, weights) = randomness.questions[-1]
    assert weights.dtype == np.float32
    exact = np.maximum(target.astype(np.float64) - draft.astype(np.float64), 0)
    exact /= exact.sum()
    found = weights[0].astype(np.float64) / weights[0].astype(np.float64).sum()
    assert np.all(found[exact == 0] == 0)
    assert np.all(abs(found - exact)[exact > 0] < 1e-5 * exact[exact > 0])


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [(np.float32, np.float64), (np.float64, np.float32)])
def test_mixed_dtypes_are_compared_in_the_wider_one(target_dtype, draft_dtype):
    third = np.array([1 / 3, 2 / 3])
    target, draft = third.astype(target_dtype), third.astype(draft_dtype)
    randomness = Recording(uniforms(1, 1), 1)
    verify(Proposal(np.array([[0]]), np.array([1]), draft[None, None]), np.stack([target] * 2)[None], randomness)
    ((_, (numerator, denominator)), (_, weights)) = randomness.questions
    assert (numerator.dtype, denominator.dtype, weights.dtype) == (np.float64,) * 3
    assert (numerator[0, 0], denominator[0, 0]) == (np.float64(target[0]), np.float64(draft[0]))


def test_half_precision_is_raised_before_laws_are_subtracted():
    target, draft = np.array([0.9, 0.1], np.float16), np.array([1e-7, 1.0], np.float16)
    randomness = Recording(uniforms(1, 1), 1)
    verify(Proposal(np.array([[1]]), np.array([1]), draft[None, None]), np.stack([target] * 2)[None], randomness)
    (_, weights) = randomness.questions[-1]
    assert weights.tolist() == [[np.float32(target[0]) - np.float32(draft[0]), 0.0]]


# --- What is read and what is not ----------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_every_row_is_judged_by_its_own_laws(seed):  # fault #121, #126
    """Rows with other tokens, laws, counts and places of rejection come out as they do alone."""
    rng = np.random.default_rng(seed)
    batch_size, lookahead, vocab_size = rng.integers(1, [6, 5, 6]).tolist()
    target_probs = rng.dirichlet(np.full(vocab_size, 0.5), (batch_size, lookahead + 1))
    draft_probs = rng.dirichlet(np.full(vocab_size, 0.5), (batch_size, lookahead)) if rng.random() < 0.7 else None
    tokens = rng.integers(0, vocab_size, (batch_size, lookahead))
    num_tokens = rng.integers(0, lookahead + 1, batch_size)
    u = rng.random((batch_size, 2 * lookahead + 1, 3))
    together = verify(Proposal(tokens, num_tokens, draft_probs), target_probs, UniformRandomness(u, lookahead))
    for row in range(batch_size):
        at = slice(row, row + 1)
        proposal = Proposal(tokens[at], num_tokens[at], None if draft_probs is None else draft_probs[at])
        alone = verify(proposal, target_probs[at], UniformRandomness(u[at], lookahead))
        assert (together.num_accepted[row], together.next_token[row]) == (alone.num_accepted[0], alone.next_token[0])


def test_rejections_in_different_slots_use_their_own_rows():  # fault #121
    # What is drawn tells which row it was drawn from: row b, slot t of the target holds all its mass on id 3 b + t.
    target_probs = np.zeros((2, 4, 8))
    for row, slot in itertools.product(range(2), range(4)):
        target_probs[row, slot, 3 * row + slot] = 1.0
    tokens = np.array([[7, 1, 2], [3, 4, 7]])
    verdict = verify(Proposal(tokens, np.array([3, 3]), None), target_probs, UniformRandomness(uniforms(2, 3), 3))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0, 2], [0, 5])


def test_bonus_token_is_drawn_from_the_row_after_the_last_proposed():
    target_probs = np.eye(5)[None, :4].repeat(4, axis=0)
    tokens = np.array([[0, 1, 2]]).repeat(4, axis=0)
    for draft_probs in (None, np.eye(5)[None, :3].repeat(4, axis=0)):
        proposal = Proposal(tokens, np.array([0, 1, 2, 3]), draft_probs)
        verdict = verify(proposal, target_probs, UniformRandomness(uniforms(4, 3), 3))
        assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("with_probs", [True, False])
def test_slots_without_a_proposal_are_never_read(with_probs, framework):
    rng = np.random.default_rng(1)
    target_probs, draft_probs = rng.dirichlet(np.ones(4), (5, 4)), rng.dirichlet(np.ones(4), (5, 3))
    tokens, num_tokens = rng.integers(0, 4, (5, 3)), np.array([0, 1, 2, 3, 0])
    u = rng.random((5, 7, 3))
    clean, dirty = tokens.copy(), tokens.copy()
    dirty_target, dirty_draft = target_probs.copy(), draft_probs.copy()
    for row, count in enumerate(num_tokens):
        clean[row, count:] = 0
        dirty[row, count:] = [-1, 4, 2**31 - 1][: 3 - count]
        dirty_draft[row, count:] = np.nan
        dirty_target[row, count + 1 :] = np.nan

    @framework.compile
    def judge(tokens, num_tokens, draft, target, u):
        return verify(Proposal(tokens, num_tokens, draft if with_probs else None), target, UniformRandomness(u, 3))

    arrays = [(clean, num_tokens, draft_probs, target_probs, u), (dirty, num_tokens, dirty_draft, dirty_target, u)]
    expected, found = (judge(*(framework.asarray(x) for x in given)) for given in arrays)
    assert np.asarray(found.num_accepted).tolist() == np.asarray(expected.num_accepted).tolist()
    assert np.asarray(found.next_token).tolist() == np.asarray(expected.next_token).tolist()


@pytest.mark.parametrize("token", [-1, -4, 4, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("draft", [[0.25, 0.25, 0.25, 0.25], None], ids=["drawn", "chosen"])
def test_id_the_target_lacks_is_rejected(token, draft):
    target = [0.0, 0.0, 1.0, 0.0]
    proposal_row = [0.0, 0.0, 0.0, 1.0]
    assert one_row(target, draft, token, u=2.0**-53) == (0, 2)
    assert one_row(proposal_row, draft, token, u=2.0**-53) == (0, 3)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_each_decision_is_asked_once_by_its_label(lookahead):
    rng = np.random.default_rng(0)
    for draft_probs in (rng.dirichlet(np.ones(4), (5, lookahead)), None):
        randomness = Recording(rng.random((5, 2 * lookahead + 1, 3)), lookahead)
        proposal = Proposal(rng.integers(0, 4, (5, lookahead)), np.arange(5) % (lookahead + 1), draft_probs)
        verify(proposal, rng.dirichlet(np.ones(4), (5, lookahead + 1)), randomness)
        labels = [label for label, _ in randomness.questions]
        assert labels == ([Label(Purpose.ACCEPT, 0)] if lookahead else []) + [RESAMPLE]
        (_, weights) = randomness.questions[-1]
        assert weights.shape == (5, 4)
        assert (weights.sum(axis=1) > 0).all()


@given(st.integers(0, 2**32))
def test_every_verdict_is_in_range(seed):  # fault #51, #52
    """Between 1 and K + 1 tokens, none out of range, whatever the numbers: zeros, NaN, denormals, garbage ids."""
    rng = np.random.default_rng(seed)
    batch_size, lookahead, vocab_size = rng.integers(1, [5, 5, 7]).tolist()
    lookahead -= 1
    special = np.array([0.0, 0.0, np.nan, 5e-324, 1e-310, 1.0])

    def numbers(*shape: int) -> np.ndarray:
        values = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), rng.random(shape))
        return values.astype(rng.choice([np.float32, np.float64]))

    tokens = rng.integers(-2, vocab_size + 2, (batch_size, lookahead))
    num_tokens = rng.integers(0, lookahead + 1, batch_size)
    draft_probs = numbers(batch_size, lookahead, vocab_size) if rng.random() < 0.7 else None
    u = rng.choice([0.0, 2.0**-53, 0.5, JUST_BELOW_ONE], (batch_size, 2 * lookahead + 1, 3))
    target_probs = numbers(batch_size, lookahead + 1, vocab_size)
    num_accepted, next_token = verify(
        Proposal(tokens, num_tokens, draft_probs), target_probs, UniformRandomness(u, lookahead)
    )
    assert ((num_accepted >= 0) & (num_accepted <= num_tokens)).all()
    assert ((next_token >= 0) & (next_token < vocab_size)).all()


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("with_probs", [True, False])
def test_inputs_are_left_as_they_are(framework, lookahead, with_probs):  # fault #17
    rng = np.random.default_rng(0)
    originals = (
        rng.integers(0, 4, (3, lookahead)),
        np.minimum(np.arange(3), lookahead),
        rng.dirichlet(np.ones(4), (3, lookahead)),
        rng.dirichlet(np.ones(4), (3, lookahead + 1)),
        rng.random((3, 2 * lookahead + 1, 3)),
    )
    tokens, num_tokens, draft_probs, target_probs, u = arrays = [framework.asarray(x.copy()) for x in originals]
    proposal = Proposal(tokens, num_tokens, draft_probs if with_probs else None)
    verify(proposal, target_probs, UniformRandomness(u, lookahead), validate=lookahead == 0)
    for array, original in zip(arrays, originals, strict=True):
        assert np.asarray(array).tobytes() == original.tobytes()


# --- Frameworks ----------------------------------------------------------------------------------------------------


def dyadic_laws(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Laws whose entries are multiples of 2**-10: every framework's sums of them are exact, so no id can differ."""
    return rng.multinomial(1024, rng.dirichlet(np.full(shape[-1], 0.3)), size=shape[:-1]) / 1024


@pytest.mark.parametrize(("floating", "integer"), [(np.float32, np.int32), (np.float64, np.int64)])
@pytest.mark.parametrize(("lookahead", "vocab_size"), [(0, 5), (1, 1), (3, 4), (4, 1000)])
def test_every_framework_gives_the_integers_of_numpy(framework, lookahead, vocab_size, floating, integer):
    rng = np.random.default_rng(lookahead)
    batch_size = 24
    target_probs = dyadic_laws(rng, batch_size, lookahead + 1, vocab_size).astype(floating)
    draft_probs = dyadic_laws(rng, batch_size, lookahead, vocab_size).astype(floating)
    draft_probs[::3] = target_probs[::3, :lookahead]
    tokens = np.zeros((batch_size, lookahead), integer)
    for row, slot in itertools.product(range(batch_size), range(lookahead)):
        tokens[row, slot] = rng.choice(vocab_size, p=draft_probs[row, slot].astype(np.float64))
    num_tokens = rng.integers(0, lookahead + 1, batch_size).astype(integer)
    u = CounterSource(lookahead).begin_round(np.arange(batch_size), np.zeros(batch_size, int), lookahead).uniforms
    for probs in (draft_probs, None):
        expected = verify(Proposal(tokens, num_tokens, probs), target_probs, UniformRandomness(u, lookahead))
        assert (expected.num_accepted.dtype, expected.next_token.dtype) == (integer, integer)

        @framework.compile
        def judge(tokens, num_tokens, draft_probs, target_probs, u, with_probs=probs is not None):
            proposal = Proposal(tokens, num_tokens, draft_probs if with_probs else None)
            return verify(proposal, target_probs, UniformRandomness(u, lookahead))

        found = judge(*(framework.asarray(x) for x in (tokens, num_tokens, draft_probs, target_probs, u)))
        for name in found._fields:
            answer, wanted = getattr(found, name), getattr(expected, name)
            assert type(answer) is type(framework.asarray(tokens))
            assert np.asarray(answer).dtype == integer
            assert np.asarray(answer).tolist() == wanted.tolist(), name


def test_constants_are_made_on_the_device_of_the_question():
    strict = pytest.importorskip("array_api_strict")
    rng = np.random.default_rng(0)
    where = strict.Device("device1")
    for probs in (rng.dirichlet(np.ones(4), (3, 2)), None):
        tokens, num_tokens, target_probs, u = (
            strict.asarray(x, device=where)
            for x in (
                rng.integers(0, 4, (3, 2)),
                np.array([0, 1, 2]),
                rng.dirichlet(np.ones(4), (3, 3)),
                rng.random((3, 5, 3)),
            )
        )
        draft_probs = None if probs is None else strict.asarray(probs, device=where)
        verdict = verify(Proposal(tokens, num_tokens, draft_probs), target_probs, UniformRandomness(u, 2))
        assert verdict.num_accepted.device == verdict.next_token.device == where


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16])
def test_narrow_integers_do_not_overflow(integer):
    rng = np.random.default_rng(0)
    batch_size, lookahead, vocab_size = 300, 3, 120
    target_probs = np.zeros((batch_size, lookahead + 1, vocab_size))
    wanted = rng.integers(0, vocab_size, (batch_size, lookahead + 1))
    np.put_along_axis(target_probs, wanted[:, :, None], 1.0, axis=-1)
    proposal = Proposal(wanted[:, :lookahead].astype(integer), np.full(batch_size, lookahead, integer), None)
    verdict = verify(proposal, target_probs, UniformRandomness(uniforms(batch_size, lookahead), lookahead))
    assert (verdict.num_accepted == lookahead).all()
    assert verdict.next_token.tolist() == wanted[:, -1].tolist()


def test_only_one_row_per_batch_entry_is_worked_on():
    """No arithmetic has B x K x V results: the row is gathered before the residual is formed."""
    jax = pytest.importorskip("jax")
    batch_size, lookahead, vocab_size = 3, 4, 50
    shapes = [(batch_size, lookahead, vocab_size), (batch_size, lookahead + 1, vocab_size), (batch_size, 9, 3)]
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    integers = [jax.ShapeDtypeStruct(shape, np.int32) for shape in [(batch_size, lookahead), (batch_size,)]]

    def judge(tokens, num_tokens, draft_probs, target_probs, u):
        return verify(Proposal(tokens, num_tokens, draft_probs), target_probs, UniformRandomness(u, lookahead))

    sizes = {}

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = [x.jaxpr for x in equation.params.values() if hasattr(x, "jaxpr")]
            for body in inner:
                walk(body)
            if not inner:
                size = max(x.aval.size for x in equation.outvars)
                sizes[str(equation.primitive)] = max(size, sizes.get(str(equation.primitive), 0))

    walk(jax.make_jaxpr(judge)(*integers, *arrays).jaxpr)
    views = {"slice", "reshape"}
    assert {name for name, size in sizes.items() if size > batch_size * vocab_size} <= views
    assert sizes["sub"] == batch_size * vocab_size


# --- Arguments -----------------------------------------------------------------------------------------------------


def proposal_of(*shape: int, vocab_size: int = 4, num_tokens: int | None = None) -> Proposal:
    law = np.full((*shape, vocab_size), 1 / vocab_size)
    return Proposal(np.zeros(shape, int), np.full(shape[0], shape[1] if num_tokens is None else num_tokens), law)


UNIFORM = np.full((2, 4, 4), 0.25)


@pytest.mark.parametrize(
    ("proposal", "target_probs", "message"),
    [
        (
            proposal_of(2, 3)._replace(tokens=np.zeros(2, int)),
            UNIFORM,
            r"`tokens` must have shape \(B, K\), got \(2,\)",
        ),
        (
            proposal_of(2, 3)._replace(num_tokens=np.zeros((2, 1), int)),
            UNIFORM,
            r"`num_tokens` must have shape \(B,\) = \(2,\), got \(2, 1\)",
        ),
        (
            proposal_of(2, 3),
            UNIFORM[:, :3],
            r"`target_probs` must have shape \(B, K \+ 1, V\) with B = 2 and K = 3, got \(2, 3, 4\)",
        ),
        (proposal_of(2, 3), UNIFORM[0], r"`target_probs` must have shape .* got \(4, 4\)"),
        (proposal_of(1, 3), UNIFORM, r"`target_probs` must have shape .* B = 1 and K = 3, got \(2, 4, 4\)"),
        (
            proposal_of(2, 3, vocab_size=5),
            UNIFORM,
            r"`draft_probs` must have shape \(B, K, V\) = \(2, 3, 4\), got \(2, 3, 5\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_raise(proposal, target_probs, message):
    with pytest.raises(ValueError, match=message):
        verify(proposal, target_probs, CounterSource(0).begin_round([0, 1], [0, 0], 3))


def changed(array: np.ndarray, where: Any, value: Any) -> np.ndarray:
    array = array.copy()
    array[where] = value
    return array


VALID = proposal_of(2, 3)
INVALID = {
    "NaN in the target": (
        VALID,
        changed(UNIFORM, (1, 2, 3), np.nan),
        "`target_probs` must not be NaN, got NaN for id 3 in row 1, slot 2",
    ),
    "NaN in the bonus row": (VALID, changed(UNIFORM, (0, 3), np.nan), "`target_probs` must not be NaN.* row 0, slot 3"),
    "negative target": (
        VALID,
        changed(UNIFORM, (1, 0), [-0.5, 0.5, 0.5, 0.5]),
        "`target_probs` must not be negative, got -0.5 for id 0 in row 1, slot 0",
    ),
    "target sums to less": (
        VALID,
        changed(UNIFORM, (0, 1, 0), 0.2),
        r"`target_probs` must sum to one, got 0\.95 in row 0, slot 1",
    ),
    "infinite target": (VALID, changed(UNIFORM, (0, 1, 0), np.inf), "`target_probs` must sum to one, got inf in row 0"),
    "NaN in the draft": (
        VALID._replace(probs=changed(VALID.probs, (1, 2, 0), np.nan)),
        UNIFORM,
        "`draft_probs` must not be NaN, got NaN for id 0 in row 1, slot 2",
    ),
    "negative draft": (
        VALID._replace(probs=changed(VALID.probs, (1, 2), [1.5, -0.5, 0, 0])),
        UNIFORM,
        "`draft_probs` must not be negative, got -0.5 for id 1 in row 1, slot 2",
    ),
    "draft sums to more": (
        VALID._replace(probs=changed(VALID.probs, (1, 2, 1), 0.5)),
        UNIFORM,
        r"`draft_probs` must sum to one, got 1\.25 in row 1, slot 2",
    ),
    "proposed at probability zero": (
        VALID._replace(probs=changed(VALID.probs, (0, 1), [0, 0.5, 0.5, 0])),
        UNIFORM,
        "`draft_probs` gives probability 0 to the proposed token 0 in row 0, slot 1",
    ),
    "id out of range": (
        VALID._replace(tokens=changed(VALID.tokens, (1, 1), 4), probs=None),
        UNIFORM,
        "`tokens` must lie in 0 to 3, got 4 in row 1, slot 1",
    ),
    "negative id": (VALID._replace(tokens=changed(VALID.tokens, (0, 0), -1)), UNIFORM, "got -1 in row 0, slot 0"),
    "too many proposed": (
        VALID._replace(num_tokens=np.array([3, 4])),
        UNIFORM,
        "`num_tokens` must lie in 0 to 3, got 4 in row 1",
    ),
    "fewer than none": (VALID._replace(num_tokens=np.array([-1, 3])), UNIFORM, "got -1 in row 0"),
}


@pytest.mark.parametrize("case", INVALID)
def test_validation_names_row_and_slot(framework, case):
    proposal, target_probs, message = INVALID[case]
    proposal = Proposal(*(None if x is None else framework.asarray(x) for x in proposal))
    with pytest.raises(ValueError, match=message):
        verify(proposal, framework.asarray(target_probs), UniformRandomness(uniforms(2, 3), 3), validate=True)


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("name", ["tokens", "num_tokens"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_are_not_integers_is_refused_by_name(framework, name, lookahead, validate):
    tokens = framework.asarray(np.zeros((1, lookahead), np.int32))
    proposal = Proposal(tokens, framework.asarray(np.array([lookahead])), None)
    proposal = proposal._replace(**{name: framework.asarray(np.asarray(getattr(proposal, name), np.float32))})
    target_probs = framework.asarray(np.full((1, lookahead + 1, 2), 0.5))
    randomness = UniformRandomness(framework.asarray(uniforms(1, lookahead)), lookahead)
    with pytest.raises(TypeError, match=f"`{name}` must be of an integer dtype, got .*float32"):
        verify(proposal, target_probs, randomness, validate=validate)


def test_validation_reads_only_what_is_used():
    proposal = Proposal(np.array([[0, 9]]), np.array([1]), changed(proposal_of(1, 2).probs, (0, 1), np.nan))
    target_probs = changed(UNIFORM[:1, :3], (0, 2), np.nan)
    verify(proposal, target_probs, UniformRandomness(uniforms(1, 2), 2), validate=True)


@pytest.mark.parametrize("vocab_size", [2, 1000, 100_000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_validation_allows_for_the_rounding_of_the_dtype(dtype, vocab_size):
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).normal(0, 3, (1, 2, vocab_size))
    probs = torch.asarray(to_probs(logits, Sampling())).to(getattr(torch, dtype))
    tokens = torch.argmax(probs[:, :1], dim=-1)
    proposal = Proposal(tokens, torch.asarray([1]), probs[:, :1])
    verify(proposal, probs, UniformRandomness(uniforms(1, 1), 1), validate=True)
    wrong = probs.clone()
    wrong[0, 1] *= 1.1
    with pytest.raises(ValueError, match="sum to one"):
        verify(proposal, wrong, UniformRandomness(uniforms(1, 1), 1), validate=True)


def test_arrays_of_two_namespaces_raise():
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="namespace"):
        verify(VALID, strict.asarray(UNIFORM), UniformRandomness(uniforms(2, 3), 3))


def test_randomness_is_never_left_out_and_repeats():  # fault #9
    with pytest.raises(TypeError, match="randomness"):
        verify(VALID, UNIFORM)
    first, second = (verify(VALID, UNIFORM, CounterSource(3).begin_round([0, 1], [5, 5], 3)) for _ in range(2))
    assert first.next_token.tolist() == second.next_token.tolist()


def test_records_name_what_they_count():  # fault #149
    assert verify(VALID, UNIFORM, CounterSource(0).begin_round([0, 1], [0, 0], 3))._fields == (
        "num_accepted",
        "next_token",
    )


@pytest.mark.parametrize("claimed", [2, 7])
def test_tokens_that_a_drafter_claims_beyond_its_block_do_not_exist(claimed: int) -> None:
    draft_probs = np.array([[[0.5, 0.5]]])
    target_probs = np.array([[[0.5, 0.5], [0.9, 0.1]]])
    randomness = Recording(uniforms(1, 1), 1)
    verdict = verify(Proposal(np.array([[0]]), np.array([claimed]), draft_probs), target_probs, randomness)
    assert verdict.num_accepted.tolist() == [1]
    # The bonus token is drawn from the target's own row, not from a residual.
    np.testing.assert_array_equal(dict(randomness.questions)[RESAMPLE], target_probs[:, 1])


def test_a_negative_number_of_tokens_is_none() -> None:
    target_probs = np.array([[[0.5, 0.5], [0.9, 0.1]]])
    randomness = Recording(uniforms(1, 1), 1)
    verdict = verify(Proposal(np.array([[0]]), np.array([-1]), None), target_probs, randomness)
    assert verdict.num_accepted.tolist() == [0]
    np.testing.assert_array_equal(dict(randomness.questions)[RESAMPLE], target_probs[:, 0])


@pytest.mark.parametrize("narrow", [np.uint8, np.int8, np.int16])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_of_a_narrow_dtype_do_not_cut_the_ids_that_follow(narrow, lookahead):
    target_probs = np.zeros((1, lookahead + 1, 70_000))
    target_probs[:, :, -1] = 1.0
    proposal = Proposal(np.ones((1, lookahead), narrow), np.full(1, lookahead, narrow), None)
    verdict = verify(proposal, target_probs, UniformRandomness(uniforms(1, lookahead), lookahead))
    assert (verdict.next_token.dtype, verdict.next_token.tolist()) == (np.int32, [69_999])
