"""Write what is generated from the registry of checks: the manifest and the contract's page.

``python -m specsampling_conformance._generate`` in a checkout. The tests compare both with the registry, so that a new
check, or one that is gone, shows in the change that made it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specsampling_conformance._catalogue import all_checks, build_manifest
from specsampling_conformance._contract_page import contract_page

__all__ = ["generated", "main"]


def generated(root: Path) -> dict[Path, str]:
    """Return the content of every generated file of a checkout."""
    return {
        root / "conformance" / "specsampling_conformance" / "_manifest.json": _manifest_text(),
        root / "docs" / "contract.md": contract_page(),
    }


def _manifest_text() -> str:
    """Return the manifest as JSON with a line for each check and each set of capabilities."""
    sections = []
    for name, value in build_manifest(all_checks()).items():
        if isinstance(value, dict):
            entries = ",\n".join(f"    {json.dumps(key)}: {json.dumps(held)}" for key, held in value.items())
            sections.append(f"  {json.dumps(name)}: {{\n{entries}\n  }}")
        else:
            sections.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or with ``--check`` say which are stale.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; by default the process's own.

    Returns
    -------
    int
        Exit status: 1 when ``--check`` found a stale file.
    """
    parser = argparse.ArgumentParser(prog="python -m specsampling_conformance._generate", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the current directory)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    arguments = parser.parse_args(argv)
    stale = []
    for path, content in generated(arguments.root).items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(path)
            if not arguments.check:
                path.write_text(content, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{'stale' if arguments.check else 'wrote'}: {path}\n")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
