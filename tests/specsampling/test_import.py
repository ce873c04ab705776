import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import specsampling

# Found without being imported: an adapter whose framework is missing is still read.
PACKAGES = {
    name: Path(importlib.util.find_spec(name).submodule_search_locations[0])
    for name in (
        "specsampling",
        *(f"specsampling_{name}" for name in ("numpy", "torch", "jax", "onnxruntime", "conformance")),
    )
}
NEEDS = {f"specsampling_{name}": name for name in ("torch", "jax", "onnxruntime")}

# The names of DESIGN's contract, written down once more: one that goes missing is a broken promise.
CONTRACT = """
    BackendError BackendNotInstalledError CONTRACT_VERSION CacheError Capabilities CapabilityError Context
    CounterSource Decoder Drafter Generation Label Model ModelDrafter NonFiniteLogitsError PromptLookup Proposal
    RandomSource Randomness RoundInfo Sampling SpecSamplingError Stats UnknownBackendError Verdict available_backends
    bundled check_compatibility decode_round generate load_model stream to_probs verify
"""


def sources():
    return [
        pytest.param(path, id=f"{name}/{path.relative_to(folder)}")
        for name, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def in_a_new_process(code):
    # Without the variables by which coverage measures subprocesses, and slows them down.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def test_importing_the_core_brings_in_no_more_than_numpy_and_the_array_api_packages():
    # What those import on their own account (NumPy has lazy corners) is theirs.
    found = in_a_new_process(
        "import sys, json; import array_api_compat.numpy, array_api_extra; before = set(sys.modules);"
        "import specsampling; print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    assert set(found) - {"numpy", "array_api_compat", "array_api_extra"} - sys.stdlib_module_names == {"specsampling"}


def test_array_packages_import_no_framework():
    found = in_a_new_process("import sys, json; import specsampling; print(json.dumps(list(sys.modules)))")
    assert not {"torch", "jax", "onnxruntime", "transformers", "safetensors", "specsampling_numpy"} & set(found)


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_no_line_of_the_core_imports_a_framework_even_late():
    allowed = {"specsampling", "numpy", "array_api_compat", "array_api_extra", *sys.stdlib_module_names}
    library = [path for path in PACKAGES["specsampling"].rglob("*.py") if "_cli" not in path.parts]
    strangers = {path.name: set(imported_packages(path)) - allowed for path in library}
    assert not {name: found for name, found in strangers.items() if found}


def test_importing_the_core_does_not_touch_the_command_line():
    loaded = in_a_new_process(
        "import sys, json; import specsampling;"
        "print(json.dumps([name for name in sys.modules if name.startswith('specsampling')]))"
    )
    assert not {"specsampling.__main__", "specsampling._cli"} & set(loaded)


def test_importing_the_core_takes_under_300_ms_beyond_numpy():
    code = (
        "import json, time; import numpy; start = time.process_time(); import specsampling;"
        "print(json.dumps(time.process_time() - start))"
    )
    # Processor time and the best of several, because other workers of this very test run share the machine.
    assert min(in_a_new_process(code) for _ in range(5)) < 0.3


@pytest.mark.parametrize("path", sources())
def test_all_is_explicit_sorted_and_complete(path):
    names = declared_all(path)
    assert names is not None, "no __all__"
    assert names == sorted(set(names))
    assert not [name for name in names if name.startswith("_")]
    defined, optional = public_names(path)
    assert defined - optional <= set(names) <= defined


def declared_all(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return ast.literal_eval(node.value)
    return None


def public_names(path):
    """Names that a module defines without an underscore (a package: also what it imports from itself), and those of
    them that need not be listed: type variables and aliases, which help a module's own signatures."""
    names, optional = set(), set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {target.id for target in targets if isinstance(target, ast.Name)}
            names |= assigned
            optional |= assigned if _is_type(node) else set()
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names |= {alias.asname or alias.name for alias in node.names if node.level or _is_own(node.module)}
    return {name for name in names if not name.startswith("_")}, optional


def _is_type(node):
    if isinstance(node, ast.AnnAssign):
        return getattr(node.annotation, "id", None) == "TypeAlias"
    if isinstance(node.value, ast.Subscript):
        return getattr(node.value.value, "id", None) in {"Callable", "NDArray", "dict", "list", "tuple"}
    return isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "TypeVar"


def _is_own(module):
    return str(module).partition(".")[0] in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package):
    pytest.importorskip(NEEDS.get(package, "numpy"))
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    for info in pkgutil.iter_modules(module.__path__, prefix=f"{package}."):
        if not info.name.endswith("__main__"):
            submodule = importlib.import_module(info.name)
            assert [name for name in submodule.__all__ if not hasattr(submodule, name)] == []


def test_the_contract_is_importable_from_the_top():
    assert set(CONTRACT.split()) <= set(specsampling.__all__)


@pytest.mark.parametrize("path", [p for p in sources() if not str(p.id).startswith("specsampling/")])
def test_adapters_and_suite_use_only_public_names_of_the_core(path):
    """Imports and attribute access alike."""
    public = {*specsampling.__all__, "__version__"}
    strangers = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            strangers += [alias.name for alias in node.names if alias.name.startswith("specsampling.")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "specsampling":
            used = [alias.name for alias in node.names if alias.name not in public]
            strangers += [f"{node.module}: {used}"] if used or node.module != "specsampling" else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "specsampling":
            strangers += [node.attr] if node.attr not in public else []
    assert strangers == []


@pytest.mark.parametrize("path", sources())
def test_packages_import_only_what_others_list_at_their_top(path):
    package = next(name for name, folder in PACKAGES.items() if path.is_relative_to(folder))
    strangers = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            is_others = _is_own(node.module) and node.module.partition(".")[0] != package
            strangers += [node.module] if is_others and (node.module not in PACKAGES or _has_private(node)) else []
    assert strangers == []


def _has_private(node):
    return any(alias.name.startswith("_") and alias.name != "__version__" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package):
    assert (PACKAGES[package] / "py.typed").is_file()


def test_streaming_takes_what_generating_takes():
    generated, streamed = (inspect.signature(function) for function in (specsampling.generate, specsampling.stream))
    assert [*streamed.parameters.values()] == [*generated.parameters.values()]  # defaults and annotations too


def test_the_version_is_the_distributions():
    assert specsampling.__version__ == importlib.metadata.version("specsampling")
