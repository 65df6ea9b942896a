"""Models parked requests: what they keep of a row or session, in records of their own and in pages on the device."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.proof.stateful.ledger import Later, Row, State, Text
from tests.support.shelves import Item, Key, Shelf

if TYPE_CHECKING:
    from tests.proof.stateful.below import Below

Due = dict[Shelf, list[tuple[int, Item, "Away", int]]]  # (register, row or page; item; its request; its place)


@dataclass(eq=False)
class Away:
    """A parked request.

    text: its computed tokens. known: the tokens that memstate knows. rest: the text, then the rest of the prompt.
    register, row: where its state and its memory were; row 0 for a session. pages: for each KV page its id while it is
    on the device, else 0. memory: tokens that the memory of its row has. keys: of whole pages with known tokens. items:
    (shelf, place, record). state, tail, ring, kv: bytes that its own records have.
    """

    text: Text
    pending: int
    known: Text
    rest: Text
    salt: Hashable
    register: int
    row: int
    pages: list[int]
    taste: int = 0
    memory: Text = ()
    keys: Sequence[Key] = ()
    items: list[tuple[Shelf, int, Item]] = field(default_factory=list)
    state: dict[str, State] = field(default_factory=dict)
    tail: State = None
    ring: tuple[State, ...] = ()
    kv: dict[int, list[Text | None]] = field(default_factory=dict)


class Parking:
    """The parked requests of one host memory, oldest first.

    leaving: pages without an owner whose bytes are still to be copied. parting: whether requests have parked since the
    newest plan.
    """

    def __init__(self, below: "Below") -> None:
        self.below, self.model, self.away = below, below.model, list[Away]()
        self.leaving: set[int] = set()
        self.serial, self.parting = 0, False

    def short(self, leaving: Sequence[Away]) -> tuple[int, int] | None:
        """Returns the numbers of records that are needed and there, if there are too few for states or for rows."""
        needed = sum(bool(one.text) for one in leaving), sum(bool(one.text and one.row) for one in leaving)
        for shelf, n in zip((self.below.states, self.below.rows), needed, strict=True):
            if shelf and n > (room := len(shelf.free) + len(shelf.loose)):
                return n, room
        return None

    def park(self, leaving: Sequence[Away]) -> None:
        below, due = self.below, Due()
        self.parting = True
        for one in leaving:
            self.away.append(one)
            if one.text:
                self._claim(below.states, one, 0, one.register, len(one.text), due)
            if one.text and one.row and below.rows:
                self._claim(below.rows, one, 0, one.row, len(one.text), due)
            one.keys = below.keys(one.known[: len(one.text)], one.salt)
            self.model.page_users.update(one.pages)
            self._lower(one, due)
        self._fill(due, [one.register for one in leaving], behind=True)

    def advance(self) -> None:
        """Copies pages that are still on the device, as far as there is room."""
        if any(map(any, (one.pages for one in self.away))) and not (self.model.fencing and self.parting):
            due = Due()
            for one in self.away:
                self._lower(one, due, in_turn=True)
                if any(one.pages):
                    break
            self._fill(due, ())

    def _lower(self, one: Away, due: Due, in_turn: bool = False) -> None:
        """Copies pages that have no record. in_turn: behind one without room, no other is looked at."""
        shelf, freed = self.below.pages, []
        for at, page in enumerate(one.pages):
            key = one.keys[at] if at < len(one.keys) else None
            if not page or shelf is None:
                continue
            if key and (item := shelf.get(key)):
                Shelf.pin([item])
                one.items.append((shelf, at, item))
            elif shelf.free or shelf.loose:
                self._claim(shelf, one, at, page, (at + 1) * self.below.settings.page_size, due, key)
            elif in_turn:
                break
            else:
                continue
            one.pages[at] = 0
            freed.append(page)
        self.model.page_users -= Counter(freed)

    def _claim(
        self, shelf: Shelf, one: Away, at: int, index: int, length: int, due: Due, key: Key | None = None
    ) -> None:  # fmt: skip
        (record,) = shelf.take(1)
        self.serial += 1
        name: Any = ("parked", self.serial), (*one.text[:length], *[None] * (length - len(one.text)))
        item = shelf.add(key or name, record)
        item.filled = False
        if key is None:
            item.once, item.stored = shelf, True
        Shelf.pin([item], 2)
        one.items.append((shelf, at, item))
        due.setdefault(shelf, []).append((index, item, one, at))

    def _fill(self, due: Due, registers: Sequence[int], behind: bool = False) -> None:
        below, model = self.below, self.model
        parts = [(shelf, [item for _, item, _, _ in copies]) for shelf, copies in due.items()]
        if not parts:
            return
        pages = {page for page, *_ in due.get(below.pages, ())} if below.pages else set()
        self.leaving |= pages

        def fill() -> None:
            for shelf, copies in due.items():
                for of, item, one, at in copies:
                    if shelf is below.pages:
                        one.kv[at] = list(below.kv[of])
                        if item.once is None:
                            assert below.kv[of] == below.of_page(item.key[1]), f"page {of} is not that of {item}"
                            item.filled = True
                    elif shelf is below.rows:
                        one.tail, one.ring = model.tails[of], model.rings[of]
                    else:
                        slot = model.slot[of]
                        below.require_arrived(slot)
                        one.state = {part: contents[slot] for part, contents in model.content.items()}
                        told = one.text[: len(one.text) - one.pending]
                        assert all(text == told for text in one.state.values()), f"{one.state} is not {told}"
            self.leaving -= pages
            below.moved(parts, "out")

        def forget() -> None:
            self._keep_items()
            for _, items in parts:
                Shelf.pin(items, -1)
            self.leaving.clear()

        model.then(Later(fill, forget), registers, behind)

    def load(self, going: Sequence[tuple[Away, Row]]) -> None:
        """Copies parked requests to rows, which begin where they stopped."""
        below, model = self.below, self.model
        model.record_labels([(row.live, len(one.text) - one.pending) for one, row in going if one.text])
        for one, row in going:
            row.pending = one.pending
            if one.pending:
                model.record_write("pending", row.number, one.pending)
        copies = [(shelf, at, item, one, row) for one, row in going for shelf, at, item in one.items]
        of = defaultdict[Shelf, list[Item]](list)
        for shelf, _, item, _, _ in copies:
            of[shelf].append(item)
            Shelf.pin([item])

        def begin() -> None:
            for shelf, at, item, one, row in copies:
                if shelf is below.pages:
                    below.kv[row.pages[at]] = below.of_page(item.key[1]) if item.once is None else list(one.kv[at])
                elif shelf is below.rows:
                    model.tails[row.number] = one.tail
                    model.rings[row.number] = one.ring
                else:
                    for part, contents in model.content.items():
                        contents[model.slot[row.live]] = one.state[part]
            below.moved([*of.items()], "in", [row.live for one, row in going if one.text])

        def forget() -> None:
            self._keep_items()
            for items in of.values():
                Shelf.pin(items, -1)

        if copies:
            pages = [row.pages[at] for shelf, at, _, _, row in copies if shelf is below.pages]
            model.then(Later(begin, forget, pages))
        for one, _ in going:
            self.drop(one)

    def drop(self, one: Away) -> None:
        self.away.remove(one)
        Shelf.pin([item for _, _, item in one.items], -1)
        self.model.page_users -= Counter(filter(None, one.pages))

    def clear(self) -> None:
        """Forgets all, when host memory is emptied."""
        self._keep_items()
        for one in self.away:
            self.model.page_users -= Counter(filter(None, one.pages))
            Shelf.pin([item for _, _, item in one.items], -1)
        self.away.clear()
        self.leaving.clear()

    def _keep_items(self) -> None:
        """Lets items stay on their shelves without pins: with the others, they count as evicted."""
        for shelf in self.below.shelves:
            for item in shelf.items:
                item.once = None
