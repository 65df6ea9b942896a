"""All errors of memstate. Each carries the numbers and says what the caller can do.

A call that raises such an error has changed nothing, except in the cases that docs/promises.md names.
"""

from typing import Any

import memstate.alone  # noqa: F401, refuses a folder shared with another package


class MemstateError(Exception):
    """Base of all errors that memstate raises on purpose. They can be pickled and sent to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, dict(self.__dict__))


def _remade(kind: type[MemstateError], args: tuple[Any, ...], attributes: dict[str, Any]) -> MemstateError:
    """Returns an error with the arguments and attributes that pickle kept."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InvalidArgument(MemstateError, ValueError):
    """An argument has a value that is not allowed; nothing was changed."""


class ConfigurationError(MemstateError, ValueError):
    """Settings are wrong or do not fit each other; the constructor refuses them and says why."""


class UnsafeFolder(ConfigurationError):
    """A folder for records is a link, or other users could change it; nothing was written there."""

    def __init__(self, path: str, why: str, mode: int, owner: int) -> None:
        self.path, self.why, self.mode, self.owner = path, why, mode, owner
        super().__init__(f"file store in {path}: mode {mode:#o}, owner {owner}, is {why}")


class LayoutMismatch(MemstateError, ValueError):
    """A tensor or a plane does not have the shape, dtype or strides that the layout says."""


def _never(too_many: bool, there_are: str, wait: str) -> str:
    """Returns advice for a caller: the text `wait`, or, if `too_many`, that waiting cannot help."""
    return f"{there_are}, so waiting cannot help: ask for less at a time" if too_many else wait


class OutOfSlots(MemstateError):
    """Back-pressure: not enough free slots; nothing was claimed.

    Args:
        requested: number of slots asked for.
        free: number of free slots.
        evictable: number of slots of snapshots that can be evicted.
        capacity: number of all slots, None if the caller does not know it.
        in_sessions: number of slots that idle sessions hold. Even these are not enough.
        waiting: number of slots that become free once the newest step's forward has run.

    Example:
        >>> from memstate import Backend, OutOfSlots, SlotAllocator
        >>> try:
        ...     SlotAllocator(4, Backend("reference")).claim(5)
        ... except OutOfSlots as error:
        ...     error.requested, error.free
        (5, 4)
    """

    def __init__(
        self, requested: int, free: int, evictable: int = 0, capacity: int | None = None, in_sessions: int = 0,
        waiting: int = 0,
    ) -> None:  # fmt: skip
        self.requested, self.free, self.evictable, self.capacity = requested, free, evictable, capacity
        self.in_sessions, self.waiting = in_sessions, waiting
        wait = "drop snapshots or wait for a request to end" if evictable else "wait for a request to end, or end one"
        wait += f"; {waiting} come free behind the newest step's forward: submit(step)" if waiting else ""
        hint = _never(capacity is not None and requested > capacity, f"there are {capacity}", wait)
        super().__init__(f"{requested} slots requested, {free} free, {evictable} held by snapshots: {hint}")


class OutOfRows(MemstateError):
    """Back-pressure: the request table is full; nothing was changed."""

    def __init__(self, requested: int, free: int, rows: int) -> None:
        self.requested, self.free, self.rows = requested, free, rows
        hint = _never(requested > rows, f"there are {rows}", "wait for a request to end")
        super().__init__(f"{requested} rows requested, {free} of {rows} free: {hint}")


class OutOfPages(MemstateError):
    """Back-pressure: not enough KV pages; nothing was changed."""

    def __init__(self, requested: int, free: int, pages: int) -> None:
        self.requested, self.free, self.pages = requested, free, pages
        wait = "drop snapshots, wait for a request to end, or end one"
        hint = _never(requested > pages, f"there are {pages}", wait)
        super().__init__(f"{requested} KV pages requested, {free} of {pages} free: {hint}")


class OutOfRecords(MemstateError):
    """Back-pressure: host memory or its staging has too little room for what is to be parked; nothing was changed."""

    def __init__(self, requested: int, free: int, records: int, kind: str) -> None:
        self.requested, self.free, self.records, self.kind = requested, free, records, kind
        hint = _never(requested > records, f"there are {records}", "poll and try again, or let parked requests go on")
        super().__init__(f"{requested} {kind} records requested, room for {free} of {records}: {hint}")


class StaleHandle(MemstateError):
    """The handle of a row, snapshot, session or step that has ended.

    Args:
        what: the handle, as text.
        generation: the number that the handle has.
        now: the present number of the same row or register, or of the newest step; 0 for a session.
        why: why the handle is stale; "" for the usual reasons.
    """

    def __init__(self, what: str, generation: int, now: int, why: str = "") -> None:
        self.what, self.generation, self.now, self.why = what, generation, now, why
        super().__init__(f"{what}: {why or 'it was dropped, has ended, or belongs to another manager'}")


class RegisterInUse(MemstateError):
    """A claim or a move names a target register that holds a slot already; nothing was changed."""

    def __init__(self, operation: str, register: int) -> None:
        self.operation, self.register = operation, register
        super().__init__(f"{operation}: register {register} holds a slot already: release or move it first")


class EmptyRegister(MemstateError):
    """A move or a copy names a source register that holds no slot; nothing was changed."""

    def __init__(self, operation: str, register: int) -> None:
        self.operation, self.register = operation, register
        super().__init__(f"{operation}: register {register} holds no slot: there is nothing to give")


class Asleep(MemstateError):
    """A call needs the memory of the states, which `sleep` released; nothing was changed."""

    def __init__(self, operation: str = "", why: str = "the states sleep: call wake() first") -> None:
        self.operation, self.why = operation, why
        super().__init__(f"{operation}: {why}" if operation else why)


class Broken(MemstateError):
    """An exception ended an earlier call while it changed something, so counts and owners may be wrong.

    Args:
        call: name of that call.
        why: the exception, as text; "" if it came at the very end.
    """

    def __init__(self, call: str, why: str = "") -> None:
        self.call, self.why = call, why
        super().__init__(
            f"{call}() was interrupted while it changed something ({why or 'at its end'}), so counts and owners may be "
            "wrong: call recover(), which keeps what was published; an allocator or a PrefixPart has reset() instead"
        )


class DeviceFault(MemstateError):
    """The device has counted impossible operations; `check()` raises this. The bitmap is intact."""

    def __init__(self, fault: str, count: int, offender: int, counts: dict[str, int]) -> None:
        self.fault, self.count, self.offender, self.counts = fault, count, offender, counts
        super().__init__(
            f"{count} x {fault} on the device, the first on {offender} (all: {counts}): "
            "look at what the caller releases"
        )


class DoubleRelease(DeviceFault):
    """A slot was released that was already free."""


class ForwardFault(MemstateError):
    """The forward of a step did not store a state, or changed a state that it may only read; found with `debug=True`.

    The states of the rows are wrong. The call that raises this has changed nothing. Each fault is raised only once.

    Args:
        vector: where the state should have been stored: "write", "snapshot" or "mark"; or "read" if the forward changed
            the state that it read.
        plane: name of the plane with the first fault.
        layer: number of the layer.
        row: number of the row.
        step: number of the step.
        rows: all rows with a fault.
        places: number of faults; each is a combination of slot, plane and layer.
    """

    def __init__(self, vector: str, plane: str, layer: int, row: int, step: int, rows: list[int], places: int) -> None:
        self.vector, self.plane, self.layer, self.row, self.step = vector, plane, layer, row, step
        self.rows, self.places = rows, places
        what = "changed" if vector == "read" else "did not store"
        where = "the slot at a mark" if vector == "mark" else f"its slot of `{vector}`"
        super().__init__(
            f"step {step}: the forward {what} plane {plane!r}, layer {layer}, of row {row} in {where}; found in "
            f"{places} places, of rows {rows}: {_STORE_HINTS[vector]}. The states of these rows are wrong: abort them "
            "and drop what they published, then repeat the call"
        )


_IN_PLACE = "a kernel that updates one slot needs forward=ms.Forward(in_place=True), and is given step.write"
_STORE_HINTS = {
    "read": f"store at step.write, not at step.read, and nothing where step.cursor.store is -1; {_IN_PLACE}",
    "write": f"read the state at step.read, and store the new one of every plane and layer at step.write; {_IN_PLACE}",
    "snapshot": "store the new state of every plane and layer at step.snapshot, too, where that is a slot",
    "mark": "give decode steps marks=step.marks, call mem.planes.scatter_states behind chunked kernels, or build the "
    "manager without Forward(grid=)",
}


class LeakFound(MemstateError):
    """An audit found slots with no owner or with two."""


class CompileFailed(MemstateError):
    """A kernel does not compile for a target, or the compiled code cannot be inspected."""

    def __init__(self, kernel: str, target: str, reason: str) -> None:
        self.kernel, self.target, self.reason = kernel, target, reason
        super().__init__(f"{kernel} for {target}: {reason}")


class AgreementLost(MemstateError):
    """Another rank does not answer, or runs other prefetches than this rank. All prefetches in flight are cancelled."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"the ranks no longer agree on prefetches: {why}; restart them together, requests go on without storage"
        )
