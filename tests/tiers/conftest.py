"""Fixtures of the tests of tiers; each test ends with a check that its servers hold nothing any more."""

from pathlib import Path

import pytest

from memstate.kernels.dispatch import Backend
from memstate.tiers.stores.file import FileStore
from tests.support.endings import pytest_pyfunc_call
from tests.support.tiered_late import Late

__all__ = ["late", "plain", "pytest_pyfunc_call", "store"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Makes transfers of this test's managers arrive late. Returns the transfers: states first, then KV."""
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
