"""Every public name is documented, in numpydoc's form."""

import importlib
import inspect
import os
import sys
import zlib
from pathlib import Path

import pytest

validate = pytest.importorskip("numpydoc.validate")

PACKAGES = ("specsampling", "specsampling_numpy", "specsampling_conformance")

IGNORED = {
    "ES01": "an extended summary only where there is more to say",
    "EX01": "examples are asked of functions by the test below",
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


def public_names():
    """Pairs of package and name, leaving out what a package passes on from another."""
    return [
        (package, name)
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
        if getattr(getattr(importlib.import_module(package), name), "__module__", package).startswith(package)
    ]


def documented():
    """Names of the public callables and of their public methods."""
    for package, name in public_names():
        symbol = getattr(importlib.import_module(package), name)
        if not (inspect.isclass(symbol) or inspect.isroutine(symbol)):
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


@pytest.mark.parametrize(("package", "name"), public_names())
def test_functions_have_parameters_returns_and_examples(package, name):
    symbol = getattr(importlib.import_module(package), name)
    if not inspect.isfunction(symbol):
        return
    sections = inspect.getdoc(symbol) or ""
    signature = inspect.signature(symbol)
    wanted = ["Examples"]
    wanted += ["Parameters"] if signature.parameters else []
    wanted += ["Returns"] if signature.return_annotation not in (None, "None", inspect.Signature.empty) else []
    assert [section for section in wanted if f"{section}\n---" not in sections] == []


@pytest.mark.parametrize(("package", "name"), public_names())
def test_constants_have_a_string_below_them(package, name):
    if callable(getattr(importlib.import_module(package), name)):
        return
    pycode = pytest.importorskip("sphinx.pycode")
    modules = [module for module in sys.modules if module == package or module.startswith(f"{package}._")]
    found = [pycode.ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name)) for module in modules]
    assert any(found)


def test_the_site_has_every_public_name():
    site = os.environ.get("SPECSAMPLING_SITE")
    if site is None:
        pytest.skip("the site is built by `nox -s docs`")
    content = (Path(site) / "objects.inv").read_bytes()
    lines = zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()
    found = {line.split()[0] for line in lines}
    assert [f"{package}.{name}" for package, name in public_names() if f"{package}.{name}" not in found] == []
