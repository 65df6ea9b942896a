"""Calls of a Mooncake store to its client, and outcomes of the answers; needs neither the package nor a master."""

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memstate.errors import ConfigurationError
from memstate.tiers.stores import mooncake
from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from memstate.tiers.stores.mooncake_client import P2P
from tests.support.loopback import HOST, PATIENCE_S, until
from tests.support.store_rig import fresh

MISSING, DONE, DAMAGED, FAILED = Outcome
NAME = fresh()


class Scripted:
    """A client that gives prepared answers, and notes its calls."""

    def __init__(self, codes: Sequence[int] = (), size: int = -704, health: int = 0) -> None:
        self.codes, self.removed = list(codes), list[str]()
        self.closed, self.entered, self.goes_on = threading.Event(), threading.Event(), threading.Event()
        self.goes_on.set()
        self.health_check, self.get_size = (lambda: health), (lambda name: size)
        self.register_buffer = lambda address, nbytes: 0
        self.batch_is_exist = self.batch_put_from = lambda *_: self.codes

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.entered.set()
        assert self.goes_on.wait(PATIENCE_S)
        assert not self.closed.is_set()
        return self.codes

    def batch_remove(self, names: list[str], force: bool) -> None:
        self.removed += names

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


def scripted(monkeypatch: pytest.MonkeyPatch, client: Scripted, records: int) -> tuple[MooncakeStore, list[Bytes]]:
    monkeypatch.setattr(mooncake, "connect", lambda settings: (client, None))
    store, memory = MooncakeStore(Mooncake("nowhere:1")), torch.zeros(records, 8, dtype=torch.uint8)
    store.register(memory)
    return store, [memory[record].numpy() for record in range(records)]


def test_what_codes_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [8, 7, -703, -704, -710, -712, -702, -707, -800, -801, -900, -901, -12345, 0]
    store, buffers = scripted(monkeypatch, Scripted(codes), len(codes))
    names = [fresh() for _ in codes]
    assert store.get(names, buffers) == [DONE, DAMAGED, *[MISSING] * 4, *[FAILED] * 7, DAMAGED]
    faults = ["INVALID_REPLICA", "LEASE_EXPIRED", "TRANSFER_FAIL", "CHECKSUM_MISMATCH"]
    faults += ["RPC_FAIL", "RPC_TIMEOUT", "-12345"]
    assert store.faults == dict.fromkeys(faults, 1)

    store, buffers = scripted(monkeypatch, Scripted([0, -705, -200, -704, -800]), 5)
    assert store.put(names[:5], buffers) == [DONE, DONE, FAILED, FAILED, FAILED]
    assert store.faults == {"NO_SPACE": 1, "-704": 1, "TRANSFER_FAIL": 1}


@pytest.mark.parametrize(
    ("size", "outcome", "removed", "fault"),
    [(9, DAMAGED, 1, ""), (8, FAILED, 0, "INVALID_PARAMS"),  # an answer of the right size, which is refused
     (-704, MISSING, 0, ""), (-900, FAILED, 0, "RPC_FAIL")],
)  # fmt: skip
def test_a_read_that_is_refused(monkeypatch: Any, size: int, outcome: Outcome, removed: int, fault: str) -> None:
    client = Scripted([-600], size)
    store, buffers = scripted(monkeypatch, client, 1)
    assert store.get([NAME], buffers) == [outcome]
    assert client.removed == [NAME] * removed
    assert list(store.faults) == [fault] * bool(fault)


def test_a_client_without_a_master_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    store, buffers = scripted(monkeypatch, Scripted([8, 8], health=2), 2)
    assert store.get([NAME, NAME], buffers) == store.put([NAME, NAME], buffers) == [FAILED, FAILED]
    with pytest.raises(OSError, match=r"exists of 2 records with MooncakeStore\('nowhere:1'.*: NO_MASTER"):
        store.exists([NAME, NAME])
    assert store.faults == {"NO_MASTER": 6}
    assert (store.exists([]), store.get([], []), store.put([], [])) == ([], [], [])


@pytest.mark.parametrize(
    ("codes", "there", "faults"),
    [([1, 0, -704, -900], [True, False, False, False], {"RPC_FAIL": 1}),
     ([0, -900, -900], [False] * 3, {"RPC_FAIL": 2}),  # the answer 0 shows that the master is there
     ([-704, -710, 0], [False] * 3, {}), ([-900, -901, -900], None, {"RPC_FAIL": 2, "RPC_TIMEOUT": 1}),
     ([-12345], None, {"-12345": 1})],
)  # fmt: skip
def test_nothing_is_said_of_records_that_no_master_spoke_of(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], there: list[bool] | None, faults: dict[str, int]
) -> None:
    store, _ = scripted(monkeypatch, Scripted(codes), 1)
    names = [fresh() for _ in codes]
    if there is None:
        with pytest.raises(OSError, match=", ".join(faults)):
            store.exists(names)
    else:
        assert store.exists(names) == there
    assert store.faults == faults


def test_closing_waits_for_calls_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Scripted([8])
    store, buffers = scripted(monkeypatch, client, 1)
    client.goes_on.clear()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(store.get, [NAME], buffers)
        assert client.entered.wait(PATIENCE_S)
        closing = pool.submit(store.close)
        until(lambda: store.put([NAME], buffers) == [FAILED] and store.faults["CLOSED"], "close has not begun")
        with pytest.raises(OSError, match="CLOSED"):
            store.exists([NAME])
        assert not client.closed.is_set()
        client.goes_on.set()
        assert call.result(PATIENCE_S) == [DONE]
        closing.result(PATIENCE_S)
    assert client.closed.is_set()
    store.close()  # a second close does nothing
    store.discard([NAME])
    assert store.get([NAME], buffers) == [FAILED] and set(store.faults) == {"CLOSED"}
    with pytest.raises(OSError, match="CLOSED"):
        store.register(torch.zeros(4, dtype=torch.uint8))


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    with pytest.raises(ConfigurationError, match=r"'\.\[mooncake\]' in a checkout.*libibverbs1"):
        MooncakeStore(Mooncake(f"{HOST}:1"))


BAD: dict[str, tuple[Any, ...]] = {
    "master": ("", None), "hostname": (None,), "protocol": ("udp",), "device": (None,), "buffer_bytes": (-1,),
    "metadata": ("", "foo", "10.0.0.1:8080", "p2phandshake", "HTTP://host:1/metadata", "http://", "http:///metadata",
                 "ftp://host:1", "P2PHANDSHAKE "),
    "segment_bytes": (-1, 1.5, True, 5, (16 << 20) - 1), "replicas": (0,),
    "timeout": (0, "1", float("nan"), float("inf")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_settings_that_cannot_be_meant(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Mooncake(**{"master": "host:1", name: value})
    with pytest.raises(ConfigurationError, match="hostname"):
        Mooncake(hostname="", master="etcd://host:1")


class Module(ModuleType):
    """Mooncake's module with a client that notes its settings, and the time limits at that moment."""

    LIMITS = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")

    def __init__(self) -> None:
        super().__init__("mooncake.store")
        self.code = 0
        self.asked: list[tuple[Any, ...]] = []
        self.MooncakeDistributedStore = lambda: self
        self.ReplicateConfig = lambda: SimpleNamespace(replica_num=1)

    def setup(self, *settings: Any) -> int:
        self.asked = [settings, tuple(os.environ.get(name) for name in self.LIMITS)]
        return self.code


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    fake = Module()
    monkeypatch.setitem(sys.modules, "mooncake.store", fake)
    return fake


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a socket that accepts connections."""
    with socket.create_server((HOST, 0)) as server:
        yield f"{HOST}:{server.getsockname()[1]}"


@pytest.mark.parametrize("code", [0, -900])
def test_setting_up_says_everything_and_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, module: Module, address: str, code: int
) -> None:
    module.code = code
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    metadata = f"http://{address}/metadata"
    settings = Mooncake(address, "me", metadata, "rdma", "mlx5_0", 20 << 20, 3, replicas=2, timeout=1.5)
    if code:
        with pytest.raises(ConfigurationError, match=r"refuses .*RPC_FAIL"):
            MooncakeStore(settings)
    else:
        assert MooncakeStore(settings)._config.replica_num == 2
    assert module.asked == [("me", metadata, 20 << 20, 3, "rdma", "mlx5_0", address), ("1500", "500")]
    assert [os.environ.get(name) for name in Module.LIMITS] == ["1234", None]


@pytest.mark.parametrize("server", ["master", "metadata server"])
@pytest.mark.parametrize("given", ["host", "host:", "host:x", ":1", "host:+1", "host:70000", "host:1_0", "host:²"])
def test_addresses_that_are_none_are_told_their_form(module: Module, address: str, given: str, server: str) -> None:
    named = (given, P2P) if server == "master" else (address, f"http://{given}/metadata")
    expected = rf"^Mooncake {server} at {re.escape(given)}: expected host:port, such as 10.0.0.1:50051$"
    with pytest.raises(ConfigurationError, match=expected):
        MooncakeStore(Mooncake(named[0], metadata=named[1]))


@pytest.mark.parametrize("address", [f"{HOST}:1", "[::1]:1", f"{'x' * 70}:1", "a\0b:1"])
def test_addresses_where_nobody_answers_are_named(module: Module, address: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"master at {re.escape(address)}: .*expected host:port"):
        MooncakeStore(Mooncake(address))


def test_a_process_is_reached_where_it_reaches_its_master(module: Module, address: str) -> None:
    """If the client looks its master up, as with etcd, the store does not contact the master first."""
    MooncakeStore(Mooncake("etcd://nowhere:1", "me"))
    assert module.asked[0][-1] == "etcd://nowhere:1"
    MooncakeStore(Mooncake(address))
    assert module.asked[0][0] == HOST
