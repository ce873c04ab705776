"""Every family: the logits of transformers' own forward pass, whatever the calls, and the suite's contract and law."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsampling import Capabilities, PromptLookup, Sampling, generate

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specsampling_conformance import check_backend  # noqa: E402 (after importorskip)
from specsampling_torch import TorchModel  # noqa: E402 (after importorskip)

from .conftest import FAMILIES, RECURRENT  # noqa: E402 (after importorskip)

ROWS, LENGTH = 3, 18
# float32 inside, whatever the dtype: eager attention's softmax, and the recurrences.
EAGER = {"Gemma 2, alternating", *RECURRENT}


@pytest.fixture(scope="module", params=[(family, attention) for family in FAMILIES for attention in (None, "eager")],
                ids=lambda param: "-".join(filter(None, param)))  # fmt: skip
def case(request: pytest.FixtureRequest, build: Any) -> Any:
    """A model, a text of three rows and the logits of one forward pass without a cache."""
    family, attention = request.param
    module = build(family, attention=attention)
    text = np.random.default_rng(7).integers(11, size=(ROWS, LENGTH))
    with torch.no_grad():
        own = module(input_ids=torch.as_tensor(text), use_cache=False).logits
    assert np.ptp(own.numpy()) > 3, "logits this flat would not tell faults"
    tolerance = 1e-5 if attention == "eager" or family in EAGER else 1e-12
    return TorchModel(module), text, own.numpy(), tolerance


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_are_those_of_transformers_own_forward_after_any_calls(case: Any, data: st.DataObject):
    model, text, own, tolerance = case
    cache = model.init_cache(ROWS, LENGTH)
    rows = np.arange(ROWS)
    for _ in range(data.draw(st.integers(2, 8), "calls")):
        lengths = cache.lengths
        width = data.draw(st.integers(1, 4), "width")
        if lengths.max() + width <= LENGTH:
            num_logits = data.draw(st.integers(0, width), "num_logits")
            at = lengths[:, None] + np.arange(width)
            logits, cache = model.score(cache, text[rows[:, None], at], num_logits=num_logits)
            np.testing.assert_allclose(
                logits.numpy(), own[rows[:, None], at[:, width - num_logits :]], rtol=0, atol=tolerance
            )
        floors = np.zeros_like(lengths) if cache.floors is None else cache.floors
        kept = [data.draw(st.integers(int(low), int(high))) for low, high in zip(floors, cache.lengths, strict=True)]
        cache = model.rollback(cache, np.array(kept))
        if data.draw(st.booleans(), "select") and len(rows) > 1:
            chosen = np.array(data.draw(st.permutations(range(len(rows)))))[: data.draw(st.integers(1, len(rows)))]
            rows, cache = rows[chosen], model.select(cache, chosen)


# What of the suite depends on the architecture: the contract, and the law under blocks of every width with a draft that
# lags, too. Settings and stops are the decoder's: `conformance(torch)` runs all of it on one family.
CHECKS = (
    "T0.*",
    *(f"T1.law.{name}" for name in ("fixed_lookahead", "growing_lookahead", "lookahead_then_none")),
    "T1.law.none_then_lookahead",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_contract_and_exact_law_hold(family: str, build: Any):
    model = TorchModel(build(family, "float32"))
    report = check_backend(lambda checkpoint, dtype: model, Capabilities(select=True), checks=CHECKS)
    assert report.failures == []
    assert len(report.checks) > len(CHECKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers_generate(family: str, build: Any):
    module = build(family)
    prompts = [[3, 1, 4, 1, 5], [2, 7], [9, 3, 9, 3, 9, 3, 9]]
    result = generate(
        TorchModel(module), PromptLookup(), prompts, max_new_tokens=16, lookahead=3, sampling=Sampling(temperature=0.0)
    )
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        own = module.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert tokens == own[0, len(prompt) :].tolist()
    assert result.stats.accepted > 0


@pytest.mark.parametrize("family", ["Llama", "Gemma 2, alternating", "Mixtral", "Mamba 2"])
def test_a_draft_of_the_same_weights_is_always_right(family: str, build: Any):
    """A draft cache that lacks a token, or holds one too many, would propose what the target rejects."""
    target, draft = TorchModel(build(family)), TorchModel(build(family))
    result = generate(
        target, draft, [[1, 2, 3], [4]], max_new_tokens=24, lookahead=4, sampling=Sampling(temperature=0.0)
    )
    assert result.stats.acceptance_rate == 1
