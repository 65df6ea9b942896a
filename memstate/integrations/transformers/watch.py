"""Tells a cache when the forward of its model begins and ends: a cache of Transformers is not told."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

BY_COLUMN: Final = ("input_ids", "position_ids")  # of what a forward is given, `... column` of its tokens alone
TEXT: Final = {  # tensors that say nothing about tokens but what they are and where
    *BY_COLUMN, "inputs_embeds", "attention_mask", "cache_position", "labels", "logits_to_keep", "token_type_ids",
    "mm_token_type_ids",
}  # fmt: skip


class Call(NamedTuple):
    """What a forward reads.

    Attributes:
        ids: the tokens, `batch column`; None where embeddings are given.
        batch: entries of the batch.
        columns: tokens and pads of each entry.
        mask: which columns are tokens, those of earlier forwards too, `batch column`; None: all.
        readable: whether this is so. False for a mask of another shape, which may say anything.
        positions: of the tokens, `... batch column`; None: not given.
        plain: whether it is given nothing beside tokens, such as pictures.
    """

    ids: Tensor | None
    batch: int
    columns: int
    mask: Tensor | None
    readable: bool = True
    positions: Tensor | None = None
    plain: bool = True


def watch(model: Any, cache: Any) -> Callable[[], None]:
    """Calls a cache before and after every forward of a model that is given this cache. Does not keep it alive.

    Args:
        model: the model.
        cache: the cache: `begin(call)` is called before a forward, and returns what else the forward is given;
            `end(failed)` is called after it, but not behind an interrupt. First `known(ids)` says how many of its
            columns the cache has read; the forward is not given these. The cache may be given under any name, also an
            old one that the forward renames.

    Returns:
        A function that ends this. A second call does nothing.
    """
    signature = inspect.signature(model.forward)
    watched = weakref.ref(cache)

    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The cache, if the forward is given it, otherwise None; and all that the forward is given."""
        mine = watched()
        is_given = any(one is mine for one in (*args, *kwargs.values()))
        return mine if is_given else None, signature.bind_partial(*args, **kwargs).arguments

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mine, given = inputs(args, kwargs)
        if mine is None:
            return None
        if known := mine.known(given.get("input_ids")):
            # a mask of attention has the columns before, too
            names = (*BY_COLUMN, "attention_mask") if all(mine.is_linear) else BY_COLUMN
            new = {name: given[name][..., known:] for name in names if given.get(name) is not None}
            shorter = {id(given[name]): one for name, one in new.items()}
            args = tuple(shorter.get(id(one), one) for one in args)
            kwargs = {name: shorter.get(id(one), one) for name, one in kwargs.items()}
            given |= {name: new[name] for name in BY_COLUMN if name in new}
        return args, kwargs | mine.begin(_call(given))

    def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        mine, _ = inputs(args, kwargs)
        if mine is not None:
            mine.end(output is None)

    outside: Callable[[Any], Any] = torch.compiler.disable  # Dynamo calls the hooks too, and must not trace the manager
    hooks = (
        model.register_forward_pre_hook(outside(before), with_kwargs=True),
        model.register_forward_hook(outside(after), with_kwargs=True, always_call=True),
    )

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop


def _call(given: dict[str, Any]) -> Call:
    ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
    shown = ids if ids is not None else given["inputs_embeds"]
    batch, columns = shown.shape[:2]
    readable = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    unnamed = [value for name, value in given.items() if isinstance(value, dict) and name not in TEXT]  # **kwargs
    more = [item for one in (given, *unnamed) for item in one.items()]
    plain = not any(isinstance(value, Tensor) and name not in TEXT for name, value in more)
    return Call(ids, batch, columns, mask if readable else None, readable, positions, plain)
