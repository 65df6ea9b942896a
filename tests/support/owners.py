"""The way of the tests into the tables of owners. No test reaches into them otherwise."""

import memstate as ms
from memstate.prefix import PrefixCache
from memstate.prefix.tree import Node
from memstate.requests.holdings import Holdings


def holdings(mem: ms.StateManager) -> Holdings:
    """Who has each holder."""
    return mem._holdings


def states(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """The states with a valid handle, by register: those that leave have none."""
    return {state.register: state for state in holdings(mem).of("snapshot", "cached", "session", "mark")}


def leaving(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """The states that only first steps keep, by register."""
    return {state.register: state for state in holdings(mem).of("leaving")}


def pinned(mem: ms.StateManager) -> list[int]:
    """Registers of holders that first steps are about to read."""
    return [register for register, readers in enumerate(holdings(mem).readers) if readers]


def nodes(cache: PrefixCache) -> dict[int, Node]:
    """The nodes with a state, by its register."""
    return {node.snapshot.register: node for node in cache.stated() if node.snapshot}


def kinds(mem: ms.StateManager, row: ms.Row) -> list[str]:
    """Why a row keeps its states at marks, in order."""
    return [mem._marks.kind(state) for state in mem._marks.kept.get(row.index, ())]


def free(mem: ms.StateManager) -> int:
    """Holders without a state."""
    return holdings(mem).free
