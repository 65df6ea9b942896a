"""Registers, spills and barriers of a compiled kernel, from the text and the binary made for a target.

A program whose phases speak to each other through memory needs the barrier between them. The number of all barriers
does not always tell: where one of these is missing, the compiler may put one of its own a few lines further on.
"""

import linecache
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PLACE = re.compile(r"\s*\.loc\b.*?[;/] (\w+\.py):(\d+):")  # the first is the innermost of the functions inlined there
BARRIER = re.compile(r"\s*(?:bar|barrier)(?:\.cta)?\.sync|\s*s_barrier")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
METADATA = re.compile(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)")


class Resources(NamedTuple):
    """What one thread takes: registers, and bytes of private memory that registers were spilled to."""

    registers: int
    spill_bytes: int


def resources(texts: Mapping[str, Any]) -> Resources:
    """Returns what the assembler noted in a kernel's metadata for AMD, or in its binary for NVIDIA.

    Triton gives kernels no local arrays: a thread's stack frame is what was spilled.

    Raises:
        ValueError: Nothing is noted.
    """
    if "amdgcn" in texts:
        figures = {name: int(figure) for name, figure in METADATA.findall(texts["amdgcn"])}
        try:  # scalar registers that are spilled go to lanes of a vector register, and only from there to memory
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
    """Returns what a tool of NVIDIA's, as Triton brings it, says of a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)


def barriers(text: str, folders: Sequence[Path]) -> tuple[int, int]:
    """Counts the barriers in PTX or AMD GPU assembly, and those that stand where the source has `debug_barrier`.

    Args:
        text: The assembly.
        folders: Where the source is looked for, by the names of files in the text. Their paths may be those of another
            checkout, which compiled the same lines earlier and left the result in Triton's cache.
    """
    found, of_source, line = 0, 0, ""
    for statement in text.splitlines():
        if place := PLACE.match(statement):
            line = source_line(place[1], int(place[2]), folders)
        elif BARRIER.match(statement):
            found, of_source = found + 1, of_source + ("debug_barrier" in line)
    return found, of_source


def source_line(name: str, number: int, folders: Sequence[Path]) -> str:
    """Returns a line of a file, by the name and number in a compiled text; empty where no folder has the file."""
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    return linecache.getline(str(path), number) if path else ""
