"""What only a Mooncake store does, with a real one on loopback; test_stores.py has what all stores do."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.tiers.stores import mooncake_client
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from tests.support.loopback import HOST
from tests.support.mooncake_server import Master, running_master
from tests.support.store_rig import SIZE, Rig, fresh


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with running_master() as running:
        yield running


@pytest.fixture(scope="module", params=["p2p", "http"])
def rig(master: Master, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(MooncakeStore(master.settings(http=request.param == "http")))
    yield made
    made.store.close()


def test_memory_is_registered_once(rig: Rig) -> None:
    rig.store.register(rig.pool.memory)
    rig.store.register(rig.pool.memory[3:5])
    rig.store.register(torch.empty(0, dtype=torch.uint8))
    more = torch.empty(2 * SIZE, dtype=torch.uint8)
    rig.store.register(more[:SIZE])
    with pytest.raises(OSError, match="INVALID_PARAMS"):  # half of the memory is registered already
        rig.store.register(more)
    for memory in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8).t()):
        with pytest.raises(InvalidArgument, match="contiguous bytes"):
            rig.store.register(memory)
    for call in (rig.store.get, rig.store.put):
        with pytest.raises(InvalidArgument, match="outside registered memory"):
            call([fresh(), fresh()], [rig.pool.buffer(0), np.zeros(4, np.uint8)])


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
