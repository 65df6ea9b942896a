"""Programs of calls that check a pool of slots: one for each behaviour of docs/behaviours.md that any pool can have.

The docstring of each program begins with the number of its behaviour. A program draws random numbers: the smaller the
numbers, the fewer calls it makes.
"""

from collections.abc import Callable
from typing import NamedTuple

from memstate.testing import programs
from memstate.testing.pools import Clears, Generations, Groups, RowPool, Sized, Table, Tracks
from memstate.testing.trial import Draw, Trial

SIZES = 1, 31, 32, 33, 63, 64, 1000, 65_535, 65_536, 1_000_000
NO_COUNTS = -1, 1.5, "1", None


def claims(t: Trial, draw: Draw) -> None:
    """B1: claims all slots in random portions, each slot once."""
    ids: list[int] = []
    while rest := t.capacity - len(ids):
        n = rest - draw(0, rest - 1)
        ids += (got := t("claim", n) or [])
        t.need(len(got) == n, f"{rest} slots were free")
    t.need_ids(ids)
    t("claim", 1)
    t.need(t.refused, "no slot was free")
    t.need_free(0)


def lowest(t: Trial, draw: Draw) -> None:
    """B2: claims the lowest free slots."""
    if free := sorted({*range(1, t.capacity + 1)} - {*t.some(draw)}):
        n = draw(1, len(free))
        t.need(t("claim", n) == free[:n], f"the lowest free slots are {free[:n]}")


def counts(t: Trial, draw: Draw) -> None:
    """B3: claims 0 slots, then an invalid number of slots, which must be refused."""
    t.need(t("claim", 0) == [], "expected no slot, and no refusal")
    t("claim", NO_COUNTS[draw(0, len(NO_COUNTS) - 1)])
    t.need(t.refused, "expected a refusal")
    t.need_rest()


def releases(t: Trial, draw: Draw) -> None:
    """B4: releases slots in random portions, and claims all again."""
    held = t.some(draw)
    t("release", [])
    t.need(not t.refused, "expected that nothing is released")
    t.need_free(t.capacity - len(held))
    while held:
        t("release", [held.pop(draw(0, len(held) - 1)) for _ in range(len(held) - draw(0, len(held) - 1))])
    t.need_rest()


def twice(t: Trial, draw: Draw) -> None:
    """B5: releases a slot twice, in two calls or in one."""
    held = t.some(draw) or t("claim", 1) or []
    t.need(bool(held), "a slot was free")
    slot = held.pop(draw(0, len(held) - 1))
    if draw(0, 1):
        t("release", [slot])
        t("release", [slot])
    else:
        t("release", [slot, slot])
        held += [slot] * t.refused  # a pool that refuses the call as a whole releases nothing
    t.need_rest(held)


def no_slots(t: Trial, draw: Draw) -> None:
    """B6: releases an id that no slot has: 0, -1 or N + 1."""
    held = t.some(draw)
    t("release", [(0, -1, t.capacity + 1)[draw(0, 2)]])
    t.need_rest(held)


def aliases(t: Trial, draw: Draw) -> None:
    """B8: overwrites the ids that `claim` returned, and checks that the pool is unchanged."""
    ids = t("claim", 1 + draw(0, t.capacity - 1))
    try:
        for at in range(len(ids)):
            t.returned[at] = 0
    except TypeError:  # the pool returned something read-only
        return
    t.calls.append("ids[:] = 0  # the caller writes to what claim returned")
    if draw(0, 1):
        t("release", ids)
        ids = []
    t.need_rest(ids)


def _grouped(t: Trial, draw: Draw) -> list[int]:
    """Opens a group, and claims some of its slots one by one."""
    n = 1 + draw(0, t.capacity - 1)
    t("open_group", n)
    t.need(not t.refused, f"{t.capacity} slots were free")
    return [slot for _ in range(draw(0, n)) for slot in t("claim", 1) or ()]


def groups(t: Trial, draw: Draw) -> None:
    """B9: closes a group of which some slots are claimed."""
    held = _grouped(t, draw)
    t("close_group")
    t.need_rest(held)


def nested(t: Trial, draw: Draw) -> None:
    """B9a: opens a group inside a group, and closes both."""
    held = _grouped(t, draw)
    t("open_group", draw(0, t.capacity - len(held)))
    for _ in range(2):
        t("close_group")
    t.need_rest(held)


def cleared_group(t: Trial, draw: Draw) -> None:
    """B9b: clears the pool while a group is open."""
    _grouped(t, draw)
    t("clear")
    if draw(0, 1):
        t("close_group")
    t.need_rest()


def group_counts(t: Trial, draw: Draw) -> None:
    """B9c: claims all slots while a group is open."""
    held = _grouped(t, draw)
    t.need_free(rest := t.capacity - len(held))
    ids = t("claim", rest) or []
    t.need(len(ids) == rest, f"{rest} slots were free or in the group")
    t.need_ids(ids, held)


def clears(t: Trial, draw: Draw) -> None:
    """B10: clears a pool with rows and claimed slots."""
    rows = range(draw(0, t.pool.rows) if isinstance(t.pool, Table) else 0)
    for at in rows:
        t("admit", f"r{at}")
    if n := draw(0, t.read("free")):
        t("claim", n)
    t("clear")
    for at in rows:
        t.need(t("admit", f"s{at}") is not None, f"{len(rows)} requests ran before")
    if rows:
        t("clear")
    t.need_rest()


def sizes(t: Trial, draw: Draw) -> None:
    """B11: makes a pool of each size in `SIZES`, claims all its slots, and releases them."""
    made = 0
    for size in SIZES:
        try:
            pool = t.pool.of_size(size)
        except Exception as error:  # the pool does not allow this size
            t.need(bool(made) or size < t.capacity, f"of_size({size}): {error!r}")
            continue
        made += 1
        p = Trial(pool)
        p.calls = [f"pool = pool.of_size({size})"]
        ids = p("claim", size) or []
        p.need(sorted(ids) == [*range(1, size + 1)], f"expected slots 1..{size}")
        p("release", odd := ids[::2])
        p.need_free(len(odd))
        p.need(sorted(p("claim", len(odd)) or []) == sorted(odd), "expected the slots that were released")
        p("claim", 1)
        p.need(p.refused, "no slot was free")


def table(t: Trial, draw: Draw) -> None:
    """B12: admits requests until the table or the slots are full."""
    rows: list[int] = []
    each = t.capacity
    while len(rows) <= t.pool.rows and (row := t("admit", f"r{len(rows)}")) is not None:
        rows.append(row)
        each = len(t.read("slots_of", row))
        t.need(1 <= row <= t.pool.rows and rows.count(row) == 1, f"row {row} of a table with {t.pool.rows}")
    free = t.capacity - each * len(rows)
    t.need(len(rows) == t.pool.rows or free < each, f"{len(rows)} of {t.pool.rows} rows, and {free} slots free")
    t.need_free(free)


def admissions(t: Trial, draw: Draw) -> None:
    """B17: admits a second request while too few slots are free, and again after the first request has ended."""
    row = t("admit", "a")
    each = len(t.read("slots_of", row))
    t.need(each > 0, "the request has no slot")
    held = t("claim", n := t.capacity - each - draw(0, each - 1)) or []
    t.need(len(held) == n, f"{t.capacity - each} slots were free")
    free = t.read("free")
    if t("admit", "b") is None:
        t.need_free(free)
    t("end", row)
    t.need(t("admit", "c") is not None, f"a row and {free + each} slots are free")


def generations(t: Trial, draw: Draw) -> None:
    """B19: ends a row or clears the pool, then admits requests until one gets the same row."""
    row = t("admit", "a")
    before = t.read("generation", row)
    if isinstance(t.pool, Clears) and draw(0, 1):
        t("clear")
    else:
        t("end", row)
    for at in range(t.capacity):
        if (other := t("admit", f"b{at}")) is None:
            return
        if other == row:
            now = t.read("generation", row)
            t.need(now > before, f"generation({row}) was {before} and is {now}")
            return


def holds(t: Trial, draw: Draw) -> None:
    """B21: admits up to three requests, and checks the slots of each."""
    owned: list[int] = []
    each = None
    for at in range(1 + draw(0, 2)):
        if (row := t("admit", f"r{at}")) is None:
            return
        slots = [*t.read("slots_of", row)]
        t.need_ids(slots, owned)
        owned += slots
        each = each or len(slots)
        t.need(len(slots) == each > 0, f"it holds {slots}, and the first request {each} slots")
        t.need_free(t.capacity - len(owned))
    t.need_rest(owned)


def untracked(t: Trial, draw: Draw) -> None:
    """B28: publishes for a request that has kept no state."""
    row = t("admit", "a")
    t("publish", row)
    t.need(t.refused, "no state was kept")
    t("end", row)
    t.need_rest()


def ends(t: Trial, draw: Draw) -> None:
    """B29: ends a request that has kept and published states, and admits it again."""
    row, held = t("admit", "a"), []
    for _ in range(draw(0, 4) if isinstance(t.pool, Tracks) else 0):
        if draw(0, 1) and (slot := t("publish", row)) is not None:
            held.append(slot)
        else:
            t("track", row)
    t("end", row)
    t.need_free(t.capacity - len(held))
    row = t("admit", "a")
    t.need(row is not None, "the request ran before")
    if isinstance(t.pool, Tracks):
        t.need(t.read("tracked", row) is None, "a state is kept that the request has not computed")
    t.need_rest([*held, *t.read("slots_of", row)])


def publishes(t: Trial, draw: Draw) -> None:
    """B31: publishes the newest kept state of a request."""
    row, held = t("admit", "a"), []
    for _ in range(1 + draw(0, 2)):
        for _ in range(1 + draw(0, 2)):
            t("track", row)
        slot = t.read("tracked", row)
        t.need((given := t("publish", row)) is not None and given == slot, f"the newest kept state is in slot {slot}")
        held.append(given)
        slots = [*t.read("slots_of", row)]
        t.need_ids(slots, held)
        t.need(bool(slots), "the request has no slot to go on with")
        t("publish", row)
        t.need(t.refused, "the state was published before")
    t("release", held)
    t("end", row)
    t.need_rest()


class Behaviour(NamedTuple):
    """One behaviour, and the program that checks it.

    Attributes:
        number: number in docs/behaviours.md.
        title: what the pool should do, in one sentence.
        needs: protocols of `pools` that the pool must implement.
        case: the program of calls that checks it.
        promised: True: every pool should have this behaviour. False: memstate has it, other pools need not.
    """

    number: str
    title: str
    needs: tuple[type, ...]
    case: Callable[[Trial, Draw], None]
    promised: bool = True


BEHAVIOURS = (
    Behaviour("G1", "what is refused changes nothing", (), programs.refusals),
    Behaviour("G3", "after any calls every slot is free or has one owner", (), programs.owners),
    Behaviour("B1", "N slots are handed out as 1..N, once each", (), claims),
    Behaviour("B2", "a claim gives the lowest free slots", (), lowest, promised=False),
    Behaviour("B3", "a claim of 0 gives nothing; what is no count is refused", (), counts),
    Behaviour("B4", "what was released can be claimed, once each", (), releases),
    Behaviour("B5", "a second release frees nothing", (), twice),
    Behaviour("B6", "a release of 0, -1 or N + 1 frees nothing", (), no_slots),
    Behaviour("B8", "what claim returned is the caller's to write to", (), aliases),
    Behaviour("B9", "a group gives back what it has not handed out", (Groups,), groups),
    Behaviour("B9a", "a group opened in a group loses no slot", (Groups,), nested),
    Behaviour("B9b", "clear in an open group frees each slot once", (Groups, Clears), cleared_group),
    Behaviour("B9c", "slots of an open group count as free, and can be claimed", (Groups,), group_counts),
    Behaviour("B10", "clear frees everything", (Clears,), clears),
    Behaviour("B11", "pools of all sizes do the same", (Sized,), sizes),
    Behaviour("B12", "a table of N rows has the rows 1..N", (Table,), table),
    Behaviour("B17", "an admission that finds too few slots changes nothing", (RowPool,), admissions),
    Behaviour("B19", "a row that is used again has a higher generation", (Generations,), generations),
    Behaviour("B21", "an admission takes the slots of its row, as many for each", (RowPool,), holds),
    Behaviour("B28", "a request without a kept state publishes nothing", (Tracks,), untracked),
    Behaviour("B29", "end gives everything back; the request can come again", (RowPool,), ends),
    Behaviour("B31", "publish gives the newest kept slot; the row has another", (Tracks,), publishes),
)
