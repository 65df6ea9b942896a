"""Names the state of a manager and its model, without the numbers on which no rule depends."""

from hashlib import blake2b
from marshal import dumps
from typing import Any

from memstate.kernels.tables import REGISTERS_PER_ROW, ROW_CODE
from memstate.slots.packet import DATA, MOVES, WRITES, Packet
from tests.proof.exhaustive.world import ROWS, World
from tests.support import inside, owners


def name(world: World) -> bytes:
    """Returns a digest of a state. It depends neither on counts nor on the numbers of rows, holders and slots.

    Rows and holders are sorted by their other properties. Rows whose properties are equal keep their order, so some
    equal states have two names. Different states never have the same name.
    """
    mem, model = world.mem, world.model
    file, commands, held = inside.registers(mem), inside.commands(mem), inside.registers(mem).held.tolist()
    slots, labels, known = file.table.slots.tolist(), file.table.labels.tolist(), file.labels.tolist()
    readers, leaving = owners.holdings(mem).readers, owners.leaving(mem)
    sources, host_sources = file.table.source.tolist(), file.source.tolist()
    tracked, host_tracked = file.table.tracked.tolist(), file.tracked.tolist()
    used = commands._unwritten.union(() if commands._used is None else commands._used.tolist())
    fenced = [at in used for at in range(file.count)]
    (texts,) = model.content.values()
    tailed = world.at.settings.tail > 0

    def register(at: int, text: tuple[int, ...]) -> tuple[Any, ...]:
        content = texts[slots[at]]
        length = -1 if content is None else len(content)
        ours = content in (None, text[:length])
        return slots[at] > 0, labels[at], held[at], known[at], fenced[at], length, ours

    def holder(at: int) -> tuple[Any, ...]:
        kept = model.kept.get(at)
        return (*register(at, kept.text if kept else ()), kept is not None, readers[at], at in leaving)

    holders = list(range(file.first_holder, file.count))
    told = {at: holder(at) for at in holders}
    holders.sort(key=told.__getitem__)
    place = {at: i for i, at in enumerate(holders)} | {0: -1}

    def row(at: int) -> tuple[Any, ...]:
        one, first = model.rows.get(at), REGISTERS_PER_ROW * at
        state: tuple[Any, ...] = ()
        if one:
            state = len(one.text), one.confirmed, one.unsettled, one.finished, host_tracked[at], place[host_sources[at]]
            state = (*state, len(one.tail), model.tails[at] == one.tail)
            if tailed:
                newest, place_of = model.columns["newest"][at], model.vectors[0].tolist()
                told = int(model.of_tails[4, place_of.index(at)]) if newest else 0  # the next plan counts these
                state = (*state, one.pending, one.newest, model.columns["pending"][at], newest, told)
        steps = tuple(
            next(
                ((len(e.tokens), e.drafts, tuple(e.tail), e.before, e.accepted, e.counted, e.more,
                  model.tenant(e) is e.row) for e in step.entries if e.row.number == at), (),
            )
            for step in model.steps
        )  # fmt: skip
        registers = [register(at, one.text if one else ()) for at in range(first, first + REGISTERS_PER_ROW)]
        return (one is not None, state, steps, tracked[at], place[sources[at]], *registers)

    numbers = list(range(1, ROWS + 1))
    rows = {at: row(at) for at in numbers}
    numbers.sort(key=rows.__getitem__)
    rank = {at: i for i, at in enumerate(numbers)} | {0: -1}
    ordered = [REGISTERS_PER_ROW * at + part for at in numbers for part in range(REGISTERS_PER_ROW)] + holders
    index = {at: i for i, at in enumerate(ordered)}
    # Parts of the name. equal: slots with equal bytes have the same number; columns: slots that a later forward uses.
    first_seen: dict[Any, int] = {}
    equal = [first_seen.setdefault(texts[slots[at]], i) for i, at in enumerate(ordered) if slots[at]]
    owner = {slots[at]: i for i, at in enumerate(ordered)} | {0: -1}
    flights = []
    for flight in world.at.flights:
        numbers_of, coming = [rank[entry.row.number] for entry in flight.planned.entries], flight is world.to_run
        columns = [[owner[slot] for slot in column.tolist()] for column in flight.step.record[2:5]] if coming else []
        flights.append((flight.written, flight.planned is model.newest, coming, model.promised, numbers_of, columns))
    waits = commands._waits or (len(commands.queue), 0)
    queue = [_queued(entry, waits[1] if i == waits[0] else 0, index, rank, file)
             for i, entry in enumerate(commands.queue)]  # fmt: skip
    rest = [
        [rows[at] for at in numbers], [told[at] for at in holders], equal, flights,
        model.late and model.late[1:3], model.open is not None, commands._waits is not None, waits[0], queue,
    ]  # fmt: skip
    return blake2b(dumps(rest, 2), digest_size=12).digest()


def _queued(entry: Any, sent: int, index: dict[int, int], rank: dict[int, int], file: Any) -> list[Any]:
    """Returns two lists of changes of a packet: the first `sent` changes, and the others, which wait."""
    assert isinstance(entry, Packet)
    parts = entry.operations[:sent], entry.operations[sent:]
    return [_changes(part, index, rank, file) for part in parts]


def _changes(operations: list[Any], index: dict[int, int], rank: dict[int, int], file: Any) -> list[Any]:
    """Returns changes without the numbers of rows and slots, sorted. Of several writes to one cell, keeps the last."""
    changes: set[tuple[Any, ...]] = set()
    cells: dict[int, int] = {}
    for section, first, second, _ in operations:
        for one, two in zip(first, second, strict=True):
            if section == WRITES:
                cells[one] = two
            else:
                behind = section == MOVES and one < 0
                one = -one if behind else one
                one, two = (index.get(code, code) if code >= 0 else -2 - rank[ROW_CODE - code] for code in (one, two))
                changes.add((section, behind, one, two if section in (MOVES, DATA) else 0))
    return [sorted(changes), sorted(_cell(*pair, index, rank, file) for pair in cells.items())]


def _cell(cell: int, value: int, index: dict[int, int], rank: dict[int, int], file: Any) -> tuple[Any, ...]:
    column, start = max(((name, at) for name, at in file.starts.items() if at <= cell), key=lambda pair: pair[1])
    number = index[cell - start] if column in ("slots", "labels") else rank[cell - start]
    return column, number, index.get(value, 0) if column == "source" else value
