"""The directive ``capabilities``: a table of what each backend declares, read from the code.

Backends that are installed where the site is built are asked; what the others answered is in capabilities.json beside
this file. Run ``python docs/_ext/capabilities.py`` where every backend is installed to write it anew; a test holds it
to what each installed backend says.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import specsampling

RECORD = Path(__file__).with_name("capabilities.json")
HEADINGS = ("backend", "dtypes", "rows of unequal length", "drops finished rows", "compiles whole rounds", "rolls back")


def ask(backend: str) -> dict[str, Any]:
    """Load the bundled draft with a backend and return what the model declares."""
    model: Any = specsampling.load_model(backend, specsampling.bundled("draft"), device="cpu")
    declared = model.capabilities
    return {
        "dtypes": list(declared.dtypes),
        "per_row_rollback": declared.per_row_rollback,
        "select": declared.select,
        "compile_round": declared.compile_round,
        "max_batch_size": declared.max_batch_size,
        "max_rollback": model.max_rollback,
    }


def ask_installed() -> dict[str, dict[str, Any]]:
    """Return what every backend of this project answers that is installed here."""
    return {
        status.name: ask(status.name)
        for status in specsampling.available_backends()
        if status.installed and status.target.startswith("specsampling_")
    }


def table(answers: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table, as words."""
    rows = [HEADINGS]
    for name, answer in sorted(answers.items()):
        limit = answer["max_batch_size"]
        rows.append(
            (
                name,
                ", ".join(answer["dtypes"]),
                ("yes" if answer["per_row_rollback"] else "no") + (f", at most {limit} rows" if limit else ""),
                "yes" if answer["select"] else "no",
                "yes" if answer["compile_round"] else "no",
                "any number of tokens" if answer["max_rollback"] is None else f"{answer['max_rollback']} tokens",
            )
        )
    return rows


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Capabilities(SphinxDirective):
        """Show the table."""

        def run(self) -> list[nodes.Node]:
            """Return a table node."""
            self.env.note_dependency(str(RECORD))
            # In a process of its own: in this one frameworks may be stand-ins, which autodoc put there.
            asked = subprocess.run([sys.executable, __file__, "--print"], check=True, capture_output=True, text=True)
            answers = {**json.loads(RECORD.read_text(encoding="utf-8")), **json.loads(asked.stdout)}
            head, *body = table(answers)
            group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
            group += nodes.thead("", _row(head, nodes))
            group += nodes.tbody("", *(_row(row, nodes) for row in body))
            return [nodes.table("", group, classes=["capabilities"])]

    app.add_directive("capabilities", Capabilities)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def _row(cells: tuple[str, ...], nodes: Any) -> Any:
    return nodes.row("", *(nodes.entry("", nodes.paragraph(text=cell)) for cell in cells))


def main() -> None:
    """Write the record, or print what installed backends answer."""
    parser = argparse.ArgumentParser(description="Ask every installed backend what it can do.")
    parser.add_argument("--print", action="store_true", help="print JSON, and leave the record as it is")
    answers = ask_installed()
    if parser.parse_args().print:
        print(json.dumps(answers))
        return
    RECORD.write_text(json.dumps(answers, indent=2) + "\n", encoding="utf-8")
    print(f"{RECORD}: {', '.join(answers)}")


if __name__ == "__main__":
    main()
