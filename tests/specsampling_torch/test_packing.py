"""Packed weights and grouped attention: other layouts, the same logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsampling import CapabilityError, PromptLookup, generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_torch import TorchModel, _packing  # noqa: E402 (after importorskip)
from specsampling_torch._packing import PackedLinear, can_pack, group_heads, packed_copy  # noqa: E402 (after importorskip)


@pytest.fixture(autouse=True)
def packs_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tiny models of these tests packed too."""
    monkeypatch.setattr(_packing, "_SMALLEST", 0)


def ragged_logits(model: TorchModel) -> Any:
    """Logits of a block that follows rows of 5 and 2 tokens."""
    rng = np.random.default_rng(3)
    _, cache = model.score(model.init_cache(2, 16), rng.integers(11, size=(2, 5)), num_logits=0)
    logits, _ = model.score(model.rollback(cache, np.array([5, 2])), rng.integers(11, size=(2, 4)))
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPT-NeoX", "Mixtral", "Gemma 2, alternating"])
def test_packed_weights_give_the_same_logits(build: Any, family: str, dtype: str):
    module = build(family, dtype)
    if not any(can_pack(part) for part in module.modules()):
        pytest.skip(f"oneDNN multiplies no {dtype} on this CPU")
    plain, packed = ragged_logits(TorchModel(module)), ragged_logits(TorchModel(module, pack_weights=True))
    # Sums in another order: a few units in the last place of logits of size 10.
    tolerance = {"float32": 2e-5, "bfloat16": 0.3}[dtype]
    torch.testing.assert_close(packed, plain, atol=tolerance, rtol=0)


def test_the_module_given_stays_as_it_is(build: Any):
    module = build("Llama", "float32")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = TorchModel(module, pack_weights=True)
    assert any(isinstance(part, PackedLinear) for part in model.module.modules())
    assert not any(isinstance(part, PackedLinear) for part in module.modules())
    assert module.config._attn_implementation == "sdpa"
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert model.module.get_input_embeddings().weight is module.get_input_embeddings().weight


def test_no_weight_is_held_twice(build: Any, tmp_path: Path):
    module = build("Llama", "float32")
    module.save_pretrained(tmp_path)
    model = TorchModel.from_pretrained(tmp_path, device="cpu", pack_weights=True)
    assert not any(type(part) is torch.nn.Linear for part in model.module.modules())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral, window 3"])
def test_heads_of_a_group_attend_as_further_queries_of_their_keys(build: Any, family: str):
    module = build(family)
    grouped = TorchModel(packed_copy(module))
    group_heads(grouped.module)
    torch.testing.assert_close(ragged_logits(grouped), ragged_logits(TorchModel(module)), atol=1e-12, rtol=0)


def test_the_packed_module_keeps_its_windows_when_it_is_called_by_itself(build: Any):
    module = build("Mistral, window 3", "float32")
    text = torch.arange(10)[None]
    packed = TorchModel(module, pack_weights=True).module
    expected = module(input_ids=text, use_cache=False).logits
    torch.testing.assert_close(packed(input_ids=text, use_cache=False).logits, expected, atol=2e-5, rtol=0)


def test_grouped_attention_copies_no_keys(build: Any, monkeypatch: pytest.MonkeyPatch):
    model = TorchModel(build("Llama", "float32"), pack_weights=True)
    attend, addresses = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        addresses.append((key.data_ptr(), value.data_ptr()))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    cache = model.init_cache(2, 16)
    for width in (1, 4):
        addresses.clear()
        _, cache = model.score(cache, np.ones((2, width), int))
        held = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.store.layers]
        assert addresses == held


def test_a_bias_is_added(build: Any):
    module = build("Qwen2", "float32")
    assert module.model.layers[0].self_attn.q_proj.bias.abs().max() > 0.1
    model = TorchModel(module, pack_weights=True)
    x = torch.randn(3, 16)
    for name in ("q_proj", "o_proj"):
        plain, packed = (getattr(m.model.layers[0].self_attn, name) for m in (module, model.module))
        assert isinstance(packed, PackedLinear)
        torch.testing.assert_close(packed(x), plain(x))


def test_small_layers_stay_as_they_are(build: Any, monkeypatch: pytest.MonkeyPatch):
    module = build("Llama", "float32")
    sizes = {part.weight.numel() for part in module.modules() if type(part) is torch.nn.Linear}
    for smallest in (min(sizes), max(sizes), max(sizes) + 1):
        monkeypatch.setattr(_packing, "_SMALLEST", smallest)
        parts = list(TorchModel(module, pack_weights=True).module.modules())
        assert {part.weight.numel() for part in parts if type(part) is torch.nn.Linear} == {
            size for size in sizes if size < smallest
        }
        assert any(isinstance(part, PackedLinear) for part in parts) == (smallest <= max(sizes))


def test_what_cannot_be_packed_is_refused(build: Any):
    with pytest.raises(CapabilityError, match="`pack_weights` needs linear layers on the CPU, in float32"):
        TorchModel(build("Llama"), pack_weights=True)


def test_layers_that_are_shared_or_replaced_stay(build: Any):
    """Hooks shard a layer, and subclasses are quantised ones: neither is a plain product."""

    class Other(torch.nn.Linear):
        pass

    module = build("Llama", "float32")
    first, second = module.model.layers
    first.mlp.up_proj = Other(16, 24, bias=False)
    second.mlp.up_proj.register_forward_hook(lambda layer, inputs, output: output)
    twin = packed_copy(module)
    assert type(twin.model.layers[0].mlp.up_proj) is Other
    assert type(twin.model.layers[1].mlp.up_proj) is torch.nn.Linear


def test_speculation_over_packed_weights_gives_the_plain_greedy_text(build: Any):
    from specsampling import Sampling

    model = TorchModel(build("Llama", "float32"), pack_weights=True)
    options: dict[str, Any] = {"max_new_tokens": 30, "sampling": Sampling(temperature=0.0)}
    prompts = [[1, 2, 3, 1, 2], [4]]
    plain = generate(model, None, prompts, **options)
    assert generate(model, PromptLookup(), prompts, **options).tokens == plain.tokens
