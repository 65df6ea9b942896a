"""Tests `memstate inspect`: pages from files and servers, which replace old pages whole, and one line for bad input."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest

from memstate.cli import fetch as fetching
from memstate.errors import InvalidArgument
from memstate.sizes import format_bytes
from memstate.slots import inspect as inspecting
from memstate.viz.inspector import page
from tests.slots.test_inspect import busy
from tests.support.command import memstate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "owners.json"
    busy().save(path)
    return path


@pytest.fixture
def content(saved: Path) -> bytes:
    return saved.read_bytes()


# -- files -----------------------------------------------------------------------------------------


def test_the_page_is_beside_the_file(saved: Path) -> None:
    done = memstate("inspect", saved)
    target = saved.with_suffix(".html")
    assert (done.status, done.err) == (0, "")
    assert target.read_text("utf-8") == page(busy(), "owners.json")
    assert done.out == f"{target}: 12 slots, 0 faults, {format_bytes(target.stat().st_size)}\n"


def test_out_and_json(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.htm"
    done = memstate("inspect", saved, "--out", target, "--json", "-")
    assert done.status == 0 and target.read_text("utf-8") == page(busy(), "owners.json")
    assert json.loads(done.out) == {
        "page": str(target), "bytes": target.stat().st_size, "capacity": 12, "faults": 0,
    }  # fmt: skip
    assert not saved.with_suffix(".html").exists()


def test_stdout_has_the_page_and_nothing_else(saved: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from memstate.cli.commands.inspect import inspect

    inspect(saved, None, "-", None)
    assert capfdbinary.readouterr() == (page(busy(), "owners.json").encode(), b"")
    assert not saved.with_suffix(".html").exists()


def test_a_page_that_is_there_stays_until_the_new_one_is_whole(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "owners.html"
    target.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        done = memstate("inspect", saved)
    assert done.status == 2 and "No space left" in done.err and target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owners.html", "owners.json"]
    link = tmp_path / "link.html"
    link.symlink_to(target)
    assert memstate("inspect", saved, "--out", link).status == 0
    assert link.is_symlink() and target.read_text("utf-8").startswith("<!doctype html>")


# -- servers ---------------------------------------------------------------------------------------


@contextmanager
def serving(
    status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None, wait: bool = False
) -> Iterator[str]:
    """Starts a local server that answers every request with the given content. Yields the address of the server."""
    end = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            if wait:
                self.wfile.flush()
                end.wait(20)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/now.json?x=1"
    finally:
        end.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_of_what_a_process_serves(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # memstate uses no proxy
    with serving(body=content) as url:
        done = memstate("inspect", "--url", url)
    assert done.status == 0, done.err
    assert Path("inspection.html").read_text("utf-8") == page(busy(), url)
    with serving(body=b"[]") as url:
        done = memstate("inspect", "--url", url, "--out", "other.html")
    assert done.status == 2 and f"'{url}': not an inspection: its format is [], expected" in done.err
    assert not Path("other.html").exists()


def test_the_example_of_the_page_serves_what_a_manager_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inspections").mkdir()
    (example,) = re.findall(
        r"```python\n(from functools.*?)```", (ROOT / "docs" / "inspector.md").read_text(), re.DOTALL
    )
    names = {"mem": SimpleNamespace(inspect=busy)}
    exec(example.replace("8000", "0"), names)
    with names["server"] as server:  # type: ignore[attr-defined]
        url = f"http://127.0.0.1:{server.server_port}/now.json"
        assert memstate("inspect", "--url", url, "--out", "page.html").status == 0
        server.shutdown()
    assert Path("page.html").read_text("utf-8") == page(busy(), url)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"status": 404}, "the server answers 404 Not Found, expected 200"),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, "the server answers 302 Found, expected 200"),
        ({"body": b"12", "headers": {"Content-Length": "3"}}, "it is cut short: 1 bytes are missing"),
        ({"body": b"12345678901"}, "it has 11 bytes, expected at most 10"),
        ({"body": b"12345678901", "headers": {"Content-Length": ""}}, "it has more than 10 bytes"),
        ({"body": b"1", "headers": {"Content-Length": "9"}, "wait": True}, "the server said nothing for 0.2 seconds"),
    ],
)
def test_other_answers_are_refused(answer: dict[str, object], why: str) -> None:
    with serving(**answer) as url, pytest.raises(InvalidArgument) as caught:  # type: ignore[arg-type]
        fetching.fetch(url, largest=10, silence=0.2)
    assert str(caught.value).startswith(f"{url!r}: ") and why in str(caught.value)


def test_a_body_that_takes_too_long_is_refused() -> None:
    with serving(body=b"1") as url, pytest.raises(InvalidArgument, match="it is not there after 0 seconds"):
        fetching.fetch(url, largest=10, whole=0)


def test_the_limit_of_a_file_holds_for_a_server(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "LARGEST", len(content) - 1)
    with serving(body=content) as url:
        done = memstate("inspect", "--url", url, "--out", "-")
    assert done.status == 2 and f"it has {len(content)} bytes, expected at most {len(content) - 1}" in done.err
