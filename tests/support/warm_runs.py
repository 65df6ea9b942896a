"""Records the launches of every call, of managers with many settings, without running a kernel.

No kernel runs, so device memory holds rubbish, while the host's mirror is right. Prints JSON: for each manager, the
keys of its warm-up, and those of its run.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import memstate as ms
from memstate.integrations.handover import HandOver
from memstate.kernels import dispatch
from memstate.prefix.policies import Lru, LruPages
from memstate.tiers import FileStore, Prefetch
from tests.support.build import build

PAGE, EVERY, LENGTH = 2, 4, 8
CONV = ms.Plane("conv", (3, 5), torch.bfloat16)  # 30 bytes, so a layer may begin at any even address
SSM = ms.Plane("ssm", (2, 4, 8), torch.float32)
RING = ms.Plane("ring", (6,), torch.float16, rewritten_each_step=False)
KV = ms.StateLayout([ms.Plane("k", (PAGE, 3), torch.bfloat16), ms.Plane("v", (PAGE, 4), torch.float32)], layers=2)


@dataclass
class Kind:
    """The settings of a manager.

    Attributes:
        planes: The planes of its layout.
        tracking: Its strategy.
        tiers: Settings of its tiers; None for no tiers.
        kv: Whether it has KV pages. If it has, its tiers save them too.
        apart: Whether its planes lie in tensors of an engine, one per layer.
        settings: All other settings.
    """

    planes: tuple[ms.Plane, ...] = (CONV, SSM)
    tracking: ms.Tracking = field(default_factory=lambda: ms.Redirect(EVERY))
    tiers: dict[str, Any] | None = None
    kv: bool = True
    apart: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> ms.StateLayout:
        rings = ms.StateLayout([ms.Plane("conv_x", (8, 5), torch.bfloat16, fill=None)], layers=3)
        return ms.StateLayout(self.planes, layers=3, rows=rings if "tail" in self.settings else None)

    def build(self, folder: str) -> ms.StateManager:
        count, given = 120, dict[str, Any]()
        if self.tiers is not None:
            kv = ms.Planes(KV, count, ms.Backend("interpreter")) if self.kv else None
            below = {"host_slots": 40, "host_pages": 200 if self.kv else None, "kv": kv}
            stored = {"store": FileStore(folder), "prefetch": Prefetch(threshold=1, stop="wait_complete")}
            given["tiers"] = ms.Tiers("toy", **(below | stored | self.tiers))
        if self.apart:
            shapes = {plane.name: (41, *plane.shape) for plane in self.planes}
            given["tensors"] = {
                plane.name: [torch.zeros(shapes[plane.name], dtype=plane.dtype) for _ in range(3)]
                for plane in self.planes
            }
        return build(
            self.layout, slots=40, max_requests=7, max_batch=7, pages=count if self.kv else 0, page_size=PAGE,
            pages_per_row=20 if self.kv else 0, tracking=self.tracking, backend="interpreter",
            prefix=ms.Prefix(Lru(), LruPages()) if self.tiers is not None else None, **(given | self.settings),
        )  # fmt: skip


KINDS = {
    "int8, write-through": Kind(tiers={"int8": {"ssm": 2}}, settings={"overlap": True}),
    "int8 alone, KV elsewhere": Kind((SSM,), ms.PingPong(EVERY), {"int8": {"ssm": 1}, "write": "back"}, kv=False),
    "selective": Kind(tracking=ms.LazyPingPong(EVERY), tiers={"write": "selective"}),
    "a plane written in part": Kind((CONV, RING), ms.LazyPingPong(EVERY), {"write": "back", "ahead": 30}),
    "one slot a step": Kind(tiers={}, settings={"in_place": True}),
    "a tensor for each layer": Kind(tiers={"staging": 1}, apart=True),
    "drafts": Kind(tiers={}, settings={"tail": 3}),
    "drafts, a tensor for each layer": Kind(
        (CONV, RING), ms.PingPong(EVERY), apart=True, settings={"tail": 3, "overlap": False}
    ),
    "no tracking": Kind(tracking=ms.NoTracking(EVERY)),
}


def prompt(i: int, pages: int = LENGTH // PAGE) -> list[int]:
    return [100 * i + at for at in range(PAGE * pages)]


def tokens_of(mem: ms.StateManager, *prompts: list[int]) -> dict[str, Any]:
    return {"keep": "cache", "tokens": list(prompts)} if mem.prefix is not None else {}


def request(mem: ms.StateManager, i: int, tokens: list[int], **more: Any) -> ms.Request:
    return ms.Request(i, length=len(tokens) + 6, **({"tokens": tokens} if mem.prefix is not None else {}), **more)


def serve(mem: ms.StateManager, *prompts: list[int], answer: int = 3, **more: Any) -> None:
    """Runs requests from admission to end, with padding, a dead step and a published snapshot."""
    rows = mem.admit([request(mem, i, tokens, **more) for i, tokens in enumerate(prompts)])
    ends, steps = [len(tokens) + answer for tokens in prompts], list[ms.Step]()
    while any(mem.info(row).length < end for row, end in zip(rows, ends, strict=True)):
        going = [row for row, end in zip(rows, ends, strict=True) if mem.info(row).length < end]
        most = [min(mem.info(row).next_boundary, ends[rows.index(row)]) - mem.info(row).length for row in going]
        steps.append(mem.plan([*going, None], [*most, 0]))
        mem.submit(steps[-1])
        while len(steps) > mem.overlap:
            mem.settle(steps.pop(0))
        mem.poll()
    while steps:
        mem.settle(steps.pop(0), [True] * len(going) + [False])
    texts = [[*tokens, *range(answer)][: mem.info(row).confirmed] for tokens, row in zip(prompts, rows, strict=True)]
    mem.drop([each for each in mem.publish(rows, **tokens_of(mem, *texts)) if each and mem.prefix is None])
    mem.end(rows, **tokens_of(mem, *texts))
    mem.poll()


def speculate(mem: ms.StateManager) -> None:
    """Runs steps of some and of all rows with drafts, keeps paths of trees, and accepts with and without an upload."""
    rows = mem.admit([request(mem, i, prompt(60 + i)) for i in range(3)])
    for batch, tokens, drafts in ((3, 2, 1), (1, 3, 3), (3, 1, 1), (2, 0, 0)):
        step = mem.plan(rows[:batch], tokens, drafts=drafts)
        step.accepted.fill_(tokens)
        mem.device.keep_path(torch.zeros(batch, 2, dtype=torch.int32 if batch > 2 else torch.int64))
        mem.accept(step, [tokens] * batch, written=batch > 2)
    mem.end(rows)


def by_id(mem: ms.StateManager) -> None:
    """Makes all calls on slots that a caller holds by id, with many numbers of slots, and ids of 32 and 64 bits."""
    for n in (1, 5, 20, mem.free_slots):
        ids = mem.pool.claim(n)
        mem.pool.copy(ids[:1], ids[-1:])
        mem.pool.copy(ids[:1].long(), ids[-1:])
        mem.pool.zero(ids.long())
        for plane in mem.layout.planes:
            for some in (ids, ids[: n // 2 + 1].long()):
                mem.planes.scatter(plane.name, some, mem.planes.gather(plane.name, some))
        mem.pool.release(ids if n % 2 else list(range(1, n + 1)))
        mem.pool.allocator.free, mem.pool.allocator.unconfirmed = 40, 0  # what a real device would confirm
    with mem.pool.allocator.group(7) as group:
        group.claim(2)
        group.give_back(3)
    mem.pool.allocator.free, mem.pool.allocator.unconfirmed = 40, 0


def below(mem: ms.StateManager) -> None:
    """Saves states to host memory and a store, loads them from both, and runs requests with hits and sessions."""
    assert mem.prefix is not None and mem.tiers is not None
    for first in (0, 10):
        prompts = [prompt(first + i) for i in range(5)]
        serve(mem, *prompts)
        serve(mem, *([*tokens, 1] for tokens in prompts))  # hits in the prefix cache
        if first:
            scatter(mem)
        mem.prefix.evict_states(99)
        mem.prefix.evict_pages(999)
        mem.submit()
        mem.poll()
        serve(mem, *([*tokens, 1] for tokens in prompts))  # loads from host memory
        (row,) = mem.admit([request(mem, 7, [*prompts[0], 1])])
        step = mem.plan([row, None], [1, 0])
        mem.settle(step)
        mem.end([row])
        mem.tiers.flush()
        mem.tiers.clear()  # also frees the records that `scatter` held
        mem.prefix.clear()
        fetch = mem.prefetch([*prompts[1], 1])
        while not fetch.done:
            mem.poll()
        serve(mem, [*prompts[1], 1], fetch=fetch)
    tiers = mem.stats().tiers
    assert min(tiers.states_in, tiers.states_out, tiers.storage_hit_tokens) > 0, tiers
    chat = mem.sessions.open("chat")
    for turn in (1, 2):
        serve(mem, prompt(40, 4 * turn), session=chat)
    mem.sessions.close(chat)


def scatter(mem: ms.StateManager) -> None:
    """Claims every second free record for KV pages, so that the free records are not contiguous."""
    assert mem.tiers is not None
    if mem.tiers.host.keeps_kv:
        pool = mem.tiers.host.kv.pool
        pool.release(pool.claim(pool.free)[::2])


def everything(mem: ms.StateManager) -> None:
    serve(mem, *(prompt(30 + i) for i in range(6)))
    if mem.tiers is not None:
        below(mem)
    (row,) = mem.admit([request(mem, 1, prompt(50))])
    mem.settle(mem.plan([row], min(EVERY, mem.info(row).next_boundary - mem.info(row).length)))
    more = mem.fork(row, ["fork"]).rows
    mem.device.read_slots([row])
    mem.extend([row, *more], [LENGTH, LENGTH])
    mem.cancel(mem.plan([row, *more]))
    arrived = mem.admit([request(mem, 3, prompt(51))])
    mem.device.arrived(arrived, [EVERY])
    mem.settle(mem.plan(arrived, 1))
    mem.end(arrived)
    if mem.forward.tail:
        speculate(mem)
    mem.device.scrub_null()
    with suppress(ms.MemstateError):  # device memory holds rubbish
        mem.audit()
    mem.device.sleep()
    mem.device.wake()
    mem.recover(keep=False)
    serve(mem, prompt(55))
    mem.recover(keep=False)
    by_id(mem)


def hand_over(folder: str, layout: ms.StateLayout) -> None:
    """Copies records that a manager has written from its store to another one, with `HandOver`."""
    with tempfile.TemporaryDirectory() as other:
        stores = {"source": FileStore(folder), "target": FileStore(other)}
        move = HandOver("toy", layout, KV, page_tokens=PAGE, ranks=1, to_ranks=1, rank=0, **stores)
        assert move.run(prompt(10), most=LENGTH).length == LENGTH


def runs() -> Iterator[tuple[str, Any]]:
    from tests.support.launch_keys import Keys, Recorder

    # Chooses the kernels, although the device is a CPU without the interpreter.
    dispatch.choose = lambda name, device: name  # type: ignore[assignment]
    recorder = Recorder("sm_90")

    def recorded(call: Callable[[], object]) -> Keys:
        with recorder.recorded() as keys:
            call()
        return keys

    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                mem = kind.build(folder)
                keys = {"warm": recorded(partial(ms.warm_up, mem)), "served": recorded(partial(everything, mem))}
                if kind.tiers == {}:
                    keys["handed over"] = recorded(partial(hand_over, folder, kind.layout))
                mem.close()
                yield name, keys
            except Exception:
                yield name, traceback.format_exc()
    yield "arguments", recorder.names


if __name__ == "__main__":
    json.dump(dict(runs()), sys.stdout)
