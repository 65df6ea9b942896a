"""Tests compiled barriers: each separates the loads on which a decision depends from the first store after them.

The kernels are those whose launches have one program. They are compiled as launched, and once more for 32 elements with
4 warps, where each warp holds all elements. Run as a program, this file compiles them: a process that interprets
kernels cannot.
"""

import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from memstate.kernels.catalog import CompileCase, all_cases
from memstate_tools.compile.assembly import BARRIER, PLACE, source_line
from memstate_tools.compile.build import KERNELS, compile_case
from memstate_tools.compile.chains import dependent_loads
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100") if PROOF else ("sm_90",)
MANY = " on 4 warps"
ACCESS = re.compile(r"\s*(?:@!?%\w+\s+)?(ld|st|atom|red)\.(?:\w+\.)*global")
CALLS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}  # PTX instruction -> call in the source
# Arguments that a launch both reads and writes. Two are left out: counters, which only one thread touches, and owners
# in an audit, which atomics between barriers count.
SHARED = ("slots_ptr", "labels_ptr", "tracked_ptr", "source_ptr", "bitmap_ptr")
EXCEPTED = {"ownership": {"labels_ptr"}}  # a copied label comes from a register that the launch does not write
ONE_PROGRAM = ("claim", "release", "ownership", "plan")


def steps(case: CompileCase, target: str) -> list[tuple[str, list[str]]]:
    """Returns (kind, names of pointers) of each load, store and barrier, in the order of the compiled text."""
    accesses: list[tuple[str, list[str]]] = []
    line = ""
    for statement in compile_case(case, target).asm["ptx"].splitlines():
        if place := PLACE.match(statement):
            line = source_line(place[1], int(place[2]), (KERNELS,))
        elif BARRIER.match(statement) and "debug_barrier" in line:
            accesses.append(("barrier", []))
        elif access := ACCESS.match(statement):
            named = re.findall(rf"tl\.{CALLS[access[1]]}\w*\(\s*(\w+)", line) or re.findall(r"^\s*(\w+_ptr)\b", line)
            assert named, f"{case.name}: {statement.strip()} is of the line {line.strip()!r}"
            accesses.append((access[1], sorted(set(named))))
    return accesses


def cases() -> list[CompileCase]:
    """Returns the cases of one program, and the smallest of them again with 4 warps."""
    single = [case for case in all_cases() if re.split(r"\W", case.name)[0] in ONE_PROGRAM]
    small = [case for case in single if case.constexprs["BLOCK"] == 32]
    return [*single, *(case._replace(name=case.name + MANY, num_warps=4) for case in small)]


def main() -> None:
    """Writes the steps of all cases, and the longest chains of loads of the plans."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):
        compiled = {f"{case.name}, {target}": steps(case, target) for case in cases() for target in TARGETS}
        plans = [case for case in cases() if case.kernel.fn.__name__ == "_plan" and MANY not in case.name]
        chains = {case.name: dependent_loads(compile_case(case, "sm_90").asm["ptx"]) for case in plans}
    json.dump({"steps": compiled, "chains": chains}, lines)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    compiled: dict[str, Any] = not_interpreted(__file__)
    return compiled


def bare(accesses: list[tuple[str, list[str]]]) -> set[str]:
    """Returns the arguments that are loaded, and later stored to without a barrier between load and store."""
    loaded: set[str] = set()
    stored: set[str] = set()
    for kind, arguments in accesses:
        if kind == "barrier":
            loaded.clear()
        elif kind == "ld":
            loaded.update(arguments)
        else:
            stored.update(loaded.intersection(arguments))
    return stored & set(SHARED)


def test_a_barrier_stands_between_loads_and_the_first_store(results: dict[str, Any]) -> None:
    changed: dict[str, set[str]] = {}
    for name, accesses in results["steps"].items():
        kernel = re.split(r"\W", name)[0]
        assert bare(accesses) == EXCEPTED.get(kernel, set()), name
        stored = {argument for kind, arguments in accesses if kind != "ld" for argument in arguments}
        changed.setdefault(kernel, set()).update(stored & set(SHARED))
    both = {"slots_ptr", "labels_ptr"}
    assert changed == {  # the test sees the stores of all kernels
        "claim": {"bitmap_ptr"}, "release": {"bitmap_ptr"}, "ownership": both | {"bitmap_ptr"},
        "plan": set(SHARED),
    }  # fmt: skip


def test_at_most_four_loads_of_a_plan_wait_for_each_other(results: dict[str, Any]) -> None:
    """The four loads: the batch, the columns of its rows, the registers that first steps read, and the bitmap.

    With marks, two more loads wait for the last claim: the mark, and the slot of its register.
    """
    for name, loads in results["chains"].items():
        assert loads == (3 if "none" in name else 6), name
    assert len(results["chains"]) == 9


if __name__ == "__main__":
    main()
