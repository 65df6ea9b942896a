"""Tests the search for the origin of addresses, in LLVM IR written by hand; each text has another difficulty.

A case is a text with the arguments `plane` and `other`, and the right result: the widths of those accesses that may
move bytes of `plane`.
"""

import pytest

from memstate_tools.compile.accesses import accesses, plane_accesses

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
