"""Runs a test server whose prefix cache has host memory, and optionally a store, below it, and checks all bytes.

`look` also checks host memory: each record is free, cached or on its way; nothing stays pinned; each cached state and
KV page has the bytes that the tokens of its key give. KV depends on all tokens before it, so the KV of the same tokens
after another prefix fails the check. Before each step, the server checks the KV that the step reads.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.stats import TierStats
from memstate.tiers import Prefetch, TierManager, Tiers
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.keys import Keys, fingerprint
from memstate.tokens import SaltedTokens, encode
from tests.support import owners
from tests.support.planes import History, fold
from tests.support.serving import PAGE, STALE, Server
from tests.support.tiered_late import Late, wait_for_staging
from tests.support.virtual import ByHand

KV = StateLayout((Plane("k", (PAGE,), torch.int64), Plane("v", (PAGE, 3), torch.int16)), layers=2)
HOST_STATES, HOST_PAGES = 8, 40
MOVED = ("states_out", "states_in", "pages_out", "pages_in")


def whole(n: int, pages: int = 2) -> list[int]:
    """Returns prompt number `n`, of whole pages. No two prompts share a prefix. A `Tiered` keeps a state at the end."""
    return [100 * n + i for i in range(PAGE * pages)]


class Tiered(Server):
    """A server with tiers that checks all KV before a step reads it. tiers: settings that replace the usual ones.

    `every` is larger than most prompts of tests, so no state is kept at a multiple of it. A prompt of whole pages keeps
    one state, at its end (`Whole`).
    """

    def __init__(
        self, backend: Backend, name: str = "redirect", *, tiers: dict[str, object] | None = None, pages: int = 60,
        every: int = 64, prefix: ms.Prefix | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.pages_kv = Planes(KV, pages, Backend(backend.name, backend.device)) if pages else None
        usual = {"model": "toy", "host_slots": HOST_STATES, "kv": self.pages_kv, "reserve": 0.0}
        usual |= {"host_pages": HOST_PAGES} if pages else {}
        settled = usual | {"prefetch": Prefetch(threshold=PAGE, limit=None, stop="wait_complete")} | (tiers or {})
        super().__init__(
            backend, name, whole=True, pages=pages, every=every, prefix=prefix or ms.Prefix(Lru(), LruPages()),
            tiers=Tiers(**settled), **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        if backend.device.type == "cuda":
            wait_for_staging(self.mem)
        if self.pages_kv is not None:
            self.kv = self.pages_kv["k"][0]  # type: ignore[assignment]
            for plane in self.pages_kv.values():
                plane[:, 1:] = STALE
        self.known: dict[bytes, History] = {}  # key -> all tokens of its prefix
        mark = fingerprint("toy", self.mem.layout, KV if pages else None, self.page, 0, 1)
        self._keys = Keys(mark, self.page)

    @property
    def below(self) -> TierManager:
        assert self.mem.tiers is not None
        return self.mem.tiers

    @property
    def caches(self) -> list[RecordCache]:
        return [each.cache for each in self.below.host.sets]

    def note(self, tokens: Sequence[int], salt: object = None) -> None:
        """Remembers for each key of a prompt the tokens that it stands for."""
        for at, key in enumerate(self._keys.of(SaltedTokens(encode(tokens), salt)), 1):
            assert self.known.setdefault(key, tuple(tokens[: at * self.page])) == tuple(tokens[: at * self.page])

    def admit(self, *requests: ms.Request) -> list[ms.Row]:
        for request in requests:
            self.note(request.tokens, request.salt)  # type: ignore[arg-type]
            self.salts[request.id] = request.salt
        return super().admit(*requests)

    @property
    def tiers(self) -> TierStats:
        return self.mem.stats().tiers

    @property
    def salts(self) -> dict[object, object]:
        """Request id -> salt. The prompt and the answer of a request are cached under its salt."""
        return self.__dict__.setdefault("_salts", {})

    def _note_rows(self, rows: Iterable[ms.Row]) -> None:
        for row in rows:
            self.note(self.text[row], self.salts.get(owners.table(self.mem).ids[row.index]))

    def publish(self, rows: Sequence[ms.Row]) -> list[ms.Snapshot | None]:
        self._note_rows(rows)
        return super().publish(rows)

    def end(self, rows: Sequence[ms.Row]) -> None:
        self._note_rows(rows)
        super().end(rows)

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        """Checks the KV of each row up to the start of the step, writes the KV of its tokens, then folds the states."""
        table, by_number = self.mem.device.page_table.tolist(), {row.index: row for row in self.mem.rows}
        for i, number in enumerate(step.numbers.tolist() if self.pages_kv is not None else ()):
            if number and self.pages_kv is not None:
                text, before, after = self.text[by_number[number]], int(step.before[i]), int(step.after[i])
                pages = table[number][: -(-after // self.page)]
                here = self.pages_kv["k"][:, pages], self.pages_kv["v"][:, pages]
                for got, expected in zip(here, kv_of(text[:after], self.page), strict=True):
                    flat, expected = got.flatten(1, 2).cpu(), expected.flatten(1, 2)
                    assert torch.equal(flat[:, :before], expected[:, :before]), (
                        f"KV of row {number} is not its prompt's"
                    )
                for name, expected in zip("kv", kv_of(text[:after], self.page), strict=True):
                    for at in range(before, after):
                        self.pages_kv[name][:, pages[at // self.page], at % self.page] = expected[
                            :, at // self.page, at % self.page
                        ].to(self.kv.device)  # type: ignore[attr-defined]
        super()._forward(step, fed)

    # -- scenarios ------------------------------------------------------------------------------------

    def cache_prompts(self, *prompts: Sequence[int], poll: bool = True, **more: object) -> None:
        """Computes prompts and leaves their states and KV in the prefix cache of the device."""
        for tokens in prompts:
            row = self.start(tokens, **more)
            self.prefill(row, publish=False)
            self.end([row])
            if poll:
                self.mem.poll()

    def give_up(self, states: int = 99, pages: int = 0) -> None:
        """Evicts `states` states from the cache, then `pages` KV pages, and overwrites all free memory with rubbish."""
        self.cache.evict_states(states)
        self.cache.evict_pages(pages)
        self.mem.poll()
        self.mem.submit()  # the server fills slots that are free now with rubbish
        free = [page for page, users in enumerate(owners.kv_pages(self.mem).holders) if page and not users]
        for plane in self.pages_kv.values() if self.pages_kv is not None else ():
            plane[:, free] = STALE

    def work(self) -> None:
        """Runs all jobs that wait in the executor of the test (`ByHand`), and polls."""
        jobs = self.below.settings.executor
        for job in list(jobs.jobs) if isinstance(jobs, ByHand) else ():
            if not job.future.done() and job.begin():
                job.finish()
        self.mem.poll()

    def drain(self) -> None:
        """Runs jobs until no record waits for writeback to the store."""
        while self.below.writeback and self.below.writeback.pending:
            self.work()

    def hit(self, length: int, tokens: Sequence[int], **more: object) -> ms.Row:
        """Admits a prompt, and checks that it starts from `length` tokens. Returns its row."""
        row = self.start(tokens, **more)
        assert self.mem.info(row).length == length
        return row

    def pass_down(self, *prompts: Sequence[int], **more: object) -> None:
        """Computes prompts, then evicts all their states and pages from the device."""
        self.cache_prompts(*prompts, **more)  # type: ignore[arg-type]
        self.give_up(pages=60)

    def fetch(self, tokens: Sequence[int], salt: object = None) -> ms.tiers.Fetch:
        """Prefetches a prompt, polls until the prefetch is done, and returns it."""
        self.note(tokens, salt)
        fetch = self.mem.prefetch(tokens, salt)
        while not fetch.done:
            self.mem.poll()
        return fetch

    def keeps(self) -> set[History]:
        """Returns the prefixes whose states are in host memory."""
        return {self.known[entry.key] for entry in self.below.host.states.entries()}

    @property
    def moved(self) -> tuple[int, int, int, int]:
        """Counts of copies: states to host memory, states from it, pages to it, pages from it."""
        return tuple(getattr(self.tiers, name) for name in MOVED)  # type: ignore[return-value]

    # -- checks of host memory ------------------------------------------------------------------------

    def look(self, idle: bool = False) -> None:
        super().look(idle)
        self.look_below(idle)

    def look_below(self, idle: bool = False) -> None:
        """Checks host memory. idle: no request runs."""
        assert self.tiers.leaked_records == 0
        for cache, bytes_of in zip(self.caches, (state_bytes, page_bytes), strict=False):
            pool, entries = cache.pool, list(cache.entries())
            rows = [entry.record for entry in entries]
            assert len(set(rows)) == len(rows) and not set(rows) & set(pool._free)
            for entry in entries:
                assert entry.length == len(self.known[entry.key]) and cache.get(entry.key) is entry
                if not self.flying(entry, cache):
                    expected = bytes_of(self.known[entry.key])
                    got = pool.buffer(entry.record)[pool.nbytes - len(expected) :].tobytes()  # the body
                    assert got == expected, f"a record of {entry.length} tokens is not theirs"
            assert cache._pinned == sum(entry.pins > 0 for entry in entries)
            if idle and self.landed:
                assert cache.evictable == len(entries) and not pool._written
                assert pool.free + len(entries) == pool.records

    def flying(self, entry: CachedRecord, cache: RecordCache) -> bool:
        """Whether bytes are on their way to a record. Without delayed transfers (`Late`) they never are."""
        mine = [each for each in Late.made if each.pool is cache.pool]
        return any(
            entry.record in of and ticket in each.flying("out") for each in mine for _, of, ticket in each.tickets
        )

    @property
    def landed(self) -> bool:
        """Whether no load, save, prefetch or writeback is under way."""
        writeback, prefetcher, host = self.below.writeback, self.below.prefetcher, self.below.host
        reading = prefetcher is not None and not prefetcher.idle  # a thread may still read for an ended prefetch
        return not (host.loads or host.backups or reading or (writeback and writeback.pending))

    def empty(self) -> None:
        """Waits for all transfers, clears both caches, and checks that each slot, page and record is free."""
        self.mem.submit()
        self.mem.poll()
        self.below.settle()
        self.mem.poll()
        self.drain()
        super().empty()
        self.below.clear()
        assert [len(cache) for cache in self.caches] == [0] * len(self.caches)
        assert all(cache.pool.free == cache.pool.records for cache in self.caches)
        self.look(idle=True)


# -- expected bytes, computed without the library's layouts -------------------------------------------


def kv_of(text: Sequence[int], page: int) -> tuple[Tensor, Tensor]:
    """Returns k and v of a text, `layer page token ..`. The rest of the last page is zeros."""
    folds = [fold(tuple(text[: at + 1])) for at in range(len(text))]
    pad = -len(text) % page
    tokens, values = torch.tensor([*text, *[0] * pad], device="cpu"), torch.tensor([*folds, *[0] * pad], device="cpu")
    v = torch.stack([values + i for i in range(3)], -1)
    k = torch.stack([tokens, values]).view(2, -1, page)
    return k, torch.stack([v, v * 3]).to(torch.int16).view(2, -1, page, 3)


def padded(blocks: Iterable[Tensor]) -> bytes:
    """Returns the bytes of all blocks in order. Each block is padded with zeros to a multiple of 16 bytes."""
    parts = [block.contiguous().numpy().tobytes() for block in blocks]
    return b"".join(part + bytes(-len(part) % 16) for part in parts)


def state_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the state after these tokens."""
    long, short = (
        fold(tokens) * torch.arange(1, 7, device="cpu").view(2, 3),
        fold(tokens) * torch.arange(1, 11, device="cpu").view(2, 5),
    )
    return padded(block for layer in range(2) for block in (long[layer], short[layer].to(torch.int32)))


def page_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the last KV page of these tokens."""
    k, v = kv_of(tokens, PAGE)
    return padded(block for layer in range(2) for block in (k[layer, -1], v[layer, -1]))


def below(
    backend: Backend, name: str = "redirect", *prompts: Sequence[int], states: int = 99, kv_stays: bool = False,
    **more: object,
) -> Tiered:  # fmt: skip
    """Returns a server that has saved prompts to host memory, then evicted `states` states and all KV from the device.

    kv_stays: whether the device keeps the KV.
    """
    at = Tiered(backend, name, **({"slots": 14} | more))  # type: ignore[arg-type]
    at.cache_prompts(*(prompts or (whole(1),)))
    settle(at)
    at.give_up(states, 0 if kv_stays else 99)
    at.look(idle=True)
    return at


def settle(at: Tiered) -> None:
    """Submits all recorded changes, and waits until all transfers between device and host memory have arrived."""
    at.mem.submit()
    at.mem.poll()
    at.below.settle()
    at.mem.poll()


T = [7 * i % 1000 for i in range(200)]
