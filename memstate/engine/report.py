"""Reports what a manager holds: figures, the name of each slot's owner, and all of it as plain data."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from memstate.checks import shown, text
from memstate.engine.recount import Recount
from memstate.engine.verbs import Parts
from memstate.engine.world import Verbs
from memstate.errors import OutOfPages, OutOfRows, OutOfSlots
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix.lease import NO_MATCH
from memstate.requests.handles import RowInfo
from memstate.sheet import MOST_ROWS, Sheet, bar, figures, of_bytes, of_slots, section, sheet
from memstate.sizes import format_bytes
from memstate.slots.audit import AuditReport, audit
from memstate.slots.inspect import Inspection, behind, inspect
from memstate.stats import NO_CHAOS, NO_PREFIX, NO_TIERS, Stats

PER_ROW = REGISTERS_PER_ROW


def _longest(seconds: ArrayLike) -> float:
    """Returns the largest of some times in seconds, rounded to milliseconds; 0 for none."""
    return round(float(np.max(seconds, initial=0.0)), 3)


class Reports(Verbs):
    """Returns what a manager holds. It changes nothing, except that `audit` and `inspect` send recorded changes.

    Args:
        parts: the parts of the manager.
        recount: asks the owners what they hold.
    """

    def __init__(self, parts: Parts, recount: Recount) -> None:
        super().__init__(parts)
        self._world, self._admission, self._recount = parts, parts.admission, recount

    def info(self, row: int) -> RowInfo:
        """See `StateManager.info`.

        Args:
            row: number of the row.
        """
        file, marks, every = self._file, self._marks, self._mirror.tracking.every
        length = file.length(row)
        boundary = (max(length, file.tracked_at[row]) // every + 1) * every
        if mark := marks.next(row, length):
            boundary = min(mark, boundary)
        slots = sum(file.held_at[PER_ROW * row : PER_ROW * (row + 1)]) + len(marks.kept.get(row, ()))
        match = lease.match if (lease := self._cache.leases.get(row)) else NO_MATCH
        missed = "evicted" if match.known_length > match.kv_length else match.reason
        missed = missed if self._pages.floor(match.tokens - 1) > match.length else ""
        return RowInfo(length, int(self._table.confirmed_at[row]), boundary, slots, file.pending_at[row], missed)

    def chunk(self, row: int, most: int) -> int:
        """See `StateManager.chunk`.

        Args:
            row: number of the row.
            most: largest number of tokens of the chunk.
        """
        file = self._file
        length, prompt = file.length(row), file.tracked_at[row]
        if length >= prompt:
            return most
        return self._marks.chunk(row, length, min(length + most, prompt), prompt) - length

    def stats(self) -> Stats:
        """See `StateManager.stats`."""
        held, rows_end = self._file.held, self._file.first_holder
        live = int(held[:rows_end:PER_ROW].sum())
        asked, traffic = self._world.backend.counts, self._planes.traffic
        now = self._table.clock()
        (ages, idle), used = self._world.ages.look(now), self._table.used
        session_age, session_idle = self._sessions.ages(now)
        return Stats(
            capacity=self._file.allocator.capacity,
            free=self._file.allocator.free,
            held_by_live=live,
            held_by_lanes=int(held[:rows_end].sum()) - live,
            held_by_snapshots=int(held[rows_end:].sum()) - self._sessions.held,
            held_by_sessions=self._sessions.held,
            held_by_marks=len(self._holdings.held["mark"]),
            rows=self._table.rows,
            rows_used=self._table.rows - self._table.free,
            oldest_row=_longest(ages[used]),
            idlest_row=_longest(idle[used]),
            pages=self._pages.allocator.pages,
            pages_free=self._pages.allocator.free,
            sessions=len(self._sessions.opened),
            sessions_emptied=self._sessions.emptied,
            sessions_parted=self._sessions.parted,
            oldest_session=_longest([session_age]),
            idlest_session=_longest([session_idle]),
            claimed=self._file.allocator.claimed,
            short_of_slots=self._admission.lacks[OutOfSlots],
            short_of_rows=self._admission.lacks[OutOfRows],
            short_of_pages=self._admission.lacks[OutOfPages],
            snapshots=self._mirror.snapshots,
            degraded=self._mirror.degraded,
            published=self._holdings.published,
            dropped=self._holdings.dropped,
            refused=self._holdings.refused + self._sessions.refused + self._marks.refused,
            missed=self._marks.missed,
            copied_bytes=traffic.copied,
            zeroed_bytes=traffic.zeroed,
            packets=self._commands.packets,
            uploads=asked.uploads,
            upload_bytes=asked.upload_bytes,
            upload_waits=self._commands.ring.waits,
            launches=asked.total_launches,
            syncs=asked.syncs,
            prefix=self._world.prefix.stats() if self._world.prefix is not None else NO_PREFIX,
            tiers=self._tiers.stats() if self._tiers is not None else NO_TIERS,
            chaos=self._world.chaos() if self._world.chaos is not None else NO_CHAOS,
        )

    def audit(self) -> AuditReport:
        """See `StateManager.audit`."""
        return self._look()[1]

    def inspect(self) -> Inspection:
        """See `StateManager.inspect`."""
        seen, report = self._look()
        return replace(seen, faults=report.faults)

    def _look(self) -> tuple[Inspection, AuditReport]:
        with self._guard.changing("audit"):
            self._commands.submit()
        names, journal = self.owners(), self._commands.journal
        tags = {
            register: f"@{self._file.labels[register]}"
            if register >= self._file.first_holder
            else text(self._table.ids[register // PER_ROW])
            for register in names
        }
        rows = self._running(np.flatnonzero(self._table.used).tolist())
        read = behind(self._file, self._commands.waiting)
        for row in self._file.undecided:  # only the device knows which registers of this row hold slots
            for register in range(PER_ROW * row, PER_ROW * (row + 1)):
                names.pop(register, None)
                if read.table.slots[register]:
                    names[register] = self.owner(register)
        seen = inspect(
            self._file, names, tags, read, rows=rows, prefix=self._cache.inspect(),
            sessions=self._sessions.inspect(), changes=list(map(asdict, journal.changes if journal else ())),
            stats=asdict(self.stats()), layout=self._described(),
        )  # fmt: skip
        return seen, audit(seen, names, self._recount.miscounts(seen, names, read))

    def _running(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Returns running requests as plain data, from the host's counts."""
        (ages, idle), unsettled = self._world.ages.look(self._table.clock()), self._log.times(self._table)
        return [
            {
                "row": row,
                "id": text(self._table.ids[row]),
                "length": self._file.length(row),
                "confirmed": int(self._table.confirmed[row]),
                "finished": bool(self._table.finished[row]),
                "unsettled": int(unsettled[row]),
                "age": round(float(ages[row]), 3),
                "idle": round(float(idle[row]), 3),
            }
            for row in rows
        ]

    def sheet(self, title: str) -> Sheet:
        """Returns the sheet of the manager, from the host's counts. Works at any time.

        Args:
            title: title of the sheet, one line.
        """
        file, stats, planes = self._file, self.stats(), self._planes
        layout, tables = planes.layout, file.nbytes + planes.plane_map.tiles.nbytes
        of_rows = planes.rows.nbytes if planes.rows is not None else 0
        held = (np.flatnonzero(file.held[file.first_holder :]) + file.first_holder).tolist()
        kinds = Counter(self.owner(register)[0] for register in held)
        slots = {"live": stats.held_by_live, "lane": stats.held_by_lanes, "free": stats.free, **kinds}
        slots["by id"] = max(0, stats.capacity - sum(slots.values()))
        payload, null = layout.payload_bytes_per_slot, planes.nbytes // (stats.capacity + 1)
        memory = [
            of_bytes("used", (stats.capacity - stats.free) * payload, "used"),
            of_bytes("free", stats.free * payload, "free"),
            of_bytes("padding", max(0, planes.nbytes - null - stats.capacity * payload), "padding"),
            of_bytes("null slot", null, "null slot"),
            of_bytes("tables", tables, "tables"),
            *([of_bytes("rows", of_rows, "plane 2")] if planes.rows is not None else ()),
        ]
        notes = []
        if planes.asleep:
            notes.append("The states sleep: their memory is released.")
        if self._guard.call:
            notes.append(f"A call of {self._guard.call} was interrupted: call recover().")
        each, whole = layout.bytes_per_slot, format_bytes(planes.nbytes + of_rows + tables)
        bars = [
            bar(f"{stats.capacity:,} slots of {format_bytes(each)}", of_slots(slots, each)),
            bar(f"{whole} of states and tables on {planes.device}", memory),
        ]
        requests = [
            (row["row"], row["id"], f"{row['length']:,}", f"{row['confirmed']:,}", row["unsettled"],
             int(file.held[PER_ROW * row["row"] : PER_ROW * (row["row"] + 1)].sum()))
            for row in self._running(np.flatnonzero(self._table.used)[:MOST_ROWS].tolist())
        ]  # fmt: skip
        sessions = [
            (one["id"], f"{one['tokens']:,}", ", ".join(f"{length:,}" for _, length in one["states"][:4]),
             one["row"] or "", one["pages"])
            for one in self._sessions.inspect(MOST_ROWS)
        ]  # fmt: skip
        sections = [
            section("requests", ("row", "request", "tokens", "confirmed", "unsettled", "slots"), requests,
                    stats.rows_used),
            section("sessions", ("session", "tokens", "states at", "row", "KV pages"), sessions,
                    len(self._sessions.opened)),
        ]  # fmt: skip
        stats.add_parts(bars, sections)
        sections.append(figures("counters", stats))
        return sheet(title, bars, sections, notes=notes)

    def _described(self) -> dict[str, Any]:
        """Returns the layout as plain data. Payload and padding are in bytes, for one layer of one slot."""
        layout = self._planes.layout
        planes = [
            {
                "name": prefix + plane.name,
                "shape": list(plane.shape),
                "dtype": str(plane.dtype).removeprefix("torch."),
                "payload": plane.nbytes,
                "padding": one.block_bytes(plane) - plane.nbytes,
                "layers": one.layers_of(plane),
            }
            for prefix, one in (("", layout), ("rows.", layout.rows))
            if one is not None
            for plane in one.planes
        ]
        return {
            "order": layout.order,
            "layers": layout.layers,
            "bytes_per_slot": layout.bytes_per_slot,
            "page_size": self._pages.page_size,
            "planes": planes,
        }

    def owners(self) -> dict[int, tuple[str, str]]:
        """Returns the owner of each register that holds a slot: register -> (kind, name).

        Syncs: no.
        """
        return {register: self.owner(register) for register in np.flatnonzero(self._file.held).tolist()}

    def owner(self, register: int) -> tuple[str, str]:
        """Returns the owner of a register as (kind, name).

        The kinds are live, lane, cached, session, mark and snapshot.

        Args:
            register: number of the register.

        Syncs: no.
        """
        if register < self._file.first_holder:
            row, part = divmod(register, PER_ROW)
            what = ("live", "lane 0", "lane 1")[part]
            return what.split()[0], f"row {row} (request {shown(self._table.ids[row])}) {what}"
        kind = self._holdings.kind(register)
        return kind if kind in ("cached", "session", "mark") else "snapshot", self._recount.named(register)
