"""Tests launches that are seen, compiled and interpreted, each in a process that interprets no kernel elsewhere."""

from inspect import getmembers
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from memstate.errors import ConfigurationError
from memstate.kernels import copy, interpreter
from memstate.kernels.dispatch import Backend
from memstate.kernels.kept import KeptLaunch
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate_tools.launches import TARGETS, Launch, compiling, interpreting, kernels
from memstate_tools.maker import Maker
from tests.support.running_mean import reference, running_mean
from tests.support.written import imported, source

CPU = torch.device("cpu")
LANGUAGE = (tl, tl.core, tl.math, tl.tensor)
RATE_OF = "@triton.jit\ndef rate():\n    return RATE + tl.sum(tl.zeros((2,), tl.float32), 0)\n\n\n@triton.jit\n"
CALLING = {"* RATE\n": "* rate()\n", "@triton.jit\n": RATE_OF}
ASKING = CALLING | {
    "@triton.jit\n": "def rate():\n    assert triton.knobs.runtime.interpret\n    return RATE\n\n\n@triton.jit\n"
}


@pytest.fixture(autouse=True)
def always_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton compile each launch, whatever its cache has, to code that names no file."""
    for name in ("TRITON_ALWAYS_COMPILE", "TRITON_DISABLE_LINE_INFO"):
        monkeypatch.setenv(name, "1")


def launched(target: str = "sm_90", kernel: Any = running_mean) -> Launch:
    """Returns the launch of a kernel of one's own, which has compiled nothing so far."""
    with compiling(target) as seen:
        kernel(**kernel.case(3, Maker(CPU, 1)))
    seen[0].kernel.device_caches.clear()
    return seen[0]


def text(launch: Launch) -> str:
    """Returns the compiled code."""
    asm = launch.compiled.asm
    return asm["ptx"] if "ptx" in asm else asm["amdgcn"]


def language() -> list[Any]:
    return [getmembers(each, callable) for each in LANGUAGE]


def interpreted(kernel: Any = running_mean) -> None:
    """Interprets a kernel, and compares its results with those of the reference."""
    given, expected = (kernel.case(5, Maker(CPU, 1, padded=True)) for _ in range(2))
    with interpreting():
        kernel(**given)
    reference(**expected)
    assert all(torch.allclose(given[name], expected[name], equal_nan=True) for name in ("out", "state"))


# -- interpreting ------------------------------------------------------------------------------------------------------


def test_what_was_interpreted_is_compiled_as_before(tmp_path: Path) -> None:
    """The second kernel calls functions under `@triton.jit`, one of Triton's own, which sees other parts of Triton."""
    called = imported(tmp_path, source(CALLING)).running_mean
    for kernel in (running_mean, called):
        before, names = text(launched(kernel=kernel)), language()
        interpreted(kernel)
        assert language() == names and text(launched(kernel=kernel)) == before
        assert interpreter.interpreted() is False and ".visible .entry" in before


@pytest.mark.parametrize("where", ["block", "kernel", "function"])
def test_an_error_leaves_the_language_as_it_was(where: str, tmp_path: Path) -> None:
    before, names = text(launched()), language()
    fault = {"kernel": {"row, lane = ": "row, lane = 1 // 0, "}, "function": CALLING | {"float32), 0)": "float32), 1)"}}
    kernel = imported(tmp_path, source(fault.get(where, {}))).running_mean
    with pytest.raises(Exception, match=r"division|axis") as raised, interpreting():
        if where != "block":
            kernel(**kernel.case(1, Maker(CPU, 1)))
        1 // 0  # noqa: B018
    assert (raised.type is ZeroDivisionError) == (where == "block")
    assert language() == names and text(launched()) == before


def test_an_interrupt_while_the_language_is_patched_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before, names, patched = text(launched()), language(), triton.runtime.interpreter._patch_lang

    def interrupted(function: Any) -> None:
        patched(function)
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(triton.runtime.interpreter, "_patch_lang", interrupted)
        interpreted()
    assert language() == names and text(launched()) == before


def test_one_thread_at_a_time_changes_triton() -> None:
    inside, leave, seen = Event(), Event(), list[bool]()

    def other() -> None:
        inside.wait(9)
        with interpreting():
            seen.append(leave.is_set())

    thread = Thread(target=other)
    thread.start()
    with compiling("sm_90"):
        inside.set()
        thread.join(0.2)
        leave.set()
    thread.join(9)
    assert seen == [True] and text(launched())


def test_a_block_in_a_block_compiles_its_own_launches() -> None:
    given = running_mean.case(3, Maker(CPU, 1))
    with compiling("sm_90") as outer, compiling("gfx942") as inner:
        running_mean(**given)
        assert "amdgcn" in inner[0].compiled.asm and outer == []


def test_a_backend_interprets_in_the_block_only() -> None:
    with interpreting(), interpreting():
        assert Backend("interpreter").name == "interpreter" == Backend("auto").name
        with pytest.raises(ConfigurationError, match="or leave `interpreting"), compiling("sm_90"):
            pass
    with pytest.raises(ValueError, match="needs TRITON_INTERPRET"):
        Backend("interpreter")


def test_an_interpreted_kernel_is_told_so(tmp_path: Path) -> None:
    interpreted(imported(tmp_path, source(ASKING)).running_mean)


@pytest.mark.parametrize("context", [interpreting, lambda: compiling("gfx942")], ids=["interpreting", "compiling"])
def test_a_kernel_that_was_imported_inside_is_compiled_outside(context: Any, tmp_path: Path) -> None:
    with context():
        kernel = imported(tmp_path, source()).running_mean
        kernel(**kernel.case(1, Maker(CPU, 1)))
    assert text(launched(kernel=kernel)) == text(launched())
    interpreted(kernel)


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_one_process_compiles_for_two_vendors() -> None:
    first, other, again = (launched(target) for target in ("sm_90", "gfx942", "sm_90"))
    assert (first.target, other.target) == ("sm_90", "gfx942") and len({*TARGETS}) == 6
    assert ".target sm_90a" in text(first) and "gfx942" in text(other) and "amdgcn" in other.compiled.asm
    assert text(again) == text(first) and first.grid == (3, 2)


def test_nothing_runs_and_arguments_have_names() -> None:
    launch = launched()
    poison = launch.arguments["out_ptr"]
    assert poison.isnan().all() and (launch.arguments["size"], launch.arguments["BLOCK"]) == (208, 128)
    assert launch.kernel.__name__ == "_running_mean" and launch.arguments["num_warps"] == 1


@pytest.fixture
def planes() -> Planes:
    layout = StateLayout([Plane("ssm", (40,), torch.float32), Plane("conv", (24,), torch.float8_e4m3fn)], layers=2)
    return Planes(layout, 3, kernels())


def test_a_kept_launch_is_seen_each_time(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "KEPT", KeptLaunch(copy._move))
    ids = torch.ones(1, dtype=torch.int32)
    for _ in range(2):
        with compiling("sm_90") as seen:
            planes.copy(ids + 1, ids)
            planes.zero(ids)
        assert [launch.kernel.__name__ for launch in seen] == ["_move", "_move"] and seen[1].compiled.asm["ptx"]
    with interpreting():
        planes["ssm"].fill_(1.0)
        planes.zero(ids)
    assert (planes["ssm"] == 0).any(dim=2).tolist() == [[False, True, False, False]] * 2


def test_memory_is_found_through_tables_and_wrapped_tensors(planes: Planes) -> None:
    ids, value = torch.ones(1, dtype=torch.int32), planes["conv"][:, :1].clone()
    with compiling("sm_90") as seen:
        planes.copy(ids + 1, ids)
        planes.gather("conv", ids, out=value)
    copies, gathers = seen
    assert copies.arguments_in(planes.arenas) == ["tiles", "fills"]  # without fills, both are the table of tiles
    assert gathers.arguments_in(planes.arenas) == ["plane_ptr"]
    assert gathers.arguments_in([*planes.arenas, value]) == ["plane_ptr", "out_ptr"]


def test_arguments_in_memory_are_found(planes: Planes) -> None:
    memory, other = torch.zeros(4, 16), torch.zeros(64)
    given = {
        "whole": memory, "row": memory[3], "cast": triton.reinterpret(memory.view(torch.uint8)[1:], tl.uint8),
        "table": torch.tensor([0, memory[2].data_ptr()]), "narrow": torch.tensor([1, 2], dtype=torch.int32),
        "float": torch.tensor([memory.data_ptr()]).double(), "other": other, "size": 4,
        "far": torch.tensor([other.data_ptr(), memory.data_ptr() + memory.nbytes]),
    }  # fmt: skip
    launch = Launch(None, given, (1,), "sm_90", lambda: None)
    assert launch.arguments_in([memory[1:]]) == ["whole", "row", "cast", "table"]
    assert launch.arguments_in([]) == []
