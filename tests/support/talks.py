"""Runs a decode loop for conversations whose tokens the test gives. KV pages of 2 tokens hold the tokens."""

from collections.abc import Sequence

import numpy as np

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.checked import STALE, Checked
from tests.support.endings import finish, made
from tests.support.planes import MAKERS, History, Loop

PAGE = 2
DEAD = 666  # the token that dead steps compute


class Talks(Checked, Loop):
    """A decode loop that gets its tokens from the test. A KV page holds the tokens that were last written to it."""

    def __init__(
        self, backend: Backend, name: str, overlap: bool = True, cache: bool = True, **settings: object
    ) -> None:
        usual = {"slots": 24, "pages": 80, "page_size": PAGE, "pages_per_row": 24, "overlap": overlap}
        usual["prefix"] = ms.Prefix() if cache else None
        super().__init__(backend, MAKERS[name](), **(usual | settings))  # type: ignore[arg-type]
        self.page, self.kv = PAGE, np.full((self.mem.stats().pages + 1, PAGE), STALE, np.int64)
        self.flying: list[ms.Step] = []
        made(self)

    def turn(self, text: Sequence[int], session: ms.Session | None = None, **more: object) -> ms.Row:
        """Admits one request with this prompt, and returns its row."""
        (row,) = self.mem.admit([ms.Request("talk", tokens=text, session=session, **more)])  # type: ignore[arg-type]
        self.fed[row] = list(text[: self.mem.info(row).length])
        return row

    def feed(self, rows: Sequence[ms.Row], fed: Sequence[Sequence[int]], run: bool = True) -> ms.Step:
        """Plans and runs one step. Checks that the states and pages that it reads are those of the rows' tokens."""
        self.mem.extend(rows, [self.mem.info(row).length + len(new) for row, new in zip(rows, fed, strict=True)])
        step = self.mem.plan(rows, [len(new) for new in fed])
        if run:
            for row, new, slot in zip(rows, fed, step.read.tolist(), strict=True):
                history, pages = self.fed[row], self.mem.device.page_table[row.index].tolist()
                assert not history or (slot and not self.planes.wrong({slot: tuple(history)}))
                assert self.in_pages(pages, history)
                for at, token in enumerate(new, len(history)) if pages else ():
                    self.kv[pages[at // PAGE], at % PAGE] = token
            self.planes.forward(step, [tuple(new) for new in fed])
            self.mem.submit(step)
        for row, new in zip(rows, fed, strict=True):
            self.fed[row] += new
        return step

    def run(self, row: ms.Row, text: Sequence[int], dead: bool = False, publish: bool = False) -> None:
        """Computes and settles the rest of a text. dead: whether the row then ends while a dead step is in flight."""
        left = list(text[self.mem.info(row).length :])
        while left:
            n = min(3, self.mem.info(row).next_boundary - self.mem.info(row).length, len(left))
            self.flying.append(self.feed([row], [left[:n]]))
            left = left[n:]
            if len(self.flying) > self.mem.overlap:
                self.mem.settle(self.flying.pop(0))
            if publish:
                self.mem.publish([row], keep="cache", tokens=[self.fed[row]])
        if dead:
            self.flying.append(self.feed([row], [[DEAD]]))
            self.mem.settle(self.flying.pop(0), [True])
        else:
            self.land()

    def land(self) -> None:
        """Settles all steps in flight."""
        while self.flying:
            self.mem.settle(self.flying.pop(0))

    def known(self, row: ms.Row) -> list[int]:
        """Returns the real tokens of a request."""
        return self.fed[row][: self.mem.info(row).confirmed]

    def end(self, row: ms.Row) -> list[int]:
        """Ends a turn and settles its steps in flight. Returns its real tokens."""
        tokens = self.known(row)
        self.mem.end([row], keep="cache", tokens=[tokens])
        self.land()
        return tokens

    def whole(
        self, text: Sequence[int], session: ms.Session | None = None, prompt: int | None = None, **how: bool
    ) -> int:
        """Runs a turn from admission to end. Returns the length that it started from.

        prompt: length of the prompt; the rest of the text is the answer. None: all is prompt.
        """
        row = self.turn(text[:prompt], session)
        start = self.mem.info(row).length
        self.run(row, text, **how)
        self.end(row)
        self.look()
        return start

    def kept(self, session: ms.Session) -> list[int]:
        """Returns the lengths of a session's states."""
        return [snap.length for snap in owners.session(self.mem, session).kept]

    def cached(self) -> list[int]:
        """Returns the lengths of the states in the prefix cache, ascending."""
        nodes = self.mem.prefix.tree.walk() if self.mem.prefix else ()
        return sorted(node.end * PAGE for _, node in nodes if node.snapshot)

    def of_rows(self) -> dict[int, History]:
        """Returns slot -> tokens of its state, for the slots of all rows."""
        rows = [row for row in self.mem.rows if row in self.fed]
        labels = {(row, part): label for row in rows for part in range(3) if (label := self.label(row, part))}
        return {self.slot(row, part): tuple(self.fed[row][:label]) for (row, part), label in labels.items()}

    def look(self, idle: bool = False) -> None:
        """Checks the whole manager.

        Does what `Checked.look` does. Then checks the pages of each row on the device, and that exactly the states that
        first steps will read are pinned.
        """
        super().look(idle)
        table = self.mem.device.page_table.tolist()
        for row in self.mem.rows:
            assert [page for page in table[row.index] if page] == owners.pages_of(self.mem, row)
        assert set(owners.pinned(self.mem)) == {at for at in inside.registers(self.mem).source.tolist() if at}

    def all_free(self) -> bool:
        finish(self)
        return True


def fork(talks: Talks, row: ms.Row, *names: str) -> ms.Rows:
    forked = talks.mem.fork(row, names)
    for new in forked.rows:
        talks.fed[new] = list(talks.fed[row])
    for to, of in forked.page_copies:
        talks.kv[to] = talks.kv[of]
    return forked.rows


TEXT = list(range(1, 16))


def row_holds_nothing(mem: ms.StateManager, index: int) -> bool:
    """Whether a row's registers, labels, columns and pages are all 0, on the device and in the host's mirror."""
    mem.submit()
    file, first = inside.registers(mem), 3 * index
    cells = [file.table.slots[first : first + 3], file.table.labels[first : first + 3], mem.device.page_table[index]]
    columns = [getattr(of, name)[index] for of in (file, file.table) for name in ("tracked", "source")]
    mirror = [file.held[first : first + 3], file.labels[first : first + 3]]
    return not any(bool(cell.any()) for cell in [*cells, *columns, *mirror]) and not owners.row_pages(mem).of(index)


def counts(talks: Talks) -> tuple[int, ...]:
    """Returns the numbers of free slots, free pages, used rows and free holders."""
    return talks.mem.free_slots, talks.mem.free_pages, talks.mem.stats().rows_used, owners.free(talks.mem)


def told(
    backend: Backend, name: str, overlap: bool = True, cache: bool = True, first: int = 0, **settings: object
) -> tuple[Talks, ms.StateManager, ms.Session]:
    """Returns a loop, its manager and a session. Unless `first` is 0, the session has had a turn of `first` tokens."""
    talks = Talks(backend, name, overlap, cache, **settings)
    session = talks.mem.sessions.open("a")
    if first:
        talks.whole(TEXT[:first], session)
    return talks, talks.mem, session
