"""A step in which requests end and come, beside SGLang's: `memstate bench host --case online`.

A step ends some requests, each of which leaves a state to the cache, evicts as many cached states, admits as many new
requests, and decodes all rows. Both sides have the same numbers of rows, slots and cached states. Prompts are read
between two steps, which is not timed, or in a prefill step that is. In other forms of the step, requests are turns of
sessions, or the manager has what they do or do not use.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import torch

from memstate.cli.bench import radix_peer
from memstate.cli.bench.host_peer import NAME, SglangStates, load
from memstate.cli.bench.host_sides import BARE, EVERY, KINDS, PLAIN, Ours, Side, Timer, task
from memstate.cli.bench.task import Setting, Task
from memstate.engine.settings import Pages
from memstate.prefix.policies import Lru
from memstate.prefix.session_settings import SessionLimits
from memstate.prefix.settings import Prefix
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.tracking import Tracking
from memstate.tiers import Fetch, Tiers
from memstate.tiers.stores.base import Bytes, NoStore, Outcome

FIRST = 12  # steps before those that are counted and timed
CASES = ((1, 0), (1, 1), (8, 0), (8, 1), (64, 0), (64, 1), (64, 4), (256, 0), (256, 1), (256, 8))  # rows, changes
ALONE = ((1, 0), (1, 1), (64, 0), (64, 1))  # of forms that SGLang does not stand beside
TOY_CASES = ((3, 0), (3, 1))
PROMPT = array("q", [1])  # stands for one of any length, where only the length counts
# What the manager has and requests use -> whether SGLang stands beside it, else a step with nothing; tokens between
# snapshots, so many that no row reaches a boundary while it decodes.
FORMS = {
    "": (True, EVERY), "prefill": (True, 2 * EVERY), "prefix cache": (True, EVERY),
    "prefix cache, prefill": (True, 2 * EVERY), "sessions": (True, 64 * EVERY), "poll": (False, EVERY),
    "idle prefix cache": (False, EVERY), "idle sessions": (False, EVERY), "idle tiers": (False, EVERY),
    "prefix cache, tiers": (False, EVERY), "prefix cache, tiers, prefetch": (False, EVERY),
}  # fmt: skip


class Sink(NoStore):
    """Takes every record. No prompt comes again, so none is read."""

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store`."""
        return [Outcome.DONE] * len(names)


class Online(Ours):
    """Steps of a manager.

    Args:
        setting: Where it runs.
        tracking: The strategy.
        size: Number of requests.
        changes: How many of them end in a step, and how many come.
        form: What the manager has and what requests use, see `FORMS`. With nothing, the caller keeps the states, and
            there is no KV.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, changes: int, form: str = "") -> None:
        self._size, self._changes, self._words = size, changes, frozenset(filter(None, form.split(", ")))
        self._every, self._came = EVERY if "sessions" in self._words else int(tracking.every), 0
        self._tokens = self._every + ("prefetch" in self._words)  # of a prompt: its last one is never fetched
        self._fetches: list[Fetch | None] = [None] * size
        settings: dict[str, Any] = {}
        if "prefix cache" in form or "tiers" in form:
            settings["prefix"], settings["pages"] = Prefix(Lru(), most_states=size), Pages(size=self._every)
        if "tiers" in form:
            settings["tiers"] = Tiers("bench", host_slots=4 * size, store=Sink())
        elif "prefix cache" in self._words:
            settings["pages"] = Pages(count=6 * size, size=self._every, per_row=2)
        self._polls = "tiers" in form or form == "poll"
        if "sessions" in form:
            settings |= {"sessions": SessionLimits(per_session=1), "slots": 6 * size}
        super().__init__(setting, tracking, size, **settings)
        self._running: list[Row] = []  # in the order in which they came: the last one is request `_came - 1`
        self._kept: deque[Snapshot | None] = deque()
        self._sessions = [self.mem.sessions.open(i) for i in range(2 * size if "sessions" in form else 0)]
        self._length = [self._every - 1] * len(self._sessions)  # of each conversation
        if "idle sessions" in self._words:
            texts = [_prompt(i, self._every) for i in range(size)]
            rows = self.mem.admit([Request(i, tokens=texts[i], session=self._sessions[i]) for i in range(size)])
            self.mem.settle(self.mem.plan(rows, self._every))
            self.mem.end(rows, keep="cache", tokens=texts)
        for _ in range(2):  # all come; all end, and as many come
            self._change(size, self._texts(size))
            self._read(size)
        for _ in range(FIRST):
            self.turn(lambda op, act: act())

    def turn(self, timer: Timer) -> None:
        """See `Side`."""
        texts = self._texts(self._changes)
        timer("changes", lambda: self._change(self._changes, texts))
        timer("decode", self._decode)
        self._read(self._changes)
        while not all(fetch is None or fetch.done for fetch in self._fetches):
            self.mem.poll()

    def _decode(self) -> None:
        self.mem.settle(self.mem.plan(self._running))
        if self._polls:
            self.mem.poll()
        if "prefetch" in self._words:
            coming = range(self._came, self._came + self._changes)
            self._fetches = [self.mem.prefetch(_prompt(name, self._tokens)) for name in coming]

    def _texts(self, changes: int) -> list[range]:
        """All tokens of the requests that end next; those of a turn are what the next one goes on from."""
        first = self._came - len(self._running)
        names = range(first, first + min(changes, len(self._running)))
        if "sessions" not in self._words:
            return [_prompt(name, self._tokens) for name in names]
        ended = [name % len(self._sessions) for name in names]
        for which, row in zip(ended, self._running, strict=False):
            self._length[which] = self.mem.info(row).length
        return [_prompt(which, self._length[which]) for which in ended]

    def _change(self, changes: int, texts: list[range]) -> None:
        mem, rows, words = self.mem, self._running[:changes], self._words
        if rows and "sessions" in words:
            mem.end(rows, keep="cache", tokens=texts)
        elif rows and "prefix cache" in words:
            mem.end(rows, keep="cache", lengths=[self._every] * changes, tokens=texts)
        elif rows:
            self._kept.extend(mem.end(rows, keep="handle", lengths=[self._every] * changes))
            mem.drop([self._kept.popleft() for _ in range(len(self._kept) - self._size)])
        if changes:
            names, plain = range(self._came, self._came + changes), not words
            coming = [Request(name) if plain else self._request(name) for name in names]
            new = mem.admit(coming)
            self._came += changes
            self._running = [*self._running[changes:], *new]
            if "prefill" in words:
                mem.settle(mem.plan(new, self._every))

    def _request(self, name: int) -> Request:
        if "sessions" in self._words:
            which = name % len(self._sessions)
            return Request(name, tokens=_prompt(which, self._length[which] + 1), session=self._sessions[which])
        if "prefix cache" not in self._words:
            return Request(name)
        tokens, fetch = _prompt(name, self._tokens), self._fetches[name - self._came]
        return Request(name, tokens=tokens, length=2 * self._every, snapshot_at=[self._every], fetch=fetch)

    def _read(self, changes: int) -> None:
        """Takes the newest requests to the end of their prompts, where that is not timed."""
        rows = self._running[len(self._running) - changes :]
        if rows := [row for row in rows if self.mem.info(row).length < self._every]:
            self.mem.settle(self.mem.plan(rows, [self._every - self.mem.info(row).length for row in rows]))

    def wrong(self) -> str:
        """As many states must be cached as requests run, and none may be lost."""
        self.mem.device.check()
        report, cached = self.mem.audit(), self.mem.stats().prefix
        states = sum(each is not None for each in self._kept) + sum(info.states for info in self.mem.sessions.infos())
        states += (cached.states if cached else 0) - (len(self._sessions) // 2 if "idle sessions" in self._words else 0)
        return str(report) if not report.clean else "" if states == self._size else f"{states} states of {self._size}"


def _prompt(name: int, length: int) -> range:
    return range(name << 20, (name << 20) + length)


class SglangOnline(SglangStates):
    """Steps of SGLang.

    Args:
        size: Number of requests.
        every: Tokens between two tracked states.
        lazy: As of `SglangStates`.
        changes: How many requests end in a step, and how many come.
        form: As of `Online`. In a prefix cache, states and KV go to SGLang's tree. Otherwise the caller keeps the
            states, and there is no KV. Sessions are SGLang's streaming ones, which hold row and slots between turns.
        states: Whether requests have states. Without, the same functions do what is not about states.
        adapted: As of `SglangStates`.

    Raises:
        ImportError: SGLang cannot be used.
    """

    _tree: Any = None
    _extend: Any = None  # batch of new requests
    _streams: Any = None  # what sessions hold

    def __init__(
        self, size: int, every: int, lazy: bool, changes: int, form: str, states: bool = True, adapted: bool = False
    ) -> None:
        idle = size if form == "sessions" else 0
        self._sessions = [load().Session(0, str(i), streaming=True) for i in range(2 * idle)]
        super().__init__(size, every, lazy, due=0, adapted=adapted, states=states, idle=idle)
        self._changes, self._names, self._cache = changes, count(size), radix_peer.load()
        self._kv: dict[str, torch.Tensor] = {}
        if idle:
            self._streams = self._sgl.StreamingSession(self._batch.tree_cache)
            self._borrow(self._reqs)
        if "prefix cache" in form:
            self._grow_tree()
        if "prefill" in form:
            self._extend = copy(self._batch)
        for changed in (size, size, *[changes] * FIRST):  # the first requests have no prompt
            self._step(changed, lambda op, act: act())

    def _grow_tree(self) -> None:
        """SGLang's tree in the place of what stands for it."""
        sgl = self._cache
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
            for req in new if self._extend is None else ():
                req.kv.mamba_last_track_seqlen = self._every

    def _request(self, name: int) -> Any:
        """A new request, of which the next forward reads the whole prompt."""
        req = super()._request(name)
        req.session = self._sessions[name % len(self._sessions)] if self._sessions else None
        req.extend_end, req.full_untruncated_fill_ids = self._every, PROMPT
        return req

    def _change(self, ended: list[Any], new: list[Any]) -> None:
        for req in ended:
            self._end(req)
        if ended and self._streams is None:
            self._evict()
        if ended:
            self._admit(new)

    def _end(self, req: Any) -> None:
        """The tracked state of a request goes to the cache, the rest is free again. A session keeps all of it."""
        if self._streams is not None:
            self._streams.try_cache_finished_req(req)
            return
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
        if self._streams is not None:
            for req in reqs:
                self._streams.try_match_prefix(self._cache.MatchPrefixParams(key=PROMPT, req=req))
        if self._extend is None:
            super()._admit(reqs)
        else:
            self._extend.reqs = reqs
            self._extend.prepare_for_extend()
        if self._streams is not None:
            self._borrow(reqs)

    def _borrow(self, reqs: list[Any]) -> None:
        """What the requests hold belongs to their sessions from now on."""
        for req in reqs:
            req.kv.kv_allocated_len = 1
            self._streams.take(req)

    def _key(self, req: Any) -> Any:
        return self._cache.RadixKey(array("q", _prompt(int(req.rid), self._every)))


def tasks(setting: Setting, there: bool) -> Iterator[Task]:
    """Yields steps of each form, see `FORMS`; then SGLang's over our pool.

    Args:
        setting: Where they run.
        there: Whether SGLang stands beside them.
    """
    for form, (beside, length) in FORMS.items():
        for name, kind in KINDS.items():
            for size, changes in TOY_CASES if setting.toy else CASES if beside else ALONE:
                if "prefill" in form and not changes:
                    continue
                case = f"R={size} {name}, {changes} changed, online, {form}".removesuffix(", ")
                ours: Callable[[], Side] = partial(Online, setting, kind(length), size, changes, form)
                peers: dict[str, Callable[[], Side]] = {}
                if there and beside:
                    peer = partial(SglangOnline, size, length, name == "lazy", changes, form)
                    peers = {NAME: peer, BARE: partial(peer, states=False)}
                elif not beside and setting.compares(PLAIN):
                    peers = {PLAIN: partial(Online, setting, kind(EVERY), size, changes)}
                yield task(setting, case, ours, peers)
    for name, (size, changes) in product(("ping-pong", "lazy"), TOY_CASES if setting.toy else CASES) if there else ():
        peer = partial(SglangOnline, size, EVERY, name == "lazy", changes, "")
        case = f"R={size} {name}, {changes} changed, online, adapters"
        yield task(setting, case, partial(peer, adapted=True), {NAME: peer})
