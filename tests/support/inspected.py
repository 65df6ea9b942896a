"""Makes inspections of managers with conversations, a shared prompt, tenants, tiers and a journal."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

import memstate as ms
from memstate.slots.inspect import Inspection
from memstate_tools.demo.peek import empty_register
from tests.support import inside
from tests.support.build import build

PAGE = 4
LAYOUT = ms.StateLayout(
    (ms.Plane("ssm", (2, 8, 8), torch.float32), ms.Plane("conv", (3, 10), torch.bfloat16)), layers=4, alignment=64
)
KV = ms.StateLayout((ms.Plane("kv", (PAGE, 4), torch.float32),), layers=1)


class Scene:
    """A manager, and the texts of its running requests. All tokens are random."""

    def __init__(self) -> None:
        kv = ms.Planes(KV, 72, ms.Backend("reference", torch.device("cpu")))
        self.mem = build(
            LAYOUT, slots=44, max_requests=4, snapshots=88, pages=72, page_size=PAGE, pages_per_row=40, journal=300,
            tracking=ms.PingPong(8), prefix=ms.Prefix(), whole=True,
            tiers=ms.Tiers("toy", 6, host_pages=40, kv=kv), backend="reference",
        )  # fmt: skip
        self.random = random.Random(5)
        self.text: dict[ms.Row, list[int]] = {}

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def start(self, name: str, tokens: Sequence[int], most: int | None = None, **more: object) -> ms.Row:
        """Admits a prompt, and computes all of it or its first `most` tokens. Returns its row."""
        (row,) = self.mem.admit([ms.Request(name, tokens=tokens, **more)])  # type: ignore[arg-type]
        self.text[row] = list(tokens)
        self.read(row, len(tokens) if most is None else most)
        return row

    def read(self, row: ms.Row, end: int) -> None:
        while (length := self.mem.info(row).length) < end:
            self.step([row], min(self.mem.chunk(row, 16), end - length))

    def write(self, rows: Sequence[ms.Row], count: int) -> None:
        """Decodes `count` tokens of each row, one per step."""
        for row in rows:
            self.text[row] += self.words(count)
        for _ in range(count):
            self.step(rows, 1)

    def step(self, rows: Sequence[ms.Row], count: int) -> None:
        self.mem.extend(rows, [self.mem.info(row).length + count for row in rows])
        self.mem.settle(self.mem.plan(rows, count))

    def end(self, row: ms.Row, **more: object) -> object:
        return self.mem.end([row], keep="cache", tokens=[self.text.pop(row)], **more)  # type: ignore[arg-type]


def scene() -> Scene:
    """Returns a scene: two requests decode, one reads its prompt, two conversations wait, and states were evicted."""
    server = Scene()
    mem, system = server.mem, server.words(16)
    for at in range(6):
        asked = server.start(f"ask-{at}", [*system, *server.words(12)], salt="tenant-a" if at % 2 else None)
        server.write([asked], 5)
        server.end(asked)
    for name in ("conversation-17", "support"):
        chat, text = mem.sessions.open(name), [*system, *server.words(9)]
        for turn in range(2):
            row = server.start(f"{name}/{turn}", text, session=chat)
            server.write([row], 6)
            text = [*server.text[row], *server.words(5)]
            server.end(row)
    kept = server.start("fork", [*system, *server.words(8)])
    server.write([kept], 9)
    mem.end([kept], keep="handle", lengths=[mem.info(kept).length // 8 * 8])
    rows = [
        server.start("req-7", [*system, *server.words(7)]),
        server.start("req-8", server.words(20), salt="tenant-a"),
    ]
    server.write(rows, 18)
    reading = server.start("long-prompt", server.words(70), most=40, snapshot_at=[16, 32])
    running = [*rows, reading]
    mem.extend(running, [mem.info(row).length + count for row, count in zip(running, (1, 1, 8), strict=True)])
    mem.plan(running, [1, 1, 8])  # an open step
    return server


@cache
def served() -> Inspection:
    """Returns an inspection of `scene`. It has requests, marks, snapshots, sessions, ghosts, tiers and a journal."""
    mem = scene().mem
    with mem.pool.allocator.group(2):
        return mem.inspect()


@cache
def leaking() -> Inspection:
    """Returns an inspection of `scene` with two faults: one slot leaks, and two registers hold one slot."""
    mem = scene().mem
    lanes = [register for register, (kind, _) in mem._reports.owners().items() if kind == "lane"]
    empty_register(mem, lanes[0])
    slots = inside.registers(mem).table.slots
    slots[lanes[2]] = slots[lanes[1]]
    return mem.inspect()


def large(capacity: int, requests: int = 1000, nodes: int = 10_000) -> Inspection:
    """Returns an inspection as large as a deployment's: `capacity` slots, each with an owner, in random order."""
    chance, small = random.Random(0), served()
    slots = list(range(1, capacity + 1))
    chance.shuffle(slots)
    first = 3 * (requests + 1)  # registers of holders follow those of rows
    held = [3 * row for row in range(1, requests + 1)] + list(range(first, first + capacity - requests))
    labels = {register: 64 * chance.randrange(1, 2000) for register in held}
    prefix: list[dict[str, object]] = []
    for at in range(nodes):
        parent = chance.randrange(-1, at) if at % 7 else at - 1
        start = prefix[parent]["end"] if parent >= 0 else 0
        prefix.append({**small.prefix[0], "parent": parent, "start": start, "end": start + chance.randrange(1, 9),
                       "register": first + at, "uses": chance.randrange(50)})  # fmt: skip
    columns: dict[str, list[int]] = {"slots": [0] * (first + capacity), "labels": [0] * (first + capacity)}
    for register, slot in zip(held, slots, strict=True):
        columns["slots"][register], columns["labels"][register] = slot, labels[register]
    names = {
        register: f"cached prefix of {labels[register]} tokens in register {register}"
        if register >= first
        else f"row {register // 3} (request 'request-{register // 3}-of-many') live"
        for register in held
    }
    return replace(
        small, **columns, capacity=capacity, owners=[1] * (capacity + 1), free=[False] * (capacity + 1), names=names,
        kinds={register: "cached" if register >= first else "live" for register in held}, tags={}, by_id=[],
        rows=[{**small.rows[0], "row": row, "id": f"request-{row}-of-many"} for row in range(1, requests + 1)],
        prefix=prefix, sessions=[],
    )  # fmt: skip
