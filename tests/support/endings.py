"""What every test with a server ends with: requests are aborted, sessions closed, and then everything must be free."""

from collections.abc import Generator
from typing import ClassVar, Protocol

import pytest

import memstate as ms
from tests.support import owners


class Ending(Protocol):
    """Has a manager, and says that nothing is held once nothing runs."""

    mem: ms.StateManager

    def look(self) -> None:
        """Holds everything against everything."""

    def empty(self) -> None:
        """Nothing runs: everything must be free after clearing."""


class Made:
    """What a test has made; None outside of tests that end so."""

    now: ClassVar[list[Ending] | None] = None


def made(one: Ending) -> None:
    if Made.now is not None:
        Made.now.append(one)


def unchecked() -> None:
    """What this test has made so far does not end so: its states are not what their tokens say."""
    assert Made.now is not None
    Made.now.clear()


def finish(one: Ending) -> None:
    mem = one.mem
    close_idle(mem)
    one.look()
    mem.end(mem.rows)
    close_idle(mem)
    own = set(owners.nodes(mem.prefix)) if mem.prefix else set()
    mem.drop([snap for register, snap in owners.states(mem).items() if register not in own])
    one.empty()


def close_idle(mem: ms.StateManager) -> None:
    """Closes the sessions without a running turn."""
    for session in [one.session for one in mem.sessions.infos() if not one.running]:
        mem.sessions.close(session)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Ends what a test has made."""
    Made.now = []
    try:
        result = yield
        for one in Made.now:
            finish(one)
    finally:
        Made.now = None
    return result
