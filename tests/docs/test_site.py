"""The built site is whole: every public name, every link into itself, nothing from elsewhere."""

import os
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

from stand_ins import import_packages, public_names

if "SPECSAMPLING_SITE" not in os.environ:
    pytest.skip("the site is built by `nox -s docs`", allow_module_level=True)
SITE = Path(os.environ["SPECSAMPLING_SITE"])
PACKAGES, _ = import_packages()


class Page(HTMLParser):
    """What a page names: its anchors, its links, and what the browser loads for it."""

    def __init__(self, file):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors.add(attrs.get("id"))
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag in ("script", "img") and attrs.get("src"):
            self.loaded.append(attrs["src"])
        if tag == "link" and attrs.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(attrs["href"])


@pytest.fixture(scope="module")
def pages():
    return {file: Page(file) for file in SITE.rglob("*.html") if "_static" not in file.parts}


def test_inventory_names_every_public_object_as_package_and_name():
    content = (SITE / "objects.inv").read_bytes()
    found = {line.split()[0] for line in zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()}
    public = [f"{package}.{name}" for package, name in public_names(PACKAGES)]
    assert [name for name in public if name not in found] == []
    assert [name for name in public if not (SITE / "api" / f"{name}.html").is_file()] == []


def test_nothing_is_loaded_from_elsewhere(pages):
    assert [(file.name, what) for file, page in pages.items() for what in page.loaded if urlsplit(what).netloc] == []
    styles = [file for file in (SITE / "_static").rglob("*.css") if re.search(r"url\(['\"]?https?:", file.read_text())]
    assert styles == []


def test_links_within_the_site_lead_somewhere(pages):
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loaded]:
            scheme, host, path, _, fragment = urlsplit(link)
            if scheme or host:
                continue
            to = (file.parent / unquote(path)).resolve() if path else file
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file() or (to in pages and fragment and unquote(fragment) not in pages[to].anchors):
                broken.append((file.name, link))
    assert broken == []


def test_formulas_are_set_by_a_local_mathjax(pages):
    (page,) = (page for file, page in pages.items() if file == SITE / "how-it-works.html")
    (script,) = (what for what in page.loaded if "mathjax" in what.lower())
    assert (SITE / urlsplit(script).path).is_file()


def test_types_in_signatures_are_links():
    text = (SITE / "api" / "specsampling.generate.html").read_text(encoding="utf-8")
    signature = text[text.index('id="specsampling.generate"') : text.index("</dt>")]
    linked = re.findall(r'href="([^"]*)"', signature)
    assert {"specsampling.Model.html#specsampling.Model", "specsampling.Sampling.html#specsampling.Sampling"} <= {
        *linked
    }


def test_search_finds_names():
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("expected_speedup", "TorchModel", "audit_transformers"))


def test_every_picture_has_both_themes(pages):
    shown = {what.rpartition("/")[2] for page in pages.values() for what in page.loaded if what.endswith(".svg")}
    light = {name.replace("-light", "") for name in shown if name.endswith("-light.svg")}
    dark = {name.replace("-dark", "") for name in shown if name.endswith("-dark.svg")}
    assert light == dark
    assert len(light) == 4
