"""Executes small PTX programs: lanes that exchange values, memory, atomics, control flow, and planted faults."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ptx.program import TOGETHER, Fault, Program
from tests.support.ptx.races import BARRIER, KNOWN, THREAD, Shadow, harmless
from tests.support.ptx_body import kernel, run

THREADS = 128
BEFORE = """mov.u32 %r2, %tid.x; mad.wide.u32 %rd8, %r2, 4, %rd0; mad.wide.u32 %rd9, %r2, 4, %rd1;
ld.global.b32 {%r10}, [%rd8 + 0]; shl.b32 %r3, %r2, 2; mov.b32 %r4, global_smem; add.s32 %r5, %r4, %r3;"""
AFTER = "st.global.b32 [%rd9 + 0], {%r11};"

# name -> instructions, and the result %r11 of thread t. %r2: t. %r10: x[t]. %r5: address of t's word of shared memory
BODIES: dict[str, tuple[str, Callable[[int, list[int]], int]]] = {
    "shuffle up": ("shfl.sync.up.b32 %r11, %r10, 3, 0, -1;", lambda t, x: x[t - 3 if t % 32 > 2 else t]),
    "shuffle up eights": ("shfl.sync.up.b32 %r11, %r10, 3, 0x1800, -1;", lambda t, x: x[t - 3 if t % 8 > 2 else t]),
    "shuffle down": ("shfl.sync.down.b32 %r11, %r10, 3, 31, -1;", lambda t, x: x[t + 3 if t % 32 < 29 else t]),
    "shuffle bits": ("shfl.sync.bfly.b32 %r11, %r10, 37, 31, -1;", lambda t, x: x[t ^ 5]),  # five bits of 37 count
    "shuffle from a lane": ("shfl.sync.idx.b32 %r11, %r10, 5, 31, -1;", lambda t, x: x[t & -32 | 5]),
    "shuffle from one of eight": ("shfl.sync.idx.b32 %r11, %r10, 13, 0x181F, -1;", lambda t, x: x[t & -8 | 5]),
    "shuffle found a lane": (
        "shfl.sync.up.b32 %r12|%p1, %r10, 3, 0, -1; selp.b32 %r11, 1, 0, %p1;", lambda t, x: t % 32 > 2),
    "sum": ("redux.sync.add.s32 %r11, %r10, -1;", lambda t, x: sum(x[t & -32 : (t | 31) + 1])),
    "least": ("redux.sync.min.s32 %r11, %r10, -1;",
        lambda t, x: min(v ^ 1 << 31 for v in x[t & -32 : (t | 31) + 1]) - 2**31),
    "halves": ("mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r11, {%rs2, %rs1};", lambda t, x: x[t] >> 16 | x[t] << 16),
    "pairs": (
        "abs.f16x2 %r12, %r10; max.f16x2 %r11, %r12, 0;",
        lambda t, x: sum(h << n for n in (0, 16) if (h := x[t] >> n & 0x7FFF) <= 0x7C00)),
    "pairs of truths": (
        """setp.num.f16x2 %p1|%p2, %r10, %r10; selp.b32 %r12, 1, 0, %p1; selp.b32 %r13, 2, 0, %p2;
        or.b32 %r11, %r12, %r13;""",
        lambda t, x: (x[t] & 0x7FFF <= 0x7C00) + 2 * (x[t] >> 16 & 0x7FFF <= 0x7C00)),
    "words": (
        "mov.b64 %rd10, {%r2, %r10}; mov.b64 {_, %r12}, %rd10; mov.b64 {%r13, _}, %rd10; sub.s32 %r11, %r12, %r13;",
        lambda t, x: x[t] - t),
    "constants": (
        """mov.b16 %rs1, -2; cvt.u32.u16 %r11, %rs1; and.b32 %r11, %r11, 0xFF0F; mov.b32 %r12, 0f3FB8AA3B;
        xor.b32 %r11, %r11, %r12; prmt.b32 %r13, %r10, 0, 0x9991U; add.s32 %r11, %r11, %r13; mov.pred %p1, -1;
        mov.b64 %rd10, -4294967295; mov.b64 {_, %r15}, %rd10; selp.b32 %r12, %r15, 7, %p1; add.s32 %r11, %r11, %r12;""",
        lambda t, x: (0xFF0E ^ 0x3FB8AA3B) + (x[t] >> 8 & 255 | 0xFFFFFF00 * (x[t] >> 15 & 1)) - 1),
    "parameters": (
        """ld.param.s32 %rd10, [body_param_2]; ld.param.b32 %r12, [body_param_2]; ld.param.b32 %r13, [body_param_3];
        mov.b64 {_, %r14}, %rd10; sub.s32 %r11, %r14, %r12; add.s32 %r11, %r11, %r13;""",
        lambda t, x: -1 + 5 + 0x3FC00000),
    "predicates": (
        "setp.lt.s32 %p1, %r2, 70; mov.b32 %r11, 1; @%p1 mov.b32 %r11, 2; @!%p1 add.s32 %r11, %r10, 5;",
        lambda t, x: 2 if t < 70 else x[t] + 5),
    "two ways that meet": (
        """and.b32 %r12, %r2, 3; setp.lt.s32 %p1, %r12, 2; @%p1 bra $A; add.s32 %r11, %r10, 1; bra.uni $B;
        $A: sub.s32 %r11, %r10, 1; $B: shfl.sync.bfly.b32 %r11, %r11, 2, 31, -1;""",
        lambda t, x: x[t ^ 2] + (1 if t & 3 < 2 else -1)),
    "loops": (  # for i in range(t % 5): for j in range(i): leave the inner loop if j is 2
        """rem.s32 %r12, %r2, 5; mov.b32 %r11, 0; mov.b32 %r13, 0;
        $OUTER: setp.ge.s32 %p1, %r13, %r12; @%p1 bra $END; mov.b32 %r14, 0;
        $INNER: setp.ge.s32 %p2, %r14, %r13; setp.eq.b32 %p3, %r14, 2; or.pred %p2, %p2, %p3; @%p2 bra $NEXT;
        mad.lo.s32 %r11, %r11, 3, %r10; add.s32 %r14, %r14, 1; bra.uni $INNER;
        $NEXT: add.s32 %r13, %r13, 1; bra.uni $OUTER; $END: bar.warp.sync -1;""",
        lambda t, x: x[t] * (3 ** sum(min(i, 2) for i in range(t % 5)) - 1) // 2),
    "registers of inner braces": (
        "{ .reg .b32 %r2; mov.b32 %r2, 9; add.s32 %r11, %r10, %r2; } add.s32 %r11, %r11, %r2;",
        lambda t, x: x[t] + 9 + t),
    "a store of what others have loaded": (
        "mov.b32 %r12, 9; st.shared.b32 [%r4], %r12; bar.sync 0; ld.shared.b32 %r11, [%r4]; st.shared.b32 [%r4], %r12;",
        lambda t, x: 9),
    "a launch without one in front of it": (
        "griddepcontrol.wait; griddepcontrol.launch_dependents; add.s32 %r11, %r10, 1;", lambda t, x: x[t] + 1),
    "rubbish in registers": ("mov.b32 %r11, %r50;", lambda t, x: 0xA5A5A5A5),
    "rubbish in shared memory": ("ld.shared.b32 %r11, [%r5];", lambda t, x: 0xA5A5A5A5),
    "early exit": (
        "setp.gt.u32 %p1, %r2, 77; mov.b32 %r11, 9; @%p1 bra $A; bra.uni $B; $A: ret; $B:", lambda t, x: 9 * (t < 78)),
    "barrier after two ways": (
        """and.b32 %r12, %r2, 1; setp.ne.b32 %p1, %r12, 0; @!%p1 bra $A; st.shared.b32 [%r5], %r10; bra.uni $B;
        $A: st.shared.b32 [%r5], %r2; $B: bar.sync 0; xor.b32 %r12, %r3, 260; add.s32 %r12, %r12, %r4;
        ld.shared.b32 %r11, [%r12];""",
        lambda t, x: t ^ 65 if t & 1 else x[t ^ 65]),
    "a word that a load does not use": (  # another warp stores it at the same time
        """and.b32 %r12, %r2, 3; setp.eq.b32 %p1, %r12, 3; @!%p1 st.shared.b32 [%r5], %r10; bar.sync 0;
        @%p1 st.shared.b32 [%r5], %r10; and.b32 %r12, %r3, 0x1F0; xor.b32 %r12, %r12, 256; add.s32 %r12, %r12, %r4;
        .pragma "used_bytes_mask 0xfff"; ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r12]; add.s32 %r11, %r14, %r15;
        add.s32 %r11, %r11, %r16;""",
        lambda t, x: sum(x[(t ^ 64) & -4 : ((t ^ 64) & -4) + 3])),
}  # fmt: skip


# name -> what the error says, and instructions; the error names one that begins with ">>"
FAULTS = {
    "out of bounds": ("outside", ">> ld.global.b32 {%r11}, [%rd9 + 512];"),
    "before the first byte": ("outside", ">> ld.global.b32 {%r11}, [%rd9 + -4];"),
    "outside of shared memory": ("outside", ">> ld.shared.b32 %r11, [%r4 + 2048];"),
    "before shared memory": ("outside", ">> ld.shared.b32 %r11, [%r4 + -4];"),
    "misaligned": ("misaligned", ">> ld.global.b32 {%r11}, [%rd9 + 2];"),
    "a misaligned vector": ("misaligned", ">> ld.global.v2.b32 {%r11, %r12}, [%rd1 + 4];"),
    "a misaligned row of a matrix": (
        "misaligned", ">> ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r11}, [%r4 + 8];"),
    "half a warp shuffles": (
        "not whole",
        "and.b32 %r12, %r2, 16; setp.ne.b32 %p1, %r12, 0; @%p1 bra $A; >> redux.sync.add.s32 %r11, %r10, -1; $A: ret;"),
    "halves of two warps shuffle": (
        "not whole",
        """sub.s32 %r12, %r2, 16; setp.gt.u32 %p1, %r12, 31; @%p1 bra $A; >> redux.sync.add.s32 %r11, %r10, -1;
        $A: ret;"""),
    "a shuffle of half a warp": ("part of a warp", ">> shfl.sync.bfly.b32 %r11, %r10, 1, 31, 65535;"),
    "halves of a warp come to a barrier one by one": (
        "not whole",
        """and.b32 %r12, %r2, 1; setp.eq.s32 %p1, %r12, 0; @%p1 bra $A; bra.uni $B; >> $A: bar.sync 0; bra.uni $C;
        $B: bra.uni $A; $C: ret;"""),
    "a warp misses a barrier": ("barrier", "setp.lt.s32 %p1, %r2, 32; @%p1 bra $A; >> bar.sync 0; $A: ret;"),
    "warps at different barriers": (
        "different barriers",
        "setp.lt.s32 %p1, %r2, 32; @%p1 bra $A; >> bar.sync 0; bra.uni $B; >> $A: bar.sync 0; $B: ret;"),
    "two values in one cell": ("different values", ">> st.global.b32 [%rd1 + 0], {%r2};"),
    "two values in one shared cell": ("different values", ">> st.shared.b32 [%r4], %r2;"),
    "a race with the first thread": (
        "race.*warps", "setp.eq.u32 %p1, %r2, 0; @%p1 st.shared.b32 [%r4], %r10; >> ld.shared.b32 %r11, [%r4];"),
    "a race of all loads with the last thread": (
        "race.*warps", "setp.eq.u32 %p1, %r2, 127; ld.shared.b32 %r11, [%r4]; >> @%p1 st.shared.b32 [%r4], %r2;"),
    "a race of stores of one value with the last thread": (
        "race.*warps",
        "mov.b32 %r12, 9; st.shared.b32 [%r4], %r12; setp.eq.u32 %p1, %r2, 127; >> @%p1 st.shared.b32 [%r4], %r2;"),
    "a race of an atomic with a wide load": (
        "race.*warps",
        """setp.eq.u32 %p1, %r2, 0; @%p1 atom.global.gpu.relaxed.add.u32 %r12, [%rd1 + 4], %r10;
        >> ld.global.v2.b32 {%r11, %r13}, [%rd1];"""),
    "a load that uses a byte of a word that others store": (
        "race.*lanes",
        """st.shared.b32 [%r5], %r10; xor.b32 %r12, %r5, 4; .pragma "used_bytes_mask 0x2";
        >> ld.shared.b32 %r11, [%r12];"""),
    "an unknown instruction": (r"frobnicate\.b32 %r11, %r10", ">> frobnicate.b32 %r11, %r10;"),
}  # fmt: skip

for unknown in (
    "bar.sync 1",
    "cvt.rm.f16.f32 %rs1, %r10",
    "min.s16x2 %r11, %r10, %r10",
    "red.global.gpu.relaxed.add.noftz.f16x2 [%rd1], %r10",
):
    FAULTS[unknown] = ("not known", f">> {unknown};")

RACES = {  # a barrier comes between
    "global": """>> st.global.b32 [%rd8], {{%r2}}; {} xor.b32 %r12, %r3, {}; cvt.u64.u32 %rd10, %r12;
    add.s64 %rd10, %rd0, %rd10; >> ld.global.b32 {{%r11}}, [%rd10];""",
    "shared": """>> st.shared.b32 [%r5], %r2; {} xor.b32 %r12, %r3, {}; add.s32 %r12, %r4, %r12;
    >> ld.shared.b32 %r11, [%r12];""",
}
for place, (level, far, barrier) in product(RACES, [("lanes", 1, "bar.warp.sync -1;"), ("warps", 64, "bar.sync 0;")]):
    BODIES[f"{place} memory of {level}"] = (
        RACES[place].format(barrier, 4 * far).replace(">>", ""),
        lambda t, x, far=far: t ^ far,
    )
    FAULTS[f"a race of {level} in {place} memory"] = (
        rf"(?=.*race)(?=.*{level}).*(read after write|write after read)", RACES[place].format("", 4 * far))  # fmt: skip


def threads(body: str, generator: torch.Generator, *args: Any, **launch: Any) -> tuple[list[int], list[int]]:
    """Runs a body. Returns the values %r10 and the results %r11 of all threads."""
    x = torch.randint(-(2**31), 2**31, (THREADS,), dtype=torch.int32, generator=generator)
    out, launch = torch.zeros_like(x), {"warps": THREADS // 32, "shared": 16 * THREADS} | launch
    run(BEFORE + body + AFTER * ("%r11" in body), x, out, *args, **launch)
    return [v & 2**32 - 1 for v in x.tolist()], [v & 2**32 - 1 for v in out.tolist()]


@pytest.mark.parametrize("name", BODIES)
def test_threads_compute(name: str, generator: torch.Generator) -> None:
    body, want = BODIES[name]
    x, out = threads(body, generator, -5, 1.5)
    assert out == [int(want(t, x)) & 2**32 - 1 for t in range(THREADS)]


# -- memory --------------------------------------------------------------------------------------

PLACE = """mov.u32 %r1, %tid.x; xor.b32 %r2, %r1, 33; mov.b32 %r3, global_smem; mad.lo.s32 %r4, %r1, {0}, %r3;
mad.lo.s32 %r5, %r2, {0}, %r3; mad.wide.u32 %rd10, %r1, {0}, %rd0; mad.wide.u32 %rd11, %r2, {0}, %rd1;"""
STEPS = [("ld.global", "%rd10"), ("st.shared", "%r4"), ("ld.shared", "%r5"), ("st.global", "%rd11")]


def move(kind: str, place: str, first: int, n: int, bits: int) -> str:
    """Returns an instruction that moves n registers to a place, or from it."""
    names = ", ".join(f"%{'rs' if bits < 32 else 'r' if bits == 32 else 'rd'}{20 + first + k}" for k in range(n))
    operands = [f"[{place} + {first * bits // 8}]", f"{{{names}}}" if n > 1 else names]
    return f"{kind}{f'.v{n}' * (n > 1)}.b{bits} {', '.join(operands[:: 1 if kind[0] == 's' else -1])};"


# (n, bits, which): registers of a thread go to shared memory and back. Half of the steps move a vector, the others each
# register alone.
MOVES = {
    (n, bits, which): PLACE.format(n * bits // 8) + "bar.sync 0;".join(
        move(*way, 0, n, bits) if step % 2 == which else "".join(move(*way, k, 1, bits) for k in range(n))
        for step, way in enumerate(STEPS))
    for n, bits, which in product((1, 2, 4), (8, 16, 32, 64), (0, 1)) if n * bits <= 128
}  # fmt: skip
MOVES |= {(*key[:2], key[2] + 3): body.replace("ld.global", "ld.global.cg") for key, body in MOVES.items()}
MOVES[1, 32, 2] = MOVES[1, 32, 0].replace("st.shared", "st.shared::cta")


@pytest.mark.parametrize("case", MOVES)
def test_bytes_move_through_shared_memory(case: tuple[int, int, int], generator: torch.Generator) -> None:
    x = torch.randint(256, (64 * case[0] * case[1] // 8,), dtype=torch.uint8, generator=generator)
    out = torch.zeros_like(x)
    run(MOVES[case], x, out, warps=2, shared=len(x))
    assert torch.equal(x, out)


FOUR = "{%r20, %r21, %r22, %r23}"
ROW = """mov.u32 %r1, %tid.x; mov.b32 %r3, global_smem; mad.lo.s32 %r4, %r1, 16, %r3; mad.lo.s32 %r6, %r1, 5, 3;
and.b32 %r6, %r6, 31; mad.lo.s32 %r5, %r6, 16, %r3; mad.wide.u32 %rd2, %r1, 16, %rd0; mad.wide.u32 %rd3, %r1, 16, %rd1;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd2];"""
MATRICES = {}
for n, how in product((1, 2, 4), ("", ".trans")):
    name, some = f"matrix.sync.aligned.m8n8.x{n}{how}.shared.b16", FOUR[: 6 * n - 1] + "}"
    MATRICES["ld" + name] = f"{ROW} st.shared.v4.b32 [%r4], {FOUR}; bar.warp.sync -1; ld{name} {some}, [%r5];"
    MATRICES["st" + name] = f"{ROW} st{name} [%r5], {some}; bar.warp.sync -1; ld.shared.v4.b32 {FOUR}, [%r4];"


@pytest.mark.parametrize("form", MATRICES)
def test_matrices_move(form: str, generator: torch.Generator) -> None:
    """Lane 8k + r has the address of row r of matrix k. Each lane has two neighbours of each matrix in a register."""
    x = torch.randint(-(2**15), 2**15, (32, 8), dtype=torch.int16, generator=generator)
    out = torch.zeros_like(x)
    run(f"{MATRICES[form]} st.global.v4.b32 [%rd3], {FOUR};", x, out, shared=512)
    for lane, k, half in product(range(32), range(int(form[form.index(".x") + 2])), range(2)):
        r, column = (lane // 4, lane % 4 * 2 + half)[:: -1 if ".trans" in form else 1]
        in_memory, in_register = (5 * (8 * k + r) + 3 & 31, column), (lane, 2 * k + half)
        assert x[in_memory] == out[in_register] if form[0] == "l" else x[in_register] == out[in_memory]


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, a: old + a & 2**32 - 1, "and.b32": lambda old, a: old & a, "or.b32": lambda old, a: old | a,
}  # fmt: skip
CELL = "shr.u32 %r12, %r2, 1; mad.wide.u32 %rd10, %r12, 4, %rd2; mov.b32 %r11, 0;"
ATOMICS = {
    f"{kind}.global.gpu.relaxed.{name}": f"{CELL} {kind}.global.gpu.relaxed.{name} {into}[%rd10 + 0], %r10;"
    for kind, into in (("atom", "%r11, "), ("red", ""))
    for name in OPERATIONS
}


@pytest.mark.parametrize("form", ATOMICS)
def test_two_lanes_change_one_cell(form: str, generator: torch.Generator) -> None:
    does, first = OPERATIONS[form.partition("relaxed.")[2]], 2 * form.startswith("red")
    cells = torch.full((THREADS // 2,), 7, dtype=torch.int32)
    x, out = threads(ATOMICS[form], generator, cells)
    for cell, after in enumerate(cells.tolist()):
        (one, two), found = x[2 * cell : 2 * cell + 2], [*out[2 * cell : 2 * cell + 2], after & 2**32 - 1]
        orders = [[7, does(7, one), does(does(7, one), two)], [does(7, two), 7, does(does(7, two), one)]]
        assert found[first:] in [order[first:] for order in orders]


@pytest.mark.parametrize("early", [False, True])
def test_the_launch_in_front_runs_when_a_program_waits_for_it(early: bool) -> None:
    """What a program loads before it waits is what was there before the launch in front."""
    x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    parts = ["griddepcontrol.wait;", "ld.global.b32 {%r11}, [%rd0];"][:: -1 if early else 1]
    behind = Program(kernel("".join(parts) + "st.global.b32 [%rd1], {%r11};", ("u64", "u64")))
    behind.run((1,), (x, out), 1, front=[lambda: x.fill_(7)])  # type: ignore[list-item,return-value]
    assert x.item() == 7 and out.item() == (0 if early else 7)
    never = Program(kernel("mov.b32 %r11, 1;", ("u64", "u64")))
    with pytest.raises(Fault, match="does not wait for the launch in front"):
        never.run((1,), (x, out), 1, front=[lambda: None])


# -- planted faults ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_a_name_and_a_line(name: str, generator: torch.Generator) -> None:
    words, body = FAULTS[name]
    with pytest.raises(Fault, match=words) as fault:
        threads(body.replace(">>", ""), generator)
    lines = [f"body.py:{n}:" for n, line in enumerate((BEFORE + body).split(";"), 1) if ">>" in line]
    assert any(line in str(fault.value) for line in lines), (lines, fault.value)


@pytest.mark.parametrize("leave", [list.clear, lambda held: held[0].resize_(1 << 20)], ids=["freed", "moved"])
def test_memory_that_was_freed_or_moved_is_a_fault(leave: Callable[..., Any], generator: torch.Generator) -> None:
    held = [torch.zeros(64)]
    threads("ld.global.b32 {%r11}, [%rd2 + 0];", generator, held[0])
    at = held[0].data_ptr()
    leave(held)
    with pytest.raises(Fault, match="outside"):
        threads("ld.global.b32 {%r11}, [%rd2 + 0];", generator, at)


def test_allocations_may_lie_in_others(generator: torch.Generator) -> None:
    words = np.arange(THREADS, dtype=np.int32)
    given = [torch.from_numpy(part) for part in (words, words[:4], words[8:12])]
    _, out = threads("mad.wide.u32 %rd10, %r2, 4, %rd2; ld.global.b32 {%r11}, [%rd10];", generator, *given)
    assert out == words.tolist()


def test_the_last_bytes_of_an_access_are_inside(generator: torch.Generator) -> None:
    with pytest.raises(Fault, match="outside"):
        threads("ld.global.b64 %rd10, [%rd2 + 8];", generator, torch.zeros(3))


def test_addresses_may_come_from_memory(generator: torch.Generator) -> None:
    """Neighbours store to two allocations that no argument names, and to which no other thread stores."""
    parts = [torch.zeros(size, dtype=torch.int32) for size in (THREADS, 9 * THREADS)]
    table = torch.tensor([part.data_ptr() for part in parts])
    body = """and.b32 %r12, %r2, 1; mad.wide.u32 %rd10, %r12, 8, %rd2; ld.global.b64 %rd11, [%rd10];
    mad.wide.u32 %rd12, %r2, 4, %rd11; st.global.b32 [%rd12], %r2;"""
    threads(body, generator, table)
    assert [part[:THREADS].tolist() for part in parts] == [
        [t * (t % 2 == odd) for t in range(THREADS)] for odd in (0, 1)
    ]


def test_programs_have_their_own_shared_memory(generator: torch.Generator) -> None:
    out = torch.zeros(2 * THREADS, dtype=torch.int32)
    body = """mov.u32 %r12, %ctaid.x; st.shared.b32 [%r5], %r12; bar.sync 0; xor.b32 %r13, %r3, 256;
    add.s32 %r13, %r13, %r4; ld.shared.b32 %r14, [%r13]; mad.lo.s32 %r15, %r12, 128, %r2;
    mad.wide.u32 %rd10, %r15, 4, %rd2; st.global.b32 [%rd10], %r14;"""
    threads(body, generator, out, grid=(2,))
    assert out.tolist() == [0] * THREADS + [1] * THREADS


TICKET = """mov.u32 %r12, %ctaid.x; mov.u32 %r13, %ctaid.y; mov.u32 %r14, %ctaid.z; mad.lo.s32 %r13, %r14, 2, %r13;
mad.lo.s32 %r12, %r13, 3, %r12; mad.lo.s32 %r12, %r12, 128, %r2; mad.wide.u32 %rd10, %r12, 4, %rd3; mov.b32 %r13, 1;
atom.global.gpu.relaxed.add.u32 %r14, [%rd2], %r13; st.global.b32 [%rd10], %r14;"""


def first_come(order: str, generator: torch.Generator, grid: tuple[int, int, int] = (1, 1, 1)) -> list[int]:
    """Returns the threads of a launch in the order in which they take numbers."""
    taken = torch.zeros(THREADS * grid[0] * grid[1] * grid[2], dtype=torch.int32)
    threads(TICKET, generator, torch.zeros(1, dtype=torch.int32), taken, grid=grid, order=order)
    return taken.argsort().tolist()


def test_orders_of_warps_and_programs(generator: torch.Generator) -> None:
    line, wide = list(range(THREADS)), (3, 2, 22)  # 132 programs: more than run at a time
    assert [first_come(order, generator) for order in ("together", "warps", "backwards")] == [line, line, line[::-1]]
    assert first_come("together", generator, wide) == list(range(132 * THREADS))
    assert first_come("backwards", generator, wide)[0] == 132 * THREADS - 1
    for grid, size in (((1, 1, 1), 32), ((3, 1, 1), THREADS), (wide, TOGETHER)):
        first, again = ([first_come(str(seed), generator, grid)[0] // size for seed in range(5)] for _ in range(2))
        assert first == again and len({*first}) > 1


def test_threads_of_the_host_may_launch() -> None:
    def launch(seed: int) -> bool:
        x, out = threads("ld.global.b32 %r11, [%rd8];" * 40, torch.Generator().manual_seed(seed))
        return x == out

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(launch, range(32)))
    finally:
        sys.setswitchinterval(usual)


# Accesses: kind, thread (64 are a program), barriers before, bytes up to the eighth; and the race of the last one.
ORDERS = [
    ("load 0 0 4, load 64 0 4", ""),
    ("atomic 0 0 4, atomic 64 0 4", ""),
    ("atomic 0 0 4, load 64 0 4", "read after write, programs"),
    ("load 0 0 4, atomic 64 0 4", "write after read, programs"),
    ("store 0 0 4, atomic 32 0 4", "write after write, warps"),
    ("atomic 0 0 4, store 1 0 4", "write after write, lanes"),
    ("load 0 0 8, store 32 0 4", "write after read, warps"),
    ("store 0 0 4, load 32 0 8", "read after write, warps"),
    ("load 0 0 4, silent 32 0 4", ""),
    ("load 0 0 4, store 32 1 4", ""),
    ("store 0 0 4, store 0 0 4", ""),
    ("store 0 5 4, store 64 9 4", "write after write, programs"),
    ("load 0 0 4, load 32 0 4, store 32 0 4", "write after read, warps"),
    ("load 64 0 4, load 0 0 4, load 1 0 4, store 1 0 4", "write after read, programs"),
    ("load 0 0 4, load 0 1 4, load 32 1 4, store 32 1 4", "write after read, warps"),
]


@pytest.mark.parametrize(("accesses", "race"), ORDERS)
def test_accesses_race_unless_a_barrier_orders_them(accesses: str, race: str) -> None:
    shadow = Shadow(8, 4, 64)
    for access in accesses.split(", "):
        kind, *numbers = access.split()
        thread, barriers, width = map(int, numbers)
        at, now = np.array([8 - width]), np.array([64 + thread << THREAD | barriers << BARRIER])
        raced = shadow.note(kind.replace("silent", "store"), at, width, now, np.array([kind == "silent"]))
    assert list(raced) == [race] * bool(race)


def test_a_race_is_harmless_at_its_file_line_and_level_only() -> None:
    file, line, levels, _ = KNOWN[0]
    told = [
        ("a, warps", file, line),
        ("a, programs", file, line),
        ("a, warps", "slots.py", line),
        ("a, warps", file, ""),
    ]
    assert "programs" not in levels
    assert [harmless(*one) for one in told] == [True, False, False, False]


def test_programs_race_unless_they_only_read_or_are_atomic(generator: torch.Generator) -> None:
    count, first = torch.zeros(1, dtype=torch.int32), "mov.u32 %r12, %ctaid.x; setp.eq.b32 %p1, %r12, 0;"
    with pytest.raises(Fault, match=r"(?=.*race)(?=.*programs).*(read after write|write after read)"):
        threads(first + "@%p1 st.global.b32 [%rd8 + 0], {%r2};", generator, grid=(2,))
    threads("mov.b32 %r13, 1; atom.global.gpu.relaxed.add.u32 %r12, [%rd2 + 0], %r13;", generator, count, grid=(3, 2))
    assert count.item() == 6 * THREADS
