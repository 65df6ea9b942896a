"""Makes settings of the plain data that a JSON file has. Names the key that is wrong."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch

from memstate.checks import shown
from memstate.errors import InvalidArgument


def build(where: str, kind: type, found: Any, kinds: Mapping[str, type]) -> Any:
    """Returns an object of a dataclass whose fields are the keys of a JSON object, or a dtype by its name.

    Args:
        where: names the place in the file.
        kind: the dataclass, or `torch.dtype`.
        found: what stands there. A list makes a tuple of such objects.
        kinds: key -> what is made of its value, wherever it stands. Other values stay as they are.

    Raises:
        InvalidArgument: a key is missing or unknown, or a value is of another kind.
    """
    if isinstance(found, list):
        return tuple(build(f"{where}[{at}]", kind, each, kinds) for at, each in enumerate(found))
    if kind is torch.dtype:
        if isinstance(dtype := getattr(torch, str(found), None), torch.dtype):
            return dtype
        raise InvalidArgument(f"{where} is {shown(found)}: expected the name of a torch.dtype, such as float32")
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where} is {shown(found)}: expected an object with keys")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if wrong := [key for key in found if key not in known]:
        raise InvalidArgument(f"{where}: unknown key {shown(wrong[0])}: expected {', '.join(known)}")
    if missing := [key for key, needed in known.items() if needed and key not in found]:
        raise InvalidArgument(f"{where}: {missing[0]} is missing")
    return kind(
        **{
            key: build(f"{where}.{key}", kinds[key], value, kinds) if key in kinds and value is not None else value
            for key, value in found.items()
        }
    )
