"""Makes the results of sweeps that nobody ran, for tests of what is chosen, shown and stored."""

from memstate.kernels.configs import CopyConfig
from memstate_tools.tuning import Sweep, Trial
from memstate_tools.tuning.cost import UNIT
from memstate_tools.tuning.grid import axes_of, one_at_a_time
from memstate_tools.tuning.result import RATE


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
