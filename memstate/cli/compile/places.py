"""Counts the barriers of a compiled text that its source asks for; the compiler adds others. Knows no kernel.

A program whose phases speak to each other through memory needs the barrier between them. The number of all barriers
does not always tell: where one of these is missing, the compiler may put one of its own a few lines further on.
"""

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

PLACE = re.compile(r"\s*\.loc\b.*?[;/] (\w+\.py):(\d+):")  # the first is the innermost of the functions inlined there
BARRIER = re.compile(r"\s*(?:bar|barrier)(?:\.cta)?\.sync|\s*s_barrier")


def source_barriers(text: str, folders: Sequence[Path]) -> int:
    """Counts the barriers in PTX or AMD GPU assembly that stand where a line of the source has `debug_barrier`.

    Args:
        text: The assembly.
        folders: Where the source is looked for, by the names of files in the text. Their paths may be those of another
            checkout, which compiled the same lines earlier and left the result in Triton's cache.
    """
    found, line = 0, ""
    for statement in text.splitlines():
        if place := PLACE.match(statement):
            line = source_line(place[1], int(place[2]), folders)
        elif BARRIER.match(statement):
            found += "debug_barrier" in line
    return found


def source_line(name: str, number: int, folders: Sequence[Path]) -> str:
    """Returns a line of a file, by the name and number in a compiled text; empty where no folder has the file."""
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    return linecache.getline(str(path), number) if path else ""
