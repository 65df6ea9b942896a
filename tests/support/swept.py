"""An empty folder of configurations, and results of sweeps that nobody ran, for tests of what is chosen and stored."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstate.kernels import tuned, tuned_files
from memstate.kernels.configs import CopyConfig
from memstate_tools.tuning import Sweep, Trial
from memstate_tools.tuning.cost import UNIT
from memstate_tools.tuning.grid import axes_of, one_at_a_time
from memstate_tools.tuning.result import RATE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of configurations, empty; no shipped file exists, and the process has read no file."""
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path / "user"))
    tuned.forget()
    yield tmp_path / "user"
    tuned.forget()


def copies(timed: bool, limit: int | None = None) -> list[CopyConfig]:
    """Returns the first configurations that a sweep of copies tries."""
    return one_at_a_time(CopyConfig, axes_of(CopyConfig, timed))[:limit]  # type: ignore[return-value]


def outcome_of(
    *values: float | None, timed: bool = True, device: str = "cpu", key: str = "unit=16,tiles=8"
) -> Sweep:  # fmt: skip
    """Returns the result of a sweep of copies.

    Args:
        values: The measured value of each configuration, the default first; None for an excluded configuration.
        timed: Whether the values are rates; otherwise they are weights.
        device: Name of the device.
        key: Key of all configurations.
    """
    unit = RATE if timed else UNIT
    made = [
        Trial("copy", key, config, True, value, unit, "" if value else "spills 8 bytes", {}, value if timed else None)
        for config, value in zip(copies(timed), values, strict=False)
    ]
    return Sweep(device, timed, made)
