"""Tests that each list of operations has every operation of `OPS`, so what a new operation lacks is named.

Kernel and reference of an operation share a signature, and no operation allocates a tensor.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from inspect import getdoc, signature
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS, Backend
from memstate_tools.bench import state
from memstate_tools.calls import CALLS
from memstate_tools.models import model_of, toy_of
from memstate_tools.workload import MAKERS, make
from tests.kernels import test_checks, test_refusals
from tests.proof.mutation.interleaved import MUTANTS, mutated
from tests.support import op_cases, op_launches
from tests.support.kernel_runs import nothing_allocated
from tests.support.sources import ROOT
from tests.test_claims import ALLOWED

OF_SLOTS = {"claim", "release", "ownership", "plan"}  # timed by the benchmarks alloc and track
NOT_TIMED = {
    "resolve": "a call of reports, which wait for it", "audit": "a call of reports, which wait for it",
    "run_data": "runs the kernel of copy_slots", "run_rows": "runs the kernel of copy_slots",
    "conv_delta_step": "timed beside its two steps by tests/proof/gpu/decode.py",
    "keep_path": "a small part of a step", "scatter_states": "a small part of a chunk",
}  # fmt: skip


def timed() -> Iterable[str]:
    """Returns the operations that benchmarks time, and those that are said not to be timed."""
    launched: set[str] = set()
    for kernel in MAKERS:
        states, backend = toy_of(model_of(state.MODELS.get(kernel, state.DEFAULT)), kernel), Backend("reference")
        for act in make(kernel, states, 2, backend, 1).acts.values():
            act()
        launched |= backend.counts.launches.keys()
    return [*launched, *OF_SLOTS, *NOT_TIMED]


def written() -> Iterable[str]:
    """Returns the operations of which kernel and reference have a module."""
    folders = ROOT / "kernels", ROOT / "kernels" / "reference"
    return (op for op, module in OPS.items() if all((folder / f"{module}.py").exists() for folder in folders))


def stepping() -> Iterable[str]:
    """Returns the decode steps that tests run, and the operations that are no decode step."""
    others = (op for op in OPS if hasattr(Backend, op) and "snapshot" not in signature(getattr(Backend, op)).parameters)
    return (*test_checks.STEPS, *others)


LISTS: dict[str, Callable[[], Iterable[str]]] = {  # what an operation needs -> the operations that have it
    "a module in kernels/ and in kernels/reference/": written,
    "a caller: CALLERS of tests/test_claims.py": lambda: {op for _, op in ALLOWED},
    "a small launch, for touch, determinism, sanitizer, byte cases: tests/support/{byte,op}_cases.py":
        lambda: op_cases.MAKERS,
    "a defect that tests notice: tests/proof/mutation/interleaved.txt": lambda: {each.op for each in MUTANTS.values()},
    "launches of all sizes, for Triton's keys: tests/support/op_launches.py": lambda: op_launches.LAUNCHES,
    "calls that are compiled ahead: CALLS of tools/memstate_tools/calls.py": lambda: CALLS,
    "what it refuses: REFUSED of tests/kernels/test_refusals.py": lambda: test_refusals.REFUSED,
    "a benchmark, or a reason for none: NOT_TIMED of tests/kernels/test_ops.py": timed,
    "a kind of step, if it is a decode step: STEPS of tests/kernels/test_checks.py": stepping,
}  # fmt: skip


def lacking() -> list[str]:
    """Returns a line for each operation that a list lacks, or has twice, and for each entry that is no operation."""
    lines = []
    for needed, have in LISTS.items():
        times = Counter([*have()])
        lines += [f"{op} lacks {needed}" for op in OPS if not times[op]]
        lines += [f"{op}: twice, or no operation: {needed}" for op, n in times.items() if n > 1 or op not in OPS]
    return lines


def test_no_operation_lacks_anything() -> None:
    assert lacking() == []


def test_the_lines_that_defects_change_are_there(tmp_path: Path) -> None:
    """Whether tests notice the defects: tests/proof/test_interleave.py."""
    for each in MUTANTS.values():
        mutated(each.op, tmp_path, (each.old, each.new))


def test_an_operation_without_anything_is_named_by_every_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "dummy", "dummy")
    assert lacking() == [f"dummy lacks {needed}" for needed in LISTS]


def signature_of(path: Path, name: str) -> str:
    """Returns the parameters of a function, with defaults and types, and its return type."""
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"{path}: {name} is defined {len(functions)} times"
    returns = functions[0].returns
    return f"({ast.unparse(functions[0].args)}) -> {ast.unparse(returns) if returns else ''}"


@pytest.mark.parametrize("op", OPS)
def test_kernel_and_reference_share_name_and_signature(op: str) -> None:
    file = f"{OPS[op]}.py"
    assert signature_of(ROOT / "kernels" / file, op) == signature_of(ROOT / "kernels" / "reference" / file, op)


@pytest.mark.parametrize("op", OPS)
def test_a_backend_shows_the_signature_and_the_shapes_of_its_ops(op: str) -> None:
    shown, reference = getattr(Backend("reference"), op), getattr(Backend, op)
    assert signature(shown) == signature(reference)
    assert getdoc(shown) == getdoc(reference)
    parameters = signature(shown).parameters
    assert all(re.search(rf"^ *{name}: ", shown.__doc__, re.MULTILINE) for name in parameters)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())


@pytest.mark.parametrize("op", [op for op in OPS if op != "claim"])  # a claim returns a new tensor
def test_an_operation_makes_no_tensor_where_its_output_is_given(op: str) -> None:
    triton = pytest.importorskip("triton", reason="without Triton there are no kernels")
    if not triton.knobs.runtime.interpret:
        pytest.skip("these launches are on a CPU, where kernels are interpreted")
    for seed in range(3):
        made = op_cases.made(op, seed)
        with nothing_allocated():
            getattr(made.module(), op)(**made.arguments)
