"""Moves snapshots from rows to holders, and gives them up again. Executes what the mirror answers; decides nothing."""

from collections.abc import Sequence

from memstate.checks import sequence
from memstate.errors import InvalidArgument
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Holders, Snapshot
from memstate.requests.table import first_generation
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs


class Publisher:
    """Snapshots between rows and whoever keeps their handles, with the KV pages they share.

    published, dropped, refused: since the start; refused for want of a holder register.
    """

    def __init__(self, commands: CommandBuffer, pages: PageTable, mirror: Mirror) -> None:
        self.holders = Holders(commands.registers.first_holder, commands.registers.holders, first_generation())
        self.published = self.dropped = self.refused = 0
        self._commands, self._pages, self._mirror = commands, pages, mirror
        self._first_reads: dict[int, int] = {}  # row -> holder register that its first step reads

    def reset(self) -> None:
        """Forgets every snapshot."""
        self.holders.reset()
        self._first_reads = {}

    def publish(self, rows: Longs, known: Longs, ended: bool) -> list[Snapshot | None]:
        """Moves the newest snapshot within `known` tokens out of each row; live as well where the rows have ended."""
        snapshots: list[Snapshot | None] = []
        sources = []
        for row, bound in zip(rows.tolist(), known.tolist(), strict=True):
            answer = self.answer(row, bound, ended)
            if answer is None or not self.holders.free:
                self.refused += answer is not None
                snapshots.append(None)
                continue
            length = int(self._commands.registers.labels[answer])
            snapshots.append(self.holders.keep(length, self._pages.share(row, length)))
            sources.append(answer)
        self._commands.move([snap.register for snap in snapshots if snap], sources)
        self.published += len(sources)
        return snapshots

    def require_answers(self, rows: Longs, known: Longs) -> None:
        """Raises: InvalidArgument where a running row has nothing to publish, or no holder is left for it."""
        if len(rows) > self.holders.free:
            raise InvalidArgument(f"{len(rows)} snapshots to publish, {self.holders.free} holders free: drop some")
        bounds = zip(rows.tolist(), known.tolist(), strict=True)
        missing = [row for row, bound in bounds if self.answer(row, bound, ended=False) is None]
        if missing:
            raise InvalidArgument(
                f"rows {missing} have no snapshot to publish: none was due yet, or it was published before"
            )

    def answer(self, row: int, known: int, ended: bool) -> int | None:
        """The register with the newest snapshot within `known` tokens.

        A snapshot shares whole KV pages, so that it stands for whole pages only.
        """
        return self._mirror.answer(row, self._pages.floor(known), ended)

    def hold(self, register: int, length: int) -> Snapshot:
        """Moves a state to a holder for those who are about to read it: it goes with the last pin, and shares no page.
        Only where a holder is free.
        """
        snapshot = self.holders.keep(length, ())
        self._commands.move([snapshot.register], [register])
        return snapshot

    def drop(self, snapshots: Sequence[Snapshot]) -> None:
        """Gives up snapshots, once nobody is about to read them. Raises: StaleHandle, InvalidArgument."""
        self.holders.require(sequence("snapshots", snapshots, "[snapshot]"))
        if len(set(snapshots)) != len(snapshots):
            raise InvalidArgument("a snapshot is named twice")
        self._free([done for snap in snapshots if (done := self.holders.drop(snap))])
        self.dropped += len(snapshots)

    def pin(self, row: int, register: int) -> None:
        """Keeps a holder until the row's first step, which reads it, is planned or the row is given up."""
        self.holders.pin(register)
        self._first_reads[row] = register

    def unpin(self, rows: Longs) -> None:
        """Ends the pins of rows, where they have one."""
        for row in self._first_reads.keys() & set(rows.tolist()):
            if dropped := self.holders.unpin(self._first_reads.pop(row)):
                self._free([dropped])

    def _free(self, snapshots: Sequence[Snapshot]) -> None:
        self._commands.release([snap.register for snap in snapshots])
        for snap in snapshots:
            self._pages.allocator.release(snap.pages)
