"""Lists the public names, folder by folder: those in `__all__` of memstate, of its packages and of the tools' packages.

The names are read from the source; no module is imported.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / "tools"
# folder of memstate/ (or "tools") -> title of its page, in the order of the pages
# Folders that are not named here follow, with their own names as titles.
TITLES = {
    "engine": "Manager",
    "requests": "Requests, steps, strategies",
    "state": "Layouts and presets",
    "prefix": "Prefix cache, sessions, policies",
    "tiers": "Host memory and stores",
    "kernels": "Kernels",
    "slots": "Slots and audits",
    "stats": "Figures",
    "metrics": "Metrics",
    "events": "Events",
    "errors": "Errors",
    "viz": "Pictures",
    "integrations": "Integrations",
    "cli": "Programs, from Python",
    "tools": "Tools, from Python",
}
# public names that no `__all__` has
OTHERS = (
    "memstate.engine.conversations.SessionCalls",
    "memstate.requests.handles.RowInfo",
    "memstate.errors.CompileFailed",
    "memstate.slots.inspect.Inspection",
    "memstate_tools.traces.make.make",
)
BACKEND = "memstate.kernels.dispatch"
# names at the start of their pages; other names follow in the order of `__all__`
LEADS = ("StateManager", "Request", "StateLayout", "Prefix", "Tiers", "Stats", "MemstateError")


class Entry(NamedTuple):
    """One name on a page of the API: its path in the source, and its options for mkdocstrings."""

    path: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the block that mkdocstrings reads."""
        lines = [f"::: {self.path}", *(["    options:"] if self.options else []), *(f"      {o}" for o in self.options)]
        return "\n".join(lines) + "\n"


@cache
def api() -> dict[str, list[Entry]]:
    """Returns folder -> its public names. A name that several packages export appears once, memstate first."""
    public_of: dict[str, str] = {}  # path of the definition -> public name
    for path in sorted(path for top in ("memstate", "tools") for path in (ROOT / top).rglob("__init__.py")):
        package = module_name(path)
        for name in exported(package):
            public_of.setdefault(origin(package, name), f"{package}.{name}")
    public_of.update(zip(OTHERS, OTHERS, strict=True))
    pages: dict[str, list[Entry]] = {area: [] for area in TITLES}
    for source, public in public_of.items():
        area = source.split(".")[1] if source.count(".") > 1 else "engine"
        area = "tools" if source.startswith("memstate_tools.") else area
        options = ("members: false",) if module_path(source) else ()
        pages.setdefault(area, []).append(Entry(public, options))
    pages["kernels"] += ops()
    return {
        area: sorted(entries, key=lambda entry: entry.path.removeprefix("memstate.") not in LEADS)
        for area, entries in pages.items()
    }


def ops() -> list[Entry]:
    """Returns the ops of a backend. Docstrings are taken from their references."""
    (backend,) = (node for node in parsed(BACKEND).body if isinstance(node, ast.ClassDef) and node.name == "Backend")
    return [
        Entry(origin(BACKEND, value.args[0].value.id) + f".{value.args[0].attr}", (f"heading: Backend.{target.id}",))
        for node in backend.body
        if isinstance(node, ast.Assign)
        for target, value in [(node.targets[0], node.value)]
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Op"
    ]


def exported(module: str) -> list[str]:
    """Returns the names in `__all__` of a module, then those that it imports under `TYPE_CHECKING` and loads late."""
    body = parsed(module).body
    lists = [node.value for node in body if isinstance(node, ast.Assign) and named(node, "__all__")]
    now = [each.value for value in lists for each in getattr(value, "elts", ()) if isinstance(each, ast.Constant)]
    later = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return now + sorted(
        alias.asname
        for block in later for node in block.body if isinstance(node, ast.ImportFrom)
        for alias in node.names if alias.asname == alias.name
    )  # fmt: skip


def named(node: ast.Assign, name: str) -> bool:
    """Returns whether an assignment gives a value to a name."""
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def origin(module: str, name: str) -> str:
    """Returns the dotted path of the definition behind a name of a module. Re-exports are followed."""
    path = imports(module).get(name)
    if path is None:
        return f"{module}.{name}"
    return path if module_path(path) else origin(*path.rsplit(".", 1))


@cache
def imports(module: str) -> dict[str, str]:
    """Returns the names that a module imports from memstate: name -> dotted path."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("memstate")
        for alias in node.names
    }


@cache
def parsed(module: str) -> ast.Module:
    """Returns the parsed source of a module."""
    path = module_path(module)
    if path is None:
        raise FileNotFoundError(f"{module}: a module imports from it, and it does not exist")
    return ast.parse(path.read_text())


def module_path(dotted: str) -> Path | None:
    """Returns the file of a module; None if the path does not name a module."""
    base = (TOOLS if dotted.startswith("memstate_tools") else ROOT).joinpath(*dotted.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def module_name(path: Path) -> str:
    """Returns the dotted path of a file."""
    home = TOOLS if path.is_relative_to(TOOLS) else ROOT
    return ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def definition(dotted: str) -> tuple[ast.AST, str]:
    """Returns the node that defines a public name, and its docstring. A constant's docstring is the text below it."""
    source = origin(*dotted.rsplit(".", 1))
    if module_path(source):
        return parsed(source), ast.get_docstring(parsed(source)) or ""
    module, name = source.rsplit(".", 1)
    body = parsed(module).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).split("=")[0]:
            text = after.value if isinstance(after, ast.Expr) else None
            return node, text.value if isinstance(text, ast.Constant) else ""
    raise LookupError(f"{dotted}: {module} does not define it")
