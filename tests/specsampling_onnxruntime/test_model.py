"""The model contract, on real graphs of every layout, against the NumPy backend's logits for the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsampling
from specsampling import CacheError, CapabilityError, PromptLookup, generate
from specsampling_numpy import NumpyModel
from specsampling_onnxruntime import OnnxModel, load
from specsampling_onnxruntime._buffers import DeviceBuffers, HostBuffers

CLOSE = 2e-5  # logits are of order ten; measured up to 8e-6


def rows_of(model: OnnxModel, wanted: int = 3) -> int:
    return model.capabilities.max_batch_size or wanted


class Both:
    """A model and the reference, called alike."""

    def __init__(self, model: OnnxModel, reference: NumpyModel, rows: int, capacity: int = 200) -> None:
        self.model, self.reference = model, reference
        self.rng = np.random.default_rng(0)
        self.cache = model.init_cache(rows, capacity)
        self.expected_cache = reference.init_cache(rows, capacity)

    def score(self, block: int, num_logits: int | None = None) -> float:
        """Score a random block with both, and return the largest difference."""
        tokens = self.rng.integers(0, 256, (len(self.cache.lengths), block))
        got, self.cache = self.model.score(self.cache, tokens, num_logits=num_logits)
        expected, self.expected_cache = self.reference.score(self.expected_cache, tokens, num_logits=num_logits)
        assert got.shape == expected.shape
        assert self.cache.lengths.tolist() == self.expected_cache.lengths.tolist()
        return float(abs(got - expected).max(initial=0))

    def rollback(self, *lengths: int) -> None:
        kept = lengths[: len(self.cache.lengths)]
        self.cache = self.model.rollback(self.cache, np.array(kept))
        self.expected_cache = self.reference.rollback(self.expected_cache, np.array(kept))

    def select(self, *rows: int) -> None:
        self.cache = self.model.select(self.cache, list(rows))
        self.expected_cache = self.reference.select(self.expected_cache, list(rows))


# fault #164 (several tokens behind a past) fault #174 (a rollback that does nothing) fault #179 (second step)
# fault #172 and #176 (a mask of the wrong length would be refused by the graph, a stale one be wrong)
def test_blocks_and_rollbacks_of_unequal_rows_give_the_logits_of_the_reference(
    model: OnnxModel, reference: NumpyModel
) -> None:
    both = Both(model, reference, rows_of(model))
    assert both.score(5, 2) < CLOSE
    both.rollback(5, 3, 1)
    assert both.score(1) < CLOSE
    assert both.score(4) < CLOSE
    both.rollback(6, 4, 0)
    assert both.score(3, 0) < CLOSE
    assert both.score(2, 1) < CLOSE
    both.rollback(0, 0, 0)
    assert both.score(2) < CLOSE


# fault #177: a kernel that takes "total - 1" and not "past" appends at the right place only for single tokens
def test_two_tokens_behind_five_equal_one_and_one(model: OnnxModel) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, (1, 7))
    _, cache = model.score(model.init_cache(1, 8), tokens[:, :5])
    together, _ = model.score(cache, tokens[:, 5:])
    _, cache = model.score(model.init_cache(1, 8), tokens[:, :5])
    first, cache = model.score(cache, tokens[:, 5:6])
    second, _ = model.score(cache, tokens[:, 6:])
    assert abs(together - np.concatenate([first, second], axis=1)).max() < CLOSE


def test_long_texts_outgrow_their_buffers_and_keep_what_they_hold(model: OnnxModel, reference: NumpyModel) -> None:
    both = Both(model, reference, rows_of(model))
    for _ in range(11):  # 55 tokens: past the first buffer's 64 when rows are padded
        assert both.score(5, 1) < CLOSE
    both.rollback(50, 20, 7)
    assert both.score(9, 9) < CLOSE


@pytest.mark.parametrize("layout", ["built", "past and present"])
def test_texts_longer_than_several_buffers(
    load_layout: Callable[..., OnnxModel], reference: NumpyModel, layout: str
) -> None:
    # Positions past the limit of 64 are padding to the contract; the reference rotates them, and so does `build`.
    both = Both(load_layout(layout), reference, 2, capacity=400)
    limit = 50 if layout == "past and present" else 330
    while both.cache.lengths.max() < limit:
        assert both.score(11, 1) < CLOSE
        if both.cache.lengths.max() % 3 == 0:
            both.rollback(int(both.cache.lengths[0]) - 1, int(both.cache.lengths[1]) - 2)


def test_rejected_tokens_are_compacted_away_in_the_past(
    load_layout: Callable[..., OnnxModel], reference: NumpyModel
) -> None:
    both = Both(load_layout("past and present"), reference, 2)
    widths = []
    for step in range(40):
        assert both.score(5) < CLOSE
        both.rollback(step + 1, max(step, 1))
        widths.append(both.cache.store.past[0].shape()[2])
    assert 32 < max(widths) <= 40 + 32 + 5  # not 200
    assert both.cache.store.mask.sum(axis=1).tolist() == both.cache.lengths.tolist()


def test_select_keeps_rows_in_the_order_given(model: OnnxModel, reference: NumpyModel) -> None:
    both = Both(model, reference, rows_of(model))
    both.score(5)
    both.rollback(5, 3, 1)
    both.select(*([2, 0] if rows_of(model) > 1 else [0]))
    assert both.score(3) < CLOSE
    both.select(*([1, 1, 0] if rows_of(model) > 1 else [0]))
    assert both.score(50) < CLOSE


def test_selected_rows_have_memory_of_their_own(load_layout: Callable[..., OnnxModel]) -> None:
    model = load_layout("built")
    _, cache = model.score(model.init_cache(2, 8), [[1, 2, 3], [4, 5, 6]])
    chosen = model.select(cache, [0, 0])
    before, chosen = model.score(chosen, [[7], [8]])
    expected, _ = model.score(model.init_cache(1, 8), [[1, 2, 3, 7]], num_logits=1)
    assert abs(before[0] - expected[0]).max() < CLOSE


def test_selected_rows_outgrow_their_buffers_too(load_layout: Callable[..., OnnxModel], reference: NumpyModel) -> None:
    both = Both(load_layout("built"), reference, 3)
    both.score(5)
    both.select(2, 0)
    assert both.score(59) < CLOSE  # fills the first buffer
    assert both.score(3) < CLOSE


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_buffers_of_a_device_keep_what_those_of_the_host_do(
    load_layout: Callable[..., OnnxModel], reference: NumpyModel, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    if on_device:  # what CUDA has, here on the CPU
        monkeypatch.setattr(
            "specsampling_onnxruntime._stores.new_buffers",
            lambda device, caches, batch_size, capacity: DeviceBuffers(device, caches, batch_size),
        )
    both = Both(load_layout("built"), reference, 4, capacity=400)
    kinds = {True: DeviceBuffers, False: HostBuffers}
    for rows, lengths in (([0, 1, 3], (60, 1, 30)), ([2, 0, 0], (9, 0, 100)), ([1, 2], (50, 0)), ([1], (70,))):
        assert both.score(50) < CLOSE
        assert both.score(20) < CLOSE  # has grown
        both.select(*rows)
        both.rollback(*(min(length, int(held)) for length, held in zip(lengths, both.cache.lengths, strict=True)))
        assert type(both.cache.store._buffers) is kinds[on_device]
    assert both.score(60) < CLOSE


def test_select_of_no_rows_and_scoring_them(model: OnnxModel) -> None:
    _, cache = model.score(model.init_cache(1, 8), [[1, 2]])
    empty = model.select(cache, [])
    logits, empty = model.score(empty, np.zeros((0, 3), dtype=np.int64), num_logits=2)
    assert logits.shape == (0, 2, 256)
    logits, empty = model.score(model.init_cache(0, 8), np.zeros((0, 3), dtype=np.int64))
    assert logits.shape == (0, 3, 256)


def test_a_block_of_no_tokens_changes_nothing(model: OnnxModel, reference: NumpyModel) -> None:
    both = Both(model, reference, rows_of(model))
    assert both.score(0) == 0
    assert both.score(3) < CLOSE
    assert both.score(0, 0) == 0
    assert both.score(1) < CLOSE


def test_rows_do_not_know_of_one_another(model: OnnxModel) -> None:
    if rows_of(model) == 1:
        pytest.skip("one row only")
    tokens = np.random.default_rng(2).integers(0, 256, (3, 6))
    together, _ = model.score(model.init_cache(3, 8), tokens)
    for row in range(3):
        alone, _ = model.score(model.init_cache(1, 8), tokens[row : row + 1])
        assert abs(together[row] - alone[0]).max() < CLOSE


def test_padding_past_the_context_limit_is_accepted(model: OnnxModel, reference: NumpyModel) -> None:
    both = Both(model, reference, 1)
    assert model.max_length == 64
    assert both.score(62, 1) < CLOSE
    logits, cache = model.score(both.cache, np.ones((1, 6), dtype=np.int64))
    assert logits.shape == (1, 6, 256)
    logits, cache = model.score(cache, np.ones((1, 2), dtype=np.int64))  # all of it past the limit
    assert logits.shape == (1, 2, 256)
    both.cache = model.rollback(cache, [62])
    assert both.score(2) < CLOSE


def test_logits_of_an_earlier_call_are_not_overwritten(model: OnnxModel) -> None:
    first, cache = model.score(model.init_cache(1, 8), [[1, 2]])
    kept = first.copy()
    model.score(cache, [[3, 4]])
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, c: m.score(c, [1, 2]), ValueError, r"`tokens` must have shape \(B, T\) with B = 1"),
        (lambda m, c: m.score(c, [[1], [2]]), ValueError, r"got \(2, 1\)"),
        (lambda m, c: m.score(c, [[1.0]]), TypeError, "`tokens` must be an integer array"),
        (lambda m, c: m.score(c, [[256]]), ValueError, r"\[0, 256\), got 256 in row 0, column 0"),
        (lambda m, c: m.score(c, [[0, -1]]), ValueError, "got -1 in row 0, column 1"),
        (lambda m, c: m.score(c, [[1, 2, 3]]), CacheError, "row 0 holds 2 tokens and cannot take 3 more"),
        (lambda m, c: m.score(c, [[1]], num_logits=2), ValueError, "`num_logits` must lie between 0 and"),
        (lambda m, c: m.score(c, [[1]], num_logits=-1), ValueError, "got -1"),
        (lambda m, c: m.rollback(c, [3]), CacheError, "row 0 holds 2 tokens and cannot be rolled back to 3"),
        (lambda m, c: m.rollback(c, [-1]), CacheError, "rolled back to -1"),
        (lambda m, c: m.rollback(c, [1, 1]), ValueError, r"`lengths` must have shape \(B,\) with B = 1"),
        (lambda m, c: m.rollback(c, [1.0]), TypeError, "`lengths` must be an integer array"),
        (lambda m, c: m.select(c, [1]), ValueError, r"`rows` must lie in \[0, 1\)"),
        (lambda m, c: m.select(c, [[0]]), ValueError, "`rows` must be one-dimensional"),
        (lambda m, c: m.select(c, [0.0]), TypeError, "`rows` must be an integer array"),
        (lambda m, c: m.init_cache(-1, 4), ValueError, "must be non-negative, got -1 and 4"),
    ],
)
def test_calls_out_of_range_are_refused_and_leave_the_cache_as_it_was(
    load_layout: Callable[..., OnnxModel], call: Callable[..., Any], error: type[Exception], message: str
) -> None:
    model = load_layout("built")
    _, cache = model.score(model.init_cache(1, 4), [[1, 2]])
    with pytest.raises(error, match=message):
        call(model, cache)
    got, _ = model.score(cache, [[3]])
    expected, _ = model.score(model.init_cache(1, 4), [[1, 2, 3]], num_logits=1)
    assert abs(got - expected).max() < CLOSE


def test_one_row_only_is_said_before_anything_runs(load_layout: Callable[..., OnnxModel]) -> None:
    model = load_layout("shared buffer")
    assert model.capabilities.max_batch_size == 1
    with pytest.raises(CapabilityError, match=r"serves a batch of 1, got 2 rows: its GroupQueryAttention .*`build`"):
        model.init_cache(2, 8)
    with pytest.raises(CapabilityError, match="got 2 rows"):
        model.select(model.init_cache(1, 8), [0, 0])


@pytest.mark.parametrize("draft", [None, "lookup", "self"])
def test_greedy_text_is_the_references_whatever_the_draft(
    model: OnnxModel, reference: NumpyModel, draft: str | None
) -> None:
    prompts = [[1, 2, 3, 1, 2], [9, 8], [5]][: rows_of(model)]
    drafter: Any = {None: None, "lookup": PromptLookup(), "self": model}[draft]
    sampling = specsampling.Sampling(temperature=0)
    got = generate(model, drafter, prompts, max_new_tokens=12, sampling=sampling)
    expected = generate(reference, None, prompts, max_new_tokens=12, sampling=sampling)
    assert got.tokens == expected.tokens


def test_a_pair_of_two_backends_samples_the_same_text(tiny: Path, checkpoint: Path, reference: NumpyModel) -> None:
    prompts = [[1, 2, 3], [4]]
    numpy_draft = NumpyModel(checkpoint)
    expected = generate(reference, numpy_draft, prompts, max_new_tokens=20, seed=5)
    assert generate(reference, load(checkpoint), prompts, max_new_tokens=20, seed=5).tokens == expected.tokens
    assert generate(load(tiny), numpy_draft, prompts, max_new_tokens=20, seed=5).tokens == expected.tokens


def test_a_draft_in_onnx_runtime_serves_a_target_in_pytorch(
    tiny: Path, checkpoint: Path, reference: NumpyModel
) -> None:
    torch_backend = pytest.importorskip("specsampling_torch")
    prompts = [[1, 2, 3], [4]]
    expected = generate(reference, NumpyModel(checkpoint), prompts, max_new_tokens=20, seed=5)
    target = torch_backend.load(tiny, device="cpu")
    assert generate(target, load(checkpoint), prompts, max_new_tokens=20, seed=5).tokens == expected.tokens


def test_load_takes_a_file_or_a_directory(graph: Callable[..., Path], tiny: Path) -> None:
    assert load(graph("built")).layout == load(tiny).layout == "in place"
    assert load(tiny).capabilities.dtypes == ("float32",)
    assert load(tiny, dtype="float16").capabilities.dtypes == ("float16",)
    with pytest.raises(ValueError, match="gives logits in float32, got `dtype` 'float16'"):
        load(graph("built"), dtype="float16")
    with pytest.raises(FileNotFoundError, match=r"no ONNX file '.*nothing.onnx'"):
        load(tiny / "nothing.onnx")
    with pytest.raises(TypeError, match="unexpected keyword"):
        load(tiny, colour="blue")


def test_the_registry_finds_it(tiny: Path) -> None:
    assert isinstance(specsampling.load_model("onnxruntime", tiny), OnnxModel)
