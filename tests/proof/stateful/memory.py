"""Compares all bytes: a manager's planes between canaries, an engine's KV pages, host memory and storage.

The bytes of a state depend on all its tokens, and the KV of a token on all tokens up to it, so the test notices a state
or page under a wrong prefix. For each block of memory there is an *image* with the expected bytes: in slots of known
content those of its text, in other slots poison, and between the planes canaries (bytes that must stay). The test
decides when threads run, what time it is, and which storage calls fail.
"""

import ctypes
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from memstate.tiers.host import transfers
from memstate.tiers.keys import Keys
from memstate.tiers.stores.base import Bytes as Record
from memstate.tiers.workers import Job, Workers
from memstate.tokens import SaltedTokens, encode
from tests.proof.stateful.ledger import (
    EMPTY,
    FILLED,
    Row,
    State,
    Text,
)
from tests.proof.stateful.parked import Away
from tests.proof.stateful.settings import RING, TAIL, Digits, Settings
from tests.support.fetches import Fetched
from tests.support.given import in_order
from tests.support.shelves import Key
from tests.support.virtual import ByHand, Clock, MemoryStore

if TYPE_CHECKING:
    from tests.proof.stateful.model import Model

RUBBISH: Text = (-1,)  # bytes that in-place kernels leave in slot 0
UNSEEN: Text = (-3,)  # content of a slot that no `look` has compared yet
TAPS = 2  # number of inputs that a convolution keeps
POISON, CANARY, JUNK = 0xA5, 0xC3, 0x77
FILL = np.frombuffer(bytes.fromhex("c35a9e17d2864bf1396da0e87c25b40f"), np.uint8)
FENCE = 64  # bytes of canaries before and after a block
UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32, torch.int16: np.uint16, torch.float32: np.uint32}
Bytes = NDArray[np.uint8]


def raw(tensor: Tensor) -> np.ndarray:
    """Returns the numbers of a tensor on the host."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def same(what: str, seen: object, told: object, named: Callable[[Any], object] = lambda at: at) -> None:
    """Raises an error that says where two values differ. named: returns the name of a place in them."""
    if seen != told:
        raise AssertionError(f"{what}: {_difference(seen, told, named)}")


def _difference(seen: object, told: object, named: Callable[[Any], object]) -> str:
    """Says which parts of two lists or dictionaries differ."""
    if isinstance(seen, dict) and isinstance(told, dict):
        parts = [(key, seen.get(key), told.get(key)) for key in {**seen, **told} if seen.get(key) != told.get(key)]
    elif isinstance(seen, list) and isinstance(told, list) and len(seen) == len(told):
        parts = [(at, a, b) for at, (a, b) in enumerate(zip(seen, told, strict=True)) if a != b]
    else:
        return _pair(seen, told)
    return "; ".join(f"[{named(at)}] {_pair(a, b)}" for at, a, b in parts)


def _pair(seen: Any, told: Any) -> str:
    """Says how two values differ: in which fields, if they have some. Tokens in bytes are shown as numbers."""
    if type(seen) is type(told) and hasattr(seen, "_fields"):
        pairs = zip(seen._fields, seen, told, strict=True)
        return ", ".join(f"{name} {_pair(a, b)}" for name, a, b in pairs if a != b)
    shown = [np.frombuffer(one, np.int64).tolist() if isinstance(one, bytes) else one for one in (seen, told)]
    return f"{shown[0]}, expected {shown[1]}"


class Block(NamedTuple):
    """One allocation.

    host: its bytes (on a GPU: a copy of them). image: the expected bytes. padding: mask of the bytes to leave out.
    """

    tensor: Tensor
    host: Bytes
    image: Bytes
    padding: NDArray[np.bool_]


class Place(NamedTuple):
    """One layer of a plane, `slot element`: views of the memory and of its image."""

    host: NDArray[np.unsignedinteger]
    image: NDArray[np.unsignedinteger]


def _bytes(tensor: Tensor) -> Bytes:
    """Returns the bytes of a CPU tensor as an array. `Tensor.numpy` would keep its storage from being released."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr()))


def digest(text: Text) -> int:
    """Returns a number for a text, which is the same in every process. An empty text gives 0."""
    return hash(text) % 2**64 if text else 0


class Kind:
    """The rule by which the bytes of a plane follow from a text. Each element is a number times a weight.

    The number is computed from the whole text or, in the plane of a convolution, from one of the last tokens.
    """

    def __init__(self, plane: ms.Plane, layers: int) -> None:
        self.shape, self.dtype, part = plane.shape, UNSIGNED[plane.dtype], plane.name
        self.fill = np.array([plane.fill]).astype(self.dtype)  # every element of an empty text
        self.size = int(np.prod(self.shape))
        self.turned, self.tap, channel = part == "conv turned", None, np.arange(self.size)
        if part.startswith("conv"):
            self.tap, channel = channel // 3, channel % 3
        if self.turned:
            channel, self.tap = np.divmod(np.arange(self.size), TAPS)
        odd = 2 * (channel + 7 * len(part)) + 3
        self.weights = [(odd + 64 * layer).astype(np.uint64) for layer in range(layers)]

    def expected(self, layer: int, texts: Sequence[Text]) -> NDArray[np.unsignedinteger]:
        """Returns the elements that a layer has after each of these texts: `text element`."""
        numbers = np.array([self._numbers(text) for text in texts], np.uint64).reshape(-1, self.size)
        return (numbers * self.weights[layer]).astype(self.dtype) + self.fill

    def _numbers(self, text: Text) -> Sequence[int]:
        if self.tap is None:
            return [digest(text)] * self.size
        last = [0] * TAPS + [digest((token,)) for token in text[-TAPS:]]
        return [last[at - TAPS] for at in self.tap]

    def require(self, layer: int, seen: NDArray[np.unsignedinteger], texts: Sequence[Text]) -> None:
        """Asserts that `seen`, which a forward reads, has the elements of these texts."""
        told = self.expected(layer, texts)
        assert np.array_equal(seen, told), f"a forward reads {seen.tolist()}, expected {told.tolist()}"


class Memory:
    """The bytes of a manager's slots."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        layout = settings.layout
        self.kinds = {plane.name: Kind(plane, layout.layers_of(plane)) for plane in layout.planes}
        self.tail = Kind(TAIL, 2)
        self.poison = {part: np.frombuffer(bytes([POISON] * 8), kind.dtype)[0] for part, kind in self.kinds.items()}
        self.given = settings.memory in ("tensor", "layers")
        self.backing: list[Tensor] = []  # larger blocks, of which arenas or tensors are parts
        self.tensors = self._cut() if self.given else None
        self.ring_copies: list[tuple[int, int]] = []  # (to, of) rows whose tails the engine itself copies

    # Building

    def _block(self, nbytes: int) -> Tensor:
        block = torch.full((nbytes,), CANARY, dtype=torch.uint8, device=self.device)
        self.backing.append(block)
        return block

    def _cut(self) -> dict[str, Tensor | list[Tensor]]:
        """Returns the tensors of an engine, plane by plane or slot by slot, with gaps between blocks."""
        s, at, places = self.settings, FENCE, {}
        dtypes = {plane.name: plane.dtype for plane in s.layout.planes}
        padded = {part: -(-s.block_bytes(part) // 8) * 8 + s.gap for part in s.parts}
        for layer in range(2):
            for part in [part for part in s.parts if layer < s.layers_of(part)]:
                places[part, layer] = at
                at += padded[part] * (1 if s.interleaved else s.slots + 1)
        whole = (at - FENCE) * (s.slots + 1 if s.interleaved else 1) + 2 * FENCE
        block = self._block(whole)
        tensors: dict[str, Tensor | list[Tensor]] = {}
        for part, kind in self.kinds.items():
            size = dtypes[part].itemsize
            slot = (at - FENCE if s.interleaved else padded[part]) // size
            inner = [int(np.prod(kind.shape[i + 1 :])) for i in range(len(kind.shape))]
            starts = [places[part, layer] // size for layer in range(s.layers_of(part))]
            none = torch.empty(0, dtype=dtypes[part], device=self.device)
            if s.memory == "layers":
                shape, storage = (s.slots + 1, *kind.shape), block.untyped_storage()
                one = [none.new_empty(0).set_(storage, start, shape, (slot, *inner)) for start in starts]
                tensors[part] = one
            else:
                between = starts[1] - starts[0] if len(starts) > 1 else slot * (s.slots + 1)
                shape, strides = (len(starts), s.slots + 1, *kind.shape), (between, slot, *inner)
                tensors[part] = none.set_(block.untyped_storage(), starts[0], shape, strides)
        return tensors

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Puts canaries before and after all memory that memstate allocates during the block."""
        from memstate.state import planes as storage

        allocated = storage.allocated

        def cut(layout, slots, device, allocate):  # type: ignore[no-untyped-def]
            return allocated(layout, slots, device, allocate or (lambda n: self._block(n + 2 * FENCE)[FENCE:-FENCE]))

        with mock.patch.object(storage, "allocated", cut):
            yield

    def attach(self, mem: ms.StateManager) -> None:
        """Notes where the planes of a manager lie now. The content of all slots is unknown until `look`."""
        tensors = self.backing or list(mem.planes.arenas)
        before = getattr(self, "blocks", None)
        self.blocks = []
        for i, tensor in enumerate(tensors):
            host = _bytes(tensor) if self.device.type == "cpu" else tensor.cpu().numpy()
            image = before[i].image if before else np.full(len(host), CANARY, np.uint8)
            padding = np.full(len(host), not self.given)
            if self.settings.memory == "fenced":
                padding[:FENCE] = padding[-FENCE:] = False
            self.blocks.append(Block(tensor, host, image, padding))
        self.places = {part: [self._place(mem.planes[part][layer], kind) for layer in range(len(kind.weights))]
                       for part, kind in self.kinds.items()}  # fmt: skip
        self.tails = mem.planes.rows and mem.planes.rows["tail"]
        if not self.settings.tail:
            self.rings = None
        elif mem.planes.rows:
            self.rings = mem.planes.rows[RING]
        elif before is None:  # the engine keeps the tails
            self.rings = torch.zeros(
                2, self.settings.row_count + 1, self.settings.ring, dtype=torch.int64, device="cpu"
            )
        if before is None:
            self.shown: dict[str, list[State]] = {part: [EMPTY, *[UNSEEN] * self.settings.slots] for part in self.kinds}
            for part, places in self.places.items():
                for layer, place in enumerate(places):
                    place.image[0] = self.kinds[part].expected(layer, [EMPTY])[0]
                    place.image[1:] = self.poison[part]

    def _place(self, tensor: Tensor, kind: Kind) -> Place:
        itemsize = np.dtype(kind.dtype).itemsize
        for block in self.blocks:
            at = tensor.data_ptr() - block.tensor.data_ptr()
            if 0 <= at < block.tensor.numel():
                shape = (tensor.shape[0], int(np.prod(kind.shape)))
                strides = (tensor.stride(0) * itemsize, itemsize)
                np.ndarray((*shape, itemsize), bool, block.padding.data, at, (*strides, 1))[:] = False
                views = [np.ndarray(shape, kind.dtype, data.data, at, strides) for data in (block.host, block.image)]
                return Place(*views)
        raise AssertionError("a plane lies outside of the memory that it was given")

    # A forward pass

    def _pull(self) -> None:
        if self.device.type != "cpu":
            for block in self.blocks:
                block.host[:] = block.tensor.cpu().numpy()

    def _push(self) -> None:
        if self.device.type != "cpu":
            for block in self.blocks:
                block.tensor.copy_(torch.from_numpy(block.host))

    def forward(
        self, read: list[int], write: list[int], snapshot: list[int], texts: list[Text], tokens: list[list[int]],
        marks: list[tuple[int, int, int]], cursor: list[tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        """Runs the forward of a step: checks the states that it reads, and stores new ones.

        For padding it writes nothing, but in-place kernels leave rubbish in slot 0.

        texts: of rows before the step. marks: (entry, tokens, slot) of states inside the step. cursor: for each row
        with a tail, labels of the read and the stored state (-1: none); None: a state has all tokens of its row.
        """
        self._pull()
        ends = cursor or [(len(text), len(text) + len(new)) for text, new in zip(texts, tokens, strict=True)]
        for slot, text, (label, _) in zip(read, texts, ends, strict=True):
            for part, kind in self.kinds.items() if slot > 0 and cursor else ():
                for layer, place in enumerate(self.places[part]):
                    kind.require(layer, place.host[[slot]], [text[:label]])
        real = [i for i, slot in enumerate(write) if slot > 0 and ends[i][1] >= 0]
        to, of, before = [write[i] for i in real], [read[i] for i in real], [texts[i][: ends[i][0]] for i in real]
        assert all(i in real or snapshot[i] <= 0 for i in range(len(write))), "a snapshot of what is not stored"
        taken = [i for i in real if snapshot[i] > 0]
        also = [snapshot[i] for i in taken]
        used = [*to, *also, *[slot for _, _, slot in marks]]
        assert len(set(used)) == len(used), f"two entries write one slot: {to} and {also}"
        for k, slot in enumerate(of):
            assert slot not in used or slot == to[k], f"entry {real[k]} reads slot {slot}, which another one writes"
        after = {i: (*texts[i], *tokens[i])[: ends[i][1]] for i in real}
        stored = [(write[i], after[i]) for i in real]
        stored += [(slot, (*texts[i], *tokens[i])[: len(texts[i]) + n]) for i, n, slot in marks]
        for part, kind in self.kinds.items():
            copied = part in self.settings.copied
            told = stored if copied else stored + [(snapshot[i], after[i]) for i in taken]
            for layer, place in enumerate(self.places[part]):
                kind.require(layer, place.host[to if copied else of], before)
                if told:
                    place.host[[slot for slot, _ in told]] = kind.expected(layer, [text for _, text in told])
                if self.settings.in_place and 0 in write:
                    place.host[0] = JUNK
        self._push()

    def forward_rows(self, rows: list[int], texts: list[Text], tokens: list[list[int]]) -> None:
        """Asserts that the memory of each row stands for its text, and adds the tokens of the step."""
        real = [i for i, row in enumerate(rows) if row > 0]
        self._require_rows([(rows[i], texts[i]) for i in real])
        self._store_rows([(rows[i], (*texts[i], *tokens[i])) for i in real])

    def fold(
        self, rows: list[int], cursor: list[list[int]], texts: list[Text], tokens: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Checks the pending tokens in the tails of rows, and adds the tokens of the step that the stored state lacks.

        cursor: (label, pending, store) of each row, as in `Tail` of the model. Returns for each row the labels of the
        read and the stored state, -1 if none is stored.
        """
        for i, (row, (label, pending, store)) in enumerate(zip(rows, cursor, strict=True)):
            text, size = (*texts[i], *tokens[i]), self.settings.ring
            assert label + pending == len(texts[i]), f"row {row} has {texts[i]}, and a cursor of {label} and {pending}"
            for layer, ring in enumerate(self.rings if row > 0 else ()):
                for at in range(label, label + pending):
                    seen, told = int(ring[row, at % size]), token(layer, text[: at + 1])
                    assert seen == told, f"token {at} in the tail of row {row}: {seen}, expected {told}"
                for at in range(max(label + pending, label + store), len(text)):
                    ring[row, at % size] = token(layer, text[: at + 1])
        return [(label, label + store if store >= 0 else -1) for label, _, store in cursor]

    def copy_rings(self) -> None:
        """Copies the tails of rows to their forks. Called before the next step."""
        for to, of in self.ring_copies:
            self.rings[:, to] = self.rings[:, of]
        self.ring_copies.clear()

    def look_at_rings(self, rings: list[tuple[State, ...]]) -> None:
        """Compares the tails of rows, including places that nobody reads."""
        told = {row: ring for row, ring in enumerate(rings) if ring}
        for layer, plane in enumerate(self.rings if told else ()):
            seen = raw(plane[[*told]]).tolist()
            same(f"tails of rows {[*told]}, layer {layer}", seen,
                 [[token(layer, text) for text in ring] for ring in told.values()])  # fmt: skip

    def _require_rows(self, told: Sequence[tuple[int, Text]]) -> None:
        rows, kind = [row for row, _ in told], self.tail
        for layer in range(2) if told else ():
            seen = raw(self.tails[layer, rows]).view(kind.dtype)
            wanted = kind.expected(layer, [text for _, text in told])
            assert np.array_equal(seen, wanted), f"{told}: {seen.tolist()} in layer {layer}, expected {wanted.tolist()}"

    def _store_rows(self, told: Sequence[tuple[int, Text]]) -> None:
        for layer in range(2) if told else ():
            elements = self.tail.expected(layer, [text for _, text in told])
            stored = torch.from_numpy(elements.view(elements.dtype.name[1:])).to(self.device)
            self.tails[layer, [row for row, _ in told]] = stored

    def put(self, slot: int, text: Text) -> None:
        """Writes the state of a text to a slot, as if it came from another machine."""
        self._pull()
        for part, places in self.places.items():
            for layer, place in enumerate(places):
                place.host[slot] = self.kinds[part].expected(layer, [text])[0]
        self._push()

    def holds(self, slot: int, text: Text) -> bool:
        """Says whether a slot has the state of a text."""
        self._pull()
        return all(
            np.array_equal(place.host[slot], self.kinds[part].expected(layer, [text])[0])
            for part, places in self.places.items()
            for layer, place in enumerate(places)
        )

    def scribble(self) -> None:
        """Overwrites the memory of the engine while the manager sleeps."""
        self._pull()
        for places in self.places.values():
            for place in places:
                place.host[:] = 0x11
        self._push()

    def lose(self) -> None:
        """Makes the contents of all slots undefined."""
        for states in self.shown.values():
            states[1:] = [UNSEEN] * (len(states) - 1)

    # The comparison

    def look(
        self, content: dict[str, list[State]], stirred: Collection[tuple[str, int]], tails: list[State]
    ) -> None:  # fmt: skip
        """Compares every byte. Poisons slots whose content has become undefined; they must stay poisoned.

        stirred: (plane, slot) pairs that lost their content since the last `look`. tails: text of each row's memory.
        """
        if self.tails is not None:
            self._require_rows([(row, text) for row, text in enumerate(tails) if text is not None])
        self._pull()
        fresh = False
        for part, states in content.items():
            shown = self.shown[part]
            if shown == states and not stirred:
                continue
            changed = [slot for slot, state in enumerate(states) if state != shown[slot] or (part, slot) in stirred]
            known = [slot for slot in changed if states[slot] not in (None, RUBBISH, FILLED)]
            gone = [slot for slot in changed if states[slot] is None]
            junk = [slot for slot in changed if states[slot] is RUBBISH]
            filled = [slot for slot in changed if states[slot] is FILLED]
            for layer, place in enumerate(self.places[part]):
                if known:
                    place.image[known] = self.kinds[part].expected(layer, [states[slot] for slot in known])  # type: ignore[misc]
                if gone:
                    place.image[gone] = place.host[gone] = self.poison[part]
                    fresh = True
                if junk:
                    place.image[junk] = JUNK
                if filled:
                    place.image[filled] = np.resize(FILL, place.image[0].nbytes).view(place.image.dtype)
            self.shown[part] = list(states)
        for block in self.blocks:
            if not self.given:
                block.image[block.padding] = block.host[block.padding]
            if not np.array_equal(block.host, block.image):
                self._explain(content)
        if fresh:
            self._push()

    def _explain(self, content: dict[str, list[State]]) -> None:
        wrong = [
            f"plane {part}, layer {layer}, slot {slot} (of content {content[part][slot]}) holds "
            f"{place.host[slot].tolist()}, expected {place.image[slot].tolist()}"
            for part, places in self.places.items()
            for layer, place in enumerate(places)
            for slot in np.flatnonzero((place.host != place.image).any(1)).tolist()
        ]
        raise AssertionError("; ".join(wrong) or "bytes between the blocks of planes have changed")


def token(layer: int, text: State) -> int:
    """Returns the int64 number that a tail keeps for the last token of a text."""
    return (digest(text or ()) * (2 * layer + 3) + 2**63) % 2**64 - 2**63


ELEMENTS = 2  # elements of KV per token and layer


def elements(settings: Settings, texts: Sequence[Text | None]) -> np.ndarray:
    """Returns the KV of tokens, uint32 `layer token element`. texts: all tokens up to each of them; None: poison."""
    numbers = np.array([digest(text or ()) for text in texts], np.uint64)[:, None]
    weights = np.arange(settings.layers * ELEMENTS, dtype=np.uint64).reshape(-1, 1, ELEMENTS) * 2 + 3
    kv = (numbers * weights).astype(np.uint32)
    kv[:, [text is None for text in texts]] = int.from_bytes(bytes([POISON] * 4), "little")
    return kv


class EngineKv:
    """The KV pages of the engine. If the states are layer-major in memory, the pages are slot-major, or the reverse."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        order = "slot_major" if s.layout.order == "layer_major" else "layer_major"
        layout = ms.StateLayout((ms.Plane("k", (s.page_size, ELEMENTS), torch.int32),), s.layers, order)  # type: ignore[arg-type]
        self.storage = Planes(layout, s.pages, Backend(backend.name, backend.device))
        self.plane = self.storage["k"]  # `layer page token element`

    def attach(self, model: "Model") -> None:
        assert model.below
        self.model, self.below = model, model.below

    def forward(self, rows: Sequence[tuple[Row, int, list[int]]]) -> None:
        """Checks the KV before the step, and writes that of the step. rows: (row, length before, tokens of step)."""
        for row, before, _ in rows:
            if self.model.rows.get(row.number) is row:  # a row may end between plan and forward
                for at in range(before):
                    page, place = self._place(row, at)
                    seen = self.below.kv[page][place]
                    assert seen == row.text[: at + 1], f"row {row.number} reads KV of other tokens at {at}"
        for row, before, tokens in rows:
            self.write(row, (*row.text[:before], *tokens), before)

    def write(self, row: Row, tokens: Text, start: int) -> None:
        """Writes the KV of the tokens of a row from place `start` on."""
        for at in range(start, len(tokens)):
            (page, place), text = self._place(row, at), tokens[: at + 1]
            self.below.kv[page][place] = text
            self.plane[:, page, place] = self._tensor(elements(self.settings, [text])[:, 0])

    def _place(self, row: Row, at: int) -> tuple[int, int]:
        size = self.settings.page_size
        return row.pages[at // size], at % size

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the pages that a fork returned. copies: (to, of) pages."""
        for to, of in copies:
            self.below.kv[to] = list(self.below.kv[of])
            self.plane[:, to] = self.plane[:, of]

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.view(np.int32)).to(self.plane.device)

    def look(self) -> None:
        """Compares all pages in use, and poisons the others."""
        self.below.lose_kv()
        seen = self.plane.cpu().numpy().view(np.uint32)
        told = elements(self.settings, [text for page in self.below.kv for text in page]).reshape(seen.shape)
        leaving = self.below.parking.leaving
        used = [page for page in range(1, self.settings.pages + 1) if self.model.page_users[page] or page in leaving]
        if not np.array_equal(seen[:, used], told[:, used]):
            for page in used:
                same(f"KV page {page}", seen[:, page].tolist(), told[:, page].tolist())
        free = sorted({*range(1, self.settings.pages + 1)} - {*used})
        self.plane[:, free] = self._tensor(told[:, free])


class Patient(transfers.Transfers):
    """Transfers on a GPU that never give up a save because staging is full, but wait."""

    room = 2**31  # type: ignore[assignment]


class Lower:
    """Host memory, storage, threads and clock of one manager. Its jobs have the same order as those of the model."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        self.clock, self.threads, self.store = Clock(), ByHand(), MemoryStore()
        self.kv = EngineKv(settings, backend) if s.pages else None
        self.tiers = s.tiers(self.kv.storage if self.kv else None, self.store, self.threads, self.clock)
        self._digests: dict[Key, bytes] = {}
        self._names: dict[str, tuple[str, Key]] = {}
        self._bodies: dict[tuple[str, Key], Record] = {}
        self._shown: list[dict[int, Key]] = []

    def attach(self, mem: ms.StateManager, model: Any, memory: Memory) -> None:
        assert mem.tiers and model.below
        if memory.device.type == "cuda":  # in the model, transfers take no time, so wait for the real ones
            transfers.Ticket.done = property(lambda ticket: ticket.synchronize() is None)  # type: ignore[assignment,method-assign]
            for each in mem.tiers.host.sets:
                each.transfers.__class__ = Patient
        self.mem, self.model, self.memory = mem, model, memory
        self.real, self.below = mem.tiers, model.below
        if self.kv:
            self.kv.attach(model)
        self.keys = Keys(self.real._caches[0].form.fingerprint, self.settings.page_size)
        self.forms = {cache.form.kind: cache.form for cache in self.real._caches}
        self.caches = self.real._caches
        self.payload = {kind: self._payload(kind) for kind in self.forms if kind != "row"}
        s = self.settings
        staged = s.host_pages if s.pages else 0  # staging has room for all pages
        self.staging_bytes = 2 * s.staging * self.forms["state"].nbytes  # each record has room for a header
        self.staging_bytes += 2 * staged * self.forms["kv"].nbytes if staged else 0
        self.staging_bytes += 2 * s.staging * self.forms["row"].nbytes if s.tails else 0
        self.host_bytes = s.host_slots * (self.forms["state"].nbytes + (self.forms["row"].nbytes if s.tails else 0))
        self.host_bytes += s.host_pages * self.forms["kv"].nbytes if s.pages else 0

    # Calls of programs

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Runs jobs if a call in the block waits for them."""
        with mock.patch.object(Workers, "wait", self._wait):
            yield

    def _wait(self, jobs: Iterable[Job]) -> None:
        wanted = set(jobs)
        for job in self.threads.jobs:
            if job.handed in wanted and not job.future.done() and (job.future.running() or job.begin()):
                job.finish()

    def work(self, at: int, finish: bool) -> None:
        """Begins a job, unless it has begun. finish: whether to end it, too."""
        job, told = self.threads.jobs[at], self.below.jobs[at]
        assert not job.future.done()
        assert job.future.running() == told.begun
        if not told.begun:
            assert job.begin()
            told.begun = True
        if finish:
            job.finish()
            self.below.finish(told)

    @property
    def open_jobs(self) -> list[int]:
        return [at for at, job in enumerate(self.below.jobs) if not job.ended]

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.below.now += seconds

    def spoil(self, kind: str, key: Key, fault: str) -> None:
        """Sets the fault of a record. "" removes the fault; "gone" deletes the record; "foreign": another length."""
        name, told = self.name(kind, key), self.below.storage
        if name in self.store.records and "foreign" in (fault, told.fault(kind, key)):
            self.store.records[name] = self._record(
                kind, key, len(key[1]) + self.settings.page_size * (fault == "foreign")
            )
            self._names[name] = kind, key  # a record that is damaged before anybody has looked at it
        if fault == "gone":
            self.store.records.pop(name, None)
            told.records.discard((kind, key))
        elif fault and (fault != "foreign" or name in self.store.records):
            self.store.faults[name] = told.faults[kind, key] = fault
        else:
            self.store.faults.pop(name, None)
            told.faults.pop((kind, key), None)

    def _record(self, kind: str, key: Key, length: int) -> bytes:
        """Returns the bytes of a record that says that it stands for `length` tokens."""
        form = self.forms[kind]
        record = np.concatenate([np.zeros(form.header_bytes, np.uint8), self.body(kind, key)])
        form.seal(record, self.digest(key), length)
        return record.tobytes()

    def break_all(self, broken: bool, forgetful: bool) -> None:
        self.store.broken = self.below.storage.broken = broken
        self.store.forgetful = self.below.storage.forgetful = forgetful

    def stock(self, tokens: Text, salt: Hashable, ends: Collection[int], gap: int) -> None:
        """Writes records to storage, as another process would: states at `ends`, in pages, and KV except page `gap`."""
        keys = self.below.keys(tokens, salt)
        wanted = [("state", keys[end - 1]) for end in ends if end <= len(keys)]
        wanted += [("kv", key) for page, key in enumerate(keys) if page != gap and self.settings.pages]
        for kind, key in wanted:
            self.store.records[self.name(kind, key)] = self._record(kind, key, len(key[1]))
            self.below.storage.add(kind, key)

    def texts(self, d: Digits) -> list[Key]:
        """Returns keys, some chosen by `d`, of states that the tiers have and the device lacks."""
        stored = sorted((key for kind, key in self.below.storage.records if kind == "state"), key=str)
        there = [item.key for item in self.below.states.items[-3:] if not item.once]
        there += [d.pick(*stored) for _ in range(min(3, len(stored)))]
        above = [(entry.salt, entry.tokens) for entry in self.model.stated]
        return [key for key in there if key not in above]

    # The comparison

    def digest(self, key: Key) -> bytes:
        if key not in self._digests:
            salt, tokens = key
            digests = self.keys.of(SaltedTokens(encode(tokens), salt))
            for end, digest in enumerate(digests, 1):
                self._digests[salt, tokens[: end * self.settings.page_size]] = digest
        return self._digests[key]

    def name(self, kind: str, key: Key) -> str:
        return f"{kind}-{self.digest(key).hex()}"

    def learn(self, parked: Mapping[ms.Parked, Away]) -> None:
        """Learns the keys of the records that parked requests have for themselves: they are drawn by chance."""
        for handle, away in parked.items():
            parts = self.real.parked._of[handle]
            real = {(part.of.cache.form.kind, part.at): part.entry for part in parts}
            for shelf, at, item in away.items:
                if item.once:
                    self._digests[item.key] = real[shelf.kind, at].key

    def look(self, fetches: Mapping[ms.tiers.Fetch, Fetched]) -> None:
        real, below = self.real, self.below
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize()
        assert len(self.threads.jobs) == len(below.jobs), f"{len(self.threads.jobs)} jobs, expected {len(below.jobs)}"
        states = [job.future.done() for job in self.threads.jobs]
        assert states == [job.ended for job in below.jobs], "jobs that have ended"
        shelves = [(cache, cache.form.header_bytes, cache.form.kind) for cache in self.caches]
        for (cache, header, kind), shelf in zip(shelves, below.shelves, strict=True):
            seen = [(e.key, e.record, e.length, e.pins, e.fetched, e.stored) for e in cache.entries()]
            told = [(self.digest(i.key), i.record, len(i.key[1]), i.pins, i.fetched, i.stored) for i in shelf.items]
            if seen != told:
                texts = {digest: key for key, digest in self._digests.items()}
                raise AssertionError(f"{shelf.kind} in host memory, least recently used first: "
                                     f"{[(texts.get(k, k), *rest) for k, *rest in seen]}, expected "
                                     f"{[(texts.get(k, k), *rest) for k, *rest in told]}")  # fmt: skip
            pool = cache.pool
            same(f"free {shelf.kind} records", sorted(pool._free), sorted(shelf.free))
            same(f"waiting {shelf.kind} records", pool._written - pool._claimed, shelf.waiting)
            same(f"{shelf.kind} records that threads write to", pool._written, shelf.written)
            same("evictable", cache.evictable, len(shelf.loose))
            self._look_at_bytes(kind, pool, {item.record: item.key for item in shelf.items if item.filled}, header)
        if self.kv:
            self.kv.look()
        self._look_at_storage()
        self._look_at_figures()
        if real.prefetcher:
            held = [fetch.state is not None for fetch in below.fetches], [len(fetch.pages) for fetch in below.fetches]
            same("records of prefetches", real.prefetcher.held, tuple(map(sum, held)))
            same("tokens in flight", real.prefetcher.in_flight_tokens, below.in_flight_tokens)
        for fetch, told in fetches.items():
            seen = fetch.phase.name.lower(), fetch.outcome and fetch.outcome.value, fetch.length, fetch.tokens
            same("prefetch", seen, (told.phase, told.outcome, told.length, told.tokens))

    def _payload(self, kind: str) -> np.ndarray:
        """Returns a mask of a body: true for bytes that are not padding."""
        return self._body(kind, None) == 1

    def _body(self, kind: str, texts: Any) -> Bytes:
        """Returns the bytes of a record without its header. texts None: ones in place of data, to find the padding."""
        s, parts = self.settings, []
        for layer in range(s.layers) if kind == "kv" else ():
            size = s.page_size * ELEMENTS * 4
            page = elements(s, texts)[layer].reshape(-1).view(np.uint8) if texts else None
            parts.append(page if page is not None else np.ones(size, np.uint8))
            parts.append(np.zeros(-size % 16, np.uint8))
        for plane, layer in in_order(s.layout) if kind == "state" else ():
            size = plane.nbytes
            told = self.memory.kinds[plane.name].expected(layer, texts) if texts else None
            parts.append(told.view(np.uint8).reshape(-1) if told is not None else np.ones(size, np.uint8))
            parts.append(np.zeros(-size % 16, np.uint8))
        return np.concatenate(parts)

    def body(self, kind: str, key: Key) -> Bytes:
        if (kind, key) not in self._bodies:
            self._bodies[kind, key] = self._body(kind, self.below.of_page(key[1]) if kind == "kv" else [key[1]])
        return self._bodies[kind, key]

    def _look_at_bytes(self, kind: str, pool: Any, keys: Mapping[int, Key], header: int) -> None:
        mask = self.payload.get(kind)
        for record, key in keys.items():
            seen = raw(pool.memory[record])[header:]
            assert np.array_equal(seen[mask], self.body(kind, key)[mask]), (
                f"{kind} record {record} is not that of {key}"
            )

    def _look_at_storage(self) -> None:
        calls = [(call, [self.name(*one) for one in asked]) for call, asked in self.below.calls]
        same("calls of storage", self.store.calls, calls)
        self.store.calls.clear()
        self.below.calls.clear()
        told = {self.name(*record): record for record in self.below.storage.records}
        same("records in storage", sorted(self.store.records), sorted(told))
        for name in told.keys() - self._names.keys():
            kind, key = told[name]
            record = np.frombuffer(self.store.records[name], np.uint8)
            form = self.forms[kind]
            assert not form.flaw(record, self.digest(key), len(key[1])), f"{name} in storage is damaged"
            assert np.array_equal(record[form.header_bytes :], self.body(kind, key)), f"{name} is not that of {key}"
        self._names = told

    def _look_at_figures(self) -> None:
        stats, below = self.mem.stats().tiers, self.below
        assert stats and stats.leaked_records == 0, f"{stats and stats.leaked_records} host records have leaked"
        f, states, kv = below.figures, below.states, below.pages
        seen = [
            stats.host_states, stats.host_state_records, stats.host_pages, stats.host_page_records, stats.host_bytes,
            stats.staging_bytes, stats.host_hit_tokens, stats.storage_hit_tokens,
            stats.states_out, stats.states_in,
            stats.pages_out, stats.pages_in, stats.refused, stats.evicted_states, stats.evicted_pages, stats.written,
            stats.write_failed, stats.write_missed, stats.parked, stats.parked_pages,
        ]  # fmt: skip
        told = [
            len(states.items), states.records, len(kv.items) if kv else 0, kv.records if kv else 0, self.host_bytes,
            self.staging_bytes, f["host hit"], f["storage hit"], f["state out"], f["state in"],
            f["kv out"], f["kv in"], f["refused"], states.evicted, kv.evicted if kv else 0, f["written"],
            f["write_failed"], f["write_missed"], len(below.parking.away),
            sum(page > 0 for away in below.parking.away for page in away.pages),
        ]  # fmt: skip
        same("stats of the tiers", seen, told)
        if not stats.prefetch:
            return
        names = vars(stats.prefetch).keys() - {"flaws", "in_flight", "in_flight_tokens", "late"}
        same("stats of prefetches", {name: n for name in names if (n := getattr(stats.prefetch, name))},
              {name: n for name, n in below.counts.items() if n})  # fmt: skip
        same("flaws", dict(stats.prefetch.flaws), dict(below.flaws))
        same("prefetches", (stats.prefetch.in_flight, stats.prefetch.in_flight_tokens),
              (len(below.fetches), below.in_flight_tokens))  # fmt: skip
