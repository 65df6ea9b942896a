"""Chooses launch configurations: those measured on a device, or defaults. Launches nothing, needs no Triton.

`memstate tune` measures, and writes one file per device, with the name of the device (`nvidia-h200.json`). Files are
read from two folders:

    $MEMSTATE_TUNED   the user's files; without it memstate/tuned in $XDG_CONFIG_HOME, or else in ~/.config
    tuned/            beside this module: the shipped files

The user's entry wins over a shipped entry with the same key. A key has the kernel and the static sizes of its launches,
such as the bytes of a lane. Without an entry, defaults apply. A file that was not timed changes nothing.

An entry says with which release of Triton, on which architecture and from which source of the kernel it was measured.
If one of them is another one here, a WARNING says so and the entry is not used. What an entry does not say is not
compared: files of format 1 say versions only.

It is an error if the file of this device cannot be read, or says that it is for another device. But if MEMSTATE_TUNED
is not set, a user's file that cannot be opened is skipped, because this process may not be allowed to read the home
folder. Files are read once in a process, at the first launch.
"""

import ast
import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from memstate.kernels.tables import ACCESS_BYTES

FORMATS = (1, 2)  # versions of the format of the files; format 1 has no `made`
LOG = logging.getLogger("memstate.tuned")
LOG.addHandler(logging.NullHandler())
SHIPPED = Path(__file__).with_suffix("")
ENTRIES = 256  # entries that a program looks at together
PROGRAMS_PER_SM = 4
LATER = ("key_fastest", "fp16")  # parts that older keys do not have
MOVED = "unit tiles"  # key of kernels that move tiles: bytes that a lane moves, and tiles of a slot, or of a block
LONGEST = {True: 1024, False: 64}  # whether a column is contiguous -> limit of its values in an int8 block
MOST_WARPS = 16
PROGRAMS_ON_CPU = 2  # two, so that programs share work even on a CPU
FILE_KEYS = {
    "format": int, "device": str, "date": str, "versions": dict, "timed": bool, "yardstick": dict, "entries": list,
}  # fmt: skip
ENTRY_KEYS = {"kernel": str, "key": str, "config": dict, "value": float, "unit": str, "checked": bool, "made": dict}
MADE = dict.fromkeys(("date", "torch", "triton", "architecture", "source"), str)  # what an entry says of its making


def _power_above(number: int) -> int:
    """Returns the least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


ROW_BYTES = 64  # fewest neighbouring bytes of a state that lanes move together
SECTOR_BYTES = 32  # bytes that device memory reads or writes at a time
KEY_LANES = 8  # fewest lanes that share the keys of a value, with keys fastest


def axis(*values: int, least: int, most: int, bits: bool = False, compiled: bool = True) -> Any:
    """Declares a field of a configuration, and how it is swept.

    Args:
        values: values that a sweep tries, the default first.
        least: least value that a file may have.
        most: largest value that a file may have.
        bits: whether results may have other bits under another value.
        compiled: whether compiled code depends on the value, which is then a power of two.
    """
    how = {"values": values, "least": least, "most": most, "bits": bits, "compiled": compiled}
    return field(default=values[0], metadata=how)


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel. The fields stand in the order in which a sweep tries them.

    The cheapest field comes first. Another number of programs needs no compilation. Other warps and entries need one,
    but do not change the block of bytes that a program moves at a time. A subclass names its kernel and the parts of
    the key, which are the static sizes that a launch gives to `config_of`.

    Raises:
        ValueError: says the number, and which numbers are allowed.
    """

    kernel: ClassVar[str]
    key: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, kernel: str = "", key: str = "") -> None:
        if kernel:
            cls.kernel, cls.key = kernel, tuple(key.split())
            CONFIGS[kernel] = cls

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            power = each.metadata["compiled"] and not any(value & (value - 1) for value in each.metadata["values"])
            fits = type(value) is int and least <= value <= most
            if not fits or (power and value & (value - 1)):
                kind = "a power of two" if power else "a whole number"
                raise ValueError(f"{each.name} {value!r}: expected {kind} from {least} to {most}")

    @classmethod
    def key_of(cls, *static: int) -> str:
        """Returns the key of a launch. Tiles are rounded up to a power of two, so similar planes share a key."""
        named = zip(cls.key, static, strict=True)
        return ",".join(f"{name}={_power_above(size) if name == 'tiles' else int(size)}" for name, size in named)


CONFIGS: dict[str, type[Config]] = {}  # kernel -> the class of its configurations


@dataclass(frozen=True)
class CopyConfig(Config, kernel="copy", key=MOVED):
    """The launch configuration of the copy kernel.

    Args:
        programs_per_sm: programs of a launch, for each multiprocessor.
        warps: warps of a program.
        entries: entries of the slot vectors that a program looks at together.
        lanes: words of a tile that a program moves at a time.
    """

    programs_per_sm: int = axis(PROGRAMS_PER_SM, 2, 8, 1, 16, least=1, most=32, compiled=False)
    warps: int = axis(4, 8, 2, least=1, most=16)
    entries: int = axis(ENTRIES, 512, 128, least=16, most=4096)
    lanes: int = axis(4096, 2048, 8192, 1024, least=128, most=16384)


@dataclass(frozen=True)
class GatherConfig(Config, kernel="gather", key=MOVED):
    """The launch configuration of the gather kernel.

    Args:
        warps: warps of a program.
        lanes: words of a tile.
    """

    warps: int = axis(4, 8, 2, least=1, most=16)
    lanes: int = axis(4096, 2048, 8192, 1024, least=128, most=16384)


@dataclass(frozen=True)
class ScatterConfig(CopyConfig, kernel="scatter", key=MOVED):
    """The launch configuration of the scatter kernel: fields of the copy kernel; `lanes` counts the words of a tile."""


@dataclass(frozen=True)
class PackConfig(CopyConfig, kernel="pack", key=MOVED):
    """The launch configuration of packing and unpacking records, with the fields of the copy kernel."""


@dataclass(frozen=True)
class Int8Config(Config, kernel="pack_int8", key="reduced inner bytes"):
    """The launch configuration of packing and unpacking as int8.

    Args:
        programs_per_sm: programs of a launch, for each multiprocessor.
        warps: warps of a program.
        block: elements of a block.
    """

    programs_per_sm: int = axis(PROGRAMS_PER_SM, 2, 8, 1, 16, least=1, most=32, compiled=False)
    warps: int = axis(4, 8, 2, least=1, most=16)
    block: int = axis(4096, 8192, 2048, least=512, most=32768)

    def blocks(self, columns: int, reduced: int, inner: int) -> tuple[int, int]:
        """Returns (columns of a block, values of each column in the block), powers of two.

        Args:
            columns: columns of one layer of one slot; the values of a column share a scale.
            reduced: values of a column.
            inner: elements from one value of a column to the next.
        """
        block_r = min(_power_above(reduced), LONGEST[inner == 1], self.block)
        return min(_power_above(columns), self.block // block_r), block_r


@dataclass(frozen=True)
class DeltaConfig(Config, kernel="gated_delta", key="key value bytes key_fastest fp16"):
    """The launch configuration of the gated delta step. It can change the order in which a sum over keys is added up.

    Args:
        warp_elements: elements of the state that a warp holds, for elements of 4 bytes; twice as many for elements of 2
            bytes. So 2048 are 8 KB, in 64 fp32 hardware registers of a lane, or 128 for elements of 2 bytes.
        block_value: values of each key in a program, for elements of 4 bytes; twice as many for elements of 2 bytes.
            So 16 values are 64 bytes, whole memory sectors.
    """

    warp_elements: int = axis(2048, 1024, 4096, 512, least=128, most=8192, bits=True)
    block_value: int = axis(16, 8, 32, 64, least=4, most=128, bits=True)

    def blocks(self, key: int, value: int, itemsize: int) -> tuple[int, int, int]:
        """Returns the keys and values of one tile (powers of two), and the warps that hold it.

        Args:
            key: keys of a head.
            value: values of a head.
            itemsize: bytes that an element of the state counts as, up to 8.
        """
        block_k, block_v = _power_above(key), min(4 * self.block_value // itemsize, _power_above(value))
        return block_k, block_v, min(MOST_WARPS, max(1, block_k * block_v * itemsize // (4 * self.warp_elements)))


def shares(
    key_fastest: bool, itemsize: int, block_k: int, block_v: int, warps: int, threads: int = 32
) -> tuple[int, int]:
    """Returns (lanes that share the keys of a value in a piece of a tile, neighbouring keys of each lane).

    A piece has at least as many lanes as threads, so that no two warps hold the same lanes.

    Args:
        key_fastest: whether a slot stores `value key`.
        itemsize: bytes of an element of the state.
        block_k: keys of the tile.
        block_v: values of the tile.
        warps: warps of a program.
        threads: threads of a warp.
    """
    wide = ACCESS_BYTES // itemsize
    if key_fastest:
        run = min(wide, block_k)
        return min(block_k // run, max(KEY_LANES, threads * warps // block_v)), run
    return min(block_k, max(1, threads * warps // max(1, block_v // wide))), 1


@dataclass(frozen=True)
class SelectiveConfig(Config, kernel="selective", key="dim state tied bytes"):
    """The launch configuration of the selective step. It can change the order in which a sum over states is added up.

    Args:
        warp_elements: elements of the state that a warp holds; 2048 are 64 fp32 hardware registers per lane. If every
            element has its own `a`, a warp holds a quarter of this number.
        tile_warps: elements of a program, as a multiple of `warp_elements`.
    """

    warp_elements: int = axis(2048, 1024, 512, 256, least=128, most=8192, bits=True)
    tile_warps: int = axis(1, 2, 4, least=1, most=8, bits=True)

    def blocks(self, dim: int, state: int, tied: bool, least: int = 1) -> tuple[int, int, int]:
        """Returns the dims and states of one tile (powers of two), and the warps that hold it.

        Args:
            dim: dims of a head.
            state: states of a head.
            tied: whether a head has one `a`.
            least: fewest dims of a tile, unless the head has fewer. So, with dims fastest, a tile has whole sectors.
        """
        block_n = _power_above(state)
        elements = self.warp_elements if tied else max(1, self.warp_elements // 4)
        block_d = min(_power_above(dim), max(least, elements * self.tile_warps // block_n))
        return block_d, block_n, min(MOST_WARPS, max(1, block_d * block_n // elements))


def state_shares(
    dim_fastest: bool, itemsize: int, wide: int, block_d: int, block_n: int, warps: int, threads: int = 32
) -> tuple[int, int]:
    """Returns (lanes that share the states of a dim in a piece of a tile, neighbouring states of each lane).

    Few lanes need few exchanges for a sum, and repeat the work of a dim less often. Many lanes hold fewer elements of b
    and c each. With states fastest, a lane of a full tile has 2 dims, and neighbouring lanes have 64 bytes of a row.

    Args:
        dim_fastest: whether a slot stores `state dim`.
        itemsize: bytes of an element of the state.
        wide: neighbouring states that a lane moves at a time.
        block_d: dims of the tile.
        block_n: states of the tile.
        warps: warps of a program.
        threads: threads of a warp.
    """
    if dim_fastest:
        return min(block_n, max(1, threads * warps // max(1, block_d * itemsize // ACCESS_BYTES))), 1
    run = min(wide, block_n)
    return min(block_n // run, max(ROW_BYTES // (run * itemsize), 2 * threads * warps // block_d)), run


@dataclass(frozen=True)
class ConvConfig(Config, kernel="conv", key="taps channel_major bytes"):
    """The launch configuration of the convolution step.

    Args:
        warps: warps of a program.
        window_bytes: bytes of the window that 32 threads hold; the default is four taps of 16 bytes per thread. So
            programs are small, and a batch of 1 has many programs.
    """

    warps: int = axis(1, 2, 4, least=1, most=16)
    window_bytes: int = axis(2048, 4096, 1024, least=512, most=16384)

    def blocks(self, channels: int, taps: int, itemsize: int, threads: int = 32) -> tuple[int, int]:
        """Returns (channels of a program, channels that a lane accesses at a time), powers of two.

        Args:
            channels: channels of the convolution.
            taps: taps of the convolution.
            itemsize: bytes of an element of the state.
            threads: threads of a warp.
        """
        held = self.window_bytes * self.warps * threads // (32 * _power_above(taps) * itemsize)
        block = min(_power_above(channels), max(1, held))
        return block, min(block, ACCESS_BYTES // itemsize)


class CopyLaunch(NamedTuple):
    """The programs of one launch on a device, and its configuration."""

    programs: int
    config: CopyConfig


C = TypeVar("C", bound=Config)
Entry = tuple[Config, Mapping[str, str], Path]  # a configuration, with what it was measured (`MADE`), its file
Table = dict[tuple[str, str], list[Entry]]  # (kernel, key) -> entries, the one to prefer first
ASKED: dict[type[Config], str] = {}  # class -> the key of its last look-up
_trial: list[Config] = []  # configurations on trial: the last one of a kernel wins over every table


def _found(kind: type[C], device: torch.device, static: tuple[int, ...]) -> C | None:
    """Returns the configuration on trial or, without one, that of the device's file; None without both."""
    ASKED[kind] = key = kind.key_of(*static)
    for config in reversed(_trial):
        if type(config) is kind:
            return config
    found, skipped = None, dict[Path, str]()
    for config, made, path in _table(device_name(device)).get((kind.kernel, key), ()):
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


def why_stale(kind: type[Config], made: Mapping[str, str], architecture: str) -> str:
    """Returns why an entry is not valid in this process; "" if it is. Needs Triton.

    Args:
        kind: class of the kernel's configurations.
        made: with what the entry was measured.
        architecture: the architecture of the launches.
    """
    here = str(import_module("triton").__version__)
    if made.get("triton", here).split(".")[:2] != here.split(".")[:2]:
        return f"measured with Triton {made['triton']}, this is {here}: run `memstate tune` again"
    if made.get("architecture", architecture) != architecture:
        return f"measured on {made['architecture']}, this is {architecture}"
    if "source" in made and made["source"] != source_of(kind.kernel):
        return f"the kernel {kind.kernel} has changed since: run `memstate tune` again"
    return ""


@cache
def source_of(kernel: str) -> str:
    """Returns a hash of a kernel, of what chooses its shapes, and of the functions and constants that they use.

    Comments and docstrings do not count. What Triton's own functions do, its version says. Needs Triton.
    """
    module = vars(import_module(f"memstate.kernels.{kernel}"))
    todo = [each for each in module.values() if hasattr(each, "fn") or getattr(each, "__module__", "") == __name__]
    todo.append(getattr(CONFIGS[kernel], "blocks", None))
    seen, parts = set[object](), set[str]()
    for each in todo:  # it grows
        function = getattr(each, "fn", each)
        own = isinstance(function, FunctionType) and function.__module__.startswith("memstate.")
        if not own or function in seen:
            continue
        seen.add(function)
        made: Any = ast.parse(dedent(inspect.getsource(function))).body[0]
        made.body = made.body[ast.get_docstring(made) is not None :]
        parts.add(ast.unparse(made))
        for name in function.__code__.co_names:
            todo.append(value := function.__globals__.get(name))
            if isinstance(value, int | float | str | tuple) or hasattr(value, "value"):  # `tl.constexpr` has a value
                parts.add(f"{name} = {value!r}")
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]


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


def file_name(device: str) -> str:
    """Returns the name of a device's file: `NVIDIA H200` -> `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Returns the folder of the user's own files. Raises: ValueError if it is in a home that is not known."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    folder = os.path.expanduser(os.environ.get("MEMSTATE_TUNED") or os.path.join(config, "memstate", "tuned"))
    if folder.startswith("~"):
        raise ValueError(f"{folder}: there is no such home: MEMSTATE_TUNED names another folder")
    return Path(folder)


def forget() -> None:
    """Forgets what files said, so that the next launch reads them again."""
    _table.cache_clear()
    _tell.cache_clear()
    _forget_launches()


@cache
def _table(device: str) -> Table:
    table: Table = {}
    named = bool(os.environ.get("MEMSTATE_TUNED"))
    folders = [SHIPPED]
    with nullcontext() if named else suppress(ValueError):  # no home, no default folder
        folders = [user_folder(), SHIPPED]
    for folder in folders:
        path = folder / file_name(device)
        if _is_there(path, named=named and folder != SHIPPED):
            for key, entries in configurations(path, device).items():
                table.setdefault(key, []).extend(entries)
    return table


def _is_there(path: Path, named: bool) -> bool:
    """Returns whether the file exists and, in a folder that MEMSTATE_TUNED does not name, whether it can be read.

    Raises:
        ValueError: the search itself fails in a named folder, for example because the name is too long.
    """
    try:
        return path.is_file() and (named or os.access(path, os.R_OK))
    except OSError as error:
        if not named:
            return False
        raise ValueError(f"{path}: {error.strerror}: MEMSTATE_TUNED names the folder") from error


def configurations(path: Path, device: str) -> Table:
    """Returns the configurations in the file of a device; none if the file was not timed.

    Args:
        path: path of the file.
        device: name of the device.

    Raises:
        ValueError: the file is invalid, or another device's; says the file, the key and the numbers.
    """
    record = read(path)
    if record["device"] != device:
        raise ValueError(f"{path}: measured on {record['device']!r}, this is {device!r}: remove the file")
    table: Table = {}
    for entry in record["entries"] if record["timed"] else ():
        config = CONFIGS[entry["kernel"]](**entry["config"])
        table.setdefault((entry["kernel"], entry["key"]), []).append((config, entry["made"], path))
    return table


def read(path: Path) -> dict[str, Any]:
    """Returns a file's content in the newest format. Raises: ValueError for anything that is not known here."""
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(record, dict) and record.get("format", 1) not in FORMATS:
        raise ValueError(f"{path}: format {record['format']!r}, expected 1 or 2: run `memstate tune` again")
    _require_keys(f"{path}", record, FILE_KEYS, optional=("yardstick",))
    seen = set()
    for number, entry in enumerate(record["entries"]):
        _require_keys(f"{path}: entry {number}", entry, ENTRY_KEYS, optional=("made",))
        kernel, key = entry["kernel"], entry["key"]
        where = f"{path}: {kernel}, {key}"
        if kernel not in CONFIGS:
            raise ValueError(f"{where}: kernel {kernel!r}, expected {', '.join(CONFIGS)}")
        entry["key"] = key = _whole(CONFIGS[kernel].key, key)
        # an entry that stayed in the file has a date and versions of its own
        entry["made"] = made = {"date": record["date"], **record["versions"], **entry.get("made", {})}
        _require_keys(f"{where}: made", made, MADE, optional=tuple(MADE))
        if not key or (one := (kernel, key, *sorted(made.items()))) in seen:
            raise ValueError(f"{where}: expected each key once, with numbers for {', '.join(CONFIGS[kernel].key)}")
        if not entry["checked"]:
            raise ValueError(f"{where}: not checked against the reference: run `memstate tune` again")
        seen.add(one)
        _require_keys(where, entry["config"], dict.fromkeys((each.name for each in fields(CONFIGS[kernel])), int))
        try:
            CONFIGS[kernel](**entry["config"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return dict(record, format=FORMATS[-1])


def _whole(names: tuple[str, ...], key: str) -> str:
    """Returns a key with all its parts, or nothing if it is no such key. In files from before, LATER parts were 0."""
    for name in names:
        key += f",{name}=0" if name in LATER and f"{name}=" not in key else ""
    return key if re.fullmatch(",".join(rf"{name}=\d+" for name in names), key) else ""


def _require_keys(where: str, record: Any, expected: Mapping[str, type], optional: tuple[str, ...] = ()) -> None:
    """Raises: ValueError unless `record` is an object with the expected keys and no others, each of its type."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {record!r}, expected an object with {', '.join(expected)}")
    missing = expected.keys() - record.keys() - set(optional)
    if missing or record.keys() - expected.keys():
        have = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: has {have}; expected {', '.join(expected)} and no other")
    for name, value in record.items():
        kinds = (int, float) if expected[name] is float else (expected[name],)
        if type(value) not in kinds:
            raise ValueError(f"{where}: {name} {value!r}, expected {expected[name].__name__}")
