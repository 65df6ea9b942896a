"""Mutants of prefetch: what is truncated, what ranks agree on, and what is given back when it comes to nothing; and of
files: what is foreign, and what a clean-up may delete.
"""

from tests.proof.mutation.mutant import Mutant

PREFETCH, FETCH, OFFERS, CLAIM, ROUNDS, READING, BACKGROUND, HOST_CACHE, HOST_POOL = (
    f"memstate/tiers/{name}.py"
    for name in (
        "prefetch/prefetcher",
        "prefetch/fetch",
        "prefetch/candidates",
        "prefetch/reservation",
        "prefetch/votes",
        "prefetch/reading",
        "prefetch/background",
        "host/cache",
        "host/pool",
    )
)
ONE, STOPS, RANKS = (f"tests/tiers/test_prefetch{name}.py::test_" for name in ("", "_stops", "_ranks"))
OPENING, FOLDER, FILE, BASE = (f"memstate/tiers/stores/{name}.py" for name in ("opening", "folder", "file", "base"))
FOREIGN, CLEANING = (f"tests/tiers/test_file_{name}.py::test_" for name in ("foreign", "cleaning"))
TRUNCATED = f"{ONE}B55_a_hit_is_truncated_to_the_pages_that_host_memory_has[500-0-496]"
AGREED = f"{RANKS}B63_ranks_agree_on_a_length_that_all_of_them_have[states0-512]"

TRUNCATION = [
    Mutant(
        "the last page that there is room for is not taken", "wrong count", FETCH,
        "(np.cumsum(~self.here) <= room)", "(np.cumsum(~self.here) < room)", TRUNCATED,
    ),
    Mutant(
        "pages that are here already take room", "wrong count", FETCH,
        "(np.cumsum(~self.here) <= room)", "(np.arange(self.ends.size) < room)",
        f"{ONE}B64_a_state_comes_back_to_kv_that_is_on_the_device",
    ),
    Mutant(
        "a truncated prefetch is still after all of its tokens", "wrong count", PREFETCH,
        "        fetch.narrow(end, self._page_size)\n", "", TRUNCATED,
    ),
    Mutant(
        "a truncated hit is not counted", "wrong count", PREFETCH,
        'self._count["truncated"] += end < most', 'self._count["truncated"] += end > most', TRUNCATED,
    ),
    Mutant(
        "truncation takes the reserve too", "wrong count", OFFERS,
        "hits.cut(kv.room() if", "hits.cut(kv.pool.free + kv.evictable if",
        f"{ONE}B68_truncation_leaves_the_reserve[62-10-832]",
    ),
    Mutant(
        "where records are being copied the reserve is taken", "wrong count", OFFERS,
        "max(0, kv.pool.free - kv.reserve)", "max(0, kv.pool.free)",
        f"{ONE}B68_the_reserve_holds_where_records_are_being_copied",
    ),
    Mutant(
        "a prefetch evicts what it relies on", "lost snapshot", OFFERS,
        "        reservation.pin(range(fetch.kv_pages, most), stated[stated <= most].tolist())\n", "",
        f"{ONE}B57_what_a_prefetch_relies_on_is_not_evicted_for_it",
    ),
    Mutant(
        "eviction asks for all that is needed", "wrong count", HOST_CACHE,
        "        self.evict(n - self.pool.free)\n", "        self.evict(n)\n",
        f"{ONE}B57_eviction_asks_for_the_shortfall_only[40-40-22]",
    ),
    Mutant(
        "a state gives way to one that is there already", "lost snapshot", OFFERS,
        "if self._reads_state(hits, ends) and not reservation", "if not reservation",
        f"{ONE}B64_kv_comes_back_to_a_state_that_is_in_host_memory",
    ),
    Mutant(
        "a truncated prefetch attaches the state that it was after", "stale label", CLAIM,
        "self._keys[end - 1], self.state, end * page_size", "self._keys[-1], self.state, len(self._keys) * page_size",
        f"{ONE}B62_a_state_stands_for_the_length_that_it_is_filed_under",
    ),
]  # fmt: skip

AGREEMENT = [
    Mutant(
        "ranks agree on the shortest of their longest hits", "stale label", FETCH,
        "self.phase, self.vote = Phase.PROPOSED, ends",
        "self.phase, self.vote = Phase.PROPOSED, np.arange(ends.size) < deepest(ends)", AGREED,
    ),
    Mutant(
        "a rank goes for its whole prompt", "stale label", PREFETCH,
        "if end := deepest(ends):\n                    self", "if end := fetch.end:\n                    self",
        AGREED,
    ),
    Mutant(
        "a rank that cannot leaves before the others know", "wrong count", PREFETCH,
        "        fetch.propose(ends)\n", "        fetch.propose(ends) if end else self._end(fetch, End.NO_ROOM)\n",
        f"{RANKS}B63_a_rank_without_memory_leaves_when_all_have_agreed",
    ),
    Mutant(
        "a rank that does not know yet counts as one that has nothing", "lost snapshot", ROUNDS,
        "if words[0] else None", "if words.size else None", f"{RANKS}B63_a_slow_rank_is_waited_for",
    ),
    Mutant(
        "what is filed is not agreed on", "wrong count", PREFETCH,
        "self._commit(fetch, deepest(ends))", "self._commit(fetch, deepest(fetch.usable()))",
        f"{RANKS}B61_what_arrived_on_one_rank_alone_goes_back",
    ),
    Mutant(
        "the wish of another rank to stop is not heard", "lost update", ROUNDS,
        "stop=not words[1]", "stop=fetch.stop", f"{RANKS}B61_one_rank_that_wants_an_end_is_enough[3]",
    ),
    Mutant(
        "ranks that do not do the same are not told", "lost update", ROUNDS,
        "if words[0] != self._check or words[1] != ~self._check:", "if words[0] == words[1]:",
        f"{RANKS}ranks_that_do_not_do_the_same_are_told[<lambda>1]",
    ),
    Mutant(
        "only the deepest state has a record", "stale label", OFFERS,
        "[end - 1 if self._ranks == 1 else 0 :]", "[end - 1 :]",
        f"{RANKS}B64_a_state_that_one_rank_has_in_host_memory_settles_nothing_for_the_others",
    ),
    Mutant(
        "prefetches that do not fit wait for ever", "lost update", ROUNDS,
        "sorted(fetches, key=lambda fetch: fetch.asked_in)", "list(fetches)",
        f"{RANKS}many_prefetches_take_turns_in_exchanges_of_one_size",
    ),
]  # fmt: skip

REVOKED = [
    Mutant(
        "fewer hits than the threshold are good enough", "wrong count", OFFERS,
        "able & (pages + 1 >= self._first(fetch, self._threshold))", "able",
        f"{ONE}B60_pages_alone_are_revoked_too[15-0-0]",
    ),
    Mutant(
        "a state is found beyond a gap of KV", "stale label", OFFERS,
        "np.logical_and.accumulate(reached)", "reached",
        f"{ONE}what_host_memory_has_no_longer_ends_the_reach",
    ),
    Mutant(
        "a prefetch that ends keeps what it holds", "leak", PREFETCH,
        "        self._background.drop(fetch)\n        fetch.reservation.release()\n",
        "        self._background.drop(fetch)\n", f"{STOPS}B65_an_abort_at_any_moment_returns_everything[9-1-4]",
    ),
    Mutant(
        "the limit is noticed when it has been passed", "wrong count", PREFETCH,
        "self.in_flight_tokens + fetch.missing > limit", "self.in_flight_tokens > limit",
        f"{ONE}B58_over_the_limit_nothing_is_allocated",
    ),
    Mutant(
        "entries that a prefetch relied on stay pinned", "leak", CLAIM,
        "                    cache.unpin(pinned.pop(number))\n", "                    pinned.pop(number)\n",
        f"{ONE}a_gap_ends_what_storage_is_asked_for",
    ),
    Mutant(
        "the record for a state that did not come is not given back", "leak", CLAIM,
        "            self._states.pool.release([self.state])\n", "",
        f"{STOPS}B62_a_state_that_does_not_come_is_not_attached[vanished]",
    ),
    Mutant(
        "a record is free while a thread writes to it", "double owner", HOST_POOL,
        "            if self._users[record]:\n", "            if self._users[record] < 0:\n",
        f"{STOPS}B65_records_that_a_thread_still_writes_to_are_nobody_elses",
    ),
    Mutant(
        "a record that another prefetch filed first is given to both", "double owner", HOST_CACHE,
        "            self.pool.release([record])\n            self._entries.move_to_end(key)\n",
        "            self._entries.move_to_end(key)\n", f"{ONE}two_prefetches_of_one_prefix_keep_it_once",
    ),
    Mutant(
        "a state is attached to KV that came in part", "stale label", FETCH,
        "        if run == self.end:\n", "        if run:\n",
        f"{STOPS}B61_best_effort_takes_what_has_arrived[4-4-expected13]",
    ),
    Mutant(
        "pages behind a gap count", "stale byte", FETCH,
        "self._arrived[pages[:arrived]] = True", "self._arrived[pages] = True",
        f"{STOPS}B61_a_page_that_does_not_come_ends_what_is_usable[None-7-vanished]",
    ),
    Mutant(
        "a record is taken for what its name says", "stale byte", READING,
        "form.flaw(buffers[arrived], piece.key, piece.length)", '""',
        f"{STOPS}B62_a_state_of_another_length_is_foreign",
    ),
    Mutant(
        "a chunk that had not begun is read for nobody", "lost update", BACKGROUND,
        "        fetch.over.set()\n        for op in list(fetch.ops):\n            op.future.cancel()\n",
        "        pass\n", f"{STOPS}B61_best_effort_takes_what_has_arrived[None-4-expected4]",
    ),
]  # fmt: skip

FOREIGNERS = [
    Mutant(
        "a link to a folder is cleaned up", "double owner", OPENING,
        '("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")',
        '("O_NONBLOCK", "O_CLOEXEC")',
        f"{FOREIGN}a_link_to_a_folder_is_not_cleaned[folder]",
    ),
    Mutant(
        "the folder may become a link", "stale byte", OPENING,
        "os.O_RDONLY | FLAGS | getattr(",
        "os.O_RDONLY | FLAGS & ~os.O_NOFOLLOW | getattr(",
        f"{FOREIGN}a_folder_that_becomes_a_link[folder]",
    ),
    Mutant(
        "a record that is a link is followed", "stale byte", OPENING,
        "READ = os.O_RDONLY | FLAGS",
        "READ = os.O_RDONLY | FLAGS & ~os.O_NOFOLLOW",
        f"{FOREIGN}a_record_that_is_a_link[file]",
    ),
    Mutant(
        "a link counts as a record that is there", "stale byte", FILE,
        "follow_symlinks=False)\n        except FileNotFoundError:\n            return False",
        "follow_symlinks=True)\n        except FileNotFoundError:\n            return False",
        f"{FOREIGN}a_record_that_is_a_link[file]",
    ),
    Mutant(
        "a temporary file that is there is written to", "double owner", OPENING,
        "os.O_CREAT | os.O_EXCL | FLAGS",
        "os.O_CREAT | FLAGS",
        f"{FOREIGN}a_temporary_file_that_is_a_link[file]",
    ),
    Mutant(
        "nobody asks who owns a folder", "double owner", OPENING,
        "if not shared and found.st_uid != os.geteuid():",
        "if False:",
        f"{FOREIGN}a_folder_of_another_user_is_refused",
    ),
    Mutant(
        "a folder that a group may write to is taken", "double owner", OPENING,
        "stat.S_IWGRP | stat.S_IWOTH",
        "stat.S_IWOTH",
        f"{FOREIGN}a_folder_that_others_may_write_to_is_refused[0o720]",
    ),
    Mutant(
        "a folder that all may write to is taken", "double owner", OPENING,
        "stat.S_IWGRP | stat.S_IWOTH",
        "stat.S_IWGRP",
        f"{FOREIGN}a_folder_that_others_may_write_to_is_refused[0o702]",
    ),
    Mutant(
        "a shard is not looked at", "double owner", OPENING,
        "if flaw(os.fstat(descriptor), shared):",
        "if at is None and flaw(os.fstat(descriptor), shared):",
        f"{FOREIGN}a_folder_that_others_may_write_to_since[shard-0o777]",
    ),
    Mutant(
        "the folder is looked at when the store is made alone", "double owner", OPENING,
        "if flaw(os.fstat(descriptor), shared):",
        "if at is not None and flaw(os.fstat(descriptor), shared):",
        f"{FOREIGN}a_folder_that_others_may_write_to_since[folder-0o777]",
    ),
    Mutant(
        "a new folder has what the umask leaves", "leak", OPENING,
        "            os.fchmod(descriptor, PRIVATE)\n",
        "            pass\n",
        f"{FOREIGN}what_is_made_is_for_this_user_alone[False-0o177]",
    ),
    Mutant(
        "folders on the way are for all", "leak", FOLDER,
        "missing.mkdir(PRIVATE, exist_ok=True)",
        "missing.mkdir(exist_ok=True)",
        f"{FOREIGN}folders_on_the_way_are_for_this_user_alone",
    ),
    Mutant(
        "a file of another user is a record", "stale byte", OPENING,
        "stat.S_ISREG(found.st_mode) and (shared or found.st_uid == os.geteuid())",
        "stat.S_ISREG(found.st_mode)",
        f"{FOREIGN}a_record_of_another_user",
    ),
    Mutant(
        "a pipe is a record of no bytes", "stale byte", FILE,
        "            require_record(found, self.folder.shared)\n",
        "",
        f"{FOREIGN}what_is_no_file_is_no_record[pipe]",
    ),
    Mutant(
        "a foreign name counts as a record", "double owner", FOLDER,
        "RECORD.fullmatch(entry.name) and",
        'entry.name[0] != "." and',
        f"{FOREIGN}foreign_names_are_left_alone[id_rsa]",
    ),
    Mutant(
        "a name that is too long counts as a record", "double owner", BASE,
        '[0-9a-f]{64}")',
        '[0-9a-f]{64,}")',
        f"{FOREIGN}foreign_names_are_left_alone[kv-8928aae63c84d87ea098564d1e03ad813f107add474e56aedd286349c0c03ea40]",
    ),
    Mutant(
        "a record in a wrong shard counts", "double owner", FOLDER,
        " and shard_of(entry.name) == shard",
        "",
        f"{FOREIGN}a_record_in_a_shard_of_others_is_foreign",
    ),
    Mutant(
        "a name that begins as a temporary one is deleted", "double owner", FOLDER,
        "TEMPORARY.fullmatch(entry.name)",
        "TEMPORARY.match(entry.name)",
        f"{FOREIGN}foreign_names_are_left_alone[.1-0123456789abcdef.tmp.bak]",
    ),
    Mutant(
        "a time of use is noted for a foreign file", "double owner", FILE,
        " and found.st_nlink == 1",
        "",
        f"{FOREIGN}a_second_name_of_a_foreign_file",
    ),
    Mutant(
        "a shard stays open after a clean-up", "leak", FOLDER,
        "                finally:\n                    shut(descriptor)\n",
        "                finally:\n                    pass\n",
        f"{FOREIGN}nothing_stays_open",
    ),
]  # fmt: skip

CLEAN_UPS = [
    Mutant(
        "a clean-up looks under the lock", "lost update", FOLDER,
        "            times, sizes = self._look()\n",
        "            with self._room:\n                times, sizes = self._look()\n",
        f"{CLEANING}no_lock_is_held_while_the_system_works[None]",
    ),
    Mutant(
        "a record written during a clean-up is deleted", "lost update", FOLDER,
        "            if name in self._fresh:\n                return 0\n",
        "",
        f"{CLEANING}a_record_written_during_a_clean_up_stays",
    ),
    Mutant(
        "a record used during a clean-up is deleted", "lost update", FOLDER,
        " and found.st_mtime_ns <= until_ns:\n                os.unlink",
        ":\n                os.unlink",
        f"{CLEANING}a_record_used_during_a_clean_up_stays",
    ),
    Mutant(
        "who writes what is leaving does not wait", "lost update", FOLDER,
        "name != self._leaving and ",
        "",
        f"{CLEANING}who_writes_what_is_leaving_waits",
    ),
    Mutant(
        "who has no room does not wait", "wrong count", FOLDER,
        "(not self._cleaning or self._has_room(nbytes)))",
        "True)",
        f"{CLEANING}who_has_no_room_waits_for_who_makes_it",
    ),
    Mutant(
        "all wait for a clean-up", "lost update", FOLDER,
        "(not self._cleaning or self._has_room(nbytes)))",
        "not self._cleaning)",
        f"{CLEANING}who_has_no_room_waits_for_who_makes_it",
    ),
    Mutant(
        "a record that is met is counted twice", "wrong count", FOLDER,
        "(self.capacity is None or entry.name in self._fresh)",
        "self.capacity is None",
        f"{CLEANING}others_go_on_while_the_folder_is_looked_through[6400-0]",
    ),
    Mutant(
        "a record written beside a look is not counted", "wrong count", FOLDER,
        "met + sum(self._fresh.values())",
        "met",
        f"{CLEANING}a_record_written_by_two_at_a_time_is_counted_as_it_is",
    ),
    Mutant(
        "a record being written when a look begins is not counted", "wrong count", FOLDER,
        "dict(self._writing)",
        "{}",
        f"{CLEANING}a_record_written_by_two_at_a_time_is_counted_as_it_is",
    ),
    Mutant(
        "two clean up at once", "wrong count", FOLDER,
        "            self._room.wait_for(lambda: not self._cleaning)\n",
        "",
        f"{CLEANING}two_clean_ups_follow_each_other",
    ),
]  # fmt: skip

MUTANTS = [*TRUNCATION, *AGREEMENT, *REVOKED, *FOREIGNERS, *CLEAN_UPS]
