"""What only stores of objects do, over a real S3 server whose answers a proxy makes late, wrong or none."""

import logging
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstate import logs, metrics
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.sizes import format_bytes
from memstate.tiers import Objects
from memstate.tiers.stores import objects
from memstate.tiers.stores.base import Outcome
from tests.support.file_case import get, holds, key, keys, put, record
from tests.support.loopback import HOST, until
from tests.support.object_server import BUCKET, SECRETS, Proxy, running_proxy
from tests.support.tiered_small import push_down, tiered, whole

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]' in a checkout")
MISSING, DONE, DAMAGED, FAILED = Outcome
EVERY: list[str] = [*SECRETS.values(), "the%2Fsecret", "secret+of"]


@pytest.fixture(scope="module")
def running() -> Iterator[Proxy]:
    with running_proxy() as proxy:
        yield proxy


@pytest.fixture
def proxy(running: Proxy) -> Iterator[Proxy]:
    """A proxy whose requests have no fault, and have not been counted yet."""
    running.seen.clear()
    running.wakes.clear()
    yield running
    running.fault = lambda method, path: ""
    running.wakes.set()


def only(method: str, kind: str, times: int = 10**6) -> Any:
    """Returns a choice of faults: the first so many requests of a method have a fault."""
    left = iter(range(times))
    return lambda asked, path: kind if asked == method and next(left, None) is not None else ""


def soon(proxy: Proxy, prefix: str, timeout: float) -> Objects:
    """Returns a store, also if on a busy machine the server's first answers take longer than the timeout."""
    made: list[Objects] = []

    def make() -> list[Objects]:
        with suppress(ConfigurationError):
            made.append(proxy.store(prefix, timeout=timeout))
        return made

    until(make, "an answer in time")
    return made[0]


# -- faults of one request -------------------------------------------------------------------------


def test_calls_after_close_are_refused_by_name() -> None:
    store = Objects("memory:///")
    store.close()
    for call in (lambda: store.exists([key("a")]), lambda: get(store, "a"), lambda: put(store, "a", record(1))):
        with pytest.raises(OSError, match="is closed: give each manager a store of its own"):
            call()


@pytest.mark.parametrize(
    ("kind", "times", "outcome", "cause"),
    [
        ("503", 2, DONE, ""), ("503", 99, FAILED, "HTTP_503"), ("denied", 1, FAILED, "HTTP_403"),
        ("moved", 1, FAILED, "BareRedirect"), ("lost", 1, DONE, ""), ("lost", 99, FAILED, "IncompleteMessage"),
        ("unheard", 1, DONE, ""), ("cut", 1, DONE, ""), ("slow", 1, DONE, ""), ("silent", 9, FAILED, "TimedOut"),
        ("gone", 1, MISSING, ""),
    ],
)  # fmt: skip
def test_a_fault_of_a_read_costs_that_record(kind: str, times: int, outcome: Outcome, cause: str, proxy: Proxy) -> None:
    store, names, data = (
        proxy.store(f"get-{kind}-{times}", timeout=1.0),
        keys("abc"),
        [record(n, 5001) for n in range(3)],
    )
    assert store.put(names, data) == [DONE] * 3 and store.exists(names) == [True] * 3
    faulty = only("GET", kind, times)
    proxy.fault = lambda method, path: faulty(method, path) if path.endswith(names[1][3:]) else ""
    buffers = [np.zeros(5001, np.uint8) for _ in names]
    assert store.get(names, buffers) == [DONE, outcome, DONE]
    assert all((a == b).all() for a, b, got in zip(data, buffers, [1, outcome is DONE, 1], strict=True) if got)
    assert store.faults == ({cause: 1} if cause else {}) and 0 < proxy.seen["GET", kind] <= times
    proxy.fault = lambda method, path: ""
    assert get(store, "b", 5001)[0] is (MISSING if kind == "gone" else DONE)
    assert store.exists(names) == [True, kind != "gone", True]


@pytest.mark.parametrize(
    ("kind", "times", "outcome", "cause", "there"),
    [
        ("503", 2, DONE, "", True), ("503", 99, FAILED, "HTTP_503", False), ("denied", 1, FAILED, "HTTP_403", False),
        ("lost", 99, FAILED, "IncompleteMessage", False), ("unheard", 1, DONE, "", True),
        ("unheard", 99, FAILED, "IncompleteMessage", True), ("slow", 1, DONE, "", True),
    ],
)  # fmt: skip
def test_a_fault_of_a_write_leaves_the_record_whole_or_missing(
    kind: str, times: int, outcome: Outcome, cause: str, there: bool, proxy: Proxy
) -> None:
    prefix = f"put-{kind}-{times}"
    store, data = proxy.store(prefix, timeout=1.0), record(1, 5001)
    proxy.fault = only("PUT", kind, times)
    assert put(store, "a", data) is outcome and store.faults == ({cause: 1} if cause else {})
    proxy.fault = lambda method, path: ""
    found = {path: size for path, size in proxy.server.objects().items() if path.startswith(prefix)}
    assert found == ({f"{prefix}/{key('a').replace('-', '/')}": 5001} if there else {})
    assert holds(store, "a", data) == there and put(store, "a", data) is DONE and holds(store, "a", data)


def test_a_writer_that_dies_in_the_middle_leaves_no_record(proxy: Proxy) -> None:
    store, data = proxy.store("half"), record(1, 5001)
    path = f"/{BUCKET}/half/{key('a').replace('-', '/')}"
    with socket.create_connection((HOST, proxy.server.ports[0])) as writer:
        writer.sendall(
            f"PUT {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5001\r\n\r\n".encode() + data.tobytes()[:999]
        )
        assert get(store, "a", 5001)[0] is MISSING and store.exists([key("a")]) == [False]
    assert get(store, "a", 5001)[0] in (MISSING, DAMAGED)  # some servers keep what came
    assert put(store, "a", data) is DONE and holds(store, "a", data)


def test_a_writer_that_fails_in_the_middle_leaves_no_upload(proxy: Proxy) -> None:
    """It could not even take back what it had begun."""
    proxy.fault = lambda method, path: "denied" if method in ("PUT", "DELETE") else ""
    assert put(proxy.store("begun"), "a", record(0)) is FAILED
    assert [path for path in proxy.server.objects() if path.startswith("begun")] == []


def test_a_write_may_take_longer_than_the_time_limit_of_an_answer(proxy: Proxy) -> None:
    store, wrote = soon(proxy, "late", 0.1), list[Outcome]()
    faulty = {"PUT": only("PUT", "late", 1), "GET": only("GET", "silent", 1)}
    proxy.fault = lambda method, path: faulty[method](method, path) if method in faulty else ""
    thread = threading.Thread(target=lambda: wrote.append(put(store, "a", record(0))))
    thread.start()
    until(lambda: proxy.seen["PUT", "late"], "nothing is written")
    assert get(store, "b")[0] is FAILED and store.faults == {"TimedOut": 1}  # so the limit has passed
    proxy.wakes.set()
    thread.join()
    assert wrote == [DONE] and holds(store, "a", record(0))


def test_failures_among_answers_fail_alone(proxy: Proxy) -> None:
    store, names, data = proxy.store("some"), keys(map(str, range(80))), [record(n) for n in range(80)]
    bad = {f"/{BUCKET}/some/{name.replace('-', '/')}" for name in names[::4]}
    assert store.put(names, data) == [DONE] * 80
    proxy.fault = lambda method, path: "denied" if path in bad else ""
    assert store.get(names, data) == [FAILED, DONE, DONE, DONE] * 20 and store.faults == {"HTTP_403": 20}


def test_a_shorter_object_is_replaced() -> None:
    store = Objects("memory:///")
    assert (
        put(store, "a", record(0, 50)) is DONE and put(store, "a", record(0)) is DONE and holds(store, "a", record(0))
    )


@pytest.mark.parametrize("call", ["exists", "get", "put", "discard"])
@pytest.mark.parametrize(("kind", "cause", "timeout"), [("silent", "TimedOut", 0.2), ("503", "HTTP_503", 2.0)])
def test_a_server_that_is_gone_costs_a_few_requests(
    call: str, kind: str, cause: str, timeout: float, proxy: Proxy
) -> None:
    """After 16 failures in a row none begins, so that a call takes about as long for 2 000 records as for one."""
    names = [f"kv-{n:064x}" for n in range(2000)]
    store, buffers = soon(proxy, "gone", timeout), [np.zeros(8, np.uint8)] * len(names)
    proxy.seen.clear()
    proxy.fault = lambda method, path: kind
    if call == "exists":
        with pytest.raises(OSError, match=rf"exists of 2000 records with Objects\('s3://bucket/gone', .*: {cause}$"):
            store.exists(names)
    elif call == "discard":
        store.discard(names)
    else:
        assert getattr(store, call)(names, buffers) == [FAILED] * len(names)
    assert store.faults == {cause: len(names)} and proxy.seen.total() <= (16 + 15) * (1 + 3)  # with retries
    proxy.fault = lambda method, path: ""
    proxy.wakes.set()
    until(lambda: store.put(names[:2], buffers[:2]) == [DONE] * 2, "records")


def test_a_server_that_freezes_or_is_killed_loses_no_truth(proxy: Proxy) -> None:
    store, data = soon(proxy, "kill", 0.3), record(0)
    direct = Objects(f"s3://{BUCKET}/kill", timeout=0.3, **proxy.options() | {"endpoint": proxy.server.url})
    assert put(store, "a", data) is DONE and holds(direct, "a", data)
    with proxy.server.frozen():
        assert get(direct, "a")[0] is FAILED and put(direct, "b", data) is FAILED and direct.faults == {"TimedOut": 2}
    assert holds(direct, "a", data)
    proxy.server.kill()
    assert get(direct, "a")[0] is FAILED and direct.faults["ConnectionRefused"] == 1
    proxy.server.start()  # without the objects
    until(lambda: get(direct, "a")[0] is MISSING, "an empty server")
    until(lambda: put(direct, "a", data) is DONE and holds(store, "a", data), "the record")


def test_a_bucket_that_is_not_there_is_named(proxy: Proxy) -> None:
    nobody = proxy.options() | {"endpoint": f"http://{HOST}:1"}
    with pytest.raises(
        ConfigurationError, match=r"objects in s3://b, options \[.*'region'.*\]: ConnectionRefused; expected"
    ):
        Objects("s3://b", **nobody)
    with pytest.raises(ConfigurationError, match=r"objects in s3://no-bucket/x, .*: HTTP_404; .* a bucket that exists"):
        Objects("s3://no-bucket/x", **proxy.options())
    assert proxy.server.ask("PUT", "/short-lived")[0] == 200
    store = Objects("s3://short-lived", **proxy.options())
    assert proxy.server.ask("DELETE", "/short-lived")[0] == 204
    assert put(store, "a", record(0)) is FAILED and store.faults == {"HTTP_404": 1}
    assert get(store, "a")[0] is MISSING


# -- capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory:///", "file://{}/new"])
def test_the_first_written_go_and_no_more_than_must(url: str, tmp_path: Path) -> None:
    store = Objects(url.format(tmp_path), capacity=3200)
    for n in range(40):
        assert put(store, f"n{n}", record(n)) is DONE and put(store, f"n{n}", record(n)) is DONE
        there = store.exists(keys(f"n{k}" for k in range(n + 1)))
        assert n < 30 or there == [False] * (n + 1 - sum(there)) + [True] * sum(there)
        assert 100 * sum(there) <= 3200 and sum(there) >= min(n + 1, 30) and store.evicted == n + 1 - sum(there)
    assert put(store, "big", record(0, 3201)) is FAILED and store.faults == {"EFBIG": 1} and store.evicted >= 8
    assert put(store, "exact", record(0, 3200)) is DONE and sum(store.exists(keys(f"n{k}" for k in range(40)))) == 0


def test_objects_of_others_among_the_records_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    other = tmp_path / "state" / "terraform.tfstate"
    other.write_bytes(b"x" * 500)
    store = Objects(f"file://{tmp_path}", capacity=400)
    assert [put(store, name, record(n)) for n, name in enumerate("abcdef")] == [DONE] * 6
    assert store.exists(keys("abcdef")) == [False] * 2 + [True] * 4 and store.evicted == 2
    assert other.read_bytes() == b"x" * 500


def test_a_record_that_another_process_deletes_keeps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes between the list and the deletion of the records that were written first."""
    store = Objects(f"file://{tmp_path}", capacity=6400)
    delete = store._obstore.delete

    def late(of: Any, paths: Any) -> None:
        if isinstance(paths, list) and paths:
            delete(of, paths[0])
        delete(of, paths)

    monkeypatch.setattr(store._obstore, "delete", late)
    for n in range(90):
        assert put(store, f"n{n}", record(n)) is DONE
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 6400


def test_two_writers_keep_a_capacity_that_counts_records_alone(proxy: Proxy) -> None:
    """The server lists 1 000 objects at a time, and has others' objects below the same prefix."""
    assert proxy.server.ask("PUT", f"/{BUCKET}/shared/others", b"x" * 9999)[0] == 200
    stores = [proxy.store("shared", capacity=2000) for _ in range(2)]
    for n in range(0, 30, 10):
        for store in stores:
            store.put(keys(f"{id(store)} {k}" for k in range(n, n + 10)), [record(k) for k in range(n, n + 10)])
    found = {path: size for path, size in proxy.server.objects().items() if path.startswith("shared/")}
    assert found.pop("shared/others") == 9999 and 1000 < sum(found.values()) <= 2000 + 2000 // 16 + 10 * 100
    assert all(store.evicted and not store.faults for store in stores)
    proxy.fault = only("POST", "denied")  # the deletion of many objects
    late = (put(stores[0], f"late {n}", record(n)) for n in range(99))
    assert FAILED in late and stores[0].faults == {"HTTP_403": 1}


# -- URLs, options and credentials -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", "''"), ("bucket", "'bucket'"), (3, "'3'"), ("s3://", "'s3://'"), ("s3:bucket", "'s3:bucket'"),
        ("s3://a b", "'s3://a b'"), ("https://bucket.s3.amazonaws.com/x", "'https://bucket"), ("file://host/x", "'file://"),
        ("file:x", "'file:x'"), ("memory://x", "'memory://x'"), ("redis://x", "'redis://x'"),
        ("s3://user:SECRET@bucket/x", r"'s3:\*\*\*'"), ("s3://SECRET@bucket", r"'s3:\*\*\*'"),
        ("s3://me:a/SECRET@bucket/x", r"'s3:\*\*\*'"), ("s3:/me:SECRET@bucket", r"'s3:\*\*\*'"),
        ("az://c/x?sv=1&sig=SECRET", r"'az:\*\*\*'"), ("s3://b/x#SECRET\nSECRET", r"'s3:\*\*\*'"),
    ],
)  # fmt: skip
def test_urls_that_cannot_be_meant_are_refused_without_their_secrets(url: Any, shown: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"url {shown}.*: expected s3://bucket/prefix, .*; credentials go"
    ) as said:
        Objects(url)
    assert "SECRET" not in "".join(traceback.format_exception(said.value))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"timeout": 0}, InvalidArgument, "timeout=0: expected seconds"),
        ({"timeout": "1"}, InvalidArgument, "timeout='1': expected seconds"),
        ({"capacity": 0}, InvalidArgument, "capacity"),
        ({"client_options": None}, ConfigurationError, r"options \['client_options'\]: TypeError; expected options"),
        ({"nonsense": 1}, ConfigurationError, r"memory:///, options \['nonsense'\]: BaseError; expected options"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Objects("memory:///", **settings)


class PanicException(BaseException):
    """What `obstore` raises for some options, such as `allow_http=True`; it also writes a trace to stderr."""


@pytest.mark.parametrize("kind", [PanicException, ValueError])
def test_whatever_obstore_raises_is_refused_without_its_text(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **options: Any) -> None:
        raise kind(f"SECRET {options}")

    monkeypatch.setattr("obstore.store.from_url", fails)
    with pytest.raises(ConfigurationError, match=rf"s3://b, options \['sas_key'\]: {kind.__name__}; expected") as said:
        Objects("s3://b", sas_key="SECRET")
    assert "SECRET" not in "".join(traceback.format_exception(said.value)).replace('sas_key="SECRET"', "")


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects.importlib.import_module("sys").modules, "obstore", None)
    with pytest.raises(
        ConfigurationError, match=r"objects need obstore, .*; pip install '\.\[objects\]' in a checkout"
    ):
        Objects("memory:///")


def test_credentials_are_in_no_log_error_figure_or_inspection(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = proxy.store("hidden", capacity=1 << 20)
    mem = tiered(tiers={"store": store})
    proxy.fault = lambda method, path: "denied"
    for n in range(3):
        push_down(mem, whole(n))
    with pytest.raises(OSError, match="HTTP_403") as asked:
        store.exists([key("a")])
    with pytest.raises(ConfigurationError, match="HTTP_403") as opened:
        proxy.store("hidden")
    logged = [f"{line.getMessage()} {getattr(line, logs.FIELDS, '')}" for line in caplog.records]
    assert any("HTTP_403" in line for line in logged) and store.faults.keys() == {"HTTP_403"}
    errors = [line for error in (asked, opened) for line in traceback.format_exception(error.value)]
    state = [repr(vars(store)), repr(mem.stats()), repr(mem.inspect()), repr(metrics.collector(mem).collect())]
    assert f"Objects('s3://bucket/hidden', at most {format_bytes(1 << 20)}" in repr(store)
    assert not [secret for secret in EVERY for text in [*logged, *errors, *state, repr(store)] if secret in text]
