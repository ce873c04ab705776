"""The cache against the NumPy backend's, and what the host refuses."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsampling import CacheError, CapabilityError, bundled, load_model
from specsampling_numpy import NumpyModel

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from specsampling_jax import JaxModel, load  # noqa: E402
from specsampling_jax._functions import TracedModel, capacity_bucket, width_bucket  # noqa: E402

V = 7


@pytest.fixture(scope="module")
def model(folder: Callable[..., Path]) -> JaxModel:
    return load(folder())


@pytest.fixture(scope="module")
def reference(folder: Callable[..., Path]) -> NumpyModel:
    return NumpyModel(folder(), dtype="float64")


def block(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=shape)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_logits_equal_those_of_the_numpy_backend_on_the_bundled_pair(name: str):
    tokens = np.array([list(b"ROMEO:\nWhat light"), list(b"through yonder win")[:17]])
    ours, theirs = load(bundled(name)), load_model("numpy", bundled(name))
    logits, _ = ours.score(ours.init_cache(2, 20), tokens)
    expected, _ = theirs.score(theirs.init_cache(2, 20), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert logits.dtype == np.float32


@settings(max_examples=20)
@given(data=st.data())
def test_blocks_and_rollbacks_equal_the_numpy_backends(model: Any, reference: Any, data: st.DataObject):
    capacity, models = 9, (model, reference)
    caches = [each.init_cache(3, capacity) for each in models]
    for step in range(data.draw(st.integers(1, 5), label="calls")):
        room = capacity - int(caches[1].lengths.max())
        tokens = block(3, data.draw(st.integers(0, min(5, room)), label="T"), seed=step)
        wanted = data.draw(st.integers(0, tokens.shape[1]), label="num_logits")
        results = [each.score(cache, tokens, num_logits=wanted) for each, cache in zip(models, caches, strict=True)]
        caches = [cache for _, cache in results]
        assert results[0][0].shape == (3, wanted, V)
        np.testing.assert_allclose(results[0][0], results[1][0], rtol=0, atol=1e-4)
        lengths = np.array([data.draw(st.integers(0, int(length))) for length in caches[1].lengths])
        caches = [each.rollback(cache, lengths) for each, cache in zip(models, caches, strict=True)]
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist()


def test_a_block_that_does_not_fit_is_refused_and_the_last_slot_stays_as_it_was(model: JaxModel):  # fault #181
    _, cache = model.score(model.init_cache(2, 4), block(2, 4))
    cache = model.rollback(cache, [3, 4])
    before = [np.array(keys) for keys, _ in cache.arrays]
    with pytest.raises(CacheError, match="row 1 holds 4 tokens and cannot take 1 more: the cache's capacity is 4"):
        model.score(cache, block(2, 1))
    for (keys, _), held in zip(cache.arrays, before, strict=True):
        np.testing.assert_array_equal(keys, held)
    cache = model.rollback(cache, [3, 3])
    logits, _ = model.score(cache, block(2, 4)[:, 3:])
    expected, _ = model.score(model.init_cache(2, 4), block(2, 4))
    np.testing.assert_allclose(logits[:, 0], expected[:, 3], rtol=0, atol=1e-5)


def test_a_prompt_longer_than_the_capacity_is_refused_naming_both_before_any_trace(model: JaxModel):  # fault #182
    ours = JaxModel(lambda *_: pytest.fail("traced"), model.params, lambda *_: jnp.zeros(1), V)
    with pytest.raises(CacheError, match="cannot take 40 more: the cache's capacity is 33"):
        ours.score(ours.init_cache(1, 33), block(1, 40))


def test_capacity_ends_where_it_was_asked_to_and_not_at_the_bucket(model: JaxModel):
    cache = model.init_cache(1, 5)
    assert cache.arrays[0][0].shape[2] == capacity_bucket(5) == 32
    with pytest.raises(CacheError):
        model.score(cache, block(1, 6))


@pytest.mark.parametrize(("lengths", "message"), [([3, 5], "row 1 holds 4 .* 5"), ([-1, 4], "row 0 holds 4 .* -1")])
@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_rollback_to_what_is_not_there_names_row_and_lengths(model: Any, lengths: Any, message: str, asarray: Any):
    _, cache = model.score(model.init_cache(2, 8), block(2, 4))
    with pytest.raises(CacheError, match=message):
        model.rollback(cache, asarray(lengths))


@pytest.mark.parametrize("bad", [-1, V, 2**31])
def test_an_id_that_does_not_exist_is_refused_on_the_host_and_is_nan_on_a_device(model: JaxModel, bad: int):
    tokens = np.array([[1, 2], [3, bad]])
    with pytest.raises(ValueError, match=rf"in \[0, 7\), got {bad} in row 1, column 1"):
        model.score(model.init_cache(2, 8), tokens)
    if bad < 2**31:
        logits, _ = model.score(model.init_cache(2, 8), jnp.asarray(tokens))
        assert np.isnan(logits[1, 1]).all()
        assert np.isfinite(logits[0]).all()


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [([[1.0]], TypeError, "integer"), ([1], ValueError, r"\(B, T\) with B = 1"), ([[1], [2]], ValueError, "B = 1")],
)
def test_tokens_of_the_wrong_kind_are_refused(model: JaxModel, tokens: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        model.score(model.init_cache(1, 4), tokens)


def test_other_arguments_out_of_range_are_refused(model: JaxModel):
    cache = model.init_cache(1, 4)
    for call, message in (
        (lambda: model.init_cache(-1, 4), "non-negative, got -1 and 4"),
        (lambda: model.score(cache, [[1]], num_logits=2), "between 0 and the block's 1 tokens, got 2"),
        (lambda: model.rollback(cache, [1, 2]), "B = 1"),
        (lambda: JaxModel(print, {}, print, 0), "`vocab_size` must be a positive integer, got 0"),
        (lambda: JaxModel(print, {}, print, 3, max_length=0), "`max_length`"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: model.rollback(cache, [0.0]), "`lengths` must be an integer"),
        (lambda: JaxModel(print, {}, print, 3, device="cpu"), "`device` must be a jax.Device or a NamedSharding"),
        (lambda: JaxModel(None, {}, print, 3), "`apply_fn` must be callable"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_a_cache_larger_than_the_device_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch):
    class Small:  # JAX tells of no limit on CPUs
        process_index = id = 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 10_000}

        def __repr__(self) -> str:
            return "a small device"

    ours = JaxModel(print, {}, lambda b, c: jnp.zeros((b, c), jnp.float32), V)
    monkeypatch.setattr(JaxModel, "devices", frozenset({Small()}))
    message = "`batch_size` = 100 and `capacity` = 32 needs 12,800 bytes, and a small device has 10,000"
    with pytest.raises(CapabilityError, match=message):
        ours.init_cache(100, 20)


def test_buffers_are_donated_and_a_rollback_moves_nothing(model: JaxModel):
    cache = model.init_cache(2, 8)
    keys = cache.arrays[0][0]
    _, cache = model.score(cache, block(2, 3))
    assert keys.is_deleted()
    assert model.rollback(cache, [1, 2]).arrays is cache.arrays


class Counting:
    """A model of a few lines, that writes with an operation that clamps, and counts its traces."""

    def __init__(self) -> None:
        self.traces: list[int] = []
        self.heads: list[int] = []

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        return jnp.zeros((batch_size, capacity), jnp.int32)

    def apply(self, params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        self.traces.append(tokens.shape[1])
        write = jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))
        cache = write(cache, tokens, lengths)
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        seen = jnp.arange(cache.shape[1]) <= positions[:, :, None]
        return jnp.sum(jnp.where(seen, cache[:, None, :], 0), axis=-1, keepdims=True), cache  # running sums

    def head(self, params: Any, hidden: Any) -> Any:
        self.heads.append(hidden.shape[1])
        return hidden * params["row"]

    def model(self) -> JaxModel:
        return JaxModel(self.apply, {"row": jnp.arange(1.0, V + 1)}, self.init_cache, V, head_fn=self.head)


def test_an_apply_function_that_clamps_is_never_given_a_block_past_its_arrays():  # fault #181
    model = Counting().model()
    _, cache = model.score(model.init_cache(1, 32), block(1, 27), num_logits=0)
    logits, cache = model.score(cache, block(1, 5, seed=1))
    expected = int(block(1, 27).sum()) + np.cumsum(block(1, 5, seed=1))
    assert logits[0, :, 0].tolist() == expected.tolist()


def test_no_row_is_dropped_where_a_new_batch_size_would_compile_everything_anew(model: JaxModel):
    assert not hasattr(model, "select")
    assert not model.capabilities.select


def test_calls_compile_once_for_each_bucket():
    counting = Counting()
    model = counting.model()
    for capacity in (9, 20, 32):
        for width in range(1, min(capacity, 16) + 1):
            model.score(model.init_cache(2, capacity), block(2, width), num_logits=0)
    assert sorted(counting.traces) == [1, 2, 8, 16]
    assert [width_bucket(width) for width in (0, 1, 2, 3, 8, 9, 512)] == [0, 1, 2, 8, 8, 16, 512]


@contextlib.contextmanager
def scores_compiled() -> Iterator[list[str]]:
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Finished XLA compilation of jit(_score)"):
                seen.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield seen
    finally:
        logger.removeHandler(handler)


def test_blocks_at_the_end_of_a_cache_compile_nothing_anew_where_a_model_drops_padding(folder: Callable[..., Path]):
    ours, theirs = load(folder()), NumpyModel(folder(), dtype="float64")
    seen: list[list[str]] = []
    for widths in ((20, 4), (20, 5), (20, 7, 4), (27, 5)):  # the last two fill 32, and 8 more columns would pass it
        caches, start = [each.init_cache(2, 32) for each in (ours, theirs)], 0
        with scores_compiled() as compiled:
            for width in widths:
                tokens = block(2, 32)[:, start : start + width]
                (got, one), (expected, two) = (
                    each.score(cache, tokens) for each, cache in zip((ours, theirs), caches, strict=True)
                )
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
                caches, start = [one, two], start + width
        seen.append(compiled)
    assert seen[0]  # else JAX has changed its messages
    assert [len(compiled) for compiled in seen[1:]] == [0, 0, 0]


def test_ids_that_were_put_on_a_device_compile_what_those_on_the_host_do(model: JaxModel):
    tokens, (device,) = block(5, 3), jax.devices("cpu")[:1]
    expected, _ = model.score(model.init_cache(5, 8), tokens)
    with scores_compiled() as compiled:
        for given in (jnp.asarray(tokens), jax.device_put(tokens, device)):
            logits, _ = model.score(model.init_cache(5, 8), given)
            np.testing.assert_array_equal(logits, expected)
    assert compiled == []


def test_prompts_past_a_power_of_two_compile_once_for_a_capacity():
    counting = Counting()
    model = counting.model()
    for width in (65, 66, 70, 87, 96):  # 128 would reach past the arrays
        logits, _ = model.score(model.init_cache(2, 96), block(2, width), num_logits=1)
        np.testing.assert_array_equal(logits[:, 0, 0], block(2, width).sum(axis=1))
    assert counting.traces == [96]


def test_sizes_may_be_integers_of_numpys(model: JaxModel):
    logits, cache = model.score(model.init_cache(np.int64(1), np.int64(8)), [[1, 2]], num_logits=np.int64(1))
    assert (logits.shape, cache.capacity) == ((1, 1, V), 8)
    with pytest.raises(TypeError, match="integer"):
        model.init_cache(1, 2.5)


def test_the_head_sees_only_the_positions_asked_for():
    counting = Counting()
    model = counting.model()
    sums = np.cumsum(block(1, 6))
    for wanted, computed in ((0, 0), (1, 1), (2, 2), (3, 8), (6, 8), (None, 8)):
        logits, _ = model.score(model.init_cache(1, 8), block(1, 6), num_logits=wanted)
        assert counting.heads[-1] == computed
        assert logits[0, :, 0].tolist() == sums[6 - (6 if wanted is None else wanted) :].tolist()


def test_inside_a_callers_trace_score_and_rollback_are_pure(model: JaxModel, reference: NumpyModel):
    @jax.jit
    def both(cache: Any, tokens: Any, lengths: Any) -> Any:
        _, cache = model.score(cache, tokens)
        return model.score(model.rollback(cache, lengths), tokens[:, :2], num_logits=1)

    logits, cache = both(model.init_cache(2, 8), block(2, 4), np.array([1, 3]))
    _, held = reference.score(reference.init_cache(2, 8), block(2, 4))
    expected, _ = reference.score(reference.rollback(held, [1, 3]), block(2, 4)[:, :2], num_logits=1)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert cache.lengths.tolist() == [3, 5]
    model.score(cache, block(2, 1))  # and out of it lengths are looked at again
    with pytest.raises(CapabilityError, match="before"):
        TracedModel(model.functions, model.params).init_cache(1, 1)


def test_float64_is_as_exact_as_numpys(folder: Callable[..., Path], reference: NumpyModel, x64: None):
    model = load(folder(), dtype="float64")
    logits, _ = model.score(model.init_cache(2, 12), block(2, 12))
    expected, _ = reference.score(reference.init_cache(2, 12), block(2, 12))
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12)
    assert model.capabilities.dtypes == ("float32", "bfloat16", "float64")
    single = load(folder(), dtype="float32")
    assert single.score(single.init_cache(2, 12), block(2, 12))[0].dtype == np.float32


def test_bfloat16_weights_give_float32_logits(folder: Callable[..., Path], reference: NumpyModel):
    model = load(folder(), dtype="bfloat16")
    cache = model.init_cache(2, 12)
    assert cache.arrays[0][0].dtype == jnp.bfloat16
    logits, _ = model.score(cache, block(2, 12))
    expected, _ = reference.score(reference.init_cache(2, 12), block(2, 12))
    assert logits.dtype == np.float32
    assert 1e-4 < np.abs(np.asarray(logits) - expected).max() < 0.1 * np.abs(expected).max()


def test_loading_refuses_what_it_cannot_do(folder: Callable[..., Path]):
    for options, error, message in (
        ({"dtype": "float8"}, ValueError, "one of float32, bfloat16, float64, got 'float8'"),
        ({"dtype": "float64"}, CapabilityError, "jax_enable_x64"),
        ({"device": "abacus"}, ValueError, r"a device that JAX has \(cpu:0.*got 'abacus'"),
        ({"device": "cpu:99"}, ValueError, "got 'cpu:99'"),
        ({"quantised": True}, TypeError, "unknown options 'quantised'"),
    ):
        with pytest.raises(error, match=message):
            load(folder(), **options)
    assert load(folder(), device="cpu:0").vocab_size == V


def test_positions_past_the_first_table_of_angles_are_turned_as_far_as_numpys(folder: Callable[..., Path]):
    path = folder(max_position_embeddings=1024, num_hidden_layers=1)
    tokens = block(1, 600)
    ours, theirs = load(path), NumpyModel(path, dtype="float64")
    logits, _ = ours.score(ours.init_cache(1, 600), tokens, num_logits=5)
    expected, _ = theirs.score(theirs.init_cache(1, 600), tokens, num_logits=5)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
