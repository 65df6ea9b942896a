"""Makes the tensors of a case: poisoned at first, and each with poison before and behind it."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

POISON = 255  # every byte: NaN as a float of any type, -1 as an integer
MARGIN = 1 << 17  # bytes before and behind a tensor, at least


class Maker:
    """Makes tensors whose surroundings are known, with random values that depend on a seed only.

    Args:
        device: Device of the tensors.
        seed: Seed of all values.
        padded: Whether some rows have slot 0, as padding has: the first reads it, and the last writes to it.

    Attributes:
        generator: Generator of the values.
        nbytes: Bytes of all tensors.

    Example:
        >>> make = Maker(torch.device("cpu"), seed=1)
        >>> state, out = make.normal(9, 2040), make.empty(4, 2040)
        >>> make.rows(4)["read"].shape
        torch.Size([4])
    """

    def __init__(self, device: torch.device, seed: int, padded: bool = False) -> None:
        self.device, self.padded = device, padded
        self.generator = torch.Generator(device).manual_seed(seed)
        self._whole: list[tuple[Tensor, int]] = []  # memory, bytes of poison at each end

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(whole.nbytes for whole, _ in self._whole)

    def arena(self, nbytes: int, margin: int = MARGIN) -> Tensor:
        """Returns poisoned bytes with `margin` bytes of poison before and behind them."""
        whole = torch.full((nbytes + 2 * margin,), POISON, dtype=torch.uint8, device=self.device)
        self._whole.append((whole, margin))
        return whole[margin : margin + nbytes]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a contiguous tensor of poison: NaN, or -1. There is room for a wrong slot before and behind it."""
        nbytes = prod(shape) * dtype.itemsize
        margin = max(MARGIN, 2 * nbytes // max(1, *shape[:1]) & -MARGIN)
        return self.arena(nbytes, margin).view(dtype).view(shape)

    def like(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of poison with the shape and dtype of another one."""
        return self.empty(*tensor.shape, dtype=tensor.dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a contiguous tensor of normally distributed numbers."""
        random = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)
        return self.empty(*shape, dtype=dtype).copy_(random)

    def slots(self, batch: int) -> tuple[Tensor, Tensor]:
        """Returns two vectors of `batch` slots, int32. Together they have the slots 1 to 2 batch, in random order.

        With padding, the first slot of the first vector is 0, and the last slot of the second one. A batch of 1 has no
        padding.
        """
        order = torch.randperm(2 * batch, generator=self.generator, device=self.device).int() + 1
        read, write = (self.empty(batch, dtype=torch.int32) for _ in range(2))
        read.copy_(order[:batch])
        write.copy_(order[batch:])
        if self.padded and batch > 1:
            read[0] = write[-1] = 0
        return read, write

    def rows(self, batch: int, tokens: int = 1) -> dict[str, Tensor]:
        """Returns the vectors of a step: each row reads one slot and writes another, without snapshots.

        Args:
            batch: Number of rows. Their slots are 0 to 2 batch.
            tokens: Tokens of each row.
        """
        read, write = self.slots(batch)
        snapshot, count = (self.empty(batch, dtype=torch.int32) for _ in range(2))
        return {"read": read, "write": write, "snapshot": snapshot.zero_(), "tokens": count.fill_(tokens)}

    def around(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Returns the memory before and behind each tensor, by a text that says so.

        Args:
            names: Address of a tensor -> its name.
        """
        found: dict[str, Tensor] = {}
        for number, (whole, margin) in enumerate(self._whole):
            name = names.get(whole.data_ptr() + margin, f"tensor {number}")
            found |= {f"memory before {name}": whole[:margin], f"memory behind {name}": whole[-margin:]}
        return found

    def made(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies in memory that was made here."""
        address = tensor.untyped_storage().data_ptr()
        return any(whole.data_ptr() == address for whole, _ in self._whole)
