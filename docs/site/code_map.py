"""The map of the code: every module with the first sentence of its docstring, folder by folder.

The site shows it as a page, and `python3 docs/site/code_map.py` prints it. No module is imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# From the device up: a layer imports only from those before it. Folders that are not named here follow.
LAYERS = (
    "kernels", "memstate", "state", "slots", "requests", "prefix", "tiers", "events", "engine", "testing", "viz",
    "metrics", "integrations", "cli", "tools",
)  # fmt: skip
HEAD = """# Map of the code

Made from the docstrings of the modules, layer by layer.
[ARCHITECTURE](../ARCHITECTURE.md) says how the layers work together.
"""


def code_map() -> str:
    """The map, as Markdown."""
    return "\n".join([HEAD, *(line for folder in folders() for line in lines(folder))])


def folders() -> list[Path]:
    """The folders with modules, in the order of the layers; without what memstate/ has of kernels/ through a link."""
    tops = ("kernels", "memstate", "tools")
    found = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")}
    return sorted((folder for folder in found if "kernels" not in folder.parts[1:]), key=rank)


def rank(folder: Path) -> tuple[int, Path]:
    """Where a folder stands on the map."""
    layer = folder.parts[1] if len(folder.parts) > 1 and folder.parts[0] == "memstate" else folder.parts[0]
    return (LAYERS.index(layer) if layer in LAYERS else len(LAYERS)), folder


def lines(folder: Path) -> Iterator[str]:
    """The part of one folder: what its package says, then its modules."""
    yield f"## {folder.as_posix()}/\n"
    if (ROOT / folder / "__init__.py").exists():
        yield f"{sentence(ROOT / folder / '__init__.py')}\n"
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.name != "__init__.py":
            yield f"* `{path.name}`: {sentence(path)}"
    yield ""


def sentence(module: Path) -> str:
    """The first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse(module.read_text())))


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring or help; empty without one."""
    paragraph = (text or "").split("\n\n")[0]
    return re.split(r"(?<=[.?]) (?=[A-Z`])", " ".join(paragraph.split()))[0]


if __name__ == "__main__":
    print(code_map())
