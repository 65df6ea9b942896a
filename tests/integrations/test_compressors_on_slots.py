"""Tests DeepSeek-V4 on slots: slots have the last closed windows of compressors, planes of rows the open windows.

KV belongs to the engine, whose part the test plays: keys and values of attention's windows, and the entries of
compressors' closed windows.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.tiny_models import tiny

pytest.importorskip("transformers")

from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

GRID, END, KEPT = 12, 44, 24  # windows of 4 and of 6 tokens close together every 12 tokens
Entry = tuple[Tensor, dict[str, Tensor]]  # KV of a layer: (window of attention, name -> entries)


@dataclass
class Place:
    """The row, slots and length of a request in the current forward."""

    mem: ms.StateManager
    row: int = 0
    read: int = 0
    write: int = 0
    length: int = 0


class OnSlots:
    """A layer of a cache whose windows are in the row and the slots of a `Place`."""

    _layer_type = None  # with a name, Transformers would use this class in every cache
    names: ClassVar[dict[str, str]] = {"compressor": "hca"}

    def at(self, place: Place, number: int) -> Any:
        self.place, self.number = place, number
        return self

    def two(self, planes: Any, name: str) -> list[Tensor]:
        return [planes[f"{self.names[name]}_{what}"][self.number] for what in ("kv", "gate")]

    def store_compression_weights(self: Any, name: str, kv: Tensor, gate: Tensor) -> Any:
        held = self.place.length - self.entry_count[name] * self.compress_rate
        windows = [plane[self.place.row] for plane in self.two(self.place.mem.planes.rows, name)]
        self.buffer_kv[name], self.buffer_gate[name] = (window[None, :held] for window in windows)
        closed = super().store_compression_weights(name, kv, gate)
        for window, left in zip(windows, (self.buffer_kv.pop(name), self.buffer_gate.pop(name)), strict=True):
            window[: left.shape[1]] = left[0]
        return closed

    def update_overlap_state(self: Any, name: str, kv: Tensor, gate: Tensor, size: int) -> Any:
        planes = self.two(self.place.mem.planes, name)
        self.overlap_kv[name], self.overlap_gate[name] = (plane[self.place.read][None].clone() for plane in planes)
        before = super().update_overlap_state(name, kv, gate, size)
        for plane, last in zip(planes, (self.overlap_kv.pop(name), self.overlap_gate.pop(name)), strict=True):
            plane[self.place.write] = last[0]
        return before


class Heavy(OnSlots, DeepseekV4HCACache):
    pass


class Sparse(OnSlots, DeepseekV4CSACache):
    names: ClassVar[dict[str, str]] = {"compressor": "csa", "indexer": "index"}


class Served:
    """A request: its place, and a cache with KV only."""

    def __init__(self, model: Any, mem: ms.StateManager, words: list[int], kv: list[Entry] | None = None) -> None:
        self.model, self.words, self.place, config = model, words, Place(mem), model.config
        made = {"heavily_compressed_attention": Heavy, "compressed_sparse_attention": Sparse}
        kinds = config.layer_types
        self.cache = Cache(layers=[
            made[kind](config).at(self.place, kinds[:at].count(kind))
            if kind in made
            else DynamicSlidingWindowLayer(config.sliding_window)
            for at, kind in enumerate(kinds)
        ])  # fmt: skip
        self.logits, self.kv = dict[int, Tensor](), dict[int, list[Entry]]()
        for layer, (keys, entries) in zip(self.cache.layers, kv or (), strict=bool(kv)):
            layer.lazy_initialization(keys, keys)
            layer.keys = layer.values = keys
            layer.cumulative_length = self.place.length = KEPT
            if entries:
                layer.compressed_kv = dict(entries)
                layer.entry_count = dict.fromkeys(entries, KEPT // layer.compress_rate)

    def forward(self, tokens: int, row: int, read: int, write: int) -> None:
        self.place.row, self.place.read, self.place.write = row, read, write
        self.logits |= said(self.model, self.cache, self.words, self.place.length, tokens)
        self.place.length += tokens
        self.kv[self.place.length] = [(at.keys, dict(getattr(at, "compressed_kv", {}))) for at in self.cache.layers]


@torch.no_grad()
def said(model: Any, cache: Cache, words: list[int], start: int, tokens: int) -> dict[int, Tensor]:
    """Runs `tokens` tokens of `words` from `start` on. If these are the last words, appends the likeliest next token.

    Returns a dict with one entry: the length after these tokens, and the last logits.
    """
    ids = torch.tensor([words[start : start + tokens]], device=model.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
    if len(words) == start + tokens:
        words.append(int(logits.argmax()))
    return {start + tokens: logits.cpu()}


def decode(mem: ms.StateManager, rows: list[ms.Row], served: list[Served], until: int) -> None:
    """Reads all known tokens of each request in one forward, then one token per forward, until a length is reached."""
    while served[0].place.length < until:
        tokens = [max(1, len(one.words) - one.place.length) for one in served]
        step = mem.plan(rows, tokens)
        columns = (column.tolist() for column in (step.rows, step.read, step.write))
        for one, *place in zip(served, tokens, *columns, strict=True):
            one.forward(*place)
        mem.settle(step)


def test_a_model_with_compressors_says_on_slots_what_it_says_on_its_own(backend: Backend) -> None:
    """Of two requests, one ends. A third request goes on from the ended request's snapshot of 24 tokens."""
    model = copy.deepcopy(tiny("deepseek_v4")).to(backend.device)
    prompts, own = [[3, 1, 4, 15, 9], [26, 5, 35, 8, 9, 79, 32, 3, 84]], list[tuple[list[int], dict[int, Tensor]]]()
    for prompt in prompts:
        words, cache = prompt.copy(), DynamicCache(config=model.config)
        logits = said(model, cache, words, 0, len(prompt))
        for at in range(len(prompt), END):
            logits |= said(model, cache, words, at, 1)
        own.append((words, logits))
    assert min(len({*words}) for words, _ in own) > 20 and own[0][0][9:] != own[1][0][9:]

    layout = ms.presets.from_config({**model.config.to_dict(), "dtype": "float32"})
    mem = on(backend, layout, slots=8, max_requests=3, tracking=ms.Redirect(every=GRID))
    for planes in (mem.planes, mem.planes.rows):
        for plane in planes.values():
            plane.fill_(torch.nan)
    mem.device.scrub_null()

    a, b = (Served(model, mem, prompt.copy()) for prompt in prompts)
    rows = list(mem.admit([ms.Request("a"), ms.Request("b")]))
    decode(mem, rows, [a, b], 31)
    (kept,) = mem.end(rows[:1], keep="handle", lengths=[30])
    assert kept is not None and kept.length == KEPT  # at 30, windows of 4 tokens are open
    decode(mem, rows[1:], [b], END)
    c = Served(model, mem, a.words[: KEPT + 6], a.kv[KEPT])  # the first step of c closes windows
    decode(mem, list(mem.admit([ms.Request("c", resume=kept)])), [c], END)

    for one, (words, logits) in ((a, own[0]), (b, own[1]), (c, own[0])):
        assert one.words == words[: len(one.words)]
        torch.testing.assert_close(one.logits, {at: logits[at] for at in one.logits}, rtol=1e-4, atol=1e-4)
    assert len(c.words) == len(b.words) == END + 1
    mem.audit().raise_if_leaking()


def test_states_between_the_ends_of_windows_are_refused(backend: Backend) -> None:
    layout = ms.presets.from_config(tiny("deepseek_v4").config)
    with pytest.raises(ms.ConfigurationError, match="every=6 is no multiple of 12"):
        on(backend, layout, slots=4, max_requests=2, tracking=ms.Redirect(every=6))
