"""States that are sets of slots: a Fenwick tree over chunks of 4 tokens. Every forward checks every level."""

import random
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

import memstate as ms
from memstate.errors import OutOfLevels
from memstate.kernels.dispatch import Backend
from memstate.requests.levels import LevelSets
from memstate.state.layout import Order
from memstate.testing import MemoryStore
from memstate.tiers.settings import Write
from tests.support.sources import ROOT
from tests.support.tenants import AtOnce
from tests.support.watch import Watch

CHUNK = 4
LAYOUT = ms.StateLayout(
    (ms.Plane("conv", (2,), torch.float32),), layers=1,
    levels=ms.StateLayout((ms.Plane("level", (), torch.int64, grid=CHUNK),), layers=2),
    rows=ms.StateLayout((ms.Plane("open", (CHUNK,), torch.int64, fill=-1),), layers=1),
)  # fmt: skip
STRATEGIES = [ms.Redirect(every=8), ms.PingPong(every=4), ms.LazyPingPong(every=8), ms.NoTracking(every=4)]


def ordered(order: Order) -> ms.StateLayout:
    """The layout with all planes in this order."""
    levels, rows = (replace(part, order=order) for part in (LAYOUT.levels, LAYOUT.rows))
    return replace(LAYOUT, order=order, levels=levels, rows=rows)


def number(text: tuple[int, ...]) -> int:
    """What a level holds that covers this text."""
    return hash(text) >> 8


class Loop:
    """A manager, and what its rows have read."""

    def __init__(self, backend: Backend, layout: ms.StateLayout = LAYOUT, **settings: object) -> None:
        given = {"slots": 24, "max_requests": 5, "tracking": ms.Redirect(every=8), "debug": True} | settings
        self.mem = ms.StateManager(layout, backend=backend.name, device=backend.device, **given)
        self.text: dict[ms.Row, tuple[int, ...]] = {}
        self.open: ms.Step | None = None

    def plan(self, tokens: dict[ms.Row, list[int]], run: bool = True) -> ms.Step:
        step = self.mem.plan(list(tokens), [len(new) for new in tokens.values()])
        self._coming = dict(tokens)
        if run:
            self.forward(step)
        return step

    def forward(self, step: ms.Step) -> None:
        """Checks the levels that are read, and writes those that are new, the open chunk and the state."""
        table, levels = self.mem.device.level_table.tolist(), self.mem.planes.levels["level"]
        read, write, snapshot = step.read.tolist(), step.write.tolist(), step.snapshot.tolist()
        used = Counter[int]()
        for entry, (row, new) in enumerate(self._coming.items()):
            before, (held, fresh) = self.text[row], table[row.index]
            after = (*before, *new)
            ends = dict(spans(len(before)))
            assert [bool(slot) for slot in held] == [level in ends for level in range(len(held))]
            for level, end in ends.items():
                covered = before[end - (CHUNK << level) : end]
                assert levels[:, held[level]].tolist() == [number(covered)] * 2, (row, level)
            rest = before[len(before) // CHUNK * CHUNK :]
            assert self.mem.planes.rows["open"][0, row.index].tolist()[: len(rest)] == list(rest)
            kept = {(level, end) for level, end in spans(len(before))}
            assert [level for level, slot in enumerate(fresh) if slot] == [
                level for level, end in sorted(spans(len(after))) if (level, end) not in kept
            ]
            for level, end in spans(len(after)):
                if (level, end) not in kept:
                    levels[:, fresh[level]] = number(after[end - (CHUNK << level) : end])
                    used[fresh[level]] += 1
            for level in ends:
                used[held[level]] += 0
            rest = after[len(after) // CHUNK * CHUNK :]
            self.mem.planes.rows["open"][0, row.index, : len(rest)] = torch.tensor(rest, dtype=torch.int64)
            conv = self.mem.planes["conv"]
            assert conv[0, read[entry]].tolist() == [float(len(before))] * 2
            conv[:, write[entry]] = len(after)
            if snapshot[entry]:
                conv[:, snapshot[entry]] = len(after)
            self.text[row] = after
        assert not used or max(used.values()) <= 1, "two rows write one level slot"

    def check(self) -> None:
        report = self.mem.audit()
        assert report.clean, report.miscounts
        levels = self.mem._parts.levels
        assert levels is not None and levels.miscounts() == []


def spans(length: int) -> list[tuple[int, int]]:
    """The levels of a length, and where each ends."""
    chunks, end, found = length // CHUNK, length // CHUNK * CHUNK, []
    for level in range(16):
        if chunks >> level & 1:
            found.append((level, end))
            end -= CHUNK << level
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("tracking", STRATEGIES, ids=repr)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("first", range(0, 48, 12))
def test_L1_L3_every_forward_finds_its_levels_whatever_was_called_before(
    first: int, order: Order, overlap: bool, tracking: ms.Tracking
) -> None:
    """Requests from prompts, snapshots, sessions and forks, that end in all ways; few level slots run out."""
    refused = 0
    for seed in range(first, first + 12):
        draw = random.Random(seed)
        loop = Loop(
            Backend("reference"), ordered(order), tracking=tracking, overlap=overlap,
            level_slots=draw.choice([14, 20, 60]), pages=ms.Pages(size=draw.choice([1, 2, 4])), prefix=ms.Prefix(),
        )  # fmt: skip
        mem, text, kept, steps = loop.mem, loop.text, dict[ms.Snapshot, tuple[int, ...]](), list[ms.Step]()
        prompts, talks, turns = dict[ms.Row, tuple[int, ...]](), dict[ms.Session, tuple[int, ...]](), {}
        books = [tuple(draw.choices(range(9), k=40)) for _ in range(2)]
        for _ in range(100):
            what = draw.randrange(16)
            running = [row for row in mem.rows if row in text]
            settled = not steps
            try:
                if what <= 1:
                    source = draw.choice([*kept, None, None])
                    tokens = draw.choice(books)[: draw.randrange(1, 40)]
                    (row,) = mem.admit([
                        ms.Request("r", tokens=tokens) if source is None else ms.Request("r", resume=source)
                    ])  # fmt: skip
                    text[row] = tokens[: mem.info(row).length] if source is None else kept[source]
                    prompts[row] = tokens if source is None else ()
                elif what == 2 and running and settled:
                    row = draw.choice(running)
                    for new in mem.fork(row, ["f"] * draw.randrange(1, 3)).rows:
                        text[new], prompts[new] = text[row], prompts[row]
                elif what in (3, 9) and running and settled:
                    row = draw.choice(running)
                    keep = draw.choice(["cache", "cache", None] if row in turns else ["handle", "cache"])
                    before = text.pop(row)
                    (found,) = mem.end([row], keep=keep, tokens=[before] if keep == "cache" else None)
                    if found is not None and keep == "handle":
                        kept[found] = before[: found.length]
                    if (talk := turns.pop(row, None)) in talks and keep == "cache":
                        talks[talk] = before
                elif what == 4 and kept:
                    snapshot = draw.choice([*kept])
                    del kept[snapshot]
                    mem.drop([snapshot])
                elif what == 5 and running and settled:
                    row = draw.choice(running)
                    (found,) = mem.publish([row], keep="handle")
                    if found is not None:
                        kept[found] = text[row][: found.length]
                elif what in (6, 10):
                    if not talks:
                        talks[mem.sessions.open("s")] = ()
                    elif idle := [talk for talk in talks if talk not in turns.values()]:
                        talk, more = draw.choice(idle), draw.choices(range(2), k=draw.randrange(1, 12))
                        (row,) = mem.admit([ms.Request("t", tokens=(told := (*talks[talk], *more)), session=talk)])
                        turns[row], prompts[row], text[row] = talk, told, told[: mem.info(row).length]
                    if not draw.randrange(12):
                        mem.sessions.close(talk := draw.choice([*talks]))
                        del talks[talk]
                elif what == 7 and settled and (old := [row for row in running if row not in turns]):
                    old = draw.sample(old, draw.randrange(1, len(old) + 1))
                    entries = draw.choices(range(len(old)), k=draw.randrange(1, len(old) + 2))
                    rows = mem.reorder(old, entries).rows
                    were = [(text.pop(row), prompts[row]) for row in old]
                    for row, entry in zip(rows, entries, strict=True):
                        text[row], prompts[row] = were[entry]
                elif what == 8 and not draw.randrange(15):
                    there = mem.recover()
                    kept = {snapshot: told for snapshot, told in kept.items() if snapshot in there.snapshots}
                    text.clear()
                    steps, turns = [], {}
                elif running:
                    rows = draw.sample(running, draw.randrange(1, len(running) + 1))
                    if len(steps) > overlap:
                        mem.settle(steps.pop(0))
                    fed = {}
                    for row in rows:
                        whole, told = mem.chunk(row, 8 - len(text[row]) % 8), prompts[row]
                        more = draw.choices(range(2), k=draw.choice([1, 2, 3, 5, 17, whole, whole, whole, whole]))
                        fed[row] = [*told[len(text[row]) :], *more][: len(more)]
                    steps.append(loop.plan(fed))
                    while len(steps) > overlap or (steps and draw.randrange(2)):
                        mem.settle(steps.pop(0))
            except (ms.OutOfSlots, ms.OutOfRows, OutOfLevels, ms.InvalidArgument) as error:
                refused += isinstance(error, OutOfLevels)
                assert not isinstance(error, ms.InvalidArgument) or "no register" in str(error), error
            loop.check()
            for snapshot, told in kept.items():
                slots = mem.device.level_slots(snapshot)
                assert [level for level, slot in enumerate(slots) if slot] == [level for level, _ in spans(len(told))]
                for level, end in spans(len(told)):
                    covered = told[end - (CHUNK << level) : end]
                    assert mem.planes.levels["level"][:, slots[level]].tolist() == [number(covered)] * 2
        for step in steps:
            mem.settle(step)
        mem.end(mem.rows)
        mem.drop([*kept])
        for talk in talks:
            mem.sessions.close(talk)
        mem.prefix.clear()
        mem.submit()
        mem.device.check()
        mem._parts.levels.let_go()
        assert mem._parts.levels.allocator.free == mem._parts.levels.allocator.pages
    assert refused


@pytest.mark.sample(3)
@pytest.mark.parametrize("tracking", STRATEGIES[:3], ids=repr)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("write", ["through", "selective", "back"])
@pytest.mark.parametrize("stored", [False, True])
def test_L11_states_come_back_from_below_with_their_levels(
    stored: bool, write: Write, overlap: bool, tracking: ms.Tracking, generator: torch.Generator
) -> None:
    """Chats that go on from each other, with slots, level slots and host memory for a part of them."""
    draw, found = random.Random(generator.initial_seed()), Counter(host=0, storage=0)
    for number in range(4):
        store = MemoryStore() if stored else None
        tiers = ms.Tiers(
            "m", host_slots=30 if number else 4, write=write, store=store, executor=AtOnce(),
            prefetch=ms.Prefetch(threshold=1),
        )  # fmt: skip
        loop = Loop(
            Backend("reference"), tracking=tracking, overlap=overlap, tiers=tiers, slots=draw.choice([14, 24]),
            level_slots=draw.choice([10, 16, 80]), pages=ms.Pages(size=draw.choice([1, 2, 4])), prefix=ms.Prefix(),
        )  # fmt: skip
        mem, text, steps = loop.mem, loop.text, list[ms.Step]()
        chats, goals = [tuple(draw.choices(range(9), k=24)) for _ in range(3)], dict[ms.Row, tuple[int, ...]]()
        for _ in range(60):
            while len(goals) < 3:
                told = draw.choice(chats)
                told = (*told[: draw.randrange(len(told) // 2, len(told) + 1)], *draw.choices(range(9), k=3))
                fetch = mem.prefetch(told) if stored else None
                while fetch is not None and not mem.tiers.ready(fetch):
                    mem.poll()
                (row,) = mem.admit([ms.Request("r", tokens=told, fetch=fetch)])
                text[row], goals[row] = told[: mem.info(row).length], (*told, *draw.choices(range(9), k=6))
            mem.poll()
            if len(steps) > overlap:
                mem.settle(steps.pop(0))
            rows = draw.sample([*goals], draw.randrange(1, 4))
            fed = {row: goals[row][len(text[row]) :][: mem.chunk(row, 8 - len(text[row]) % 8)] for row in rows}
            try:
                steps.append(loop.plan({row: [*new] for row, new in fed.items()}))
            except OutOfLevels:
                mem.end([rows[0]])
                del text[rows[0]], goals[rows[0]]
            loop.check()
            if all(len(text[row]) < len(goal) for row, goal in goals.items()) and draw.randrange(6):
                continue
            while steps:
                mem.settle(steps.pop(0))
            for row in [row for row, goal in goals.items() if len(text[row]) >= len(goal)]:
                mem.end([row], keep="cache", tokens=[text.pop(row)])
                chats = [*chats[-4:], goals.pop(row)]
            if not draw.randrange(4):
                mem.submit()
                if stored and draw.randrange(2):
                    mem.tiers.flush()
                    mem.tiers.clear()
                mem.prefix.clear()
            loop.check()
        for step in steps:
            mem.settle(step)
        mem.end(mem.rows)
        mem.prefix.clear()
        mem.submit()
        loop.check()
        mem._parts.levels.let_go()
        assert mem._parts.levels.allocator.free == mem._parts.levels.allocator.pages
        figures = mem.stats().tiers
        assert not figures.leaked_records
        found.update(host=figures.host_hit_tokens, storage=figures.storage_hit_tokens)
        mem.tiers.close()
    assert found["storage" if stored else "host"]


def test_L2_snapshots_and_forks_share_levels_and_copy_no_byte(backend: Backend) -> None:
    loop = Loop(backend, tracking=ms.Redirect(every=4), debug=False)
    mem = loop.mem
    (row,) = mem.admit([ms.Request("a")])
    loop.text[row] = ()
    held = []
    for length in range(4, 64, 4):
        mem.settle(loop.plan({row: [length] * 4}))
        held.append(sum(map(bool, mem.device.level_slots(row))))
    assert held == [bin(chunks).count("1") for chunks in range(1, 16)]
    free = mem._parts.levels.allocator.free
    forks = mem.fork(row, ["b", "c"]).rows
    (snapshot,) = mem.publish([row], keep="handle")
    mem.submit()
    assert snapshot is not None and mem._parts.levels.allocator.free == free
    assert mem.device.level_slots(forks[0]) == mem.device.level_slots(row)
    assert mem.planes.levels.traffic.copied == mem.planes.traffic.copied == 0
    loop.check()


def test_L4_L5_what_a_step_lets_go_of_is_not_given_out_before_its_forward() -> None:
    loop = Loop(Backend("reference"), tracking=ms.NoTracking(), level_slots=4)
    mem = loop.mem
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    loop.text |= {a: (), b: ()}
    mem.settle(loop.plan({a: [1] * 12, b: [2]}))
    assert mem._parts.levels.allocator.free == 2
    step = loop.plan({a: [3] * 4, b: [4] * 3}, run=False)  # 12 -> 16: two levels merge into one; 1 -> 4: a new one
    assert mem._parts.levels.allocator.free == 0
    loop.forward(step)
    with pytest.raises(OutOfLevels, match=r"4 level slots requested, 2 of 4 free: leave rows out of the step"):
        mem.plan([a, b], [2044, 2044])
    assert mem.info(a).length == 16
    mem.settle(step)
    mem.settle(loop.plan({a: [5] * 4, b: [6]}))
    loop.check()


@pytest.mark.parametrize("of", ["row", "snapshot"])
def test_L4_a_state_that_arrives_waits_for_the_forward_that_reads_what_is_let_go(backend: Backend, of: str) -> None:
    loop = Loop(backend, tracking=ms.Redirect(every=4), level_slots=3)
    mem = loop.mem
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    loop.text[a] = ()
    mem.settle(loop.plan({a: [1] * 12}))
    kept = None
    if of == "snapshot":
        (kept,) = mem.end([a], keep="handle")
        (a,) = mem.admit([ms.Request("a", resume=kept)])
        loop.text[a] = (1,) * 12
    step = loop.plan({a: [2] * 4}, run=False)  # 12 -> 16: it reads two levels, and writes one
    mem.drop([kept])
    if of == "row":
        mem.drop(mem.publish([a], keep="handle"))  # the snapshot that this plan has taken
    with pytest.raises(OutOfLevels, match="1 level slots requested, 0 of 3 free"):
        mem.device.arrived([b], [4])
    loop.forward(step)
    mem.settle(step)
    mem.device.arrived([b], [4])
    loop.check()


def test_L6_recover_keeps_the_levels_of_published_states(backend: Backend) -> None:
    loop = Loop(backend)
    mem = loop.mem
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    loop.text |= {a: (), b: ()}
    mem.settle(loop.plan({a: [1] * 12, b: [2] * 24}))
    (snapshot, _) = mem.end([a, b], keep="handle")
    mem.submit()
    found = mem.recover()
    assert found.snapshots[0] == snapshot and len(found.snapshots) == 2
    loop.check()
    (c,) = mem.admit([ms.Request("c", resume=snapshot)])
    loop.text = {c: (1,) * 12}
    mem.settle(loop.plan({c: [7] * 5}))
    loop.check()


def test_L6_a_recover_that_an_exception_ends_forgets_no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second try keeps states that the first would have given up."""
    loop = Loop(Backend("reference"))
    mem = loop.mem
    (row,) = mem.admit([ms.Request("a")])
    loop.text[row] = ()
    mem.settle(loop.plan({row: [7] * 8}))
    (kept,) = mem.end([row], keep="handle")
    mem.submit()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(mem._parts.registers, "reset", Mock(side_effect=MemoryError))
        mem.recover(keep=False)
    assert kept in mem.recover().snapshots
    loop.check()


def test_L7_a_state_from_elsewhere_gets_level_slots(backend: Backend) -> None:
    loop = Loop(backend, level_slots=3)
    mem = loop.mem
    (a,) = mem.admit([ms.Request("a")])
    with pytest.raises(OutOfLevels):
        mem.device.arrived([a], [60])
    mem.device.arrived([a], [23])
    told = tuple(range(23))
    for level, end in spans(23):
        mem.planes.levels["level"][:, mem.device.level_slots(a)[level]] = number(told[end - (CHUNK << level) : end])
    mem.submit()
    mem.planes["conv"][:, mem.device.read_slots([a]).wait()] = 23.0
    mem.planes.rows["open"][0, a.index, :3] = torch.tensor([20, 21, 22])
    loop.text[a] = told
    mem.settle(loop.plan({a: [1]}))
    loop.check()


def test_L8_settings_that_levels_do_not_know_are_refused() -> None:
    given = {"slots": 4, "max_requests": 2}
    for forward, why in (
        (ms.Forward(grid=4), r"^Forward\(.*with levels=.*leave out grid"),
        (ms.Forward(tail=4), "levels have no drafts"),
    ):
        with pytest.raises(ms.ConfigurationError, match=why):
            ms.StateManager(LAYOUT, **given, forward=forward)
    for grids in ((4, 8), (None,)):
        planes = tuple(ms.Plane(f"p{n}", (), torch.int64, grid=grid) for n, grid in enumerate(grids))
        with pytest.raises(ms.InvalidArgument, match="expected one grid, the tokens of a chunk, not "):
            replace(LAYOUT, levels=ms.StateLayout(planes, layers=2))
    with pytest.raises(OutOfLevels, match="2 level slots requested, 1 of 1 free: level_slots=1, so waiting"):
        mem = ms.StateManager(LAYOUT, **given, level_slots=1, tracking=ms.NoTracking())
        mem.plan(mem.admit([ms.Request("a")]), [12])
    with pytest.raises(ms.ConfigurationError, match="pages of 3 tokens for levels of 4"):
        ms.StateManager(
            LAYOUT, **given, tracking=ms.NoTracking(every=12), pages=ms.Pages(size=3), prefix=ms.Prefix(),
            tiers=ms.Tiers("m", host_slots=2),
        )  # fmt: skip
    with pytest.raises(ms.ConfigurationError, match="level_slots=0"):
        ms.StateManager(LAYOUT, **given, level_slots=0)
    plain = ms.StateLayout(LAYOUT.planes, 1)
    with pytest.raises(ms.ConfigurationError, match="level_slots=3 of StateLayout"):
        ms.StateManager(plain, **given, level_slots=3)
    mem = ms.StateManager(plain, **given)
    with pytest.raises(ms.InvalidArgument, match="the layout has no levels"):
        mem.device.level_slots(mem.admit([ms.Request("a")])[0])
    mem = ms.StateManager(LAYOUT, **given)
    with pytest.raises(ms.InvalidArgument, match="262144 tokens: 16 levels of chunks of 4 hold fewer than 262144"):
        mem.plan(mem.admit([ms.Request("a")]), [4 << 16])


def test_L9_a_step_off_the_chunks_costs_what_one_without_levels_costs(backend: Backend) -> None:
    """A chunk that ends takes one upload and one launch, and so does the step behind it; the batch is on the device."""
    seen = []
    for layout in (LAYOUT, replace(LAYOUT, levels=None)):
        mem = ms.StateManager(
            layout, slots=12, max_requests=3, backend=backend.name, device=backend.device, tracking=ms.Redirect(every=8)
        )
        rows, watch, costs = mem.admit([ms.Request(i) for i in range(3)]), Watch(), []
        mem.settle(mem.plan(rows))  # what is made once is made
        watch.let_pass(mem)
        for _ in range(2 * CHUNK):
            mem.backend.counts.reset()
            with watch:
                mem.settle(mem.plan(rows))
            costs.append((mem.backend.counts.uploads, mem.backend.counts.launches["ownership"]))
            assert mem.backend.counts.total_launches == 1 + costs[-1][1]
        assert not watch.seen and mem.backend.counts.syncs == 0
        seen.append(costs[1:])
    ends = [length % CHUNK < 2 for length in range(3, 2 * CHUNK + 2)]
    assert seen == [[(int(end), int(end)) for end in ends], [(0, 0)] * len(ends)]


def test_L10_a_state_holds_half_of_its_levels_and_a_snapshot_no_byte_of_its_own(backend: Backend) -> None:
    """Counted on a manager at some lengths, then for all of 14 levels; the table of docs/capacity.md says the same."""
    draw = random.Random(1)
    mem = Loop(backend, level_slots=40, debug=False).mem
    free = mem._parts.levels.allocator.free
    for chunks in draw.choices(range(1, 1 << 14), k=8):
        (row,) = mem.admit([ms.Request("a")])
        mem.device.arrived([row], [chunks * CHUNK])
        held = free - mem._parts.levels.allocator.free
        mem.fork(row, ["b"])
        assert held == chunks.bit_count() == free - mem._parts.levels.allocator.free
        mem.end(mem.rows)
        mem.submit()
        mem._parts.levels.let_go()
    assert sum(chunks.bit_count() for chunks in range(1 << 14)) == 7 << 14
    planes = (ms.Plane("levels", (64, 128, 64), torch.float32), ms.Plane("decay", (64,), torch.float32))
    mib = ms.StateLayout(planes, layers=24).bytes_per_slot / 2**20
    lines = (ROOT / "docs" / "capacity.md").read_text()
    for what, many in (("2^20 tokens, on average", 7), ("100 000 tokens", (100_000 // 64).bit_count()), ("taken", 0)):
        assert f"{what} | {many * mib:.0f} | {14 * mib:.0f} |" in lines


def test_L5_a_plan_that_nothing_can_serve_evicts_nothing() -> None:
    loop = Loop(Backend("reference"), level_slots=6, prefix=ms.Prefix(), pages=ms.Pages(size=4))
    mem = loop.mem
    for first in range(2):
        tokens = (first,) * 9
        (row,) = mem.admit([ms.Request("a", tokens=tokens)])
        loop.text[row] = ()
        mem.settle(loop.plan({row: list(tokens)[:8]}))
        mem.end([row], keep="cache", tokens=[tokens[:8]])
    (row,) = mem.admit([ms.Request("b")])
    with pytest.raises(OutOfLevels, match="7 level slots requested"):
        mem.plan([row], [127 * CHUNK])
    assert mem.prefix.states == 2
    loop.text[row] = ()
    mem.settle(loop.plan({row: [1] * 31 * CHUNK}))  # five levels: one state makes way
    assert mem.prefix.states == 1
    loop.check()


def test_L7_an_arrival_that_an_exception_ends_frees_no_level_slot_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Backend("reference"), level_slots=6)
    mem = loop.mem
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    loop.text |= {a: (), b: ()}
    mem.settle(loop.plan({a: [1] * 8}))
    mem.end([a])
    with pytest.raises(ms.InvalidArgument, match="262144 tokens: 16 levels"):
        mem.device.arrived([b], [CHUNK << 16])
    monkeypatch.setattr(LevelSets, "let_go", lambda levels: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        mem.device.arrived([b], [8])
    with pytest.raises(ms.Broken):
        mem.device.arrived([b], [8])
    monkeypatch.undo()
    mem.recover()
    loop.check()
    assert mem.stats().level_slots_free == 6


def test_figures_and_sheet_have_level_slots() -> None:
    loop = Loop(Backend("reference"), level_slots=9)
    mem = loop.mem
    (row,) = mem.admit([ms.Request("a")])
    loop.text[row] = ()
    mem.settle(loop.plan({row: [1] * 12}))
    assert (mem.stats().level_slots, mem.stats().level_slots_free) == (9, 7)
    sheet, levels = mem.sheet(), mem.planes.levels
    (bar,) = (bar for bar in sheet.bars if bar.title == "9 level slots")
    assert [part.size for part in bar.parts] == [2, 7]
    assert [part.size for bar in sheet.bars for part in bar.parts if part.name == "levels"] == [levels.nbytes]
    mem._parts.levels._of[3 * row.index] = (0,) * 16
    (found,) = (text for text in mem.audit().miscounts if "register" in text)
    assert found == f"register 3: level slots {(0,) * 16} for 3 chunks"


# -- level slots that loads lack ----------------------------------------------------------------------------------

LONG = (9,) * 28  # 7 chunks: 3 levels


def served(loop: Loop, text: tuple[int, ...]) -> int:
    """Serves a prompt, files it and passes it down; returns the tokens that it started from."""
    mem = loop.mem
    (row,) = mem.admit([ms.Request("r", tokens=text)])
    start = mem.info(row).length
    loop.text[row] = text[:start]
    while len(loop.text[row]) < len(text):
        mem.settle(loop.plan({row: list(text[len(loop.text[row]) :])}))
    mem.end([row], keep="cache", tokens=[loop.text.pop(row)])
    mem.submit()
    mem.poll()
    mem.poll()
    return start


def below(level_slots: int, store: MemoryStore | None = None, host_slots: int = 40) -> Loop:
    """A loop with tiers, and little of something."""
    tiers = ms.Tiers("m", host_slots=host_slots, store=store, executor=AtOnce(), prefetch=ms.Prefetch(threshold=1))
    prefix = ms.Prefix(ms.policies.Lru(), ms.policies.LruPages())
    return Loop(
        Backend("reference"), tracking=ms.NoTracking(), overlap=True, tiers=tiers, pages=ms.Pages(size=4),
        prefix=prefix, level_slots=level_slots,
    )  # fmt: skip


@pytest.mark.parametrize("fenced", [False, True])
def test_L5_a_load_whose_level_slots_wait_for_a_forward_evicts_nothing(fenced: bool) -> None:
    loop = below(level_slots=12)
    mem = loop.mem
    served(loop, LONG)
    mem.prefix.clear()
    (b,) = mem.admit([ms.Request("b")])
    loop.text[b] = ()
    mem.settle(loop.plan({b: [1] * 28}))
    for n in range(9):
        served(loop, (n,) * 8)
    step = loop.plan({b: [1]})
    if not fenced:
        mem.submit(step)
    (row,) = mem.admit([ms.Request("a", tokens=(*LONG, 1))])
    assert (mem.info(row).length, mem.prefix.states) == ((0, 9) if fenced else (28, 7))  # two make way for three
    mem.settle(step)
    loop.check()


def test_L5_a_load_that_can_never_fit_leaves_the_cache_alone() -> None:
    """Handles hold 10 of 12 level slots, and make no way."""
    loop = below(level_slots=12)
    mem = loop.mem
    served(loop, LONG)
    mem.prefix.clear()
    for word in (1, 2):
        (b,) = mem.admit([ms.Request("b")])
        loop.text[b] = ()
        mem.settle(loop.plan({b: [word] * 124}))
        mem.end([b], keep="handle")
        del loop.text[b]
    served(loop, LONG[:8])
    served(loop, (5,) * 8)
    (row,) = mem.admit([ms.Request("a", tokens=(*LONG, 1))])
    assert (mem.info(row).length, mem.prefix.states) == (8, 2)
    with pytest.raises(OutOfLevels):
        mem.plan(mem.admit([ms.Request("c")]), [28])
    assert mem.prefix.states == 2
    loop.check()


def test_L11_a_prefetch_takes_the_longest_state_whose_levels_find_room() -> None:
    store = MemoryStore()
    loop = below(60, store)
    for n in (12, 28):
        served(loop, LONG[:n])
    loop.mem.tiers.close()
    for host_slots, length in ((1, 12), (2, 28)):  # 2 records of levels, or 5
        mem = below(60, store, host_slots).mem
        fetch = mem.prefetch((*LONG, 1))
        while not mem.tiers.ready(fetch):
            mem.poll()
        (row,) = mem.admit([ms.Request("a", tokens=(*LONG, 1), fetch=fetch)])
        assert mem.info(row).length == fetch.length == length
        assert mem.stats().tiers.prefetch.truncated == (length == 12)
