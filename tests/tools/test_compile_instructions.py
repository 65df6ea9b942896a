"""Tests counts of a token's instructions in NVIDIA's assembly, and of the bytes in flight."""

import pytest

from memstate_tools.compile.instructions import bytes_in_flight, of_a_token, of_two_loops

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
