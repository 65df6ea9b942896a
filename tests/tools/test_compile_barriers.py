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
from unittest.mock import patch

import pytest

from memstate.kernels.dispatch import Backend
from memstate_tools.calls import Call, all_calls, launch_of
from memstate_tools.compile.assembly import BARRIER, PLACE, source_line
from memstate_tools.compile.build import KERNELS
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


def steps(call: Call, target: str) -> list[tuple[str, list[str]]]:
    """Returns (kind, names of pointers) of each load, store and barrier, in the order of the compiled text."""
    accesses: list[tuple[str, list[str]]] = []
    line = ""
    for statement in launch_of(call, target).compiled.asm["ptx"].splitlines():
        if place := PLACE.match(statement):
            line = source_line(place[1], int(place[2]), (KERNELS,))
        elif BARRIER.match(statement) and "debug_barrier" in line:
            accesses.append(("barrier", []))
        elif access := ACCESS.match(statement):
            named = re.findall(rf"tl\.{CALLS[access[1]]}\w*\(\s*(\w+)", line) or re.findall(r"^\s*(\w+_ptr)\b", line)
            assert named, f"{call.name}: {statement.strip()} is of the line {line.strip()!r}"
            accesses.append((access[1], sorted(set(named))))
    return accesses


def on_four_warps(call: Call) -> Call:
    """Returns the same call, whose launch has 4 warps."""

    def make(backend: Backend) -> None:
        from triton.runtime.jit import JITFunction

        launch = JITFunction.run
        with patch.object(JITFunction, "run", lambda *args, **given: launch(*args, **given | {"num_warps": 4})):
            call.call(backend)

    return call._replace(name=call.name + MANY, call=make)


def calls() -> list[Call]:
    """Returns the calls of one program, and the smallest of them again with 4 warps."""
    single = [call for call in all_calls() if re.split(r"\W", call.name)[0] in ONE_PROGRAM]
    return [*single, *(on_four_warps(call) for call in single if call.name.endswith(" 32"))]


def main() -> None:
    """Writes the steps of all kernels, and the longest chains of loads of the plans."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):
        compiled = {f"{call.name}, {target}": steps(call, target) for call in calls() for target in TARGETS}
        plans = [call for call in calls() if call.name.startswith("plan") and MANY not in call.name]
        chains = {call.name: dependent_loads(launch_of(call, "sm_90").compiled.asm["ptx"]) for call in plans}
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
