"""Clients of the metrics endpoint that say nothing, or do not read: they take few threads, and others are served."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from socketserver import BaseServer

import pytest

from memstate import metrics
from memstate.metrics import listening
from tests.support.metered import get, manager


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator["Clients"]:
    """A server, and clients of it that are closed at the end."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))
    before, mem = threading.active_count(), manager()
    with metrics.serve(mem, 0) as server, ExitStack() as stack:
        yield Clients(server, stack, before)


class Clients:
    def __init__(self, server: metrics.Server, stack: ExitStack, before: int) -> None:
        self.server, self._stack, self._before = server, stack, before

    def silent(self, says: bytes = b"") -> socket.socket:
        """A client that sends the begin of a request at most."""
        made = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port), timeout=30))
        made.sendall(says)
        return made

    @property
    def threads(self) -> int:
        return threading.active_count() - self._before


@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_silent_clients_have_few_threads_and_a_good_one_is_answered(clients: "Clients", says: bytes) -> None:
    for at in range(200):
        clients.silent(says)
        if at % 20 == 19:
            assert "memstate_slots" in get(clients.server.url)
    # One thread listens. Those of clients that made way may be about to end.
    assert clients.threads <= 2 * listening.CLIENTS


def test_a_silent_client_makes_way_for_the_next_and_one_that_has_asked_does_not(
    clients: "Clients", monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go = threading.Event(), threading.Event()

    def collect(*given: object) -> list[object]:
        waits.set()
        assert go.wait(30)
        return []

    monkeypatch.setattr(clients.server._collector, "collect", collect)
    asking = clients.silent(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert waits.wait(30)
    crowd = [clients.silent() for _ in range(3 * listening.CLIENTS)]
    assert crowd[0].recv(1) == b""  # it made way
    go.set()
    assert asking.recv(12) == b"HTTP/1.0 200"


def test_a_client_that_takes_too_long_is_ended(clients: "Clients", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SECONDS", 0.0)
    assert clients.silent().recv(1) == b""
    assert clients.silent(b"GET / HTTP/1.0\r\n").recv(1) == b""


def test_all_places_taken_by_clients_that_have_asked_come_free_in_time(
    clients: "Clients", monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not read their answers, which are larger than what waits in a socket."""
    monkeypatch.setattr(listening, "LOOK", 0.01)
    server = clients.server._server
    large, begun = b"x" * (64 << 20), threading.Semaphore(0)

    def app(environ: object, start: Callable[..., object]) -> list[bytes]:
        start("200 OK", [])
        begun.release()
        return [large]

    small = server.get_app()
    server.set_app(app)
    for _ in range(listening.CLIENTS):
        clients.silent(b"GET / HTTP/1.0\r\n\r\n")
    assert all(begun.acquire(timeout=30) for _ in range(listening.CLIENTS))
    server.set_app(small)
    waiting = clients.silent(b"GET / HTTP/1.0\r\n\r\n")
    monkeypatch.setattr(listening, "SECONDS", 0.0)
    waiting.recv(12)  # it was answered, or took too long itself
    monkeypatch.setattr(listening, "SECONDS", 10.0)
    assert "memstate_slots" in get(clients.server.url)


def test_close_ends_clients(clients: "Clients") -> None:
    silent = clients.silent()
    get(clients.server.url)  # which came behind it
    clients.server.close()
    assert silent.recv(1) == b""


def test_a_client_that_goes_says_nothing_on_stderr(clients: "Clients", capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        clients.silent(b"GET /metrics HTTP/1.0\r\n\r\n").close()
        clients.silent(b"GET /met").close()
        assert "memstate_slots" in get(clients.server.url)
    assert capfd.readouterr().err == ""
