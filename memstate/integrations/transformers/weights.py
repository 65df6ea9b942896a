"""Names the weights of a model by their content, so that models with equal layouts but other weights differ.

Reads all weights once, on their device, as integers. So every device and every process computes the same name.
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
KNOWN: Final[WeakKeyDictionary[Any, tuple[Any, str]]] = WeakKeyDictionary()  # model -> (value of `_stamp`, name)
NOT_COMPUTED_WITH: Final = ("_name_or_path", "transformers_version")  # entries of a configuration that change no result
CHUNK: Final = 2**18  # number of 8-byte words that are summed at a time
ODD: Final = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits: its multiples are spread evenly


def weights_of(model: Any) -> str:
    """Returns a name for the weights of a model, its configuration and its active adapters: 32 hexadecimal digits.

    Models of equal content have the same name in every process, on every device and from every path. The name is
    computed again if a tensor was replaced or changed by an operation. If weights cannot be read, such as tensors
    without memory, the model gets a name that no other model has, and the log says so.

    Args:
        model: a model of Transformers.

    Syncs: yes, if the name is computed.
    """
    stamp = _stamp(model)
    if KNOWN.get(model, (None, ""))[0] != stamp:
        KNOWN[model] = stamp, _name(model)
    return KNOWN[model][1]


def _stamp(model: Any) -> Any:
    """Returns a value that changes when a tensor is replaced or changed. Reads no weight."""
    leaves = chain.from_iterable(map(_leaves, chain(model.parameters(), model.buffers())))
    return [(id(one), one.data_ptr(), 0 if one.is_inference() else one._version) for one in leaves], _adapters(model)


def _adapters(model: Any) -> list[tuple[int, str]]:
    """Returns (number of the module, its active PEFT adapters) for each module with adapters."""
    return [
        (number, f"{part.active_adapters} {getattr(part, 'disable_adapters', False)}")
        for number, part in enumerate(model.modules())
        if isinstance(getattr(part, "active_adapters", None), list)
    ]


@torch.no_grad()
def _name(model: Any) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_COMPUTED_WITH}
    digest = blake2b(json.dumps([config, _adapters(model)], sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in model.state_dict(keep_vars=True).items():
        try:
            for leaf in _leaves(tensor) if isinstance(tensor, Tensor) else ():
                digest.update(repr((str(leaf.dtype), tuple(leaf.shape), _sums(leaf))).encode())
        except (NotImplementedError, RuntimeError) as error:
            event(
                LOG, logging.WARNING, "weights unreadable", model=type(model).__name__, tensor=name, error=str(error),
                effect="no other model or process uses the states of this model",
            )  # fmt: skip
            return token_hex(16)
    return digest.hexdigest()


def _leaves(tensor: Any) -> Iterator[Tensor]:
    """Yields the plain tensors of which a tensor consists: several for a quantised or sharded tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor, name))


def _sums(tensor: Tensor) -> list[int]:
    """Returns a 64-bit sum for each chunk of a tensor. A change of a single word always changes a sum."""
    if tensor.is_meta:
        raise NotImplementedError("a tensor on the meta device has no content")
    totals, data = [], tensor.detach().reshape(-1).view(torch.uint8)
    places = torch.arange(min(-(-len(data) // 8), CHUNK), device=tensor.device) * ODD
    places = (places ^ places >> 29) * ODD | 1
    for part in data.split(8 * CHUNK):
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        mixed = words * places[: len(words)]
        # so that the highest bits of words, such as signs, also change low bits
        mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
        mixed *= places[: len(words)]
        totals.append(mixed.sum())
    sums: list[int] = torch.stack(totals).tolist()
    return sums
