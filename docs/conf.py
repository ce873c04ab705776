"""Sphinx settings. `nox -s docs` builds with -n -W: a name that does not resolve is an error."""

import inspect
import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).with_name("_ext")))

from stand_ins import import_packages, is_alias, public_names

PACKAGES, _modules = import_packages()
sys.modules.update(_modules)  # where autodoc looks

project = "specsampling"
author = "the specsampling developers"
copyright = author
version = release = installed_version("specsampling")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",  # adapters are written from the source of one
    "sphinx-mathjax-offline",  # MathJax comes with the site, which must work without a network
    "capabilities",
    "pictures",
    "programs",
]
# Links into other projects need the network while building, so only who asks for them has them.
if os.environ.get("SPECSAMPLING_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext", "examples", "paper"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"specsampling {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False

# `name` in a docstring is a link where it names something, and emphasis where it does not.
default_role = "autolink"

autosummary_generate = True
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

napoleon_google_docstring = False
# Types in docstrings are words for people ("array", "int or None"): shown as they are. Those in signatures are links.
napoleon_use_param = False
napoleon_use_rtype = False
# Fields of a record are listed with it, several on a line where they belong together, not as objects of their own.
napoleon_custom_sections = [("Attributes", "params_style")]

nitpick_ignore_regex = [
    # The standard library, NumPy and the like: resolved only where intersphinx may ask them.
    (r"py:.*", r"(collections|typing|os|pathlib|enum|numpy|np|pytest|jax|onnxruntime|torch|transformers)\..*"),
    (r"py:.*", r"(NoneType|None|Any|bool|bytes|dict|float|int|list|object|str|tuple|type|optional)"),
    (r"py:.*", r"(Callable|Generator|Iterable|Iterator|Mapping|Sequence|Literal|PathLike|Path|ndarray|dtype)"),
    (r"py:exc", r"(ImportError|LookupError|NotImplementedError|TypeError|ValueError|OSError|KeyError|RuntimeError)"),
    # Nor do types of private modules, such as an adapter's cache, which only the adapter looks into.
    (r"py:.*", r"specsampling\w*\._.*"),
    # Fields and parameters, which stand in single backquotes like public names, have no page of their own.
    (r"py:obj", r"[a-z_]+"),
    # Type variables have no page.
    (r"py:.*", r"(specsampling.*\.)?(CacheT|StateT)"),
]


def write_api_page(app, config):
    """List every public name, straight from each package's ``__all__``."""
    lines = ["# API reference", ""]
    for name, module in PACKAGES.items():
        groups = {"Functions": [], "Classes": [], "Exceptions": [], "Data": [], "Aliases": []}
        for package, symbol in public_names(PACKAGES):
            if package == name:
                groups[_group(getattr(module, symbol))].append(symbol)
        aliases = groups.pop("Aliases")
        lines += [f"## {name}", "", f"```{{eval-rst}}\n.. currentmodule:: {name}\n\n.. automodule:: {name}\n```", ""]
        for title, symbols in groups.items():
            if symbols:
                listed = "\n".join(f"   {symbol}" for symbol in symbols)
                lines += [
                    f"### {title}",
                    "",
                    "```{eval-rst}",
                    f".. currentmodule:: {name}\n\n.. autosummary::\n   :toctree: api\n\n{listed}",
                    "```",
                    "",
                ]
        if aliases:
            # autosummary would describe what they stand for.
            pages = "\n".join(f"api/{name}.{alias}" for alias in aliases)
            lines += ["### Aliases", "", f"```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```", ""]
        for alias in aliases:
            text = f"{alias}\n{'=' * len(alias)}\n\n.. currentmodule:: {name}\n\n.. autodata:: {alias}\n   :no-value:\n"
            _write(Path(app.srcdir) / "api" / f"{name}.{alias}.rst", text)
    page = Path(app.srcdir) / "api.md"
    _write(page, "\n".join(lines))


def _write(page, text):
    """Write a page unless it is there already, so that it is not built anew."""
    page.parent.mkdir(exist_ok=True)
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def _group(symbol):
    if is_alias(symbol):
        return "Aliases"
    if inspect.isclass(symbol):
        return "Exceptions" if issubclass(symbol, BaseException) else "Classes"
    return "Functions" if callable(symbol) else "Data"


def skip_fields_of_records(app, what, name, obj, skip, options):
    """Leave out what Python adds to records: their fields are described under Attributes already."""
    is_field = type(obj).__name__ in ("_tuplegetter", "member_descriptor")
    return True if is_field else None


def find_docstring_of_constant(app, what, name, obj, options, lines):
    """Show the string below a constant where it is defined; autodoc looks only where it is passed on."""
    if what != "data":
        return
    package, _, constant = name.partition(".")
    for module in [module for module in sys.modules if module.startswith(f"{package}._")]:
        found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", constant))
        if found:
            lines[:] = found


def keep_colons(app, what, name, obj, options, lines):
    """Keep napoleon from reading ``Text: more text`` in the first line of an attribute's docstring as a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, which napoleon takes for the first line


def mend_signature(app, what, name, obj, options, signature, return_annotation):
    """Show no arguments of a protocol, which nobody calls, and what else Sphinx cannot read.

    With a dataclass's ``<factory>`` in it a signature would lose its links.
    """
    if getattr(obj, "_is_protocol", False):
        return "", None
    return (signature and signature.replace("<factory>", "..."), return_annotation)


def setup(app):
    # Before the sources are listed, from which autosummary then makes a page per name.
    app.connect("config-inited", write_api_page)
    app.connect("autodoc-process-docstring", find_docstring_of_constant, priority=50)
    app.connect("autodoc-process-docstring", keep_colons, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", mend_signature)
    app.connect("autodoc-skip-member", skip_fields_of_records)
