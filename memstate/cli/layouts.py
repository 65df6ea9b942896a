"""Reads the layout of a state from a JSON file: the arguments of `StateLayout`, `Plane` and `Part` by name."""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Part

# key of the JSON -> class of its values, at any depth
KINDS: dict[str, type] = {"planes": Plane, "parts": Part, "rows": StateLayout, "dtype": torch.dtype}


def read(path: Path) -> StateLayout:
    """Returns the layout in a JSON file. The keys are the arguments of `StateLayout`, `Plane` and `Part`.

        {"layers": 36, "planes": [{"name": "ssm", "shape": [32, 128, 128], "dtype": "float32"}]}

    Args:
        path: The JSON file.

    Raises:
        InvalidArgument: The file cannot be read or is no layout. The message names the file and the key.
    """
    try:
        layout: StateLayout = _made("layout", StateLayout, json.loads(path.read_bytes()))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidArgument(f"{str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    return layout


def _made(where: str, kind: type, parsed: Any) -> Any:
    """Converts parsed JSON to `kind`: an object to a dataclass, a list to a tuple of dataclasses, a name to a dtype."""
    if isinstance(parsed, list) and kind in (Plane, Part):
        return tuple(_made(f"{where}[{at}]", kind, each) for at, each in enumerate(parsed))
    if kind is torch.dtype:
        if isinstance(dtype := getattr(torch, str(parsed), None), torch.dtype):
            return dtype
        raise InvalidArgument(f"{where} is {shown(parsed)}: expected the name of a torch.dtype, such as float32")
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"{where} is {shown(parsed)}: expected an object with keys")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    wrong = [f"unknown key {shown(key)}" for key in parsed if key not in known]
    wrong += [f"{key} is missing" for key, needed in known.items() if needed and key not in parsed]
    if wrong:
        raise InvalidArgument(f"{where}: {wrong[0]}: expected {', '.join(known)}")
    values = {
        key: _made(f"{where}.{key}", KINDS[key], value) if key in KINDS and value is not None else value
        for key, value in parsed.items()
    }
    if not isinstance(switch := values.get("rewritten_each_step", True), bool):
        raise InvalidArgument(f"{where}.rewritten_each_step is {shown(switch)}: expected true or false")
    return kind(**values)
