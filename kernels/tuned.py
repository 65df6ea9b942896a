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
from typing import Any, NamedTuple, TypeVar

import torch

from memstate.kernels import remembered
from memstate.kernels.configs import CONFIGS, PROGRAMS_PER_SM, Config
from memstate.kernels.tuned_files import entries_of, why_stale

LOG = logging.getLogger("memstate.tuned")
LOG.addHandler(logging.NullHandler())
PROGRAMS_ON_CPU = 2  # two, so that programs share work even on a CPU


class Found(NamedTuple):
    """What a look-up found.

    Attributes:
        config: the configuration that launches take.
        file: path of the file that has it, "default" or "trial".
        why: why an entry of a file was not used, with the name of the file; "" if none was skipped.
        rows: rows of a launch from which on the file has this configuration.
    """

    config: Config
    file: str
    why: str = ""
    rows: int = 1


C = TypeVar("C", bound=Config)
DEFAULT, TRIAL = "default", "trial"  # files of configurations that no file has
# (kernel, key, device, rows of what was found) -> what launches found; the last one was asked last
ASKED: dict[tuple[str, str, str, int], Found] = {}
_trial: list[Config] = []  # configurations on trial: the last one of a kernel wins over every table


def look_up(kind: type[Config], key: str, device: str, architecture: str = "", rows: int = 1) -> Found:
    """Returns the configuration on trial, that of the device's file, or the default.

    Args:
        kind: class of the kernel's configurations.
        key: key of the launches.
        device: name of the device, which need not be here.
        architecture: architecture of the device; "" if it is not known, and then not compared.
        rows: rows of the launch.

    Raises:
        ValueError: a file is invalid; says its name, the key and the numbers.
    """
    for config in reversed(_trial):
        if type(config) is kind:
            return Found(config, TRIAL)
    if kind.kernel not in CONFIGS:
        return Found(kind(), DEFAULT, "not registered, so no file counts: call register()")
    found, skipped = Found(kind(), DEFAULT), dict[Path, str]()
    for configs, made, path in entries_of(device).get((kind.kernel, key), ()):
        if not (why := why_stale(kind, made, architecture)):
            held = max(least for least in configs if least <= rows)
            found = Found(configs[held], str(path), rows=held)
            skipped.pop(path, None)  # a file may have an entry for each release of Triton
            if "source" not in made:
                _tell(logging.INFO, path, "used", "the source of its kernels is not known")
            break
        skipped[path] = why
    for path, why in skipped.items():
        _tell(logging.WARNING, path, "not used", why)
    return found._replace(why="; ".join(f"{path.name} not used: {why}" for path, why in skipped.items()))


def _asked(kind: type[Config], device: torch.device, static: tuple[int, ...], rows: int = 1) -> Found:
    """Looks up the configuration of a launch, and records what was found."""
    kernel, key, name = kind.kernel, kind.key_of(*static), device_name(device)
    found = look_up(kind, key, name, architecture(device), rows)
    ASKED.pop((kernel, key, name, found.rows), None)
    ASKED[kernel, key, name, found.rows] = found
    return found


def last_key(kernel: str) -> str:
    """Returns the key of the last look-up of a kernel that was not a repetition; "" without one."""
    return next((key for asked, key, *_ in reversed(ASKED) if asked == kernel), "")


@cache
def _tell(level: int, path: Path, what: str, why: str) -> None:
    fields = {"event": what, "file": str(path), "why": why}
    LOG.log(level, "%(event)s file=%(file)r why=%(why)r", fields, extra={"memstate": fields})  # as `memstate.logs` does


@cache
def config_of(kind: type[C], device: torch.device, *static: int, rows: int = 1) -> C:
    """Returns the configuration of a kernel on a device. Only the first call with the same arguments reads files.

    Args:
        kind: class of the kernel's configurations.
        device: device of the launch.
        static: sizes that make the key, in the order of `kind.key`.
        rows: rows of the launch.

    Raises:
        ValueError: a file is invalid; says its name, the key and the numbers.

    Syncs: no.
    """
    return _asked(kind, device, static, rows).config  # type: ignore[return-value]  # of this kind


@cache
def launch_of(kind: type[C], device: torch.device, *static: int) -> tuple[int, C]:
    """Returns (programs, configuration) of a launch whose programs take items in turn; see `config_of`."""
    found = _asked(kind, device, static)
    whole: Any = found.config
    return programs(device) if found.file == DEFAULT else whole.programs_per_sm * multiprocessors(device), whole


@contextmanager
def trying(*configs: Config) -> Iterator[None]:
    """Launches kernels with these configurations inside the context, whatever the files say.

    Look-ups of the context are forgotten at its end.
    """
    before = ASKED.copy()
    _trial.extend(configs)
    _forget_launches()
    try:
        yield
    finally:
        del _trial[len(_trial) - len(configs) :]
        _forget_launches()
        ASKED.update(before)


def _forget_launches() -> None:
    for looked_up in (config_of, launch_of):
        looked_up.cache_clear()
    ASKED.clear()
    remembered.forget()


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
