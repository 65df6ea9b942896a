"""A fixture of the tests of tiers."""

from pathlib import Path

import pytest

from memstate.tiers.stores.file import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")
