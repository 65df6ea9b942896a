"""Formats numbers for people: durations, bytes and counts with their units, in the same form everywhere."""

from memstate.tables import number

DURATIONS = (86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")


def several(count: int, what: str) -> str:
    """Returns a count and its noun, in the plural if needed.

    Example:
        >>> several(1, "slot"), several(2300, "slot")
        ('1 slot', '2,300 slots')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit that is not longer than the duration itself.

    Example:
        >>> duration(0.0000246), duration(1.75), duration(210)
        ('24.6 us', '1.75 s', '3.5 min')
    """
    if not seconds:
        return "0 s"
    size, unit = next((one for one in DURATIONS if seconds >= 0.9995 * one[0]), DURATIONS[-1])
    return f"{number(seconds / size)} {unit}"


def measured(value: float | None, unit: str) -> str:
    """Returns a value with its unit. The units are those of benchmarks, such as "host us", "bytes/s" or "launches".

    Example:
        >>> measured(1200.0, "host us"), measured(2.0**31, "bytes/s"), measured(3.0, "launches"), measured(None, "us")
        ('1.2 ms of host', '2.00 GiB/s', '3 launches', '')
    """
    if value is None:
        return ""
    if unit in ("us", "host us"):
        return duration(value / 1e6) + " of host" * unit.startswith("host")
    if unit in ("bytes", "bytes/s"):
        from memstate.sizes import format_bytes  # this import loads torch

        return format_bytes(round(value)) + unit.removeprefix("bytes")
    return f"{number(value)} {unit}"
