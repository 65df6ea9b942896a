"""Tests what is read from compiled texts: origins of addresses, chains of loads, instructions of a token.

The texts are written by hand; each has another difficulty.
"""

import pytest

from memstate_tools.compile.accesses import accesses, plane_accesses
from memstate_tools.compile.chains import dependent_loads
from memstate_tools.compile.instructions import bytes_in_flight, of_a_token, of_two_loops

ASM = "tail call void asm sideeffect"
LOADED = "tail call i32 asm sideeffect"


def kernel(body: str) -> str:
    pointers = "ptr addrspace(1) inreg captures(none) %0, ptr addrspace(1) %1, i32 %2"
    return f"define void @k({pointers}) #0 !dbg !4 {{\n{body}\n  ret void\n}}\n\ndefine void @other() {{\n}}\n"


@pytest.mark.parametrize(
    ("why", "body", "bits"),
    [
        (
            "either of two pointers, by a loop and by a predicate",
            """
            %3 = load <4 x i32>, ptr addrspace(1) %0, align 16, !dbg !5
            br label %4
          4:
            %5 = phi ptr addrspace(1) [ %1, %2 ], [ %9, %4 ]
            %6 = load i16, ptr addrspace(1) %5, align 2
            %7 = icmp eq ptr addrspace(1) %0, null
            %8 = select i1 %7, ptr addrspace(1) %1, ptr addrspace(1) %1
            store float 1.0, ptr addrspace(1) %8, align 4
            %9 = getelementptr i8, ptr addrspace(1) %0, i64 16
            br i1 %7, label %4, label %10
            """,
            [128, 16],
        ),
        (
            "inline assembly, atomics, generic addresses, asynchronous copies",
            f"""
            %3 = {LOADED} "mov.u32 $0, 0x0;\\0A\\09ld.global.v2.b32 {{ $0 }}, [ $1 ];", "=r,l"(ptr addrspace(1) %0)
            %4 = {LOADED} "atom.global.gpu.relaxed.or.b32 $0, [ $1 + 0 ], $2;", "=r,l,r"(ptr addrspace(1) %0, i32 %3)
            %5 = atomicrmw or ptr addrspace(1) %0, i32 %3 syncscope("agent") monotonic, align 4
            %6 = addrspacecast ptr addrspace(1) %0 to ptr
            store <2 x half> zeroinitializer, ptr %6, align 4
            {ASM} "cp.async.cg.shared.global [ $0 ], [ $1 ], 0x10, $2;", "r,l"(ptr addrspace(3) %7, ptr addrspace(1) %0)
            {ASM} "@$2 st.global.b16 [ $1 + 0 ], {{ $0 }};", "c,l,b"(i16 1, ptr addrspace(1) %0, i1 1)
            {ASM} "st.shared.b8 [ $0 + 0 ], $1;", "r,c"(ptr addrspace(3) %7, i8 1)
            """,
            [64, 32, 32, 32, 128, 16],
        ),
        (
            "buffers of AMD",
            """
            %3 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0)
            %4 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %3, i32 %2, i32 0, i32 0)
            tail call void @llvm.amdgcn.raw.ptr.buffer.store.i32(i32 1, ptr addrspace(8) %3, i32 %2, i32 0, i32 0)
            %5 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %1, i16 0)
            tail call void @llvm.amdgcn.raw.ptr.buffer.store.i16(i16 1, ptr addrspace(8) %5, i32 %2, i32 0, i32 0)
            """,
            [128, 32],
        ),
        (
            "another argument, an index that was loaded: none of the plane's",
            """
            %3 = load <2 x i64>, ptr addrspace(1) %0, align 16
            %4 = load i32, ptr addrspace(1) %1, align 4
            %5 = getelementptr i32, ptr addrspace(1) %1, i32 %4
            store i32 %4, ptr addrspace(1) %5, align 4
            """,
            [128],
        ),
        (
            "an address that was loaded from a table",
            """
            %3 = load i64, ptr addrspace(1) %0, align 8
            %4 = inttoptr i64 %3 to ptr addrspace(1)
            store <4 x float> zeroinitializer, ptr addrspace(1) %4, align 16
            store i8 1, ptr addrspace(1) %1, align 1
            """,
            [128],
        ),
        (
            "through shared memory: unknown, so counted",
            """
            %3 = load i64, ptr addrspace(3) @global_smem, align 8
            %4 = inttoptr i64 %3 to ptr addrspace(1)
            %5 = load i32, ptr addrspace(1) %4, align 4
            """,
            [32],
        ),
    ],
)  # fmt: skip
def test_addresses_are_followed(why: str, body: str, bits: list[int]) -> None:
    moves = plane_accesses(accesses(kernel(body), ["plane", "other", "n"]), ["plane"], ["plane", "other"])
    assert [access.bits for access in moves] == bits, why


@pytest.mark.parametrize(
    "line",
    [
        "call void @llvm.memcpy.p1.p1.i64(ptr addrspace(1) %0, ptr addrspace(1) %1, i64 %2, i1 false)",
        "call void @llvm.amdgcn.raw.ptr.buffer.load.lds(ptr addrspace(8) %0, ptr addrspace(3) %1, i32 4)",
        f'{ASM} "cp.async.bulk.shared.global [ $0 ], [ $1 ], $2;", "r,l,r"(ptr addrspace(3) %2, ptr addrspace(1) %0)',
    ],
)
def test_what_does_not_say_its_width_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="cannot tell what"):
        accesses(kernel(line), ["plane"])


def test_a_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        accesses("", [])


# -- loads that wait for each other ---------------------------------------------------------------


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


# -- instructions of a token ----------------------------------------------------------------------


# A program: a load, a branch over the tokens, a token of five instructions, its unrolled copy, and an exit
PROGRAM = """
.text._step:
        /*0000*/                   LDG.E R2, desc[UR4][R4.64] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R2, 0x1, PT ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   FMUL R6, R6, R7 ;
        /*0040*/                   FMUL R6, R6, R8 ;
        /*0050*/                   FMUL R6, R6, R9 ;
        /*0060*/                   FMUL R6, R6, R9 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   FMUL R6, R6, R9 ;
        /*0090*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*00a0*/               @P2 EXIT ;
        /*00b0*/                   STG.E desc[UR4][R4.64], R6 ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3);
        /*00e0*/                   NOP ;
"""


def line(text: str) -> str:
    return "".join(
        f"        /*{16 * at:04x}*/                   {part} ;\n" for at, part in enumerate(text.split("; "))
    )


def test_a_token_is_the_shortest_way_through_the_longest_block() -> None:
    items = of_a_token(PROGRAM)
    assert [item.op for item in items] == ["LDG.E", "ISETP.GE.AND", "BRA", *["FMUL"] * 4, "BRA", "EXIT"]
    assert [item.mask for item in items if item.op in ("BRA", "EXIT")] == ["!P0", "P1", "P2"]
    whole = of_a_token(PROGRAM.replace("@P2 EXIT", "@P2 NOP"))
    assert [item.op for item in whole][-2:] == ["STG.E", "EXIT"]


def test_a_branch_for_all_has_one_way_on() -> None:
    jump = "        /*0000*/                   BRA `(.L_far) ;\n        /*0010*/                   EXIT ;\n.L_far:\n"
    assert len(of_a_token(jump + line("FADD R1, R1, R2; FADD R1, R1, R2; EXIT"))) == 4
    asked = jump.replace("BRA `", "BRA P0, `")
    assert len(of_a_token(asked + line("FADD R1, R1, R2; FADD R1, R1, R2; EXIT"))) == 4
    with pytest.raises(ValueError, match="no way from"):
        of_a_token(jump + line("FADD R1, R1, R2; FADD R1, R1, R2; BRA `(.L_far)"))


def test_a_loop_may_be_left_by_a_call() -> None:
    """A call that never returns ends the loop. A call that returns does not, for example that of a division routine."""
    loop = ".L_loop:\n" + line("FADD R1, R1, R2; FADD R1, R1, R2; @!P0 CALL.REL.NOINC `(.L_out); BRA `(.L_loop)")
    divide = ".L_out:\n" + line("CALL.REL.NOINC `(.L_divide); EXIT") + ".L_divide:\n" + line("RET.REL.NODEC R4")
    assert [item.op for item in of_a_token(loop + divide)] == ["FADD", "FADD", *["CALL.REL.NOINC"] * 2, "EXIT"]


def loop(name: str, adds: int) -> str:
    """Returns the assembly of a loop of `adds` additions, which jumps over a store that only few tokens need."""
    store = "; ".join(["STG.E desc[UR4][R4.64], R6"] * 3)
    body = f".L_{name}:\n" + line("; ".join(["FADD R1, R1, R2"] * adds) + f"; @P0 BRA `(.L_{name}_on)")
    return body + line(store) + f".L_{name}_on:\n" + line(f"IADD3 R3, R3, 0x1, RZ; @!P1 BRA `(.L_{name})")


def test_tokens_of_a_tail_are_the_ways_round_its_two_longest_loops() -> None:
    """`of_two_loops` gives the two longest loops in the order of the program, without the instructions
    outside of them.
    """
    far = line("; ".join(["MOV R7, R8"] * 30))
    for folded, verified in ((9, 20), (20, 9)):
        loops = of_two_loops(far + loop("a", folded) + far + loop("b", verified) + loop("zeros", 4) + line("EXIT"))
        assert [len(part) for part in loops] == [folded + 3, verified + 3]
        assert not any(item.op == "STG.E" for part in loops for item in part)
    with pytest.raises(ValueError, match="two loops, got 1"):
        of_two_loops(loop("a", 5) + line("EXIT"))


@pytest.mark.parametrize(
    ("program", "lanes"),
    [
        ("LDG.E.128 R8, desc[UR4][R2.64]; LDG.E.128 R12, desc[UR4][R2.64+0x200]; FADD R0, R8, R13; EXIT", 32),
        ("LDG.E.128 R8, desc[UR4][R2.64]; FADD R0, R11, R1; LDG.E.128 R12, desc[UR4][R2.64]; EXIT", 16),
        ("LDG.E.64 R2, desc[UR4][R4.64]; LDG.E.128 R8, desc[UR4][R2.64]; LDG.E.U16 R3, desc[UR4][R6.64]; EXIT", 18),
        ("LDG.E R2, desc[UR4][R4.64]; LDG.E R8, desc[UR4][R6.64]; FADD R0, R8, R1; LDG.E.U8 R9, [R6.64]; EXIT", 8),
        ("LDG.E R2, desc[UR4][R4.64]; STG.E desc[UR4][R6.64], R2; LDG.E R3, desc[UR4][R4.64]; EXIT", 4),
        ("FADD R0, R8, R1; EXIT", 0),
    ],
    ids=["side by side", "used at once", "an address that was loaded", "loads arrive in order", "stored", "none"],
)  # fmt: skip
def test_bytes_in_flight(program: str, lanes: int) -> None:
    assert bytes_in_flight(of_a_token(line(program))) == 32 * lanes
