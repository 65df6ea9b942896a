"""The way of the tests into the tables of owners. No test reaches into them otherwise."""

import memstate as ms
from memstate.prefix.sessions import Conversation, Sessions
from memstate.prefix.tree import Node
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks
from memstate.requests.page_table import PageTable
from memstate.requests.pages import PageAllocator
from memstate.requests.table import RequestTable


def holdings(mem: ms.StateManager) -> Holdings:
    """Who has each holder."""
    return mem._parts.holdings


def table(mem: ms.StateManager) -> RequestTable:
    """Who has each row, and how far it is."""
    return mem._parts.table


def row_pages(mem: ms.StateManager) -> PageTable:
    """Which KV pages each row has."""
    return mem._parts.pages


def kv_pages(mem: ms.StateManager) -> PageAllocator:
    """How many have each KV page."""
    return row_pages(mem).allocator


def marks(mem: ms.StateManager) -> Marks:
    """Which lengths of its prompt each row keeps states for."""
    return mem._parts.marks


def sessions(mem: ms.StateManager) -> Sessions:
    """Which sessions are open, and which rows run their turns."""
    return mem._parts.sessions


def states(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """The states with a valid handle, by register: those that leave have none."""
    return {state.register: state for state in holdings(mem).of("snapshot", "cached", "session", "mark")}


def leaving(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """The states that only first steps keep, by register."""
    return {state.register: state for state in holdings(mem).of("leaving")}


def pinned(mem: ms.StateManager) -> list[int]:
    """Registers of holders that first steps are about to read."""
    return sorted(holdings(mem).readers)


def nodes(cache: ms.prefix.PrefixCache) -> dict[int, Node]:
    """The nodes with a state, by its register."""
    return {node.snapshot.register: node for node in cache.stated() if node.snapshot}


def kinds(mem: ms.StateManager, row: ms.Row) -> list[str]:
    """Why a row keeps its states at marks, in order."""
    return [marks(mem).kind(state) for state in marks(mem).kept.get(row.index, ())]


def free(mem: ms.StateManager) -> int:
    """Holders without a state."""
    return holdings(mem).free


def pages_of(mem: ms.StateManager, row: ms.Row) -> list[int]:
    """The KV pages of a row, in order."""
    return list(row_pages(mem).of(row.index))


def session(mem: ms.StateManager, handle: ms.Session) -> Conversation:
    """What an open session holds, and which row runs its turn."""
    return sessions(mem).opened[handle]
