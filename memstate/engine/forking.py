"""Forks running rows, and reorders a batch of rows.

A call gets everything that it needs, or it changes nothing. This module does not know steps.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from memstate.checks import is_count, sequence
from memstate.engine.admission import Admission
from memstate.engine.ending import Ending
from memstate.engine.world import Verbs, World
from memstate.errors import InvalidArgument
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Row, Rows
from memstate.requests.holdings import LEAVING

PER_ROW = REGISTERS_PER_ROW


class Fork(NamedTuple):
    """The result of `StateManager.fork` and `StateManager.reorder`.

    Attributes:
        rows: after `fork` the new rows, in the order of `ids`; after `reorder` one row for each entry.
        page_copies: pairs (new page, old page). The old page belongs to the forked row and is partly filled. The caller
            copies its KV to the new page.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=4)
        >>> row = mem.admit([ms.Request("a")])[0]
        >>> mem.settle(mem.plan([row], [3]))
        >>> fork = mem.fork(row, ["a2", "a3"])
        >>> [mem.info(new).length for new in fork.rows], fork.page_copies
        ([3, 3], [])
    """

    rows: Rows
    page_copies: list[tuple[int, int]]


class Forking(Verbs):
    """Starts more rows from the state of a running row.

    This part gives new rows their slots and pages, and moves a state that several rows share to a holder.

    Args:
        world: the tables of the manager.
        admission: gives the new rows their slots.
        ending: ends rows.
    """

    def __init__(self, world: World, admission: Admission, ending: Ending) -> None:
        super().__init__(world)
        self._admission, self._ending = admission, ending

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """See `StateManager.fork`."""
        index = self._table.index(row)
        sequence("request ids", ids, "fork(row, ['second', 'third'])")
        self._require_settled([index])
        if not ids:
            return Fork(self._table.handles(()), [])
        rows, copies = self._fork("fork", {index: ids})
        return Fork(self._table.handles(rows[index]), copies)

    def reorder(self, rows: Sequence[Row], entries: Sequence[int]) -> Fork:
        """See `StateManager.reorder`.

        Args:
            rows: handles of the rows to continue.
            entries: for each new row, the entry of `rows` that it continues.
        """
        numbers = self._table.indices(rows)
        given = sequence("entries", entries, "reorder(rows, [0, 0, 1])")
        if not all(is_count(entry) and entry < len(numbers) for entry in given):
            raise InvalidArgument(
                f"entries {list(given)} of {len(numbers)} rows: expected numbers below {len(numbers)}"
            )
        order = [numbers[entry] for entry in given]
        chosen = Counter(order)
        gone = [row for row in numbers if row not in chosen]
        self._require_settled(chosen, gone)
        if turns := [row for row in gone if row in self._sessions.by_row]:
            raise InvalidArgument(
                f"rows {turns} are turns of sessions: end them with end(rows, keep='cache', tokens=[...]) first"
            )
        groups = {row: [self._table.ids[row]] * (times - 1) for row, times in chosen.items() if times > 1}
        forks, copies = self._fork("reorder", groups, gone)
        left = {row: [row, *forks.get(row, ())] for row in chosen}
        return Fork(self._table.handles([left[row].pop(0) for row in order]), copies)

    def _require_settled(self, rows: Iterable[int], ended: Iterable[int] = ()) -> None:
        """Raises an error unless the rows run and their last steps are settled. Rows in `ended` may have finished."""
        times = self._log.times(self._table)
        for index in (*rows, *ended):
            finished = self._table.finished[index] and index not in ended
            if times[index] or finished:
                raise InvalidArgument(
                    f"row {index} is {'finished' if finished else 'in an unsettled step'}: fork rows that run and "
                    "whose last step is settled or accepted"
                )

    def _fork(
        self, call: str, ids: Mapping[int, Sequence[Hashable]], gone: Sequence[int] = ()
    ) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:  # fmt: skip
        """Forks rows, and ends others, whose slots and pages the forks can use.

        Args:
            call: name of the public call.
            ids: row to fork -> ids of its forks, at least one.
            gone: the rows to end.

        Returns:
            The forks by the row that they are forked from, and the page copies to make.
        """
        origins = {row: self._file.origin(row) for row in ids}
        lengths = {row: self._file.length(row) for row in origins}
        kept, partial, moved = dict[int, int](), dict[int, int](), list[int]()
        for row, length in lengths.items():
            kept[row] = self._pages.count(self._pages.floor(length))
            partial[row] = self._pages.count(length) - kept[row]
            if partial[row] and self._commands.waiting:
                raise InvalidArgument(
                    f"row {row}: a page that it has filled in part is copied at once, and changes of owners wait for "
                    "the newest step's forward: launch it, say so with submit(step), then fork"
                )
            if self._direct_hits and not self._file.source[row]:
                moved.append(row)
        if len(moved) > self._holdings.free + self._room.states:
            raise InvalidArgument(
                "no register is free for the state that the rows share: drop a snapshot, or raise snapshots="
            )
        of = [row for row, names in ids.items() for _ in names]  # for each new row, the row that it is forked from
        slots, pages = self._left_by(gone)
        with self._guard.changing(call):
            lack = self._admission.make_room(
                max(0, len(of) - len(gone)), sum(partial[row] for row in of) - pages,
                self._admission.per_request * len(of) + len(moved) - slots,
            )  # fmt: skip
            if lack is not None:
                self._admission.refuse(call, lack)
                raise self._guard.orderly(lack)
            if gone:
                self._ending.free(gone, None, None, "ended")
            if not of:
                return {}, []
            for row in moved:
                origins[row] = self._share_live(row)
            shared = {row: self._pages.of(row) for row in ids}
            rows = self._table.claim([name for names in ids.values() for name in names])
            self._pages.start(rows, [shared[row][: kept[row]] for row in of], [partial[row] for row in of])
            tracked = {row: max(length, self._file.tracked_at[row]) for row, length in lengths.items()}
            self._admission.start(rows, [(origins[row], lengths[row], tracked[row], 0) for row in of], of)
            for row in of if self._direct_hits else ():
                self._holdings.begin_read(origins[row])
            forks, copies = {row: list[int]() for row in ids}, list[tuple[int, int]]()
            for row, new in zip(of, rows, strict=True):
                forks[row].append(new)
                if partial[row]:
                    copies.append((self._pages.of(new)[kept[row]], shared[row][kept[row]]))
            for row, others in forks.items():
                self._cache.fork(row, others, lengths[row])
            if copies:  # the caller copies at once, and a load is perhaps under way
                self._commands.prepare()
            return forks, copies

    def _left_by(self, rows: Sequence[int]) -> tuple[int, int]:
        """Returns how many slots and how many pages at least become free when these rows end."""
        held_at, source = self._file.held_at, self._file.source_at
        slots = sum(held_at[register] for row in rows for register in range(PER_ROW * row, PER_ROW * (row + 1)))
        slots += self._holdings.left_by(source[row] for row in rows)
        held = Counter(page for row in rows for page in self._pages.of(row))
        return slots, sum(self._pages.allocator.holders[page] == times for page, times in held.items())

    def _share_live(self, row: int) -> int:
        """Moves a row's state to a holder, from which the row and its forks read it in their next steps.

        Returns:
            The holder. Unless the state is at a mark, the holder is free again when each of these rows has planned its
            next step or has ended.
        """
        self._room.free_registers(1)
        if marks := self._marks.shared(row):
            self._marks.keep(marks)
            return int(self._file.source[row])
        live = [PER_ROW * row]
        state = self._holdings.move_in(live, LEAVING)[0]
        self._commands.claim(live)
        self._file.source[row] = state.register
        self._commands.write(self._file.address("source", [row]), [state.register])
        self._holdings.begin_read(state.register)
        return state.register
