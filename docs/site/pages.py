"""Makes the pages of the site: the Markdown files of the repository, and the API and a map from the source.

mkdocs calls the functions `on_...`. Paths on the site are those of the repository, so links lead to the same pages here
and on a code host. A link to a notebook leads to its page. The modules of the commands are the only ones of the library
that are imported.
"""

import json
import re
from pathlib import Path
from typing import Any

from code_map import ROOT, code_map  # `code_map`, `names`, `notebook` and `public` lie beside this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from names import names
from notebook import notebook
from public import TITLES, api

PAGES = ("*.md", "docs/*.md", "benchmarks/*.md")
BESIDE = (  # files to which pages link
    "docs/*.svg", "docs/*.json", "docs/images/*", "benchmarks/results/*.json", "examples/*.py", "examples/*/*.py",
)  # fmt: skip
# start of an address -> factor of a search hit there; at other addresses the factor is 1
WEIGHTS = dict.fromkeys(
    ("docs/behaviours", "docs/decisions", "docs/map", "docs/promises", "ARCHITECTURE", "CHANGELOG"), 0.3
)
WEIGHTS |= {"docs/api": 0.1, "notebooks": 0.3}
WHOLE = 0.2  # factor of a hit of a whole page, whose title would otherwise hide its sections


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the index of names and the pages of the API at `API` of the navigation."""
    pages = [{"Index of names": "docs/names.md"}, *({title(area): f"docs/api/{area}.md"} for area in api())]
    config.nav = [{"API": pages} if "API" in entry else entry for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository, and the pages that are made from the source, to the files of the site."""
    for pattern in PAGES + BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for area, entries in api().items():
        text = "\n".join(map(str, entries))
        files.append(File.generated(config, f"docs/api/{area}.md", content=f"# {title(area)}\n\n{text}"))
    files.append(File.generated(config, "docs/map.md", content=code_map()))
    files.append(File.generated(config, "docs/names.md", content=names()))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        content, pictures = notebook(path)
        for name, text in {f"{path.stem}.md": content, **pictures}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes links to notebooks into links to their pages."""
    return re.sub(r"(\]\([^)\s]*)\.ipynb\b", r"\1.md", markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Weights the hits of the search: explanations come before lists. Removes code blocks from the index."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    if path.exists():
        index = json.loads(path.read_text())
        for entry in index["docs"]:
            page, _, section = entry["location"].partition("#")
            weights = (weight for start, weight in WEIGHTS.items() if page.startswith(start))
            entry["text"] = re.sub(r"<pre.*?</pre>", "", entry["text"], flags=re.DOTALL)
            entry["boost"] = next(weights, 1) * (1 if section else WHOLE)
        path.write_text(json.dumps(index))


def title(area: str) -> str:
    """Returns the title of a folder's page."""
    return TITLES.get(area, area.capitalize())
