"""The pools that `memstate check` knows by name, and the report of a check."""

from collections.abc import Callable, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

from memstate.cli.own import own
from memstate.testing.check import Finding

HOLDS = {True: "yes", False: "no", None: "not offered"}
POOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "memstate": ("memstate_tools.check.ours:Manager", ()),
    "memstate.sglang": ("memstate_tools.check.sglang:SglangPool", ("memstate.integrations.sglang.rows",)),
    "sglang": ("memstate_tools.check.sglang:SglangPool", ()),
    "vllm": ("memstate_tools.check.vllm:VllmPool", ()),
}  # name -> (module:name of its maker, arguments of the maker)


def factory_of(name: str) -> Callable[[], Any]:
    """Returns a function that makes pools.

    Args:
        name: a name of `POOLS`, or module:factory. The module can be in the current folder.

    Raises:
        InvalidArgument: there is no such pool.
    """
    place, given = POOLS.get(name, (name, ()))
    return partial(own("pool", place, f"{', '.join(POOLS)} or module:factory"), *given)


def text(findings: Sequence[Finding], columns: int) -> str:
    """Returns the report of a check.

    Args:
        findings: the findings of the check.
        columns: largest number of characters of a line.
    """
    lines = []
    for each in findings:
        holds = HOLDS[each.holds] if each.promised or each.holds is not False else "no (choice)"
        lines += wrap(f"{each.behaviour:5}{holds:13}{each.title}", columns, subsequent_indent=" " * 18)
        for call in each.sequence:
            lines += wrap(call, columns, initial_indent=" " * 7, subsequent_indent=" " * 11)
    count, broken = [each.holds for each in findings].count, sum(each.broken for each in findings)
    lines += ["", f"{count(True)} hold, {broken} do not, {count(None)} are not offered"]
    if count(False) > broken:
        lines.append("no (choice): memstate does it, other pools need not; it is not counted")
    return "\n".join(lines)
