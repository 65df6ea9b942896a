"""Fixtures of the tests of tiers, whose servers end empty."""

from pathlib import Path

import pytest

from memstate.kernels.dispatch import Backend
from memstate.tiers.stores.file import FileStore
from tests.support.endings import pytest_pyfunc_call
from tests.support.tiered_late import Late

__all__ = ["late", "plain", "pytest_pyfunc_call", "store"]


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


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")
