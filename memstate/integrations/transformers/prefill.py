"""Reads the prompts of a `StateCache`, starting from cached states, with KV in the pages of the manager."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.left import end_rows
from memstate.integrations.transformers.prompts import checked
from memstate.integrations.transformers.watch import Call
from memstate.requests.handles import Request, Row


def texts_of(model: Any, prompt: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Returns the tokens of each entry of a batch, without pads.

    Args:
        model: the model.
        prompt: the tokens, `batch column`, padded at the left.
        mask: which ids of the prompt are tokens, `batch column`; None: all.

    Raises:
        InvalidArgument: the shapes do not fit, pads are at the right, or `checked` refuses the tokens of an entry.

    Syncs: yes.
    """
    if not isinstance(prompt, Tensor) or prompt.dim() != 2:
        raise InvalidArgument(f"prompt={type(prompt).__name__}: expected the ids of generate, `batch column`")
    known = torch.ones_like(prompt) if mask is None else mask
    if known.shape != prompt.shape or not bool(known[:, -1].all()) or bool((known[:, 1:] < known[:, :-1]).any()):
        raise InvalidArgument(
            f"prompt_mask {tuple(known.shape)} of a prompt {tuple(prompt.shape)}: expected the same shape, pads at the "
            "left, and a token at the end of each entry"
        )
    rows = zip(prompt.tolist(), known.tolist(), strict=True)
    texts = [[token for token, real in zip(*row, strict=True) if real] for row in rows]
    return [checked(model, text, f"entry {entry} of prompt=") for entry, text in enumerate(texts)]


def read_prompts(batches: Batches, texts: Sequence[list[int]]) -> tuple[list[Row], list[int]]:
    """Admits a row for each prompt, and reads each prompt except its last token.

    Args:
        batches: runs the forwards.
        texts: the prompts.

    Returns:
        The rows, and for each prompt the number of tokens that a cached state covered.

    Raises:
        OutOfSlots, OutOfRows, OutOfPages: back-pressure; nothing was admitted.
        Exception: a forward raised it; the rows have ended.

    Syncs: no.
    """
    mem = batches.mem
    _forget_pictures(batches.model)
    requests, rows = [Request(f"generate {entry}", tokens=text) for entry, text in enumerate(texts)], list[Row]()
    try:
        rows = list(mem.admit(requests))
        cached = [mem.info(row).length for row in rows]
        while groups := _chunks(batches, rows, texts):
            for tokens, _, *batch in groups:
                starts = [mem.info(rows[entry]).length for entry in batch]
                given = [texts[entry][start : start + tokens] for entry, start in zip(batch, starts, strict=True)]
                batches.run([rows[entry] for entry in batch], given, starts)
            if mem.prefix is not None:
                mem.publish(rows, keep="cache", tokens=texts)
        batches.states.drop()
        return rows, cached
    except BaseException:  # some rows may have ended when their forward failed
        end_rows(mem, rows)
        raise


def _forget_pictures(model: Any) -> None:
    """Clears shifts of positions that a model keeps for pictures of its last batch: a new prompt must not get them."""
    for part in model.modules():
        if getattr(part, "rope_deltas", None) is not None:  # the name in all models of Transformers
            part.rope_deltas = None


def _chunks(batches: Batches, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns the next forwards: (tokens per row, 1 if no row has a state yet else 0, entries of its rows)."""
    groups = dict[tuple[int, int], list[int]]()
    for entry, (row, text) in enumerate(zip(rows, texts, strict=True)):
        length = batches.mem.info(row).length
        left = len(text) - 1 - length
        if left > 0:
            tokens = batches.mem.chunk(row, left) if batches.layout.continues or not length else 1
            groups.setdefault((tokens, int(not length)), []).append(entry)
    return [(*key, *batch) for key, batch in groups.items()]


def repeats(call: Call, rows: int, last: Sequence[int], drafts: int) -> int:
    """Returns how many times each row is in the first forward after a prompt: with beams or samples more than once.

    Args:
        call: the forward.
        rows: number of rows of the cache.
        last: the last token of each prompt, which the forward must read.
        drafts: number of guesses after the last token.

    Raises:
        InvalidArgument: the forward reads other tokens.

    Syncs: yes.
    """
    times, rest = divmod(call.batch, rows)
    fits = times and not rest and call.columns == 1 + drafts
    ids = call.ids[:, 0].tolist() if fits and call.ids is not None else None
    if ids != [token for token in last for _ in range(times)]:
        raise InvalidArgument(
            f"a forward of {call.batch} x {call.columns} tokens behind a prompt of {rows} rows: give generate the ids "
            "that prompt= had"
        )
    return times


def require_mask(call: Call, read: Sequence[int], columns: int, attends: bool) -> None:
    """Raises an error unless the first forward after a prompt has the same mask for the prompt as `prompt_mask`.

    Args:
        call: the forward.
        read: number of tokens that were read of each prompt.
        columns: number of columns that were read of the prompt.
        attends: whether layers attend to earlier columns; then a missing mask shows all of them.

    Raises:
        InvalidArgument: the mask shows more or fewer tokens than were read.

    Syncs: yes.
    """
    mask = call.mask
    if not call.readable or (mask is None and not attends):
        return
    if mask is not None and mask.shape[1] != columns + call.columns:
        return
    shown = [columns] * len(read) if mask is None else mask[:, :columns].ne(0).sum(1).tolist()
    known = [number for number in read for _ in range(len(shown) // len(read))]
    for entry, (real, expected) in enumerate(zip(shown, known, strict=True)):
        if real != expected:
            raise InvalidArgument(
                f"entry {entry}: prompt= has read {expected} tokens, and the attention_mask of generate shows {real} "
                "before the last column: give StateCache(prompt_mask=) and generate(attention_mask=) the same mask"
            )
