"""Keeps the last changes of owners, to find the cause of a fault. Without `journal=`, a manager has no journal."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from weakref import WeakMethod

from memstate.slots.registers import RegisterFile

Owner = Callable[[int], tuple[str, str]]


@dataclass(frozen=True)
class Change:
    """One register's change of owner, as the host recorded it.

    Args:
        serial: number of the change.
        submit: number of the packet that carries out the change. If a plan made the change, the number of the packet
            before its launch.
        what: `claim`, `release` or `move`; or `plan`, if the launch of a plan filled the register.
        register: number of the register; for a move, of the target register.
        kind: kind of `owner`: live, lane, cached, session, mark or snapshot.
        owner: name of the register's owner at the time of the change.
        label: length of the register's state in tokens.
        source: source register of a move, otherwise 0.
        source_owner: name of the source register's owner.
    """

    serial: int
    submit: int
    what: str
    register: int
    kind: str
    owner: str
    label: int
    source: int = 0
    source_owner: str = ""

    def __str__(self) -> str:
        of = f" from {self.source_owner}" if self.source else ""
        return f"#{self.serial} (packet {self.submit}) {self.what}: {self.owner}{of}, {self.label} tokens"


class Journal:
    """Keeps the last changes of owners.

    Args:
        size: number of changes to keep.
        registers: the register file.
        owner: bound method that returns the owner (kind, name) of a register. The journal keeps a weak reference to it.
    """

    def __init__(self, size: int, registers: RegisterFile, owner: Owner) -> None:
        self._changes: deque[Change] = deque(maxlen=size)
        self._file, self._owner_now = registers, WeakMethod(owner)
        self._serial = 0

    @property
    def changes(self) -> list[Change]:
        """The last changes of owners, oldest first."""
        return list(self._changes)

    def note(self, what: str, submit: int, registers: Sequence[int], sources: Sequence[int] = ()) -> None:
        """Notes changes that the command buffer records.

        The command buffer calls it before the mirror changes for releases, and after that for claims and moves.
        """
        for register, source in zip(registers, sources or repeat(0), strict=False):
            of = self._owner(source)[1] if source else ""
            label = int(self._file.labels[register])
            self._serial += 1
            kind, owner = self._owner(register)
            self._changes.append(Change(self._serial, submit, what, register, kind, owner, label, source, of))

    def _owner(self, register: int) -> tuple[str, str]:
        owner = self._owner_now()
        return owner(register) if owner else ("unknown", f"register {register}")
