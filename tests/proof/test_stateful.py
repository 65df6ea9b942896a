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
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import memstate as ms
from memstate.engine import manager as engine
from memstate.engine import stepping
from memstate.kernels import rules
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import copy, registers
from memstate.prefix import cache, policies, sessions, tree
from memstate.requests import boundaries, pages, snapshots
from memstate.requests import table as requests
from memstate.slots import commands, packet
from memstate.state import windows
from memstate.tiers import load as promotion
from memstate.tiers import records, writeback
from memstate.tiers.host import cache as host_cache
from memstate.tiers.host import pool as host_pool
from memstate.tiers.prefetch import background
from memstate.tiers.prefetch import candidates as offers
from memstate.tiers.prefetch import reservation as claim
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
    programs, length = (PROGRAMS, 150) if backend.name == "reference" else (2, 45)
    for seed in range(SEED, SEED + programs):
        run(Program.random(seed, length, strategy, overlap), backend)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_programs_with_tiers_follow_the_rules(backend: Backend, strategy: str) -> None:
    programs, length = (-(-PROGRAMS // 2), 200) if backend.name == "reference" else (2, 45)
    for seed in range(SEED, SEED + programs):
        run(Program.random(seed, length, strategy, tiered=True), backend)


@hypothesis_settings(
    max_examples=60 if PROOF else 10, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(numbers, st.lists(st.tuples(st.sampled_from(list(OPERATIONS)), numbers), min_size=10, max_size=40))
def test_programs_that_hypothesis_finds_follow_the_rules(drawn: int, operations: list[tuple[str, int]]) -> None:
    run(Program(drawn, tuple(operations)), Backend("reference"))


def test_programs_use_every_public_operation_and_see_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    public = {(of, name) for of in (ms.StateManager, ms.tiers.TierManager)
              for name, _ in inspect.getmembers(of, inspect.isfunction) if name[0] != "_"}  # fmt: skip
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

Break = Callable[[pytest.MonkeyPatch], None]


def label_stays(patch: pytest.MonkeyPatch) -> None:
    move = registers._move

    def broken(packet: Any, slots: Any, labels: Any, counters: Any) -> None:
        before = labels.copy()
        move(packet, slots, labels, counters)
        labels[(labels != before) & (before == 0)] = 0

    patch.setattr(registers, "_move", broken)


def settle_ignores_the_generation(patch: pytest.MonkeyPatch) -> None:
    """On the host, where the next tenant would take over what the results say; lanes alone could not show it."""
    patch.setattr(
        stepping.Stepping, "_same_request", lambda self, step: (step.numbers > 0) & self._table.used[step.numbers]
    )


def newest_lane_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    choose = rules.choose_lane

    def broken(columns: Any, lanes: Any, claim: Any, in_place: bool) -> Any:
        if len(lanes) == 2 and all(columns.slots[lane] and columns.labels[lane] for lane in lanes):
            return max(lanes, key=lambda lane: int(columns.labels[lane]))
        return choose(columns, lanes, claim, in_place)

    patch.setattr(rules, "choose_lane", broken)


def nothing_is_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots.Snapshots, "read_first", lambda self, row, register: None)


def release_forgets_one(patch: pytest.MonkeyPatch) -> None:
    release = commands.CommandBuffer.release
    patch.setattr(commands.CommandBuffer, "release", lambda self, given: release(self, list(given)[1:]))


def free_count_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    claim = commands.CommandBuffer.claim

    def broken(self: Any, given: Any) -> None:
        claim(self, given)
        self.registers.allocator.free += len(given) > 1

    patch.setattr(commands.CommandBuffer, "claim", broken)


def record_order_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packet.Packet, "late", lambda self, registers, phase, sources=None: False)


def nothing_waits_for_a_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commands.CommandBuffer, "fence", lambda self, given: None)


def snapshots_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stepping.Stepping, "_copy_snapshots", lambda self: setattr(self, "_uncopied", None))


def shared_pages_have_one_holder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages.PageAllocator, "share", lambda self, given: None)


def limit_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_limit", lambda limit: engine.NO_LIMIT)


def stale_rows_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests.RequestTable, "index", lambda self, row: row.index)


def boundary_gets_the_last_state(patch: pytest.MonkeyPatch) -> None:
    scatter = windows.scatter

    def broken(storage: Any, given: Any, write: Any, accepted: Any, snapshot: Any, crossed: Any) -> None:
        scatter(storage, given, write, accepted, snapshot, accepted)

    patch.setattr(stepping, "scatter_windows", broken)


def zeros_reach_one_byte_too_far(patch: pytest.MonkeyPatch) -> None:
    zero = copy._zero

    def broken(planes: Any, slot: int) -> None:
        zero(planes, slot)
        for block in planes.blocks:
            behind = block.storage_offset() + slot * block.stride(1) + block.shape[2]
            if behind < block.untyped_storage().nbytes():
                block.as_strided((1,), (1,), behind).zero_()

    patch.setattr(copy, "_zero", broken)


def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    match = cache.PrefixCache.match
    patch.setattr(cache.PrefixCache, "match", lambda self, key, salt, most: match(self, key, None, most))


def use_does_not_refresh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policies.Lru, "used", lambda self, node: None if node.uses else self._order.place(node, self._tick()))
    patch.setattr(
        policies.Lru, "_tick", lambda self: setattr(self, "_clock", self._clock + 1) or self._clock, raising=False
    )


def a_split_gives_the_state_to_both(patch: pytest.MonkeyPatch) -> None:
    split = tree.Tree._split

    def broken(self: Any, node: Any, inside: int) -> Any:
        upper = split(self, node, inside)
        upper.evicted = node.evicted
        return upper

    patch.setattr(tree.Tree, "_split", broken)


def pins_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots.Snapshots, "pinned", property(lambda self: {}.keys()))


def leases_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Those of rows that were forked."""
    patch.setattr(cache.PrefixCache, "fork", lambda self, row, others: None)


def wants_do_not_follow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(boundaries.Boundaries, "advance", lambda self, rows, lengths: None)


def a_turn_leaves_its_last_state_only(patch: pytest.MonkeyPatch) -> None:
    end = sessions.Sessions.end

    def broken(self: Any, *given: Any) -> Any:
        lanes, self._lanes = self._lanes, 0
        kept = end(self, *given)
        self._lanes = lanes
        return kept

    patch.setattr(sessions.Sessions, "end", broken)


def an_aborted_turn_is_kept(patch: pytest.MonkeyPatch) -> None:
    begin = sessions.Sessions.begin

    def broken(self: Any, session: Any, row: int, turn: Any, start: int, key: bytes, salt: Any) -> Any:
        return begin(self, session, row, turn, len(key) // 8, key, salt)

    patch.setattr(sessions.Sessions, "begin", broken)


def a_hit_covers_the_last_token(patch: pytest.MonkeyPatch) -> None:
    match = cache.PrefixCache.match
    patch.setattr(cache.PrefixCache, "match", lambda self, key, salt, most: match(self, key, salt, most + 1))


def tombstones_stay_dead(patch: pytest.MonkeyPatch) -> None:
    """The state comes back, and the mark that it is gone stays."""
    attach = cache.PrefixCache._attach

    def broken(self: Any, node: Any, *given: Any) -> Any:
        evicted, snapshot = node.evicted, attach(self, node, *given)
        node.evicted |= evicted
        return snapshot

    patch.setattr(cache.PrefixCache, "_attach", broken)


def uses_below_do_not_refresh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_cache.RecordCache, "touch", lambda self, keys: None)


def what_is_being_copied_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_pool.RecordPool, "in_use", lambda self, record: False)


def a_split_leaves_digests_where_they_were(patch: pytest.MonkeyPatch) -> None:
    split = tree.Tree._split

    def broken(self: Any, node: Any, inside: int) -> Any:
        digests, upper = node.digests, split(self, node, inside)
        node.digests = digests
        return upper

    patch.setattr(tree.Tree, "_split", broken)


def slots_are_packed_before_the_packet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commands.CommandBuffer, "named", lambda self, given: False)


def a_load_is_pinned_for_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(promotion.Loader, "release", lambda self, given: None)


def slots_of_states_from_below_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    needs = promotion.Loader.needs
    patch.setattr(promotion.Loader, "needs", lambda self, given: (0, needs(self, given)[1]))


def an_end_below_the_threshold_will_do(patch: pytest.MonkeyPatch) -> None:
    first = offers.Candidates._first
    patch.setattr(offers.Candidates, "_first", lambda self, fetch, least: first(self, fetch, 1))


def records_of_the_reserve_are_taken(patch: pytest.MonkeyPatch) -> None:
    """By prefetches."""
    room = host_cache.RecordCache.room
    patch.setattr(host_cache.RecordCache, "room", lambda self, reserve=None: room(self, 0))


def records_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records.RecordFormat, "flaw", lambda self, buffer, key, length: "")


def a_cancelled_prefetch_keeps_its_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claim.Reservation, "release", lambda self: None)


def what_was_cancelled_is_still_read(patch: pytest.MonkeyPatch) -> None:
    """Into records that have another owner by then."""
    patch.setattr(background.Background, "drop", lambda self, fetch: None)


def a_failed_write_is_never_tried_again(patch: pytest.MonkeyPatch) -> None:
    end = writeback.WriteBack._end

    def broken(self: Any, shelf: Any, entries: Any, future: Any) -> None:
        end(self, shelf, entries, future)
        for entry in entries:
            entry.stored = True

    patch.setattr(writeback.WriteBack, "_end", broken)


BREAKS: dict[Break, tuple[str, bool]] = {
    label_stays: ("ping-pong", True),
    settle_ignores_the_generation: ("lazy", True),
    newest_lane_is_overwritten: ("ping-pong", True),
    nothing_is_pinned: ("redirect", True),
    release_forgets_one: ("none", False),
    free_count_is_off_by_one: ("lazy", True),
    record_order_is_ignored: ("redirect", True),
    nothing_waits_for_a_forward: ("redirect", True),
    snapshots_are_not_copied: ("ping-pong", False),
    shared_pages_have_one_holder: ("redirect", False),
    limit_is_ignored: ("redirect", True),
    stale_rows_are_taken: ("none", True),
    boundary_gets_the_last_state: ("redirect", False),
    zeros_reach_one_byte_too_far: ("none", False),
    salts_are_ignored: ("ping-pong", False),
    use_does_not_refresh: ("redirect", False),
    a_split_gives_the_state_to_both: ("none", False),
    pins_are_not_seen: ("redirect", False),
    leases_are_forgotten: ("lazy", False),
    wants_do_not_follow: ("ping-pong", True),
    a_turn_leaves_its_last_state_only: ("lazy", False),
    an_aborted_turn_is_kept: ("redirect", True),
    a_hit_covers_the_last_token: ("lazy", True),
    tombstones_stay_dead: ("redirect", True),
    uses_below_do_not_refresh: ("lazy", False),
    what_is_being_copied_is_evicted: ("ping-pong", False),
    a_split_leaves_digests_where_they_were: ("redirect", False),
    slots_are_packed_before_the_packet: ("lazy", False),
    a_load_is_pinned_for_good: ("redirect", False),
    slots_of_states_from_below_are_not_counted: ("redirect", False),
    an_end_below_the_threshold_will_do: ("none", False),
    records_of_the_reserve_are_taken: ("ping-pong", True),
    records_are_not_checked: ("none", True),
    a_cancelled_prefetch_keeps_its_records: ("none", True),
    what_was_cancelled_is_still_read: ("lazy", False),
    a_failed_write_is_never_tried_again: ("ping-pong", False),
}
MOST_PROGRAMS = 60


@pytest.mark.sample(8)
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_broken_library_is_found_out(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, overlap = BREAKS[broken]
    broken(monkeypatch)
    programs = (Program.random(seed, 150, strategy, overlap) for seed in range(MOST_PROGRAMS))
    found = next((one for program in programs if (one := difference(program, Backend("reference")))), None)
    assert found, f"{MOST_PROGRAMS} programs saw no difference"
    monkeypatch.undo()
    assert difference(found.program, Backend("reference")) is None


def test_a_difference_is_shrunk_to_a_program_that_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    release_forgets_one(monkeypatch)
    with pytest.raises(Difference) as caught:
        run(Program.random(SEED, 150, "none", False), Backend("reference"))
    least = shrunk(caught.value, Backend("reference"))
    text = str(least).splitlines()[0]
    assert len(least.program.operations) <= 3, text
    pasted = Program(**{word.arg: ast.literal_eval(word.value) for word in ast.parse(text, mode="eval").body.keywords})  # type: ignore[attr-defined]
    assert pasted == least.program and difference(pasted, Backend("reference"))
    monkeypatch.undo()
    run(pasted, Backend("reference"))
