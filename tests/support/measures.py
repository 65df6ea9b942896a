"""Measures the project without importing it: lines of code, words, tests for None, and imports between rooms."""

import ast
import io
import shutil
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import ROOT, sources

SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = {"", "class", "def", "async"}  # first words of statements that a docstring may follow; "": the module


def tracked(pattern: str) -> list[Path]:
    """Returns the tracked files that fit a pattern, relative to the root. Skips the test if git does not track them."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("git does not track these files")
    done = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git does not list these files: {done.stderr.strip()}")
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def code_lines(text: str) -> int:
    """Returns the number of lines with code. Blank lines, comments and docstrings do not count."""
    held: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    above = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in SILENT:
            continue
        if token.type != tokenize.NEWLINE:
            statement.append(token)
            continue
        if above not in DOCUMENTED or any(part.type != tokenize.STRING for part in statement):
            held.update(at for part in statement for at in range(part.start[0], part.end[0] + 1))
        above = statement[0].string
        statement = []
    return len(held)


def folder(path: Path) -> str:
    """Returns the folder whose bar a file counts for: a folder of the root or of `memstate/`."""
    return path.parts[0] if path.parts[0] != "memstate" else "/".join(path.parts[:-1][:2])


def lines() -> Counter[str]:
    """Returns the lines of code of each folder. "memstate" has only the files directly in it."""
    counts: Counter[str] = Counter()
    for path in tracked("*.py"):
        counts[folder(path)] += code_lines((ROOT / path).read_text("utf-8"))
    return counts


def words() -> dict[str, int]:
    """Returns the number of words of all Markdown pages."""
    return {"markdown": sum(len((ROOT / path).read_text("utf-8").split()) for path in tracked("*.md"))}


def trees(*folders: str) -> dict[Path, ast.Module]:
    """Returns the parsed modules of some folders."""
    names = {*tracked("*.py")}
    return {path: tree for folder in folders for path, tree in sources(folder).items() if path in names}


def nones() -> dict[str, int]:
    """Returns how often the code of `memstate/engine` asks whether something is None."""
    engine = "memstate/engine"
    return {engine: sum(_asks(node) for tree in trees(engine).values() for node in ast.walk(tree))}


def _asks(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Is | ast.IsNot):
        return False
    asked = node.comparators[0]
    return isinstance(asked, ast.Constant) and asked.value is None


def arrows() -> dict[str, int]:
    """Returns the number of pairs (a room, another room that it imports), anywhere in its modules."""
    parsed = trees("kernels", "memstate", "tools")
    rooms = {_module(path): room(path) for path in parsed}
    pairs = set()
    for path, tree in parsed.items():
        if path.name != "__main__.py":  # this file only starts the command line
            pairs |= {(room(path), other) for name in imported(tree) if (other := _nearest(name, rooms))}
    return {"rooms": sum(own != other for own, other in pairs)}


def room(path: Path) -> str:
    """Returns the room of a file: a folder of `memstate/`, an adapter, the kernels or the tools.

    `files` are those directly in `memstate/`, and `door` is its `__init__.py`.
    """
    top, *parts = path.parts[:-1]
    if top != "memstate":
        return top
    if not parts:
        return "door" if path.name == "__init__.py" else "files"
    return "/".join(parts[:2]) if parts[0] == "integrations" else parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a module imports. Imports under TYPE_CHECKING do not count."""
    unread = tree.body if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING" else []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if node not in unread)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node not in unread)
        elif not isinstance(node, ast.expr) and node not in unread:
            yield from imported(node)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = ("memstate", *parts) if parts[0] == "kernels" else parts[parts[0] == "tools" :]
    return ".".join(part for part in parts if part != "__init__")


def _nearest(name: str, rooms: dict[str, str]) -> str | None:
    """Returns the room of the module with this dotted name, or of the module that contains the name."""
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return rooms.get(name)
