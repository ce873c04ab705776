"""What the contract leaves to an adapter, and what it must refuse."""

from typing import Any

import numpy as np
import pytest

from specsampling import CacheError, CapabilityError, Sampling, generate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_torch import TorchModel  # noqa: E402 (after importorskip)


@pytest.fixture(scope="module")
def model(build: Any) -> TorchModel:
    return TorchModel(build("Llama"))


def addresses(cache: Any) -> list[int]:
    return [tensor.data_ptr() for layer in cache.store.layers for tensor in (layer.keys, layer.values)]


def test_memory_is_allocated_once_and_a_rollback_moves_nothing(model: TorchModel):
    cache = model.init_cache(2, 8)
    before = addresses(cache)
    _, cache = model.score(cache, np.array([[1, 2, 3], [4, 5, 6]]))
    held = [layer.keys.clone() for layer in cache.store.layers]
    cache = model.rollback(cache, np.array([1, 3]))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.store.layers, held, strict=True))
    _, cache = model.score(cache, np.array([[1], [2]]))
    assert addresses(cache) == before


@pytest.mark.parametrize("lengths", [(3, 3), (1, 3)])
def test_attention_is_given_a_view_of_the_span_in_use(model: TorchModel, lengths: tuple[int, int]):
    """So that work grows with the text and not with the capacity."""
    _, cache = model.score(model.init_cache(2, 64), np.array([[1, 2, 3], [4, 5, 6]]))
    cache = model.rollback(cache, np.array(lengths))
    layer, seen = cache.store.layers[0], []
    update = layer.update
    layer.update = lambda *args, **kwargs: seen.append(update(*args, **kwargs)) or seen[-1]
    model.score(cache, np.array([[1, 2], [1, 2]]))
    ((keys, values),) = seen
    assert keys.shape[2] == values.shape[2] == 5
    assert keys.data_ptr() == layer.keys.data_ptr()


def test_without_logits_the_head_is_never_called(build: Any):
    module = build("Llama")
    model = TorchModel(module)
    sizes = []
    module.lm_head.register_forward_hook(lambda head, inputs, output: sizes.append(inputs[0].shape[1]))
    for num_logits in (0, 1, 2, None):
        model.score(model.init_cache(1, 4), np.array([[1, 2, 3]]), num_logits=num_logits)
    assert sizes == [1, 2, 3]


def test_padding_past_a_table_of_positions_is_accepted(build: Any):
    model = TorchModel(build("GPT-2", n_positions=6))
    assert model.max_length == 6
    text = np.array([[1, 2, 3, 4, 5, 6]])
    expected, _ = model.score(model.init_cache(1, 6), text)
    cache = model.init_cache(1, 9)
    _, cache = model.score(cache, np.array([[1, 2, 3, 4, 5, 0, 0, 0]]), num_logits=0)
    logits, _ = model.score(model.rollback(cache, np.array([5])), text[:, 5:])
    torch.testing.assert_close(logits[0, 0], expected[0, 5])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_end_where_rope_would_turn_what_is_cached_another_way(build: Any, kind: str):
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 16}
        model = TorchModel(build("Phi-3", rope_parameters=rope, original_max_position_embeddings=16))
    else:
        model = TorchModel(build("Llama", rope_parameters=rope, max_position_embeddings=16))
    assert model.max_length == 16
    text = np.random.default_rng(0).integers(11, size=(2, 16))
    expected, _ = model.score(model.init_cache(2, 16), text)
    cache = model.init_cache(2, 24)
    _, cache = model.score(cache, np.concatenate([text[:, :14], np.zeros((2, 8), int)], axis=1), num_logits=0)
    logits, _ = model.score(model.rollback(cache, np.array([14, 14])), text[:, 14:])
    torch.testing.assert_close(logits, expected[:, 14:])


def test_values_of_another_row_or_block_are_no_part_of_it(model: TorchModel):
    cache = model.init_cache(2, 4)
    logits, cache = model.score(cache, np.array([[1, 2], [3, 4]]))
    logits.fill_(torch.nan)
    again, _ = model.score(model.rollback(cache, np.array([0, 0])), np.array([[1, 2], [3, 4]]))
    assert torch.isfinite(again).all()


def test_gradients_are_not_kept(build: Any):
    module = build("Llama")
    logits, _ = TorchModel(module).score(TorchModel(module).init_cache(1, 2), np.array([[1]]))
    assert not logits.requires_grad


def test_rows_and_blocks_may_be_empty(model: TorchModel):
    logits, cache = model.score(model.init_cache(2, 4), np.zeros((2, 0), int))
    assert tuple(logits.shape) == (2, 0, 11)
    cache = model.select(cache, np.array([], dtype=int))
    logits, _ = model.score(cache, np.zeros((0, 1), int))
    assert tuple(logits.shape) == (0, 1, 11)


class Attention(torch.nn.Module):
    """One layer of attention between an embedding and a head: a module that transformers knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(7, 8), torch.nn.Embedding(32, 8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 7)

    def forward(self, tokens: Any, positions: Any, mask: Any, cache: Any, num_logits: int) -> Any:
        x = self.embed(tokens) + self.place(positions)
        queries, keys, values = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        keys, values = cache.update(keys, values, 0)
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.head((x + mixed.transpose(1, 2).flatten(2))[:, x.shape[1] - num_logits :])


def plain(module: Attention, *arguments: Any) -> Any:
    return module(*arguments)


@pytest.mark.slow
def test_any_module_works_through_a_function_of_its_own():
    from specsampling import Capabilities
    from specsampling_conformance import check_backend

    torch.manual_seed(0)
    model = TorchModel(Attention(), forward=plain, max_length=32)
    assert (model.vocab_size, model.max_length, model.max_rollback) == (7, 32, None)
    report = check_backend(lambda checkpoint, dtype: model, Capabilities(select=True), tier="contract")
    assert report.failures == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, c: m.score(c, np.array([[1, 11], [0, 0]])), ValueError, r"`tokens` must lie in \[0, 11\), got 11"),
        (lambda m, c: m.score(c, np.array([[1, 1], [0, -1]])), ValueError, "got -1 in row 1, column 1"),
        (lambda m, c: m.score(c, np.array([[1.0], [0.0]])), TypeError, "integer"),
        (lambda m, c: m.score(c, np.array([[1]])), ValueError, r"shape \(B, T\) with B = 2, got \(1, 1\)"),
        (lambda m, c: m.score(c, np.array([[1], [1]]), num_logits=2), ValueError, "between 0 and the block's 1"),
        (lambda m, c: m.score(c, np.ones((2, 3), int)), CacheError, "row 0 holds 3 tokens and cannot take 3 more"),
        (lambda m, c: m.rollback(c, np.array([1, 4])), CacheError, "row 1 holds 3 tokens"),
        (lambda m, c: m.rollback(c, np.array([-1, 1])), CacheError, "row 0 holds 3 tokens"),
        (lambda m, c: m.rollback(c, np.array([1])), ValueError, "shape"),
        (lambda m, c: m.rollback(c, np.array([1.0, 1.0])), TypeError, "integer"),
        (lambda m, c: m.select(c, np.array([2])), ValueError, r"lie in \[0, 2\), got \[2\]"),
        (lambda m, c: m.select(c, np.array([[1]])), ValueError, "one-dimensional"),
        (lambda m, c: m.select(c, np.array([1.0])), TypeError, "integer"),
        (lambda m, c: m.init_cache(-1, 2), ValueError, "non-negative"),
    ],
)
def test_wrong_arguments_are_named(model: TorchModel, call: Any, error: type[Exception], message: str):
    _, cache = model.score(model.init_cache(2, 5), np.array([[1, 2, 3], [4, 5, 6]]))
    with pytest.raises(error, match=message):
        call(model, cache)


def test_a_recurrent_model_goes_back_as_far_as_it_says(build: Any):
    model = TorchModel(build("Mamba 2"), max_rollback=3)
    _, cache = model.score(model.init_cache(2, 9), np.ones((2, 6), int))
    with pytest.raises(CapabilityError, match="row 1 cannot be rolled back to 2 tokens, only to 3"):
        model.rollback(cache, np.array([3, 2]))
    cache = model.rollback(cache, np.array([3, 6]))
    with pytest.raises(CapabilityError, match="row 0 cannot be rolled back to 2"):
        model.rollback(cache, np.array([2, 6]))


def test_a_lookahead_beyond_a_recurrent_models_rollback_is_refused_before_any_work(build: Any):
    model = TorchModel(build("Mamba 2"), max_rollback=3)
    with pytest.raises(CapabilityError, match="`max_rollback` is 3"):
        generate(model, model, [[1]], max_new_tokens=4, lookahead=3)
    assert len(generate(model, model, [[1]], max_new_tokens=4, lookahead=2).tokens[0]) == 4


def test_max_rollback_is_refused_where_it_would_mean_nothing(build: Any):
    with pytest.raises(ValueError, match="is for recurrent models"):
        TorchModel(build("Llama"), max_rollback=3)
    with pytest.raises(ValueError, match="at least 1"):
        TorchModel(build("Mamba 2"), max_rollback=0)


def test_out_of_memory_says_how_much_the_cache_needs(model: TorchModel):
    with pytest.raises(
        CacheError, match=r"1000000 rows and 1000000000 tokens each needs 244,140,625,000 MiB \(256 bytes a"
    ):
        model.init_cache(10**6, 10**9)


def test_out_of_memory_of_a_recurrent_model_counts_its_snapshots(build: Any):
    model = TorchModel(build("Mamba 2"), max_rollback=3)
    cache = model.init_cache(2, 4)
    held = sum(ring.nbytes for ring in cache.store._rings) // 4 * 5 // 2  # four snapshots and the state, of two rows
    with pytest.raises(CacheError, match=rf"\(0 bytes a token, {held} bytes of snapshots a row\)"):
        model.init_cache(10**9, 10)


def test_out_of_memory_of_an_accelerator_says_the_same(model: TorchModel, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CacheError, match=r"8 rows and 4096 tokens each needs 8 MiB \(256 bytes a token\)"):
        model.init_cache(8, 4096)


SMALL = {"vocab_size": 11, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL)), "`t5` is an encoder-decoder"),
        (
            lambda: transformers.OpenAIGPTLMHeadModel(
                transformers.OpenAIGPTConfig(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
            ),
            "`openai-gpt` .* takes no cache",
        ),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2)
            ),
            "`bloom` .* cannot be called with a mask and positions",
        ),
        (
            lambda: transformers.BertLMHeadModel(
                transformers.BertConfig(
                    vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            ),
            "`bert` .* outside the tested families",
        ),
        (
            lambda: transformers.RwkvForCausalLM(
                transformers.RwkvConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2)
            ),
            "`rwkv` .* takes no cache",
        ),
        (lambda: torch.nn.Linear(2, 2), "any other module needs `forward`"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_any_work(module: Any, message: str):
    with pytest.raises(CapabilityError, match=message):
        TorchModel(module())


def test_attention_that_takes_no_mask_is_refused(build: Any):
    with pytest.raises(CapabilityError, match="'flex_attention' attention"):
        TorchModel(build("Llama", attention="flex_attention"))


def test_an_untested_family_is_held_against_its_own_forward_pass(build: Any, monkeypatch: pytest.MonkeyPatch):
    from specsampling_torch import _architecture, _masks

    monkeypatch.setattr(_architecture, "PROVEN", frozenset())
    TorchModel(build("Llama"))
    monkeypatch.setattr(_masks.torch, "finfo", lambda dtype: type("finfo", (), {"min": 0.0}))
    with pytest.raises(CapabilityError, match="outside the tested families.* silently wrong"):
        TorchModel(build("Llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sampled_text_is_plausible_in_every_dtype(build: Any, dtype: str):
    model = TorchModel(build("Llama", dtype))
    result = generate(model, model, [[1, 2], [3]], max_new_tokens=12, sampling=Sampling(temperature=0.8, top_p=0.9))
    assert [len(row) for row in result.tokens] == [12, 12]
    assert result.stats.acceptance_rate > 0.8
