"""Parses the sources of the library and the kernels once for all tests of a process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def sources(folder: str) -> dict[Path, ast.Module]:
    """Returns path from the root -> parsed module, for all modules of a folder except the link memstate/kernels."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse((ROOT / path).read_text()) for path in paths if "kernels" not in path.parts[1:]}
