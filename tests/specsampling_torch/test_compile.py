"""Compiled forward passes: the same tokens, and nothing compiled on the way."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import CapabilityError, PromptLookup, generate

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specsampling_torch import TorchModel, _compile  # noqa: E402 (after importorskip)
from specsampling_torch._compile import bucket  # noqa: E402 (after importorskip)


def num_compiled() -> int:
    """How many graphs PyTorch has compiled in this process."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and count as always, but run the graphs without C++, which takes long to compile."""
    monkeypatch.setattr(_compile, "BACKEND", "aot_eager")


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")),
    reason="PyTorch compiles for the CPU with g++ or clang++",
)
# PyTorch's compiler imports a module of PyTorch's that defines a script method.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_gives_eager_tokens_and_nothing_is_compiled_after_warm_up(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Through the real compiler, in float64, from the same uniforms; rows differ in length and in when they end."""
    # A compilation that was interrupted leaves half a library in PyTorch's own cache, and every later one fails.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module = build("Llama", num_hidden_layers=1)
    eager, compiled = TorchModel(module), TorchModel(module, compile=True)
    assert compiled.warm_up(batch_size=2, capacity=40, lookahead=2) == 3
    before = num_compiled()
    for seed in (0, 1):
        options: dict[str, Any] = {"max_new_tokens": [30, 9], "lookahead": 2, "seed": seed}
        prompts = [[1, 2, 3], [4, 5]]
        expected = generate(eager, PromptLookup(), prompts, **options)
        assert generate(compiled, PromptLookup(), prompts, **options).tokens == expected.tokens
        expected = generate(eager, eager, prompts, **options)
        assert generate(compiled, compiled, prompts, **options).tokens == expected.tokens
    assert num_compiled() == before


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Gemma 3, alternating"])
@pytest.mark.usefixtures("traced")
def test_graphs_give_the_eager_logits_of_ragged_rows(build: Any, family: str):
    module = build(family)
    results = []
    for model in (TorchModel(module), TorchModel(module, compile=True)):
        rng = np.random.default_rng(5)
        _, cache = model.score(model.init_cache(2, 30), rng.integers(11, size=(2, 9)), num_logits=0)
        cache = model.rollback(cache, np.array([9, 4]))
        for width in (1, 2, 2):
            logits, cache = model.score(cache, rng.integers(11, size=(2, width)))
            results.append(logits)
            cache = model.rollback(cache, cache.lengths - np.array([0, width - 1]))
    for eager, compiled in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(compiled, eager, atol=2e-6, rtol=0)  # normalisation inside is in float32


@pytest.mark.usefixtures("traced")
def test_a_text_that_grows_past_its_bucket_meets_the_next_graph(build: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compile, "SHORTEST_BUCKET", 8)
    module = build("Llama", num_hidden_layers=1)
    model = TorchModel(module, compile=True)
    spans = sorted({bucket(length) for length in range(1, 17)})
    assert spans == [8, 12, 16]
    assert model.warm_up(capacity=14, lookahead=1) == 2 * len(spans)
    before = num_compiled()
    options: dict[str, Any] = {"max_new_tokens": 11, "lookahead": 1}
    expected = generate(TorchModel(module), PromptLookup(), [1, 2, 1], **options)
    assert generate(model, PromptLookup(), [1, 2, 1], **options).tokens == expected.tokens
    assert num_compiled() == before


@pytest.mark.usefixtures("traced")
def test_one_graph_serves_every_capacity(build: Any):
    model = TorchModel(build("Llama", num_hidden_layers=1), compile=True)
    for capacity in (3, 50, 200, 1000):
        model.score(model.init_cache(1, capacity), [[1]])
        if capacity == 3:
            before = num_compiled()
    assert num_compiled() == before


@pytest.mark.usefixtures("traced")
def test_blocks_that_come_once_stay_eager(build: Any):
    """A prompt's last chunk has any width: compiling it would cost seconds for one call."""
    model = TorchModel(build("Llama", num_hidden_layers=1), compile=True)
    cache = model.init_cache(1, 60)
    before = num_compiled()
    for width in (7, 5, 3, 5):
        _, cache = model.score(cache, np.ones((1, width), int))
    _, cache = model.score(cache, np.ones((1, 5), int), num_logits=0)
    assert num_compiled() == before
    _, cache = model.score(cache, np.ones((1, 5), int))
    assert num_compiled() == before + 1


@pytest.mark.usefixtures("traced")
def test_padding_past_a_table_of_positions_is_accepted(build: Any):
    module = build("GPT-2", n_positions=6)
    text = np.array([[1, 2, 3, 4, 5, 6]])
    expected, _ = TorchModel(module).score(TorchModel(module).init_cache(1, 6), text)
    model = TorchModel(module, compile=True)
    _, cache = model.score(model.init_cache(1, 9), text[:, :5], num_logits=0)
    logits, _ = model.score(cache, np.array([[6, 0]]))
    torch.testing.assert_close(logits[:, 0], expected[:, 5], atol=1e-6, rtol=0)


def test_buckets_hold_their_lengths_and_are_at_most_half_as_long_again():
    for length in range(1, 5000):
        assert bucket(length) >= length
        assert length <= 128 or bucket(length) <= 1.5 * length
        assert bucket(length) <= bucket(length + 1)


@pytest.mark.usefixtures("traced")
def test_a_compiled_model_keeps_its_batch_size(build: Any):
    model = TorchModel(build("Llama"), compile=True)
    assert not hasattr(model, "select")
    assert not model.capabilities.select
    assert hasattr(TorchModel(build("Llama")), "select")


def test_without_a_compiler_the_message_says_what_is_missing(build: Any):
    from torch._inductor import config

    no_compiler = config.patch({"cpp.cxx": ("/nowhere/c++",)})
    with no_compiler, pytest.raises(CapabilityError, match=r"needs a C\+\+ compiler.*install g\+\+"):
        TorchModel(build("Llama"), compile=True)


class Branching(torch.nn.Module):
    """A module whose work depends on what its numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)

    def forward(self, tokens: Any, cache: Any) -> Any:
        x = self.embed(tokens)
        cache.update(x[:, None], x[:, None], 0)
        return x @ self.embed.weight.T if x.sum() > 0 else x @ self.embed.weight.T * 2


@pytest.mark.usefixtures("traced")
def test_a_module_that_is_no_single_graph_is_refused_by_name():
    model = TorchModel(
        Branching(), forward=lambda module, tokens, positions, mask, cache, n: module(tokens, cache), compile=True
    )
    with pytest.raises(CapabilityError, match="Branching cannot be compiled as one graph"):
        model.score(model.init_cache(1, 4), [[1]])


def test_what_cannot_be_compiled_is_refused(build: Any):
    with pytest.raises(CapabilityError, match="recurrent"):
        TorchModel(build("Mamba 2"), compile=True)
    with pytest.raises(CapabilityError, match="experts in a Python loop"):
        TorchModel(build("Mixtral"), compile=True)
    with pytest.raises(CapabilityError, match="`warm_up` is for models made with `compile=True`"):
        TorchModel(build("Llama")).warm_up(capacity=8)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("widths", "taken"),
    [
        ([4, 4], [False, True]),
        ([4, 1, 1, 4, 1, 4], [False, True, True, True, True, True]),  # rounds without a proposal between
        ([9, 1, 2, 1, 1, 1, 9], [False, True, True, True, True, True, False]),  # a draft's first blocks of two texts
        ([4, 6, 4, 6], [False, False, False, False]),  # what several texts begin with
    ],
    ids=str,
)
def test_widths_that_soon_come_again_are_compiled(build: Any, widths: list[int], taken: list[bool]):
    compiled = TorchModel(build("Llama", num_hidden_layers=1), compile=True)._compiled
    assert [compiled.takes(width, width) for width in widths] == taken
    assert not compiled.takes(4, 0)
    assert not compiled.takes(_compile.WIDEST_BLOCK + 1, 1)
