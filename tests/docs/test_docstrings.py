"""Every public name of every package is documented, in numpydoc's form.

Adapters are imported over stand-ins of their frameworks, which need not be installed.
"""

import doctest
import inspect
import sys
from pathlib import Path

import pytest

validate = pytest.importorskip("numpydoc.validate")
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

from stand_ins import import_packages, is_alias, public_names  # noqa: E402 (the path is set first)

PACKAGES, MODULES = import_packages()
PUBLIC = public_names(PACKAGES)

# Examples that need a framework in a package that needs none, with the test that runs them all the same.
RUN_ELSEWHERE = {"audit_transformers": "tests/specsampling_conformance/test_audit_transformers.py"}

IGNORED = {
    "ES01": "an extended summary only where there is more to say",
    "EX01": "examples are asked of functions and classes by the tests below",
    "GL01": "the summary starts on the line of the quotes",
    "GL03": "a blank line more or less is ruff's business",
    "PR01": "the settings of Decoder are described once; a protocol's parameters where the protocol is",
    "PR02": "fields under Attributes are no unknown parameters",
    "PR03": "parameters described elsewhere are listed together, out of order",
    "PR04": "... and have their types there",
    "PR06": "types are words: array, integer array",
    "PR08": "a description may start with a symbol",
    "PR09": "... or end with one",
    "RT01": "asked of functions by the test below; a method may say it in its summary",
    "RT03": "a return value that the summary describes needs no second description",
    "RT02": "the type of a record says what it is",
    "RT04": "as PR08",
    "RT05": "as PR09",
    "SA01": "See Also only where it helps",
    "SS05": "a class's summary says what it is",
    "SS06": "a summary may take two lines",
    "YD01": "as RT02",
}


@pytest.fixture(autouse=True)
def adapters_over_stand_ins(monkeypatch):
    """Let numpydoc find them by name; other tests import the real ones."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)


def _is_exception(symbol):
    """Exceptions need no example: nobody makes them, and what raises them says when."""
    return inspect.isclass(symbol) and issubclass(symbol, BaseException)


def documented():
    """Names of the public callables and of their public methods."""
    for package, name in PUBLIC:
        symbol = getattr(PACKAGES[package], name)
        if is_alias(symbol) or not (inspect.isclass(symbol) or inspect.isroutine(symbol)):
            continue
        yield f"{package}.{name}"
        if inspect.isclass(symbol):
            for member, value in vars(symbol).items():
                is_method = inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod)
                if is_method and not member.startswith("_"):
                    yield f"{package}.{name}.{member}"


@pytest.mark.parametrize("name", list(documented()))
def test_docstring_follows_numpydoc(name):
    errors = validate.validate(name)["errors"]
    assert [error for error in errors if error[0] not in IGNORED] == []


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_functions_have_parameters_returns_and_examples(package, name):
    symbol = getattr(PACKAGES[package], name)
    if not inspect.isfunction(symbol):
        return
    sections = inspect.getdoc(symbol) or ""
    signature = inspect.signature(symbol)
    wanted = ["Examples"]
    wanted += ["Parameters"] if signature.parameters else []
    wanted += ["Returns"] if signature.return_annotation not in (None, "None", inspect.Signature.empty) else []
    assert [section for section in wanted if f"{section}\n---" not in sections] == []


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_classes_have_examples(package, name):
    symbol = getattr(PACKAGES[package], name)
    if inspect.isclass(symbol) and not is_alias(symbol) and not _is_exception(symbol):
        assert "Examples\n---" in (inspect.getdoc(symbol) or "")


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_examples_are_run_by_doctest(package, name):
    """One line at least besides imports: `nox -s docs examples` runs what is not skipped."""
    symbol = getattr(PACKAGES[package], name)
    if is_alias(symbol) or not (inspect.isclass(symbol) or inspect.isfunction(symbol)) or _is_exception(symbol):
        return
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(symbol) or "")
    run = [example for example in examples if not example.options.get(doctest.SKIP)]
    assert [example for example in run if not example.source.startswith(("import ", "from "))] or name in RUN_ELSEWHERE


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_constants_have_a_string_below_them(package, name):
    symbol = getattr(PACKAGES[package], name)
    if callable(symbol) and not is_alias(symbol):
        return
    pycode = pytest.importorskip("sphinx.pycode")
    modules = [module for module in sys.modules if module == package or module.startswith(f"{package}._")]
    found = [pycode.ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name)) for module in modules]
    assert any(found)
