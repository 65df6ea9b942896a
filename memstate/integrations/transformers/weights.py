"""Tells models with equal layouts apart by what they compute with, which is in memory: no path or date says it.

All weights are read once, on the device where they are, in integers: every device and every process finds the same.
"""

import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from secrets import token_hex
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memstate.logs import event, logger

LOG: Final = logger("transformers")
KNOWN: Final[WeakKeyDictionary[Any, tuple[Any, str]]] = WeakKeyDictionary()  # by model: its stamp, its name
NOT_COMPUTED_WITH: Final = ("_name_or_path", "transformers_version")  # entries of a configuration
CHUNK: Final = 2**18  # words of 8 bytes that are summed at a time
ODD: Final = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits: its multiples are spread evenly


def weights_of(model: Any) -> str:
    """Returns a name for the weights of a model, its configuration and its active adapters: 32 hexadecimal digits.

    Models of equal content have the same name, whatever process, device or path they come from. It is computed anew
    when a tensor was replaced or changed by an operation on it. Weights that cannot be read, such as tensors without
    memory, have a name that no other model gets, and the log says so.

    Args:
        model: a model of Transformers.

    Syncs: yes, the first time.
    """
    stamp = _stamp(model)
    if KNOWN.get(model, (None, ""))[0] != stamp:
        KNOWN[model] = stamp, _name(model)
    return KNOWN[model][1]


def _stamp(model: Any) -> Any:
    """Differs when a tensor was replaced or changed. Reads no weight."""
    leaves = chain.from_iterable(map(_leaves, chain(model.parameters(), model.buffers())))
    return [(id(one), one.data_ptr(), 0 if one.is_inference() else one._version) for one in leaves], _adapters(model)


def _adapters(model: Any) -> list[tuple[int, str]]:
    """Which adapters of PEFT are active in which module."""
    return [
        (number, f"{part.active_adapters} {getattr(part, 'disable_adapters', False)}")
        for number, part in enumerate(model.modules())
        if isinstance(getattr(part, "active_adapters", None), list)
    ]


@torch.no_grad()
def _name(model: Any) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_COMPUTED_WITH}
    found = blake2b(json.dumps([config, _adapters(model)], sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in model.state_dict(keep_vars=True).items():
        try:
            for leaf in _leaves(tensor) if isinstance(tensor, Tensor) else ():
                found.update(repr((str(leaf.dtype), tuple(leaf.shape), _sums(leaf))).encode())
        except (NotImplementedError, RuntimeError) as error:
            event(
                LOG, logging.WARNING, "weights unreadable", model=type(model).__name__, tensor=name, error=str(error),
                effect="no other model or process uses the states of this model",
            )  # fmt: skip
            return token_hex(16)
    return found.hexdigest()


def _leaves(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: quantised and sharded ones are made of several."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor, name))


def _sums(tensor: Tensor) -> list[int]:
    """A sum for each chunk of a tensor, in 64 bits: a change of one word always changes it."""
    if tensor.is_meta:
        raise NotImplementedError("a tensor on the meta device has no content")
    found, data = [], tensor.detach().reshape(-1).view(torch.uint8)
    places = torch.arange(min(-(-len(data) // 8), CHUNK), device=tensor.device) * ODD
    places = (places ^ places >> 29) * ODD | 1
    for part in data.split(8 * CHUNK):
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        mixed = words * places[: len(words)]
        mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)  # the highest bits of words, such as signs, reach low ones
        mixed *= places[: len(words)]
        found.append(mixed.sum())
    sums: list[int] = torch.stack(found).tolist()
    return sums
