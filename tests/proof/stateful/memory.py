"""The planes of a manager between canaries, a forward pass over their bytes, and the comparison of every byte.

An image of the memory is kept beside it: what the histories say for the slots whose content is known, poison for all
others, and canaries in between. Knows no register and no rule.
"""

import ctypes
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import memstate as ms
from tests.proof.stateful import history
from tests.proof.stateful.history import EMPTY, FILLED, FIRST_CELL, FIRST_TAP, RING, SIZE, TAPS, WHOLE, History
from tests.proof.stateful.settings import Settings

RUBBISH: History = (-1,)  # what in-place kernels leave in slot 0
POISON, CANARY, JUNK = 0xA5, 0xC3, 0x77
FILL = np.frombuffer(bytes.fromhex("c35a9e17d2864bf1396da0e87c25b40f"), np.uint8)
FENCE = 64  # bytes before and behind
UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32, torch.int16: np.uint16}
Bytes = NDArray[np.uint8]
State = History | None


def raw(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers on the host."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def same(what: str, seen: object, told: object) -> None:
    assert seen == told, f"{what}: {seen}, expected {told}"


class Block(NamedTuple):
    """One allocation. host: its bytes; on a GPU a copy of them. padding: bytes that mean nothing, memstate's own."""

    tensor: Tensor
    host: Bytes
    image: Bytes
    padding: NDArray[np.bool_]


class Place(NamedTuple):
    """One layer of a plane, `slot element`, in the memory and in its image."""

    host: NDArray[np.unsignedinteger]
    image: NDArray[np.unsignedinteger]


def _bytes(tensor: Tensor) -> Bytes:
    """The bytes of a tensor in host memory; with `Tensor.numpy` its storage could no longer be released."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr()))


class Kind:
    """How a plane depends on a history: element e is weights[layer][e] * history[cells[e]]."""

    def __init__(self, settings: Settings, part: str) -> None:
        self.shape = next(plane.shape for plane in settings.layout.planes if plane.name == part)
        self.dtype = next(UNSIGNED[plane.dtype] for plane in settings.layout.planes if plane.name == part)
        size = int(np.prod(self.shape))
        elements = np.arange(size)
        self.taps = part.startswith("conv")
        self.channel, tap = elements, elements * 0
        if part == "conv":
            tap, self.channel = elements // 3, elements % 3
        elif part == "conv turned":
            self.channel, tap = elements // TAPS, elements % TAPS
        self.cells = {"fold": elements * 0 + WHOLE, "ring": FIRST_CELL + elements % RING}.get(part, FIRST_TAP + tap)
        odd = 2 * (self.channel + 7 * len(part)) + 3
        self.weights = [(odd + 64 * layer).astype(np.uint64) for layer in range(settings.layers)]
        number = {(int(t), int(c)): e for e, (t, c) in enumerate(zip(tap, self.channel, strict=True))}
        moved = [(int(t), int(c)) for t, c in zip(tap, self.channel, strict=True)]
        self.sources = np.array([[number.get((t + n, c), size) for t, c in moved] for n in range(TAPS + 1)])

    def expected(self, layer: int, states: Sequence[History]) -> NDArray[np.unsignedinteger]:
        """The elements that histories say, `state element`."""
        numbers = np.array(states, np.uint64).reshape(-1, SIZE)
        return (numbers[:, self.cells] * self.weights[layer]).astype(self.dtype)

    def advance(self, layer: int, old: NDArray, steps: Sequence[tuple[History, History, int]]) -> NDArray:
        """A forward pass: the elements of each entry after its tokens, from those before them."""
        state = old.astype(np.uint64)
        factors = np.array([factor for factor, _, _ in steps], np.uint64)[:, self.cells]
        added = np.array([more for _, more, _ in steps], np.uint64)[:, self.cells]
        if self.taps:
            padded = np.concatenate([state, np.zeros((len(state), 1), np.uint64)], 1)
            state = np.take_along_axis(padded, self.sources[[min(n, TAPS) for _, _, n in steps]], 1)
        return (state * factors + added * self.weights[layer]).astype(self.dtype)


class Memory:
    """The bytes of a manager's slots."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.kinds = {part: Kind(settings, part) for part in settings.parts}
        self.poison = {part: np.frombuffer(bytes([POISON] * 8), kind.dtype)[0] for part, kind in self.kinds.items()}
        self.given = settings.memory in ("tensor", "layers")
        self.backing: list[Tensor] = []  # larger blocks that arenas or tensors are cut out of
        self.tensors = self._cut() if self.given else None

    # Building

    def _block(self, nbytes: int) -> Tensor:
        block = torch.full((nbytes,), CANARY, dtype=torch.uint8, device=self.device)
        self.backing.append(block)
        return block

    def _cut(self) -> dict[str, Tensor | list[Tensor]]:
        """Planes of an engine: blocks with gaps around each, either plane by plane or slot by slot."""
        s, at, places = self.settings, FENCE, {}
        dtypes = {plane.name: plane.dtype for plane in s.layout.planes}
        padded = {part: -(-s.block_bytes(part) // 8) * 8 + s.gap for part in s.parts}
        for layer in range(s.layers):
            for part in s.parts:
                places[part, layer] = at
                at += padded[part] * (1 if s.interleaved else s.slots + 1)
        whole = (at - FENCE) * (s.slots + 1 if s.interleaved else 1) + 2 * FENCE
        block = self._block(whole)
        found: dict[str, Tensor | list[Tensor]] = {}
        for part, kind in self.kinds.items():
            size = dtypes[part].itemsize
            slot = (at - FENCE if s.interleaved else padded[part]) // size
            inner = [int(np.prod(kind.shape[i + 1 :])) for i in range(len(kind.shape))]
            starts = [places[part, layer] // size for layer in range(s.layers)]
            none = torch.empty(0, dtype=dtypes[part], device=self.device)
            if s.memory == "layers":
                shape, storage = (s.slots + 1, *kind.shape), block.untyped_storage()
                one = [none.new_empty(0).set_(storage, start, shape, (slot, *inner)) for start in starts]
                found[part] = one
            else:
                between = starts[1] - starts[0] if s.layers > 1 else slot * (s.slots + 1)
                shape, strides = (s.layers, s.slots + 1, *kind.shape), (between, slot, *inner)
                found[part] = none.set_(block.untyped_storage(), starts[0], shape, strides)
        return found

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Memory that memstate allocates inside comes with canaries before and behind it."""
        from memstate.state import planes as storage

        allocated = storage.allocated

        def cut(layout, slots, device, allocate):  # type: ignore[no-untyped-def]
            return allocated(layout, slots, device, allocate or (lambda n: self._block(n + 2 * FENCE)[FENCE:-FENCE]))

        with mock.patch.object(storage, "allocated", cut):
            yield

    def attach(self, mem: ms.StateManager) -> None:
        """Looks at the planes where they lie now; their contents are of no known content until `look`."""
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
        self.places = {part: [self._place(mem.planes[part][layer], self.kinds[part]) for layer in
                              range(self.settings.layers)] for part in self.kinds}  # fmt: skip
        if before is None:
            self.shown: dict[str, list[State]] = {
                part: [EMPTY, *[()] * self.settings.slots]
                for part in self.kinds  # type: ignore[list-item]
            }
            for part, places in self.places.items():
                for place in places:
                    place.image[0] = 0
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
        self, read: list[int], write: list[int], snapshot: list[int], starts: list[int], tokens: list[list[int]],
        marks: list[tuple[int, int, int]],
    ) -> None:  # fmt: skip
        """One step of a model, in which null rows write nothing, or rubbish to slot 0 where kernels work in place.

        marks: entry, tokens and slot of states inside of the step.
        """
        self._pull()
        real = [i for i, slot in enumerate(write) if slot > 0]
        steps = [(*history.step(starts[i], tokens[i]), len(tokens[i])) for i in real]
        to, of = [write[i] for i in real], [read[i] for i in real]
        taken = [k for k, i in enumerate(real) if snapshot[i] > 0]
        also = [snapshot[real[k]] for k in taken]
        used = [*to, *also, *[slot for _, _, slot in marks]]
        assert len(set(used)) == len(used), f"two entries write one slot: {to} and {also}"
        for k, slot in enumerate(of):
            assert slot not in used or slot == to[k], f"entry {real[k]} reads slot {slot}, which another one writes"
        for part, kind in self.kinds.items():
            copied = part in self.settings.copied
            for layer, place in enumerate(self.places[part]):
                if real:
                    old = place.host[to if copied else of]
                    state = kind.advance(layer, old, steps)
                    kept = [
                        kind.advance(layer, old[[real.index(i)]], [(*history.step(starts[i], tokens[i][:n]), n)])[0]
                        for i, n, _ in marks
                    ]
                    place.host[to] = state
                    for (_, _, slot), one in zip(marks, kept, strict=True):
                        place.host[slot] = one
                    if also and not copied:
                        place.host[also] = state[taken]
                if self.settings.in_place and 0 in write:
                    place.host[0] = JUNK
        self._push()

    def windows(
        self, read: list[int], starts: list[int], tokens: list[list[int]], width: int, inputs: bool
    ) -> dict[str, Tensor]:
        """The states after each token, or for a convolution its inputs; what nobody may read is poison."""
        self._pull()
        real = [i for i, slot in enumerate(read) if slot > 0]
        found = {}
        for part, kind in self.kinds.items():
            shape = (self.settings.layers, len(read), width, len(kind.cells))
            states = np.full(shape, self.poison[part], kind.dtype)
            lined = np.full((*shape[:2], TAPS + width, 3), self.poison[part], kind.dtype)
            for layer, place in enumerate(self.places[part]):
                for i in real:
                    old = place.host[[read[i]]]
                    for n in range(1, len(tokens[i]) + 1):
                        steps = [(*history.step(starts[i], tokens[i][:n]), n)]
                        states[layer, i, n - 1] = kind.advance(layer, old, steps)[0]
                        if kind.taps:
                            turned = kind.shape[0] == 3
                            for at, source in ((0, old[0]), (n, states[layer, i, n - 1])):
                                taps = source.reshape(kind.shape).T if turned else source.reshape(kind.shape)
                                lined[layer, i, at : at + TAPS] = taps
            whole = lined if kind.taps and inputs else states.reshape(*shape[:3], *kind.shape)
            found[part] = torch.from_numpy(whole.view(whole.dtype.name[1:])).to(self.device)
        return found

    def put(self, slot: int, state: History) -> None:
        """Writes a state from elsewhere into a slot."""
        self._pull()
        for part, places in self.places.items():
            for layer, place in enumerate(places):
                place.host[slot] = self.kinds[part].expected(layer, [state])[0]
        self._push()

    def scribble(self) -> None:
        """The engine's memory while the states sleep: anything."""
        self._pull()
        for places in self.places.values():
            for place in places:
                place.host[:] = 0x11
        self._push()

    def lose(self) -> None:
        """The contents of all slots are undefined now."""
        for states in self.shown.values():
            states[1:] = [()] * (len(states) - 1)

    # The comparison

    def look(self, content: dict[str, list[State]], stirred: Collection[tuple[str, int]]) -> None:
        """Compares every byte; slots that have just become nobody's are poisoned, and must stay so.

        stirred: planes of slots that have lost a content since the last look, whatever they had then.
        """
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
