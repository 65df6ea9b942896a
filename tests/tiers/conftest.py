"""Fixtures of the tests of tiers under a manager."""

import pytest

from memstate.kernels.dispatch import Backend
from tests.support.tiered_late import Late


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Managers built in this test get transfers that take their time: those of states, then those of KV."""
    monkeypatch.setattr(Late, "made", [])
    monkeypatch.setattr("memstate.tiers.manager.Transfers", Late)
    return Late.made


@pytest.fixture
def plain() -> Backend:
    """The reference: where many scenarios are more to the point than many backends."""
    return Backend("reference")
