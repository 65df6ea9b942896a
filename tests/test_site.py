"""The site: it builds without a warning, has every public name, fetches nothing, and shows what a code host shows."""

import ast
import gc
import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config


class Page(HTMLParser):
    """What a reader of a page sees, the anchors that links can name, and what a browser fetches for it.

    Attributes:
        content: The text between <article> and its end without any space, with the tags that give it its form.
        anchors: All ids.
        fetched: Addresses that a browser loads without a click.
    """

    FORM = ("h1", "h2", "h3", "li", "table", "tr", "td", "th", "pre", "img", "strong", "em")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.content, self.anchors, self.fetched, self.shown = "", set[str](), list[str](), False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag in ("script", "img", "iframe", "source", "link"):
            self.fetched.append(given.get("src") or given.get("href") or "")
        self.shown = self.shown or tag == "article"
        if self.shown and tag in self.FORM:
            self.content += f"<{tag}>"

    def handle_endtag(self, tag: str) -> None:
        self.shown = self.shown and tag != "article"

    def handle_data(self, data: str) -> None:
        if self.shown:
            self.content += "".join(data.replace("\N{PILCROW SIGN}", "").split())


def test_site(tmp_path: Path) -> None:
    """One test, because the build takes most of the time."""
    assert built(tmp_path) == [], "warnings"
    pages = {path: Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert sorted(unnamed({anchor for page in pages.values() for anchor in page.anchors})) == []
    assert [(path, link) for path, page in pages.items() for link in page.fetched if "//" in link] == []
    assert [(path, link) for path, page in pages.items() for link in page.fetched if not there(link, path)] == []
    assert [path for path in tmp_path.rglob("*.css") if re.search(r"url\(['\"]?https?:", path.read_text())] == []
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert len(sources) >= 20
    assert [found for source in sources for found in differences(source, pages[at(source, tmp_path)])] == []


def there(link: str, page: Path) -> bool:
    """Whether a page can load a file of the site."""
    return not link or link.startswith("/") or (page.parent / link.split("?")[0].split("#")[0]).exists()


def built(folder: Path) -> list[str]:
    """Builds the site as `make docs` does and returns the warnings; without what only takes time."""
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins["material/search"].config.enabled = False
    config.plugins["mkdocstrings"].config.handlers["python"]["options"]["separate_signature"] = False  # runs ruff
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    gc.disable()  # a fifth of the time
    try:
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        gc.enable()
        logging.getLogger("mkdocs").removeHandler(handler)
    return warnings


def at(source: Path, site: Path) -> Path:
    """The page of a Markdown file."""
    name = source.relative_to(ROOT).with_suffix("").as_posix()
    return site / ("index.html" if name == "README" else f"{name}/index.html")


def unnamed(anchors: set[str]) -> Iterator[str]:
    """Public names that stand neither under their package nor under one around it."""
    for package, name in exported():
        parts = package.split(".")
        if not {".".join([*parts[:depth], name]) for depth in range(1, len(parts) + 1)} & anchors:
            yield f"{package}.{name}"


def exported() -> Iterator[tuple[str, str]]:
    """Every package of the library with the names in its `__all__`."""
    for path in (ROOT / "memstate").rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                for name in ast.literal_eval(node.value):
                    yield ".".join(path.parent.relative_to(ROOT).parts), name


def differences(source: Path, page: Page) -> Iterator[str]:
    """Where a page differs from what a code host makes of its file: the file's name, both texts from there on."""
    html = MarkdownIt("commonmark").enable("table").render(source.read_text())
    ours, theirs = page.content, Page(f"<article>{html}</article>").content
    if ours != theirs:
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        yield f"{source.name}: {ours[first - 20 : first + 60]!r} instead of {theirs[first - 20 : first + 60]!r}"


def test_a_name_that_is_nowhere_is_found() -> None:
    anchors = {f"{package}.{name}" for package, name in exported()} - {"memstate.integrations.handover.HandOver"}
    assert list(unnamed(anchors)) == ["memstate.integrations.handover.HandOver"]


def test_a_list_that_the_site_does_not_see_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("Two things:\n* one\n* two\n")
    same = Page("<article><p>Two things:</p><ul><li>one</li> <li>two</li></ul></article>")
    assert list(differences(page, same)) == []
    assert len(list(differences(page, Page("<article><p>Two things: * one * two</p></article>")))) == 1
