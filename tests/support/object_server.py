"""Starts a real S3 server, and a proxy before it that makes the faults of a network and of its users."""

import importlib.util
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from memstate.tiers import Objects
from tests.support.loopback import HOST, PATIENCE_S, Program

BUCKET = "bucket"
SILENCE_S = 3.0  # longer than any time limit of the tests
SECRETS = {"access_key_id": "an-id-of-a-key", "secret_access_key": "the/secret+of-this-key"}
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=me/20260101/us-east-1/s3/aws4_request"}  # anyone but nobody
ANSWERS = {"503": 503, "denied": 403, "moved": 301}  # fault -> status of the answer, without asking the server


def missing() -> str:
    """Returns why there can be no S3 server here, or an empty string."""
    lacks = [name for name in ("obstore", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacks)} not installed: pip install '.[test]' in a checkout" if lacks else ""


class S3(Program):
    """An S3 server with an empty bucket. It takes any credentials."""

    def __init__(self) -> None:
        super().__init__(1)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports[0]}"

    def environment(self) -> dict[str, str]:
        """Returns the variables with which a client finds the server and has credentials."""
        secrets = {f"AWS_{name.upper()}": value for name, value in SECRETS.items()}
        return secrets | {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1"}

    def command(self) -> list[str]:
        return ["-m", "moto.server", "-H", HOST, "-p", str(self.ports[0])]

    def start(self) -> None:
        super().start()
        assert self.ask("PUT", f"/{BUCKET}")[0] == 200

    def ask(self, method: str, path: str, body: bytes = b"", headers: Any = None) -> tuple[int, dict[str, str], bytes]:
        """Sends a request. Returns status, headers and body of the answer."""
        connection = HTTPConnection(HOST, self.ports[0], timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers or SIGNED)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Returns the sizes of objects by path, and 0 for each upload that was begun and not ended."""
        listed = self.ask("GET", f"/{BUCKET}?list-type=2&prefix={prefix}")[2].decode()
        begun = self.ask("GET", f"/{BUCKET}?uploads")[2].decode()
        assert "<IsTruncated>false" in listed
        whole = re.findall(r"<Key>(.*?)</Key>.*?<Size>(\d+)</Size>", listed, re.DOTALL)
        return {path: int(size) for path, size in whole} | dict.fromkeys(re.findall(r"<Key>(.*?)</Key>", begun), 0)


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server. `fault(method, path)` names the fault of a request, "" for none:

        503, denied, moved   the server is not asked
        lost                 neither; the connection ends
        silent               neither; there is no answer for SILENCE_S, or until `wakes` is set
        late                 the server is asked after SILENCE_S, or when `wakes` is set
        unheard              the server is asked, and the connection ends without its answer
        cut                  half of the answer, then the connection ends
        slow                 the answer comes in 32 pieces
        flipped              one bit of the object that is read or written is another
        gone                 somebody deletes the object just before

    Attributes:
        seen: how often a request had a fault, by method and fault.
    """

    daemon_threads = True

    def __init__(self, server: S3) -> None:
        self.server, self.seen, self.wakes = server, Counter[tuple[str, str]](), threading.Event()
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        super().__init__((HOST, 0), _Passing)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """Says nothing of a client that has gone."""

    def store(self, prefix: str, **more: Any) -> Objects:
        return Objects(f"s3://{BUCKET}/{prefix}", **self.options() | more)

    def options(self) -> dict[str, Any]:
        return SECRETS | {"endpoint": f"http://{HOST}:{self.server_address[1]}", "region": "us-east-1"}


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise some answers wait for 40 ms
    server: Proxy

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        kind = self.server.fault(self.command, self.path)
        self.server.seen[self.command, kind] += 1
        self.close_connection = kind in ("lost", "unheard", "cut", "silent")
        if kind in ("silent", "late"):
            self.server.wakes.wait(SILENCE_S)
        if kind in ANSWERS:
            self._answer(ANSWERS[kind], {}, b"")
        elif kind not in ("lost", "silent"):
            if kind == "gone":
                self.server.server.ask("DELETE", self.path)
            status, headers, found = self.server.server.ask(
                self.command, self.path, _flipped(body) if kind == "flipped" else body, dict(self.headers)
            )
            found = _flipped(found) if kind == "flipped" else found
            if kind != "unheard":
                self._answer(status, headers, found, kind)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, kind: str = "") -> None:
        self.send_response_only(status)
        headers = {"Content-Length": str(len(body)), **headers}
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        body = body[: len(body) // 2] if kind == "cut" else body
        step = -(-len(body) // 32) if kind == "slow" else len(body)
        for at in range(0, len(body), step or 1):
            self.wfile.write(body[at : at + step])
            self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass


def _flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 4]) if body else body


@contextmanager
def running_server() -> Iterator[S3]:
    """Runs an S3 server during the block. Skips the test if there can be none."""
    if why := missing():
        pytest.skip(f"S3 server: {why}")
    server = S3()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running_proxy() -> Iterator[Proxy]:
    """Runs an S3 server and a proxy before it during the block, as `running_server`."""
    with running_server() as server:
        proxy = Proxy(server)
        try:
            yield proxy
        finally:
            proxy.wakes.set()
            proxy.shutdown()
            proxy.server_close()
