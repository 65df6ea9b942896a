"""The public calls of a manager, for tests in which all of them are refused."""

from collections.abc import Callable, Sequence
from typing import Any

import memstate as ms

# name -> a call with the manager, rows, an open step and snapshots
CALLS: dict[str, Callable[[Any, Sequence[ms.Row], Any, Sequence[ms.Snapshot | None]], object]] = {
    "admit": lambda mem, rows, step, kept: mem.admit([ms.Request("new", length=2)]),
    "fork": lambda mem, rows, step, kept: mem.fork(rows[0], ["x"]),
    "reorder": lambda mem, rows, step, kept: mem.reorder(rows[:1], [0, 0]),
    "extend": lambda mem, rows, step, kept: mem.extend(rows[:1], [8]),
    "shortfall": lambda mem, rows, step, kept: mem.shortfall(rows),
    "plan": lambda mem, rows, step, kept: mem.plan(rows),
    "settle": lambda mem, rows, step, kept: mem.settle(step),
    "submit": lambda mem, rows, step, kept: mem.submit(),
    "submit(step)": lambda mem, rows, step, kept: mem.submit(step),
    "cancel": lambda mem, rows, step, kept: mem.cancel(step),
    "publish": lambda mem, rows, step, kept: mem.publish(rows),
    "end": lambda mem, rows, step, kept: mem.end(rows),
    "drop": lambda mem, rows, step, kept: mem.drop(kept),
    "poll": lambda mem, rows, step, kept: mem.poll(),
    "sessions.open": lambda mem, rows, step, kept: mem.sessions.open("s"),
    "audit": lambda mem, rows, step, kept: mem.audit(),
    "recover": lambda mem, rows, step, kept: mem.recover(keep=False),
    "close": lambda mem, rows, step, kept: mem.close(),
    "warm_up": lambda mem, rows, step, kept: ms.warm_up(mem),
    "device.arrived": lambda mem, rows, step, kept: mem.device.arrived(rows[:1], [4]),
    "device.read_slots": lambda mem, rows, step, kept: mem.device.read_slots(rows),
    "device.check": lambda mem, rows, step, kept: mem.device.check(),
    "device.sleep": lambda mem, rows, step, kept: mem.device.sleep(),
    "device.wake": lambda mem, rows, step, kept: mem.device.wake(),
    "pool.claim": lambda mem, rows, step, kept: mem.pool.claim(1),
    "pool.release": lambda mem, rows, step, kept: mem.pool.release([12]),
    "pool.check": lambda mem, rows, step, kept: mem.pool.check(),
    "prefix.clear": lambda mem, rows, step, kept: mem.prefix.clear(),
    "tiers.flush": lambda mem, rows, step, kept: mem.tiers.flush(),
    "tiers.clear": lambda mem, rows, step, kept: mem.tiers.clear(),
    "match": lambda mem, rows, step, kept: mem.match([1, 2, 3]),
    "inspect": lambda mem, rows, step, kept: mem.inspect(),
    "info": lambda mem, rows, step, kept: mem.info(rows[0]),
    "device.scrub_null": lambda mem, rows, step, kept: mem.device.scrub_null(),
}
