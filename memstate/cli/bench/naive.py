"""Small stand-ins for how slots are kept without batching: plain torch operations, request by request.

They do no less than the work that they are compared with: the same slots change owners. Each torch operation here is
one launch on a GPU; views are free. Knows no kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LANES = 2


class FreeList:
    """Free slots in a tensor: a claim is a slice of it, a release a new tensor."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.free = torch.arange(1, slots + 1, device=device)

    def claim(self, n: int) -> Tensor:
        """Returns the next n slots. Launches: none."""
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def release(self, ids: Tensor) -> None:
        """Appends slots to the list. Launches: one."""
        self.free = torch.cat((self.free, ids))


class RowByRow:
    """Rows with a live slot and two lanes, whose snapshots alternate: the ping-pong strategy, a row at a time."""

    def __init__(self, rows: int, slots: int, every: int, device: torch.device) -> None:
        self.list, self.every, self.device = FreeList(slots, device), every, device
        self.live = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.lanes = torch.zeros(rows + 1, LANES, dtype=torch.long, device=device)
        self.labels = torch.zeros(rows + 1, LANES, dtype=torch.long, device=device)
        self.snapshot = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.snapshot_at = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.fresh = torch.zeros(rows + 1, dtype=torch.bool, device=device)
        self.length: dict[int, int] = {}
        self.turn: dict[int, int] = {}

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows).to(self.device, non_blocking=True)

    def admit(self, rows: Sequence[int]) -> None:
        """Admits rows. Launches: 2 a row, and 5."""
        n = len(rows)
        taken = self.list.claim((1 + LANES) * n)
        live, lanes = taken[:n], taken[n:].view(n, LANES)
        index = self._index(rows)
        for i, row in enumerate(rows):
            self.live[row] = live[i]
            self.lanes[row] = lanes[i]
            self.length[row] = self.turn[row] = 0
        self.labels.index_fill_(0, index, 0)
        self.snapshot.index_fill_(0, index, 0)
        self.snapshot_at.index_fill_(0, index, 0)
        self.fresh.index_fill_(0, index, True)

    def step(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the slots that a decode step writes, and those of snapshots. Launches: 4, and 3 a row due."""
        index = self._index(rows)
        self.snapshot.zero_()
        for row in rows:
            self.length[row] += 1
            if self.length[row] % self.every == 0:
                lane = self.turn[row]
                self.snapshot[row] = self.lanes[row, lane]
                self.labels[row, lane].fill_(self.length[row])
                self.snapshot_at[row].fill_(self.length[row] + self.every)
                self.turn[row] = 1 - lane
        return self.live.index_select(0, index), self.snapshot.index_select(0, index)

    def publish(self, rows: Sequence[int]) -> list[Tensor]:
        """Takes the newest snapshot out of each row, and gives the row another slot. Launches: 3 a row."""
        kept = []
        for row in rows:
            lane = 1 - self.turn[row]
            kept.append(self.lanes[row, lane].clone())
            self.lanes[row, lane] = self.list.claim(1)[0]
            self.labels[row, lane].fill_(0)
        return kept

    def release(self, rows: Sequence[int]) -> None:
        """Releases rows. Launches: 2 a row."""
        for row in rows:
            self.list.free = torch.cat((self.list.free, self.live[row : row + 1], self.lanes[row]))
            self.live[row].fill_(0)
            del self.length[row], self.turn[row]

    def drop(self, kept: Sequence[Tensor]) -> None:
        """Releases snapshots. Launches: 2."""
        if kept:
            self.list.release(torch.stack(list(kept)))
