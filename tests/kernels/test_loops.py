"""Tests that no loop of a compiled kernel loses an assignment.

Triton goes through the body of a loop once to find the names that it changes. It carries a name from turn to turn and
out of the loop only if the name has another value after that turn. Of the loop

    at = after = lane
    while more:
        at = after
        after = next_of(at)

the first turn leaves `at` unchanged, so the compiled loop drops it: after the loop `at` is `lane`. The interpreter runs
Python and does not show this fault. It once made a claim from a bitmap of more than 64 words clear the wrong word.

Compiled kernels on a CPU show the fault too, if a test needs the name: the sample of `make test` has no row with two
marks for `_mamba3_step` and `_selective_step`. This one needs none.

The process of the tests interprets kernels. Run as a program, this file goes through every kernel as Triton's compiler
does, and writes the lost names as JSON.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
import triton.language as tl

from memstate_tools.arguments import ints
from memstate_tools.calls import Call, all_calls, launch_of
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF


@triton.jit
def _drops(next_ptr, out_ptr, n):
    after = tl.arange(0, 64)
    at = after
    while n > 0:
        at = after
        after = tl.load(next_ptr + at)
        n -= 1
    tl.store(out_ptr + at, after)


def test_no_loop_of_a_kernel_drops_a_name() -> None:
    """The check finds the lost name of the sample, and no other."""
    assert not_interpreted(__file__) == ["_drops: at"]


def branches(calls: Iterable[Call]) -> list[Call]:
    """Returns one call for each kernel and each set of arguments that are given, and of constants that are not 0."""
    ways: dict[tuple[str, frozenset[str]], Call] = {}
    for call in calls:
        launch = launch_of(call, "sm_90")
        given = (name for name, each in launch.arguments.items() if each is not None and (not name.isupper() or each))
        ways[launch.kernel.__name__, frozenset(given)] = call
    return list(ways.values())


def watched() -> list[str]:
    """Makes Triton's compiler note each name that a loop drops, with the name of the function.

    Returns the list of these notes, which grows with each compilation.
    """
    from triton.compiler.code_generator import CodeGenerator, _is_triton_value, flatten_values_to_ir

    dropped: list[str] = []
    loops: dict[int, Mapping[str, Any]] = {}  # id of a loop's body -> names not carried, with values
    find, visit = CodeGenerator._find_carries, CodeGenerator.visit_compound_statement

    def carries(self: Any, node: Any, before: Mapping[str, Any], ignore: Any = frozenset()) -> Any:
        values = {name: value for name, value in before.items() if _is_triton_value(value)}
        carried = find(self, node, before, ignore)
        loops[id(node.body)] = {name: values[name] for name in values if name not in (*carried[0], *ignore)}
        return carried

    def visited(self: Any, body: Any) -> None:
        visit(self, body)
        for name, value in loops.pop(id(body), {}).items():
            if flatten_values_to_ir([self.lscope[name]]) != flatten_values_to_ir([value]):
                line = f"{self.jit_fn.__name__}: {name}"
                dropped.extend([line] if line not in dropped else [])

    CodeGenerator._find_carries, CodeGenerator.visit_compound_statement = carries, visited
    return dropped


def translate(call: Call) -> None:
    """Translates a kernel to Triton's IR, which shows how its loops carry names."""
    from triton.backends.nvidia.compiler import CUDABackend

    with patch.object(CUDABackend, "make_ttir", side_effect=Translated), suppress(Translated):
        _ = launch_of(call, "sm_90").compiled


class Translated(Exception):
    """Ends a compilation, as soon as the kernel is translated."""


def main() -> None:
    """Writes the names that loops of the sample and of all kernels lose."""
    dropped = watched()
    triton.knobs.compilation.always_compile = True  # otherwise a kernel from the cache is not translated
    sample = Call("", lambda _: _drops[(1,)](ints(64), ints(64), 3))
    for call in (sample, *(all_calls(every_shape=True) if PROOF else branches(all_calls()))):
        translate(call)
    json.dump(dropped, sys.stdout)


if __name__ == "__main__":
    main()
