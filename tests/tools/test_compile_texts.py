"""Tests what is read from compiled texts: origins of addresses, chains of loads, instructions of a token.

The texts in compiled_texts.txt are written by hand; each has another difficulty.
"""

from pathlib import Path
from typing import Any

import pytest

from memstate_tools.compile.accesses import accesses, plane_accesses
from memstate_tools.compile.chains import dependent_loads
from memstate_tools.compile.instructions import bytes_in_flight, of_a_token, of_two_loops

SAMPLES = [block.split("\n", 1) for block in Path(__file__).with_name("compiled_texts.txt").read_text().split("\n== ")]


def samples(subject: str) -> list[Any]:
    """Returns (what is right, text) of the samples of a subject."""
    heads = [(head.split(" | "), text.strip("\n")) for head, text in SAMPLES[1:]]
    return [pytest.param(right, text, id=why) for (of, right, why), text in heads if of == subject]


def kernel(body: str) -> str:
    pointers = "ptr addrspace(1) inreg captures(none) %0, ptr addrspace(1) %1, i32 %2"
    return f"define void @k({pointers}) #0 !dbg !4 {{\n{body}\n  ret void\n}}\n\ndefine void @other() {{\n}}\n"


@pytest.mark.parametrize(("bits", "body"), samples("widths"))
def test_addresses_are_followed(bits: str, body: str) -> None:
    """The widths are those of the accesses that may move bytes of `plane`."""
    moves = plane_accesses(accesses(kernel(body), ["plane", "other", "n"]), ["plane"], ["plane", "other"])
    assert [access.bits for access in moves] == [int(each) for each in bits.split()]


@pytest.mark.parametrize(("says", "line"), samples("no width"))
def test_what_does_not_say_its_width_is_refused(says: str, line: str) -> None:
    with pytest.raises(ValueError, match=says):
        accesses(kernel(line), ["plane"])


def test_a_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        accesses("", [])


# -- loads that wait for each other ---------------------------------------------------------------


@pytest.mark.parametrize(("loads", "ptx"), samples("loads"))
def test_loads_that_wait_for_each_other_are_counted(loads: str, ptx: str) -> None:
    ptx = f".visible .entry _k(\n\t.param .u64 .ptr .global _k_0\n)\n{{\n {ptx}\n}}\n"
    assert dependent_loads(ptx) == int(loads)


# -- instructions of a token ----------------------------------------------------------------------


def line(text: str) -> str:
    return "".join(
        f"        /*{16 * at:04x}*/                   {part} ;\n" for at, part in enumerate(text.split("; "))
    )


@pytest.mark.parametrize(("number", "program"), samples("program"))
def test_a_token_is_the_shortest_way_through_the_longest_block(number: str, program: str) -> None:
    items = of_a_token(program)
    assert len(items) == int(number)
    assert [item.op for item in items] == ["LDG.E", "ISETP.GE.AND", "BRA", *["FMUL"] * 4, "BRA", "EXIT"]
    assert [item.mask for item in items if item.op in ("BRA", "EXIT")] == ["!P0", "P1", "P2"]
    whole = of_a_token(program.replace("@P2 EXIT", "@P2 NOP"))
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


@pytest.mark.parametrize(("nbytes", "program"), samples("bytes in flight"))
def test_bytes_in_flight(nbytes: str, program: str) -> None:
    assert bytes_in_flight(of_a_token(line(program))) == int(nbytes)
