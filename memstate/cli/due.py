"""Which slots a timed copy moves: a few that are due, spread evenly among the entries of a large batch."""

import torch
from torch import Tensor

BATCH = 256  # entries of a call, most of them not due


def fitting(due: tuple[int, ...], bytes_each: int, free_bytes: int) -> tuple[int, ...]:
    """Returns the numbers of due slots that fit three quarters of the memory; the smallest one in any case.

    Args:
        due: Numbers of slots, the smallest first.
        bytes_each: Memory needed for each slot that is due.
        free_bytes: Memory of the device that is free.
    """
    return tuple(n for n in due if bytes_each * n <= 0.75 * free_bytes) or due[:1]


def spread(due: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns destinations and sources, int32 `entry` each: slots 1 to 2 `most` in random order, 0 where none is due.

    Args:
        due: Entries that are due.
        most: Half of the slots there are.
        device: Of the result.
    """
    columns = torch.zeros(2, BATCH, dtype=torch.int32)
    shuffled = torch.randperm(2 * most)[: 2 * due].view(2, due) + 1
    columns[:, :: BATCH // max(1, due)][:, :due] = shuffled.int()
    dst, src = columns.to(device)
    return dst, src
