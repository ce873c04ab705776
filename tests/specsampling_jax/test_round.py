"""Compiled rounds: the eager round's tokens, the exact law, and nothing compiled twice."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import (
    CacheError,
    CapabilityError,
    Context,
    CounterSource,
    Decoder,
    Label,
    Model,
    ModelDrafter,
    NonFiniteLogitsError,
    PromptLookup,
    Proposal,
    Purpose,
    RoundCarry,
    Sampling,
    generate,
)
from specsampling_conformance._enumeration import Scenario, enumerate_laws
from specsampling_conformance._oracle import one_token_law, outcome_law
from specsampling_conformance._wrappers import EagerModel
from specsampling_numpy import NumpyModel, TableModel

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from specsampling_jax import JaxModel, _round, load  # noqa: E402

V = 7
PROMPTS = [[1, 2, 3, 1, 2], [5], [6, 6, 6]]
SMALL = {"num_hidden_layers": 1, "vocab_size": 3}


@pytest.fixture(scope="module")
def pair(folder: Callable[..., Path]) -> tuple[JaxModel, JaxModel]:
    return load(folder()), load(folder(seed=1, num_hidden_layers=1))


@pytest.fixture(scope="module")
def numpy_pair(folder: Callable[..., Path]) -> tuple[NumpyModel, NumpyModel]:
    return NumpyModel(folder()), NumpyModel(folder(seed=1, num_hidden_layers=1))


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Count what XLA compiles, operation by operation outside of jit included."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("drafter", ["model", "numpy model", "lookup", "none"])
def test_compiled_rounds_give_the_tokens_of_eager_ones_and_of_numpy(pair: Any, numpy_pair: Any, drafter: str):
    target, draft = pair
    drafters = {"model": draft, "numpy model": numpy_pair[1], "lookup": PromptLookup(), "none": None}
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "lookahead": 3,
        "sampling": Sampling(temperature=[1.0, 0.0, 0.7], top_p=0.9),
        "end_tokens": [4],
        "min_new_tokens": 3,
        "logprobs": "processed",
        "seed": 5,
    }
    compiled = generate(target, drafters[drafter], PROMPTS, **options)
    plain = {**drafters, "model": numpy_pair[1]}[drafter]
    for eager in (generate(EagerModel(target), drafters[drafter], PROMPTS, **options),
                  generate(numpy_pair[0], plain, PROMPTS, **options)):  # fmt: skip
        assert compiled.tokens == eager.tokens
        assert compiled.finish_reasons == eager.finish_reasons
        for ours, theirs in zip(compiled.logprobs, eager.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        for name in ("rounds", "target_calls", "proposed", "tested", "accepted", "emitted"):
            assert getattr(compiled.stats, name) == getattr(eager.stats, name), name


def test_what_a_round_reports_is_the_callers_own(pair: Any):
    decoder = Decoder(pair[0], pair[1], lookahead=2, logprobs="raw", validate=True)  # not compiled
    _, info = decoder.step(decoder.init(PROMPTS, max_new_tokens=8))
    for name, value in info._asdict().items():
        if isinstance(value, np.ndarray):
            assert value.flags.writeable, name  # JAX's memory is not to be written to


@pytest.mark.parametrize("drafter", ["model", "numpy model"])
def test_the_drafts_own_settings_and_calls_reach_the_compiled_round(pair: Any, numpy_pair: Any, drafter: str):
    draft = pair[1] if drafter == "model" else numpy_pair[1]
    options: dict[str, Any] = {"max_new_tokens": 8, "lookahead": 2, "draft_sampling": Sampling(temperature=0.0)}
    compiled = generate(pair[0], draft, PROMPTS, **options)
    expected = generate(*numpy_pair, PROMPTS, **options)
    assert compiled.tokens == expected.tokens
    assert compiled.stats.accepted == expected.stats.accepted
    # The block of a compiled round is two wide, so prompts are fed before: one call more.
    assert compiled.stats.draft_calls == 2 * compiled.stats.rounds + (drafter == "model")


def test_a_numpy_target_takes_a_jax_draft(pair: Any, numpy_pair: Any):
    options: dict[str, Any] = {"max_new_tokens": 8, "lookahead": 2, "seed": 3}
    mixed = generate(numpy_pair[0], pair[1], PROMPTS, **options)
    assert mixed.tokens == generate(*numpy_pair, PROMPTS, **options).tokens


def test_nothing_is_compiled_after_the_first_rounds_whatever_is_accepted_and_whichever_rows_finish(pair: Any):
    class Alternating:
        choices = (3, 0)

        def __call__(self, state: Any) -> int:
            return self.choices[int(state.rounds.max()) % 2]

    def run(seed: int, prompts: Any, limits: Any) -> Any:
        return generate(
            *pair, prompts, max_new_tokens=limits, lookahead=Alternating(), seed=seed, end_tokens=[4], min_new_tokens=2
        )

    for length in (3, 5, 7):  # a bucket of prompts each
        run(0, [[1] * length, [2], [3]], 9)
    with compilations() as seen:
        histograms = set()
        for seed in range(1, 6):
            result = run(seed, [[seed, 2, 3], [1] * (seed + 1), [3]], [12, 2 + seed, 4])
            histograms.add(tuple(result.stats.accepted_histogram))
    assert len(histograms) > 1
    assert seen == []


def test_a_round_in_which_nothing_is_drafted_compiles_once_whoever_the_drafter_is(pair: Any, numpy_pair: Any):
    options: dict[str, Any] = {"max_new_tokens": 5, "seed": 1}
    plain = generate(pair[0], None, PROMPTS, **options)
    with compilations() as seen:
        for drafter, settings in ((PromptLookup(), None), (numpy_pair[1], Sampling(temperature=0.5))):
            given = generate(pair[0], drafter, PROMPTS, lookahead=0, draft_sampling=settings, **options)
            assert given.tokens == plain.tokens
    assert seen == []


def test_another_checkpoint_of_the_same_configuration_compiles_nothing(pair: Any, folder: Callable[..., Path]):
    others = load(folder(seed=2)), load(folder(seed=3, num_hidden_layers=1))
    options: dict[str, Any] = {"max_new_tokens": 6, "lookahead": 2, "seed": 1}
    first = generate(*pair, PROMPTS, **options)
    with compilations() as seen:
        second = generate(*others, PROMPTS, **options)
    assert first.tokens != second.tokens
    assert seen == []


def test_the_counter_of_compilations_counts():
    with compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(np.arange(11))
    assert len(seen) == 1


def test_caches_are_donated_and_never_copied(pair: Any, monkeypatch: pytest.MonkeyPatch):
    run, compiled, packed = _round._run, [], []

    def lowered(*arguments: Any) -> Any:
        if not compiled:
            compiled.append((run.lower(*arguments).compile(), arguments[2]))
        answer = run(*arguments)
        packed.append(answer[0])
        return answer

    monkeypatch.setattr(_round, "_run", lowered)
    result = generate(*pair, PROMPTS, max_new_tokens=8, lookahead=2)
    (code, arrays), *_ = compiled
    leaves = jax.tree.leaves(arrays)
    assert all(leaf.is_deleted() for leaf in leaves)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert code.memory_analysis().alias_size_in_bytes == size
    shape = ",".join(map(str, leaves[0].shape))
    text = code.as_text()
    assert f"f32[{shape}]" in text
    assert not [
        line for line in text.splitlines() if f"f32[{shape}]" in line.split(" = ")[-1][:60] and " copy(" in line
    ]
    assert len(packed) == result.stats.rounds > 1  # one transfer a round


def test_all_that_the_host_reads_of_a_round_is_one_small_array(pair: Any, monkeypatch: pytest.MonkeyPatch):
    run, answers = _round._run, []
    monkeypatch.setattr(_round, "_run", lambda *arguments: answers.append(run(*arguments)) or answers[-1])
    target, draft = pair
    decoder = Decoder(target, draft, lookahead=2, logprobs="raw")
    state, info = decoder.step(decoder.init(PROMPTS, max_new_tokens=8))
    ((packed, like, arrays),) = answers
    assert packed.nbytes < 200 * len(PROMPTS)
    assert like.size == 0
    # What else comes out are the caches, which nobody looks at.
    cache, draft_state = state.carry.target_cache, state.carry.drafter_state
    assert (cache.arrays, draft_state.cache.arrays) == arrays
    on_host = (*info, cache.lengths, draft_state.cache.lengths, draft_state.num_held)
    assert not [x for x in on_host if isinstance(x, jax.Array)]


@pytest.mark.parametrize("drafter", ["model", "numpy table"])
def test_law_of_the_compiled_round_is_the_targets(folder: Callable[..., Path], drafter: str):
    """Enumerated through ordered callbacks, with rounds of K = 2 and K = 0 by turns."""
    target, model = load(folder(**SMALL)), load(folder(seed=1, **SMALL))
    draft: Model[Any] = model if drafter == "model" else TableModel([0.2, 0.5, 0.3])
    (law,) = enumerate_laws(
        lambda source: Decoder(target, draft, randomness=source), [Scenario((1, 0), 3)], schedule=(2, 0), batch_size=64
    )
    expected = outcome_law(one_token_law(target), one_token_law(draft), (1, 0), max_new_tokens=3, schedule=(2, 0))
    assert set(law.outcomes) == set(expected)
    assert abs(law.mass - 1) < 1e-5
    assert 0.5 * sum(abs(law.outcomes[key] - expected[key]) for key in expected) < 2e-6
    assert law.num_paths > 50


def test_what_a_randomness_raises_comes_out_of_the_round(pair: Any):
    class Broken:
        def begin_round(self, *_: Any) -> Any:
            return self

        def accept(self, *_: Any) -> Any:
            raise LookupError("no answer")

        categorical = accept

    with pytest.raises(LookupError, match="no answer"):
        generate(*pair, PROMPTS, max_new_tokens=4, lookahead=2, randomness=Broken())


def test_a_row_without_a_law_is_named(pair: Any):
    target, draft = pair
    head = target.params["embedding"]

    def broken(params: Any, hidden: Any) -> Any:
        logits = target.functions.head_fn(params, hidden)
        return jnp.where(jnp.arange(logits.shape[0])[:, None, None] == 1, jnp.nan, logits)

    ours = JaxModel(target.functions.apply_fn, target.params, target._init_cache_fn, V, head_fn=broken)
    with pytest.raises(NonFiniteLogitsError, match="target .* row 1, position 1") as caught:
        generate(ours, draft, PROMPTS, max_new_tokens=4, lookahead=2)
    assert (caught.value.row, caught.value.model) == (1, "target")
    assert not head.is_deleted()


def test_rows_past_the_drafts_context_propose_nothing(folder: Callable[..., Path], pair: Any, numpy_pair: Any):
    short = {"seed": 1, "num_hidden_layers": 1, "max_position_embeddings": 8}
    draft, numpy_draft = load(folder(**short)), NumpyModel(folder(**short))
    options: dict[str, Any] = {"max_new_tokens": 10, "lookahead": 3}
    result = generate(pair[0], draft, PROMPTS, **options)
    expected = generate(numpy_pair[0], numpy_draft, PROMPTS, **options)
    assert result.tokens == expected.tokens
    assert result.stats.proposed == expected.stats.proposed


def call(
    target: JaxModel,
    drafter: Any,
    capacity: int,
    held: int,
    length: int,
    *,
    draft_capacity: int = 16,
    lookahead: int = 2,
    **options: Any,
) -> Any:
    cache = target.init_cache(1, capacity)
    _, cache = target.score(cache, np.ones((1, held), int), num_logits=0)
    state = None if drafter is None else drafter.init(1, draft_capacity)
    tokens = np.ones((1, max(length, 8)), np.int32)
    run = target.compile_round(drafter, Sampling(), lookahead)
    return run(
        target, drafter, RoundCarry(cache, state, None), Context(tokens, np.array([length])), np.array([5]), None,
        CounterSource(0).begin_round([0], [0], lookahead), lookahead=lookahead, sampling=Sampling(), **options,
    )  # fmt: skip


def test_a_round_that_the_caches_cannot_hold_is_refused(pair: Any):  # fault #181
    target, draft = pair
    with pytest.raises(CacheError, match="row 0 of the target's cache holds 2 tokens and cannot be rolled back to 3"):
        call(target, PromptLookup(), 8, held=2, length=4)
    with pytest.raises(CacheError, match="row 0 of the target's cache needs room for 6 tokens .* capacity is 5"):
        call(target, PromptLookup(), 5, held=3, length=4)
    with pytest.raises(CacheError, match="row 0 of the draft's cache needs room for 5 tokens .* capacity is 4"):
        call(target, ModelDrafter(draft), 16, held=3, length=4, draft_capacity=4, lookahead=1)
    with pytest.raises(CacheError, match="row 0 of the draft's cache needs room for 6 tokens .* capacity is 5"):
        call(target, ModelDrafter(draft), 16, held=3, length=4, draft_capacity=5, lookahead=3)


def test_what_a_trace_cannot_do_is_refused(pair: Any):
    target, draft = pair
    with pytest.raises(CapabilityError, match="`validate`"):
        call(target, PromptLookup(), 8, held=3, length=4, validate=True)
    run = draft.compile_round(None, Sampling(), 0)
    with pytest.raises(ValueError, match="compiled for"):
        run(target, None, None, None, None, None, None, lookahead=0, sampling=Sampling())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_compile_to_the_eager_tokens(folder: Callable[..., Path], dtype: str, x64: None):
    target = load(folder(**SMALL), dtype=dtype)
    draft = load(folder(seed=1, **SMALL), dtype="float32" if dtype == "float64" else dtype)
    options: dict[str, Any] = {"max_new_tokens": 8, "lookahead": 2, "logprobs": "raw"}
    compiled = generate(target, draft, [[1], [2, 0]], **options)
    assert compiled.tokens == generate(EagerModel(target), draft, [[1], [2, 0]], **options).tokens
    if dtype == "float64":
        expected = generate(
            NumpyModel(folder(**SMALL), dtype="float64"), NumpyModel(folder(seed=1, **SMALL)), [[1], [2, 0]], **options
        )
        assert compiled.tokens == expected.tokens
        np.testing.assert_allclose(compiled.logprobs[0], expected.logprobs[0], rtol=0, atol=1e-10)


def test_a_target_that_scores_in_its_own_way_is_not_passed_over_by_a_compiled_round(folder: Callable[..., Path]):
    class Biased(JaxModel):
        def score(self, cache: Any, tokens: Any, /, *, num_logits: int | None = None) -> Any:
            logits, cache = super().score(cache, tokens, num_logits=num_logits)
            return logits.at[..., 3].add(100.0), cache

    target = Biased.from_pretrained(folder())
    assert generate(target, None, [0], max_new_tokens=4).tokens == [[3, 3, 3, 3]]


def test_probabilities_of_a_drafter_may_have_derivatives(pair: Any):
    torch = pytest.importorskip("torch")

    class Even:
        def init(self, batch_size: int, capacity: int) -> None:
            return None

        def propose(self, state: None, context: Any, lookahead: int, sampling: Any, randomness: Any) -> Any:
            batch_size = len(context.lengths)
            probs = torch.full((batch_size, lookahead, V), 1 / V, requires_grad=True)
            tokens = [
                randomness.categorical(probs[:, slot].detach(), Label(Purpose.DRAFT, slot)) for slot in range(lookahead)
            ]
            counts = np.full(batch_size, lookahead)
            return Proposal(np.stack([np.asarray(x) for x in tokens], axis=1), counts, probs), state

    result = generate(pair[0], Even(), [1, 2], max_new_tokens=6, lookahead=2)
    assert len(result.tokens[0]) == 6
