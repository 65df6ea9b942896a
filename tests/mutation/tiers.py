"""Mutants of prefetch: what is truncated, what ranks agree on, and what is given back when it comes to nothing."""

from tests.mutation.mutant import Mutant

PREFETCH, FETCH, OFFERS, CLAIM, ROUNDS, READING, BACKGROUND, HOST_CACHE, HOST_POOL = (
    f"memstate/tiers/{name}.py"
    for name in ("prefetch", "fetch", "offers", "claim", "rounds", "reading", "background", "host_cache", "host_pool")
)
ONE, STOPS, RANKS = (f"tests/test_prefetch{name}.py::test_" for name in ("", "_stops", "_ranks"))
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
        "        claim.pin(range(fetch.kv_pages, most), stated[stated <= most].tolist())\n", "",
        f"{ONE}B57_what_a_prefetch_relies_on_is_not_evicted_for_it",
    ),
    Mutant(
        "eviction asks for all that is needed", "wrong count", HOST_CACHE,
        "        self.evict(n - self.pool.free)\n", "        self.evict(n)\n",
        f"{ONE}B57_eviction_asks_for_the_shortfall_only[40-40-22]",
    ),
    Mutant(
        "a state gives way to one that is there already", "lost snapshot", OFFERS,
        "if self._reads_state(hits, ends) and not claim", "if not claim",
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
        "self.phase, self.vote = Phase.OFFERED, ends",
        "self.phase, self.vote = Phase.OFFERED, np.arange(ends.size) < deepest(ends)", AGREED,
    ),
    Mutant(
        "a rank goes for its whole prompt", "stale label", PREFETCH,
        "if end := deepest(ends):\n                    self", "if end := fetch.end:\n                    self",
        AGREED,
    ),
    Mutant(
        "a rank that cannot leaves before the others know", "wrong count", PREFETCH,
        "        fetch.offer(ends)\n", "        fetch.offer(ends) if end else self._end(fetch, End.NO_ROOM)\n",
        f"{RANKS}B63_a_rank_without_memory_leaves_when_all_have_agreed",
    ),
    Mutant(
        "a rank that does not know yet counts as one that has nothing", "lost snapshot", ROUNDS,
        "if words[0] else None", "if words.size else None", f"{RANKS}B63_a_slow_rank_is_waited_for",
    ),
    Mutant(
        "what is filed is not agreed on", "wrong count", PREFETCH,
        "self._file(fetch, deepest(ends))", "self._file(fetch, deepest(fetch.usable()))",
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
        "sorted(fetches, key=lambda fetch: fetch.round)", "list(fetches)",
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
        "        self._background.drop(fetch)\n        fetch.claim.give_back()\n",
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

MUTANTS = [*TRUNCATION, *AGREEMENT, *REVOKED]
