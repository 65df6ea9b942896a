"""Who may launch, and who may claim: read from the source. The allocator knows no plane, and nobody claims past it.

Every rule is a function of one module's source, and is tried on sources that break it.
"""

import ast
from collections.abc import Callable

import pytest

from memstate.kernels.dispatch import OPS
from tests.support.sources import sources

# Which module may ask the backend for which operation. claim, ownership, plan and accept hand out slots.
ALLOCATOR, REGISTERS, STORAGE = ("slots.allocator",), ("slots.registers",), ("state.planes",)
MODEL = ("cli.demo.mixers", "cli.bench.forward", "cli.workload", "integrations.transformers.on_slots")
PACKING = ("tiers.host.packing",)
CALLERS = {
    "claim": ALLOCATOR,
    "release": ALLOCATOR,
    "ownership": REGISTERS,
    "resolve": REGISTERS,
    "audit": REGISTERS,
    "plan": REGISTERS,
    "accept": REGISTERS,
    "copy_slots": STORAGE,
    "zero_slots": STORAGE,
    "run_data": STORAGE,
    "conv_step": MODEL,
    "gated_delta_step": MODEL,
    "selective_step": MODEL,
    "gather_slots": STORAGE,
    "scatter_slots": STORAGE,
    "scatter_accepted": STORAGE,
    "scatter_inputs": STORAGE,
    "scatter_states": STORAGE,
    "pack_slots": PACKING,
    "unpack_slots": PACKING,
    "pack_int8": PACKING,
    "unpack_int8": PACKING,
}
BITMAP_OWNERS = (*ALLOCATOR, *REGISTERS)  # bits and counts could also be changed by hand
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
            if node.attr in OPS and ast.unparse(node.value) in backends and name not in CALLERS.get(node.attr, ()):
                callers = " and ".join(CALLERS.get(node.attr, ("nobody",)))
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
    assert sorted(CALLERS) == sorted(OPS)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (launches, "engine", "_plan[(1,)](rows)"),
        (launches, "engine", "self.kernels.plan[grid](rows)"),
        (claims, "engine", "ids = self.pool.backend.claim(bitmap, 1, 9, counters)"),
        (claims, "state.planes", "backend.ownership(registers, packet)"),
        (claims, "engine", "b = self._backend\nb.claim(bitmap, 1, 9, counters)"),
        (claims, "engine", "a, b = 1, backend\nb.claim(bitmap, 1, 9, counters)"),
        (claims, "engine", "Backend('cuda').plan()"),
        (claims, "engine", "getattr(self.backend, name)(bitmap)"),
        (claims, "engine", "self.allocator.bitmap[0] = 0"),
        (planes, "slots.allocator", "def claim(self, plane_map): ..."),
        (planes, "slots.commands", "self.planes = {}"),
    ],
)
def test_rule_finds_a_violation(rule: Rule, name: str, source: str) -> None:
    assert rule(name, ast.parse(source)) != []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (launches, "engine", "Counter[str]()\nhandlers['a']\nnames = dict[str, int]()"),
        (claims, "slots.allocator", "self.backend.claim(self.bitmap, n, 9, self.counters)"),
        (claims, "engine", "self.allocator.claim(3)\nself.file.plan(rows)"),
    ],
)
def test_rule_lets_the_rest_pass(rule: Rule, name: str, source: str) -> None:
    assert rule(name, ast.parse(source)) == []
