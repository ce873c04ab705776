"""The code in README and pages runs, as it is read.

A ``python`` block is executed and a ``pycon`` block is a doctest; the blocks of a page share one namespace, in order.
What cannot run (an excerpt, a large model) is fenced as ``py``. Pages of backends run where the framework is installed.
"""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md")]
FRAMEWORKS = {"jax": "jax", "onnxruntime": "onnx", "torch": "torch"}
READMES = [*ROOT.glob("*.md"), ROOT / "specsampling" / "_bundled" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|pycon)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


def blocks(page):
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield match["language"], re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    if page.stem in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[page.stem])
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for language, code, line in blocks(page):
        if language == "python":
            # Line numbers in a traceback are the page's.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        else:
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
            runner.run(test, clear_globs=False)
            namespace.update(test.globs)
            assert runner.failures == 0, f"{page.name}:{line}: see the output"


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_outside_the_site_lead_to_files(page):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
