"""Makes memory of planes in the forms of engines and of memstate, and checks it byte by byte.

In the forms of engines, *foreign* bytes, which belong to no plane, lie between the blocks:

pages      layer slot (page: all planes of the layer, then the rest of the page)   one tensor per plane
slots      slot layer plane, each followed by foreign bytes                        one tensor per plane and layer
separate   an allocation per plane and layer, foreign bytes after each slot        one tensor per plane and layer

The other two forms, `layer_major` and `slot_major`, are memstate's own arenas, whose blocks are padded to 16 bytes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes

FORMS = ("pages", "slots", "separate")
ORDERS = ("layer_major", "slot_major")
KEY = tuple[str, int]


def in_order(layout: StateLayout) -> Iterator[tuple[Plane, int]]:
    """Yields plane and layer of each block of a slot, in their order in memory."""
    for layers in dict.fromkeys(map(layout.layers_of, layout.planes)):
        alike = [plane for plane in layout.planes if layout.layers_of(plane) == layers]
        yield from ((plane, layer) for layer in range(layers) for plane in alike)


class Engine:
    """Random memory, the tensors in it, and the expected bytes of the memory.

    unit: each block starts at a multiple of `unit` bytes. gap: smallest number of foreign bytes after a block.
    """

    def __init__(
        self, layout: StateLayout, slots: int, backend: Backend, generator: torch.Generator, form: str,
        unit: int = 16, gap: int = 1,
    ) -> None:  # fmt: skip
        self.layout, self.slots, self.backend, self.form = layout, slots, backend, form
        keys = [(plane.name, layer) for plane, layer in in_order(layout)]
        self.plane = {plane.name: plane for plane in layout.planes}
        self.own = form in ORDERS
        unit, gap = (16, 0) if self.own else (unit, gap)
        room = {name: -(-(plane.nbytes + gap) // unit) * unit for name, plane in self.plane.items()}
        self.places: dict[KEY, tuple[int, int, int]] = {}  # (plane, layer) -> (memory, offset, slot stride)
        at = unit
        if form == "separate":
            sizes = []
            for number, (name, layer) in enumerate(keys):
                self.places[name, layer] = (number, unit, room[name])
                sizes.append(unit + (slots + 1) * room[name] + unit)
        elif form == "layer_major":
            for name, layer in keys:
                start = unit + layer * (slots + 1) * room[name]
                self.places[name, layer] = (list(room).index(name), start, room[name])
            sizes = [2 * unit + layout.layers_of(plane) * (slots + 1) * room[plane.name] for plane in layout.planes]
        elif form == "pages":
            page = sum(room.values())
            for name, layer in keys:
                inside = sum(list(room.values())[: list(room).index(name)])
                self.places[name, layer] = (0, unit + layer * (slots + 1) * page + inside, page)
            sizes = [2 * unit + max(map(layout.layers_of, layout.planes)) * (slots + 1) * page]
        else:
            stride = sum(room[name] for name, _ in keys)
            for name, layer in keys:
                self.places[name, layer] = (0, at, stride)
                at += room[name]
            sizes = [2 * unit + (slots + 1) * stride]
        self.memory = [torch.empty(size, dtype=torch.uint8, device=backend.device) for size in sizes]
        for whole in self.memory:
            whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8, generator=generator))
        self.expected = [whole.to("cpu", copy=True) for whole in self.memory]
        self.tensors = {} if self.own else {plane.name: self._tensor(plane) for plane in layout.planes}
        self.room = {name: room[name] if self.own else plane.nbytes for name, plane in self.plane.items()}

    def _tensor(self, plane: Plane) -> Tensor | list[Tensor]:
        layers = [self._layer(plane, layer) for layer in range(self.layout.layers_of(plane))]
        if self.form != "pages":
            return layers
        step = layers[1].storage_offset() - layers[0].storage_offset() if len(layers) > 1 else 0
        return layers[0].as_strided((len(layers), *layers[0].shape), (step, *layers[0].stride()))

    def _layer(self, plane: Plane, layer: int) -> Tensor:
        """Returns one layer, `slot ...`, from its entry in `places`. Uses no code of the library."""
        memory, offset, stride = self.places[plane.name, layer]
        size = plane.dtype.itemsize
        assert offset % size == 0 == stride % size
        dense = torch.empty(plane.shape, dtype=plane.dtype).stride()
        view = torch.empty(0, dtype=plane.dtype, device=self.backend.device)
        shape, strides = (self.slots + 1, *plane.shape), (stride // size, *dense)
        return view.set_(self.memory[memory].untyped_storage(), offset // size, shape, strides)

    def storage(self) -> Planes:
        """Returns planes in this memory. From now on, expects zeros in their null slot."""
        if self.own:
            memory = iter(self.memory)
            layout = replace(self.layout, order=self.form)
            storage = Planes(layout, self.slots, self.backend, lambda nbytes: next(memory)[16 : 16 + nbytes])
        else:
            storage = Planes.from_tensors(self.layout, self.tensors, self.backend)
        self.expect(0, None)
        return storage

    def bytes_of(self, name: str, layer: int, slot: int) -> Tensor:
        """Returns the expected bytes of one block, as a view."""
        memory, offset, stride = self.places[name, layer]
        start = offset + slot * stride
        return self.expected[memory][start : start + self.room[name]]

    def expect(self, dst: int, src: int | None, names: tuple[str, ...] | None = None) -> None:
        """Expects in slot dst the bytes of slot src, or the fill if src is None. names: names of planes; None: all."""
        for name, layer in self.places:
            if names is None or name in names:
                block = self.bytes_of(name, layer, dst)
                block.copy_(self.fresh(name, len(block), dst) if src is None else self.bytes_of(name, layer, src))

    def fresh(self, name: str, nbytes: int, slot: int) -> Tensor:
        """Returns the bytes of a filled block. Its padding repeats the fill value, but is 0 in the null slot."""
        plane = self.plane[name]
        element = torch.full((1,), plane.fill, dtype=plane.dtype).view(torch.uint8)
        block = element.repeat(-(-nbytes // len(element)))[:nbytes]
        if not slot:
            block[plane.nbytes :] = 0
        return block

    def expect_all(self, *moves: tuple[int, int | None] | tuple[int, int | None, tuple[str, ...]]) -> None:
        """Expects each move (dst, src), then checks all bytes."""
        for move in moves:
            self.expect(*move)
        self.check()

    def check(self) -> None:
        """Checks every byte, foreign bytes as well."""
        for whole, expected in zip(self.memory, self.expected, strict=True):
            assert torch.equal(whole.cpu(), expected)

    def ids(self, *slots: int) -> Tensor:
        return torch.tensor(slots, dtype=torch.int32, device=self.backend.device)
