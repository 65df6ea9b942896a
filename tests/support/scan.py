"""Checks the owners of slots and pages in the raw tensors with plain loops, without code of the library.

Row r owns registers 3r, 3r+1 and 3r+2. Bit s of the bitmap is set if slot s is free. Row 0, page 0 and slot 0 have no
owner.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from memstate import SlotAllocator, StateManager
from memstate.slots.registers import RegisterFile
from tests.support import inside, owners
from tests.support.packets import bits


@dataclass
class Found:
    """The result of a scan.

    free: free slots, ascending. slots: slot of each register that has a slot. labels: labels of the same registers.
    """

    free: list[int]
    slots: dict[int, int] = field(default_factory=dict)
    labels: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def scan(mem: StateManager, by_id: Iterable[int] = ()) -> Found:
    """Submits, and asserts that slots, rows and pages of the manager are consistent.

    Launch the forward of the newest step before. by_id: slots that the test has claimed.
    """
    mem.submit(mem._parts.stepping.open)
    scanned = scan_registers(inside.registers(mem), by_id, assert_clean=False)
    scanned.problems += row_problems(mem) + page_problems(mem)
    assert scanned.problems == []
    return scanned


def scan_registers(file: RegisterFile, by_id: Iterable[int] = (), *, assert_clean: bool = True) -> Found:
    """Asserts that bitmap, registers, slots by id and the host's mirror agree. Call `submit` before."""
    scanned = scan_bitmap(file.allocator, assert_clean=False)
    problems = scanned.problems
    slots, labels = file.table.slots.tolist(), file.table.labels.tolist()
    owners: dict[int, list[str]] = {}
    for register in range(len(slots)):
        if slots[register] != 0:
            owners.setdefault(slots[register], []).append(f"register {register}")
            scanned.slots[register], scanned.labels[register] = slots[register], labels[register]
        elif labels[register] != 0:
            problems.append(f"register {register} is empty and has label {labels[register]}")
        if bool(file.held[register]) != (slots[register] != 0):
            problems.append(f"register {register}: held={file.held[register]} on the host, slot {slots[register]}")
        if int(file.labels[register]) != labels[register]:
            problems.append(f"register {register}: label {file.labels[register]} on the host, {labels[register]}")
    problems += [f"register {r} of the null row holds slot {slots[r]}" for r in range(3) if slots[r] != 0]
    for slot in by_id:
        owners.setdefault(slot, []).append("the test")
    for group in file.allocator.open_groups:
        for slot in group.held.tolist():
            owners.setdefault(slot, []).append("an open group")
    problems += _ownership_problems(file.allocator.capacity, set(scanned.free), owners)
    if assert_clean:
        assert problems == []
    return scanned


def scan_bitmap(allocator: SlotAllocator, by_id: Iterable[int] | None = None, *, assert_clean: bool = True) -> Found:
    """Asserts that bits and both counts of free slots agree. by_id: if given, all slots that are not free."""
    free, problems = [], []
    words = allocator.bitmap.tolist()
    for index, word in enumerate(words[: allocator.capacity // 32 + 1]):
        for bit in range(32):
            if (word % 2**32) >> bit & 1:
                free.append(index * 32 + bit)
    if free and (free[0] == 0 or free[-1] > allocator.capacity):
        problems.append(f"a bit is set that is no slot: {free[0]}..{free[-1]} of {allocator.capacity}")
    if words != bits(free, allocator.capacity):
        problems.append("the bitmap's summary disagrees with it")
    counted = allocator.counters.tolist()[0]
    if not counted == allocator.free == len(free):
        problems.append(f"{len(free)} bits are set, the device counts {counted} and the host {allocator.free}")
    if by_id is not None:
        owners: dict[int, list[str]] = {}
        for slot in by_id:
            owners.setdefault(slot, []).append("the test")
        problems += _ownership_problems(allocator.capacity, set(free), owners)
    if assert_clean:
        assert problems == []
    return Found(free, problems=problems)


def _ownership_problems(capacity: int, free: set[int], owners: dict[int, list[str]]) -> list[str]:
    problems = []
    for slot in range(1, capacity + 1):
        names = owners.get(slot, [])
        if len(names) > 1:
            problems.append(f"slot {slot} has {len(names)} owners: {', '.join(names)}")
        if names and slot in free:
            problems.append(f"slot {slot} is free and owned by {names[0]}")
        if not names and slot not in free:
            problems.append(f"slot {slot} leaked")
    problems += [
        f"{names[0]} holds {slot}, which is no slot" for slot, names in owners.items() if not 0 < slot <= capacity
    ]
    return problems


def row_problems(mem: StateManager) -> list[str]:
    """Returns a line for each row with a wrong `tracked` or `source`, and for each unused row that holds something.

    `tracked` of an unused row is that of its last request: nobody reads it before the next request writes it.
    """
    problems = []
    file, table = inside.registers(mem), owners.table(mem)
    for name in ("tracked", "source"):
        device, host = getattr(file.table, name).tolist(), getattr(file, name).tolist()
        for row in range(table.rows + 1):
            if device[row] != host[row] or (name == "source" and device[row] != 0 and not table.used[row]):
                problems.append(f"{name} of row {row}: {device[row]}, {host[row]} on the host, used={table.used[row]}")
    for row in range(1, table.rows + 1):
        if not table.used[row] and file.held[3 * row : 3 * row + 3].any():
            problems.append(f"row {row} is not in use and holds a slot")
    if table.used[0]:
        problems.append("the null row is in use")
    return problems


def page_problems(mem: StateManager) -> list[str]:
    """Returns a line for each row with gaps, repetitions or wrong ids in its pages, and for a wrong count of pages."""
    problems = []
    referred = {page for snapshot in owners.states(mem).values() for page in snapshot.pages}
    total = owners.kv_pages(mem).pages
    for row, pages in enumerate(mem.device.page_table.tolist()):
        taken = [page for page in pages if page != 0]
        if pages[: len(taken)] != taken or len(set(taken)) != len(taken):
            problems.append(f"row {row} has gaps or repetitions in its pages: {pages}")
        if taken and not owners.table(mem).used[row]:
            problems.append(f"row {row} is not in use and has pages {taken}")
        if not all(0 < page <= total for page in taken):
            problems.append(f"row {row} has pages that do not exist: {taken}")
        referred |= set(taken)
    if mem.free_pages != total - len(referred):
        problems.append(f"{len(referred)} of {total} pages are referred to, {mem.free_pages} are free")
    return problems
