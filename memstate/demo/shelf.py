"""Published snapshots by exact token prefix: a small stand-in for a prefix cache. Knows no slot and no step."""

from collections import OrderedDict
from collections.abc import Sequence

from memstate.demo.transcript import Witness
from memstate.engine import StateManager
from memstate.holders import Snapshot


class Shelf:
    """Prefix -> snapshot, least recently used first; a token is a byte, so a prefix is its own key, and exact."""

    def __init__(self, mem: StateManager, witness: Witness) -> None:
        self.mem, self.witness = mem, witness
        self.entries: OrderedDict[bytes, Snapshot] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> Snapshot | None:
        """The snapshot of the longest known prefix that leaves a token to compute; refreshes that one only."""
        lengths = {snapshot.length for snapshot in self.entries.values()}
        for length in sorted((n for n in lengths if n < len(tokens)), reverse=True):
            key = bytes(tokens[:length])
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key]
        return None

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether there is a snapshot for exactly these tokens."""
        return bytes(tokens) in self.entries

    def put(self, conversation: int, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Keeps a snapshot just published for the start of these tokens; drops it where there is one already."""
        self.witness.watch(conversation, snapshot)
        key = bytes(tokens[: snapshot.length])
        if key in self.entries:
            self._drop([snapshot])
            return
        self.entries[key] = snapshot
        if not self.mem.holders.free:  # the next one will need a register
            self.drop_oldest(1)

    def drop_oldest(self, count: int) -> int:
        """Drops up to `count` snapshots, least recently used first; returns how many."""
        taken = [self.entries.popitem(last=False)[1] for _ in range(min(count, len(self.entries)))]
        if taken:
            self._drop(taken)
        return len(taken)

    def _drop(self, snapshots: list[Snapshot]) -> None:
        self.witness.look_now()
        self.mem.drop(snapshots)
