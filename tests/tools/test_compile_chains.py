"""Tests counts of dependent loads in PTX; test_compile_barriers.py has the counts of the library's plans."""

import pytest

from memstate_tools.compile.chains import dependent_loads

SAMPLES = {
    "side by side": (1, "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n ld.global.b32 { %r2 }, [ %rd2 + 0 ];"),
    "an address": (
        2,
        "ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];\n mul.wide.s32 %rd2, %r2, 4;\n"
        "ld.global.b32 { %r3 }, [ %rd2 + 0 ];",
    ),
    "a mask": (
        2,
        "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n setp.gt.s32 %p1|%p2, %r1, 0;\n"
        "@%p2 ld.global.b32 { %r2 }, [ %rd2 + 0 ];",
    ),
    "a branch": (
        2,
        "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n setp.gt.s32 %p1, %r1, 0;\n @%p1 bra $L_out;\n"
        "ld.global.b32 { %r2 }, [ %rd2 + 0 ];\n $L_out:\n ret;",
    ),
    "shared memory": (
        2,
        "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n st.shared.b32 [global_smem], %r1;\n bar.sync 0;\n"
        "ld.shared.b32 %r2, [global_smem];\n add.s64 %rd2, %rd1, %r2;\n ld.global.b32 { %r3 }, [ %rd2 + 0 ];",
    ),
    "a loop counts once": (
        1, "$L_1:\n ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n add.s64 %rd1, %rd1, %r1;\n @%p1 bra $L_1;\n ret;"
    ),
    "an atomic that a load waits for": (
        2, "atom.global.gpu.relaxed.or.b32 %r1, [ %rd1 + 0 ], %r9;\n ld.global.b32 { %r2 }, [ %r1 + 0 ];"
    ),
    "an atomic that nothing waits for": (
        1, "ld.global.b32 { %r2 }, [ %rd1 + 0 ];\n atom.global.gpu.relaxed.or.b32 %r1, [ %r2 + 0 ], %r9;"
    ),
    "a block that is written before the one it follows": (
        2,
        "bra.uni $L_2;\n $L_3:\n ld.global.b32 { %r2 }, [ %r1 + 0 ];\n ret;\n $L_2:\n"
        "ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n bra.uni $L_3;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_loads_that_wait_for_each_other_are_counted(name: str) -> None:
    loads, ptx = SAMPLES[name]
    assert dependent_loads(f".visible .entry _k(\n\t.param .u64 .ptr .global _k_0\n)\n{{\n {ptx}\n}}\n") == loads
