"""Mutants of where bytes lie: layouts, given memory, tile tables, sleep and the shapes of known models."""

from tests.proof.mutation.mutant import Mutant

LAYOUT, MEMORY, REGIONS = "memstate/state/layout.py", "memstate/state/memory.py", "memstate/state/regions.py"
STORAGE, ENGINE, PRESETS = (
    "memstate/state/planes.py",
    "memstate/engine/manager.py",
    "memstate/state/presets/families.py",
)
SPLIT, WINDOWS = "memstate/state/sharding.py", "memstate/state/windows.py"

MUTANTS = [
    Mutant(
        "blocks padded downwards", "double owner", LAYOUT,
        "-(-plane.nbytes // self.alignment) * self.alignment", "plane.nbytes // self.alignment * self.alignment",
        "tests/state/test_layout.py::test_B37_blocks_are_aligned_disjoint_and_inside_their_arena",
    ),
    Mutant(
        "layers overlap in the last slot", "double owner", LAYOUT,
        "Placement(i, 0, (slots + 1) * block, block)", "Placement(i, 0, slots * block, block)",
        "tests/state/test_layout.py::test_B37_blocks_are_aligned_disjoint_and_inside_their_arena",
    ),
    Mutant(
        "tiles beyond the end of a block", "out-of-range slot", MEMORY,
        "min(TILE_BYTES, span.nbytes - at)", "TILE_BYTES",
        "tests/state/test_storage.py::test_tiles_are_multiples_of_16_and_at_most_one_unit_of_work[reference-layer_major]",
    ),
    Mutant(
        "16 bytes at a time where memory is 4 apart", "stale byte", MEMORY,
        "gcd(MOVE_BYTES, *sizes)", "MOVE_BYTES",
        "tests/state/test_given_memory.py::test_B37_one_odd_number_makes_the_words_narrow[interpreter-address]",
    ),
    Mutant(
        "spans joined across a gap", "stale byte", MEMORY,
        "if _place(span) == (storage, stride, address + joined[-1].nbytes):",
        "if _place(span)[:2] == (storage, stride):",
        "tests/state/test_given_memory.py::test_B37_copies_and_zeros_are_exact_in_given_memory"
        "[interpreter-fp32 and bf16, odd shapes-pages]",
    ),
    Mutant(
        "sleep keeps the first layer only", "stale byte", MEMORY,
        "for block in region.blocks)", "for block in region.blocks[:1])",
        "tests/state/test_sleep.py::test_B37_bytes_come_back_and_memory_is_released_in_between"
        "[reference-fp32 and bf16, odd shapes-layer_major]",
    ),
    Mutant(
        "tables are not filled again after sleep", "stale byte", MEMORY,
        "            table.fill()\n", "            pass\n",
        "tests/state/test_sleep.py::test_B37_bytes_come_back_and_memory_is_released_in_between"
        "[interpreter-fp32 and bf16, odd shapes-layer_major]", "crashed",
    ),
    Mutant(
        "the null slot wakes with rubbish", "stale byte", MEMORY,
        "            self.scrub_null()\n            return\n", "            return\n",
        "tests/state/test_sleep.py::test_without_keeping_only_the_null_slot_is_defined[reference-layer_major]",
    ),
    Mutant(
        "given slots are as far apart as they are long", "stale byte", REGIONS,
        "(tensor.stride(0) * size, tensor.stride(1) * size, 1)", "(tensor.stride(0) * size, nbytes, 1)",
        "tests/state/test_given_memory.py::test_B37_copies_and_zeros_are_exact_in_given_memory"
        "[reference-fp32 and bf16, odd shapes-pages]",
    ),
    Mutant(
        "overlap with the block in front is not seen", "double owner", REGIONS,
        "return (turns < slots and rest < low.nbytes) or", "return (turns < slots and rest < 0) or",
        "tests/state/test_given_memory.py::test_overlap_is_exact_for_any_strides",
    ),
    Mutant(
        "layers of a plane beside another's", "stale byte", STORAGE,
        "tensor[region.first : region.first + len(region.tensor)]", "tensor[: len(region.tensor)]",
        "tests/state/test_given_memory.py::test_slots_are_gathered_and_scattered_layer_by_layer[reference-separate]",
    ),
    Mutant(
        "copies that depend on their order pass", "stale byte", STORAGE,
        "both = sorted({to for to, _ in due} & {of for _, of in due})", "both = []",
        "tests/state/test_storage.py::test_B40_a_copy_that_depends_on_order_is_refused_and_moves_nothing"
        "[reference-dst1-src1-\\\\[3\\\\] are source and destination]",
    ),
    Mutant(
        "sleep that loses states is not refused", "lost snapshot", ENGINE,
        "        if held and not keep:\n", "        if held < 0:\n",
        "tests/engine/test_engine_memory.py::test_sleep_that_would_lose_a_state_is_refused[reference]",
    ),
    Mutant(
        "windows keep one input too many", "wrong count", PRESETS,
        "(sum(part.length for part in parts), width - 1), 0", "(sum(part.length for part in parts), width), 0",
        "tests/state/test_presets.py::test_bytes_per_slot_are_those_of_the_table[qwen3_next-layer_major]",
    ),
    Mutant(
        "C without its groups", "wrong count", PRESETS,
        'Part("C", self.groups, self.state)', 'Part("C", 1, self.state)',
        "tests/state/test_presets.py::test_bytes_per_slot_are_those_of_the_table[nemotron_h-layer_major]",
    ),
    Mutant(
        "a rank holds its neighbour's heads", "stale byte", SPLIT,
        "rank * part.units // ranks * part.size", "(rank + 1) * part.units // ranks * part.size",
        "tests/state/test_split.py::test_the_slices_of_a_rank_by_hand",
    ),
    Mutant(
        "windows too short for the step pass", "stale byte", WINDOWS,
        "window.shape[2] >= taps + tokens", "window.shape[2] >= tokens",
        "tests/engine/test_speculation.py::test_conv_inputs_that_do_not_reach_are_refused[reference]",
    ),
]  # fmt: skip
