"""The source of the library and of the kernels, parsed once for all tests of one process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def sources(folder: str) -> dict[Path, ast.Module]:
    """Every module of a folder, by its path from the root; without what memstate/ has of kernels/ through a link."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse((ROOT / path).read_text()) for path in paths if "kernels" not in path.parts[1:]}
