"""A step in which requests end and come, beside SGLang's: `memstate bench host --case online`.

A step ends some requests, each of which leaves a state to the cache, evicts as many cached states, admits as many new
requests, and decodes all rows. Both sides have the same numbers of rows, slots and cached states. Prompts are read
between two steps, which is not timed.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import torch

from memstate.cli.bench import radix_peer
from memstate.cli.bench.host_peer import NAME, SglangStates
from memstate.cli.bench.host_sides import BARE, EVERY, KINDS, Ours, Side, Timer, task
from memstate.cli.bench.task import Setting, Task
from memstate.engine.settings import Pages
from memstate.prefix.policies import Lru
from memstate.prefix.settings import Prefix
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.tracking import Tracking

FIRST = 12  # steps before those that are counted and timed
CASES = ((1, 0), (1, 1), (8, 0), (8, 1), (64, 0), (64, 1), (64, 4), (256, 0), (256, 1), (256, 8))  # rows, changes
TOY_CASES = ((3, 0), (3, 1))


class Online(Ours):
    """Steps of a manager.

    Args:
        setting: Where it runs.
        tracking: The strategy.
        size: Number of requests.
        changes: How many of them end in a step, and how many come.
        prefix: Whether states and KV go to the prefix cache. Otherwise the caller keeps the states, and there is no KV.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, changes: int, prefix: bool) -> None:
        cache = {"pages": Pages(count=6 * size, size=EVERY, per_row=2), "prefix": Prefix(Lru(), most_states=size)}
        super().__init__(setting, tracking, size, **(cache if prefix else {}))
        self._size, self._changes, self._prefix = size, changes, prefix
        self._names = count()
        self._running: list[tuple[int, Row]] = []
        self._kept: deque[Snapshot | None] = deque()
        for _ in range(2):  # all come; all end, and as many come
            self._change(size)
            self._read(size)
        for _ in range(FIRST):
            self.turn(lambda op, act: act())

    def turn(self, timer: Timer) -> None:
        """See `Side`."""
        timer("changes", lambda: self._change(self._changes))
        timer("decode", lambda: self.mem.settle(self.mem.plan([row for _, row in self._running])))
        self._read(self._changes)

    def _change(self, changes: int) -> None:
        mem, ended = self.mem, self._running[:changes]
        rows = [row for _, row in ended]
        if ended and self._prefix:
            mem.release(rows, [EVERY] * changes, tokens=[_prompt(name) for name, _ in ended])
        elif ended:
            self._kept.extend(mem.release(rows, publish=[EVERY] * changes))
            mem.drop([self._kept.popleft() for _ in range(len(self._kept) - self._size)])
        if changes:
            names = [next(self._names) for _ in range(changes)]
            new = mem.admit([self._request(name) for name in names])
            self._running = [*self._running[changes:], *zip(names, new, strict=True)]

    def _request(self, name: int) -> Request:
        if not self._prefix:
            return Request(name)
        return Request(name, tokens=_prompt(name), length=2 * EVERY, snapshot_at=[EVERY])

    def _read(self, changes: int) -> None:
        """Takes the newest requests to the first boundary."""
        if rows := [row for _, row in self._running[len(self._running) - changes :]]:
            self.mem.settle(self.mem.plan(rows, [EVERY - self.mem.length(row) for row in rows]))

    def wrong(self) -> str:
        """As many states must be cached as requests run, and none may be lost."""
        self.mem.check()
        report = self.mem.audit()
        cached = self.mem.stats().prefix
        states = cached.states if cached else sum(each is not None for each in self._kept)
        return str(report) if not report.clean else "" if states == self._size else f"{states} states of {self._size}"


def _prompt(name: int) -> range:
    return range(name * EVERY, (name + 1) * EVERY)


class SglangOnline(SglangStates):
    """Steps of SGLang.

    Args:
        size: Number of requests.
        every: Tokens between two tracked states.
        lazy: As of `SglangStates`.
        changes: How many requests end in a step, and how many come.
        prefix: Whether states and KV go to SGLang's tree. Otherwise the caller keeps the states, and there is no KV.
        states: Whether requests have states. Without, the same functions do what is not about states.

    Raises:
        ImportError: SGLang cannot be used.
    """

    _tree: Any = None

    def __init__(self, size: int, every: int, lazy: bool, changes: int, prefix: bool, states: bool = True) -> None:
        super().__init__(size, every, lazy, due=0, states=states)
        self._changes, self._names = changes, count(size)
        self._kv: dict[str, torch.Tensor] = {}
        if prefix:
            self._grow_tree()
        for changed in (size, size, *[changes] * FIRST):  # the first requests have no prompt
            self._step(changed, lambda op, act: act())

    def _grow_tree(self) -> None:
        """SGLang's tree in the place of what stands for it."""
        self._cache = sgl = radix_peer.load()
        parts = sgl.ComponentType.FULL, sgl.ComponentType.MAMBA
        self._pages = sgl.TokenToKVPoolAllocator(4 * self._size * self._every, torch.int64, "cpu", None, False)
        self._tree = self._batch.tree_cache = sgl.UnifiedRadixCache(
            sgl.CacheInitParams(
                disable=False, req_to_token_pool=self._pool, token_to_kv_pool_allocator=self._pages, page_size=1,
                tree_core_backend="rust", tree_components=parts if self._states else parts[:1],
                enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=self._lazy,
            )
        )  # fmt: skip
        self._component = self._tree.components.get(sgl.ComponentType.MAMBA)
        object.__setattr__(self._processor, "tree_cache", self._tree)

    def turn(self, timer: Timer) -> None:
        """See `Side`."""
        self._step(self._changes, timer)

    def _step(self, changes: int, timer: Timer) -> None:
        with self._here():
            ended, new = self._reqs[:changes], [self._request(next(self._names)) for _ in range(changes)]
            timer("changes", lambda: self._change(ended, new))
            self._reqs = self._batch.reqs = [*self._reqs[changes:], *new]
            self._place(0)
            timer("decode", self._decode)
            for req in new:
                req.kv.mamba_last_track_seqlen = self._every

    def _change(self, ended: list[Any], new: list[Any]) -> None:
        for req in ended:
            self._end(req)
        if ended:
            self._evict()
            self._admit(new)

    def _end(self, req: Any) -> None:
        """The tracked state of a request goes to the cache, the rest is free again."""
        given, result = self._sgl.InsertParams(), SimpleNamespace(mamba_exist=self._tree is not None)
        if self._states:
            self._component.prepare_for_caching_req(req, given, self._every, is_finished=True)
        if (pages := self._kv.pop(req.rid, None)) is not None:
            given.key, given.value = self._key(req), pages
            result = self._tree.insert(given)
        if self._states:
            self._component.cleanup_after_caching_req(req, True, result, given)
        if not result.mamba_exist:
            self._kept.append(given.mamba_value)
        self._pool.free(req)

    def _evict(self) -> None:
        excess = [self._kept.popleft() for _ in range(len(self._kept) - self._size)]
        if self._tree is None:
            self._drop(excess if self._states else [])
        else:
            tokens = 0 if self._states else len(excess) * self._every
            self._tree.evict(self._cache.EvictParams(num_tokens=tokens, mamba_num=len(excess)))

    def _admit(self, reqs: list[Any]) -> None:
        if self._tree is not None:
            for req in reqs:
                self._tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(req)))
                self._kv[req.rid] = self._pages.alloc(self._every)
        super()._admit(reqs)

    def _key(self, req: Any) -> Any:
        return self._cache.RadixKey(array("q", _prompt(int(req.rid))))


def tasks(setting: Setting, there: bool) -> Iterator[Task]:
    """Yields steps for each strategy, without a prefix cache and with one on both sides.

    Args:
        setting: Where they run.
        there: Whether SGLang stands beside them.
    """
    for (name, kind), prefix in product(KINDS.items(), (False, True)):
        for size, changes in TOY_CASES if setting.toy else CASES:
            case = f"R={size} {name}, {changes} changed, online{', prefix cache' if prefix else ''}"
            ours: Callable[[], Side] = partial(Online, setting, kind(EVERY), size, changes, prefix)
            peer = partial(SglangOnline, size, EVERY, name == "lazy", changes, prefix)
            peers = {NAME: peer, BARE: partial(peer, states=False)} if there else {}
            yield task(setting, case, ours, peers)
