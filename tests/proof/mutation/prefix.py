"""Mutants of the prefix cache and of sessions: what is found again, who keeps it, and who gives way to whom."""

from tests.proof.mutation.mutant import Mutant

TREE, CACHE, RANKING = (f"memstate/prefix/{name}.py" for name in ("tree", "cache", "ranking"))
LRU, GREEDY_DUAL, RETURN_RATE = (
    f"memstate/prefix/policies/{name}.py" for name in ("lru", "greedy_dual", "return_rate")
)
TOKENS, ADMISSION, ENDINGS = "memstate/tokens.py", "memstate/engine/admission.py", "memstate/engine/ending.py"
SESSIONS, STEPPING, ENGINE = "memstate/prefix/sessions.py", "memstate/engine/stepping.py", "memstate/engine/manager.py"
COMMANDS = "memstate/slots/commands.py"

DICTIONARY = "tests/prefix/test_prefix_tree.py::test_the_tree_is_a_dictionary_of_prefixes"
SORTED = "tests/prefix/test_prefix_ranking.py::test_the_ranking_is_a_sorted_dictionary"
BROKEN = "tests/proof/test_stateful.py::test_a_broken_library_is_found_out[{}]"

FOUND = [
    Mutant(
        "a split gives the state to both parts", "stale label", TREE,
        "        upper.carriers = int(not node.ghost)\n",
        "        upper.carriers, upper.snapshot = int(not node.ghost), node.snapshot\n",
        "tests/prefix/test_prefix_tree.py::test_B43_the_upper_part_of_a_split_node_has_no_state_and_the_lower_one_keeps_it",
    ),
    Mutant(
        "the upper part of a split has no leases", "double owner", TREE,
        "upper.leases, upper.ghost, upper.touched = node.leases, ", "upper.leases, upper.ghost, upper.touched = 0, ",
        DICTIONARY,
    ),
    Mutant(
        "what leads to a leased node is not leased", "double owner", TREE,
        "            step.leases += 1\n", "            step.leases += step is node\n", DICTIONARY,
    ),
    Mutant(
        "a state is found where a prompt ends inside of its node", "stale byte", TREE,
        "            if inside < len(child.key):\n                break\n            if child.snapshot:",
        "            if child.snapshot:", "tests/prefix/test_prefix_cache.py::test_B43_a_state_is_never_split[reference]",
    ),
    Mutant(
        "a tombstone is missed though a state is below it", "wrong count", TREE,
        "stated, gone = child, None", "stated = child",
        "tests/prefix/test_prefix_cache.py::test_B45_an_inner_node_without_its_state_keeps_its_kv[reference]",
    ),
    Mutant(
        "what is only remembered counts as KV", "wrong count", TREE,
        "            if not child.ghost:\n                reach", "            if child:\n                reach",
        DICTIONARY,
    ),
    Mutant(
        "pages of a node that is filled again are nobody's", "leak", TREE,
        "node.ghost, node.pages = False, pages", "node.ghost = False", DICTIONARY,
    ),
    Mutant(
        "a prompt that grows takes no lease on what is new", "wrong count", TREE,
        "self.leased_pages += size if leaf.leases else 0", "self.leased_pages += 0",
        "tests/prefix/test_prefix_tree.py::test_a_prompt_computed_bit_by_bit_is_one_node",
    ),
    Mutant(
        "a hit covers the last token of a prompt", "stale label", ADMISSION,
        "self._cache.match(key, request.salt, known - 1)", "self._cache.match(key, request.salt, known)",
        "tests/prefix/test_prefix_cache.py::test_B44_a_tombstone_is_revived[reference-redirect]",
    ),
    Mutant(
        "salts are ignored", "stale byte", CACHE,
        "found = self.tree.find(key[: most * BYTES // self._unit * self._unit], salt)",
        "found = self.tree.find(key[: most * BYTES // self._unit * self._unit], next(iter(self.tree.roots), salt))",
        "tests/prefix/test_prefix_cache.py::test_B53_equal_tokens_under_different_salts_never_match[reference-none]",
    ),
    Mutant(
        "a token is as long as the array says", "stale byte", TOKENS,
        "given.astype(np.int64, copy=False).tobytes()", "given.tobytes()",
        "tests/test_tokens.py::test_the_form_of_tokens_does_not_matter[int32]",
    ),
]  # fmt: skip

HELD = [
    Mutant(
        "a second state of the same tokens is kept too", "leak", CACHE,
        "there = found.stated if found.stated and above * self._unit == len(head) else None", "there = None",
        "tests/prefix/test_prefix_cache.py::test_B42_of_the_same_key_inserted_twice_one_state_stays"
        "[reference-in one call-none]",
    ),
    Mutant(
        "KV pages of the tree are the row's alone", "double owner", CACHE,
        "            self._pages.allocator.share(insertion.pages[had : len(key) // self._unit])\n", "",
        "tests/prefix/test_prefix_cache.py::test_B43_a_state_is_never_split[reference]",
    ),
    Mutant(
        "KV pages that were there are shared once more", "leak", CACHE,
        "self._pages.allocator.share(insertion.pages[had :", "self._pages.allocator.share(insertion.pages[:",
        "tests/prefix/test_prefix_cache.py::test_B43_a_state_is_never_split[reference]",
    ),
    Mutant(
        "pages of an evicted leaf are nobody's", "leak", CACHE,
        "        self._pages.allocator.release(gone)\n", "",
        "tests/prefix/test_prefix_cache.py::test_B45_a_leaf_that_loses_its_kv_loses_its_state[reference]",
    ),
    Mutant(
        "the state of an evicted leaf is nobody's", "leak", CACHE,
        "            self._snapshots.drop([leaf.snapshot])\n", "",
        "tests/prefix/test_prefix_cache.py::test_B45_a_leaf_that_loses_its_kv_loses_its_state[reference]",
    ),
    Mutant(
        "a row that ends keeps its lease", "leak", CACHE,
        "            if lease := self.leases.pop(row, None):\n                self.release(lease)\n",
        "            self.leases.pop(row, None)\n",
        "tests/prefix/test_prefix_cow.py::test_B50_a_row_given_up_before_its_first_step_lets_go[reference]",
    ),
    Mutant(
        "a refused request keeps its lease", "leak", ADMISSION,
        "            self._cache.release(start.lease)\n", "",
        "tests/prefix/test_prefix_cow.py::test_B50_a_refusal_gives_pin_and_lease_and_slot_back"
        "[reference-slots-redirect, read]",
    ),
    Mutant(
        "the pin of an admission is not ended", "leak", ADMISSION,
        "            self._cache.unpin(start.lease)\n            self._cache.use(", "            self._cache.use(",
        "tests/prefix/test_prefix_cow.py::test_B46_a_pinned_state_is_never_evicted_and_pins_balance[reference-copied]",
    ),
    Mutant(
        "a state that was taken over is still in the tree", "double owner", CACHE,
        "if snapshot := self._detach(lease.match.found.stated):", "if snapshot := lease.match.snapshot:",
        "tests/prefix/test_prefix_room.py::test_a_hit_keeps_no_request_out_that_would_fit_without_it[reference-none]",
    ),
    Mutant(
        "a state goes under more tokens than it stands for", "stale label", ENDINGS,
        "        known = np.minimum(known, [len(key) // BYTES for key in keys])\n", "",
        "tests/prefix/test_prefix_room.py::test_without_pages_a_shorter_key_leaves_no_bare_leaf[reference]",
    ),
    Mutant(
        "a row's state goes under tokens that are not its own", "stale label", ENDINGS,
        "if lease and not (key.startswith(lease.key) or lease.key.startswith(key)):",
        "if lease and not key and lease.key == key:",
        "tests/prefix/test_prefix_gaps.py::test_tokens_that_are_not_the_rows_are_refused[reference-publish]",
    ),
]  # fmt: skip

ROOM = [
    Mutant(
        "a state about to be read is evicted", "stale byte", CACHE,
        "if node.snapshot and node.snapshot.register not in self._snapshots.pinned:", "if node.snapshot:",
        "tests/prefix/test_prefix_cow.py::test_B50_the_source_of_a_hit_is_not_evicted_for_it[reference-none]",
    ),
    Mutant(
        "states about to be read count as room", "wrong count", CACHE,
        "len(self.nodes) - sum(register in self.nodes for register in self._snapshots.pinned)", "len(self.nodes)",
        "tests/prefix/test_prefix_cow.py::test_B46_a_pinned_state_is_never_evicted_and_pins_balance[reference-read]",
    ),
    Mutant(
        "pages that others hold count as room", "wrong count", CACHE,
        "return sum(holders[page] == 1 for page in node.pages)", "return sum(holders[page] > 0 for page in node.pages)",
        "tests/prefix/test_prefix_gaps.py::test_one_page_that_a_handle_has_too_is_no_room[reference]",
    ),
    Mutant(
        "one page less is enough", "wrong count", CACHE,
        "                if left <= 0:\n", "                if left <= 1:\n",
        "tests/prefix/test_prefix_gaps.py::test_one_page_that_a_handle_has_too_is_no_room[reference]",
    ),
    Mutant(
        "a use counts for all that leads to it", "lost snapshot", LRU,
        "        self._order.place(node, self._clock)\n",
        "        self._order.place(node, self._clock)\n"
        "        for step in node.path():\n            _ = step.snapshot and self._order.place(step, self._clock)\n",
        "tests/prefix/test_prefix_cache.py::test_B48_a_hit_refreshes_only_the_state_it_uses[reference]",
    ),
    Mutant(
        "what is superseded goes last", "lost snapshot", LRU,
        "self._order.place(node, 0)", "self.used(node)",
        "tests/slots/test_audit_owners.py::test_B74_a_newer_turn_supersedes_the_conversations_older_snapshots"
        "[reference-redirect]",
    ),
    Mutant(
        "a look at the ranking forgets what it saw", "leak", RANKING,
        "                    heapq.heappush(self._heap, entry)\n", "                    pass\n", SORTED,
    ),
    Mutant(
        "old ranks count", "lost snapshot", RANKING,
        "                if self._entries.get(entry[2]) is entry:\n                    passed.append(entry)",
        "                if entry[2] in self._entries:\n                    passed.append(entry)", SORTED,
    ),
    Mutant(
        "the clock of GreedyDual stands still", "lost snapshot", GREEDY_DUAL,
        "            self._clock = self._order.rank(node)\n", "            pass\n",
        "tests/prefix/test_policies.py::test_greedy_dual_by_hand",
    ),
    Mutant(
        "the rate of return is never learned", "lost snapshot", RETURN_RATE,
        "            self.rates.update()\n", "            pass\n",
        "tests/prefix/test_prefix_gaps.py::test_return_rates_are_learned_by_kind",
    ),
    Mutant(
        "a state is not worth more where one below it is gone", "lost snapshot", RETURN_RATE,
        "            heir.worth += candidate.worth\n", "",
        "tests/prefix/test_prefix_gaps.py::test_a_state_inherits_the_requests_of_those_given_up_below_it",
    ),
]  # fmt: skip

ASKED = [
    Mutant(
        "no snapshot where prompts part", "lost snapshot", CACHE,
        'match.kv_length: "branch", ', "",
        "tests/prefix/test_prefix_wants.py::test_B49_junction_and_prompt_end_are_both_taken[reference-ping-pong-in turn]",
    ),
    Mutant(
        "no snapshot at the end of a prompt", "lost snapshot", CACHE,
        ', tokens // size * size: "prompt"}', "}",
        "tests/prefix/test_prefix_wants.py::test_B49_junction_and_prompt_end_are_both_taken[reference-redirect-in turn]",
    ),
    Mutant(
        "the second snapshot that is wanted never comes up", "lost snapshot", STEPPING,
        "        self._boundaries.advance(running, length)\n", "",
        "tests/prefix/test_prefix_wants.py::test_B49_a_want_of_the_request_is_one_more[reference]",
    ),
    Mutant(
        "a chunk may cross the next snapshot but one", "lost snapshot", STEPPING,
        "                self._boundaries.require_within(rows, length, after)\n", "                pass\n",
        "tests/prefix/test_prefix_wants.py::test_B49_a_chunk_beyond_what_is_wanted_is_refused[reference-ping-pong]",
    ),
]  # fmt: skip

TURNS = [
    Mutant(
        "two turns of a session at once", "double owner", SESSIONS,
        "        if found.row:\n", "        if found.row < 0:\n",
        "tests/prefix/test_sessions.py::test_B73_two_turns_at_once_are_refused[reference-alone-in turn]",
    ),
    Mutant(
        "two turns of a session in one call", "double owner", ADMISSION,
        "if len(set(running)) != len(running):", "if len(set(running)) > len(running):",
        "tests/prefix/test_sessions.py::test_B73_two_turns_at_once_are_refused[reference-alone-in turn]",
    ),
    Mutant(
        "a turn goes on from all that its session had", "stale label", SESSIONS,
        "min(common(session.tokens, key, BYTES), len(key) - BYTES)", "min(len(session.tokens), len(key) - BYTES)",
        "tests/prefix/test_sessions.py::test_B73_an_edited_history_goes_on_from_an_older_state[reference-after 8-none]",
    ),
    Mutant(
        "a session keeps a state of a dead step", "stale label", SESSIONS,
        "1 <= labels[r] <= known]", "1 <= labels[r]]",
        "tests/prefix/test_sessions.py::test_B69_a_dead_step_in_flight_leaves_the_newest_answer[reference-alone-ping-pong]",
    ),
    Mutant(
        "an aborted turn is kept up to its end", "stale label", SESSIONS,
        "known = min(known, session.start if key is None else len(key) // BYTES)",
        "known = known if key is None else min(known, len(key) // BYTES)",
        "tests/prefix/test_session_aborts.py::test_B71_an_aborted_turn_goes_back_to_where_it_began"
        "[reference-in turn-redirect]",
    ),
    Mutant(
        "a turn writes a page that somebody else has", "double owner", SESSIONS,
        "        registers = [r for r in registers if self._pages.own_partial(row, int(labels[r]))]\n", "",
        "tests/prefix/test_session_pages.py::test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in"
        "[reference-redirect]",
    ),
    Mutant(
        "an edited history keeps its old states", "leak", SESSIONS,
        "        self._commands.release([snap.register for snap in session.kept if snap.register not in "
        "resumption.registers])\n", "",
        "tests/prefix/test_sessions.py::test_B73_an_edited_history_goes_on_from_an_older_state[reference-after 8-ping-pong]",
    ),
    Mutant(
        "a session keeps the pages that its turn began with", "leak", SESSIONS,
        "        self._pages.allocator.release(session.pages)\n        session.kept",
        "        session.kept",
        "tests/prefix/test_session_pages.py::test_B74_pages_of_an_idle_session_stay_and_go_with_it[reference-redirect]",
    ),
    Mutant(
        "row and session end one lease", "double owner", ENDINGS,
        "            del self._cache.leases[row]\n", "            pass\n",
        "tests/prefix/test_session_pages.py::test_B74_pages_of_an_idle_session_stay_and_go_with_it[reference-redirect]",
    ),
    Mutant(
        "a closed session keeps its lease", "leak", ENGINE,
        "            self._cache.release(lease)\n", "            pass\n",
        "tests/prefix/test_session_pages.py::test_B74_pages_of_an_idle_session_stay_and_go_with_it[reference-redirect]",
    ),
    Mutant(
        "the ledger misses releases", "lost update", COMMANDS,
        '        self._note("release", regs)\n', "",
        "tests/prefix/test_prefix_gaps.py::test_the_journal_names_every_change_of_owners[reference]",
    ),
    Mutant(
        "a leaf that is offered twice is room twice", "wrong count", "memstate/prefix/cache.py",
        "if not (node.leases or node in seen):", "if not node.leases:",
        "tests/prefix/test_session_refusals.py::test_B17_a_leaf_that_a_policy_offers_twice_is_room_once",
    ),
    Mutant(
        "pages of two salts are nobody's to give up", "wrong count", "memstate/prefix/cache.py",
        "holders[page] == times", "holders[page] == 1",
        "tests/prefix/test_session_refusals.py::test_leaves_whose_pages_others_have_too_hide_no_room_behind_them",
    ),
    Mutant(
        "leaves that a policy hides stay", "wrong count", "memstate/prefix/cache.py",
        "self._give_up_leaves(reversed(rest), goal)", "self._give_up_leaves(rest[:0], goal)",
        "tests/prefix/test_session_refusals.py::test_leaves_that_a_policy_does_not_offer_are_room",
    ),
]  # fmt: skip

MUTANTS = [*FOUND, *HELD, *ROOM, *ASKED, *TURNS]
