"""The directive ``programs``: what each program of a folder, its argument, says of itself in its docstring."""

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def docstrings(folder: Path) -> dict[str, str]:
    """Return the docstring of every program in a folder, by file name; ``_x.py`` are parts of one."""
    files = sorted(folder.glob("[!_]*.py"))
    return {file.name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}


class Programs(SphinxDirective):
    """List the programs of a folder."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a rubric and the docstring for each."""
        source, _ = self.get_source_info()
        folder = (Path(source).parent / self.arguments[0]).resolve()
        found: list[nodes.Node] = []
        for name, text in docstrings(folder).items():
            if not text:
                raise self.error(f"{folder / name} has no docstring")
            self.env.note_dependency(str(folder / name))
            found.append(nodes.rubric("", "", nodes.literal(text=name)))
            body = nodes.container()
            # Four spaces are code to Markdown as they are to a reader of the program.
            self.state.nested_parse(StringList(text.splitlines(), source=name), 0, body)
            found += body.children
        return found


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("programs", Programs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
