"""Ends each test that made a test loop: ends its requests, closes sessions, and checks that everything is free."""

from collections.abc import Generator
from typing import ClassVar, Protocol

import pytest

import memstate as ms
from tests.support import owners


class Ending(Protocol):
    """A test loop with a manager that can check that nothing leaks."""

    mem: ms.StateManager

    def look(self) -> None:
        """Checks the whole manager."""

    def empty(self) -> None:
        """Clears the caches, and checks that everything is free. No request may run."""


class Made:
    """The test loops that the running test has made. `now` is None while no test runs."""

    now: ClassVar[list[Ending] | None] = None


def made(one: Ending) -> None:
    if Made.now is not None:
        Made.now.append(one)


def unchecked() -> None:
    """Leaves out the checks at the end for the loops made so far, because their states do not match their tokens."""
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
    """Closes all sessions without a running turn."""
    for session in [one.session for one in mem.sessions.infos() if not one.running]:
        mem.sessions.close(session)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Runs a test, then ends the loops that it has made."""
    Made.now = []
    try:
        result = yield
        for one in Made.now:
            finish(one)
    finally:
        Made.now = None
    return result
