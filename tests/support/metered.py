"""Makes small managers for tests of exported figures, and runs requests that change the figures."""

import urllib.request
from typing import Any

import torch

import memstate as ms
from tests.support.virtual import MemoryStore

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=2)
PAGE = 4


def manager(slots: int = 12, *, below: bool = False, **settings: Any) -> ms.StateManager:
    """Returns a small manager with a prefix cache; with `below` it also has host memory and a store, but no KV."""
    if below:
        settings["tiers"] = ms.Tiers(model="toy", host_slots=4, store=MemoryStore(), reserve=0.0)  # type: ignore[arg-type]
    pages = ms.Pages(size=PAGE) if below else ms.Pages(count=60, size=PAGE, per_row=12)
    usual: dict[str, Any] = {"max_requests": 4, "tracking": ms.Redirect(8), "prefix": ms.Prefix(), "pages": pages}
    return ms.StateManager(LAYOUT, slots=slots, backend="reference", **usual | settings)


def turn(mem: ms.StateManager, who: int, salt: object = None, length: int = 13, **more: Any) -> None:
    """Runs a request from admission to end, and leaves its states in the cache."""
    prompt = [1000 * who + at for at in range(length)]
    rows = mem.admit([ms.Request(who, tokens=prompt, salt=salt, **more)])  # type: ignore[arg-type]
    while (at := mem.info(rows[0]).length) < length + 1:
        chunk = mem.chunk(rows[0], 8) if at < length else 1
        mem.extend(rows, [at + chunk])
        step = mem.plan(rows, chunk)
        for state in mem.planes["ssm"]:
            state[step.write] = state[step.read] + 1
        mem.settle(step)
    mem.end(rows, keep="cache", tokens=[[*prompt, 1]])
    mem.poll()


def get(url: str) -> str:
    """Returns the body of a GET."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()
