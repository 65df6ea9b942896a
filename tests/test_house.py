"""House rules that no tool checks: clean files, docstrings, one signature for each operation, few ways inside."""

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS, Backend
from tests.support.sources import ROOT, sources

# A letter of each stands in brackets, because this file is searched as well.
UNWANTED = {
    "a path of one machine": r"/([h]ome|[w]ork|[r]oot|[U]sers)/",
    "a package index": r"[p]ypi\.org|[p]ythonhosted|download\.[p]ytorch|[i]ndex-url",
    "a package of another project": r"[p]ip install( -\S+)* [\\\"']*memstate(?![-\w])",
    "an extra of another project's package": r"(?<![-.\w])[m]emstate\[\w+(,\w+)*\]",
    "a conflict of a merge": r"(?m)^[<>]{7} ",
    "a promise instead of code": r"\b([T]ODO|[F]IXME|[X]XX)\b",
}


def tracked() -> list[Path]:
    """The files of the project: what git has or would add; without git, whatever is there."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1] or [str(path) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [path for name in names if (path := ROOT / name).is_file() and not path.is_symlink()]


@pytest.mark.parametrize("what", UNWANTED)
def test_no_file_contains(what: str) -> None:
    texts = {path: path.read_text(errors="ignore") for path in tracked() if b"\0" not in path.read_bytes()}
    assert [
        f"{path.relative_to(ROOT)}: {m[0]}" for path, text in texts.items() if (m := re.search(UNWANTED[what], text))
    ] == []


def test_unwanted_patterns_find_what_they_are_for() -> None:
    samples = (
        "see /h_ome/someone/x",
        "pip install --i_ndex-url somewhere",
        "p_ip install -U memstate",
        "'m_emstate[cli,viz]'",
        "<<<_<<<< HEAD",
        "# T_ODO: later",
    )
    texts = [sample.replace("_", "") for sample in samples]
    assert all(re.search(pattern, text) for pattern, text in zip(UNWANTED.values(), texts, strict=True))


def modules() -> dict[str, ast.Module]:
    """Every module of the library and the kernels, by path."""
    return {str(path): tree for folder in ("kernels", "memstate") for path, tree in sources(folder).items()}


def named(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes, functions and methods; methods as `Class.method`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{inside}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{node.name}.")


def undocumented(trees: dict[str, ast.Module]) -> list[str]:
    """Public names without a docstring; a method may leave it to the class that it takes it from."""
    nodes = [
        (path, name, node) for path, tree in trees.items() for name, node in named(tree.body)
        if "overload" not in [ast.unparse(each) for each in node.decorator_list]
    ]  # fmt: skip
    documented = {name for _, name, node in nodes if ast.get_docstring(node)}
    parents: dict[str, list[str]] = {}
    for _, name, node in nodes:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
            parents.setdefault(name, []).extend(base for base in bases if base != name)

    def inherited(name: str) -> bool:
        owner, _, method = name.rpartition(".")
        return any(
            f"{parent}.{method}" in documented or inherited(f"{parent}.{method}") for parent in parents.get(owner, [])
        )

    public = [entry for entry in nodes if not any(part.startswith("_") for part in entry[1].split("."))]
    return [f"{path}: {name}" for path, name, node in public if not (ast.get_docstring(node) or inherited(name))]


def test_public_functions_have_a_docstring() -> None:
    assert undocumented(modules()) == []


def test_modules_have_a_docstring() -> None:
    assert [path for path, tree in modules().items() if tree.body and not ast.get_docstring(tree)] == []


def test_undocumented_finds_what_is_not_inherited() -> None:
    tree = ast.parse("""
class Base:
    "Says what it is."
    def run(self):
        "Runs."
class _Between(Base): ...
class Child(_Between):
    "Says what it is."
    def run(self): ...
    def stop(self): ...
def free(): ...
def _own(): ...
""")
    assert undocumented({"a.py": tree}) == ["a.py: Child.stop", "a.py: free"]


PRIVATE = r"_(allocator|cache|commands|holdings|marks|pages|registers|sessions|table)"
WAYS = [ROOT / "tests" / "support" / name for name in ("inside.py", "owners.py")]


def test_tests_reach_into_private_tables_through_two_files() -> None:
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py") if path not in WAYS}
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in texts if re.search(rf"\.{PRIVATE}\b", texts[path])
        for node in ast.walk(ast.parse(texts[path]))
        if isinstance(node, ast.Attribute) and re.fullmatch(PRIVATE, node.attr) and ast.unparse(node.value) != "self"
    ] == []  # fmt: skip


def signature(path: Path, name: str) -> str:
    """The parameters of a function, with defaults and types, and what it returns."""
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"{path}: {name} is defined {len(functions)} times"
    returns = functions[0].returns
    return f"({ast.unparse(functions[0].args)}) -> {ast.unparse(returns) if returns else ''}"


@pytest.mark.parametrize("op", OPS)
def test_kernel_and_reference_share_name_and_signature(op: str) -> None:
    file = f"{OPS[op]}.py"
    assert signature(ROOT / "kernels" / file, op) == signature(ROOT / "kernels" / "reference" / file, op)


@pytest.mark.parametrize("op", OPS)
def test_a_backend_shows_the_signature_and_the_shapes_of_its_ops(op: str) -> None:
    shown, reference = getattr(Backend("reference"), op), getattr(Backend, op)
    assert inspect.signature(shown) == inspect.signature(reference)
    assert inspect.getdoc(shown) == inspect.getdoc(reference)
    parameters = inspect.signature(shown).parameters
    assert all(re.search(rf"^ *{name}: ", shown.__doc__, re.MULTILINE) for name in parameters)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())
