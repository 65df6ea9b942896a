"""Fixtures of the tests of tiers; the servers of these tests must end empty."""

from pathlib import Path

import pytest

from memstate.kernels.dispatch import Backend
from memstate.tiers.stores.file import FileStore
from tests.support.endings import pytest_pyfunc_call
from tests.support.tiered_late import Late

__all__ = ["late", "plain", "pytest_pyfunc_call", "store"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Gives managers of this test late transfers; returns these, those of states first, then those of KV."""
    monkeypatch.setattr(Late, "made", [])
    monkeypatch.setattr("memstate.tiers.manager.Transfers", Late)
    return Late.made


@pytest.fixture
def plain() -> Backend:
    """The reference backend, for tests that need many scenarios rather than many backends."""
    return Backend("reference")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")
