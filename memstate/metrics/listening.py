"""Listens for scrapes over HTTP: a few clients at a time, and none of them for long. Knows no figure.

A client has a thread and an open file from its connection on, so both are limited. Where all places are taken, the one
that has waited longest without a request makes way: clients that say nothing keep out nobody who asks.
"""

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import Semaphore
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

CLIENTS: Final = 16
SECONDS: Final = 10.0  # that a client has for its request and for taking the answer
LOOK: Final = 0.5  # seconds between two looks for clients that take longer


class Handler(WSGIRequestHandler):
    """Answers one client, and logs nothing."""

    def log_message(self, format: str, *given: Any) -> None:
        """Does nothing."""

    def get_environ(self) -> dict[str, Any]:
        """Returns what the application reads, once the request has come whole."""
        cast(Listener, self.server).asked(self.connection)
        return super().get_environ()


class Listener(ThreadingMixIn, WSGIServer):
    """Serves an application in a thread for each client.

    Args:
        address: The address to listen at.
        port: The port; 0: any free one.
        app: The WSGI application.

    Raises:
        OSError: The address cannot be listened at.
        UnicodeError: It is no name of a host.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that wait; they take no file and no thread yet

    def __init__(self, address: str, port: int, app: Callable[..., Any]) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, where = found[0]
        self._places = Semaphore(CLIENTS)
        self._since: dict[socket.socket, float] = {}  # clients, the oldest first
        self._asked: set[socket.socket] = set()
        super().__init__((str(where[0]), port), Handler)
        self.set_app(app)

    def asked(self, client: socket.socket) -> None:
        """Notes that a client has sent its request: it makes way for nobody."""
        self._asked.add(client)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a thread for a client, once one of the places is free."""
        if not self._places.acquire(blocking=False):
            self._end(next((client for client in list(self._since) if client not in self._asked), None))
            while not self._places.acquire(timeout=LOOK):
                self.service_actions()
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a client, and frees its place."""
        super().shutdown_request(request)
        self._asked.discard(request)
        if self._since.pop(request, None) is not None:
            self._places.release()

    def service_actions(self) -> None:
        """Ends the clients that take too long. The loop calls it twice a second."""
        late = time.monotonic() - SECONDS
        for client, since in list(self._since.items()):
            if since <= late:
                self._end(client)

    def end_clients(self) -> None:
        """Ends every client."""
        for client in list(self._since):
            self._end(client)

    @staticmethod
    def _end(client: socket.socket | None) -> None:
        """Wakes the thread of a client: it reads the end, or cannot write any more."""
        with suppress(OSError):
            if client is not None:
                client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that has gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
