"""Makes the map of the code: every module with the first sentence of its docstring, folder by folder.

The site shows the map as a page, and `python3 docs/site/code_map.py` prints it. No module is imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# from the device up: a layer imports only from earlier ones; folders that are not named here come last
LAYERS = (
    "kernels", "memstate", "state", "slots", "requests", "prefix", "tiers", "events", "engine", "testing", "viz",
    "metrics", "integrations", "cli", "tools",
)  # fmt: skip
HEAD = """# Map of the code

Made from the docstrings of the modules, layer by layer.
[ARCHITECTURE](../ARCHITECTURE.md) says how the layers work together.
"""


def code_map() -> str:
    """Returns the map as Markdown."""
    return "\n".join([HEAD, *(line for folder in folders() for line in lines(folder))])


def folders() -> list[Path]:
    """Returns the folders with modules, in the order of the layers. The link memstate/kernels is left out."""
    tops = ("kernels", "memstate", "tools")
    folders_of_modules = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")}
    return sorted((folder for folder in folders_of_modules if "kernels" not in folder.parts[1:]), key=rank)


def rank(folder: Path) -> tuple[int, Path]:
    """Returns the place of a folder on the map, as a sort key."""
    layer = folder.parts[1] if len(folder.parts) > 1 and folder.parts[0] == "memstate" else folder.parts[0]
    return (LAYERS.index(layer) if layer in LAYERS else len(LAYERS)), folder


def lines(folder: Path) -> Iterator[str]:
    """Yields the lines of one folder: the sentence of its package, then its modules."""
    yield f"## {folder.as_posix()}/\n"
    if (ROOT / folder / "__init__.py").exists():
        yield f"{sentence(ROOT / folder / '__init__.py')}\n"
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.name != "__init__.py":
            yield f"* `{path.name}`: {sentence(path)}"
    yield ""


def sentence(module: Path) -> str:
    """Returns the first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse(module.read_text())))


def first_sentence(text: str | None) -> str:
    """Returns the first sentence of a docstring or of a help text; empty if there is no text."""
    paragraph = (text or "").split("\n\n")[0]
    return re.split(r"(?<=[.?]) (?=[A-Z`])", " ".join(paragraph.split()))[0]


if __name__ == "__main__":
    print(code_map())
