"""Random programs of every operation of a manager, valid and not, against a plain model of the rules.

After each operation registers, labels, bitmap, counters, columns, page table, step vectors, counts and every byte of
memory are what the model says; see `tests/proof/stateful`. MEMSTATE_SEED is the first seed. MEMSTATE_PROOF=1 runs more
programs; `python -m tests.proof.stateful` runs as many as you like.
"""

import ast
import inspect
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import memstate as ms
from memstate.engine import manager, stepping
from memstate.kernels import rules
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import copy, registers
from memstate.prefix import cache, policies, sessions, tree
from memstate.requests import holdings, marks, pages
from memstate.requests import table as request_table
from memstate.slots import commands, packet
from memstate.tiers import records, writeback
from memstate.tiers.host import cache as host_cache
from memstate.tiers.host import pool as host_pool
from memstate.tiers.host import tier as host_tier
from memstate.tiers.prefetch import prefetcher, reservation
from memstate.tokens import Prompt
from tests.proof.stateful.operations import OPERATIONS
from tests.proof.stateful.program import LARGEST, Difference, Program, difference, run, shrunk
from tests.support.sampling import PROOF

SEED = int(os.environ.get("MEMSTATE_SEED", "1"))
PROGRAMS = 12 if PROOF else 2
STRATEGIES = ("none", "ping-pong", "lazy", "redirect")
# AgreementLost takes a second rank.
ERRORS = {"InvalidArgument", "StaleHandle", "OutOfSlots", "OutOfRows", "OutOfPages", "Asleep", "ConfigurationError"}
numbers = st.integers(0, LARGEST - 1)


@pytest.fixture(autouse=True)
def poison() -> None:
    """Instead of that of all tests: these poison slots themselves, and watch the poison."""


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_programs_follow_the_rules(backend: Backend, strategy: str, overlap: bool) -> None:
    programs, length = (PROGRAMS, 150) if backend.name == "reference" else (PROGRAMS // 2, 40)
    for seed in range(SEED, SEED + programs):
        run(Program.random(seed, length, strategy, overlap), backend)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_programs_with_tiers_follow_the_rules(backend: Backend, strategy: str) -> None:
    programs, length = (PROGRAMS // 2, 200 if backend.name == "reference" else 40)
    for seed in range(SEED, SEED + programs):
        run(Program.random(seed, length, strategy, tiered=True), backend)


@hypothesis_settings(
    max_examples=60 if PROOF else 10, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(numbers, st.lists(st.tuples(st.sampled_from(list(OPERATIONS)), numbers), min_size=10, max_size=40))
def test_programs_that_hypothesis_finds_follow_the_rules(drawn: int, operations: list[tuple[str, int]]) -> None:
    run(Program(drawn, tuple(operations)), Backend("reference"))


def test_programs_use_every_public_operation_and_see_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests/proof/injection, engine/test_streams.py, requests/test_reorder.py, tiers/test_prefetch_stops.py
    elsewhere = {"recover", "use_stream", "reorder", "wait"}
    public = {(of, name) for of in (ms.StateManager, ms.tiers.TierManager)
              for name, _ in inspect.getmembers(of, inspect.isfunction)
              if name[0] != "_" and name not in elsewhere}  # fmt: skip
    used: Counter[tuple[type, str]] = Counter()
    for of, name in public:
        method = getattr(of, name)

        def counted(
            self: Any, *args: Any, key: Any = (of, name), method: Callable[..., Any] = method, **more: Any
        ) -> Any:
            used[key] += 1
            return method(self, *args, **more)

        monkeypatch.setattr(of, name, counted)
    errors: Counter[str] = Counter()
    for seed in range(SEED, SEED + 60):
        errors += run(Program.random(seed, 100), Backend("reference")).errors
        if set(used) == public and len(errors) == len(ERRORS):
            break
    assert set(used) == public
    assert set(errors) == ERRORS


# What the programs find: each breaks the library a little, and says under which strategy that shows.


class Break(NamedTuple):
    """An attribute of the library, and what to make of it; the seed of the program that is tried first.

    Programs with smaller seeds see no difference, as long as neither they nor the library change; they come last.
    """

    strategy: str
    overlap: bool
    owner: Any
    name: str
    make: Callable[[Any], Any]
    first: int = 0

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.owner, self.name, self.make(getattr(self.owner, self.name)))


def does(answer: Any = None) -> Callable[[Any], Any]:
    """Something that is not done: the answer is always the same."""
    return lambda real: lambda *_, **__: answer


def label_stays(move: Any) -> Any:
    def broken(packet: Any, slots: Any, labels: Any, counters: Any) -> None:
        before = labels.copy()
        move(packet, slots, labels, counters)
        labels[(labels != before) & (before == 0)] = 0

    return broken


def newest_lane_is_overwritten(choose: Any) -> Any:
    def broken(columns: Any, rules: Any, rows: Any, label: Any, wanted: Any, claim: Any) -> Any:
        labels, first = columns.labels, 3 * rows + 1
        full = first[(labels[first] > 0) & (labels[first + 1] > 0)] if rules.lanes == 2 else first[:0]
        both, before = np.concatenate([full, full + 1]), labels.copy()
        labels[both] = before[np.concatenate([full + 1, full])]  # the older one looks like the newer one
        lanes = choose(columns, rules, rows, label, wanted, claim)
        stays = np.setdiff1d(both, lanes)
        labels[stays] = before[stays]
        return lanes

    return broken


def free_count_is_off_by_one(record: Any) -> Any:
    def broken(self: Any, given: Any) -> None:
        record(self, given)
        self.registers.allocator.free += len(given) > 1

    return broken


def zeros_reach_one_byte_too_far(zero: Any) -> Any:
    def broken(planes: Any, slot: int) -> None:
        zero(planes, slot)
        for block in planes.blocks:
            behind = block.storage_offset() + slot * block.stride(1) + block.shape[2]
            if behind < block.untyped_storage().nbytes():
                block.as_strided((1,), (1,), behind).zero_()

    return broken


def a_split_gives_the_state_to_both(split: Any) -> Any:
    def broken(self: Any, node: Any, inside: int) -> Any:
        upper = split(self, node, inside)
        upper.evicted = node.evicted
        return upper

    return broken


def a_split_leaves_digests_where_they_were(split: Any) -> Any:
    def broken(self: Any, node: Any, inside: int) -> Any:
        digests, upper = node.digests, split(self, node, inside)
        node.digests = digests
        return upper

    return broken


def tombstones_stay_dead(attach: Any) -> Any:
    """The state comes back, and the mark that it is gone stays."""

    def broken(self: Any, node: Any, *given: Any) -> Any:
        evicted, snapshot = node.evicted, attach(self, node, *given)
        node.evicted |= evicted
        return snapshot

    return broken


def a_turn_leaves_its_last_state_only(end: Any) -> Any:
    def broken(self: Any, *given: Any) -> Any:
        lanes, self._lanes = self._lanes, 0
        kept = end(self, *given)
        self._lanes = lanes
        return kept

    return broken


def pins_are_not_seen(evict: Any) -> Any:
    def broken(self: Any, *given: Any) -> int:
        readers, self._holdings.readers = self._holdings.readers, [0] * len(self._holdings.readers)
        found = evict(self, *given)
        self._holdings.readers = readers
        return found

    return broken


def a_failed_write_is_never_tried_again(end: Any) -> Any:
    def broken(self: Any, shelf: Any, entries: Any, future: Any) -> None:
        end(self, shelf, entries, future)
        for entry in entries:
            entry.stored = True

    return broken


Cache, Buffer, Stepping = cache.PrefixCache, commands.CommandBuffer, stepping.Stepping
Sessions, Records = sessions.Sessions, host_cache.RecordCache
BREAKS = {
    "label_stays": Break("ping-pong", True, registers, "_move", label_stays),
    # On the host, where the next tenant would take over what the results say; lanes alone could not show it.
    "settle_ignores_the_generation": Break(
        "lazy", True, Stepping, "_same_request",
        lambda real: lambda self, step: (step.numbers > 0) & self._table.used[step.numbers],
    ),
    "newest_lane_is_overwritten": Break("ping-pong", True, rules, "_write_lane", newest_lane_is_overwritten),
    "nothing_is_pinned": Break("redirect", True, holdings.Holdings, "begin_read", does()),
    "release_forgets_one": Break(
        "none", False, Buffer, "release", lambda real: lambda self, given: real(self, list(given)[1:])
    ),
    "free_count_is_off_by_one": Break("lazy", True, Buffer, "claim", free_count_is_off_by_one),
    "record_order_is_ignored": Break("redirect", True, packet.Packet, "late", does(False)),
    "nothing_waits_for_a_forward": Break("redirect", True, Buffer, "fence", does()),
    "snapshots_are_not_copied": Break(
        "ping-pong", False, Stepping, "_copy_snapshots", lambda real: lambda self: setattr(self, "_uncopied", None)
    ),
    "shared_pages_have_one_holder": Break("redirect", False, pages.PageAllocator, "share", does()),
    "limit_is_ignored": Break("redirect", True, manager, "_limit", does(manager.NO_LIMIT)),
    "stale_rows_are_taken": Break(
        "none", True, request_table.RequestTable, "index", lambda real: lambda self, row: row.index
    ),
    "boundary_gets_the_last_state": Break(
        "redirect", False, stepping, "scatter_windows",
        lambda real: lambda planes, given, write, accepted, snapshot, crossed: real(
            planes, given, write, accepted, snapshot, accepted
        ),
    ),
    "zeros_reach_one_byte_too_far": Break("none", False, copy, "_zero", zeros_reach_one_byte_too_far),
    "salts_are_ignored": Break(
        "ping-pong", False, Cache, "match",
        lambda real: lambda self, prompt, most=None: real(self, Prompt(prompt.key, None), most),
    ),
    "use_does_not_refresh": Break(
        "redirect", False, policies.Lru, "used", lambda real: lambda self, node: None if node.uses else real(self, node)
    ),
    "a_split_gives_the_state_to_both": Break(
        "none", False, tree.Tree, "_split", a_split_gives_the_state_to_both, first=5
    ),
    "pins_are_not_seen": Break("redirect", False, Cache, "evict_states", pins_are_not_seen),
    "leases_are_forgotten": Break("lazy", False, Cache, "fork", does(), first=13),  # those of rows that were forked
    "marks_outlive_their_row": Break("ping-pong", True, marks.Marks, "end", does()),
    "a_wanted_length_is_kept_wherever_its_chunk_ends": Break(
        "redirect", True, marks.Marks, "_give", lambda real: lambda self, wanted, length, reach, *_: reach
    ),
    "a_state_at_a_mark_is_not_fenced": Break(
        "lazy", True, commands.CommandBuffer, "fence", lambda real: lambda self, registers, unwritten=None: real(
            self, registers
        ),
    ),
    "a_turn_leaves_its_last_state_only": Break("lazy", False, Sessions, "end", a_turn_leaves_its_last_state_only),
    "an_aborted_turn_is_kept": Break(
        "redirect", True, Sessions, "begin",
        lambda real: lambda self, session, row, turn, start, prompt: real(
            self, session, row, turn, prompt.tokens, prompt
        ),
    ),
    "a_hit_covers_the_last_token": Break(
        "lazy", True, Cache, "match",
        lambda real: lambda self, prompt, most=None: real(self, prompt, prompt.tokens if most is None else most + 1),
    ),
    "tombstones_stay_dead": Break("redirect", True, Cache, "_attach", tombstones_stay_dead),
    "uses_below_do_not_refresh": Break("lazy", False, Records, "touch", does()),
    "what_is_being_copied_is_evicted": Break("ping-pong", False, host_pool.RecordPool, "in_use", does(False)),
    "a_split_leaves_digests_where_they_were": Break(
        "redirect", False, tree.Tree, "_split", a_split_leaves_digests_where_they_were
    ),
    "slots_are_packed_before_the_packet": Break("lazy", False, Buffer, "named", does(False)),
    "a_load_is_pinned_for_good": Break("redirect", False, host_tier.HostTier, "unpin", does()),
    "an_end_below_the_threshold_will_do": Break(
        "none", False, prefetcher.Prefetcher, "_first", lambda real: lambda self, fetch, least: real(self, fetch, 1)
    ),
    "records_of_the_reserve_are_taken": Break(  # by prefetches
        "ping-pong", True, Records, "room", lambda real: lambda self, reserve=None: real(self, 0)
    ),
    "records_are_not_checked": Break("none", True, records.RecordFormat, "flaw", does("")),
    "a_cancelled_prefetch_keeps_its_records": Break("none", True, reservation.Reservation, "release", does()),
    # It is read into records that have another owner by then.
    "what_was_cancelled_is_still_read": Break("lazy", False, prefetcher.Prefetcher, "_drop", does()),
    "a_failed_write_is_never_tried_again": Break(
        "ping-pong", False, writeback.WriteBack, "_end", a_failed_write_is_never_tried_again
    ),
}  # fmt: skip
MOST_PROGRAMS = 60


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_library_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BREAKS[name]
    broken.apply(monkeypatch)
    seeds = (*range(broken.first, MOST_PROGRAMS), *range(broken.first))
    programs = (Program.random(seed, 150, broken.strategy, broken.overlap) for seed in seeds)
    found = next((one for program in programs if (one := difference(program, Backend("reference")))), None)
    assert found, f"{MOST_PROGRAMS} programs saw no difference"
    monkeypatch.undo()
    assert difference(found.program, Backend("reference")) is None


def test_a_difference_is_shrunk_to_a_program_that_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS["release_forgets_one"].apply(monkeypatch)
    with pytest.raises(Difference) as caught:
        run(Program.random(SEED, 150, "none", False), Backend("reference"))
    least = shrunk(caught.value, Backend("reference"))
    text = str(least).splitlines()[0]
    assert len(least.program.operations) <= 3, text
    pasted = Program(**{word.arg: ast.literal_eval(word.value) for word in ast.parse(text, mode="eval").body.keywords})  # type: ignore[attr-defined]
    assert pasted == least.program and difference(pasted, Backend("reference"))
    monkeypatch.undo()
    run(pasted, Backend("reference"))
