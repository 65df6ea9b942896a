"""What must hold in every state, and a name for a state that leaves out what no rule depends on."""

from hashlib import blake2b
from marshal import dumps
from typing import Any

from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, REGISTERS_PER_ROW, Count, Section
from memstate.slots.packet import DATA, MOVES, WRITES, Packet
from tests.proof.exhaustive.world import DIGIT, NO_LIMIT, POISON, ROWS, SLOTS, World, encoded, require
from tests.support import inside, owners

ALL = set(range(1, SLOTS + 1))
FAULTS = slice(Count.DOUBLE_RELEASE, Count.OFFENDER_KIND + 1)


def check(world: World) -> None:
    """Requires what holds in every state, and poisons the slots that have become free."""
    slots, counters = world.slots.tolist(), world.device["counters"].tolist()
    held = [slot for slot in slots if slot]
    bits = int(world.device["bitmap"][0])
    free = {slot for slot in ALL if bits >> slot & 1}
    require(not world.launches.wrong, world.launches.wrong)
    require(len(held) == len(set(held)), "a slot has two owners:", slots)
    require(free == ALL - set(held) and not bits & 1, "free slots", free, "owned slots", held)
    labelled = [register for register, label in enumerate(world.labels.tolist()) if label and not slots[register]]
    require(not labelled, "labels of registers without a slot:", labelled)
    require(counters[Count.FREE] == len(free), "the device counts", counters[Count.FREE], "free slots, not", len(free))
    require(not any(counters[FAULTS]), "the device counted a fault:", counters)
    world.bytes[list(free)] = POISON
    require(world.bytes[0] == 0, "slot 0 was written")
    if not inside.commands(world.mem).queue:
        _same_on_host(world, len(free))
    _same_batch(world)
    if world.open:
        for slot, register in world.open.slots.items():
            require(slots[register] == slot, "slot", slot, "of the open step has left register", register)
    _bytes(world, slots)


def _same_on_host(world: World, free: int) -> None:
    """With nothing recorded, the host's mirror says what the device has."""
    file = inside.registers(world.mem)
    require(world.mem.free_slots == free, "the host counts", world.mem.free_slots, "free slots, the device", free)
    require(
        file.held.tolist() == [slot > 0 for slot in world.slots.tolist()],
        "held on the host",
        file.held,
        "slots",
        world.slots,
    )
    for name in ("labels", "tracked", "source"):
        host, device = getattr(file, name), world.device[name]
        require(host.tolist() == device.tolist(), name, "on the host", host, "on the device", device)


def _same_batch(world: World) -> None:
    """The packet of the next plan has no changes, and the batch that the host believes to be there."""
    stepping, packet = world.mem._parts.stepping, inside.commands(world.mem).step
    if stepping._log.sent is not None:
        rows, tokens, limit = stepping._log.sent
        width = -(-len(rows) // 4) * 4
        header, found = packet[:HEADER_INTS].tolist(), packet[HEADER_INTS : HEADER_INTS + 2 * width].tolist()
        told = [*rows.tolist(), *[0] * (width - len(rows)), *tokens.tolist(), *[0] * (width - len(rows))]
        require(found == told and header[LIMIT_CELL] == limit, "the device has batch", found, "the host sent", told)
        require(not any(header[: Section.BATCH]), "a packet would be carried out again:", header)
    last, table = stepping._last, owners.table(world.mem)
    if last is not None and last.version == table.version:
        numbers, *_ = table.batch(stepping._last_rows)
        require(bool((numbers == last.numbers).all()), "a batch is looked up as", last.numbers, "expected", numbers)
        require(not table.finished[last.numbers].any(), "a batch that is looked up has rows that ended:", last.numbers)


def _bytes(world: World, slots: list[int]) -> None:
    """Every labelled register holds the state of its label, except where the forward of the open step is to come."""
    commands, labels, sources = inside.commands(world.mem), world.labels.tolist(), world.device["source"].tolist()
    coming = world.open.slots if world.open and not world.open.ran else ()
    queued = commands.queue

    def holds(register: int, history: tuple[int, ...], whose: str) -> None:
        slot, label = slots[register], labels[register]
        if slot and slot not in coming:
            content = int(world.bytes[slot])
            require(len(history) >= label and content == encoded(history[:label]),
                    f"slot {slot} in register {register} of {whose} has label {label} and bytes {content:x}; "
                    f"its history is {history}")  # fmt: skip

    for row, one in world.rows.items():
        first = REGISTERS_PER_ROW * row
        for register in range(first, first + REGISTERS_PER_ROW):
            told = labels[register] or (register == first and not sources[row])
            if told and not (queued and commands.named([register])):
                holds(register, one.history, f"row {row}")
        if not queued:
            origin = sources[row] or first
            require(labels[origin] == len(one.history), "row", row, "has length", labels[origin], "expected", one)
    for register, (snap, history) in world.snaps.items():
        if not queued or not commands.named([register]):
            require(labels[register] == snap.length and slots[register] > 0, "the slot of", snap, "has gone")
            holds(register, history, "a snapshot")
    for source in filter(None, sources):
        if not queued or not commands.named([source]):
            holds(source, world.shared[source], "a first read")


def drain(world: World) -> None:
    """Ends everything, and requires that everything is free then."""
    mem = world.mem
    while world.flights:
        flight = world.flights[0]
        if flight.window:
            world.accept([0] * len(flight.entries), [False] * len(flight.entries), NO_LIMIT)
        else:
            world.settle([False] * len(flight.entries))
        check(world)
    if world.open:
        world.launched()
    mem.submit()
    require(not inside.commands(mem).queue, "changes still wait though no step is open")
    check(world)
    mem.end([one.handle for one in world.rows.values()])
    mem.drop([snap for snap, _ in world.snaps.values()])
    world.rows.clear()
    world.snaps.clear()
    mem.submit()
    check(world)
    require(mem.free_slots == SLOTS and not world.slots.any(), "slots are owned after the end:", world.slots)
    stats = mem.stats()
    require(stats.rows_used == 0 and not owners.states(mem) and not owners.leaving(mem) and not owners.pinned(mem),
            "rows, snapshots or pins are left after the end:", stats)  # fmt: skip
    require(owners.free(mem) == inside.registers(mem).holders, "a holder is lost")


# A state's name


def name(world: World) -> bytes:
    """The same for states that differ only in the numbers of rows, holders and slots, or in counts since the start.

    Rows and holders are put in order by what can be said of them without a number. Equal ones keep their order, so
    that some equal states have two names; different states never share one.
    """
    mem = world.mem
    file, commands, held = inside.registers(mem), inside.commands(mem), inside.registers(mem).held.tolist()
    slots, labels, known = world.slots.tolist(), world.labels.tolist(), file.labels.tolist()
    readers, leaving = owners.holdings(mem).readers, owners.leaving(mem)
    sources, host_sources = world.device["source"].tolist(), file.source.tolist()
    tracked, host_tracked = world.device["tracked"].tolist(), file.tracked.tolist()
    used = commands._unwritten.union(() if commands._used is None else commands._used.tolist())
    fenced = [at in used for at in range(file.count)]

    def register(at: int, history: tuple[int, ...]) -> tuple[Any, ...]:
        content = int(world.bytes[slots[at]])
        length = POISON if content == POISON else (content.bit_length() + DIGIT - 1) // DIGIT
        ours = content in (POISON, encoded(history[:length]))
        return slots[at] > 0, labels[at], held[at], known[at], fenced[at], length, ours

    def holder(at: int) -> tuple[Any, ...]:
        return (*register(at, world.shared.get(at, ())), at in world.snaps, readers[at], at in leaving)

    holders = list(range(file.first_holder, file.count))
    told = {at: holder(at) for at in holders}
    holders.sort(key=told.__getitem__)
    place = {at: i for i, at in enumerate(holders)} | {0: -1}

    def row(at: int) -> tuple[Any, ...]:
        one, first = world.rows.get(at), REGISTERS_PER_ROW * at
        state: tuple[Any, ...] = ()
        if one:
            state = (len(one.history), one.real, one.kept, one.taken, one.published, one.unsettled, one.ended,
                     host_tracked[at], place[host_sources[at]])  # fmt: skip
        steps = tuple(
            next(((e.tokens, e.before, world._tenant(e) is not None) for e in flight.entries if e.row == at), ())
            for flight in world.flights
        )
        history = one.history if one else ()
        registers = [register(at, history) for at in range(first, first + REGISTERS_PER_ROW)]
        return (one is not None, state, steps, tracked[at], place[sources[at]], *registers)

    numbers = list(range(1, ROWS + 1))
    rows = {at: row(at) for at in numbers}
    numbers.sort(key=rows.__getitem__)
    rank = {at: i for i, at in enumerate(numbers)} | {0: -1}
    ordered = [REGISTERS_PER_ROW * at + part for at in numbers for part in range(REGISTERS_PER_ROW)] + holders
    index = {at: i for i, at in enumerate(ordered)}
    # which slots hold equal bytes, and what a coming forward uses
    first_seen: dict[int, int] = {}
    equal = [first_seen.setdefault(int(world.bytes[slots[at]]), i) for i, at in enumerate(ordered) if slots[at]]
    owner = {slots[at]: i for i, at in enumerate(ordered)} | {0: -1}
    flights = [
        (flight.window, flight.ran, flight.promised, [rank[r] for r, *_ in flight.entries],
         [] if flight.ran else [[owner[s] for s in column.tolist()] for column in flight.step.record[2:5]])
        for flight in world.flights
    ]  # fmt: skip
    waits = commands._waits or (len(commands.queue), 0)
    queue = [_queued(entry, waits[1] if i == waits[0] else 0, index, rank, file)
             for i, entry in enumerate(commands.queue)]  # fmt: skip
    rest = [
        [rows[at] for at in numbers], [told[at] for at in holders], equal, flights,
        world.open is not None, commands._waits is not None, waits[0], queue,
    ]  # fmt: skip
    return blake2b(dumps(rest, 2), digest_size=12).digest()


def _queued(entry: Any, sent: int, index: dict[int, int], rank: dict[int, int], file: Any) -> list[Any]:
    """A packet in two parts: its first `sent` changes do not wait."""
    assert isinstance(entry, Packet)
    parts = entry.operations[:sent], entry.operations[sent:]
    return [_changes(part, index, rank, file) for part in parts]


def _changes(operations: list[Any], index: dict[int, int], rank: dict[int, int], file: Any) -> list[Any]:
    """What recorded changes do, without numbers. Their order is that of the phases; a cell keeps its last value."""
    found: set[tuple[Any, ...]] = set()
    cells: dict[int, int] = {}
    for section, first, second, _ in operations:
        for one, two in zip(first, second, strict=True):
            if section == WRITES:
                cells[one] = two
            else:
                found.add((section, index[one], index.get(two, two) if section in (MOVES, DATA) else 0))
    return [sorted(found), sorted(_cell(*pair, index, rank, file) for pair in cells.items())]


def _cell(cell: int, value: int, index: dict[int, int], rank: dict[int, int], file: Any) -> tuple[Any, ...]:
    column, start = max(((name, at) for name, at in file.starts.items() if at <= cell), key=lambda pair: pair[1])
    number = index[cell - start] if column in ("slots", "labels") else rank[cell - start]
    return column, number, index.get(value, 0) if column == "source" else value
