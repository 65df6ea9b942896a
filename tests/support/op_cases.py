"""Makes small launches of each operation by its name, and moves launches to another device."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.dispatch import OPS
from memstate.kernels.own import KERNELS
from memstate.kernels.tables import PlaneMap, RecordMap, RingMap, ScaledMap
from memstate_tools import maker
from tests.support import byte_cases, register_cases
from tests.support.addresses import Limits
from tests.support.op_case import CPU, Case, Maker

# op -> function of its name in one of the two files, which makes a launch
MAKERS = {op: vars(file)[op] for op in OPS for file in (register_cases, byte_cases) if op in vars(file)}
ONE_PROGRAM = {"claim", "release", "ownership", "audit", "plan"}  # operations whose launches have one program
TABLES = {PlaneMap: "tiles", RecordMap: "tiles", ScaledMap: "layers", RingMap: "table"}  # column 0 holds addresses
BATCHES = (1, 3, 33)  # of operations of one's own
MOST = 64  # limit of the seeds that `several` tries


def made(op: str, seed: int) -> Case:
    """Returns a launch of an operation with random arguments. One of one's own runs on its case, with padding."""
    if op in KERNELS:
        arguments = KERNELS[op].case(BATCHES[seed % len(BATCHES)], maker.Maker(CPU, seed, padded=True))
        return Case(op, arguments, Limits(), exact=False)
    case: Case = MAKERS[op](Maker(seed))
    return case


def several(op: str, least: int = 3) -> Iterator[Case]:
    """Yields `least` launches of an operation, then more until each optional argument, such as a tree, has occurred."""
    given: set[str] = set()
    for seed in count():
        case = made(op, seed)
        new = {name for name, value in case.arguments.items() if value is not None} - given
        if seed < least or new:
            yield case
        given |= new
        if seed + 1 >= least and given == set(case.arguments):
            return
        assert seed < MOST, f"{op}: never given: {', '.join(sorted(set(case.arguments) - given))}"


class Moving:
    """Moves tensors to a device with their whole storage. Tensors that shared bytes still share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[int, tuple[int, Tensor]] = {}  # old address -> number of bytes, and the moved memory

    def tensor(self, old: Tensor) -> Tensor:
        """Moves the storage of a tensor, unless it was moved before. Returns the tensor on the moved storage."""
        storage = old.untyped_storage()
        if storage.data_ptr() not in self._memory:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._memory[storage.data_ptr()] = storage.nbytes(), whole.to(self._device, copy=True)
        whole = self._memory[storage.data_ptr()][1]
        new = torch.empty(0, dtype=old.dtype, device=self._device)
        return new.set_(whole.untyped_storage(), old.storage_offset(), old.shape, old.stride())

    def address(self, old: int) -> int:
        """Returns the new address of a byte whose memory has been moved."""
        for start, (nbytes, whole) in self._memory.items():
            if start <= old < start + nbytes:
                return whole.data_ptr() + old - start
        raise AssertionError(f"address {old:#x} is in no tensor of this launch")

    def anything(self, given: Any) -> Any:
        """Moves all tensors of an argument, at any depth. Tables get the addresses of the moved memory."""
        if isinstance(given, Tensor):
            return self.tensor(given)
        if isinstance(given, dict):
            return {name: self.anything(part) for name, part in given.items()}
        if not isinstance(given, tuple):
            return given
        parts = [self.anything(part) for part in given]
        if not hasattr(given, "_fields"):
            return tuple(parts)
        new = type(given)(*parts)
        if name := TABLES.get(type(given)):
            table = getattr(new, name)
            table[:, 0] = torch.tensor([self.address(old) for old in table[:, 0].tolist()], dtype=torch.int64)
        return new


def moved(case: Case, device: torch.device) -> Case:
    """Returns the same launch in new memory on a device."""
    return replace(case, arguments=Moving(device).anything(case.arguments), limits=Limits(), memory=[])
