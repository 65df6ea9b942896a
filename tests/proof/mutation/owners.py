"""Mutants of the orchestration: who owns which slot, row and page, and what the host believes of it."""

from tests.proof.mutation.mutant import Mutant

ALLOCATOR, UPLOAD = "memstate/slots/allocator.py", "memstate/slots/upload.py"
COMMANDS, PACKET = "memstate/slots/commands.py", "memstate/slots/packet.py"
STEPS, STEPPING = "memstate/requests/steps.py", "memstate/engine/stepping.py"
HANDLES = "memstate/requests/handles.py"
SNAPSHOTS, ADMISSION = (
    "memstate/requests/snapshots.py",
    "memstate/engine/admission.py",
)
ENDINGS = "memstate/engine/ending.py"
REQUESTS, PAGES, PAGE_TABLE = (
    "memstate/requests/table.py",
    "memstate/requests/pages.py",
    "memstate/requests/page_table.py",
)
MIRROR, PING_PONG, REDIRECT = (f"memstate/requests/tracking/{name}.py" for name in ("mirror", "ping_pong", "redirect"))

SCHEDULES = "tests/engine/test_tracking_model.py::test_random_schedules_follow_the_rules[reference-{}]"
MANY = "tests/prefix/test_prefix_gaps.py::test_the_order_of_record_is_kept_for_many_registers_too[reference]"

FREE = [
    Mutant(
        "the null slot is handed out", "out-of-range slot", ALLOCATOR,
        "        words[0] &= ~1  # slot 0\n", "",
        "tests/slots/test_allocator.py::test_B1_capacity_slots_and_not_one_more[reference-1]",
    ),
    Mutant(
        "slots beyond the last are handed out", "out-of-range slot", ALLOCATOR,
        "words[-1] &= (1 << tail) - 1", "words[-1] &= (2 << tail) - 1",
        "tests/slots/test_allocator.py::test_B10_reset_makes_everything_free[reference]",
    ),
    Mutant(
        "releases in hand are believed", "wrong count", ALLOCATOR,
        "if self._unverified and n > self.free - self._unverified:", "if self._unverified and n > self.free:",
        "tests/slots/test_allocator.py::test_B5_the_count_stays_safe_before_anyone_checks[reference]",
    ),
    Mutant(
        "a group keeps what it did not hand out", "leak", ALLOCATOR,
        "            group.give_back()\n", "            pass\n",
        "tests/slots/test_groups.py::test_B9_exception_inside[reference]",
    ),
    Mutant(
        "what was recorded comes after a claim in hand", "double owner", ALLOCATOR,
        "        self._submit_recorded()\n        self.free -= n\n", "        self.free -= n\n",
        "tests/engine/test_shared_pool.py::test_B1_a_claim_in_hand_can_use_what_a_recorded_release_frees[reference]",
    ),
]  # fmt: skip

GAP = "tests/engine/test_gap.py::test_"
FENCED = (
    "tests/slots/test_commands.py::test_G1_the_first_change_of_a_fenced_register_waits_and_all_behind_it[reference]"
)
GIVEN_UP = GAP + "G1_a_row_given_up_in_the_gap_keeps_its_slot_until_the_forward[reference-redirect-"
IN_ORDER = GAP + "G1_what_waits_is_sent_once_the_forward_is_in_order[reference-"
USED = GAP + "a_snapshot_published_in_the_gap_is_used_behind_the_forward[reference-"

# Between the plan of a step and its forward.
ORDERED = [
    Mutant(
        "recording sends what conflicts", "double owner", COMMANDS,
        "            self._queue.append(packet := Packet(self.registers))\n        if self._waits",
        "            self._send_up_to(0)\n            packet = self._last()\n        if self._waits",
        GIVEN_UP + "nothing]",
    ),
    Mutant(
        "nothing waits for a forward", "double owner", COMMANDS,
        "self._fenced[registers] = self.fencing = True", "self.fencing = True", GIVEN_UP + "submit]",
    ),
    Mutant(
        "what a forward reads may change owners", "stale byte", STEPPING,
        "sources[sources > 0].astype", "sources[:0].astype",
        GAP + "G1_a_cached_state_that_a_first_step_reads_is_dropped_behind_it[reference-redirect]",
    ),
    Mutant(
        "what a forward writes may change owners", "double owner", STEPPING,
        "        live = rows * PER_ROW\n        if sources", "        live = rows[:0]\n        if sources", GIVEN_UP + "submit]",
    ),
    Mutant(
        "the snapshot of a step may change owners before its forward", "stale byte", STEPPING,
        "            label = before if self._mirror.tracking.reads_old_slot else after\n",
        "            label = before - 1\n", USED + "ping-pong]",
    ),
    Mutant(
        "the state at a boundary may change owners before it is read", "stale byte", STEPPING,
        "            label = before if self._mirror.tracking.reads_old_slot else after\n",
        "            label = after\n", USED + "redirect]",
    ),
    Mutant(
        "a copy does not wait for what it reads", "stale byte", COMMANDS,
        " or (sources is not None and fenced[sources].any())", "",
        "tests/slots/test_commands.py::test_G1_every_change_of_a_fenced_register_waits[reference-copy from]",
    ),
    Mutant(
        "what is recorded behind a change that waits is sent", "double owner", COMMANDS,
        "        rest = len(self._queue) - at\n", "        rest = 0\n",
        GIVEN_UP + "submit]",
    ),
    Mutant(
        "all of a packet waits", "wrong count", COMMANDS, "first.split(operations)", "first.split(0)", FENCED,
    ),
    Mutant(
        "all of a packet is sent", "double owner", COMMANDS,
        "first.split(operations)", "first.split(len(first.operations))", FENCED,
    ),
    Mutant(
        "slots are read back before they may be used", "double owner", COMMANDS,
        "        if self._waits is None:\n            self.submit()\n            action.run()\n",
        "        if self.submit() is None:\n            action.run()\n",
        GAP + "B31_an_arrival_in_the_gap_waits_with_what_is_before_it[reference-nothing]",
    ),
    Mutant(
        "a plan does not say that the forward before it is in order", "leak", STEPPING,
        "        self._close(self.open)\n", "", IN_ORDER + "plan]",
    ),
    Mutant(
        "a settled step still keeps its slots", "leak", STEPPING,
        "        self._close(step, send=True)\n        table, same = self._table",
        "        self._uncopied = None\n        table, same = self._table", IN_ORDER + "settle]",
    ),
    Mutant(
        "what is asked for waits for another plan", "leak", STEPPING,
        "if send and self._commands.acts:", "if False:",
        GAP + "what_is_asked_for_comes_without_another_plan[reference-settle-overlap]",
    ),
    Mutant(
        "a reset forgets first what comes first", "leak", COMMANDS,
        "for entry in reversed(forgotten):", "for entry in forgotten:",
        GAP + "a_reset_forgets_what_waits_the_last_first",
    ),
    Mutant(
        "whoever takes a row of a step hands out what is the step's", "wrong count", STEPPING,
        "running = np.where(self._same_request(self.open), self.open.numbers, 0)", "running = self.open.numbers",
        GAP + "a_step_is_cancelled_beside_others_that_take_its_row[reference]",
    ),
    Mutant(
        "any step that is settled ends the wait", "double owner", STEPPING,
        "if step is None or step is not self.open:", "if step is None or self.open is None:",
        GAP + "G1_an_older_step_that_is_settled_says_nothing_of_the_newest[reference]",
    ),
    Mutant(
        "ids in hand hang on releases that wait", "wrong count", ALLOCATOR,
        "there = max(0, self.free - coming)", "there = self.free",
        GAP + "B1_ids_in_hand_do_not_hang_on_a_release_that_waits[reference]",
    ),
    Mutant(
        "a check forgets what waits", "wrong count", ALLOCATOR,
        " + released - claimed", "", GAP + "a_check_in_the_gap_keeps_the_count[reference]",
    ),
    Mutant(
        "an audit looks at what waits as if it were lost", "wrong count", "memstate/slots/inspect.py",
        "_behind(file, waiting) if waiting else file", "file", GIVEN_UP + "audit]",
    ),
    Mutant(
        "a step is cancelled although its state was published", "stale byte", STEPPING,
        "if self._promised and step is self.open:", "if False:",
        GAP + "a_step_is_not_cancelled_once_what_it_computes_was_published[reference]",
    ),
    Mutant(
        "a page is copied while changes wait", "stale byte", ADMISSION,
        "if partial and self._commands.waiting:", "if False:",
        GAP + "a_fork_that_copies_a_page_is_refused_while_changes_wait[reference]",
    ),
    Mutant(
        "slots that wait lose their bytes", "stale byte", "memstate/engine/manager.py",
        " + self._commands.withheld[0]", "",
        GAP + "states_sleep_with_their_bytes_while_a_slot_waits_for_a_forward[reference]",
    ),
    Mutant(
        "a reset forgets what waits without giving anything back", "leak", COMMANDS,
        "                entry.forget()\n", "                pass\n",
        "tests/slots/test_commands.py::test_what_is_discarded_gives_back_what_it_would_have_used[reference]",
    ),
]  # fmt: skip

RECORDED = [
    Mutant(
        "a register twice in one phase", "lost update", PACKET,
        "any(latest[r] >= phase or", "any(latest[r] > phase or",
        "tests/slots/test_commands.py::test_B36c_chains_of_moves[reference]",
    ),
    Mutant(
        "one of many registers twice in one phase", "lost update", PACKET,
        "(latest[registers] >= phase).any()", "(latest[registers] > phase).any()", MANY,
    ),
    Mutant(
        "a release of many overtakes the copy that reads them", "stale byte", PACKET,
        " or reads[registers].any())", ")", MANY,
    ),
    Mutant(
        "a release overtakes a move", "lost update", COMMANDS,
        "packet = self._packet_for(regs := np.concatenate([to, of]), MOVES)",
        "packet, regs = self._last(), np.concatenate([to, of])",
        "tests/slots/test_commands.py::test_B36c_chains_of_moves[reference]",
    ),
    Mutant(
        "a release overtakes the copy that reads the register", "stale byte", PACKET,
        "            self.reads[second[second != ZERO_SOURCE]] = True\n", "            pass\n",
        "tests/slots/test_commands.py::test_B36c_copy_from_a_node_evict_it_and_reuse_its_slot[reference]",
    ),
    Mutant(
        "the first value written to a cell wins", "lost update", PACKET,
        "values[::-1][newest]", "values[np.unique(cells, return_index=True)[1]]",
        "tests/slots/test_commands.py::test_B36c_the_last_value_written_to_a_cell_wins_also_within_one_call[reference]",
    ),
    Mutant(
        "host: a move without the label", "stale label", COMMANDS,
        "r.held[to], r.labels[to] = True, r.labels[of]", "r.held[to], r.labels[to] = True, 0",
        "tests/slots/test_commands.py::test_B36c_chains_of_moves[reference]",
    ),
    Mutant(
        "host: released slots count twice", "wrong count", COMMANDS,
        "self.registers.allocator.free += len(regs)", "self.registers.allocator.free += 2 * len(regs)",
        "tests/engine/test_shared_pool.py::test_B9_a_group_among_recorded_commands[reference]",
    ),
    Mutant(
        "host: a claim counts one too few", "wrong count", COMMANDS,
        "self.registers.allocator.free -= len(regs)", "self.registers.allocator.free -= len(regs) - 1",
        "tests/engine/test_shared_pool.py::test_B1_a_claim_in_hand_does_not_take_what_is_recorded_for_a_row[reference]",
    ),
    Mutant(
        "an upload buffer is reused in flight", "lost update", UPLOAD,
        "if event is not None and not event.query():", "if event is None:",
        "tests/slots/test_upload.py::test_no_packet_is_lost_on_a_stream_of_any_speed[0]",
    ),
    Mutant(
        "every packet goes through one buffer", "lost update", UPLOAD,
        "turn = self._turn = (self._turn + 1) % RING", "turn = self._turn = 0",
        "tests/slots/test_upload.py::test_a_full_ring_waits_for_its_oldest_copy_and_counts_it",
    ),
]  # fmt: skip

STEPPED = [
    Mutant(
        "a repeated batch is uploaded again", "wrong count", STEPS,
        "if len(last[0]) != len(rows) or not", "if True or not",
        "tests/engine/test_counts.py::test_a_decode_step_is_one_plan_and_at_most_one_settle[reference-NoTracking]",
    ),
    Mutant(
        "a cancelled batch counts as the last one", "stale byte", STEPS,
        "            self._serial -= 1\n            self._planned = None\n", "            self._serial -= 1\n",
        "tests/proof/test_mutant_gaps.py::test_a_batch_planned_after_a_cancel_is_its_own[reference]",
    ),
    Mutant(
        "a cancelled step keeps its record", "wrong count", STEPS,
        "            self._serial -= 1\n", "",
        "tests/requests/test_tracking_ends.py::test_B36b_a_cancel_leaves_the_step_before_it_settleable[reference]",
    ),
    Mutant(
        "a repeated batch goes ahead of what is recorded", "lost update", STEPPING,
        "columns = None if self._commands.pending else self._log",
        "columns = self._log",
        SCHEDULES.format("redirect-in turn"),
    ),
    Mutant(
        "a dead step raises the length of a finished row", "stale label", STEPPING,
        "dead = same & table.finished[step.numbers]", "dead = np.zeros_like(same)",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real"
        "[reference-late-6-redirect]",
    ),
    Mutant(
        "a row that ends is as long as its dead step", "stale label", STEPPING,
        "known = np.where(ended, after, known)",
        "known = self._file.labels[rows * PER_ROW]",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real[reference-at once-6-ping-pong]",
    ),
    Mutant(
        "plan believes steps that are not settled", "stale label", STEPPING,
        "known = running if not unsettled.any() else running[unsettled == 0]", "known = running",
        SCHEDULES.format("none-overlap"),
    ),
    Mutant(
        "host: settle for whoever has the row now", "stale label", STEPPING,
        "self._table.generation[step.numbers] == step.generation",
        "self._table.generation[step.numbers] >= 0",
        "tests/requests/test_tracking_ends.py::test_B36b_a_late_settle_changes_nothing_for_a_new_tenant[reference-redirect]",
    ),
    Mutant(
        "a cancelled step counts as run", "stale label", STEPPING,
        "np.minimum(self._table.confirmed[rows], step.before[entries])", "step.after[entries]",
        "tests/requests/test_tracking_ends.py::test_B36b_a_cancelled_step_leaves_no_label[reference-7-redirect-in turn]",
    ),
    Mutant(
        "in place: the copy before the forward is forgotten", "stale byte", STEPPING,
        "        if moved:\n", "        if moved < 0:\n",
        "tests/engine/test_in_place.py::test_a_hit_costs_one_copy_each[reference-True-redirect]",
    ),
    Mutant(
        "in place: the copy after the forward is forgotten", "lost snapshot", STEPPING,
        "self._uncopied = (step, taken)", "self._uncopied = None",
        "tests/engine/test_in_place.py::test_B36_a_snapshot_costs_one_copy[reference-in turn-ping-pong]",
    ),
    Mutant(
        "in place: the copy after the forward is made again", "wrong count", STEPPING,
        "(of, due), self._uncopied = self._uncopied, None", "of, due = self._uncopied",
        "tests/engine/test_in_place.py::test_B36_a_snapshot_costs_one_copy[reference-in turn-ping-pong]",
    ),
    Mutant(
        "in place: the snapshot is taken from another slot", "stale byte", STEPPING,
        "self._planes.copy(of.snapshot, of.write,", "self._planes.copy(of.snapshot, of.snapshot,",
        "tests/engine/test_in_place.py::test_B36_a_snapshot_costs_one_copy[reference-in turn-ping-pong]",
    ),
    Mutant(
        "in place: the snapshot is copied a step late", "stale byte", STEPPING,
        "        self._close(step, send=True)\n        table, same = self._table",
        "        table, same = self._table",
        "tests/engine/test_gap.py::test_a_snapshot_of_an_in_place_engine_is_copied_behind_the_forward[reference-lazy]",
    ),
]  # fmt: skip

KEPT = [
    Mutant(
        "handles never become stale", "double owner", HANDLES,
        "(generation.astype(np.int64) + 1) % 2**31", "generation.astype(np.int64) % 2**31",
        "tests/requests/test_requests.py::test_B19_a_row_reused_makes_old_handles_stale[reference]",
    ),
    Mutant(
        "a snapshot dropped while pinned goes at once", "stale byte", SNAPSHOTS,
        "if snapshot.register in self._pins:", "if snapshot.register in self._dropped:",
        "tests/requests/test_fork.py::test_the_shared_state_goes_with_its_last_reader[reference]",
    ),
    Mutant(
        "the first of two pins is the last", "stale byte", SNAPSHOTS,
        "self._pins[register] -= 1", "self._pins[register] = 0",
        "tests/requests/test_fork.py::test_the_shared_state_goes_with_its_last_reader[reference]",
    ),
    Mutant(
        "no pin for a hit that is read directly", "stale byte", ADMISSION,
        "                self._snapshots.read_first(row, register)\n", "                pass\n",
        "tests/requests/test_fork.py::test_the_shared_state_goes_with_its_last_reader[reference]",
    ),
    Mutant(
        "pins outlive the first step", "leak", STEPPING,
        "            self._snapshots.first_steps_done(batch.numbers)\n", "",
        "tests/requests/test_fork.py::test_the_shared_state_goes_with_its_last_reader[reference]",
    ),
    Mutant(
        "pins outlive their row", "leak", ENDINGS,
        "        self._snapshots.first_steps_done(rows)\n", "",
        "tests/requests/test_fork.py::test_the_shared_state_goes_with_its_last_reader[reference]",
    ),
    Mutant(
        "lanes outlive their row", "leak", ENDINGS,
        "(rows[:, None] * PER_ROW + np.arange(PER_ROW)).reshape(-1)", "rows * PER_ROW",
        "tests/requests/test_tracking_ends.py::test_B29_a_request_can_end_at_any_point[reference-abort-in turn-ping-pong]",
    ),
    Mutant(
        "the shortfall forgets the reserve", "wrong count", STEPPING,
        "max(0, wanted + allocator.reserve - allocator.free)", "max(0, wanted - allocator.free)",
        "tests/proof/test_mutant_gaps.py::test_the_shortfall_counts_the_reserve[reference]",
    ),
    Mutant(
        "a snapshot of a page that is not full", "double owner", SNAPSHOTS,
        "self._mirror.answer(row, self._pages.floor(known), ended)", "self._mirror.answer(row, known, ended)",
        "tests/requests/test_tracking_ends.py::test_B28_nothing_shorter_than_a_page_is_published[reference-none]",
    ),
    Mutant(
        "pages of a dropped snapshot are nobody's", "leak", SNAPSHOTS,
        "            self._pages.allocator.release(snap.pages)\n", "            pass\n",
        "tests/requests/test_pages.py::test_a_snapshot_keeps_the_pages_of_its_tokens[reference]",
    ),
    Mutant(
        "a fork shares the page that is filled in part", "double owner", ADMISSION,
        "kept = self._pages.count(self._pages.floor(length))", "kept = self._pages.count(length)",
        "tests/requests/test_fork.py::test_full_pages_are_shared_and_the_rest_is_named[reference-none]",
    ),
    Mutant(
        "a fork does not tell the device where its row reads", "stale label", ADMISSION,
        '        self._commands.write(self._file.address("source", np.array([row])), [snapshot.register])\n', "",
        "tests/requests/test_fork.py::test_continuations_go_their_own_ways[reference-3-redirect]",
    ),
    Mutant(
        "a state arrives without its label", "stale label", ADMISSION,
        "self._commands.label(live, tokens)", "self._file.labels[live] = tokens",
        "tests/requests/test_arrivals.py::test_redirect_keeps_what_arrived_at_a_boundary[reference]",
    ),
    Mutant(
        "a release overtakes the label that arrived", "stale label", COMMANDS,
        "self._packet_for(regs, DATA).add(WRITES, cells, content, regs)",
        "self._last().add(WRITES, cells, content, None)",
        "tests/requests/test_arrivals.py::test_B36c_an_arrival_given_up_at_once_leaves_no_label[reference]",
    ),
    Mutant(
        "fresh states are not zeroed", "stale byte", ADMISSION,
        "        self._commands.zero(live[~hit & (length == 0)])\n", "",
        "tests/requests/test_tracking.py::test_B20_a_fresh_state_is_zero_and_a_resumed_one_is_not_zeroed[reference-copied-none]",
    ),
    Mutant(
        "a row in use again is finished already", "lost update", REQUESTS,
        "        self.finished[rows] = False\n", "",
        "tests/requests/test_tracking_ends.py::test_B36b_a_late_settle_changes_nothing_for_a_new_tenant[reference-none]",
    ),
    Mutant(
        "pages outlive their row", "leak", PAGE_TABLE,
        "            self.allocator.release(self._rows[row])\n", "",
        "tests/requests/test_pages.py::test_the_pages_of_a_row_reused_are_its_own[reference]",
    ),
    Mutant(
        "a shared page is free with its first holder", "double owner", PAGES,
        "            if not holders[page]:\n", "            if holders[page] >= 0:\n",
        "tests/requests/test_pages.py::test_a_shared_page_is_free_with_its_last_holder",
    ),
    Mutant(
        "the page table keeps the pages of who left", "stale byte", PAGE_TABLE,
        "        self._write([(row, 0, [0] * len(self._rows[row])) for row in rows.tolist()])\n", "",
        "tests/requests/test_pages.py::test_pages_follow_the_model_under_random_use[reference]",
    ),
]  # fmt: skip

MIRRORED = [
    Mutant(
        "host: snapshots take from the reserve", "wrong count", MIRROR,
        "min(allocator.free - allocator.reserve, limit)", "min(allocator.free, limit)",
        "tests/engine/test_shared_pool.py::test_B5_the_reserve_counts_real_slots[reference]",
    ),
    Mutant(
        "host: a snapshot's slot counts as free", "wrong count", MIRROR,
        "            allocator.free -= 1\n", "", SCHEDULES.format("redirect-in turn"),
    ),
    Mutant(
        "host: refused snapshots are not counted", "wrong count", MIRROR,
        "                self.degraded += 1\n", "", SCHEDULES.format("redirect-in turn"),
    ),
    Mutant(
        "an answer beyond what is real", "stale label", MIRROR,
        "1 <= self.file.labels[r] <= known", "1 <= self.file.labels[r]",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real[reference-at once-6-ping-pong]",
    ),
    Mutant(
        "the oldest answer instead of the newest", "lost snapshot", MIRROR,
        "return max(valid,", "return min(valid,",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real"
        "[reference-at once-7-ping-pong]",
    ),
    Mutant(
        "a chunk may cross a boundary", "lost snapshot", MIRROR,
        "crossed = length % every + (after - length) > every",
        "crossed = length < 0",
        "tests/requests/test_accepted.py::test_B33_accepted_tokens_are_not_folded_across_a_multiple_unseen"
        "[reference-PingPong(every=256, lane_count=None)]",
    ),
    Mutant(
        "host: the lane is the first one", "lost snapshot", PING_PONG,
        "lane = min(held, key=lambda lane: int(file.labels[lane]))", "lane = held[0]",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real[reference-at once-6-ping-pong]",
    ),
    Mutant(
        "host: lanes let go of are not counted", "wrong count", PING_PONG,
        "        return len(old)\n", "        return 0\n",
        "tests/requests/test_lazy.py::test_B23_lazy_holds_two_lanes_from_a_boundary_to_the_settle_after_it[reference-in turn]",
    ),
    Mutant(
        "host: settle trusts labels above K", "lost snapshot", PING_PONG,
        "for lane in lanes if file.labels[lane] <= known)", "for lane in lanes)",
        "tests/requests/test_tracking_ends.py::test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real[reference-at once-6-lazy]",
    ),
    Mutant(
        "host: redirect forgets which boundary it tracked", "stale label", REDIRECT,
        "        file.tracked[row] = length\n", "", SCHEDULES.format("redirect-in turn"),
    ),
    Mutant(
        "redirect snapshots what it was given", "wrong count", REDIRECT,
        "return bool(length > file.tracked[row] and not file.source[row])", "return bool(length > 0)",
        "tests/requests/test_redirect.py::test_B36a_redirect_takes_no_snapshot_of_what_it_was_given[reference-copied-in turn]",
    ),
]  # fmt: skip

MUTANTS = [*FREE, *ORDERED, *RECORDED, *STEPPED, *KEPT, *MIRRORED]
