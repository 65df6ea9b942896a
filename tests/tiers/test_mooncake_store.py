"""Records in a real Mooncake store on loopback: whole or missing, and the same for every process."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.tiers.stores import mooncake_client
from memstate.tiers.stores.base import Outcome
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from tests.support.mooncake_rig import RECORDS, SIZE, Rig, fresh, peer
from tests.support.mooncake_server import HOST, Master, running_master

MISSING, DONE, DAMAGED, FAILED = Outcome


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with running_master() as running:
        yield running


@pytest.fixture(scope="module", params=["p2p", "http"])
def rig(master: Master, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(master.settings(http=request.param == "http"))
    yield made
    made.store.close()


def test_what_was_put_is_found_and_nothing_beside_it_is_written(rig: Rig, generator: torch.Generator) -> None:
    names = [fresh() for _ in range(8)]
    wanted = rig.fill(generator, *range(8))
    assert rig.store.exists(names) == [False] * 8
    assert rig.store.put(names, rig.buffers(*range(8))) == [DONE] * 8
    beside = rig.fill(generator, *range(RECORDS))
    assert rig.store.exists([*names, fresh()]) == [True] * 8 + [False]
    assert rig.store.get([names[5], fresh(), names[2]], rig.buffers(11, 13, 15)) == [DONE, MISSING, DONE]
    assert rig.holds([wanted[5], wanted[2]], 11, 15)
    assert rig.holds([beside[i] for i in (10, 12, 14, 16)], 10, 12, 14, 16)


@pytest.mark.parametrize("other", [1, SIZE - 1])
@pytest.mark.parametrize("longer", [False, True])
def test_a_record_of_another_size_is_damaged_once(
    rig: Rig, generator: torch.Generator, other: int, longer: bool
) -> None:
    whole, part = rig.pool.buffer(2), rig.pool.buffer(3)[:other]
    written, read = (whole, part) if longer else (part, whole)
    name, sound = fresh(), fresh()
    wanted = rig.fill(generator, 4)
    assert rig.store.put([name, sound], [written, rig.pool.buffer(4)]) == [DONE, DONE]
    assert rig.store.get([name, sound], [read, rig.pool.buffer(5)]) == [DAMAGED, DONE]
    assert rig.holds(wanted, 5)
    assert rig.store.get([name], [read]) == [MISSING]
    assert rig.store.put([name], [read]) == [DONE]
    assert rig.store.get([name], [read]) == [DONE]


def test_names_may_come_twice_and_every_letter_of_them_counts(rig: Rig, generator: torch.Generator) -> None:
    name, other = fresh(), fresh().replace("0", "f", 1)
    names = [name, other, name.replace("kv", "state"), *(fresh() for _ in range(4))]
    wanted = rig.fill(generator, *range(7))
    assert rig.store.put([*names, names[5]], rig.buffers(*range(7), 5)) == [DONE] * 8
    rig.fill(generator, 0)
    assert rig.store.put(names[:1], rig.buffers(0)) == [DONE]  # a repeated put changes no byte
    assert rig.store.get([*names, names[5]], rig.buffers(*range(7, 15))) == [DONE] * 8
    assert rig.holds([*wanted, wanted[5]], *range(7, 15))
    rig.store.discard(names)


def test_memory_is_registered_once(rig: Rig) -> None:
    rig.store.register(rig.pool.memory)
    rig.store.register(rig.pool.memory[3:5])
    rig.store.register(torch.empty(0, dtype=torch.uint8))
    more = torch.empty(2 * SIZE, dtype=torch.uint8)
    rig.store.register(more[:SIZE])
    with pytest.raises(OSError, match="INVALID_PARAMS"):  # half of the memory is registered already
        rig.store.register(more)


@pytest.mark.parametrize(
    "bad",
    [np.zeros(4, np.uint8),  # this array is not registered
     np.zeros((2, 2), np.uint8), np.zeros(4, np.int16), np.zeros(8, np.uint8)[::2]],
)  # fmt: skip
def test_buffers_that_cannot_be_meant(rig: Rig, bad: Any) -> None:
    name = fresh()
    for call in (rig.store.get, rig.store.put):
        with pytest.raises(InvalidArgument, match="buffer of"):
            call([name, fresh()], [rig.pool.buffer(0), bad])
    assert rig.store.exists([name]) == [False]


def test_arguments_that_cannot_be_meant(rig: Rig) -> None:
    frozen = rig.pool.buffer(0)[:]
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="writable"):
        rig.store.get([fresh()], [frozen])
    assert rig.store.put([fresh()], [frozen]) == [DONE]
    with pytest.raises(InvalidArgument, match="2 names with 1 buffers"):
        rig.store.get([fresh(), fresh()], rig.buffers(0))
    for name in ("", "a", "a/b", f"{fresh()}\n", 3):
        with pytest.raises(InvalidArgument, match="expected state- or kv-"):
            rig.store.exists([fresh(), name])  # type: ignore[list-item]
    for memory in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8).t()):
        with pytest.raises(InvalidArgument, match="contiguous bytes"):
            rig.store.register(memory)


@pytest.mark.sample(1)
def test_two_processes_see_each_others_records(rig: Rig, generator: torch.Generator) -> None:
    mine, theirs = fresh(), fresh()
    wanted = rig.fill(generator, 0)
    assert rig.store.put([mine], rig.buffers(0)) == [DONE]
    reader = peer(replace(rig.store.settings, segment_bytes=0), mine, theirs, 90)
    assert rig.store.get([theirs], rig.buffers(1)) == [DONE]
    assert rig.holds([wanted[0] ^ 90], 1)
    reader.communicate()
    # the reader gave no memory, so its record lies in this process
    assert rig.store.get([theirs], rig.buffers(2)) == [DONE]


def test_a_master_that_is_not_there_is_named(master: Master) -> None:
    nobody = f"{HOST}:1"
    with pytest.raises(ConfigurationError, match=f"master at {nobody}"):
        MooncakeStore(Mooncake(nobody))
    with pytest.raises(ConfigurationError, match=f"metadata server at {nobody}"):
        MooncakeStore(Mooncake(master.settings().master, metadata=f"http://{nobody}/metadata"))


def test_segments_that_the_client_refuses_are_those_that_the_settings_refuse(master: Master, monkeypatch: Any) -> None:
    least = mooncake_client.LEAST_SEGMENT
    MooncakeStore(master.settings(segment_bytes=least)).close()
    monkeypatch.setattr(mooncake_client, "LEAST_SEGMENT", 1)
    with pytest.raises(ConfigurationError, match=rf"refuses .*segment_bytes={least - 1}.*INVALID_PARAMS"):
        MooncakeStore(master.settings(segment_bytes=least - 1))
