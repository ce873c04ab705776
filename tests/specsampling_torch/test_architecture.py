"""What a config alone tells: refusals by name, and masks of kinds that no tested family has."""

from types import SimpleNamespace
from typing import Any

import pytest

from specsampling import CapabilityError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specsampling_torch._architecture import refuse_config  # noqa: E402 (after importorskip)
from specsampling_torch._masks import MaskKind, Visibility  # noqa: E402 (after importorskip)
from specsampling_torch._text import TextGenerator  # noqa: E402 (after importorskip)


@pytest.mark.parametrize(
    "options",
    [{"position_embedding_type": "relative_key"}, {"position_embedding_type": "relative_key_query"}, {"alibi": True}],
)
def test_positions_that_come_from_padding_are_refused_by_name(options: dict[str, Any]):
    config = transformers.LlamaConfig(vocab_size=11, **options)
    with pytest.raises(CapabilityError, match="`llama` derives its positions from padding masks"):
        refuse_config(config)


def test_a_chunked_layer_sees_its_own_chunk_up_to_itself():
    mask = Visibility(torch.tensor([[4, 5], [1, 2]]), 6, torch.float32).mask(MaskKind(chunk=3))
    seen = (mask[:, 0] == 0).int().tolist()
    assert seen == [[[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]], [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]]


@pytest.mark.parametrize(("ids", "expected"), [(7, (2, 7)), ([7, 5], (2, 5, 7)), (None, (2,))])
def test_texts_end_with_the_tokens_of_the_generation_config_too(ids: Any, expected: tuple[int, ...]):
    module = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))
    generator = TextGenerator(SimpleNamespace(module=module), None, SimpleNamespace(eos_token_id=2))
    assert generator.end_tokens == expected
