"""Makes planes of random bytes, the expected bodies of records, and records between canaries (bytes that must stay)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.state import presets
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from tests.support.given import in_order

RECORDS, CANARY = 4, 48
PRESETS = [name for name in presets.__all__ if name in presets.CHECKPOINTS]


def toy(name: str, order: Order = "layer_major", **options: torch.dtype) -> StateLayout:
    """Returns a small copy of a preset. The axes of its planes have at most 3, 5 and 6 elements."""
    layout = getattr(presets, name)(order=order, **options)
    planes = [Plane(plane.name, tuple(map(min, plane.shape, (3, 5, 6))), plane.dtype) for plane in layout.planes]
    return StateLayout(planes, 3, order)


def ids(storage: Planes, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=storage.device)


def filled(layout: StateLayout, slots: int, backend: Backend, generator: torch.Generator) -> Planes:
    """Returns planes of random bytes, also in their padding and in the null slot."""
    storage = Planes(layout, slots, backend)
    for arena in storage.arenas:
        arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=generator))
    return storage


def blocks(storage: Planes, slot: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yields (plane, layer, bytes) of each block of a slot, in the order of a record."""
    for plane, layer in in_order(storage.layout):
        yield plane.name, layer, storage[plane.name][layer][slot].reshape(-1).view(torch.uint8)


def body(storage: Planes, slot: int) -> Tensor:
    """Returns the expected body of the record of a slot, `byte`, as uint8 on the host. Its padding is 0."""
    parts = []
    for _, _, block in blocks(storage, slot):
        parts += [block.cpu(), torch.zeros(-len(block) % 16, dtype=torch.uint8)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


class Records:
    """Records of zeros between canaries of random bytes."""

    def __init__(self, packing: Packing, generator: torch.Generator) -> None:
        device = packing.backend.device
        shape = (RECORDS, CANARY + packing.nbytes + CANARY)
        self.whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        self.bodies = self.whole[:, CANARY : CANARY + packing.nbytes]
        self.bodies.zero_()
        self.expected = self.whole.cpu().clone()
        self.expected_bodies = self.expected[:, CANARY : CANARY + packing.nbytes]

    def check(self) -> None:
        assert torch.equal(self.whole.cpu(), self.expected)


def body_mask(packing: Packing) -> Tensor:
    """Returns a mask on the host: for each byte of a body, false if it is padding."""
    mask = torch.zeros(packing.nbytes, dtype=torch.bool)
    for row in packing.layout.table():
        for layer in range(packing.layout.layers):
            start = row.offset + layer * row.layer_stride
            mask[start : start + row.payload] = True
    return mask
