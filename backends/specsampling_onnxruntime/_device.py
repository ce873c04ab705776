"""Where a session computes: its provider, and memory there that is made, rearranged and handed on without the host."""

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specsampling import CapabilityError

from ._checks import Ints
from ._graph import GraphWriter

__all__ = ["Device", "FRAMEWORKS", "as_array"]

FRAMEWORKS = ("numpy", "torch", "cupy", "jax")
"""Where logits may go."""

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_QUIET = 3  # ONNX Runtime's severity "error"


class Device:
    """An execution provider and its memory.

    Parameters
    ----------
    name : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises
    ------
    ValueError
        If the name is another.
    CapabilityError
        If this build of ONNX Runtime lacks the provider.
    """

    def __init__(self, name: str) -> None:
        kind, _, index = name.partition(":")
        if kind not in _PROVIDERS or (":" in name and (kind == "cpu" or not index.isdigit())):
            raise ValueError(f"`device` must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
        self.kind, self.index, self._provider = kind, int(index or 0), _PROVIDERS[kind]
        available = onnxruntime.get_available_providers()
        if self._provider not in available:
            raise CapabilityError(
                f"device {name!r} needs {self._provider}, and this build of ONNX Runtime has only "
                f"{', '.join(available)}: install onnxruntime-gpu instead of onnxruntime, or ask for device 'cpu'"
            )
        self._rearranging: dict[tuple[str, int], Any] = {}

    def open(self, model: Path | bytes, options: Any = None) -> Any:
        """Return a session that computes here, and raise where ONNX Runtime would silently compute elsewhere."""
        if options is not None:
            return self._open(model, options)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        # Threads would spin on for some 20 ms after each run. Those of a draft took the cores from its target that way,
        # and a step of either lasted twice as long. 2 ms outlast what a round does between two runs of one session, and
        # so spare a session that is alone the waking of its threads, a twentieth of its time.
        options.add_session_config_entry("session.intra_op.spin_duration_us", "2000")
        try:
            return self._open(model, options)
        except RuntimeError as error:
            if "global thread pool" not in str(error):
                raise
            options.use_per_session_threads = False  # the process has one pool for all sessions, and allows no other
            return self._open(model, options)

    def _open(self, model: Path | bytes, options: Any) -> Any:
        chosen = (self._provider, {"device_id": str(self.index)} if self.kind == "cuda" else {})
        # Operators without a kernel on the device, such as those on shapes, run on the host.
        providers = [chosen] if self.kind == "cpu" else [chosen, (_PROVIDERS["cpu"], {})]
        source = model if isinstance(model, bytes) else str(model)
        session = onnxruntime.InferenceSession(source, options, providers=providers, enable_fallback=0)
        if self._provider not in session.get_providers():  # its libraries did not load, which is only logged
            raise CapabilityError(
                f"ONNX Runtime could not start {self._provider} and would compute with {session.get_providers()}: see "
                "its log for what is missing, or ask for device 'cpu'"
            )
        session.disable_fallback()
        return session

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a zeroed OrtValue; it may have no elements."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self.kind, self.index)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an OrtValue to be written."""
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, self.kind, self.index)

    def take_rows(self, value: Any, rows: Ints) -> Any:
        """Return the chosen entries of axis 0."""
        return self._rearrange("rows", value, rows)

    def take_columns(self, value: Any, columns: Ints) -> Any:
        """Return the chosen entries of axis 2: ``(n,)`` the same for each row, or ``(B, n)`` of each row its own."""
        return self._rearrange("columns" if columns.ndim == 1 else "columns of rows", value, columns)

    def _rearrange(self, kind: str, value: Any, index: Ints) -> Any:
        key = kind, value.element_type()
        if key not in self._rearranging:
            self._rearranging[key] = self.open(_gathering(*key))
        binding = self._rearranging[key].io_binding()
        binding.bind_ortvalue_input("data", value)
        binding.bind_cpu_input("index", index)
        binding.bind_output("taken", self.kind, self.index)
        self._rearranging[key].run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[0]

    def framework(self, wanted: str | None) -> str:
        """Return the framework that logits go to: the one wanted, or the first that has arrays on this device."""
        if wanted is None:
            return "numpy" if self.kind == "cpu" else next((f for f in FRAMEWORKS[1:] if _reaches_cuda(f)), "numpy")
        if wanted not in FRAMEWORKS:
            raise ValueError(f"`arrays` must be one of {', '.join(FRAMEWORKS)}, got {wanted!r}")
        if importlib.util.find_spec(wanted) is None:
            raise CapabilityError(f"`arrays` is {wanted!r}, which is not installed")
        return wanted


def as_array(value: Any, framework: str) -> Any:
    """Return an OrtValue as an array: by DLPack, for NumPy as a view of memory on the host or a copy from a device."""
    if framework == "numpy":
        return value.numpy()
    return importlib.import_module("jax.numpy" if framework == "jax" else framework).from_dlpack(value)


def _reaches_cuda(framework: str) -> bool:
    if importlib.util.find_spec(framework) is None:
        return False
    module = importlib.import_module(framework)
    if framework == "torch":
        return bool(module.cuda.is_available())
    return framework == "cupy" or module.default_backend() == "gpu"


@functools.cache
def _gathering(kind: str, element: int) -> bytes:
    """Return a graph that takes entries of an array of four axes."""
    graph = GraphWriter()
    graph.add_input("data", element, ["batch", "heads", "tokens", "size"])
    graph.add_input("index", np.int64, ["rows", "columns"] if kind == "columns of rows" else ["chosen"])
    if kind == "columns of rows":
        shape = graph.add("Shape", "data")
        heads, size = (graph.add("Slice", shape, *(graph.constant([i]) for i in (axis, axis + 1))) for axis in (1, 3))
        columns = graph.add("Shape", "index")
        batch, chosen = (
            graph.add("Slice", columns, *(graph.constant([i]) for i in (axis, axis + 1))) for axis in (0, 1)
        )
        index = graph.add("Unsqueeze", "index", graph.constant([1, 3]))
        index = graph.add("Expand", index, graph.add("Concat", batch, heads, chosen, size, axis=0))
        graph.add("GatherElements", "data", index, output="taken", axis=2)
    else:
        graph.add("Gather", "data", "index", output="taken", axis=0 if kind == "rows" else 2)
    graph.add_output("taken", element, ["rows_taken", "heads", "tokens_taken", "size"])
    return graph.serialized()
