"""Makes a small launch of an operation: random arguments between guard bytes, and the memory that it may touch."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memstate.kernels import own
from memstate.kernels.configs import CopyConfig
from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.tuned import trying
from tests.support.addresses import Limits
from tests.support.decode_case import SLOTS, rubbish

CPU = torch.device("cpu")
GUARD = 48  # bytes before and after every tensor


def every() -> list[str]:
    """Returns all operations: those of memstate, then those of one's own that are registered or installed here."""
    own.load()
    return [*OPS, *own.KERNELS]


@dataclass
class Case:
    """A launch: its arguments, and the limits of the memory that it may touch.

    exact: whether kernel and reference give the same bits. times: number of launches, one after the other. copying:
    launch configuration of the copy kernel, for its operations. memory: all memory of the arguments, computed here.
    """

    op: str
    arguments: dict[str, Any]
    limits: Limits
    exact: bool = True
    times: int = 1
    copying: CopyConfig | None = None
    memory: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        storages = {t.untyped_storage().data_ptr(): t for t in tensors([self.arguments, self.limits.reach])}
        self.memory = [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in storages.values()
        ]
        self._before = [whole.clone() for whole in self.memory]

    def module(self, folder: str = "memstate.kernels") -> ModuleType | Backend:
        """Returns the module of the operation. An operation of one's own is in a backend only."""
        if self.op in OPS:
            return import_module(f"{folder}.{OPS[self.op]}")
        return Backend("reference" if folder.endswith("reference") else "auto")

    def run(self, module: ModuleType | Backend) -> list[Tensor]:
        """Restores the memory, then launches. Returns copies of all memory, and of the returned tensors.

        module: a module or a backend that has the operation.
        """
        for whole, before in zip(self.memory, self._before, strict=True):
            whole.copy_(before)
        with trying(self.copying) if self.copying else nullcontext():
            returned = [getattr(module, self.op)(**self.arguments) for _ in range(self.times)]
        new = [out.clone() for out in returned if out is not None]
        return [*(whole.clone() for whole in self.memory), *new]


def tensors(given: Any) -> Iterator[Tensor]:
    """Yields all tensors inside a tuple, list or dictionary, at any depth."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list, dict)):
        for part in given.values() if isinstance(given, dict) else given:
            yield from tensors(part)


class Maker:
    """Draws random numbers and tensors from one seed. Guard bytes surround each tensor."""

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of rubbish between guards."""
        nbytes = prod(shape) * dtype.itemsize
        whole = rubbish(2 * GUARD + nbytes, CPU, self.generator)
        return whole[GUARD : GUARD + nbytes].view(dtype).view(shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(*shape, dtype=dtype).copy_(torch.randn(shape, generator=self.generator))

    def ints(self, values: Sequence[int], wide: bool = False) -> Tensor:
        """Returns a column of int32, or of int64 if `wide`."""
        column = self.empty(len(values), dtype=torch.int64 if wide else torch.int32)
        return column.copy_(torch.tensor(values, dtype=torch.int64))

    def plane(self, *inner: int, dtype: torch.dtype, layers: int = 2, gap: int = 16) -> Tensor:
        """Returns rubbish, `layer slot ...`, with at least `gap` bytes between slots."""
        size, block = dtype.itemsize, prod(inner)
        stride = (-(-block * size // 16) * 16 + gap) // size
        whole = self.empty(layers * SLOTS * stride, dtype=dtype)
        shape, strides = (layers, SLOTS, *inner), (SLOTS * stride, stride, *torch.empty(inner, device="meta").stride())
        return whole.as_strided(shape, strides)

    def slots(self, n: int) -> list[int]:
        """Returns up to `n` ids: different slots, and some numbers that are no slot."""
        none = [self.one(0, -1, -(2**31), SLOTS, 2**31 - 1) for _ in range(n)]
        real = self.rng.sample(range(1, SLOTS), min(n, SLOTS - 1))
        return [slot if self.rng.random() < 0.7 else other for slot, other in zip(real, none, strict=False)]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Returns the number of the first packed token of each row, then the number of all tokens."""
    return [0, *accumulate(lengths)]


def first_of(lengths: Sequence[int], chunk: int) -> list[int]:
    """Returns the number of the first piece of each row, then the number of all pieces. Rows share no piece."""
    return [0, *accumulate(-(-length // chunk) for length in lengths)]
