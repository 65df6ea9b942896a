"""Tests which imports each module has, read from the source, so that nothing has to run.

Every rule is a function of one module's source, and is tried on sources that break it. `memstate_tools`, the programs
beside the library, may import all of it; nothing of the library imports them.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS
from tests.support.processes import python
from tests.support.sources import ROOT, sources

# Every folder of memstate/ is one layer: its modules import from their own folder and from those above it in this list.
# BASE stands for the files beside the folders; PACKAGE for memstate/__init__.py.
BASE = (
    "alone lazy errors lasting logs guard checks salts container sizes streams tokens stats absent atomic tables sheet"
)
PACKAGE = "memstate"
TOOLS = "memstate_tools"
LAYERS = (
    ("kernels",),
    (BASE,),
    ("state", "slots"),
    ("requests",),
    ("prefix",),
    ("tiers",),
    ("choices",),
    ("events",),
    ("engine",),
    ("testing",),
    ("viz",),
    (PACKAGE,),
    ("metrics", "integrations"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for folder in names for name in folder.split()}

APART = {"state": "slots", "slots": "state"}  # one allocator can serve the planes of two models
# layer that only draws -> modules that it may import: they have plain data, or say where bits and words lie
VIEWS = {
    "viz": (
        "viz.", "slots.inspect.", "slots.journal.", "slots.audit.", "state.layout.", "stats.", "kernels.levels.",
        "kernels.tables.", "checks.", "errors.", "lazy.", "sheet.", "sizes.",
    )
}  # fmt: skip
SHOWING = "sheet"  # base class of objects in every layer; it loads `viz` when an object is shown

# Kernel modules that the library may import. Other kernel modules are reached through a Backend.
OPEN_KERNEL_MODULES = (
    "dispatch", "rules", "tables", "levels", "configs", "tuned", "tuned_files", "warps",
    "interpreter", "own", "remembered",
)  # fmt: skip
ASKING = ("choices",)  # launches nothing, and asks kernels for the keys of launches

Rule = Callable[[str, ast.Module], list[str]]


def module_name(path: Path) -> str:
    """Returns the name of a module: `tiers.keys` for memstate/tiers/keys.py, `tiers` for its __init__, "" for memstate.

    The tools have whole names, such as `memstate_tools.tuning.grid`.
    """
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "kernels" else parts[1:]
    return ".".join(part for part in parts if part != "__init__")


def modules(folder: str) -> dict[str, ast.Module]:
    """Returns name -> source of every module of the library, of the kernels, or of the tools."""
    return {module_name(path): tree for path, tree in sources(folder).items()}


@cache
def imported(tree: ast.AST) -> Sequence[str]:
    """Returns dotted names that a module imports, wherever the statement stands; a relative import shows as dots."""
    return tuple(_imported(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("memstate.kernels."):
            yield str(node.value)  # an argument of import_module


def layer(target: str) -> str:
    """Returns the folder, or the file beside the folders, that a dotted name belongs to."""
    name = f"{target}.".split(".")[1]
    return name if name in RANK else PACKAGE


def direction(name: str, tree: ast.Module) -> list[str]:
    """Returns the imports of layers that come later in `LAYERS`, or that this module must not import for another
    reason.
    """
    own, faults = name.split(".")[0] or PACKAGE, []
    if own not in RANK:
        return [f"{name}: not in LAYERS; say where it goes"]
    for target in imported(tree):
        if target.startswith("."):
            faults.append(f"{name}: relative import of {target}")
        if target.split(".")[0] == TOOLS:
            faults.append(f"{name} imports {target}: the tools stand beside the library")
        if target.split(".")[0] != "memstate":
            continue
        other, short = layer(target), f"{target}.".removeprefix("memstate.")
        if RANK[other] > RANK[own] and (name, other) != (SHOWING, "viz"):
            faults.append(f"{name} imports {target}, which is a layer above it")
        if own in VIEWS and not short.startswith(VIEWS[own]):
            faults.append(f"{name} imports {target}; a view reads plain data and nothing else")
        if other == APART.get(own):
            faults.append(f"{name} imports {target}: slots and the bytes in them do not know each other")
    return faults


def of_the_tools(name: str, tree: ast.Module) -> list[str]:
    """Returns imports of the tools that are relative, or lead into the tests."""
    roots = {"", "tests"}
    return [f"{name} imports {target}" for target in imported(tree) if target.split(".")[0] in roots]


def early(name: str, tree: ast.Module) -> list[str]:
    """Returns the imports of `viz` that run before an object is shown."""
    targets = [target for node in tree.body if not isinstance(node, ast.ClassDef) for target in imported(node)]
    return [f"{name} imports {target} too early" for target in targets if name == SHOWING and "memstate.viz" in target]


def kernel_direction(name: str, tree: ast.Module) -> list[str]:
    """Returns imports of kernels from outside the kernels, and imports of references from their own kernels."""
    faults = []
    twins = tuple(f"memstate.kernels.{module}." for module in OPS.values())
    for target in (f"{target}." for target in imported(tree)):
        if target.startswith((".", "memstate.")) and not target.startswith("memstate.kernels."):
            faults.append(f"{name} imports {target}")
        if name.startswith("kernels.reference") and target.startswith(("triton.", *twins)):
            faults.append(f"{name} imports {target}")
    return faults


def past_the_dispatcher(name: str, tree: ast.Module) -> list[str]:
    """Returns imports of kernels, which the library reaches through a backend that chooses and counts."""
    parts = [target.split(".") for target in imported(tree)]
    kernels = [part[2] for part in parts if part[:2] == ["memstate", "kernels"] and len(part) > 2]
    closed = [module for module in kernels if module not in OPEN_KERNEL_MODULES and name not in ASKING]
    return [f"{name} imports the kernels of {module}" for module in closed]


def cycle(trees: dict[str, ast.Module]) -> list[str]:
    """Returns the names of modules that import each other in a circle."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for target in imported(tree) if name != SHOWING else ():  # `sheet` imports when an object is shown: see `early`
            root, *parts = target.split(".")
            if root == TOOLS:
                parts.insert(0, root)
            elif root != "memstate":
                continue
            prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            graph[name] |= {next((prefix for prefix in prefixes if prefix in trees), name)} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("rule", [direction, early, past_the_dispatcher])
def test_library_keeps_the_rule(rule: Rule) -> None:
    assert [problem for name, tree in modules("memstate").items() for problem in rule(name, tree)] == []


@pytest.mark.parametrize("rule", [of_the_tools, past_the_dispatcher])
def test_tools_keep_the_rule(rule: Rule) -> None:
    assert [problem for name, tree in modules("tools").items() for problem in rule(name, tree)] == []


def test_kernels_import_kernels_alone() -> None:
    assert [problem for name, tree in modules("kernels").items() for problem in kernel_direction(name, tree)] == []


def test_no_import_cycles() -> None:
    assert cycle(modules("memstate")) == []
    assert cycle(modules("tools")) == []
    assert cycle({"a": ast.parse("from memstate.b import x"), "b": ast.parse("import memstate.a")}) != []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (direction, "requests.table", "def f():\n    import memstate.engine.manager"),
        (direction, "engine.pool", "from memstate import StateManager"),
        (direction, "engine.pool", "from .planes import Storage"),
        (direction, "nowhere.planes", "import torch"),
        (direction, "cli.app", "def f():\n    from memstate_tools.commands import demo"),
        (of_the_tools, "memstate_tools.tuning.grid", "from . import cost"),
        (direction, "slots.commands", "from memstate.state import layout"),
        (direction, "viz.strips", "from memstate.slots.registers import RegisterFile"),
        (early, "sheet", "from memstate.viz import html"),
        (kernel_direction, "kernels.copy", "import memstate"),
        (kernel_direction, "kernels.reference.copy", "from memstate.kernels.copy import copy_slots"),
        (past_the_dispatcher, "engine.manager", "import_module('memstate.kernels.reference.bitmap')"),
    ],
)
def test_rule_finds_a_violation(rule: Rule, name: str, source: str) -> None:
    assert rule(name, ast.parse(source)) != []


def run_without(modules: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process in which none of `modules`, names with spaces between, can be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({modules.split()!r}))\n"
    return subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_core_needs_no_extra_and_no_triton() -> None:
    code = (
        "import memstate; from memstate.kernels.dispatch import Backend\n"
        "backend = Backend(); print(backend.name, memstate.SlotAllocator(3, backend).claim(2).tolist())\n"
        "print(memstate.presets.qwen3_next(ranks=8))"
    )
    done = run_without("typer rich pytest hypothesis triton transformers", code)
    layout = "StateLayout(conv, ssm x 36 layers, layer_major, 9.21 MiB per slot with 0 B padding)"
    assert (done.stdout.splitlines(), done.returncode) == (["reference [1, 2]", layout], 0), done.stderr


@pytest.mark.parametrize("backend", ("reference", "auto"))
def test_a_manager_on_the_reference_loads_no_compiler(backend: str) -> None:
    code = (
        "import sys; import memstate as ms; from torch import float32\n"
        "layout = ms.StateLayout((ms.Plane('ssm', (8,), float32),), layers=1)\n"
        f"mem = ms.StateManager(layout, slots=4, max_requests=2, device='cpu', backend={backend!r})\n"
        "mem.settle(mem.plan(mem.admit([ms.Request('a', tokens=range(9))])))\n"
        "print({'triton', 'sympy', 'torch._dynamo', 'torch._inductor'} & {*sys.modules}, mem.backend.name)"
    )
    assert python("-c", code) == "set() reference\n"


def test_command_line_names_the_missing_extra() -> None:
    done = run_without("typer rich", "import runpy; runpy.run_module('memstate', run_name='__main__')")
    assert done.returncode != 0
    assert "pip install '.[cli]' in a checkout" in done.stderr
