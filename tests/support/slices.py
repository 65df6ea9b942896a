"""Makes tensors `batch token ..` that are slices of wider tensors, and records the torch operations of a block."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.decode_case import rubbish


def sliced(tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns a slice, with the values of `tensor`, of a wider tensor of rubbish, and all bytes of the wider tensor.

    The amount of rubbish before and after each token differs from call to call. If the width of a token is a multiple
    of 16 bytes, each token begins at a multiple of 16 bytes.
    """
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    size, width = tensor.element_size(), tensor[0, 0].numel() if tensor.numel() else 1
    step = 16 // size if width * size % 16 == 0 else 1
    before, behind = (step * rng.randint(1, 3) for _ in range(2))
    batch, token = tensor.shape[:2]
    whole = rubbish(batch * token * (before + width + behind) * size, tensor.device, generator)
    wide = whole.view(tensor.dtype).view(batch, token, before + width + behind)
    part = wide[..., before : before + width].unflatten(-1, tensor.shape[2:])
    part.copy_(tensor)
    return part, whole


def packed(shapes: dict[str, tuple[int, ...]], like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns adjacent slices of one tensor, `batch token ..`, as a projection makes them, with rubbish at the end.

    Args:
        shapes: Name -> shape of a slice after `batch token`.
        like: A tensor with the batch, tokens and dtype of the slices.
        generator: Generator of the rubbish.
    """
    total = sum(map(prod, shapes.values())) + 16 // like.element_size()
    batch, token = like.shape[:2]
    whole = rubbish(batch * token * total * like.element_size(), like.device, generator).view(like.dtype)
    parts = whole.view(batch, token, total).split([*map(prod, shapes.values()), 16 // like.element_size()], -1)
    return {name: part.unflatten(-1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}


class Made(TorchDispatchMode):
    """Collects the names of the operations that torch runs, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation, and runs it."""
        if not func.is_view:
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    """Yields a list. It gets the torch operations of the block that make, copy or compute a tensor."""
    with Made() as made:
        yield made.ops
