"""Reads registers, spills and barriers of a compiled kernel from its assembly and its binary.

A program whose phases exchange data through memory needs the barriers of its source. The number of all barriers does
not show whether one of these is missing: the compiler may have added another one a few lines later.
"""

import linecache
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# the first place of a statement is the innermost inlined function
PLACE = re.compile(r"\s*\.loc\b.*?[;/] (\w+\.py):(\d+):")
BARRIER = re.compile(r"\s*(?:bar|barrier)(?:\.cta)?\.sync|\s*s_barrier")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
METADATA = re.compile(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)")


class Resources(NamedTuple):
    """Registers of one thread, and bytes of private memory to which registers were spilled."""

    registers: int
    spill_bytes: int


def resources(texts: Mapping[str, Any]) -> Resources:
    """Returns the resources in a kernel's metadata for AMD, or in its binary for NVIDIA.

    Triton gives kernels no local arrays, so a thread's stack frame has only spilled registers.

    Raises:
        ValueError: The text has no figures.
    """
    if "amdgcn" in texts:
        figures = {name: int(figure) for name, figure in METADATA.findall(texts["amdgcn"])}
        try:  # spilled scalar registers go to lanes of a vector register, and only from there to memory
            spilled = 4 * figures["vgpr_spill_count"]
            return Resources(figures["vgpr_count"], max(spilled, figures["private_segment_fixed_size"]))
        except KeyError as error:
            raise ValueError(f"amdgcn: no {error} in the metadata") from error
    usage = USAGE.search(of_binary("cuobjdump", texts["cubin"], "--dump-resource-usage"))
    if usage is None:
        raise ValueError("cuobjdump tells no resource usage")
    registers, stack, local = map(int, usage.groups())
    return Resources(registers, stack + local)


def of_binary(tool: str, cubin: bytes, *options: str) -> str:
    """Returns the output of an NVIDIA tool for a binary. Triton brings the tool."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)


def barriers(text: str, folders: Sequence[Path]) -> tuple[int, int]:
    """Counts the barriers in PTX or AMD GPU assembly.

    Args:
        text: Assembly of one kernel.
        folders: Folders with the source. Files are found by name: a text from Triton's cache may have the paths of
            another checkout, which compiled it.

    Returns:
        The number of all barriers, and of those at a `debug_barrier` of the source.
    """
    count, of_source, line = 0, 0, ""
    for statement in text.splitlines():
        if place := PLACE.match(statement):
            line = source_line(place[1], int(place[2]), folders)
        elif BARRIER.match(statement):
            count, of_source = count + 1, of_source + ("debug_barrier" in line)
    return count, of_source


def source_line(name: str, number: int, folders: Sequence[Path]) -> str:
    """Returns a line of a file, by the name and number in a compiled text; empty if no folder has the file."""
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    return linecache.getline(str(path), number) if path else ""
