"""Benchmarks the host time of one long prompt, from admission to release. Launches do nothing.

The calls are `admit`, then `plan`, `settle` and `publish` for each chunk, then `end`: the prefix cache gets KV and a
state after each chunk. The cache has room for three such prompts, so each new prompt evicts an old one.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.kernels.dispatch import OPS
from memstate.prefix import Prefix
from memstate.requests.handles import Request, Row
from memstate.requests.tracking.strategies import Redirect
from memstate_tools.bench.clock import cpu_seconds
from memstate_tools.bench.host_sides import LAYOUT
from memstate_tools.bench.task import Measured, Setting, Task

CHUNK, TOY_CHUNK = 8192, 64
PROMPTS = 3  # prompts that fit into the cache
TURNS, TOY_TURNS = 12, 5
FORMS: dict[str, Callable[[Any], Any]] = {"list": np.ndarray.tolist, "array": np.asarray}


class LongPrompt:
    """Prompts of one length, all different.

    Args:
        setting: The setting of the benchmark.
        tokens: Tokens of a prompt.
        size: Tokens of a page.
    """

    def __init__(self, setting: Setting, tokens: int, size: int) -> None:
        self._setting, self._tokens, self._size = setting, tokens, size
        self._chunk = setting.sizes(CHUNK, TOY_CHUNK)

    def task(self) -> Task:
        """Returns the task that measures a prompt."""
        return Task(f"prefix, prompt of {self._tokens} tokens, pages of {self._size}", self._check, self._measure)

    def _manager(self) -> StateManager:
        pages = -(-self._tokens // self._size)
        return StateManager(
            LAYOUT, slots=64, max_requests=2, tracking=Redirect(every=self._chunk), prefix=Prefix(),
            pages=Pages(size=self._size, count=PROMPTS * pages + 8, per_row=pages + 1),
            backend=self._setting.backend, device=self._setting.device,
        )  # fmt: skip

    def _turn(self, mem: StateManager, given: Any) -> dict[str, float]:
        """Serves one prompt. Returns operation -> seconds of its calls."""
        spent, rows = defaultdict[str, float](float), list[Row]()
        spent["admit"] += cpu_seconds(lambda: rows.extend(mem.admit([Request("one", tokens=given)])))
        at = 0
        while at < self._tokens:
            at += (n := mem.chunk(rows[0], min(self._chunk, self._tokens - at)))
            spent["plan"] += cpu_seconds(partial(self._step, mem, rows, n))
            spent["publish"] += cpu_seconds(lambda: mem.publish(rows, keep="cache", tokens=[given]))
        spent["end"] += cpu_seconds(lambda: mem.end(rows, keep="cache", tokens=[given]))
        return spent

    @staticmethod
    def _step(mem: StateManager, rows: list[Row], tokens: int) -> None:
        mem.settle(mem.plan(rows, tokens))

    def _prompt(self, form: str) -> Any:
        return FORMS[form](self._random.integers(0, 150_000, self._tokens))

    def _check(self) -> str:
        """Serves prompts, one of them twice. Returns what is wrong; empty if this prompt finds its last state again."""
        self._random = np.random.default_rng(self._tokens)
        mem, given = self._manager(), self._prompt("array")
        for _ in range(PROMPTS + 1):
            self._turn(mem, self._prompt("array"))
        self._turn(mem, given)
        length, last = mem.match(given).length, (self._tokens - 1) // self._size * self._size
        mem.audit().raise_if_leaking()
        return "" if length == last else f"{length} of {self._tokens} tokens are found again, expected {last}"

    def _measure(self) -> list[Measured]:
        figures = []
        for form in FORMS:
            mem, all_spent = self._manager(), defaultdict[str, list[float]](list)
            for op in OPS:
                setattr(mem.backend, op, lambda *_: None)
            for turn in range(self._setting.sizes(TURNS, TOY_TURNS)):
                each = self._turn(mem, self._prompt(form))
                for op, seconds in {**each, "request": sum(each.values())}.items() if turn > PROMPTS else ():
                    all_spent[op].append(seconds)
            case = f"{self._tokens} tokens, pages of {self._size}, {form}"
            for op, times in all_spent.items():
                figures += self._setting.rows(f"prompt, {op}", case, median(times) * 1e6, "host us", {})
        return figures
