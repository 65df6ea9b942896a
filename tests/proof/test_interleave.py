"""Tests that no kernel depends on the order of its programs, or touches a byte outside of its tensors.

Every operation runs with random arguments under 3 random schedules, with MEMSTATE_PROOF=1 under 40. The tests also put
defects into kernels on purpose, and must notice them: a sample, with MEMSTATE_PROOF=1 all.
"""

import random
import re
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
import triton.language as tl
from triton.runtime import interpreter

from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.tables import COUNTERS
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from tests.proof.mutation.interleaved import MUTANTS, OUTSIDE, mutated
from tests.proof.stateful.script import ALL, Play
from tests.support import op_cases, op_launches
from tests.support.addresses import LOAD, STORE, Bytes, Launch, Limits, Log, Stray, spans
from tests.support.sampling import PROOF

try:  # the interleaver replaces parts of Triton; its import fails if they do not fit
    from tests.proof import interleaver

    MISFIT = interleaver.misfit()
except ImportError as error:
    MISFIT = f"Triton {triton.__version__}: {error}"
if MISFIT and triton.knobs.runtime.interpret and triton.__version__.startswith(("3.6.", "3.7.", "3.9.")):
    raise AssertionError(f"the interpreter of this version is known to fit: {MISFIT}")
if MISFIT:
    pytest.skip(f"programs cannot be interleaved here: {MISFIT}", allow_module_level=True)

from tests.proof.interleaver import Chooser, Seeded, every_order, every_outcome, interleaved, stock
from tests.support.op_case import Case, every
from tests.support.op_cases import ONE_PROGRAM

SCHEDULES = 40 if PROOF else 3
SEEDS = 200  # number of seeds; one of them must show a defect
COUNTER = torch.zeros(1, dtype=torch.int32)

# operations that take half a minute in all sizes
LONG = {"conv_step", "gated_delta_step", "conv_delta_step", "selective_step", "mamba3_step", "gather_slots"}

each_op = pytest.mark.parametrize("op", every())


# -- toys with known answers ------------------------------------------------------------------------------------


@triton.jit
def _count(counter_ptr, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(counter_ptr, 1)
    else:
        tl.store(counter_ptr, tl.load(counter_ptr) + 1)


@triton.jit
def _put(out_ptr, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * stride + lane, lane)


@triton.jit
def _look(out_ptr, in_ptr, n):
    """Program 0 updates in_ptr[0] atomically; the others load in_ptr[0]."""
    program = tl.program_id(0)
    tl.atomic_add(in_ptr, 1, mask=program == 0)
    tl.store(out_ptr + program, tl.load(in_ptr, mask=program != 0, other=n))


@triton.jit
def _turn(x_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """Each lane stores its word, and reads the word of the next lane."""
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, lane)
    if BARRIER:
        tl.debug_barrier()
    value = tl.load(x_ptr + (lane + 1) % BLOCK)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + lane, value)


def counted(programs: int, atomic: bool, chooser: Chooser, shared: Bytes | None = None) -> tuple[int, Log]:
    """Runs programs that each add 1 to a counter. Returns the counter and the log."""
    COUNTER.zero_()
    with interleaved(chooser, shared=shared) as log:
        _count[(programs,)](COUNTER, ATOMIC=atomic)
    return int(COUNTER), log


@pytest.mark.parametrize(("programs", "schedules", "right"), [(2, 6, 2), (3, 90, 6)])
def test_every_schedule_of_a_lost_update(programs: int, schedules: int, right: int) -> None:
    """There are (2p)! / 2^p orders of p loads and p stores. No update is lost in the p! orders of whole programs."""
    results = [result for result, _ in every_order(partial(counted, programs, False))]
    assert (len(results), results.count(programs), min(results), max(results)) == (schedules, right, 1, programs)
    assert sorted(every_outcome(partial(counted, programs, False))) == sorted(results)
    assert [result for result, _ in every_order(partial(counted, programs, True))] == [programs] * right


def test_conflicts_are_seen_in_the_stock_order_too() -> None:
    """A race is reported as a conflict even if programs run in an order in which the result is right."""
    count, log = counted(3, False, stock)
    assert count == 3 and counted(3, False, Seeded(1))[0] < 3
    (conflict,) = log.conflicts()
    who = ", ".join(f"program {program} {kind}" for program in range(3) for kind in (LOAD, STORE))
    assert conflict == f"_count: bytes up to counter_ptr +3 of 4: {who}"
    assert counted(3, True, stock)[1].conflicts() == []


@pytest.mark.parametrize(("stride", "contested"), [(4, 0), (3, 4), (0, 16)])
def test_two_programs_that_store_the_same_are_in_conflict(stride: int, contested: int) -> None:
    out = torch.full((8,), -1, dtype=torch.int32)
    with interleaved(stock) as log:
        _put[(2,)](out, stride, BLOCK=4)
    assert len(log.launches[0].contested()) == contested
    conflict = "_put: bytes up to out_ptr +15 of 32: program 0 stores, program 1 stores"
    assert log.conflicts() == [conflict][:contested]


@pytest.mark.parametrize("barrier", [True, False])
def test_lanes_that_share_bytes_need_a_barrier(barrier: bool) -> None:
    with interleaved(stock) as log:
        _turn[(1,)](torch.empty(4, dtype=torch.int32), BARRIER=barrier, BLOCK=4)
    who = "program 0 loads, program 0 stores, by several lanes without a barrier between"
    assert log.conflicts() == ([] if barrier else [f"_turn: bytes up to x_ptr +15 of 16: {who}"])


def test_an_atomic_does_not_excuse_a_plain_load() -> None:
    out, cell = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    results = set()
    for seed in range(20):
        cell.zero_()
        with interleaved(Seeded(seed)) as log:
            _look[(2,)](out, cell, 7)
        assert log.conflicts() == ["_look: bytes up to in_ptr +3 of 4: program 0 updates, program 1 loads"]
        results.add(tuple(out.tolist()))
    assert results == {(7, 0), (7, 1)}


def test_addresses_are_checked_to_the_byte() -> None:
    """A store to a gap between columns, to a null slot, or to bytes that may not change raises an error first."""
    whole = torch.zeros(4, 6, dtype=torch.int32)
    columns = whole[:, :4]
    for out, limits, message in (
        (columns[0], Limits(), f"program 1 stores 4 bytes at out_ptr .16 of 16, {OUTSIDE}"),
        (columns, Limits(), f"program 1 stores 4 bytes at out_ptr .16 of 88, {OUTSIDE}"),
        (whole, Limits(null=[whole[0, :1]]), "program 0 stores 4 bytes at out_ptr .0 of 96, in a null slot"),
        (whole, Limits(changes=[whole[0]]), "program 1 stores 4 bytes at out_ptr .24 of 96, which .* may not change"),
    ):
        whole.zero_()
        with pytest.raises(Stray, match=f"^_put: {message}"), interleaved(stock, limits):
            _put[(2,)](out, 3, BLOCK=4)
        assert not whole[0, 4:].any() and not whole[1:].any()
    with interleaved(stock, Limits(reach=[whole])):
        _put[(2,)](columns[0], 3, BLOCK=4)  # `reach` allows bytes that are not in the argument


def test_an_interpreter_of_another_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter is of another kind if the interleaver does not see its accesses, or if it uses other functions."""
    builder, native = interpreter.InterpreterBuilder, interpreter._interpreter

    def unseen(_: object, at: Any, value: Any, mask: Any, *cache: object) -> None:
        native.store(at.data, value.data, mask.data)

    with monkeypatch.context() as patched:
        patched.setattr(builder, "create_masked_store", unseen)
        assert re.search(r"expected .*'stores'.*, saw [^s]*'loads'[^s]*'loads'[^s]*'updates'", interleaver.misfit())
    with monkeypatch.context() as patched:
        patched.setattr(builder, "create_masked_load", lambda *_: interpreter._interpreter.load_fast())
        assert re.search(r"AttributeError: .*'load_fast'", interleaver.misfit())
    assert interleaver.misfit() == ""


def test_spans_are_the_bytes_that_elements_view() -> None:
    generator = random.Random(3)
    for _ in range(50):
        shape = [generator.randint(0, 3) for _ in range(3)]
        strides = [generator.choice((0, 1, 2, 3, 4, 12)) for _ in range(3)]
        view = torch.zeros(64, dtype=torch.int16).as_strided(shape, strides, generator.randint(0, 5))
        expected = {p + byte for p in (view[i].data_ptr() for i in np.ndindex(*shape)) for byte in (0, 1)}
        ranges = spans(view).tolist()
        assert {at for start, end in ranges for at in range(start, end)} == expected
        assert all(end < start for (_, end), (start, _) in pairwise(ranges))


# -- the kernels -------------------------------------------------------------------------------------------------


def wrong(case: Case, seed: int, logs: list[Log], module: ModuleType | None = None) -> str:
    """Returns the faults of a run under the schedule of a seed, "" for none.

    The bytes must be those of the reference; if the case is not exact, those of the kernel in stock order.
    """
    expected = case.run(case.module("memstate.kernels.reference" if case.exact else "memstate.kernels"))
    try:
        with interleaved(Seeded(seed), case.limits) as log:
            outputs = case.run(module or case.module())
    except Stray as stray:
        return str(stray)
    logs.append(log)
    pairs = zip(expected, outputs, strict=True)
    differing = [f"{int((a != b).sum())} other bytes of {a.numel()}" for a, b in pairs if not torch.equal(a, b)]
    return "\n".join(log.conflicts() + differing)


@each_op
def test_no_schedule_changes_a_byte_or_touches_a_wrong_one(op: str, generator: torch.Generator) -> None:
    logs: list[Log] = []
    for number, seed in enumerate(range(generator.initial_seed(), generator.initial_seed() + SCHEDULES + 20)):
        made = [launch for log in logs for launch in log.launches]
        stores = any(launch.touched(STORE).size for launch in made)  # false if the random arguments store nothing
        if number >= SCHEDULES and stores and (op in ONE_PROGRAM or any(map(mixed, made))):
            break  # tries more seeds while there was only one program, or programs ran one after the other
        problem = wrong(op_cases.made(op, seed), seed, logs)
        assert not problem, f"{op}, arguments and schedule of seed {seed}:\n{problem}"
    launches = [launch for log in logs for launch in log.launches]
    assert any(launch.touched(STORE).size for launch in launches)
    assert {launch.programs for launch in launches} == {1} if op in ONE_PROGRAM else any(map(mixed, launches))


@pytest.mark.parametrize("op", [op for op in OPS if PROOF or op not in LONG])
def test_launches_of_other_sizes_stay_in_their_tensors(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries sizes for which Triton compiles a kernel anew, unaligned columns and inputs, and batches of padding."""
    monkeypatch.setattr(op_launches, "SIZES", (1, 2, 3, 16, 33, 256) if PROOF else (1, 33))
    with interleaved(stock) as log:
        op_launches.LAUNCHES[op](getattr(import_module(f"memstate.kernels.{OPS[op]}"), op))
    assert log.launches and log.conflicts() == []


def mixed(launch: Launch) -> bool:
    """Says whether some program went on after a program with a higher number had begun."""
    order = [access.program for access in launch.accesses]
    return order != sorted(order)


@pytest.mark.parametrize("op", [op for op in every() if op not in ONE_PROGRAM])
def test_no_program_sees_what_another_one_does(op: str, generator: torch.Generator) -> None:
    """No program touches a byte that another one changes, so only one schedule has to be tried."""
    for seed in range(generator.initial_seed(), generator.initial_seed() + (3 if PROOF else 1)):
        case = op_cases.made(op, seed)

        def run(chooser: Chooser, shared: Bytes, case: Case = case) -> tuple[None, Log]:
            with interleaved(chooser, case.limits, shared) as log:
                case.run(case.module())
            return None, log

        assert len(every_outcome(run)) == 1, f"arguments of seed {seed}"


# -- launches of one program ------------------------------------------------------------------------------------------


def test_a_label_that_is_written_is_copied_behind_a_barrier() -> None:
    """In one packet, one lane writes a label that another lane reads."""
    file = RegisterFile(SlotAllocator(8, Backend("interpreter")), rows=3, snapshots=0)
    commands = CommandBuffer(file)
    commands.claim([3, 6, 9])
    commands.submit()
    commands.write(file.address("labels", np.array([9, 3])), [2, 7])
    commands.copy([6], [3])
    with interleaved(stock) as log:
        commands.submit()
    assert file.table.labels[[3, 6, 9]].tolist() == [7, 7, 2] and log.conflicts() == []


def test_launches_hold_every_lane_in_one_warp(generator: torch.Generator) -> None:
    """No tensor has fewer lanes than the launch has threads (32 per warp)."""
    for op in sorted(ONE_PROGRAM):
        logs: list[Log] = []
        for seed in range(generator.initial_seed(), generator.initial_seed() + (5 if PROOF else 1)):
            wrong(op_cases.made(op, seed), seed, logs)
        for launch in (launch for log in logs for launch in log.launches):
            assert {a.lanes for a in launch.accesses if 1 < a.lanes < 32 * launch.warps} == set(), launch.kernel


# -- kernels with a defect ------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_with_a_defect_is_found_out(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    mutant, problems = MUTANTS[name], set()
    module = mutated(mutant.op, tmp_path, (mutant.old, mutant.new))
    for seed in range(generator.initial_seed(), generator.initial_seed() + SEEDS):
        problem = wrong(op_cases.made(mutant.op, seed), seed, [], module)
        if re.search(mutant.said, problem):
            return
        problems.add(problem)
    raise AssertionError(f"{name}: expected {mutant.said!r}, found {problems}")


PROGRAMS_SHARE = ("for start in range(0, n, BLOCK)", "for start in range(tl.program_id(0) * BLOCK, n, 2 * BLOCK)")
NOT_ATOMIC = (
    'old = tl.atomic_or(bitmap_ptr + at, tl.full(slot.shape, 1, tl.int32) << bit, mask=valid, sem="relaxed")',
    "old = tl.load(bitmap_ptr + at, mask=valid, other=0)\n    tl.store(bitmap_ptr + at, old | (1 << bit), mask=valid)",
)


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "not atomic"])
def test_a_release_that_is_not_atomic_loses_slots(atomic: bool, tmp_path: Path) -> None:
    """With several programs, atomics would protect the bitmap of a release, but not its counters."""
    module = mutated("release", tmp_path, PROGRAMS_SHARE, *([] if atomic else [NOT_ATOMIC]))
    ids = torch.tensor([3, 5], dtype=torch.int32)
    bitmap, counters = torch.zeros(1, dtype=torch.int32), torch.zeros(COUNTERS, dtype=torch.int32)
    only_the_bitmap = Launch("bitmap", {}, Limits(reach=[bitmap])).allowed()

    def run(chooser: Chooser) -> tuple[int, Log]:
        bitmap.zero_()
        counters.zero_()
        with interleaved(chooser, shared=only_the_bitmap) as log:
            module._release[(2,)](bitmap, ids, counters, 2, 31, BLOCK=1)
        return int(bitmap), log

    both = (1 << 3) + (1 << 5)
    assert run(stock)[0] == both
    results = [result for result, _ in every_order(run)]
    assert sorted(results) == [both, both] if atomic else sorted(results) == [1 << 3] * 2 + [1 << 5] * 2 + [both] * 2
    places = {conflict.split()[4] for conflict in run(stock)[1].conflicts()}
    assert places == {"counters_ptr"} if atomic else "bitmap_ptr" in places


# -- launches of a manager -----------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.script
@pytest.mark.parametrize("strategy", ALL)
def test_a_manager_serves_alike_under_every_schedule(strategy: str, generator: torch.Generator) -> None:
    """Serves requests with overlap, hits and releases under a random schedule."""
    play = Play(Backend("interpreter", "cpu"), strategy=strategy, overlap=True, slots=16)
    blocks = play.mem.planes.plane_map.blocks
    limits = Limits(reach=blocks, null=[block[:, 0] for block in blocks])
    with interleaved(Seeded(generator.initial_seed()), limits) as log:
        a, b = play.admit(None, None)
        for _ in range(10):
            play.step([a, b, None])
        play.settle(ended=[a])
        (snap, *_) = play.end(a, b, how="publish") or [None]
        (row,) = play.admit(None, resume=snap)
        play.step([row])
        play.finish()
    assert log.conflicts() == []
    assert {"_ownership", "_plan", "_move"} <= {launch.kernel for launch in log.launches}
