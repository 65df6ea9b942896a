"""Where addresses come from: compiled text written by hand, each with a way to lose or to mistake the trail.

Every text has the arguments `plane` and `other`, and the widths of the accesses that may move bytes of the plane.
"""

import pytest

from memstate.cli.compile import amdgcn, ptx
from memstate.cli.compile.provenance import plane_accesses


def in_ptx(body: str) -> str:
    return f".visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n{body}\n\tret;\n}}\n"


def in_amdgcn(body: str) -> str:
    spans = "".join(f"\n      - .offset: {8 * at}\n        .size: 8" for at in range(3))
    return f"k:\n{body}\n\ts_endpgm\n\t.section x\n\t.amdhsa_kernel k\n\n    .args:{spans}\n".join("\n\n")


@pytest.mark.parametrize(
    ("why", "text", "bits"),
    [
        (
            "either of two pointers",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            ld.param.b64 %rd2, [k_param_1];
            ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
            mov.b64 %rd3, %rd2;
            @%p1 bra $L_1;
            add.s64 %rd3, %rd1, 16;
        $L_1:
            ld.global.b16 %rs1, [%rd3+8];
            """),
            [128, 16],
        ),
        (
            "selected by a predicate, written under a guard",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            ld.param.b64 %rd2, [k_param_1];
            selp.b64 %rd3, %rd2, %rd1, %p1;
            st.global.b8 [%rd3], %rs1;
            @%p2 mov.b64 %rd3, %rd2;
            st.global.b32 [%rd3], %r1;
            """),
            [8, 32],
        ),
        (
            "inline assembly, caches, atomics, generic addresses, asynchronous copies",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            // begin inline asm
            { .reg .pred q; setp.ne.s32 q, %r9, 0; @q ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ]; }
            // end inline asm
            cvta.to.global.u64 %rd4, %rd1;
            atom.global.gpu.relaxed.add.u32 %r5, [%rd4], 1;
            ld.b64 %rd7, [%rd4];
            cp.async.cg.shared.global [%r3], [%rd4], 0x10, %r4;
            st.shared.b32 [%r3], %r4;
            """),
            [64, 32, 64, 128],
        ),
        (
            "another argument, an index that was loaded, a predicate: none of the plane's",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            ld.param.b64 %rd2, [k_param_1];
            ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
            ld.global.b32 %r5, [%rd2];
            setp.eq.s64 %p1, %rd1, 0;
            selp.b64 %rd3, %rd2, 0, %p1;
            mad.wide.s32 %rd4, %r5, 4, %rd3;
            st.global.b32 [%rd4], %r5;
            """),
            [128],
        ),
        (
            "registers used again",
            in_amdgcn("""
            s_load_dwordx4 s[4:7], s[0:1], 0x0
            v_lshl_add_u64 v[2:3], v[0:1], 2, s[4:5]
            global_load_dwordx4 v[4:7], v[2:3], off
            v_lshl_add_u64 v[2:3], v[0:1], 2, s[6:7]
            global_store_dword v[2:3], v4, off
            """),
            [128],
        ),
        (
            "lanes switched off keep their address",
            in_amdgcn("""
            s_load_dwordx4 s[4:7], s[0:1], 0x0
            v_lshl_add_u64 v[2:3], v[0:1], 2, s[4:5]
            s_and_saveexec_b64 s[8:9], vcc
            v_lshl_add_u64 v[2:3], v[0:1], 2, s[6:7]
            s_or_b64 exec, exec, s[8:9]
            global_store_short v[2:3], v4, off
            """),
            [16],
        ),
        (
            "buffers, a scalar load, a loop",
            in_amdgcn("""
            s_load_dwordx2 s[4:5], s[0:1], 0x0
            s_load_dwordx2 s[12:13], s[0:1], 0x8
            s_mov_b64 s[6:7], 0x20000
            s_mov_b64 s[14:15], 0x20000
        .LBB0_1:
            buffer_load_dwordx2 v[4:5], off, s[4:7], 0
            s_load_dword s8, s[4:5], 0x10
            buffer_store_short v4, off, s[12:15], 0
            s_cbranch_scc1 .LBB0_1
            """),
            [64, 32],
        ),
        (
            "a predicate in registers that held a pointer",
            in_amdgcn("""
            s_load_dwordx4 s[4:7], s[0:1], 0x0
            v_cmp_lt_i32_e64 s[4:5], v4, s4
            s_and_b64 s[8:9], s[4:5], vcc
            v_add_co_u32_e64 v2, s[4:5], s6, v0
            v_addc_co_u32_e64 v3, vcc, s7, 0, s[4:5]
            v_lshl_add_u64 v[2:3], v[2:3], 0, s[8:9]
            global_store_byte v[2:3], v4, off
            global_store_dwordx4 v[0:1], v[4:7], off
            """),
            [128],
        ),
        (
            "the arguments' own address, copied and computed with",
            in_amdgcn("""
            s_mov_b64 s[14:15], s[0:1]
            s_load_dwordx2 s[12:13], s[14:15], 0x8
            global_store_dword v2, v4, s[12:13]
            s_add_u32 s16, s0, 8
            s_addc_u32 s17, s1, 0
            s_load_dwordx2 s[18:19], s[16:17], 0x8
            global_store_short v2, v4, s[18:19]
            s_cbranch_scc1 .LBB0_1
            s_load_dwordx2 s[14:15], s[0:1], 0x0
        .LBB0_1:
            global_load_dwordx2 v[4:5], v2, s[14:15]
            """),
            [16, 64],
        ),
        (
            "an address that was loaded from a table",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            ld.param.b64 %rd2, [k_param_1];
            ld.global.v2.b64 {%rd3, %rd4}, [%rd1];
            ld.global.b32 %r1, [%rd1+16];
            add.s64 %rd5, %rd4, %rd3;
            st.global.v2.b64 [%rd5], {%rd3, %rd4};
            st.global.b32 [%rd2], %r1;
            """),
            [128],
        ),
        (
            "where no path leads that was understood",
            in_ptx("""
            ld.param.b64 %rd1, [k_param_0];
            st.global.v2.b64 [%rd1], {%rd2, %rd3};
            bra.uni $L_2;
            st.global.b8 [%rd1], %rs1;
        $L_2:
            st.global.v4.b64 [%rd1], {%rd2, %rd3, %rd4, %rd5};
            """),
            [128, 8, 256],
        ),
        (
            "past the arguments named, and through memory of the lane's own: unknown, so counted",
            in_amdgcn("""
            s_load_dwordx2 s[4:5], s[0:1], 0x20
            global_load_dword v4, v2, s[4:5]
            scratch_load_dwordx2 v[6:7], off, off
            global_load_dwordx2 v[8:9], v[6:7], off
            """),
            [32, 64],
        ),
    ],
)
def test_addresses_are_followed(why: str, text: str, bits: list[int]) -> None:
    reader = ptx if ".entry" in text else amdgcn
    found = plane_accesses(reader.accesses(text, ["plane", "other"]), ["plane"], ["plane", "other"])
    assert [access.bits for access in found] == bits, why


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (in_ptx("call.uni (%r1), f, (%r2);"), "cannot follow"),
        (in_ptx("cp.async.bulk.shared.global [%r1], [%rd1], %r2, [%r3];"), "cannot tell"),
        (in_amdgcn("\ts_swappc_b64 s[30:31], s[4:5]"), "cannot follow"),
    ],
)
def test_what_cannot_be_followed_is_refused(text: str, complaint: str) -> None:
    reader = ptx if ".entry" in text else amdgcn
    with pytest.raises(ValueError, match=complaint):
        reader.accesses(text, ["plane"])
