"""Who may import whom: read from the source, so that nothing has to run.

Every rule is a function of one module's source, and is tried on sources that break it.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS

ROOT = Path(__file__).parent.parent

# A module imports from its own line and from the lines above. A name stands for a file or for a folder under memstate/.
LAYERS = (
    ("kernels",),
    ("errors", "arguments", "split", "layout", "stats", "tokens"),
    ("presets",),
    ("upload", "allocator", "registers", "ledger", "packet", "commands", "regions", "memory", "storage"),
    ("pool",),
    ("pages", "page_table", "holders", "requests", "steps", "tracking", "publisher", "settings"),
    ("prefix",),
    ("sessions", "wants"),
    ("tiers",),
    ("promotion",),
    ("readback", "windows", "admission", "stepping", "endings"),
    ("snapshot",),
    ("audit", "metrics", "viz"),
    ("engine",),
    ("warmup",),
    ("",),  # memstate/__init__.py: what `import memstate` offers; only what follows may import it
    ("planner", "integrations"),
    ("support", "bench", "compiling", "demo", "traces", "replay", "tuning"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Slots and planes do not know each other: one allocator can serve two storages.
OWNERSHIP = ("upload", "allocator", "registers", "packet", "commands")
NO_PLANE = ("split", "layout", "presets", "regions", "memory", "storage", "pool")
VIEWS = {"audit": ("snapshot",), "metrics": ("snapshot",), "viz": ("snapshot", "layout")}  # and the data they read
MARKUP = "viz.html"  # strings of plain data: a repr of any layer may load it, so it imports nothing of the library

OPEN_KERNEL_MODULES = ("dispatch", "tables", "catalog", "tuned")  # the others are reached through a Backend

Rule = Callable[[str, ast.Module], list[str]]


def module_name(path: Path) -> str:
    """`tracking.base` for memstate/tracking/base.py, `tracking` for its __init__, "" for memstate/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kernels" else parts[1:]
    return ".".join(part for part in parts if part != "__init__")


def sources(folder: str) -> dict[str, ast.Module]:
    """Every module of the library, or of the kernels, by name."""
    paths = [
        path for path in sorted((ROOT / folder).rglob("*.py")) if "kernels" not in path.relative_to(ROOT).parts[1:]
    ]
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, wherever the statement stands; a relative import shows as dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("memstate.kernels."):
            yield str(node.value)  # handed to import_module


def layer(target: str) -> str:
    """The entry of LAYERS that a dotted name belongs to; what the package itself offers belongs to the package."""
    name = f"{target}.".split(".")[1]
    return name if name in RANK else ""


def direction(name: str, tree: ast.Module) -> list[str]:
    """Imports that go from left to right, or to a module that this one must not know."""
    own, found = name.split(".")[0], []
    if own not in RANK:
        return [f"{name}: not in LAYERS; say where it goes"]
    for target in imported(tree):
        if target.startswith("."):
            found.append(f"{name}: relative import of {target}")
        if target.split(".")[0] != "memstate":
            continue
        other = layer(target)
        if RANK[other] > RANK[own] and not f"{target}.".startswith(f"memstate.{MARKUP}."):
            found.append(f"{name} imports {target}, which is above it")
        if own in VIEWS and other not in (own, "errors", *VIEWS[own]):
            found.append(f"{name} imports {target}; a view reads plain data and nothing else")
        if name == MARKUP:
            found.append(f"{name} imports {target}; it is loaded from every layer")
        if (own in OWNERSHIP and other in NO_PLANE) or (own in ("regions", "memory", "storage") and other in OWNERSHIP):
            found.append(f"{name} imports {target}: slots and planes do not know each other")
    return found


def kernel_direction(name: str, tree: ast.Module) -> list[str]:
    """Kernels import kernels alone; the references never import the kernels that they are compared with."""
    found = []
    twins = tuple(f"memstate.kernels.{module}." for module in OPS.values())
    for target in (f"{target}." for target in imported(tree)):
        if target.startswith((".", "memstate.")) and not target.startswith("memstate.kernels."):
            found.append(f"{name} imports {target}")
        if name.startswith("kernels.reference") and target.startswith(("triton.", *twins)):
            found.append(f"{name} imports {target}")
    return found


def past_the_dispatcher(name: str, tree: ast.Module) -> list[str]:
    """Imports of kernels: the library reaches them through a backend, which chooses and counts."""
    parts = [target.split(".") for target in imported(tree)]
    kernels = [part[2] for part in parts if part[:2] == ["memstate", "kernels"] and len(part) > 2]
    return [f"{name} imports the kernels of {module}" for module in kernels if module not in OPEN_KERNEL_MODULES]


def cycle(trees: dict[str, ast.Module]) -> list[str]:
    """The names of modules that import each other in a circle."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for target in imported(tree):
            parts = target.split(".")[1:]
            prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            graph[name] |= {next((prefix for prefix in prefixes if prefix in trees), name)} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("rule", [direction, past_the_dispatcher])
def test_library_keeps_the_rule(rule: Rule) -> None:
    assert [problem for name, tree in sources("memstate").items() for problem in rule(name, tree)] == []


def test_kernels_import_kernels_alone() -> None:
    assert [problem for name, tree in sources("kernels").items() for problem in kernel_direction(name, tree)] == []


def test_no_import_cycles() -> None:
    assert cycle(sources("memstate")) == []
    assert cycle({"a": ast.parse("from memstate.b import x"), "b": ast.parse("import memstate.a")}) != []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (direction, "storage", "from memstate.engine import StateManager"),
        (direction, "requests", "def f():\n    import memstate.engine"),
        (direction, "pool", "from memstate import StateManager"),
        (direction, "pool", "import memstate"),
        (direction, "pool", "from .storage import Storage"),
        (direction, "nowhere", "import torch"),
        (direction, "allocator", "from memstate.storage import Storage"),
        (direction, "commands", "from memstate import layout"),
        (direction, "storage", "import memstate.allocator"),
        (direction, "audit", "from memstate.registers import RegisterFile"),
        (direction, "audit", "from memstate.layout import StateLayout"),
        (direction, "viz.strips", "from memstate.storage import Storage"),
        (direction, "viz.html", "from memstate.errors import InvalidArgument"),
        (direction, "layout", "from memstate.viz import slot"),
        (kernel_direction, "kernels.copy", "from memstate.errors import OutOfSlots"),
        (kernel_direction, "kernels.copy", "import memstate"),
        (kernel_direction, "kernels.reference.copy", "from memstate.kernels.copy import copy_slots"),
        (kernel_direction, "kernels.reference.copy", "import triton.language as tl"),
        (past_the_dispatcher, "engine", "from memstate.kernels.bitmap import claim"),
        (past_the_dispatcher, "engine", "from memstate.kernels import bitmap"),
        (past_the_dispatcher, "engine", "import_module('memstate.kernels.reference.bitmap')"),
    ],
)
def test_rule_finds_a_violation(rule: Rule, name: str, source: str) -> None:
    assert rule(name, ast.parse(source)) != []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (direction, "engine", "from memstate.tracking.base import Tracking\nfrom memstate import audit"),
        (direction, "cli", "import memstate as ms\nfrom memstate import StateManager"),
        (direction, "viz.strips", "from memstate.layout import StateLayout\nfrom memstate.viz.touch import blocks"),
        (direction, "layout", "def f():\n    from memstate.viz import html"),
        (kernel_direction, "kernels.copy", "from memstate.kernels import tables\nimport triton"),
    ],
)
def test_rule_lets_the_rest_pass(rule: Rule, name: str, source: str) -> None:
    assert rule(name, ast.parse(source)) == []


def run_without(modules: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process in which importing one of the modules fails."""
    block = f"import sys; sys.modules.update(dict.fromkeys({modules.split()!r}))\n"
    return subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_core_needs_no_extra_and_no_triton() -> None:
    code = (
        "import memstate; from memstate.kernels.dispatch import Backend\n"
        "backend = Backend(); print(backend.name, memstate.SlotAllocator(3, backend).claim(2).tolist())"
    )
    done = run_without("typer rich pytest hypothesis triton", code)
    assert (done.stdout.strip(), done.returncode) == ("reference [1, 2]", 0), done.stderr


def test_command_line_names_the_missing_extra() -> None:
    done = run_without("typer rich", "import runpy; runpy.run_module('memstate', run_name='__main__')")
    assert done.returncode != 0
    assert "pip install '.[cli]' in a checkout" in done.stderr
