"""A picture of who owns what, as plain data: taken once, looked at as often as wanted, also without a device. Reads all
layers.
"""

from dataclasses import dataclass, field

import numpy as np

from memstate.kernels.tables import AUDIT_FREE
from memstate.registers import RegisterFile


@dataclass(frozen=True)
class Picture:
    """Every slot's owners at one moment.

    owners: registers that hold each slot, `slot`. free: whether the bitmap says free, `slot`. slots, labels:
    `register`.
    names: who owns a register, for the registers that are filled; tags: the same in a few letters, where there is such.
    in_hand: slots held by open claim groups.
    """

    capacity: int
    owners: list[int]
    free: list[bool]
    slots: list[int]
    labels: list[int]
    names: dict[int, str]
    kinds: dict[int, str]
    in_hand: list[int] = field(default_factory=list)
    tags: dict[int, str] = field(default_factory=dict)


def take(file: RegisterFile, name: dict[int, tuple[str, str]], tags: dict[int, str] | None = None) -> Picture:
    """Reads bitmap, registers and the device's audit back in one go. Syncs: yes, three small copies after one launch.

    name: register -> (kind, owner) for every register that has an owner by name. tags: register -> a short name.
    """
    owners = file.owners()
    file.backend.counts.syncs += 1
    status = owners.cpu().numpy()
    slots, labels = file.table.slots.tolist(), file.table.labels.tolist()
    in_hand = [int(slot) for group in file.allocator.open_groups for slot in group.held.tolist()]
    filled = [register for register, slot in enumerate(slots) if slot]
    return Picture(
        capacity=file.allocator.capacity,
        owners=(status & (AUDIT_FREE - 1)).tolist(),
        free=((status & AUDIT_FREE) != 0).tolist(),
        slots=slots,
        labels=labels,
        names={register: name.get(register, ("unknown", f"register {register}"))[1] for register in filled},
        kinds={register: name.get(register, ("unknown", ""))[0] for register in filled},
        in_hand=np.unique(in_hand).tolist() if in_hand else [],
        tags={register: tag for register, tag in (tags or {}).items() if slots[register]},
    )
