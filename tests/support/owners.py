"""Gives tests access to the manager's private tables of owners. Tests use no other way to them."""

import memstate as ms
from memstate.prefix.sessions import Conversation, Sessions
from memstate.prefix.tree import Node
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks
from memstate.requests.page_table import PageTable
from memstate.requests.pages import PageAllocator
from memstate.requests.table import RequestTable


def holdings(mem: ms.StateManager) -> Holdings:
    """Returns the table of holders and their states."""
    return mem._parts.holdings


def table(mem: ms.StateManager) -> RequestTable:
    """Returns the table of rows: their requests and lengths."""
    return mem._parts.table


def row_pages(mem: ms.StateManager) -> PageTable:
    """Returns the table of each row's KV pages."""
    return mem._parts.pages


def kv_pages(mem: ms.StateManager) -> PageAllocator:
    """Returns the allocator of KV pages, which counts the holders of each page."""
    return row_pages(mem).allocator


def marks(mem: ms.StateManager) -> Marks:
    """Returns the marks: the lengths in prompts at which rows keep states."""
    return mem._parts.marks


def sessions(mem: ms.StateManager) -> Sessions:
    """Returns the table of open sessions and the rows of their turns."""
    return mem._parts.sessions


def states(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """Returns register -> state, for all states with a valid handle."""
    return {state.register: state for state in holdings(mem).of("snapshot", "cached", "session", "mark")}


def leaving(mem: ms.StateManager) -> dict[int, ms.Snapshot]:
    """Returns register -> state, for states without owner or handle that wait until a first step has read them."""
    return {state.register: state for state in holdings(mem).of("leaving")}


def pinned(mem: ms.StateManager) -> list[int]:
    """Returns the registers of pinned holders: a first step will read them."""
    return sorted(holdings(mem).readers)


def nodes(cache: ms.prefix.PrefixCache) -> dict[int, Node]:
    """Returns register -> node, for the nodes of the prefix cache that have a state."""
    return {node.snapshot.register: node for node in cache.stated() if node.snapshot}


def free(mem: ms.StateManager) -> int:
    """Returns the number of holders without a state."""
    return holdings(mem).free


def pages_of(mem: ms.StateManager, row: ms.Row) -> list[int]:
    """Returns the KV pages of a row, in order."""
    return list(row_pages(mem).of(row.index))


def session(mem: ms.StateManager, handle: ms.Session) -> Conversation:
    """Returns the entry of an open session: what it holds, and the row of its turn."""
    return sessions(mem).opened[handle]
