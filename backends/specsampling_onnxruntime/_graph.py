"""Write an ONNX graph node by node, and its weights beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["CONTRIBUTED", "GraphWriter", "OPSET", "element_type"]

OPSET = 24
"""The first operator set with TensorScatter."""

CONTRIBUTED = "com.microsoft"
"""Domain of the operators that ONNX Runtime adds to the standard's."""

_IR_VERSION = 11

# protobuf holds no more than 2 GiB, and copies what it holds more than once.
_MOST_INLINE_BYTES = 2**24

# Offsets of weights in their file: pages, so that they can be mapped.
_ALIGNMENT = 4096


def element_type(dtype: Any) -> int:
    """Return ONNX's number for a NumPy dtype; a number is returned as it is."""
    return dtype if isinstance(dtype, int) else int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


class GraphWriter:
    """A graph under construction.

    Constants that are equal are stored once; a weight is stored as it is given, under its name.
    """

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._num_nodes = 0  # those of branches too, whose names must be the graph's only ones as well
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._weights: dict[str, NDArray[Any]] = {}

    def add_input(self, name: str, dtype: Any, shape: list[int | str]) -> str:
        """Declare an input; axes named by a string are dynamic."""
        self._inputs.append(helper.make_tensor_value_info(name, element_type(dtype), shape))
        return name

    def add_output(self, name: str, dtype: Any, shape: list[int | str]) -> None:
        """Declare the value `name` an output."""
        self._outputs.append(helper.make_tensor_value_info(name, element_type(dtype), shape))

    def add_weight(self, name: str, array: NDArray[Any]) -> str:
        """Store a weight."""
        self._weights[name] = array
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Return the name of a small constant."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.add_weight(f"constant_{len(self._constants)}", array)
        return self._constants[key]

    def add(self, operator: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output and return that output's name."""
        return self.add_split(operator, *inputs, outputs=[output] if output else 1, domain=domain, **attributes)[0]

    def add_split(
        self, operator: str, *inputs: str, outputs: int | list[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node and return its outputs' names."""
        names = outputs if isinstance(outputs, list) else [f"{operator}_{self._num_nodes}_{i}" for i in range(outputs)]
        node = helper.make_node(operator, list(inputs), names, name=f"{operator}_{self._num_nodes}", domain=domain)
        self._num_nodes += 1
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self._nodes.append(node)
        return names

    def add_choice(
        self,
        condition: str,
        outputs: dict[str, list[int | str]],
        dtype: Any,
        then: Callable[[list[str]], object],
        otherwise: Callable[[list[str]], object],
    ) -> None:
        """Add one node that computes `outputs` in one of two ways, whichever the scalar `condition` says.

        Each way is called once, and adds nodes that compute what it is told to call its outputs; these have the shapes
        that `outputs` names and all the same dtype.
        """
        branches, outside = [], self._nodes
        for kind, way in (("then", then), ("else", otherwise)):
            names = [f"{name}.{kind}" for name in outputs]
            self._nodes = []
            way(names)
            infos = [
                helper.make_tensor_value_info(name, element_type(dtype), shape)
                for name, shape in zip(names, outputs.values(), strict=True)
            ]
            branches.append(helper.make_graph(self._nodes, f"{kind}_{self._num_nodes}", [], infos))
        self._nodes = outside
        self.add_split("If", condition, outputs=list(outputs), then_branch=branches[0], else_branch=branches[1])

    def write(self, path: Path, properties: dict[str, str]) -> None:
        """Write the model; where its weights are large they go to a second file, with ``.data`` behind its name."""
        inline = sum(array.nbytes for array in self._weights.values()) <= _MOST_INLINE_BYTES
        model = self._model(None if inline else self._store(path.with_name(f"{path.name}.data")))
        helper.set_model_props(model, properties)
        onnx.save_model(model, str(path))

    def serialized(self) -> bytes:
        """Return the model as the content of a file."""
        content: bytes = self._model(None).SerializeToString()
        return content

    def _model(self, tensors: list[Any] | None) -> Any:
        if tensors is None:
            tensors = [numpy_helper.from_array(array, name) for name, array in self._weights.items()]
        return helper.make_model(
            helper.make_graph(self._nodes, "decoder", self._inputs, self._outputs, tensors),
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIBUTED, 1)],
            ir_version=_IR_VERSION,
            producer_name="specsampling",
        )

    def _store(self, path: Path) -> list[Any]:
        """Write the weights to their file one by one, and return the entries that point there."""
        tensors = []
        with path.open("wb") as file:
            for name, array in self._weights.items():
                if array.nbytes < _ALIGNMENT:  # shape inference reads constants, and only from the graph itself
                    tensors.append(numpy_helper.from_array(array, name))
                    continue
                file.write(bytes(-file.tell() % _ALIGNMENT))
                place = {"location": path.name, "offset": str(file.tell()), "length": str(array.nbytes)}
                tensor = TensorProto(name=name, data_type=element_type(array.dtype), dims=array.shape)
                tensor.data_location = TensorProto.EXTERNAL
                tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in place.items())
                file.write(np.ascontiguousarray(array).data)
                tensors.append(tensor)
        return tensors
