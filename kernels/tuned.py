"""Launch configurations: defaults, what was measured on a device, and the lookup. Launches nothing, needs no Triton.

`memstate tune` measures and writes one file per device, named after it (`nvidia-h200.json`), and read from two folders:

    $MEMSTATE_TUNED   the user's; if it is not set, memstate/tuned in $XDG_CONFIG_HOME, which is ~/.config if not set
    tuned/            beside this module: what is shipped

An entry of the user's goes before one that is shipped for the same key. A key is made of what is static: the kernel,
the bytes of a lane, and the tiles of a slot rounded up to a power of two. Without an entry the defaults hold, and a
file that was not timed changes nothing. A file found under this device's name that cannot be read, or says that it is
another device's, is an error and not ignored. Files are read once in a process, at the first launch.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memstate.kernels.catalog import CompileCase

FORMAT = 1  # of the files
SHIPPED = Path(__file__).with_suffix("")
ENTRIES = 256  # entries compacted at a time
PROGRAMS_PER_SM = 4
PROGRAMS_ON_CPU = 2  # the fewest that share work
RANGES = {"entries": (16, 4096), "lanes": (128, 16384), "warps": (1, 16), "programs_per_sm": (1, 32)}
FILE_KEYS = {
    "format": int, "device": str, "date": str, "versions": dict, "timed": bool, "yardstick": dict, "entries": list,
}  # fmt: skip
ENTRY_KEYS = {"kernel": str, "key": str, "config": dict, "value": float, "unit": str, "checked": bool}


@dataclass(frozen=True)
class CopyConfig:
    """How the copy kernel is launched.

    Args:
        entries: of the slot vectors, compacted at a time.
        lanes: words per step of a tile.
        warps: of a program.
        programs_per_sm: programs of a launch, for each multiprocessor.

    Raises:
        ValueError: with the number and what is allowed.
    """

    entries: int = ENTRIES
    lanes: int = 4096
    warps: int = 4
    programs_per_sm: int = PROGRAMS_PER_SM

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value, power = getattr(self, name), name != "programs_per_sm"
            fits = type(value) is int and least <= value <= most
            if not fits or (power and value & (value - 1)):
                kind = "a power of two" if power else "a whole number"
                raise ValueError(f"{name} {value!r}: expected {kind} from {least} to {most}")


class CopyLaunch(NamedTuple):
    """A configuration on a device: with the programs of one launch."""

    programs: int
    config: CopyConfig


CONFIGS = {"copy": CopyConfig}  # kernel -> the class of its configurations
Table = dict[tuple[str, str], CopyConfig]  # (kernel, key) -> configuration
_trial: list[CopyConfig] = []  # the last one goes before every table


def copy_key(unit: int, tiles: int) -> str:
    """What configurations of the copy kernel are kept under: bytes of a lane, and tiles of a slot as a power of two."""
    return f"unit={unit},tiles={1 << max(tiles - 1, 0).bit_length()}"


@cache
def copy_launch(device: torch.device, unit: int, tiles: int) -> CopyLaunch:
    """How planes are copied on a device.

    The first call for planes of a size reads files; every other is a lookup in memory.

    Args:
        device: of the planes.
        unit: bytes that one lane moves.
        tiles: of a slot.

    Raises:
        ValueError: a file is invalid; with its name, the key and the numbers.

    Syncs: no.
    """
    config = _trial[-1] if _trial else _table(device_name(device)).get(("copy", copy_key(unit, tiles)))
    if config is None:
        return CopyLaunch(programs(device), CopyConfig())
    return CopyLaunch(config.programs_per_sm * multiprocessors(device), config)


@contextmanager
def trying(config: CopyConfig) -> Iterator[None]:
    """Launches every copy of this process under one configuration meanwhile, whatever the files say."""
    _trial.append(config)
    copy_launch.cache_clear()
    try:
        yield
    finally:
        _trial.pop()
        copy_launch.cache_clear()


@cache
def programs(device: torch.device) -> int:
    """Programs of one launch where nothing was tuned: what occupies the device, whatever the number of entries."""
    return PROGRAMS_ON_CPU if device.type == "cpu" else PROGRAMS_PER_SM * multiprocessors(device)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; a CPU, on which kernels are interpreted, counts as one."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def device_name(device: torch.device) -> str:
    """The name by which files know a device."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def file_name(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Where the user's own files are."""
    if chosen := os.environ.get("MEMSTATE_TUNED"):
        return Path(chosen)
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "memstate", "tuned")


def forget() -> None:
    """Reads files anew at the next launch: what has been written since counts then."""
    _table.cache_clear()
    copy_launch.cache_clear()


@cache
def _table(device: str) -> Table:
    table: Table = {}
    for folder in (SHIPPED, user_folder()):
        path = folder / file_name(device)
        if _is_there(path):
            table |= configurations(path, device)
    return table


def _is_there(path: Path) -> bool:
    """Raises: ValueError for what cannot even be looked for, such as a name that is too long."""
    try:
        return path.is_file()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: MEMSTATE_TUNED names the folder") from error


def configurations(path: Path, device: str) -> Table:
    """What a file says of launches on a device; nothing where it was not timed.

    Args:
        path: of the file.
        device: name of the device.

    Raises:
        ValueError: naming the file, the key and the numbers, also for another device's.
    """
    record = read(path)
    if record["device"] != device:
        raise ValueError(f"{path}: measured on {record['device']!r}, this is {device!r}: remove the file")
    found = {(entry["kernel"], entry["key"]): CopyConfig(**entry["config"]) for entry in record["entries"]}
    return found if record["timed"] else {}


def read(path: Path) -> dict[str, Any]:
    """A file's content, with nothing in it that this version does not know. Raises: ValueError naming what is wrong."""
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the first byte
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(record, dict) and record.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path}: format {record['format']!r}, expected {FORMAT}: run `memstate tune` again")
    _require_keys(f"{path}", record, FILE_KEYS, optional=("yardstick",))
    seen = set()
    for number, entry in enumerate(record["entries"]):
        _require_keys(f"{path}: entry {number}", entry, ENTRY_KEYS)
        kernel, key = entry["kernel"], entry["key"]
        where = f"{path}: {kernel}, {key}"
        if kernel not in CONFIGS:
            raise ValueError(f"{where}: kernel {kernel!r}, expected {', '.join(CONFIGS)}")
        if not re.fullmatch(r"unit=(16|8|4|2|1),tiles=[1-9]\d*", key) or (kernel, key) in seen:
            raise ValueError(f"{where}: expected each key once, such as {copy_key(16, 4096)}")
        if not entry["checked"]:
            raise ValueError(f"{where}: not checked against the reference: run `memstate tune` again")
        seen.add((kernel, key))
        _require_keys(where, entry["config"], dict.fromkeys((field.name for field in fields(CONFIGS[kernel])), int))
        try:
            CONFIGS[kernel](**entry["config"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return dict(record)


def _require_keys(where: str, found: Any, expected: Mapping[str, type], optional: tuple[str, ...] = ()) -> None:
    """Raises: ValueError unless an object has the expected keys and no other, each of its type."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {found!r}, expected an object with {', '.join(expected)}")
    missing = expected.keys() - found.keys() - set(optional)
    if missing or found.keys() - expected.keys():
        have = ", ".join(sorted(found)) or "nothing"
        raise ValueError(f"{where}: has {have}; expected {', '.join(expected)} and no other")
    for name, value in found.items():
        kinds = (int, float) if expected[name] is float else (expected[name],)
        if type(value) not in kinds:
            raise ValueError(f"{where}: {name} {value!r}, expected {expected[name].__name__}")


def compile_cases(config: CopyConfig) -> list[CompileCase]:
    """The launches of the copy kernel under a configuration, to compile ahead; needs Triton."""
    cases: list[CompileCase] = import_module("memstate.kernels.copy").compile_cases(16, config)
    return cases
