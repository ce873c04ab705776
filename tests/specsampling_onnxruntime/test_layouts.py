"""Which graphs are recognised, and what is said of those that cannot be served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from specsampling import CapabilityError
from specsampling_onnxruntime import OnnxModel

from .conftest import write_past_and_present


def axes(declared: Any) -> list[Any]:
    return [axis.dim_value or axis.dim_param for axis in declared.type.tensor_type.shape.dim]


@pytest.fixture
def altered(graph: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of the file that `build` makes, changed by a function of the model."""

    def altered(change: Callable[[Any], None], layout: str = "built") -> Path:
        model = onnx.load(str(graph(layout)))
        change(model)
        onnx.save(model, str(tmp_path / "altered.onnx"))
        return tmp_path / "altered.onnx"

    return altered


def tensor(model: Any, name: str) -> Any:
    return next(t for t in (*model.graph.input, *model.graph.output) if t.name == name)


def as_foreign(model: Any) -> None:
    """Give the graph of `build` the names of Optimum's, so that it can be altered without an exporter."""
    del model.metadata_props[:]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed(name) for name in names]
    for declared in (*model.graph.input, *model.graph.output):
        declared.name = renamed(declared.name)


def renamed(name: str) -> str:
    return name.replace("cache.", "past_key_values.").replace("updated.", "present.")


@pytest.mark.parametrize(
    ("layout", "kind", "caches"),
    [
        ("built", "in place", 4),
        ("exported", "in place", 4),
        ("past and present", "past and present", 4),
        ("shared buffer", "shared buffer", 4),
        ("no cache", "no cache", 0),
    ],
)
def test_layouts_are_told_apart(load_layout: Callable[..., OnnxModel], layout: str, kind: str, caches: int) -> None:
    model = load_layout(layout)
    assert model.layout == kind
    assert len(model._runner.layout.caches) == caches
    assert (model.vocab_size, model.max_length, model.dtype, model.max_rollback) == (256, 64, "float32", None)


def test_a_graph_without_cache_warns_of_what_it_costs(graph: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning, match=r"no cache .*past_key_values.N.key.* computes all of the text again"):
        OnnxModel(graph("no cache"))


# fault #166
def test_a_fixed_block_axis_is_refused(module: Any, tmp_path: Path) -> None:
    path = write_past_and_present(module, tmp_path / "one.onnx", fixed_block=True)
    message = r"'input_ids' of shape \(.*, 1\) has a fixed block axis, so it scores 1 token.*dynamic .*block.*`export`"
    with pytest.raises(CapabilityError, match=message):
        OnnxModel(path)


# fault #166, without an exporter
def test_a_fixed_block_of_tokens_or_logits_is_refused(altered: Callable[..., Path]) -> None:
    def fix(name: str) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            axis = tensor(model, name).type.tensor_type.shape.dim[1]
            axis.ClearField("dim_param")
            axis.dim_value = 1

        return change

    with pytest.raises(CapabilityError, match=r"'input_ids' of shape \(batch, 1\) has a fixed block axis"):
        OnnxModel(altered(fix("input_ids")))
    with pytest.raises(CapabilityError, match=r"'logits' of shape \(batch, 1, 256\) has a fixed block axis"):
        OnnxModel(altered(fix("logits")))


def test_a_fixed_batch_serves_that_batch_or_is_refused(altered: Callable[..., Path]) -> None:
    def fix(rows: int) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            for declared in (*model.graph.input, *model.graph.output):
                axis = declared.type.tensor_type.shape.dim[0]
                if axis.dim_param == "batch":
                    axis.dim_value = rows

        return change

    with pytest.raises(CapabilityError, match=r"'input_ids' of shape \(4, block\) takes 4 rows, no more and no fewer"):
        OnnxModel(altered(fix(4)))
    model = OnnxModel(altered(fix(1)))
    assert model.capabilities.max_batch_size == 1
    with pytest.raises(CapabilityError, match="serves a batch of 1, got 2 rows: its batch axis is fixed"):
        model.init_cache(2, 8)


def test_a_fixed_past_is_refused(altered: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        tensor(model, "cache.1.value").type.tensor_type.shape.dim[2].dim_value = 128

    with pytest.raises(
        CapabilityError, match=r"'cache.1.value' of shape \(batch, 2, 128, 16\) has a fixed past of 128"
    ):
        OnnxModel(altered(change))


def test_a_cache_of_unknown_shape_is_refused(altered: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        tensor(model, "cache.0.key").type.tensor_type.shape.dim[3].dim_param = "size"

    with pytest.raises(CapabilityError, match=r"'cache.0.key' of shape \(batch, 2, capacity, size\) must have shape"):
        OnnxModel(altered(change))


def test_a_missing_output_is_named(altered: Callable[..., Path]) -> None:
    def drop(name: str) -> Callable[[Any], None]:
        return lambda model: model.graph.output.remove(tensor(model, name))

    with pytest.raises(CapabilityError, match=r"no output 'logits' \(B, T, V\) but 'updated.0.key' of shape"):
        OnnxModel(altered(drop("logits")))
    with pytest.raises(CapabilityError, match=r"'cache.1.key' .* has no output 'updated.1.key' .*use_cache=True"):
        OnnxModel(altered(drop("updated.1.key")))


def test_a_missing_present_is_named(altered: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        as_foreign(model)
        model.graph.output.remove(tensor(model, "present.0.value"))

    with pytest.raises(CapabilityError, match="has no output 'present.0.value' to go with it"):
        OnnxModel(altered(change))


def test_inputs_that_are_not_known_or_not_there_are_named(altered: Callable[..., Path]) -> None:
    with pytest.raises(CapabilityError, match=r"input 'past_lengths' of shape \(batch\) is not known for a graph with"):
        OnnxModel(altered(as_foreign))

    def rename(model: Any) -> None:
        tensor(model, "input_ids").name = "tokens"

    with pytest.raises(
        CapabilityError, match=r"has no input 'input_ids' \(B, T\) but 'tokens' of shape \(batch, block\)"
    ):
        OnnxModel(altered(rename))


def test_positions_that_cannot_be_given_are_refused(module: Any, tmp_path: Path) -> None:
    path = write_past_and_present(module, tmp_path / "no_positions.onnx", positions=False)
    with pytest.raises(CapabilityError, match=r"has no input 'position_ids' but .*rows of different length get wrong"):
        OnnxModel(path)


def test_another_version_of_the_layout_is_refused(altered: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        model.metadata_props[0].value = "2"

    with pytest.raises(CapabilityError, match="version '2' of the layout of `build`, and this is '1'"):
        OnnxModel(altered(change))


def test_dynamic_quantisation_is_recognised_and_refused(graph: Callable[..., Path], tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    path = tmp_path / "dynamic.onnx"
    quantization.quantize_dynamic(
        str(graph("built")),
        str(path),
        weight_type=quantization.QuantType.QUInt8,
        # It does not know ONNX Runtime's own operators, and asks for the dtype of what comes after one.
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    with pytest.raises(CapabilityError, match=r"largest entry of the whole batch.*other rows.*MatMulNBits"):
        OnnxModel(path)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ValueError, match=r"text.onnx is not an ONNX model"):
        OnnxModel(tmp_path / "text.onnx")
    with pytest.raises(FileNotFoundError, match="no ONNX file"):
        OnnxModel(tmp_path)


def test_the_context_limit_is_that_of_the_config_beside_the_graph(graph: Callable[..., Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(graph("past and present"), tmp_path / "model.onnx"))
    for data in graph("past and present").parent.glob("*.data"):
        shutil.copy(data, tmp_path)
    assert OnnxModel(path).max_length is None
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 48}))
    assert OnnxModel(path).max_length == 48
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"context_length": 32}}))
    assert OnnxModel(path).max_length == 32
    assert OnnxModel(path, max_length=16).max_length == 16
    (tmp_path / "genai_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"genai_config.json is not JSON"):
        OnnxModel(path)


def test_a_vocabulary_that_is_not_declared_is_measured(altered: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        tensor(model, "logits").type.tensor_type.shape.dim[2].dim_param = "vocabulary"

    assert OnnxModel(altered(change)).vocab_size == 256
    assert OnnxModel(altered(change, "past and present")).vocab_size == 256


def test_tokens_of_another_integer_type_are_cast(
    altered: Callable[..., Path], load_layout: Callable[..., OnnxModel]
) -> None:
    def change(model: Any) -> None:
        tensor(model, "input_ids").type.tensor_type.elem_type = TensorProto.INT32

    model = OnnxModel(altered(change))
    got, _ = model.score(model.init_cache(1, 4), np.array([[1, 2]], np.uint8))
    expected, _ = load_layout("built").score(model.init_cache(1, 4), [[1, 2]])
    assert abs(got - expected).max() < 1e-6
    assert helper.tensor_dtype_to_np_dtype(TensorProto.INT32) == model._runner.layout.inputs["input_ids"]


# fault #167: a size of one while tracing would be taken for always one
@pytest.mark.parametrize(("rows", "block", "past"), [(1, 1, 0), (1, 5, 7), (2, 3, 4)])
@pytest.mark.parametrize("layout", ["exported", "past and present"])
def test_exported_graphs_have_dynamic_axes(
    load_layout: Callable[..., OnnxModel], reference: Any, layout: str, rows: int, block: int, past: int
) -> None:
    model = load_layout(layout)
    tokens = np.random.default_rng(0).integers(0, 256, (rows, past + block))
    _, cache = model.score(model.init_cache(rows, 16), tokens[:, :past], num_logits=0)
    got, _ = model.score(cache, tokens[:, past:])
    expected, _ = reference.score(reference.init_cache(rows, 16), tokens, num_logits=block)
    assert abs(got - expected).max() < 2e-5
