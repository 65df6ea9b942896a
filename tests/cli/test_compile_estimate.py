"""Instructions of a token in NVIDIA's assembly, and the times on paper that follow from them."""

import re
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from memstate.cli import app as cli
from memstate.cli import compile as compiling
from memstate.cli.compile import KernelReport, cases_of
from memstate.cli.compile.estimate import BATCHES, DEVICES, Device, bandwidths, estimates
from memstate.cli.compile.instructions import bytes_in_flight, of_a_token
from memstate.cli.compile.work import Work, work_of
from memstate.errors import InvalidArgument
from memstate.kernels.catalog import CompileCase

# A load, a branch over the tokens, a token of five instructions, its unrolled copy, and an exit.
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
    found = of_a_token(PROGRAM)
    assert [item.op for item in found] == ["LDG.E", "ISETP.GE.AND", "BRA", *["FMUL"] * 4, "BRA", "EXIT"]
    assert [item.mask for item in found if item.op in ("BRA", "EXIT")] == ["!P0", "P1", "P2"]
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
    """One that does not return; a call that does, to a division for instance, is passed by."""
    loop = ".L_loop:\n" + line("FADD R1, R1, R2; FADD R1, R1, R2; @!P0 CALL.REL.NOINC `(.L_out); BRA `(.L_loop)")
    divide = ".L_out:\n" + line("CALL.REL.NOINC `(.L_divide); EXIT") + ".L_divide:\n" + line("RET.REL.NODEC R4")
    assert [item.op for item in of_a_token(loop + divide)] == ["FADD", "FADD", *["CALL.REL.NOINC"] * 2, "EXIT"]


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


# -- what rows take, and times ------------------------------------------------------------------------------------


def case(name: str) -> CompileCase:
    return next(case for case in cases_of("decode") if case.name == name)


def test_decode_steps_are_ordinary_launches_in_fp32_or_bf16() -> None:
    """By hand: 32 heads of 128 x 128; 128 heads of 64 x 128 with 8 groups; 8 192 channels and 4 taps."""
    delta = work_of(case("gated_delta_step_bf16"))
    assert delta is not None and delta.state == 2 * 32 * 128 * 128 * 2
    assert delta.tokens == 2 * (2 * 16 * 128 + 2 * 32 * 128) + 32 * (4 + 4)
    mamba = work_of(case("selective_step_mamba2_fp32"))
    assert mamba is not None and mamba.state == 2 * 128 * 64 * 128 * 4
    assert mamba.tokens == 2 * (3 * 128 * 64 + 128 + 2 * 8 * 128)
    assert work_of(case("conv_step_bf16")) == Work(32, 2 * 8192 * 3 * 2, 8192 * 4)
    names = {case.name for case in cases_of("common")}
    assert {case.name for case in cases_of("decode")} < names and {"plan[none]", "conv_step_bf16_marks"} < names
    assert not [name for name in map(work_of, cases_of("every")) if name is not None and name.programs < 1]


REPORT = KernelReport("conv_step_bf16", "sm_90", 66, 0, 0, 128, 0, True, 0, 2, 500, 2048)


def test_times_follow_from_bytes_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 programs a row of one warp each, 131 072 bytes; a device of one multiprocessor, 1 GHz and 1 GB/s."""
    monkeypatch.setitem(DEVICES, "H200", Device("sm_90", 1, 1e9, 1e9))
    found = estimates([REPORT, replace(REPORT, target="gfx942"), replace(REPORT, kernel="plan[none]")])
    assert [(item.device, item.batch) for item in found] == [("H200", batch) for batch in BATCHES]
    one = found[0]
    assert one.warps_per_sm == 28 and one.bytes_in_flight == 28 * 2048  # 72 registers of 32 lanes: 65536 / 2304
    assert one.instructions_per_8_kb == round(500 * 32 * 8192 / 98304)
    assert one.floor_us == pytest.approx(131.072) and one.issue_us == pytest.approx(8 * 500 / 1e3)
    assert one.estimate_us == pytest.approx(131.072 + 2 * 0.480)
    slow = estimates([replace(REPORT, instructions=50_000)])[0]
    assert slow.estimate_us == pytest.approx(400 + 0.960)


def test_the_command_prints_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_all(targets: list[str], progress: Any, shapes: str) -> list[KernelReport]:
        asked.append((targets, shapes))
        return [REPORT, replace(REPORT, target="sm_100")]

    monkeypatch.setattr(compiling, "compile_all", compile_all)
    done = CliRunner().invoke(cli.app, ["compile", "--estimate"])
    assert done.exit_code == 0 and asked == [(["sm_90", "sm_100"], "decode")]
    rows = re.findall(r"conv_step_bf16\W+(H200|B200)\W+66\W+28\W+500", done.output)
    assert rows == ["H200", "B200"]
    for wrong in (["--every-shape"], ["--targets", "sm_90"]):
        done = CliRunner().invoke(cli.app, ["compile", "--estimate", *wrong])
        assert done.exit_code == 2 and "--estimate: takes no" in done.output and len(asked) == 1


def test_unknown_targets_of_estimates_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sm_12"):
        compiling.compile_all(["sm_12"], None, "decode")


def test_the_estimate_says_whose_bandwidth_it_takes() -> None:
    assert bandwidths() == "H200 4.8 TB/s, B200 8 TB/s"
