"""Runs a few instructions of PTX as a kernel, and names the forms of the instructions of a text."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

from tests.support.ptx.program import Fault, Program
from tests.support.ptx.races import told
from tests.support.ptx.reading import read

HEAD = """.version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 global_smem[];
.visible .entry body(
{params}
)
.reqntid {threads}
{{
\t.reg .pred \t%p<64>;\n\t.reg .b16 \t%rs<64>;\n\t.reg .b32 \t%r<64>;\n\t.reg .b64 \t%rd<64>;
"""


def kernel(body: str, kinds: Sequence[str] = (), warps: int = 1) -> str:
    """Returns the PTX of a kernel of some instructions, each with ";" at its end.

    A fault names the place of its instruction: `body.py:1` is the first. kinds: types of the parameters.
    """
    text = HEAD.format(
        params=",\n".join(f"\t.param .{kind} body_param_{i}" for i, kind in enumerate(kinds)), threads=32 * warps
    )
    text += "".join(f"\tld.param.b64 \t%rd{i}, [body_param_{i}];\n" for i, kind in enumerate(kinds) if kind == "u64")
    for number, line in enumerate([*body.split(";")[:-1], "ret"], 1):
        code = re.sub(r"(\$\w+:)\s*", r"\1\n", line.strip())
        text += f"\t.loc\t1 {number} 0\n{code};\n"
    return text + '}\n.file 1 "body.py"\n'


def run(
    body: str, *args: Any, warps: int = 1, grid: tuple[int, ...] = (1,), shared: int = 0, order: str = "together"
) -> None:  # fmt: skip
    """Executes instructions. args: tensors and numbers. Argument i comes in %rd<i>, but a float only as parameter."""
    kinds = ["f32" if isinstance(arg, float) else "u64" for arg in args]
    raced = Program(kernel(body, kinds, warps)).run(grid, args, warps, shared, order)
    if raced:
        raise Fault(f"race: {told(raced)}")


def forms(text: str) -> dict[str, str]:
    """Returns the forms of the instructions of a kernel, each with one instruction.

    A form is a name with all modifiers and types, and of `mov` also into how many parts it splits, or what it joins.
    """
    found = {}
    for one in chain(*read(text).blocks):
        parts = [
            f"{'<' * place}{len(arg.split(','))}{'<' * (not place)}"
            for place, arg in enumerate(one.args)
            if arg[0] == "{"
        ]
        found[" ".join([".".join(one.words), *(parts if one.words[0] == "mov" else [])])] = one.text
    return found
