"""One block of memory as an engine allocates it: states and KV pages side by side, with foreign bytes between them.

layer-major   layer [index [plane gap] ..]     the attention layer last; each layer has its own record
slot-major    index [layer [plane gap] ..]     slot i and page i lie in one record

Index 0 of all planes is the null slot or page, as memstate needs it.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from memstate.state.layout import MOVE_BYTES, Plane, StateLayout

GAP = MOVE_BYTES  # bytes between two blocks, so that a move that is one lane too long changes foreign bytes


@dataclass(frozen=True)
class PlanePlace:
    """The place of a plane of one layer in memory, in bytes.

    Args:
        plane: Shape and dtype of the plane.
        highest: The highest index of a slot or page.
        offset: Offset of index 0.
        stride: Distance from one index to the next.
    """

    plane: Plane
    highest: int
    offset: int
    stride: int

    def tensor(self, memory: Tensor) -> Tensor:
        """Returns the plane as `index ...`."""
        size, shape = self.plane.dtype.itemsize, self.plane.shape
        inner = torch.empty(shape, dtype=self.plane.dtype, device="meta").stride()
        strides = (self.stride // size, *inner)
        return memory.view(self.plane.dtype).as_strided((self.highest + 1, *shape), strides, self.offset // size)

    def blocks(self, memory: Tensor) -> Tensor:
        """Returns the bytes of the plane as `index byte`."""
        return memory.as_strided((self.highest + 1, self.plane.nbytes), (self.stride, 1), self.offset)


class Arena:
    """A uint8 tensor for states and KV pages. All other bytes are foreign and hold a pattern.

    Args:
        states: Layout of a state. Its order decides how blocks follow each other.
        slots: Number of states.
        kv: Layout of a KV page.
        pages: Number of KV pages.
        device: Where the tensor lives.
    """

    def __init__(self, states: StateLayout, slots: int, kv: StateLayout, pages: int, device: torch.device) -> None:
        layers = [[(plane, slots) for plane in states.planes] for _ in range(states.layers)]
        layers += [[(plane, pages) for plane in kv.planes] for _ in range(kv.layers)]
        self.places: list[PlanePlace] = []
        end = GAP
        for record in layers if states.order == "layer_major" else [list(chain(*layers))]:
            stride, at = sum(_room(plane) for plane, _ in record), end
            for plane, highest in record:
                self.places.append(PlanePlace(plane, highest, at, stride))
                at += _room(plane)
            end += stride * (1 + max(highest for _, highest in record))
        self.memory = _pattern(end).to(device)
        self.states, self.kv = self._of(states), self._of(kv)

    def _of(self, layout: StateLayout) -> dict[str, list[Tensor]]:
        """Returns plane name -> `index ...` of each layer."""
        return {
            plane.name: [place.tensor(self.memory) for place in self.places if place.plane is plane]
            for plane in layout.planes
        }

    def foreign(self) -> Tensor:
        """Returns which bytes belong to no slot and no page: bool `byte`."""
        outside = torch.ones_like(self.memory)
        for place in self.places:
            place.blocks(outside).zero_()
        return outside.bool()

    def changed(self) -> list[int]:
        """Returns the offsets of foreign bytes that differ from the pattern.

        Syncs: yes.
        """
        wrong = (self.memory != _pattern(len(self.memory)).to(self.memory.device)) & self.foreign()
        changed: list[int] = wrong.nonzero().flatten().tolist()
        return changed


def _room(plane: Plane) -> int:
    """Returns the bytes of a block and of the gap after it."""
    return -(-plane.nbytes // MOVE_BYTES) * MOVE_BYTES + GAP


def _pattern(count: int) -> Tensor:
    """Returns bytes that are not zero. Most differ from the bytes that lie one byte, one gap or one stride further."""
    return (torch.arange(count, device="cpu") * 167 % 255 + 1).to(torch.uint8)
