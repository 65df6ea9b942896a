"""Runs some tests of this folder on compiled kernels, in a process of its own. `make compiled` runs all tests of it.

Compiling takes most of the time, so these tests share what they compile.
"""

import pytest

pytest.importorskip("triton", reason="without Triton there are no kernels")

from tests.proof.compiled_run import run

CLAIM = "test_levels.py::test_B11_a_claim_finds_the_lowest_wherever_they_lie"
PLAN = "test_plan_kernel.py::test_plan_is_the_rule_for_every_row"
TREES = "test_trees.py::test_T18_a_row_that_verifies_trees_has_the_bits_of_plain_decode"
STEP = "test_decode_steps.py::test_G2_a_mixed_batch_agrees_with_its_statement"
MARKS = "test_marks.py::test_marks_get_their_states_and_no_other_byte_changes"
RECORDS = "test_pack.py::test_b66_B39_what_columns_name_moves_and_nothing_else"
TESTS = {
    CLAIM: ("spread-2000", "one a word-64000"),
    "test_levels.py::test_a_summary_that_is_wrong_hangs_nothing": ("",),
    "test_ownership.py::test_ownership_follows_the_model_on_random_packets": ("900-250-400-3-1.0", "40000-4-20-3-1.0"),
    "test_ownership.py::test_resolve_gives_slots_and_zero_for_everything_else": ("700",),
    "test_ownership.py::test_audit_counts_owners_and_free_bits": ("2500",),
    PLAN: ("33-none", "129-ping-pong", "129-lazy in place", "129-redirect"),
    "test_copy.py::test_B39_what_is_due_moves_and_nothing_else": ("two",),
    "test_copy.py::test_entries_of_rows_move_rows_and_those_of_registers_do_not": ("zeros-layer_major",),
    "test_gather.py::test_B37_slots_are_moved_bit_for_bit": tuple(
        f"(torch.float32, (2, 4, 2))-layer_major-{op}" for op in ("gather_slots", "scatter_slots")
    ),
    MARKS: ("states alone", "windows and ends of states"),
    RECORDS: ("ids and places that are none-pack_slots", "ids and places that are none-unpack_slots"),
    "test_pack_int8.py::test_b66_int8_is_within_half_a_step": ("shape0-2-dtype0",),
    TREES: (
        "2-fp32-conv",
        "2-fp32-gdn",
        "5-bf16-kda",
        "3-fp32 states of bf16-kda, gates",
        "3-fp32 states of bf16-mamba2",
    ),
    STEP: ("fp32-mamba1", "fp32-mamba3"),
}


@pytest.mark.proof
def test_every_operation_passes_on_what_the_compiler_made() -> None:
    nodes = [f"tests/kernels/{name}[{'-'.join(filter(None, ('interpreter', case)))}]"
             for name, cases in TESTS.items() for case in cases]  # fmt: skip
    nodes.append("tests/kernels/test_ptx_launch.py::test_a_wrong_promise_is_a_fault")
    passed, output = run("", "together", ["pytest", "-q", "-p", "no:cacheprovider", *nodes])
    assert passed and f"{len(nodes)} passed" in output, output
