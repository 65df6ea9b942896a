"""Refuses memory that the device or the host does not have, with the numbers, before anything is allocated."""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from memstate.checks import INT32_MAX
from memstate.errors import MemstateError

INT64_MAX = 2**63 - 1
MOST_SLOTS = INT32_MAX - 31  # kernels number the bits of the bitmap, whole words of 32, with int32


class Part(NamedTuple):
    """Memory that a constructor will allocate.

    Args:
        name: what it is for.
        nbytes: its size in bytes.
        lower: the setting to lower if it does not fit.
    """

    name: str
    nbytes: int
    lower: str


def memory(device: torch.device) -> int:
    """Returns the bytes of memory that a device has in all, used or not. Syncs: no."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return sys.maxsize


def require_memory(
    asked: str, parts: Sequence[Part], device: torch.device, error: type[MemstateError], where: str = ""
) -> None:
    """Refuses parts that are larger together than the memory of a device.

    Args:
        asked: the settings that ask for them, for the error.
        parts: what would be allocated.
        device: where it would be allocated.
        error: the class of the error.
        where: how the error names the device. Default: its own name.

    Raises:
        MemstateError: of the class `error`; the memory is too small.
    """
    if sum(part.nbytes for part in parts) > memory(device):
        raise error(f"{asked}: {describe(parts, device, where)}")


def describe(parts: Sequence[Part], device: torch.device, where: str = "") -> str:
    """Returns a text: what the parts need, largest first, what the device has, and what to lower.

    Args:
        parts: what would be allocated.
        device: where it would be allocated.
        where: how the text names the device. Default: its own name.
    """
    ordered = sorted((part for part in parts if part.nbytes), key=lambda part: -part.nbytes)
    each = ", ".join(f"{part.name} {part.nbytes} bytes" for part in ordered)
    needed, there = _bytes(sum(part.nbytes for part in parts)), _bytes(memory(device))
    return f"this needs {needed} on {where or device}, which has {there}: {each}; lower {ordered[0].lower}"


def _bytes(count: int) -> str:
    """Returns a number of bytes with its GiB, rounded down to a tenth."""
    tenths = count * 10 >> 30
    return f"{count} bytes ({tenths // 10}.{tenths % 10} GiB)"
