"""Reads files of launch configurations, and says which entries are stale. Needs no Triton, except for that.

`memstate tune` measures, and writes one file per device, with the name of the device (`nvidia-h200.json`). Files are
read from two folders:

    $MEMSTATE_TUNED   the user's files; without it memstate/tuned in $XDG_CONFIG_HOME, or else in ~/.config
    tuned/            beside this module: the shipped files

The user's entries win over shipped entries with the same key. A file that was not timed changes nothing.

An entry with `rows` holds from so many rows on, in place of the entry of its key without; its value is that of so many
rows. Results of a row do not depend on its batch, so the two may differ only in axes that change no bits.

An entry says with which release of Triton, on which architecture and from which source of the kernel it was measured.
What an entry does not say is not compared: files of format 1 say versions only.

It is an error if the file of a device cannot be read, or says that it is for another device. But if MEMSTATE_TUNED
is not set, a user's file that cannot be opened is skipped, because this process may not be allowed to read the home
folder. Files are read once in a process.
"""

import ast
import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from sysconfig import get_path
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any

from memstate.kernels import configs
from memstate.kernels.configs import CONFIGS, Config

FORMATS = (1, 2)  # versions of the format of the files; format 1 has no `made`
SHIPPED = Path(__file__).with_name("tuned")
LATER = ("key_fastest", "fp16")  # parts that older keys do not have
FILE_KEYS = {
    "format": int, "device": str, "date": str, "versions": dict, "timed": bool, "yardstick": dict, "entries": list,
}  # fmt: skip
ENTRY_KEYS = {
    "kernel": str, "key": str, "config": dict, "value": float, "unit": str, "checked": bool, "made": dict, "rows": int,
}  # fmt: skip
INSTALLED = tuple(os.path.realpath(get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))
MADE = dict.fromkeys(("date", "torch", "triton", "architecture", "source"), str)  # what an entry says of its making

Entry = tuple[dict[int, Config], Mapping[str, str], Path]  # rows -> configuration from there on; `MADE`; its file
Table = dict[tuple[str, str], list[Entry]]  # (kernel, key) -> entries, the one to prefer first


@cache
def entries_of(device: str) -> Table:
    """Returns the entries of the files of a device, the user's before shipped ones."""
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
        try:
            config = CONFIGS[entry["kernel"]](**entry["config"])
        except (KeyError, TypeError, ValueError):  # a kernel that is not registered here, or has changed
            continue
        entries, rows, made = table.setdefault((entry["kernel"], entry["key"]), []), entry.get("rows", 1), entry["made"]
        if rows == 1:
            entries.append(({1: config}, made, path))
        else:
            next(configs for configs, with_, _ in entries if with_ == made)[rows] = config
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
    seen: dict[tuple[Any, ...], dict[int, Config]] = {}
    for number, entry in enumerate(record["entries"]):
        _require_keys(f"{path}: entry {number}", entry, ENTRY_KEYS, optional=("made", "rows"))
        kernel, key = entry["kernel"], entry["key"]
        where = f"{path}: {kernel}, {key}"
        # an entry that stayed in the file has a date and versions of its own
        entry["made"] = made = {"date": record["date"], **record["versions"], **entry.get("made", {})}
        _require_keys(f"{where}: made", made, MADE, optional=tuple(MADE))
        if not entry["checked"]:
            raise ValueError(f"{where}: not checked against the reference: run `memstate tune` again")
        if (kind := CONFIGS.get(kernel)) is None:
            continue
        if (rows := entry.get("rows", 1)) < 1 or (rows > 1 and not kind.by_rows):
            raise ValueError(f"{where}: rows {rows}, expected 1{' or more' * kind.by_rows}")
        if kind.functions:  # memstate does not know its keys and axes
            continue
        entry["key"] = key = _whole(kind.key, key)
        alike = seen.setdefault((kernel, key, *sorted(made.items())), {})
        if not key or rows in alike:
            raise ValueError(f"{where}: expected each key once, with numbers for {', '.join(kind.key)}")
        _require_keys(where, entry["config"], dict.fromkeys((each.name for each in fields(kind)), int))
        try:
            alike[rows] = config = kind(**entry["config"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if rows > 1 and (1 not in alike or alike[1].order != config.order):
            order = ", ".join(config.order)
            raise ValueError(f"{where}: rows {rows}: expected an entry without rows before it, with the same {order}")
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


def why_stale(kind: type[Config], made: Mapping[str, str], architecture: str) -> str:
    """Returns why an entry is not valid in this process; "" if it is. Needs Triton.

    Args:
        kind: class of the kernel's configurations.
        made: with what the entry was measured.
        architecture: the architecture of the launches; "" if it is not known.
    """
    here = str(import_module("triton").__version__)
    if made.get("triton", here).split(".")[:2] != here.split(".")[:2]:
        return f"measured with Triton {made['triton']}, this is {here}: run `memstate tune` again"
    if architecture and made.get("architecture", architecture) != architecture:
        return f"measured on {made['architecture']}, this is {architecture}"
    if "source" in made and made["source"] != source_of(kind):
        return f"the kernel {kind.kernel} has changed since: run `memstate tune` again"
    return ""


def source_of(kind: type[Config]) -> str:
    """Returns a hash of a kernel and of what chooses its shapes, with all that they use. Needs Triton."""
    return digest(*kind.functions) if kind.functions else _source_of(kind)  # type: ignore[arg-type]  # classes are hashable


@cache
def _source_of(kind: type[Config]) -> str:
    module = vars(import_module(f"memstate.kernels.{kind.kernel}")).values()
    parts = [each for each in module if hasattr(each, "fn") or getattr(each, "__module__", "") == configs.__name__]
    return digest(*parts, getattr(kind, "blocks", None))


def digest(*functions: Any) -> str:
    """Returns a hash of functions, and of the functions and constants that they use.

    Comments and docstrings do not count, nor what other installed packages do: their versions say that.
    """
    todo, seen, parts = list(functions), set[object](), set[str]()
    own = {each.__module__.partition(".")[0] for each in map(_bare, todo) if isinstance(each, FunctionType)}
    for each in todo:  # it grows
        function = _bare(each)
        if not isinstance(function, FunctionType) or function in seen:
            continue
        place = os.path.realpath(function.__code__.co_filename)
        if function.__module__.partition(".")[0] not in own and place.startswith(INSTALLED):
            continue
        seen.add(function)
        parts.add(_text(function))
        names = _names(function.__code__)
        values: dict[Any, Any] = {name: function.__globals__.get(name) for name in names}
        values |= inspect.getclosurevars(function).nonlocals
        values |= function.__kwdefaults__ or {}
        values |= dict(enumerate(function.__defaults__ or ()))
        values |= dict(enumerate(each.args)) | each.keywords if isinstance(each, partial) else {}
        for name, value in values.items():
            todo += [getattr(value, part, None) for part in names] if isinstance(value, ModuleType) else [value]
            todo += _within(value)
            if (constant := _constant(value)) is not None:
                parts.add(f"{name} = {constant}")
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]


def _bare(function: Any) -> Any:
    """Returns the function that `@triton.jit`, `@triton.heuristics`, `partial`, `@cache` or a method wraps."""
    while not isinstance(function, FunctionType | type):
        inner = [getattr(function, name, None) for name in ("fn", "func", "__wrapped__", "__func__")]
        if (wrapped := next(filter(callable, inner), None)) is None:
            return function
        function = wrapped
    return function if isinstance(function, type) else inspect.unwrap(function)


def _within(value: Any) -> list[Any]:
    """Returns what a container holds."""
    held = value.values() if isinstance(value, dict) else value
    return list(held) if isinstance(value, dict | list | tuple | set | frozenset) else []


def _constant(value: Any) -> str | None:
    """Returns a constant as text, the same in each process; None for other values, such as functions."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        held = [_constant(each) for each in (value.items() if isinstance(value, dict) else value)]
        return repr(sorted(map(str, held)) if isinstance(value, set | frozenset) else held)
    if type(value).__name__ == "constexpr":
        return _constant(value.value)
    plain = isinstance(value, int | float | str | bytes | complex) or type(value).__name__ == "dtype"
    return repr(value) if plain else None


def _names(code: Any) -> list[str]:
    """Returns the names that code looks up, also inside of lambdas and generators."""
    inside = [name for each in code.co_consts if hasattr(each, "co_code") for name in _names(each)]
    return [*code.co_names, *inside]


def _coded(code: Any) -> tuple[Any, ...]:
    """Returns what code does, with the code inside of it."""
    inside = [_coded(each) if hasattr(each, "co_code") else _constant(each) for each in code.co_consts]
    return code.co_code, code.co_names, inside


def _text(function: FunctionType) -> str:
    try:
        made: Any = ast.parse(dedent(inspect.getsource(function))).body[0]
        made.body = made.body[ast.get_docstring(made) is not None :]
        return ast.unparse(made)
    except (OSError, SyntaxError, TypeError, AttributeError):  # no file, or a lambda inside of a longer line
        code = function.__code__
        return repr(_coded(code))
