"""The public names, folder by folder: those in `__all__` of memstate, of its packages and of the tools' packages.

They are read from the source; no module is imported.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / "tools"
# A page for each folder of memstate/ and one for the tools, in this order; folders that are not named here follow under
# their own names.
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
# Public, and in no `__all__`.
OTHERS = (
    "memstate.engine.conversations.SessionCalls",
    "memstate.requests.handles.RowInfo",
    "memstate.errors.CompileFailed",
    "memstate.slots.inspect.Inspection",
    "memstate_tools.traces.make.make",
)
BACKEND = "memstate.kernels.dispatch"
# First on their pages; other names follow as `__all__` has them.
LEADS = ("StateManager", "Request", "StateLayout", "Prefix", "Tiers", "Stats", "MemstateError")


class Entry(NamedTuple):
    """Something on a page of the API: its path in the source, and options of mkdocstrings for it."""

    path: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The block that mkdocstrings reads."""
        lines = [f"::: {self.path}", *(["    options:"] if self.options else []), *(f"      {o}" for o in self.options)]
        return "\n".join(lines) + "\n"


@cache
def api() -> dict[str, list[Entry]]:
    """The public names of each folder, each once: as memstate has it, otherwise as its package has it."""
    found: dict[str, str] = {}  # where the source defines it -> its public name
    for path in sorted(path for top in ("memstate", "tools") for path in (ROOT / top).rglob("__init__.py")):
        package = module_name(path)
        for name in exported(package):
            found.setdefault(origin(package, name), f"{package}.{name}")
    found.update(zip(OTHERS, OTHERS, strict=True))
    pages: dict[str, list[Entry]] = {area: [] for area in TITLES}
    for source, public in found.items():
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
    """The ops of a backend; their references have the docstrings."""
    (backend,) = (node for node in parsed(BACKEND).body if isinstance(node, ast.ClassDef) and node.name == "Backend")
    return [
        Entry(origin(BACKEND, value.args[0].value.id) + f".{value.args[0].attr}", (f"heading: Backend.{target.id}",))
        for node in backend.body
        if isinstance(node, ast.Assign)
        for target, value in [(node.targets[0], node.value)]
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Op"
    ]


def exported(module: str) -> list[str]:
    """The names in `__all__` of a module, and those that it imports for type checkers and loads later."""
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
    """Whether an assignment gives a value to a name."""
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def origin(module: str, name: str) -> str:
    """The dotted path of what a name of a module stands for, through all modules that pass it on."""
    found = imports(module).get(name)
    if found is None:
        return f"{module}.{name}"
    return found if module_path(found) else origin(*found.rsplit(".", 1))


@cache
def imports(module: str) -> dict[str, str]:
    """The names that a module imports from memstate, with their dotted paths."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("memstate")
        for alias in node.names
    }


@cache
def parsed(module: str) -> ast.Module:
    """The source of a module."""
    path = module_path(module)
    if path is None:
        raise FileNotFoundError(f"{module}: a module imports from it, and it does not exist")
    return ast.parse(path.read_text())


def module_path(dotted: str) -> Path | None:
    """The file of a module, None where a path names something else."""
    base = (TOOLS if dotted.startswith("memstate_tools") else ROOT).joinpath(*dotted.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def module_name(path: Path) -> str:
    """The dotted path of a file."""
    home = TOOLS if path.is_relative_to(TOOLS) else ROOT
    return ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def definition(dotted: str) -> tuple[ast.AST, str]:
    """What defines a public name, and its docstring; of a constant, the text below it."""
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
