"""Mutants of the kernels: what one launch does to slots, labels, counters and bytes."""

from tests.proof.mutation.mutant import Mutant

BITMAP, REGISTERS, TRACKING = "kernels/bitmap.py", "kernels/registers.py", "kernels/tracking.py"
SPECULATION, COPY, SLOTS = "kernels/speculation.py", "kernels/copy.py", "kernels/slots.py"
GATHER, SCATTER, CONV = "kernels/gather.py", "kernels/scatter.py", "kernels/conv.py"
DELTA, SELECTIVE = "kernels/gated_delta.py", "kernels/selective.py"
WARPS = "kernels/warps.py"
PACK, INT8 = "kernels/pack.py", "kernels/pack_int8.py"

BARRIERS = "tests/proof/test_mutant_gaps.py::test_barriers_stand_between_what_phases_write_and_read"
CLAIMS = "tests/kernels/test_bitmap.py::test_B2_claim_takes_the_lowest_free_slots[interpreter-33-all free]"
PACKETS = (
    "tests/kernels/test_ownership.py::test_ownership_follows_the_model_on_random_packets[interpreter-900-250-400-3-1.0]"
)
PLANS = "tests/kernels/test_plan_kernel.py::test_plan_is_the_rule_for_every_row[interpreter-257-{}]"
SETTLES = "tests/kernels/test_plan_kernel.py::test_settle_releases_what_is_superseded_and_real[interpreter-257]"
LATE = "tests/proof/test_interleave.py::test_warps_may_hold_the_same_lanes[{}-4]"
LAUNCHES = "tests/kernels/test_warps.py::test_no_launch_has_more_warps_than_lanes"
ACCEPTS = "tests/kernels/test_accept.py::test_G2_kernel_and_reference_accept_alike[interpreter-257-{}]"

CLAIMED = [
    Mutant(
        "release without an atomic", "lost update", BITMAP,
        "old = tl.atomic_or(bitmap_ptr + slot // 32, tl.full(slot.shape, 1, tl.int32) << bit, mask=valid, "
        'sem="relaxed")',
        "old = tl.load(bitmap_ptr + slot // 32, mask=valid, other=0)\n"
        "    tl.store(bitmap_ptr + slot // 32, old | (tl.full(slot.shape, 1, tl.int32) << bit), mask=valid)",
        "tests/kernels/test_bitmap.py::test_B4_releasing_everything_in_any_order_makes_everything_free[interpreter-33]",
    ),
    Mutant(
        "claim hands out the slot behind", "double owner", BITMAP,
        "local - before)", "local - before + 1)", CLAIMS,
    ),
    Mutant(
        "claim leaves the last slot free", "double owner", BITMAP,
        "kept = word & (-2 << last)", "kept = word & (-1 << last)", CLAIMS,
    ),
    Mutant(
        "short claim counted as whole", "wrong count", BITMAP,
        "bump(counters_ptr, FREE, -taken)", "bump(counters_ptr, FREE, -size)",
        "tests/kernels/test_bitmap.py::test_B2_claim_takes_the_lowest_free_slots[interpreter-33-sparse]",
    ),
    Mutant(
        "no barrier between blocks of a claim", "missing barrier", BITMAP,
        "        tl.debug_barrier()  # the next block reads words that this one cleared\n", "", BARRIERS,
    ),
]  # fmt: skip

OWNED = [
    Mutant(
        "no barrier between releases and claims", "missing barrier", REGISTERS,
        "    phase_barrier()\n    _claim_phase(", "    _claim_phase(", BARRIERS,
    ),
    Mutant(
        "no barrier between blocks of claims", "missing barrier", REGISTERS,
        "        tl.debug_barrier()  # the next block reads words that this one cleared\n", "", BARRIERS,
    ),
    Mutant(
        "no barrier before owners are counted", "missing barrier", REGISTERS,
        "0, mask=slot <= capacity)\n    phase_barrier()", "0, mask=slot <= capacity)", BARRIERS,
    ),
    Mutant(
        "claims before releases", "lost update", REGISTERS,
        "    _release_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK)\n"
        "    phase_barrier()\n"
        "    _claim_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, words, BLOCK, CHUNK)\n",
        "    _claim_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, words, BLOCK, CHUNK)\n"
        "    phase_barrier()\n"
        "    _release_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK)\n",
        PACKETS,
    ),
    Mutant(
        "move without the label", "stale label", REGISTERS,
        "        tl.store(labels_ptr + target, label, mask=go)\n", "", PACKETS,
    ),
    Mutant(
        "move leaves the slot in its source", "double owner", REGISTERS,
        "        tl.store(slots_ptr + source, 0, mask=go)\n", "", PACKETS,
    ),
    Mutant(
        "release leaves the slot in its register", "double owner", REGISTERS,
        "    tl.store(slots_ptr + register, 0, mask=mask & (slot != 0))\n", "", PACKETS,
    ),
    Mutant(
        "release of a register frees nothing", "leak", REGISTERS,
        "double = give_back(bitmap_ptr, tl.where(valid, slot, 0), valid)", "double = slot < 0", PACKETS,
    ),
    Mutant(
        "claim keeps the label that was there", "stale label", REGISTERS,
        "        tl.store(labels_ptr + register, 0, mask=(need != 0) & (slot != 0))\n", "",
        PACKETS,
    ),
    Mutant(
        "copy without the label", "stale label", REGISTERS,
        "        copied = source >= 0\n", "        copied = source < -1\n",
        PACKETS,
    ),
    Mutant(
        "an audit misses the owners of the last slot", "wrong count", REGISTERS,
        "inside = (slot > 0) & (slot <= capacity)", "inside = (slot > 0) & (slot < capacity)",
        "tests/kernels/test_ownership.py::test_audit_counts_owners_and_free_bits[interpreter-1]",
    ),
]  # fmt: skip

TRACKED = [
    Mutant(
        "lane chosen by its slot instead of its label", "lost snapshot", TRACKING,
        "tl.where(full, label_a <= label_b, slot_a == 0)", "tl.where(full, slot_a <= slot_b, slot_a == 0)",
        PLANS.format("ping-pong"),
    ),
    Mutant(
        "snapshots take from the reserve", "wrong count", TRACKING,
        "tl.load(counters_ptr + FREE) - tl.load(counters_ptr + RESERVE)", "tl.load(counters_ptr + FREE)",
        "tests/engine/test_shared_pool.py::test_B5_the_reserve_counts_real_slots[interpreter]",
    ),
    Mutant(
        "refused snapshots are not counted", "wrong count", TRACKING,
        "    bump(counters_ptr, DEGRADED, total - taken)\n", "", PLANS.format("redirect"),
    ),
    Mutant(
        "plan forgets the limit", "wrong count", TRACKING,
        "tl.minimum(tl.minimum(budget, limit), total)", "tl.minimum(budget, total)",
        "tests/proof/test_mutant_gaps.py::test_the_device_keeps_to_the_limit_of_a_plan[interpreter]",
    ),
    Mutant(
        "redirect labels the snapshot with the length after", "stale label", TRACKING,
        "tl.store(labels_ptr + lane_a, length, mask=turn)", "tl.store(labels_ptr + lane_a, after, mask=turn)",
        PLANS.format("redirect"),
    ),
    Mutant(
        "redirect writes the slot that is the snapshot", "stale byte", TRACKING,
        "write = tl.where(turn, fresh, live_slot)", "write = live_slot", PLANS.format("redirect"),
    ),
    Mutant(
        "a snapshot is read again by every step", "stale byte", TRACKING,
        "        tl.store(source_ptr + row, 0, mask=real & (source > 0))\n", "", PLANS.format("redirect"),
    ),
    Mutant(
        "settle for whoever has the row now", "lost snapshot", TRACKING,
        "same = (row > 0) & (generation == tl.load(step_generation_ptr + index, mask=inside, other=0))",
        "same = row > 0", SETTLES,
    ),
    Mutant(
        "settle of steps that meant nothing", "lost snapshot", TRACKING,
        "        same &= result != DEAD\n", "",
        "tests/proof/test_mutant_gaps.py::test_settle_skips_steps_that_meant_nothing[interpreter]",
    ),
    Mutant(
        "settle trusts labels above K", "lost snapshot", TRACKING,
        "top = tl.maximum(tl.where(label_a <= known, label_a, 0), tl.where(label_b <= known, label_b, 0))",
        "top = tl.maximum(label_a, label_b)", SETTLES,
    ),
    Mutant(
        "settle releases the newest lane too", "lost snapshot", TRACKING,
        "lane_b, same & (label_b < top), capacity", "lane_b, same & (label_b <= top), capacity", SETTLES,
    ),
    Mutant(
        "accept of a row that is another's", "stale label", SPECULATION,
        "real = (live_slot > 0) & (accepted > 0) & same", "real = (live_slot > 0) & (accepted > 0)",
        ACCEPTS.format("redirect"),
    ),
    Mutant(
        "crossed is one token short", "stale byte", SPECULATION,
        "tl.where(snapshot > 0, mark - length, 0), mask=inside",
        "tl.where(snapshot > 0, mark - length - 1, 0), mask=inside", ACCEPTS.format("ping-pong"),
    ),
    Mutant(
        "redirect snapshots at the very end of a window", "wrong count", SPECULATION,
        "        reach = after - 1\n", "        reach = after\n", ACCEPTS.format("redirect"),
    ),
    Mutant(
        "a wanted length hides the boundary behind it", "lost snapshot", SPECULATION,
        "tl.maximum(snapshot_at, mark), mark)", "snapshot_at, mark)", ACCEPTS.format("ping-pong"),
    ),
    Mutant(
        "accept keeps all that was drafted", "stale byte", SPECULATION,
        "accepted = tl.minimum(given, tl.load(tokens_ptr + index, mask=inside, other=0))",
        "accepted = tl.load(tokens_ptr + index, mask=inside, other=0)", ACCEPTS.format("none"),
    ),
]  # fmt: skip

WARPED = [
    Mutant(
        "words of a claim change before all warps have them", "missing barrier", BITMAP,
        "        all_loaded()  # or a late warp counts words that have lost their bits, and leaves the loop at another "
        "time\n",
        "", LATE.format("claim-"),
    ),
    Mutant(
        "registers move before all warps have them", "missing barrier", REGISTERS,
        "        all_loaded()  # or a late warp finds the source empty and the target full\n", "",
        LATE.format("ownership-"),
    ),
    Mutant(
        "registers are emptied before all warps have them", "missing barrier", REGISTERS,
        "    all_loaded()  # or a late warp finds registers empty, and counts fewer releases\n", "",
        LATE.format("settle-many"),
    ),
    Mutant(
        "no barrier between writes and labels of copies", "missing barrier", REGISTERS,
        "    phase_barrier()\n    n, targets = _section(packet_ptr, DATA)\n",
        "    n, targets = _section(packet_ptr, DATA)\n",
        "tests/proof/test_interleave.py::test_a_label_that_is_written_is_copied_behind_a_barrier",
    ),
    Mutant(
        "rows change before all warps have them", "missing barrier", TRACKING,
        "    all_loaded()  # or a late warp finds rows labelled and slots spent, and claims for others\n",
        "", LATE.format("plan-redirect"),
    ),
    Mutant(
        "labels move on before all warps have them", "missing barrier", TRACKING,
        "    if STRATEGY == NONE:\n        all_loaded()  # or a late warp takes the new label for the old one\n", "",
        LATE.format("plan-none"),
    ),
    Mutant(
        "accept moves labels on before all warps have them", "missing barrier", SPECULATION,
        "    if STRATEGY == NONE:\n        all_loaded()", "    if STRATEGY == NONE:\n        pass",
        LATE.format("accept-none"),
    ),
    Mutant(
        "four warps for 32 lanes", "lost update", WARPS,
        "max(1, lanes // LANES))\n    if warps * 32 > lanes:", "max(4, lanes // LANES))\n    if lanes < 32:", LAUNCHES,
    ),
    Mutant(
        "fewer words than warps hold", "lost update", BITMAP,
        "max(min(LANES * warps, 512), ", "max(32, ", LAUNCHES,
    ),
    Mutant(
        "claim with Triton's own number of warps", "lost update", BITMAP,
        "CHUNK=chunk_words(words, warps), num_warps=warps\n", "CHUNK=chunk_words(words, warps)\n", LAUNCHES,
    ),
    Mutant(
        "release with Triton's own number of warps", "lost update", BITMAP,
        "BLOCK=block, num_warps=warps_for(block))", "BLOCK=block)", LAUNCHES,
    ),
]  # fmt: skip

MOVED = [
    Mutant(
        "copies to and from ids below 0", "out-of-range slot", COPY,
        "(slot > 0) & (slot <= capacity)", "(slot != 0) & (slot <= capacity)",
        "tests/kernels/test_copy.py::test_B40_null_negative_unknown_and_identical_ids_move_nothing[interpreter-layer_major]",
        "crashed",
    ),
    Mutant(
        "copy addresses of 32 bits", "out-of-range slot", COPY,
        "start + of.to(tl.int64) * stride", "start + (of * stride.to(tl.int32)).to(tl.int64)",
        "tests/kernels/test_copy.py::test_B38_slot_strides_beyond_2_31_elements_are_right[interpreter]", "crashed",
    ),
    Mutant(
        "last tile of a copy is cut", "stale byte", COPY,
        "for at in range(0, words, LANES):", "for at in range(0, words - LANES + 1, LANES):",
        "tests/kernels/test_copy.py::test_B37_nan_payloads_and_signed_zeros_survive[interpreter-dtype0-bits0-patterns0]",
    ),
    Mutant(
        "gather reads the null slot", "out-of-range slot", GATHER,
        "known = (slot > 0) & (slot <= last)", "known = (slot >= 0) & (slot <= last)",
        "tests/kernels/test_gather.py::test_B39_batches_of_any_size_and_padding[interpreter-null]",
    ),
    Mutant(
        "gather addresses of 32 bits", "out-of-range slot", GATHER,
        "plane_ptr + (layer * layer_units + slot * slot_units + first) * UNIT",
        "plane_ptr + ((layer * layer_units + slot * slot_units + first) * UNIT).to(tl.int32)",
        "tests/kernels/test_gather.py::test_B38_offsets_beyond_2_31_elements[interpreter-dtype0-1073741828-slots-gather_slots]", "crashed",
    ),
    Mutant(
        "scatter writes the null slot", "out-of-range slot", SCATTER,
        "due = (slot > 0) & (slot <= last)", "due = (slot >= 0) & (slot <= last)",
        "tests/kernels/test_gather.py::test_B39_batches_of_any_size_and_padding[interpreter-scattered nulls]",
    ),
    Mutant(
        "scatter keeps the state behind the accepted one", "stale byte", SCATTER,
        "steps, steps, 1, write, accepted", "steps, steps, 0, write, accepted",
        "tests/kernels/test_scatter.py::test_B41_one_row_and_rows_of_64_bits[interpreter-rows0]",
    ),
    Mutant(
        "scatter of nobody's token", "stale byte", SCATTER,
        "due = due & (count >= 1)", "due = due & (count >= 0)",
        "tests/kernels/test_scatter.py::test_B41_a_step_of_no_tokens_changes_nothing[interpreter]",
    ),
    Mutant(
        "scatter forgets the snapshots", "lost snapshot", SCATTER,
        "        entries = 2 * batch\n", "        entries = batch\n",
        "tests/kernels/test_scatter.py::test_B41_many_rows[interpreter-300]",
    ),
    Mutant(
        "windows of inputs from one step early", "stale byte", SCATTER,
        "length - taps, length, 0, write", "length - taps, length, 1, write",
        "tests/kernels/test_scatter.py::test_B41_windows_are_slices_of_the_inputs"
        "[interpreter-(torch.bfloat16, 3, 8)-layer_major-tap channel]",
    ),
]  # fmt: skip

PACKED = [
    Mutant(
        "pack reads whatever slot it is told", "out-of-range slot", PACK,
        "slot = known_slot(slot, capacity)", "slot = tl.maximum(slot, 0).to(tl.int64)",
        "tests/kernels/test_pack.py::test_b66_ids_that_are_none_and_places_that_are_not[interpreter-pack_slots]", "crashed",
    ),
    Mutant(
        "unpack stores in the null slot", "out-of-range slot", PACK,
        "due = due & (slot != 0)", "due = due & (slot >= 0)",
        "tests/kernels/test_pack.py::test_b66_slots_in_registers[interpreter-unpack_slots]",
    ),
    Mutant(
        "an empty register leaves what was in the record", "stale byte", PACK,
        "    if not PACK:\n        due", "    if PACK or not PACK:\n        due",
        "tests/kernels/test_pack.py::test_b66_slots_in_registers[interpreter-pack_slots]",
    ),
    Mutant(
        "records at addresses of 32 bits", "stale byte", PACK,
        "place * record_units * ALIGNMENT + offset", "(place * record_units * ALIGNMENT).to(tl.int32) + offset",
        "tests/kernels/test_pack.py::test_B38_records_and_slots_beyond_2_31_bytes[interpreter-records-pack_slots]",
    ),
    Mutant(
        "a group of layers begins with the first", "stale byte", PACK,
        "first + item % count", "item % count",
        "tests/kernels/test_pack.py::test_b66_ranges_of_tiles[interpreter-unpack_slots]",
    ),
    Mutant(
        "int8 of the null slot", "out-of-range slot", INT8,
        "other=0.0).to(tl.float32)\n        scale = _scale_of(tl.max(_sizes(x), 1))",
        "other=0.0).to(tl.float32)\n        x = tl.load(in_slot + at, mask=inside, other=0.0).to(tl.float32)\n"
        "        scale = _scale_of(tl.max(_sizes(x), 1))",
        "tests/kernels/test_pack_int8.py::test_b66_registers_padding_and_places[interpreter-pack_int8]",
    ),
    Mutant(
        "int8 goes to the null slot", "out-of-range slot", INT8,
        "due = due & (slot != 0)", "due = due & (slot >= 0)",
        "tests/kernels/test_pack_int8.py::test_b66_registers_padding_and_places[interpreter-unpack_int8]",
    ),
    Mutant(
        "scales of the first layer for all", "stale byte", INT8,
        "scales_ptr + (at + scale_units)", "scales_ptr + (at - layer * layer_units + scale_units)",
        "tests/kernels/test_pack_int8.py::test_b66_groups_of_layers[interpreter]",
    ),
    Mutant(
        "infinity becomes a number", "stale byte", INT8,
        'tl.where(peak < float("inf"), scale, float("nan"))', "scale",
        "tests/kernels/test_pack_int8.py::test_what_is_no_number_comes_back_as_none[interpreter-0-dtype0]",
    ),
    Mutant(
        "the end of a long column has no say in its scale", "stale byte", INT8,
        "            peak = tl.maximum(peak, tl.max(_sizes(x), 1))\n        scale",
        "            peak = tl.where(start == 0, tl.max(_sizes(x), 1), peak)\n        scale",
        "tests/kernels/test_pack_int8.py::test_b66_int8_is_within_half_a_step[interpreter-shape8-0-dtype8]",
    ),
]  # fmt: skip

DECODED = [
    Mutant(
        "slots beyond the last are taken at their word", "out-of-range slot", SLOTS,
        "tl.where(slot <= last, tl.maximum(slot, 0), 0)", "tl.maximum(slot, 0)",
        "tests/proof/test_interleave.py::test_no_schedule_changes_a_byte_or_touches_a_wrong_one[gated_delta_step]", "crashed",
    ),
    Mutant(
        "more tokens than the step has", "out-of-range slot", SLOTS,
        "tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), max_tokens)", "tl.maximum(tl.load(tokens_ptr + row), 0)",
        "tests/proof/test_interleave.py::test_no_schedule_changes_a_byte_or_touches_a_wrong_one[selective_step]", "crashed",
    ),
    Mutant(
        "convolution stores a snapshot that nobody asked for", "out-of-range slot", CONV,
        "mask=tl.where(snapshot > 0, fits, False)", "mask=fits",
        "tests/kernels/test_decode_steps.py::test_B15_one_token_from_nothing_is_no_padding[interpreter-conv]",
    ),
    Mutant(
        "convolution reads the null slot", "stale byte", CONV,
        "present = tl.where(read > 0, inside, False)", "present = inside",
        "tests/kernels/test_decode_steps.py::test_B16_null_reads_as_zeros[interpreter-conv]",
    ),
    Mutant(
        "convolution window stored backwards", "stale byte", CONV,
        "new += (window[tap].to(stored),)", "new += (window[OLD - 1 - tap].to(stored),)",
        "tests/kernels/test_decode_steps.py::test_G2_a_mixed_batch_agrees_with_its_statement[interpreter-fp32-conv]",
    ),
    Mutant(
        "gated delta stores padding in the null slot", "out-of-range slot", DELTA,
        "mask=tl.where(real, in_tile, False)", "mask=in_tile",
        "tests/kernels/test_decode_steps.py::test_B14_padded_rows_change_nothing[interpreter-gdn]",
    ),
    Mutant(
        "gated delta snapshot goes to the live slot", "lost snapshot", DELTA,
        "tl.store(tile_ptr + snapshot * slot_stride, new", "tl.store(tile_ptr + write * slot_stride, new",
        "tests/kernels/test_decode_steps.py::test_B40_slots_of_one_row_may_coincide[interpreter-(1, 1, 2)-gdn]",
    ),
    Mutant(
        "gated delta rows of 32 bits", "out-of-range slot", DELTA,
        "row = tl.program_id(2).to(tl.int64)", "row = tl.program_id(2)",
        "tests/kernels/test_decode_windows.py::test_B38_windows_beyond_2_31_elements[interpreter]", "crashed",
    ),
    Mutant(
        "selective scan reads the null slot", "stale byte", SELECTIVE,
        "mask=tl.where(read > 0, in_tile, False)", "mask=in_tile",
        "tests/kernels/test_decode_steps.py::test_B16_null_reads_as_zeros[interpreter-mamba2]",
    ),
    Mutant(
        "selective scan with another group's B and C", "stale byte", SELECTIVE,
        "head // (HEADS // GROUPS)", "head % GROUPS",
        "tests/kernels/test_selective.py::test_G2_odd_sizes_and_groups[interpreter-mamba2-dims1]",
    ),
    Mutant(
        "selective state grows instead of decaying", "stale byte", SELECTIVE,
        "s = s * tl.exp((dt if TIED else dt[:, None]) * a)", "s = s * tl.exp((dt if TIED else dt[:, None]) * -a)",
        "tests/kernels/test_decode_steps.py::test_G2_a_mixed_batch_agrees_with_its_statement[interpreter-fp16 states of fp32-mamba2]",
    ),
]  # fmt: skip

MUTANTS = [*CLAIMED, *OWNED, *TRACKED, *WARPED, *MOVED, *PACKED, *DECODED]
