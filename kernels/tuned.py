"""Chooses the launch configuration of a launch: the one on trial, that of a file, or the default. Needs no Triton.

A key has the kernel and the static sizes of its launches, such as the bytes of a lane. Without an entry for the key in
the files of the device (`memstate.kernels.tuned_files`), defaults apply. If an entry was measured with another Triton,
on another architecture or from another source of the kernel, a WARNING says so and the entry is not used.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from memstate.kernels.configs import PROGRAMS_PER_SM, Config, CopyConfig
from memstate.kernels.tuned_files import entries_of, why_stale

LOG = logging.getLogger("memstate.tuned")
LOG.addHandler(logging.NullHandler())
PROGRAMS_ON_CPU = 2  # two, so that programs share work even on a CPU


class CopyLaunch(NamedTuple):
    """The programs of one launch on a device, and its configuration."""

    programs: int
    config: CopyConfig


C = TypeVar("C", bound=Config)
ASKED: dict[type[Config], str] = {}  # class -> the key of its last look-up
_trial: list[Config] = []  # configurations on trial: the last one of a kernel wins over every table


def _found(kind: type[C], device: torch.device, static: tuple[int, ...]) -> C | None:
    """Returns the configuration on trial or, without one, that of the device's file; None without both."""
    ASKED[kind] = key = kind.key_of(*static)
    for config in reversed(_trial):
        if type(config) is kind:
            return config
    found, skipped = None, dict[Path, str]()
    for config, made, path in entries_of(device_name(device)).get((kind.kernel, key), ()):
        if not (why := why_stale(kind, made, architecture(device))):
            found = config
            skipped.pop(path, None)  # a file may have an entry for each release of Triton
            if "source" not in made:
                _tell(logging.INFO, path, "used", "the source of its kernels is not known")
            break
        skipped[path] = why
    for path, why in skipped.items():
        _tell(logging.WARNING, path, "not used", why)
    return found  # type: ignore[return-value]  # an entry of this kernel


@cache
def _tell(level: int, path: Path, what: str, why: str) -> None:
    fields = {"event": what, "file": str(path), "why": why}
    LOG.log(level, "%(event)s file=%(file)r why=%(why)r", fields, extra={"memstate": fields})  # as `memstate.logs` does


@cache
def config_of(kind: type[C], device: torch.device, *static: int) -> C:
    """Returns the configuration of a kernel on a device. Only the first call with the same arguments reads files.

    Args:
        kind: class of the kernel's configurations.
        device: device of the launch.
        static: sizes that make the key, in the order of `kind.key`.

    Raises:
        ValueError: a file is invalid; says its name, the key and the numbers.

    Syncs: no.
    """
    return _found(kind, device, static) or kind()


@cache
def programs_for(kind: type[Config], device: torch.device, *static: int) -> int:
    """Returns the programs of a launch, for kernels whose programs take items in turn; see `config_of`."""
    config = _found(kind, device, static)
    return programs(device) if config is None else int(config.programs_per_sm) * multiprocessors(device)  # type: ignore[attr-defined]


@cache
def copy_launch(device: torch.device, unit: int, tiles: int) -> CopyLaunch:
    """Returns the configuration of copies on a device.

    The first call for planes of a size reads files; every later call is a lookup in memory.

    Args:
        device: device of the planes.
        unit: bytes that one lane moves.
        tiles: tiles of a slot.

    Raises:
        ValueError: a file is invalid; says its name, the key and the numbers.

    Syncs: no.
    """
    return CopyLaunch(programs_for(CopyConfig, device, unit, tiles), config_of(CopyConfig, device, unit, tiles))


@contextmanager
def trying(*configs: Config) -> Iterator[None]:
    """Launches kernels with these configurations inside the context, whatever the files say."""
    _trial.extend(configs)
    _forget_launches()
    try:
        yield
    finally:
        del _trial[len(_trial) - len(configs) :]
        _forget_launches()


def _forget_launches() -> None:
    for looked_up in (config_of, programs_for, copy_launch):
        looked_up.cache_clear()
    ASKED.clear()


@cache
def programs(device: torch.device) -> int:
    """Returns the programs of an untuned launch: as many as keep the device busy, for any number of entries."""
    return PROGRAMS_ON_CPU if device.type == "cpu" else PROGRAMS_PER_SM * multiprocessors(device)


def multiprocessors(device: torch.device) -> int:
    """Returns the multiprocessors of a device; a CPU, on which kernels are interpreted, counts as one."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    """Returns the architecture for which kernels are compiled on a device: "sm_90", "gfx942"; "cpu" on a CPU."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").split(":")[0]
    return name if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def device_name(device: torch.device) -> str:
    """Returns the name of a device in files."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def forget() -> None:
    """Forgets what files said, so that the next launch reads them again."""
    entries_of.cache_clear()
    _tell.cache_clear()
    _forget_launches()
