"""The rules of prefetch once more, with sets and lists, one rank at a time. It never asks the library anything; of the
store it looks at what the test has put there.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

ENDS = (
    "complete", "partial", "short", "limited", "missed", "no_room", "stopped", "failed", "disagreed", "cancelled",
    "lost",
)  # fmt: skip
COUNTS = (
    *ENDS, "started", "truncated", "truncated_tokens", "tokens", "read", "pages", "states", "failures", "rounds",
)  # fmt: skip
FLAWS = {"vanished": "missing", "half": "damaged", "garbage": "checksum", "denied": "failed"}


@dataclass(eq=False)
class Slot:
    """A host record: whose it is does not matter, only whether it is free."""

    users: int = 0
    claimed: bool = False


@dataclass(eq=False)
class Kept:
    slot: Slot
    length: int
    pins: int = 0
    fetched: bool = False


class Cache:
    """Host memory of one kind."""

    def __init__(self, records: int, reserve: int) -> None:
        self.slots = [Slot() for _ in range(records)]
        self.reserve, self.evicted = reserve, 0
        self.kept: OrderedDict[bytes, Kept] = OrderedDict()

    @property
    def free(self) -> int:
        return sum(not slot.claimed and not slot.users for slot in self.slots)

    @property
    def waiting(self) -> int:
        return sum(not slot.claimed and slot.users > 0 for slot in self.slots)

    @property
    def loose(self) -> list[bytes]:
        return [key for key, kept in self.kept.items() if not kept.pins]

    def room(self) -> int:
        return max(0, self.free + len(self.loose) - self.reserve)

    def evict(self, n: int) -> None:
        for key in [key for key in self.loose if not self.kept[key].slot.users][: max(0, n)]:
            self.kept.pop(key).slot.claimed = False
            self.evicted += 1

    def take(self, n: int) -> list[Slot]:
        if n > self.free + len(self.loose):
            return []
        self.evict(n - self.free)
        if n > self.free:
            return []
        taken = [slot for slot in self.slots if not slot.claimed and not slot.users][:n]
        for slot in taken:
            slot.claimed = True
        return taken

    def add(self, key: bytes, slot: Slot, length: int, fetched: bool) -> None:
        if key in self.kept:
            slot.claimed = False
        else:
            self.kept[key] = Kept(slot, length, fetched=fetched)
        self.kept.move_to_end(key)


@dataclass(eq=False)
class Work:
    """A job: the model's side of one that the executor has."""

    fetch: "Wish"
    kind: str  # ask, kv, state
    numbers: list[int]  # pages; for a state its end
    slots: list[Slot]
    fate: str = "queued"  # running, ended, cancelled
    result: Any = None  # what it found, or "error"


@dataclass(eq=False)
class Wish:
    """A prefetch."""

    keys: list[bytes]
    covered: int
    kv_pages: int
    began: float
    missing: int
    phase: str = "asking"
    outcome: str | None = None
    length: int = 0
    end: int = 0
    reserved: int = 0
    stop: bool = False
    over: bool = False
    vote: set[int] | None = None
    reason: str | None = None
    asked: list[int] = field(default_factory=list)
    ask_ends: list[int] = field(default_factory=list)
    answer: tuple[int, list[int]] | None = None
    pins: list[tuple[str, int, Kept]] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    state: Slot | None = None
    here: set[int] = field(default_factory=set)
    stated: set[int] = field(default_factory=set)
    able: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    bad: int = 0
    has_state: bool | None = None


Said = tuple[Wish, str, set[int] | None, bool]  # what a rank sends of a prefetch: its phase, its vote, its wish to stop


class Rank:
    """One rank's prefetches. names: (kind, key) -> name in storage."""

    def __init__(
        self, page: int, settings: Any, kv: Cache | None, states: Cache | None, store: Any, names: Any
    ) -> None:
        self.page, self.settings, self.kv, self.states = page, settings, kv, states
        self.store, self.names, self.ranks = store, names, 1
        self.flying: list[Wish] = []
        self.jobs: list[Work] = []
        self.ended: list[Work] = []
        self.rounds: list[list[Said]] = []
        self.pending = False
        self.count: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.flaws: Counter[str] = Counter()

    # -- storage ---------------------------------------------------------------------------------------

    def _there(self, kind: str, key: bytes) -> bool:
        return self.names(kind, key) in self.store.records

    def begin(self, job: Work) -> None:
        if job.fate == "queued":
            job.fate = "running"

    def finish(self, job: Work) -> None:
        """What a job finds: the store is looked at now, not when it began."""
        wish, job.fate = job.fetch, "ended"
        self.ended.append(job)
        if wish.over:
            return
        if job.kind == "ask":
            found = 0
            while found < len(wish.asked) and self._there("kv", wish.keys[wish.asked[found]]):
                found += 1
            reach = wish.asked[found] if found < len(wish.asked) else len(wish.keys)
            if self.store.broken:
                reach = wish.asked[0] if wish.asked else reach
                job.result = "error" if wish.asked or any(end <= reach for end in wish.ask_ends) else (0, [])
                return
            ends = [end for end in wish.ask_ends if end <= reach and self._there("state", wish.keys[end - 1])]
            job.result = (found, ends)
            return
        names = [self.names(job.kind, wish.keys[n - (job.kind == "state")]) for n in job.numbers]
        if self.store.broken or any(self.store.faults.get(name) == "raises" for name in names):
            job.result = "error"
            return
        for arrived, name in enumerate(names):
            fault = self.store.faults.get(name, "")
            flaw = FLAWS["vanished"] if name not in self.store.records and fault != "denied" else FLAWS.get(fault, "")
            if flaw:
                job.result = (arrived, flaw)
                return
        job.result = (len(names), "")

    def collect(self) -> None:
        for job in self.ended:
            for slot in job.slots:
                slot.users -= 1
            wish = job.fetch
            if wish.over:
                continue
            if job.result == "error":
                self.count["failures"] += 1
                wish.reason = wish.reason or "failed"
            if job.kind == "ask":
                wish.answer = (0, []) if job.result == "error" else job.result
                continue
            arrived, flaw = (0, "") if job.result == "error" else job.result
            self.count["read"] += arrived
            if flaw:
                self.flaws[flaw] += 1
                wish.reason = wish.reason or ("failed" if flaw == "failed" else "missed")
            if job.kind == "state":
                wish.has_state = arrived == 1
                continue
            wish.arrived |= set(job.numbers[:arrived])
            if arrived < len(job.numbers):
                wish.bad = min(wish.bad, job.numbers[arrived])
        self.ended = []

    def drop(self, wish: Wish) -> None:
        wish.over = True
        for job in self.jobs:
            if job.fetch is wish and job.fate == "queued":
                job.fate = "cancelled"
                self.ended.append(job)

    def submit(self, wish: Wish, kind: str, numbers: list[int], slots: list[Slot]) -> None:
        for slot in slots:
            slot.users += 1
        self.jobs.append(Work(wish, kind, numbers, slots))

    # -- host memory -----------------------------------------------------------------------------------

    def keep(self, wish: Wish, end: int, state: bool) -> None:
        for page in [page for page in wish.slots if page >= end]:
            wish.slots.pop(page).claimed = False
        if wish.state and not state:
            wish.state.claimed, wish.state = False, None
        for pin in [pin for pin in wish.pins if (pin[1] >= end if pin[0] == "kv" else pin[1] > end)]:
            pin[2].pins -= 1
            wish.pins.remove(pin)

    def out(self, wish: Wish, outcome: str) -> None:
        self.drop(wish)
        self.keep(wish, 0, False)
        wish.phase, wish.outcome, wish.reserved, wish.vote = "done", outcome, 0, None
        self.count[outcome] += 1
        if wish in self.flying:
            self.flying.remove(wish)

    # -- calls -----------------------------------------------------------------------------------------

    def start(self, tokens: int, keys: list[bytes], covered: int, kv_pages: int, now: float) -> Wish:
        end = min(tokens // self.page, len(keys))
        wish = Wish(keys[:end], covered, min(kv_pages, end), now, end * self.page - covered, length=covered, end=end)
        self.count["started"] += 1
        limit, least = self.settings.limit, max(self.settings.threshold, 1)
        if wish.missing < least:
            self.out(wish, "short")
        elif limit is not None and sum(other.reserved for other in self.flying) + wish.missing > limit:
            self.out(wish, "limited")
        else:
            wish.reserved = wish.missing
            self.flying.append(wish)
            if self.kv:
                wish.asked = [page for page in range(wish.kv_pages, end) if keys[page] not in self.kv.kept]
            if self.states:
                gaining = [e for e in range(1, end + 1) if e * self.page - covered >= least]
                wish.ask_ends = [e for e in gaining if keys[e - 1] not in self.states.kept]
            if wish.asked or wish.ask_ends:
                self.submit(wish, "ask", [], [])
            else:
                wish.answer = (0, [])
        return wish

    def cancel(self, wish: Wish) -> None:
        if wish.phase != "done":
            self.out(wish, "cancelled")
            self.collect()

    def wants_end(self, wish: Wish, now: float) -> bool:
        pages = -(-wish.missing // self.page)
        late = now - wish.began >= self.settings.timeout + pages * self.settings.timeout_per_page
        return self.settings.stop == "best_effort" or (self.settings.stop == "timeout" and late)

    def ready(self, wish: Wish, now: float) -> None:
        if wish.phase != "done":
            wish.stop = wish.stop or self.wants_end(wish, now)
            if self.ranks == 1:
                self.poll([self])

    def poll(self, everyone: "list[Rank]") -> None:
        self.collect()
        if self.pending:
            self.pending = False
            number = len(self.rounds) - 1  # others may be a round ahead
            self.conclude(self.rounds[number], [rank.rounds[number] for rank in everyone])
        self.advance()
        if self.ranks > 1:
            if self.flying:
                self.count["rounds"] += 1
                self.rounds.append([(wish, wish.phase, wish.vote, wish.stop) for wish in self.flying])
                self.pending = True
            return
        while asked := [wish for wish in self.flying if wish.vote is not None or wish.stop]:
            own = [(wish, wish.phase, wish.vote, wish.stop) for wish in asked]
            self.conclude(own, [own])
            self.advance()

    # -- rules -----------------------------------------------------------------------------------------

    def advance(self) -> None:
        for wish in self.flying:
            if wish.phase == "asking" and wish.answer is not None:
                self.offer(wish, *wish.answer)
            if wish.phase == "reading" and self.hopeless(wish):
                self.arrive(wish)

    def offer(self, wish: Wish, found: int, ends: list[int]) -> None:
        keys, size, kv, states = wish.keys, len(wish.keys), self.kv, self.states
        wish.here = {page for page in range(size) if page < wish.kv_pages or kv is None or keys[page] in kv.kept}
        wish.stated = {end for end in range(1, size + 1) if states is None or keys[end - 1] in states.kept}
        reach, known = 0, wish.here | set(wish.asked[:found])
        while reach in known:
            reach += 1
        wish.able = {e for e in range(1, reach + 1) if e * self.page > wish.covered and (e in wish.stated or e in ends)}
        worth = {e for e in wish.able if e * self.page - wish.covered >= self.settings.threshold}
        wish.phase, wish.vote = "proposed", set()
        if not worth:
            wish.reason = wish.reason or "missed"
            return
        most = max(worth)
        if kv is not None:
            wish.pins += [("kv", p, kv.kept[keys[p]]) for p in range(wish.kv_pages, most) if keys[p] in kv.kept]
        if states is not None:
            wish.pins += [("state", e, states.kept[keys[e - 1]]) for e in sorted(wish.able & wish.stated) if e <= most]
        for _, _, kept in wish.pins:
            kept.pins += 1

        def needed(end: int) -> list[int]:
            return [page for page in range(end) if page not in wish.here]

        def fitting(room: int) -> set[int]:
            return {end for end in worth if len(needed(end)) <= room}

        def reads_state() -> bool:
            relevant = worth if self.ranks > 1 else {max(worth, default=0)} - {0}
            return bool(relevant - wish.stated)

        worth = fitting(kv.room() if kv else 0)
        if states is not None and not states.room():
            worth &= wish.stated
        if reads_state() and states is not None:
            wish.state = next(iter(states.take(1)), None)
            worth = worth if wish.state else worth & wish.stated
        if kv is not None and (pages := needed(max(worth, default=0))):
            slots = kv.take(len(pages))
            if not slots:
                worth = fitting(max(0, kv.free - kv.reserve))
                pages = needed(max(worth, default=0))
                slots = kv.take(len(pages))
            wish.slots = dict(zip(pages, slots, strict=True))
        self.keep(wish, max(worth, default=0), reads_state())
        if not worth:
            wish.reason = wish.reason or "no_room"
            return
        if max(worth) < most:
            self.count["truncated"] += 1
            self.count["truncated_tokens"] += (most - max(worth)) * self.page
        wish.vote = worth

    def reachable(self, wish: Wish, run: int, state: bool) -> set[int]:
        ends = {end for end in wish.able & wish.stated if end <= run and end < wish.end}
        return ends | ({wish.end} if run >= wish.end and state else set())

    def run_of(self, wish: Wish) -> int:
        run = 0
        while run < wish.end and run in wish.arrived:
            run += 1
        return run

    def hopeless(self, wish: Wish) -> bool:
        goal = max(self.reachable(wish, wish.bad, wish.has_state is not False), default=0)
        return self.run_of(wish) >= goal and not (goal == wish.end and wish.has_state is None)

    def arrive(self, wish: Wish) -> None:
        self.drop(wish)
        wish.phase, wish.vote = "arrived", self.reachable(wish, self.run_of(wish), wish.has_state is True)

    def conclude(self, own: list[Said], sent: list[list[Said]]) -> None:
        for at, (wish, phase, _, _) in enumerate(own):
            votes = [each[at][2] for each in sent]
            stop = any(each[at][3] for each in sent)
            known = [vote for vote in votes if vote is not None]
            agreed = set.intersection(*known) if len(known) == len(votes) else None
            if wish.phase == "done":
                continue
            wish.stop = wish.stop or stop
            if phase == "arrived" and agreed is not None:
                self.file(wish, max(agreed, default=0))
            elif stop and phase in ("asking", "proposed"):
                self.out(wish, wish.reason or "stopped")
            elif stop and wish.phase == "reading":
                self.arrive(wish)
            elif phase == "proposed" and agreed is not None:
                if agreed:
                    self.read(wish, max(agreed))
                else:
                    self.out(wish, wish.reason or "disagreed")

    def read(self, wish: Wish, end: int) -> None:
        wish.end = end
        self.keep(wish, end, end not in wish.stated)
        wish.reserved = end * self.page - wish.covered
        wish.phase, wish.vote, wish.bad = "reading", None, end
        wish.arrived = set(wish.here)
        wish.has_state = None if wish.state else True
        if wish.state:
            self.submit(wish, "state", [end], [wish.state])
        pages = list(wish.slots)
        while pages:
            part, pages = pages[: self.settings.chunk], pages[self.settings.chunk :]
            self.submit(wish, "kv", part, [wish.slots[page] for page in part])

    def file(self, wish: Wish, end: int) -> None:
        whole, tokens = end == wish.end, end * self.page
        self.keep(wish, end, whole)
        self.count["tokens"] += max(0, tokens - wish.covered)
        self.count["pages"] += len(wish.slots)
        self.count["states"] += wish.state is not None
        if self.kv is not None:
            for page, slot in wish.slots.items():
                self.kv.add(wish.keys[page], slot, (page + 1) * self.page, True)
            for key in reversed(wish.keys[:end]):
                if key in self.kv.kept:
                    self.kv.kept.move_to_end(key)
        if self.states is not None and end:
            if wish.state:
                self.states.add(wish.keys[end - 1], wish.state, tokens, True)
            if wish.keys[end - 1] in self.states.kept:
                self.states.kept.move_to_end(wish.keys[end - 1])
        wish.slots, wish.state, wish.length = {}, None, max(wish.covered, tokens)
        outcome = (
            ("complete" if whole else "partial") if end else wish.reason or ("stopped" if wish.stop else "disagreed")
        )
        self.out(wish, outcome)
