"""Reads and changes private parts of the manager, to compare states and to plant faults.

All other modules of the demo use only public calls.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Row, Session, Snapshot
from memstate.tokens import SaltedTokens, encode


def live_register(row: Row) -> int:
    """Returns the register that holds a row's live state."""
    return REGISTERS_PER_ROW * row.index


def state_register(mem: StateManager, row: Row) -> int:
    """Returns the register with a row's state on the device: the live one, or the one that the row continues from.

    Syncs: yes.
    """
    return int(mem._parts.registers.table.source[row.index]) or live_register(row)


def slot_and_label(mem: StateManager, register: int) -> tuple[int, int]:
    """Returns the slot that a register holds on the device, and its label.

    Syncs: yes.
    """
    table = mem._parts.registers.table
    return int(table.slots[register]), int(table.labels[register])


def empty_register(mem: StateManager, register: int) -> int:
    """Empties a register without releasing its slot: a leak. Returns the slot.

    Syncs: yes.
    """
    slot, _ = slot_and_label(mem, register)
    mem._parts.registers.table.slots[register] = 0
    return slot


def waits(mem: StateManager) -> bool:
    """Returns whether changes of owners wait for a forward."""
    return bool(mem._parts.commands.waiting)


def states(mem: StateManager) -> list[Snapshot]:
    """Returns the states that have an owner and a valid handle."""
    return list(mem._parts.holdings.of("snapshot", "cached", "session", "mark"))


def exists(mem: StateManager, snapshot: Snapshot) -> bool:
    """Returns whether a state still has an owner."""
    return mem._parts.holdings.has(snapshot)


def session_snapshots(mem: StateManager, session: Session) -> list[Snapshot]:
    """Returns the states that a session keeps now."""
    return list(mem._parts.sessions.opened[session].kept)


def session_hit(mem: StateManager, session: Session, tokens: Sequence[int]) -> tuple[int, int]:
    """Returns length and register of the state that a session has for a prompt; zeros if it has none."""
    hit = mem._parts.sessions.find(mem._parts.sessions.get(session), SaltedTokens(encode(tokens), None))
    return (hit.length, hit.states[0].register) if hit.length else (0, 0)


def state_bytes(planes: Mapping[str, Tensor | Sequence[Tensor]], slot: int) -> bytes:
    """Returns every byte of one slot, without padding.

    Syncs: yes.
    """
    parts = [layer[slot].reshape(-1).view(torch.uint8) for plane in planes.values() for layer in plane]
    return torch.cat(parts).cpu().numpy().tobytes()


def write_state(mem: StateManager, slot: int, data: bytes) -> None:
    """Overwrites every byte of a slot with the bytes that `state_bytes` returned."""
    values, at = np.frombuffer(data, np.uint8), 0
    for target in (layer[slot] for plane in mem.planes.values() for layer in plane):
        size = target.numel() * target.element_size()
        part = torch.from_numpy(values[at : at + size].copy()).view(target.dtype).reshape(target.shape)
        target.copy_(part)
        at += size
