"""Reads and shows sizes, and refuses memory that a device or the host does not have before it is allocated."""

import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from memstate import container
from memstate.checks import INT32_MAX, is_whole, shown
from memstate.errors import InvalidArgument, MemstateError

INT64_MAX = 2**63 - 1
MOST_SLOTS = INT32_MAX - 31  # int32 must number all bits of the bitmap, which has whole words of 32 bits

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {f"{unit}iB": 1 << 10 * at for at, unit in enumerate("KMGT", 1)}
TOKEN_UNITS = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20}


def byte_count(what: str, value: int | str) -> int:
    """Returns a number of bytes: a whole number, or a text such as "80GiB" (2**30 bytes) or "141GB" (10**9 bytes).

    A text must have a unit, because "80" hardly means 80 bytes.

    Args:
        what: the name of the value in an error.
        value: the number or the text.

    Raises:
        InvalidArgument: the value is neither, has no unit, or is less than 1.

    Example:
        >>> byte_count("memory", "1.5KiB")
        1536
    """
    return _counted(what, value, UNITS, "bytes, such as 80GiB or 141GB")


def token_count(what: str, value: int | str) -> int:
    """Returns a number of tokens: a whole number, or a text such as "32k" (32 768 tokens).

    Args:
        what: the name of the value in an error.
        value: the number or the text.

    Raises:
        InvalidArgument: the value is neither, or is less than 1.

    Example:
        >>> token_count("context", "32k")
        32768
    """
    return _counted(what, value, TOKEN_UNITS, "tokens, such as 32768 or 32k")


def _counted(what: str, value: int | str, units: Mapping[str, int], expected: str) -> int:
    parts = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    known = ", ".join(filter(None, units))
    if parts and not parts[2] and "" not in units:
        raise InvalidArgument(
            f"{what}={shown(value)}: a number without a unit; write {parts[1]}GiB or {parts[1]}GB, or for so many "
            f"bytes {parts[1]}B (units: {known})"
        )
    if parts and parts[2] not in units:
        raise InvalidArgument(f"{what}={shown(value)}: unknown unit {parts[2]!r}, expected one of {known}")
    count = 0
    if parts:
        count = int(Fraction(parts[1]) * units[parts[2]])
    elif is_whole(value):
        count = int(value)
    if not 1 <= count <= INT64_MAX:
        raise InvalidArgument(f"{what}={shown(value)}: expected at least 1, in {expected}")
    return count


class MemoryPart(NamedTuple):
    """A piece of memory that a constructor will allocate.

    Args:
        name: what the memory is for.
        nbytes: its size in bytes.
        lower: the setting to lower if the memory does not fit.
    """

    name: str
    nbytes: int
    lower: str


def memory(device: torch.device) -> int:
    """Returns the bytes of all memory of a device, used or not. For the host: the bytes that the container may use.

    Syncs: no.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container.limit())
    except (AttributeError, ValueError, OSError):  # the system does not tell its memory
        return container.limit()


def require_memory(
    asked: str, parts: Sequence[MemoryPart], device: torch.device, error: type[MemstateError], where: str = ""
) -> None:
    """Refuses parts whose sum is larger than the memory of a device.

    Args:
        asked: the settings that ask for the parts, for the text of the error.
        parts: what would be allocated.
        device: where it would be allocated.
        error: the class of the error.
        where: how the error names the device. Default: its own name.

    Raises:
        MemstateError: of the class `error`; the memory is too small.
    """
    if sum(part.nbytes for part in parts) > memory(device):
        raise error(f"{asked}: {describe(parts, device, where)}")


def describe(parts: Sequence[MemoryPart], device: torch.device, where: str = "") -> str:
    """Returns a text for an error: what the parts need, largest first, what the device has, and what to lower.

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
    """Returns a number of bytes as text, followed by the same in GiB, rounded down to a tenth."""
    tenths = count * 10 >> 30
    return f"{count} bytes ({tenths // 10}.{tenths % 10} GiB)"


def format_bytes(count: int) -> str:
    """Returns a number of bytes as a text for people, in binary units, such as "73.69 MiB"."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{count} B"
