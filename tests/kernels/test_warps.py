"""Tests warps and registers of launches. In a launch of one program, each lane is in exactly one warp, for any batch.

Lanes that are in several warps: test_shared_lanes.py. Barriers in compiled kernels: test_compile_barriers.py.
"""

import math
import re
from collections.abc import Iterator, Mapping
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
from memstate.kernels.catalog import all_cases
from memstate.kernels.tables import HEADER_INTS, Rules, ScaledMap, StepRecord, Strategy, TailRecord
from memstate.kernels.warps import ALONE, MOST, roomy
from tests.support import op_cases, op_launches
from tests.support.op_launches import ints

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
        file = op_launches.registers(capacity)
        registers.ownership(file, ints(HEADER_INTS))
        registers.audit(file, ints(capacity + 1))
    for batch, capacity in product(BATCHES, CAPACITIES):
        file, rows, packet = op_launches.registers(capacity), ints(batch), op_launches.packet(batch, 2)
        record = StepRecord(*(ints(batch) for _ in StepRecord._fields))
        rules = Rules(Strategy.LAZY, 2, 4, True)
        bitmap.claim(file.bitmap, batch, file.counters)
        bitmap.release(file.bitmap, rows, capacity, file.counters)
        tracking.plan(file, packet, record, op_launches.marks(), rules)


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


def test_every_shape_that_can_be_launched_is_in_the_catalogue(launched: list[tuple[str, dict[str, Any]]]) -> None:
    """The catalogue has exactly the lanes, words and warps of kernels that are launched as a single program."""
    launch_all()
    for batch, (name, lanes, in_place) in product(BATCHES, STRATEGIES):
        file, packet = op_launches.registers(40), op_launches.packet(batch, 2)
        record = StepRecord(*(ints(batch) for _ in StepRecord._fields))
        rules = Rules(name, lanes, 4, in_place)
        marks = op_launches.marks()
        tracking.plan(file, packet, record, marks, rules)
        tails = TailRecord(*(ints(1 if field == "batch" else batch) for field in TailRecord._fields))
        columns = {name: ints(file.source.numel()) for name in ("pending", "newest")}
        tracking.plan(file._replace(**columns), packet, record, marks, rules._replace(tail=2), tails)
    shapes = {shape(name, {**given, "num_warps": given.get("num_warps", 4)}) for name, given in launched}
    known = [case for case in all_cases(every_shape=True) if case.kernel.fn.__name__ in ONE_PROGRAM]
    assert shapes == {shape(c.kernel.fn.__name__, {**c.constexprs, "num_warps": c.num_warps}) for c in known}


def shape(kernel: str, given: Mapping[str, Any]) -> tuple[str, frozenset[tuple[str, int]]]:
    return kernel, frozenset((name, int(value)) for name, value in given.items() if name != "maxnreg")


def test_every_tile_of_a_model_is_in_the_catalogue() -> None:
    """The catalogue has all answers of the functions that launchers of decode steps and int8 ask for tiles
    and warps.
    """
    cases = all_cases(every_shape=True)

    def known(kernel: str, *names: str) -> set[tuple[int, ...]]:
        own = [case for case in cases if case.kernel.fn.__name__ == kernel]
        return {(*(case.constexprs[name] for name in names), case.num_warps) for case in own}

    delta = known("_gated_delta_step", "BLOCK_K", "BLOCK_V")
    for size in (2, 4):
        assert {
            gated_delta.blocks(keys, n, size, 16 // size) for keys in range(9, 513) for n in (32, 64, 100, 256)
        } <= delta
        assert {gated_delta.blocks(128, values, size, 16 // size) for values in range(1, 300)} <= delta
    scan = known("_selective_step", "BLOCK_D", "BLOCK_N")
    # least: smallest number of dims in a block. It is 1 if the state axis is contiguous. If dims are contiguous, it is
    # 8 in fp32, and 16 in dtypes of 16 bits.
    for least in (1, 8, 16):
        assert {selective.blocks(64, states, True, least=least) for states in range(5, 513)} <= scan
    assert {selective.blocks(8192, states, False) for states in range(3, 129)} <= scan
    windows = known("_conv_step", "TAPS", "BLOCK", "LANE")
    for taps, size in product((2, 3, 4, 5, 8), (2, 4)):
        assert {(taps, *conv.blocks(channels, taps, size), 1) for channels in range(1, 3000)} <= windows
    scaled = known("_move_int8", "BLOCK_C", "BLOCK_R")
    for inner, reduced in ((1, (*range(5, 17), *range(17, 3000, 50))), (128, range(5, 300))):
        assert {(*pack_int8.blocks(4096, n, inner), pack_int8.WARPS) for n in reduced} <= scaled


def test_every_unit_of_bytes_is_in_the_catalogue() -> None:
    """The catalogue has every size of a word, and every number of words in a unit, with which kernels move bytes at any
    address.
    """
    cases = all_cases(every_shape=True)
    memory = torch.zeros(4096, dtype=torch.uint8)
    for kernel in ("_gather_slots", "_scatter_slots"):
        known = {
            (case.signature["plane_ptr"], case.constexprs["UNIT"])
            for case in cases
            if case.kernel.fn.__name__ == kernel
        }
        cuts = [cut(memory[start:][: 2 * size].view(1, 2, size)) for size in (16, 8, 4, 2, 1) for start in (0, 1, 2, 4)]
        assert {(f"*i{8 * words.word_bytes}", words.unit_words) for words in cuts} == known
    for kernel in ("_move", "_move_records"):
        assert {c.constexprs["UNIT"] for c in cases if c.kernel.fn.__name__ == kernel} == {16, 8, 4, 2, 1}


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
        pack.pack_slots(op_launches.records(2, 8)._replace(unit=size), None, index, places, held)
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
    conv.conv_step(x, torch.zeros(8, taps), None, state, **step, marks=op_launches.marks())
    assert [given.get("maxnreg") for given in options] == [limit, 255]


@pytest.mark.parametrize(("warps", "most"), [(1, 255), (4, 255), (8, 255), (16, 128)])
def test_a_program_can_have_the_registers_of_its_threads(warps: int, most: int) -> None:
    """A program with more than 65536 registers cannot be launched."""
    assert roomy(warps) == {"maxnreg": most} and most * warps * 32 <= 65536
    assert roomy(warps, most=100) == {"maxnreg": 100} and roomy(warps, False) == {}
    assert roomy(MOST) == ALONE
