"""Benchmarks a step in which requests end and come, compared with SGLang's: `memstate bench host --case online`.

A step ends some requests, whose states go to the cache; evicts as many cached states; admits as many new requests; and
decodes all rows. Both sides have the same numbers of rows, slots and cached states, and prompts in arrays that exist
before the step. Prompts are read between two steps, which is not timed, or in a prefill step, which is timed. In other
forms of the step, requests are turns of sessions, or the manager has more features, used or not.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from memstate.engine.settings import Pages
from memstate.prefix.policies import Lru
from memstate.prefix.session_settings import SessionLimits
from memstate.prefix.settings import Prefix
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.tracking import Tracking
from memstate.tiers import Fetch, Tiers
from memstate.tiers.stores.base import Bytes, NoStore, Outcome
from memstate_tools.bench import radix_peer
from memstate_tools.bench.host_peer import NAME, SglangStates, load
from memstate_tools.bench.host_sides import BARE, EVERY, KINDS, PLAIN, HostSide, TimedManager, Timer, task
from memstate_tools.bench.task import Setting, Task

FIRST = 12  # steps before the first step that is counted and timed
# (rows, requests that end and come in a step)
CASES = ((1, 0), (1, 1), (8, 0), (8, 1), (64, 0), (64, 1), (64, 4), (256, 0), (256, 1), (256, 8))
ALONE = ((1, 0), (1, 1), (64, 0), (64, 1))  # cases of forms that are not compared with SGLang
TOY_CASES = ((3, 0), (3, 1))
UNREAD = array("q", [1])  # stands for a prompt of any length, of which SGLang reads no token


class Form(NamedTuple):
    """Features of a manager, and what requests use of them.

    Attributes:
        has: Returns the settings of the manager for a number of requests.
        beside: True: the form is compared with SGLang. False: it is compared with our step without features.
        uses: Where the states of ended requests go: "cache" or "sessions". With "", the caller keeps them, and there is
            no KV.
        prompt: Tokens of a prompt.
        every: Tokens between snapshots. It is so large that no row reaches a boundary in decode.
        prefill: Whether prompts are read in a timed step.
        polls: Whether each step calls the manager's `poll`.
        fetches: Whether each step prefetches the next prompts.
    """

    has: Callable[[int], dict[str, Any]]
    beside: bool = False
    uses: str = ""
    prompt: int = EVERY
    every: int = EVERY
    prefill: bool = False
    polls: bool = False
    fetches: bool = False


def _nothing(size: int) -> dict[str, Any]:
    return {}


def _cache(size: int, page: int = EVERY, pages: int | None = None) -> dict[str, Any]:
    per_row = {"count": pages * size, "per_row": 2} if pages else {}
    return {"prefix": Prefix(Lru(), most_states=size), "pages": Pages(size=page, **per_row)}


def _sessions(size: int) -> dict[str, Any]:
    return {"sessions": SessionLimits(per_session=1), "slots": 6 * size}


def _tiers(size: int) -> dict[str, Any]:
    return _cache(size) | {"tiers": Tiers("bench", host_slots=4 * size, store=Sink())}


LONG: dict[str, Any] = {"prompt": 2 * EVERY, "every": 2 * EVERY, "prefill": True}
FORMS = {
    "": Form(_nothing, True),
    "prefill": Form(_nothing, True, **LONG),
    "prefix cache": Form(partial(_cache, pages=6), True, "cache"),
    "prefix cache, prefill": Form(partial(_cache, page=2 * EVERY, pages=6), True, "cache", **LONG),
    "sessions": Form(_sessions, True, "sessions", every=64 * EVERY),
    "poll": Form(_nothing, polls=True),
    "idle prefix cache": Form(_cache),
    "idle sessions": Form(_sessions),
    "idle tiers": Form(_tiers, polls=True),
    "prefix cache, tiers": Form(_tiers, uses="cache", polls=True),
    "prefix cache, tiers, prefetch": Form(_tiers, uses="cache", polls=True, fetches=True),
}


class Sink(NoStore):
    """A store that drops every record. No prompt is sent twice, so no record is read."""

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store`."""
        return [Outcome.DONE] * len(names)


class Online(TimedManager):
    """Steps of a manager.

    Args:
        setting: The setting of the benchmark.
        tracking: The tracking strategy.
        size: Number of requests.
        changes: Number of requests that end in a step, and of requests that come.
        form: One of `FORMS`.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, changes: int, form: str = "") -> None:
        self.form = FORMS[form]
        settings = self.form.has(size)
        super().__init__(setting, tracking, size, **settings)
        self._size, self._changes, self._came, self._taken = size, changes, 0, 0
        self._tokens = self.form.prompt + self.form.fetches  # the last token of a prompt is never fetched
        self._fetches: list[Fetch | None] = [None] * size
        self._running: list[Row] = []  # in the order of admission: the last row is request `_came - 1`
        self._kept: deque[Snapshot | None] = deque()
        self._sessions = [self.mem.sessions.open(i) for i in range(2 * size if "sessions" in settings else 0)]
        self._length = [EVERY - 1] * len(self._sessions)  # tokens of each conversation
        self._idle = size if self._sessions and not self.form.uses else 0  # sessions that hold a state but get no turn
        if self._idle:
            texts = [_prompt(i, EVERY) for i in range(size)]
            rows = self.mem.admit([Request(i, tokens=texts[i], session=self._sessions[i]) for i in range(size)])
            self.mem.settle(self.mem.plan(rows, EVERY))
            self.mem.end(rows, keep="cache", tokens=texts)
        for _ in range(2):  # first all requests come, then all end and as many come
            self._change(size, self._texts(size), self._prompts(size))
            self._read(size)
        for _ in range(FIRST):
            self.turn(lambda op, act: act())

    def turn(self, timer: Timer) -> None:
        """See `HostSide`."""
        texts, prompts = self._texts(self._changes), self._prompts(self._changes)
        self._coming = self._prompts(self._changes, self._changes)
        timer("changes", lambda: self._change(self._changes, texts, prompts))
        taken = self.mem.stats().snapshots
        timer("decode", self._decode)
        self._taken = self.mem.stats().snapshots - taken
        self._read(self._changes)
        while not all(fetch is None or fetch.done for fetch in self._fetches):
            self.mem.poll()

    def _decode(self) -> None:
        self.mem.settle(self.mem.plan(self._running))
        if self.form.polls:
            self.mem.poll()
        if self.form.fetches:
            self._fetches = [self.mem.prefetch(prompt) for prompt in self._coming]

    def _texts(self, changes: int) -> list[Sequence[int]]:
        """Returns all tokens of the requests that end next. In a session, the next turn goes on from them."""
        first = self._came - len(self._running)
        names = range(first, first + min(changes, len(self._running)))
        if self.form.uses != "sessions":
            return [_prompt(name, self._tokens) for name in names]
        ended = [name % len(self._sessions) for name in names]
        for which, row in zip(ended, self._running, strict=False):
            self._length[which] = self.mem.info(row).length
        return [_prompt(which, self._length[which]) for which in ended]

    def _prompts(self, changes: int, ahead: int = 0) -> list[Sequence[int]]:
        """Returns the prompts of the requests that come after the next `ahead` ones."""
        names = range(self._came + ahead, self._came + ahead + changes)
        if self.form.uses != "sessions":
            return [_prompt(name, self._tokens) for name in names]
        return [_prompt(which, self._length[which] + 1) for which in (name % len(self._sessions) for name in names)]

    def _change(self, changes: int, texts: list[Sequence[int]], prompts: list[Sequence[int]]) -> None:
        mem, rows, uses = self.mem, self._running[:changes], self.form.uses
        if rows and uses == "sessions":
            mem.end(rows, keep="cache", tokens=texts)
        elif rows and uses == "cache":
            mem.end(rows, keep="cache", lengths=[self.form.prompt] * changes, tokens=texts)
        elif rows:
            self._kept.extend(mem.end(rows, keep="handle", lengths=[self.form.prompt] * changes))
            mem.drop([self._kept.popleft() for _ in range(len(self._kept) - self._size)])
        if changes:
            named = enumerate(prompts, self._came)
            new = mem.admit([self._request(name, prompt) if uses else Request(name) for name, prompt in named])
            self._came += changes
            self._running = [*self._running[changes:], *new]
            if self.form.prefill:
                mem.settle(mem.plan(new, self.form.prompt))

    def _request(self, name: int, prompt: Sequence[int]) -> Request:
        if self.form.uses == "sessions":
            return Request(name, tokens=prompt, session=self._sessions[name % len(self._sessions)])
        fetch, end = self._fetches[name - self._came], self.form.prompt
        return Request(name, tokens=prompt, length=2 * end, snapshot_at=[end], fetch=fetch)

    def _read(self, changes: int) -> None:
        """Reads the newest requests' prompts and one token more, unless a timed step has done so.

        The prompts end at a boundary. Under Redirect, the step after it takes the snapshot.
        """
        newest = self._running[len(self._running) - changes :]
        for end in (self.form.prompt, self.form.prompt + 1):
            if rows := [row for row in newest if self.mem.info(row).length < end]:
                self.mem.settle(self.mem.plan(rows, [end - self.mem.info(row).length for row in rows]))

    def wrong(self) -> str:
        """Returns what is wrong; empty if nothing is.

        That is a lost state, more or fewer cached states than requests, or a decode at a boundary other than that of
        the prefill before it.
        """
        self.mem.device.check()
        # Redirect takes the snapshot of a prompt's end one step later, unless a mark asks for it
        due = self._changes if self.form.prefill and not self.form.uses and self.mem.tracking.reads_old_slot else 0
        if self._taken != due:
            return f"{self._taken} snapshots of {due}"
        report, cached = self.mem.audit(), self.mem.stats().prefix
        states = sum(each is not None for each in self._kept) + sum(info.states for info in self.mem.sessions.infos())
        states += (cached.states if cached else 0) - self._idle
        return str(report) if not report.clean else "" if states == self._size else f"{states} states of {self._size}"


def _prompt(name: int, length: int) -> Sequence[int]:
    return array("q", range(name << 20, (name << 20) + length))


class SglangOnline(SglangStates):
    """Steps of SGLang.

    Args:
        size: Number of requests.
        every: Tokens between two tracked states.
        lazy: Whether a request gets its second slot for tracked states only at a boundary.
        changes: Number of requests that end in a step, and of requests that come.
        form: One of `FORMS`. Its `uses` says where states go. With "cache", states and KV go to SGLang's tree. With "",
            the caller keeps the states, and there is no KV. With "sessions", sessions are SGLang's streaming ones,
            which hold row and slots between turns.
        states: False: requests have no states, and only the work that is not about states is done.
        adapted: Whether the pool is that of `memstate.integrations.sglang`, under SGLang's own scheduler code.

    Raises:
        ImportError: SGLang cannot be used.
    """

    _tree: Any = None
    _extend: Any = None  # batch of new requests
    _streams: Any = None  # SGLang's streaming sessions

    def __init__(
        self, size: int, every: int, lazy: bool, changes: int, form: str, states: bool = True, adapted: bool = False
    ) -> None:
        self._form = FORMS[form]
        idle = size if self._form.uses == "sessions" else 0
        self._sessions = [load().Session(0, str(i), streaming=True) for i in range(2 * idle)]
        super().__init__(size, every, lazy, due=0, adapted=adapted, states=states, idle=idle)
        self._changes, self._names, self._cache = changes, count(size), radix_peer.load()
        self._kv: dict[str, torch.Tensor] = {}
        if idle:
            self._streams = self._sgl.StreamingSession(self._batch.tree_cache)
            self._borrow(self._reqs)
        if self._form.uses == "cache":
            self._grow_tree()
        if self._form.prefill:
            self._extend = copy(self._batch)
        # the first step ends the requests of `super().__init__`, which have no prompt
        for changed in (size, size, *[changes] * FIRST):
            self._step(changed, lambda op, act: act())

    def _grow_tree(self) -> None:
        """Replaces the stand-in for the tree by SGLang's tree."""
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
        """See `HostSide`."""
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
        """Returns a new request. The next forward reads its whole prompt."""
        req = super()._request(name)
        req.session = self._sessions[name % len(self._sessions)] if self._sessions else None
        req.extend_end, req.full_untruncated_fill_ids = self._every, UNREAD
        req.prompt = _prompt(name, self._form.prompt)
        return req

    def _change(self, ended: list[Any], new: list[Any]) -> None:
        for req in ended:
            self._end(req)
        if ended and self._streams is None:
            self._evict()
        if ended:
            self._admit(new)

    def _end(self, req: Any) -> None:
        """Moves the tracked state of a request to the cache, and frees the rest. A session keeps both."""
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
                self._streams.try_match_prefix(self._cache.MatchPrefixParams(key=req.prompt, req=req))
        if self._extend is None:
            super()._admit(reqs)
        else:
            self._extend.reqs = reqs
            self._extend.prepare_for_extend()
        if self._streams is not None:
            self._borrow(reqs)

    def _borrow(self, reqs: list[Any]) -> None:
        """Moves rows and slots from requests to their sessions."""
        for req in reqs:
            req.kv.kv_allocated_len = 1
            self._streams.take(req)

    def _key(self, req: Any) -> Any:
        return self._cache.RadixKey(req.prompt)


def tasks(setting: Setting, there: bool) -> Iterator[Task]:
    """Yields the tasks of each form in `FORMS`, then those of SGLang over our pool.

    Args:
        setting: The setting of the benchmark.
        there: Whether SGLang can run.
    """
    cases = setting.sizes(CASES, TOY_CASES)
    for (name, form), (label, kind) in product(FORMS.items(), KINDS.items()):
        for size, changes in cases if form.beside else setting.sizes(ALONE, cases):
            if form.prefill and not changes:
                continue
            case = f"R={size} {label}, {changes} changed, online, {name}".removesuffix(", ")
            ours: Callable[[], HostSide] = partial(Online, setting, kind(form.every), size, changes, name)
            peers: dict[str, Callable[[], HostSide]] = {}
            if there and form.beside:
                peer = partial(SglangOnline, size, form.every, label == "lazy", changes, name)
                peers = {NAME: peer, BARE: partial(peer, states=False)}
            elif not form.beside and setting.compares(PLAIN):
                peers = {PLAIN: partial(Online, setting, kind(EVERY), size, changes)}
            yield task(setting, case, ours, peers)
    for label, (size, changes) in product(("ping-pong", "lazy"), cases) if there else ():
        peer = partial(SglangOnline, size, EVERY, label == "lazy", changes, "")
        case = f"R={size} {label}, {changes} changed, online, adapters"
        yield task(setting, case, partial(peer, adapted=True), {NAME: peer})
