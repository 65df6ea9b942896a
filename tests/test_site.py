"""The site: it builds without a warning, has every public name, answers readers, and fetches nothing from elsewhere.

`make docs` runs this test, and so does `make proof`.
"""

import ast
import gc
import json
import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import memstate
from tests import TOOLS
from tests.support.questions import QUESTIONS
from tests.support.sources import ROOT
from tests.viz.pictures import CHROMIUM

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

from mkdocs.commands.build import build
from mkdocs.config import load_config

# Talks to the worker as the page does: message 0 sets it up, message 2 asks.
ASK = """async ([script, index, questions]) => {
    const worker = new Worker(script)
    const answer = message => new Promise(resolve => {
        worker.onmessage = event => resolve(event.data.data)
        worker.postMessage(message)
    })
    await answer({type: 0, data: {...index, options: {}}})
    const found = {}
    for (const question of questions) {
        const pages = (await answer({type: 2, data: question})).items.slice(0, 3)
        found[question] = pages.map(hits => hits.map(({location, score}) => ({location, score})))
    }
    return found
}"""


class Page(HTMLParser):
    """The anchors of a page that links can name, and the addresses that a browser loads for it without a click."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors, self.fetched = set[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag in ("script", "img", "iframe", "source", "link"):
            self.fetched.append(given.get("src") or given.get("href") or "")


@pytest.mark.proof
def test_site(tmp_path: Path) -> None:
    """All checks are in one test, because the build takes most of the time."""
    assert built(tmp_path) == [], "warnings"
    pages = {path: Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert sorted(unnamed({anchor for page in pages.values() for anchor in page.anchors})) == []
    assert [(path, link) for path, page in pages.items() for link in page.fetched if "//" in link] == []
    assert [(path, link) for path, page in pages.items() for link in page.fetched if not there(link, path)] == []
    assert [path for path in pages if re.search(r'href="[^"]*\.ipynb', path.read_text())] == []
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = (tmp_path / "notebooks" / path.stem / "index.html").read_text()
        assert page.count("<img ") == path.read_text().count('"image/svg+xml"')
        assert page.count("<code>") >= len(re.findall('"cell_type": "code"', path.read_text()))
    assert [path for path in tmp_path.rglob("*.css") if re.search(r"url\(['\"]?https?:", path.read_text())] == []
    listed = (tmp_path / "docs" / "names" / "index.html").read_text()
    assert [name for _, name in exported() if f">{name}</code>" not in listed] == []
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    assert [answer for answers in QUESTIONS.values() for answer in answers if answer not in places] == []
    if not CHROMIUM:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path: the search is not asked")
    hits = {question: shown(pages) for question, pages in asked(tmp_path, index).items()}
    missed = [question for question, answers in QUESTIONS.items() if not hits[question] & {*answers}]
    assert len(QUESTIONS) == 68 and len(missed) <= 6, missed


def asked(site: Path, index: Any) -> Any:
    """Returns the first three pages that the search worker finds for each question, each with its sections."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.route(
            "http://site/**", lambda route: route.fulfill(path=site / route.request.url.removeprefix("http://site/"))
        )
        tab.goto("http://site/404.html")
        answers = tab.evaluate(ASK, [worker.relative_to(site).as_posix(), index, list(QUESTIONS)])
        browser.close()
    return answers


def shown(pages: Any) -> set[str]:
    """Returns what the box shows of these pages before a click on `more`: the page, and the sections that fit best."""
    scored = [(hit, hits[0]["score"]) for hits in pages for hit in hits]
    return {hit["location"] for hit, best in scored if "#" not in hit["location"] or hit["score"] >= best}


def there(link: str, page: Path) -> bool:
    """Returns whether the file to which a page links is on the site."""
    return not link or link.startswith("/") or (page.parent / link.split("?")[0].split("#")[0]).exists()


def built(folder: Path) -> list[str]:
    """Builds the site as `make docs` does, without parts that only take time, and returns the warnings."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    # with True, the build would run ruff
    config.plugins["mkdocstrings"].config.handlers["python"]["options"]["separate_signature"] = False
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    gc.disable()  # without the collector, the build takes a fifth less time
    try:
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        gc.enable()
        logging.getLogger("mkdocs").removeHandler(handler)
    return warnings


def unnamed(anchors: set[str]) -> Iterator[str]:
    """Yields public names that have an anchor neither under their package nor under one around it."""
    for package, name in exported():
        parts = package.split(".")
        if not {".".join([*parts[:depth], name]) for depth in range(1, len(parts) + 1)} & anchors:
            yield f"{package}.{name}"


def exported() -> Iterator[tuple[str, str]]:
    """Yields (package, name) for each name in `__all__` of every package of the library and of the tools."""
    yield from (("memstate", name) for name in memstate.__all__ if name != "__version__")
    for path in [*(ROOT / "memstate").rglob("*/__init__.py"), *TOOLS.rglob("*/__init__.py")]:
        home = TOOLS if path.is_relative_to(TOOLS) else ROOT
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                package = ".".join(path.parent.relative_to(home).parts)
                later = [each for each in node.value.elts if isinstance(each, ast.Starred)]  # type: ignore[attr-defined]
                names = import_module(package).__all__ if later else ast.literal_eval(node.value)
                yield from ((package, name) for name in names)
