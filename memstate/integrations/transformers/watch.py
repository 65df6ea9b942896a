"""Tells a cache when a forward of its model begins and ends, because Transformers does not tell it."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

# arguments of a forward that have one column for each new token, `... column`
BY_COLUMN: Final = ("input_ids", "position_ids")
TEXT: Final = {  # arguments with tensors that are only tokens, positions or masks
    *BY_COLUMN, "inputs_embeds", "attention_mask", "cache_position", "labels", "logits_to_keep", "token_type_ids",
    "mm_token_type_ids",
}  # fmt: skip


class Call(NamedTuple):
    """The inputs of a forward.

    Attributes:
        ids: the tokens, `batch column`; None if embeddings are given.
        batch: number of entries of the batch.
        columns: number of tokens and pads of each entry.
        mask: which columns are tokens, including those of earlier forwards, `batch column`; None: all are.
        readable: whether `mask` has this meaning. False if the caller gave a mask of another shape.
        positions: positions of the tokens, `... batch column`; None: not given.
        plain: whether the forward gets only tokens, and nothing else such as pictures.
    """

    ids: Tensor | None
    batch: int
    columns: int
    mask: Tensor | None
    readable: bool = True
    positions: Tensor | None = None
    plain: bool = True


def watch(model: Any, cache: Any) -> Callable[[], None]:
    """Calls a cache before and after every forward of a model that gets this cache. Holds only a weak reference to it.

    Args:
        model: the model.
        cache: the cache. First, `known(ids)` returns how many of the forward's columns the cache has read already;
            these are removed. Then `begin(call)` returns more arguments for the forward. After the forward,
            `end(failed)` is called, but not after an interrupt. The argument with the cache may have any name.

    Returns:
        A function that stops the calls. A second call does nothing.
    """
    signature = inspect.signature(model.forward)
    watched = weakref.ref(cache)

    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns (the cache if the forward gets it, else None; all arguments of the forward by name)."""
        mine = watched()
        is_given = any(one is mine for one in (*args, *kwargs.values()))
        return mine if is_given else None, signature.bind_partial(*args, **kwargs).arguments

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mine, given = inputs(args, kwargs)
        if mine is None:
            return None
        if known := mine.known(given.get("input_ids")):
            # a mask for attention has the earlier columns as well, and keeps them
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

    # Dynamo calls the hooks as well; it must not trace the manager
    outside: Callable[[Any], Any] = torch.compiler.disable
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
    unnamed = [value for name, value in given.items() if isinstance(value, dict) and name not in TEXT]  # the **kwargs
    more = [item for one in (given, *unnamed) for item in one.items()]
    plain = not any(isinstance(value, Tensor) and name not in TEXT for name, value in more)
    return Call(ids, batch, columns, mask if readable else None, readable, positions, plain)
