"""Who may launch, and who may claim: read from the source. The allocator knows no plane, and nobody claims past it."""

import ast
from collections.abc import Callable

import pytest

from memstate.kernels.dispatch import OPS
from tests.support.sources import sources

# Which modules may ask a backend for which operations. claim, ownership, plan and accept hand out slots.
MODEL = ("cli.demo.mixers", "cli.bench.forward", "cli.workload", "integrations.transformers.on_slots")
CALLERS = {
    ("slots.allocator",): "claim release",
    ("slots.registers",): "ownership resolve audit plan accept",
    ("state.planes",): "copy_slots zero_slots run_data gather_slots scatter_slots scatter_accepted scatter_inputs "
    "scatter_states",
    MODEL: "conv_step gated_delta_step selective_step",
    ("tiers.host.packing",): "pack_slots unpack_slots pack_int8 unpack_int8",
}
ALLOWED = {op: modules for modules, ops in CALLERS.items() for op in ops.split()}
BITMAP_OWNERS = ("slots.allocator", "slots.registers")  # bits and counts could also be changed by hand
OWNERSHIP = tuple(f"slots.{name}" for name in ("upload", "allocator", "registers", "packet", "commands"))  # no plane

Rule = Callable[[str, ast.Module], list[str]]


def library() -> dict[str, ast.Module]:
    """Every module of the library but the kernels, by name: `tiers.keys` for memstate/tiers/keys.py."""
    return {".".join(path.with_suffix("").parts[1:]): tree for path, tree in sources("memstate").items()}


def launches(name: str, tree: ast.Module) -> list[str]:
    """Kernel launches, `kernel[grid](...)`; `dict[str, int]()` and `acts[op]()` are none."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            subscripted = ast.unparse(node.func.value).split(".")[-1]
            if not (subscripted[0].isupper() or subscripted in ("acts", "dict", "list", "set", "defaultdict")):
                found.append(f"{name}:{node.lineno} launches {ast.unparse(node.func)}")
    return found


def claims(name: str, tree: ast.Module) -> list[str]:
    """Operations of a backend that are not this module's to ask for, and ways around the backend."""
    backends, found = _backends(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in OPS and ast.unparse(node.value) in backends and name not in ALLOWED.get(node.attr, ()):
                callers = " and ".join(ALLOWED.get(node.attr, ("nobody",)))
                found.append(f"{name}:{node.lineno} asks for {node.attr}; only {callers} may")
            if node.attr in ("bitmap", "counters") and name not in BITMAP_OWNERS:
                found.append(f"{name}:{node.lineno} touches {ast.unparse(node)}")
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) in backends
        ):
            found.append(f"{name}:{node.lineno} hides an operation behind getattr")
    return found


def _backends(tree: ast.Module) -> set[str]:
    """Expressions that stand for a backend: named or annotated so, made by the class, or assigned from such a one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else node
        word = getattr(called, "id", "") or getattr(called, "attr", "")
        if isinstance(called, ast.Name | ast.Attribute) and word.lower().endswith("backend"):
            names.add(ast.unparse(node))
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "Backend":
            names.add(node.arg)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for to, value in zip(*map(_elements, (node.targets[0], node.value)), strict=False):
                if ast.unparse(value) in names:
                    names.add(ast.unparse(to))
    return names


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def planes(name: str, tree: ast.Module) -> list[str]:
    """Identifiers that speak of planes, in the modules that know none."""
    found = []
    for node in ast.walk(tree):
        word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if name in OWNERSHIP and "plane" in str(word).lower():
            found.append(f"{name} mentions {word}")
    return found


@pytest.mark.parametrize("rule", [launches, claims, planes])
def test_library_keeps_the_rule(rule: Rule) -> None:
    assert [problem for name, tree in library().items() for problem in rule(name, tree)] == []


def test_every_operation_has_a_caller() -> None:
    assert sorted(ALLOWED) == sorted(OPS)
