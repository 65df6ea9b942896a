"""KV pages of conversations: whatever turns do, a page keeps the tokens it stands for. I = 4, pages of 2 tokens."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import MAKERS, History, Loop, both_orders, every_strategy
from tests.support.scan import row_problems, scan_registers

pytestmark = pytest.mark.sample(interpreter=0)  # the reference: the kernels run elsewhere


PAGE = 2
DEAD = 666  # a token that a dead step computes


class Talks(Loop):
    """A decode loop that is told its tokens, and KV pages whose contents say which tokens were written to them last."""

    def __init__(
        self, backend: Backend, name: str, overlap: bool = True, cache: bool = True, **settings: object
    ) -> None:
        usual = {"slots": 24, "pages": 80, "page_size": PAGE, "pages_per_row": 24, "overlap": overlap}
        usual["prefix"] = ms.Prefix() if cache else None
        super().__init__(backend, MAKERS[name](), **(usual | settings))  # type: ignore[arg-type]
        self.kv: dict[tuple[int, int], int] = {}  # page, offset -> token
        self.flying: list[ms.Step] = []

    def turn(self, text: Sequence[int], session: ms.Session | None = None, **more: object) -> ms.Row:
        """Admits one request with this prompt."""
        (row,) = self.mem.admit([ms.Request("talk", tokens=text, session=session, **more)])  # type: ignore[arg-type]
        self.fed[row] = list(text[: self.mem.length(row)])
        return row

    def feed(self, rows: Sequence[ms.Row], fed: Sequence[Sequence[int]], run: bool = True) -> ms.Step:
        """Plans and runs one step; what it reads stands for exactly what its rows were fed, in states and in pages."""
        self.mem.extend(rows, [self.mem.length(row) + len(new) for row, new in zip(rows, fed, strict=True)])
        step = self.mem.plan(rows, [len(new) for new in fed])
        if run:
            for row, new, slot in zip(rows, fed, step.read.tolist(), strict=True):
                history, pages = self.fed[row], self.mem.page_table[row.index].tolist()
                assert not history or (slot and not self.planes.wrong({slot: tuple(history)}))
                assert self.written(pages, history)
                for at, token in enumerate(new, len(history)) if pages else ():
                    self.kv[pages[at // PAGE], at % PAGE] = token
            self.planes.forward(step, [tuple(new) for new in fed])
            self.mem.submit(step)
        for row, new in zip(rows, fed, strict=True):
            self.fed[row] += new
        return step

    def written(self, pages: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the KV of exactly these tokens stands in pages; where the caller has the KV, there is none to see."""
        there = [self.kv.get((page, offset)) for page in pages for offset in range(PAGE)]
        return not self.mem.stats().pages or there[: len(tokens)] == list(tokens)

    def run(self, row: ms.Row, text: Sequence[int], dead: bool = False, publish: bool = False) -> None:
        """Computes what is left of a text and settles it; dead: its end ends the row, one step later is in flight."""
        left = list(text[self.mem.length(row) :])
        while left:
            n = min(3, self.mem.next_boundary(row) - self.mem.length(row), len(left))
            self.flying.append(self.feed([row], [left[:n]]))
            left = left[n:]
            if len(self.flying) > self.mem.overlap:
                self.mem.settle(self.flying.pop(0))
            if publish:
                self.mem.publish([row], tokens=[self.fed[row]])
        if dead:
            self.flying.append(self.feed([row], [[DEAD]]))
            self.mem.settle(self.flying.pop(0), [True])
        else:
            self.land()

    def land(self) -> None:
        """Settles what is in flight."""
        while self.flying:
            self.mem.settle(self.flying.pop(0))

    def known(self, row: ms.Row) -> list[int]:
        """The tokens of a request that are real."""
        return self.fed[row][: self.mem.confirmed(row)]

    def end(self, row: ms.Row) -> list[int]:
        """Ends a turn, and settles what it left in flight; returns its tokens."""
        tokens = self.known(row)
        self.mem.release([row], tokens=[tokens])
        self.land()
        return tokens

    def whole(self, text: Sequence[int], session: ms.Session | None = None, **how: bool) -> int:
        """A turn from admission to end; returns how many of its tokens were not computed again."""
        row = self.turn(text, session)
        start = self.mem.length(row)
        self.run(row, text, **how)
        self.end(row)
        self.look()
        return start

    def kept(self, session: ms.Session) -> list[int]:
        """Lengths of a session's states."""
        return [snap.length for snap in self.mem._sessions.opened[session].kept]

    def look(self) -> None:
        """Everything adds up, slots, labels, page holders, leases, pins; all states and pages hold what they say."""
        mem, users, content = self.mem, Counter[int](), dict[int, History]()
        mem.audit().raise_if_leaking()
        slots = scan_registers(mem._registers).slots
        assert row_problems(mem) == []
        for row in (row for row in self.fed if mem._table.generation[row.index] == row.generation):
            pages = mem._pages.of(row.index)
            users.update(pages)
            assert [page for page in mem.page_table[row.index].tolist() if page] == pages
            labels = {part: self.label(row, part) for part in range(3) if self.label(row, part)}
            content |= {self.slot(row, part): tuple(self.fed[row][:label]) for part, label in labels.items()}
        for talk in mem._sessions.opened.values():
            users.update(talk.pages)
            tokens = key_tokens(talk.tokens)
            assert not (talk.row and (talk.kept or talk.pages or talk.lease))
            assert self.written(talk.pages, tokens[: talk.kept[0].length] if talk.kept else [])
            content |= {slots[snap.register]: tuple(tokens[: snap.length]) for snap in talk.kept}
        for snap in [*mem._snapshots.kept.values(), *mem._snapshots._dropped.values()]:
            users.update(snap.pages)
        if mem.prefix is not None:
            leased = Counter(node for lease in self.leases() for node in lease.node.path())
            for _, node in mem.prefix.tree.walk():
                assert not (node.ghost and (node.pages or node.snapshot or node.leases))
                users.update(node.pages)
                tokens = key_tokens(b"".join(step.key for step in reversed(list(node.path()))))
                assert node.ghost or self.written(mem.prefix.tree.pages_to(node), tokens)
                assert node.leases == leased.pop(node, 0)
                if node.snapshot:
                    content[slots[node.snapshot.register]] = tuple(tokens)
            assert not leased
        assert list(mem._pages.allocator.holders) == [users[page] for page in range(mem.stats().pages + 1)]
        assert set(mem._snapshots.pinned) == {source for source in mem._registers.source.tolist() if source}
        assert self.planes.wrong(content) == []

    def leases(self) -> list[ms.prefix.cache.Lease]:
        """What rows and sessions have of the tree."""
        of_sessions = [talk.lease for talk in self.mem._sessions.opened.values() if talk.lease]
        return [*(self.mem.prefix.leases.values() if self.mem.prefix else ()), *of_sessions]

    def all_free(self) -> bool:
        """Whether closing every session and clearing the cache leaves nothing behind, once no request runs."""
        for session in list(self.mem._sessions.opened):
            self.mem.close_session(session)
        if cache := self.mem.prefix:
            cache.clear()
            assert (cache.tree.leased_pages, cache.tree.total_pages, cache.tree.nodes) == (0, 0, 0)
            assert not cache.leases and not cache.nodes and not cache.tree.roots
        self.look()
        self.mem.check()
        stats = self.mem.stats()
        free = (self.mem.free_slots, self.mem.free_pages, self.mem._snapshots.free)
        return free == (stats.capacity, stats.pages, self.mem._snapshots._count) and not self.mem._snapshots.pinned


def key_tokens(key: bytes) -> list[int]:
    found: list[int] = np.frombuffer(key, np.int64).tolist()
    return found


def fork(talks: Talks, row: ms.Row, *names: str) -> ms.Rows:
    forked = talks.mem.fork(row, names)
    for new in forked.rows:
        talks.fed[new] = list(talks.fed[row])
    for to, of in forked.page_copies:
        talks.kv |= {(to, offset): token for (page, offset), token in talks.kv.items() if page == of}
    return forked.rows


TEXT = list(range(1, 16))
OTHER = [*TEXT[:9], 77, 78, 79, 80]


@every_strategy
@both_orders
def test_B73_a_page_that_the_tree_has_is_not_written_again(backend: Backend, name: str, overlap: bool) -> None:
    """A turn begins in a page filled in part, fills it, gives it to the tree, is aborted; the next says otherwise."""
    talks = Talks(backend, name, overlap)
    session = talks.mem.open_session("a")
    talks.whole(TEXT[:9], session)
    row = talks.turn(TEXT, session)
    assert talks.mem.length(row) == 9
    filled = talks.mem._pages.of(row.index)[4]  # tokens 9 and 10
    talks.run(row, TEXT, publish=True)
    assert filled in talks.mem.prefix.tree.pages_to(talks.mem.prefix.leases[row.index].node)
    talks.mem.abort([row])
    talks.look()
    row = talks.turn(OTHER, session)
    assert filled not in talks.mem._pages.of(row.index)
    talks.run(row, OTHER, publish=True)
    talks.end(row)
    talks.look()
    assert talks.mem.match([*TEXT, 0]).kv_length == 14 and talks.mem.match([*OTHER, 0]).kv_length == 12
    assert talks.all_free()


@every_strategy
def test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in(backend: Backend, name: str) -> None:
    """The state of 9 tokens would write behind them, in a page that is no longer the row's alone."""
    talks = Talks(backend, name, cache=False)
    session = talks.mem.open_session("a")
    talks.whole(TEXT[:9], session)
    older = talks.kept(session)[1:]
    row = talks.turn(TEXT, session)
    shared = talks.mem._pages.of(row.index)[4:5]
    talks.mem._pages.allocator.share(shared)
    talks.mem.abort([row])
    assert talks.kept(session) == older
    talks.mem._pages.allocator.release(shared)
    talks.look()
    assert talks.all_free()


@pytest.mark.sample(interpreter=1)
@every_strategy
@both_orders
def test_B73_forks_and_the_conversation_go_on_in_pages_of_their_own(backend: Backend, name: str, overlap: bool) -> None:
    talks = Talks(backend, name, overlap)
    session = talks.mem.open_session("a")
    talks.whole(TEXT[:7], session)
    row = talks.turn(TEXT[:8], session)
    early = fork(talks, row, "early")[0]  # before the turn's first step: where the session stands
    talks.run(row, TEXT[:11])
    (late,) = fork(talks, row, "late")
    for other, text in ((early, [*TEXT[:8], 77, 78]), (late, [*TEXT[:11], 88, 89])):
        assert talks.mem._pages.of(other.index)[-1] not in talks.mem._pages.of(row.index)
        talks.run(other, text, publish=True)
    talks.look()
    talks.end(row)
    talks.look()
    # with the forks still running; under Redirect the state of 11 is what the last of them reads, and nobody's
    assert talks.whole(TEXT, session) == (8 if name == "redirect" else 11)
    for other in (late, early):
        talks.end(other)
        talks.look()
    assert talks.all_free()


@pytest.mark.parametrize("name", ["ping-pong", "redirect"])
def test_B74_pages_of_an_idle_session_stay_and_go_with_it(backend: Backend, name: str) -> None:
    talks = Talks(backend, name)
    mem, session = talks.mem, talks.mem.open_session("a")
    talks.whole(TEXT, session)
    assert mem.prefix.tree.leased_pages == mem.prefix.tree.total_pages == 7
    assert mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 0
    talks.look()
    mem.close_session(session)
    assert mem.prefix.tree.leased_pages == 0 and mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 7
    assert talks.all_free()
