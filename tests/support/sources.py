"""Parses the sources of the library and the kernels once for all tests of a process, and runs changed sources."""

import ast
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
Change = tuple[str, str]  # a line, and the line that replaces it


@cache
def sources(folder: str) -> dict[Path, ast.Module]:
    """Returns path from the root -> parsed module, for all modules of a folder except the link memstate/kernels."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse((ROOT / path).read_text()) for path in paths if "kernels" not in path.parts[1:]}


def changed(source: str, *changes: Change) -> Any:
    """Runs a source text with some lines replaced. Returns its module."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    made = ModuleType("changed")
    exec(source, vars(made))
    return made
