"""Tests warps and registers of launches. In a launch of one program, each lane is in exactly one warp, for any batch.

Lanes that are in several warps: test_shared_lanes.py. Barriers in compiled kernels: test_compile_barriers.py.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
from triton.runtime import interpreter

from memstate.kernels import (
    bitmap,
    conv,
    gated_delta,
    gather,
    pack,
    pack_int8,
    registers,
    scatter,
    selective,
    tracking,
)
from memstate.kernels.blocks import cut
from memstate.kernels.configs import MOST_WARPS, ConvConfig, DeltaConfig, Int8Config, SelectiveConfig, shares
from memstate.kernels.tables import HEADER_INTS, Rules, ScaledMap, Strategy
from memstate.kernels.warps import ALONE, MOST, roomy
from memstate_tools import arguments
from memstate_tools.arguments import ints
from tests.support import op_cases, op_launches
from tests.support.kernel_runs import not_interpreted

if not triton.knobs.runtime.interpret:
    pytest.skip("launches are seen where kernels are interpreted", allow_module_level=True)

BATCHES = (*range(130), *(2**k + near for k in range(8, 13) for near in (-1, 0, 1)))
CAPACITIES = (1, 1000, 2000, 5000, 100_000)  # slots: bitmaps of one word, of about a block, of more than a chunk
STRATEGIES = (
    (Strategy.NONE, 0, False), (Strategy.PING_PONG, 1, False), (Strategy.PING_PONG, 2, False),
    (Strategy.LAZY, 2, False), (Strategy.LAZY, 2, True), (Strategy.REDIRECT, 1, False),
)  # fmt: skip
KERNELS = Path(bitmap.__file__).parent
ONE_PROGRAM = {f"_{op}" for op in op_cases.ONE_PROGRAM}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Launches of one program, as (kernel, its constants and options). Nothing runs."""
    launches: list[tuple[str, dict[str, Any]]] = []

    def note(launch: Any, *_: Any, **given: Any) -> None:
        if math.prod(launch.grid) == 1:
            launches.append((launch.fn.__name__, given))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    yield launches


def launch_all() -> None:
    """Launches every kernel of one program, for batches and pools of all sizes."""
    for capacity in CAPACITIES:
        file = arguments.registers(capacity)
        registers.ownership(file, ints(HEADER_INTS))
        registers.audit(file, ints(capacity + 1))
    for batch, capacity in product(BATCHES, CAPACITIES):
        file = arguments.registers(capacity)
        bitmap.claim(file.bitmap, batch, file.counters)
        bitmap.release(file.bitmap, ints(batch), capacity, file.counters)
        tracking.plan(**arguments.plan(batch, Rules(Strategy.LAZY, 2, 4, True), capacity=capacity))


def test_no_launch_has_more_warps_than_lanes(launched: list[tuple[str, dict[str, Any]]]) -> None:
    launch_all()
    sources = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    written = re.findall(
        r"(?<!\.)\b(\w+)\[\(1,\)\]|= KeptLaunch\((\w+)\)", sources
    )  # of each launch in the sources: its name in `kernel[(1,)]`, or in `KeptLaunch(kernel)`
    assert {name for name, _ in launched} == ONE_PROGRAM == {here or kept for here, kept in written}
    for name, given in launched:
        lanes = [given[size] for size in ("BLOCK", "CHUNK") if size in given]
        warps = given.get("num_warps", 4)  # Triton's default is 4
        assert warps * 32 <= min(lanes), (name, given)
        assert warps == 1 or warps * 64 <= given["BLOCK"], (name, given)


# A program, because only a process that does not interpret kernels sees the launches of calls without running them.
CONSTANTS = """
import json
from memstate_tools.calls import all_calls, launch_of
seen = []
for launch in (launch_of(call, "sm_90") for call in all_calls(every_shape=True)):
    given = {name: each for name, each in launch.arguments.items() if name.isupper() and isinstance(each, int)}
    plane = launch.arguments.get("plane_ptr")
    words = {"word": str(plane.dtype)} if plane is not None else {}
    seen.append((launch.kernel.__name__, given | words | {"num_warps": launch.arguments.get("num_warps", 4)}))
print(json.dumps(seen))
"""


@cache
def known() -> list[tuple[str, dict[str, Any]]]:
    """Returns the kernel, and the constants and warps, of the launch of each call."""
    return [(name, given) for name, given in not_interpreted("-c", CONSTANTS)]


def test_every_shape_that_can_be_launched_is_a_call(launched: list[tuple[str, dict[str, Any]]]) -> None:
    """The calls have exactly the lanes, words and warps of kernels that are launched as a single program."""
    launch_all()
    for batch, (*how, in_place), tails in product(BATCHES, STRATEGIES, (False, True)):
        tracking.plan(**arguments.plan(batch, Rules(*how, 4, in_place), tails, capacity=40))
    shapes = {shape(name, {**given, "num_warps": given.get("num_warps", 4)}) for name, given in launched}
    assert shapes == {shape(name, given) for name, given in known() if name in ONE_PROGRAM}


def shape(kernel: str, given: Mapping[str, Any]) -> tuple[str, frozenset[tuple[str, int]]]:
    return kernel, frozenset((name, int(value)) for name, value in given.items() if name != "maxnreg")


def tiles(kernel: str, *names: str) -> set[tuple[int, ...]]:
    return {tuple(given[name] for name in (*names, "num_warps")) for seen, given in known() if seen == kernel}


def test_every_tile_of_a_model_is_in_a_call() -> None:
    """The calls have all answers of the functions that launchers of decode steps and int8 ask for tiles and warps."""
    delta = tiles("_gated_delta_step", "BLOCK_K", "BLOCK_V")
    for size in (2, 4):
        assert {
            gated_delta.blocks(keys, n, size, 16 // size) for keys in range(9, 513) for n in (32, 64, 100, 256)
        } <= delta
        assert {gated_delta.blocks(128, values, size, 16 // size) for values in range(1, 300)} <= delta
    scan = tiles("_selective_step", "BLOCK_D", "BLOCK_N")
    # least: smallest number of dims in a block. It is 1 if the state axis is contiguous. If dims are contiguous, it is
    # 8 in fp32, and 16 in dtypes of 16 bits.
    for least in (1, 8, 16):
        assert {SelectiveConfig().blocks(64, states, True, least) for states in range(5, 513)} <= scan
    assert {SelectiveConfig().blocks(8192, states, False) for states in range(3, 129)} <= scan
    windows = tiles("_conv_step", "TAPS", "BLOCK", "LANE")
    for taps, size in product((2, 3, 4, 5, 8), (2, 4)):
        assert {(taps, *ConvConfig().blocks(channels, taps, size), 1) for channels in range(1, 3000)} <= windows
    scaled = tiles("_move_int8", "BLOCK_C", "BLOCK_R")
    for inner, reduced in ((1, (*range(5, 17), *range(17, 3000, 50))), (128, range(5, 300))):
        assert {(*Int8Config().blocks(4096, n, inner), Int8Config().warps) for n in reduced} <= scaled


def test_every_unit_of_bytes_is_in_a_call() -> None:
    """The calls have every size of a word, and every number of words in a unit, with which kernels move bytes at any
    address.
    """
    memory = torch.zeros(4096, dtype=torch.uint8)
    for kernel in ("_gather_slots", "_scatter_slots"):
        units = {(given["word"], given["UNIT"]) for seen, given in known() if seen == kernel}
        cuts = [cut(memory[start:][: 2 * size].view(1, 2, size)) for size in (16, 8, 4, 2, 1) for start in (0, 1, 2, 4)]
        assert {(str(words.word), words.unit_words) for words in cuts} == units
    for kernel in ("_move", "_move_records"):
        assert {given["UNIT"] for seen, given in known() if seen == kernel} == {16, 8, 4, 2, 1}


Given = list[dict[str, Any]]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Constants and options of each launch, as if the compiler could limit registers. Nothing runs."""
    launches: Given = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda launch, *_, **given: launches.append(given))
    for module in (conv, gated_delta, gather, pack, pack_int8, scatter, selective):
        monkeypatch.setattr(module, "limit", lambda options: options)
    return launches


def test_narrow_accesses_have_the_registers_they_need(options: Given) -> None:
    """Launches with narrow accesses have a limit of registers.

    Launches with wide accesses spill nothing, so they have no limit.
    """
    held, index, places = torch.zeros(2, 16, dtype=torch.uint8), ints(1), ints(1) - 1
    for size, limit in ((16, None), (8, 255), (4, 255), (2, 255), (1, 255)):
        plane, rows = (torch.zeros(2, n, size, dtype=torch.uint8) for n in (6, 1))
        gather.gather_slots(plane, index, rows)
        scatter.scatter_slots(plane, index, rows)
        pack.pack_slots(arguments.record_map(unit=size), None, index, places, held)
        assert [given.get("maxnreg") for given in options] == [limit] * 3, size
        options.clear()


def test_selective_steps_with_marks_have_the_registers_they_need(options: Given) -> None:
    op_launches.selective_step(selective.selective_step)
    limits = [given.get("maxnreg") for given in options]
    assert set(limits) == {None, 255} and limits.count(255) * 4 == len(limits)


def test_gated_delta_steps_have_the_registers_they_need(options: Given) -> None:
    op_launches.gated_delta_step(gated_delta.gated_delta_step)
    assert {given.get("maxnreg") for given in options} == {168}


@pytest.mark.parametrize(("shape", "axis", "limit"), [
    ((4, 128), 1, None), ((4, 64), 1, None), ((4, 32), 1, 255), ((4, 512), 1, None), ((4, 1024), 1, 255),
    ((64, 4), 0, None), ((65, 4), 0, 255), ((16, 4), 0, 255),
])  # fmt: skip
def test_int8_of_short_or_long_columns_has_the_registers_it_needs(
    shape: tuple[int, int], axis: int, limit: int | None, options: Given
) -> None:
    one, held = torch.zeros(2, 6, *shape), torch.zeros(2, 1 << 14, dtype=torch.uint8)
    planes = ScaledMap(torch.zeros(2, 2, dtype=torch.int64), (one,), axis, 0, 16, 32, 64)
    for op in (pack_int8.pack_int8, pack_int8.unpack_int8):
        op(planes, None, ints(1), ints(1) - 1, held[:, :64])
    assert [given.get("maxnreg") for given in options] == [limit] * 2


@pytest.mark.parametrize(("taps", "limit"), [(2, 255), (3, 255), (4, None), (5, 255)])
def test_convolutions_of_four_taps_have_no_limit(taps: int, limit: int | None, options: Given) -> None:
    x, state = torch.zeros(1, 1, 8), torch.zeros(3, taps - 1, 8)
    step = {name: ints(1) for name in ("read", "write", "snapshot", "tokens")}
    conv.conv_step(x, torch.zeros(8, taps), None, state, **step)
    conv.conv_step(x, torch.zeros(8, taps), None, state, **step, marks=arguments.marks())
    assert [given.get("maxnreg") for given in options] == [limit, 255]


@pytest.mark.parametrize(("warps", "most"), [(1, 255), (4, 255), (8, 255), (16, 128)])
def test_a_program_can_have_the_registers_of_its_threads(warps: int, most: int) -> None:
    """A program with more than 65536 registers cannot be launched."""
    assert roomy(warps) == {"maxnreg": most} and most * warps * 32 <= 65536
    assert roomy(warps, most=100) == {"maxnreg": 100} and roomy(warps, False) == {}
    assert roomy(MOST) == ALONE


def test_a_value_has_the_same_lanes_in_tiles_of_any_number_of_values() -> None:
    """Otherwise its sums would have another order. What the compiler makes of it: test_one_order.py."""
    sizes = product((8, 128, 300, 1024), (3, 24, 128), (2, 4), (1, 4, 8), (512, 2048), (False, True), (32, 64))
    for key, value, itemsize, unit, elements, key_fastest, threads in sizes:
        found = set()
        for block_value in (16, 32, 64, 128):
            config = DeltaConfig(elements, block_value)
            block_k, block_v, warps = gated_delta.blocks(
                key, value, itemsize, unit, config, key_fastest and itemsize == 2
            )
            found.add((block_k, *shares(key_fastest, itemsize, block_k, block_v, warps, threads)))
            assert warps <= MOST_WARPS and block_v <= 4 * block_value // itemsize
        assert len(found) == 1, (key, value, itemsize, unit, elements, key_fastest, threads, found)
