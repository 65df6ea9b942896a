"""Ends rows. Their snapshots, states and pages get new owners or become free.

Snapshots are returned as handles or go to the prefix cache. The states of turns go to their sessions. Everything else
becomes free. This module calls the parts that own slots and pages. It makes no decision and does not know steps.
"""

from collections.abc import Sequence

import numpy as np

from memstate.checks import sequence
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import PrefixCache
from memstate.prefix.lease import Insertion
from memstate.prefix.sessions import Sessions
from memstate.requests.boundaries import Boundaries
from memstate.requests.handles import Snapshot
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.requests.table import RequestTable
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs
from memstate.tokens import BYTES, Tokens, encode

PER_ROW = REGISTERS_PER_ROW


class Ending:
    """Publishes snapshots of rows, and ends rows."""

    def __init__(
        self, commands: CommandBuffer, table: RequestTable, pages: PageTable, snapshots: Snapshots,
        cache: PrefixCache, sessions: Sessions, boundaries: Boundaries,
    ) -> None:  # fmt: skip
        self._commands, self._file, self._table = commands, commands.registers, table
        self._pages, self._snapshots, self._cache = pages, snapshots, cache
        self._sessions, self._boundaries = sessions, boundaries

    def keys(self, tokens: Sequence[Tokens | None] | None, rows: Longs) -> list[bytes] | None:
        """Encodes the tokens of each row as a key. Checks that they agree with the row's prompt as far as both go.

        Args:
            tokens: one sequence for each row, or None.
            rows: the row numbers. An entry of row 0 needs no tokens.

        Returns:
            One key for each row; None if `tokens` is None.

        Raises:
            InvalidArgument: a row has no tokens, or its tokens differ from its prompt.
            ConfigurationError: a row is not a turn of a session, and there is no prefix cache.
        """
        if tokens is None:
            return None
        if len(sequence("token sequences", tokens, "tokens=[[1, 2, 3]], one per row")) != len(rows):
            raise InvalidArgument(f"tokens of {len(tokens)} rows, expected {len(rows)}: one sequence per row")
        if not self._cache.enabled and not all(row in self._sessions.by_row for row in rows.tolist() if row):
            raise ConfigurationError(
                "tokens are for a prefix cache: build the manager with prefix=ms.Prefix(), or publish without tokens"
            )
        keys = []
        for row, given in zip(rows.tolist(), tokens, strict=True):
            if row and given is None:
                raise InvalidArgument(
                    f"row {row}: tokens are None; all that is known of the request, or no tokens= at all"
                )
            keys.append(encode(given) if row and given is not None else b"")
            if row:
                self._require_continued(row, keys[-1])
        return keys

    def _require_continued(self, row: int, key: bytes) -> None:
        """Requires that the row's prompt begins with the tokens, or the tokens with the prompt.

        Otherwise later requests would match a wrong state.
        """
        lease = self._cache.leases.get(row)
        if lease and not (key.startswith(lease.key) or lease.key.startswith(key)):
            raise InvalidArgument(
                f"row {row} (request {self._table.ids[row]!r}): the tokens are not those of its prompt: hand over "
                "all of them, from the first on"
            )
        if row in self._sessions.by_row:
            self._sessions.require_continued(row, key)

    def publish(
        self, rows: Longs, known: Longs, keys: Sequence[bytes] | None, ended: bool = False
    ) -> list[Snapshot | None]:
        """Moves the newest snapshot of each row to the prefix cache. Without keys, moves it to a holder.

        Args:
            rows: the row numbers.
            known: the confirmed length of each row. No published snapshot is longer.
            keys: one key for each row. If None, handles are returned.
            ended: whether the rows have ended. If so, their live states count as snapshots.

        Returns:
            One snapshot for each row, or None.
        """
        if keys is None:
            return self._snapshots.publish(rows, known, ended)
        if not self._cache.enabled:
            return [None] * len(rows)
        known = np.minimum(known, [len(key) // BYTES for key in keys])
        return self._cache.insert(
            [
                self._insertion(row, n, key, ended)
                for row, n, key in zip(rows.tolist(), known.tolist(), keys, strict=True)
            ]
        )

    def _insertion(self, row: int, known: int, key: bytes, ended: bool) -> Insertion:
        length = self._pages.floor(known)
        kept = ended and row in self._sessions.by_row  # its states go to the session
        answer = None if kept else self._snapshots.answer(row, length, ended)
        pages = self._pages.of(row)[: length // self._pages.page_size]
        label = int(self._file.labels[answer]) if answer is not None else 0
        return Insertion(self._cache.leases[row], key[: length * BYTES], pages, answer, label, ended)

    def require_sessions_told(self, rows: Longs) -> None:
        """Refuses rows that are turns of sessions, because the caller gave no tokens for them.

        Raises:
            InvalidArgument: a row is a turn of a session.
        """
        turns = [row for row in rows.tolist() if row in self._sessions.by_row]
        if turns:
            raise InvalidArgument(f"rows {turns} are turns of sessions: give tokens=[...], so that the next turn fits")

    def end(self, rows: Longs, known: Longs | None, keys: Sequence[bytes] | None, how: str) -> list[Snapshot | None]:
        """Ends rows and frees what they hold.

        Args:
            rows: the row numbers.
            known: the confirmed length of each row. None: nothing is kept, and turns are aborted.
            keys: one key for each row, or None.
            how: how the rows ended, such as "released". Errors of stale handles show this word.

        Returns:
            One snapshot for each row, or None.
        """
        snapshots: list[Snapshot | None] = [None] * len(rows)
        if known is not None:
            snapshots = self.publish(rows, known, keys, ended=True)
        self._snapshots.first_steps_done(rows)
        for at, row in enumerate(rows.tolist()) if self._sessions.by_row else ():
            if row in self._sessions.by_row:
                real = int((self._table.confirmed[rows] if known is None else known)[at])
                self._end_turn(row, real, keys[at] if keys is not None else None)
        self._commands.release((rows[:, None] * PER_ROW + np.arange(PER_ROW)).reshape(-1))
        self._cache.end(rows.tolist())
        self._pages.end(rows)
        self._boundaries.end(rows)
        self._table.release(rows, how)
        file = self._file
        file.tracked[rows] = file.snapshot_at[rows] = file.source[rows] = 0
        cells = np.concatenate([file.address(column, rows) for column in ("tracked", "snapshot_at", "source")])
        self._commands.write(cells, np.zeros(len(cells), np.int64))
        return snapshots

    def _end_turn(self, row: int, known: int, key: bytes | None) -> None:
        lease = self._cache.leases.get(row)
        if self._sessions.end(row, known, key, lease, self._cache):
            del self._cache.leases[row]
