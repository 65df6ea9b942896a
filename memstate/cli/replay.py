"""Replays a trace through the production prefix cache: its hit rate, and the host's time for a match and an insert.

One page is one block of the trace. Requests come in order, one at a time: match the filled blocks, take pages for the
rest, insert them with a state at their end and at the branch point, where the policy admits one; submit; release the
row. Slots, registers, pages and the command buffer are the library's; there are no planes, so no byte moves.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from memstate.checks import is_count
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import Prefix, PrefixCache
from memstate.prefix.lease import Insertion, Lease
from memstate.prefix.policies.foresight import Foresight, ForesightPages, Future
from memstate.prefix.policies.names import POLICIES
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.requests.tracking import NoTracking
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.audit import audit
from memstate.slots.commands import CommandBuffer
from memstate.slots.inspect import inspect
from memstate.slots.registers import RegisterFile
from memstate.tokens import BYTES, encode

ROW = 1
REGISTERS = range(REGISTERS_PER_ROW * ROW, REGISTERS_PER_ROW * (ROW + 1))
MOST = 2**24  # of states and of pages: the host keeps a number for each
CLAIRVOYANT = "clairvoyant"
NAMES = (*POLICIES, CLAIRVOYANT)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Replayed:
    """What a replay found, over the requests from fraction `start` of the trace on, when the cache is warm.

    Attributes:
        policy: Name of the policy.
        states: States that fit.
        pages: Pages that fit.
        start: Fraction of the requests that only warm the cache up.
        requests: Requests that count.
        block_hit_rate: Blocks up to the deepest state over all blocks asked for.
        ideal_hit_rate: The same with room for everything.
        whole_hit_rate: Over the whole trace, cold start included.
        us_per_match: Microseconds of the host, median.
        us_per_insert: Likewise; an insert records moves and evictions, the submit is apart.
        evicted_states: Over the whole trace.
        evicted_pages: Over the whole trace.
        leaked_slots: Over the whole trace.
        misses_by_reason: Blocks.
    """

    policy: str
    states: int
    pages: int
    start: float
    requests: int
    block_hit_rate: float
    ideal_hit_rate: float
    whole_hit_rate: float
    us_per_match: float
    us_per_insert: float
    evicted_states: int
    evicted_pages: int
    leaked_slots: int
    misses_by_reason: dict[str, int]


class Rig:
    """One row, a prefix cache and what it stands on."""

    def __init__(self, prefix: Prefix, states: int, pages: int, width: int) -> None:
        backend = Backend("reference", "cpu")
        self.allocator = SlotAllocator(states + REGISTERS_PER_ROW, backend)
        self.file = RegisterFile(self.allocator, ROW, 2 * states + 4, width)
        self.commands = CommandBuffer(self.file)
        self.pages = PageTable(pages, 1, self.commands)
        snapshots = Snapshots(self.commands, self.pages, Mirror(self.file, NoTracking(1), overlap=False))
        self.cache = PrefixCache(prefix, self.commands, self.pages, snapshots)

    def state(self, register: int, length: int) -> None:
        """Puts a state of so many blocks into a register of the row, as if it had been computed."""
        self.commands.claim([register])
        self.file.labels[register] = length
        self.commands.write(self.file.address("labels", np.array([register])), [length])

    def leaked(self) -> int:
        """Returns the slots that are leaked, doubly owned, or owned but free, once all is submitted."""
        self.commands.submit()
        named = {register: ("cached", f"register {register}") for register in self.cache.nodes}
        report = audit(inspect(self.file, named), named)
        return self.allocator.capacity - report.free - len(named) + len(report.double_owned) + len(report.lost)


def replay(
    requests: Sequence[TraceRequest], states: int, pages: int, policy: str, start: float = 0.0,
    progress: Progress | None = None,
) -> Replayed:  # fmt: skip
    """Replays a trace with room for so many states and pages.

    Args:
        requests: The trace.
        states: States that fit.
        pages: KV pages that fit.
        policy: One of `NAMES`.
        start: Fraction of the requests that only warm the cache up.
        progress: Called with requests done and to do.

    Raises:
        InvalidArgument: A value has no meaning, or a request alone does not fit.

    Syncs: no.
    """
    keys = _keys(requests)
    _require(keys, states, pages, policy, start)
    future = Future(keys)
    rig = Rig(_prefix(policy, states, future), states, pages, max(map(len, keys)))
    first = int(len(requests) * start)
    matches: list[float] = []
    inserts: list[float] = []
    misses: Counter[str] = Counter()
    hits, asked = [0, 0], [0, 0]  # while the cache warms up, and after
    for at, (request, ids) in enumerate(zip(requests, keys, strict=True)):
        future.now = at
        begin = time.perf_counter()
        key = encode(ids)
        match = rig.cache.match(key, None, len(ids))
        matched = time.perf_counter()
        lease = rig.cache.hold(match, None)
        rig.cache.use(lease)
        spent = _insert(rig, lease, key, len(ids))
        hits[at >= first] += match.length
        asked[at >= first] += len(request.hash_ids)
        if at >= first:
            matches.append(matched - begin)
            inserts.append(spent)
            misses.update(match.lost)
            misses["not_filled"] += len(request.hash_ids) - len(ids)
        if progress and (at % 64 == 0 or at + 1 == len(requests)):
            progress(at + 1, len(requests))
    stats = rig.cache.stats()
    return Replayed(
        policy, states, pages, start, len(requests) - first, hits[1] / max(1, asked[1]), ideal(requests, start),
        sum(hits) / max(1, sum(asked)), median(matches) * 1e6, median(inserts) * 1e6, stats.evicted_states,
        stats.evicted_pages, rig.leaked(), dict(misses),
    )  # fmt: skip


def _keys(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """The filled blocks of each request."""
    return [list(request.hash_ids[: request.input_length // BLOCK]) for request in requests]


def compare(
    requests: Sequence[TraceRequest], states: Sequence[int], pages: int, policies: Sequence[str], start: float = 0.0,
    progress: Progress | None = None,
) -> list[Replayed]:  # fmt: skip
    """Replays a trace once for every policy and number of states.

    Raises:
        InvalidArgument: As `replay`, before the first of them.
    """
    if not (states and policies and requests):
        raise InvalidArgument("nothing to replay: give at least one policy, one number of states and one request")
    runs = [(policy, size) for policy in policies for size in states]
    for policy, size in runs:
        _require(_keys(requests), size, pages, policy, start)
    replayed = []
    for at, (policy, size) in enumerate(runs):

        def done_so_far(done: int, of: int, before: int = at) -> None:
            if progress:
                progress(before * of + done, len(runs) * of)

        replayed.append(replay(requests, size, pages, policy, start, done_so_far))
    return replayed


def table(replayed: Sequence[Replayed]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns a row for each policy, a column for each number of states, then what one of them cost the host."""
    sizes = list(dict.fromkeys(one.states for one in replayed))
    rows = []
    for policy in dict.fromkeys(one.policy for one in replayed):
        mine = {one.states: one for one in replayed if one.policy == policy}
        last = mine[sizes[-1]]
        costs = [
            f"{last.us_per_match:.1f}",
            f"{last.us_per_insert:.1f}",
            str(max(one.leaked_slots for one in mine.values())),
        ]
        rows.append([policy, *(f"{mine[size].block_hit_rate:.3f}" for size in sizes), *costs])
    blank = [""] * 3
    rows.append(["room for everything", *(f"{replayed[0].ideal_hit_rate:.3f}" for _ in sizes), *blank])
    return ("policy", *map(str, sizes), "us a match", "us an insert", "leaked"), rows


def _insert(rig: Rig, lease: Lease, key: bytes, blocks: int) -> float:
    """Inserts a request's blocks with its states, and ends its row; returns the seconds that the inserts took."""
    cache, pages, row = rig.cache, rig.pages, np.array([ROW], np.int64)
    shared = cache.pages(lease.match)
    cache.evict_pages(blocks - len(shared) - pages.allocator.free)
    pages.start(row, [shared], [blocks - len(shared)])
    cache.unpin(lease)
    wanted = cache.boundaries(lease, blocks)
    if isinstance(cache.settings.states, Foresight):
        wanted = cache.settings.states.future.wanted()
    ids, spent = pages.of(ROW), 0.0
    for first in range(0, max(len(wanted), 1), len(REGISTERS)):
        insertions = []
        for register, length in zip(REGISTERS, wanted[first : first + len(REGISTERS)], strict=False):
            rig.state(register, length)
            insertions.append(Insertion(lease, key[: length * BYTES], ids[:length], register, length, False))
        if first + len(REGISTERS) >= len(wanted) and (not insertions or insertions[-1].length < blocks):
            insertions.append(Insertion(lease, key, ids, None, 0, True))
        rig.commands.submit()  # the states are computed by then
        begin = time.perf_counter()
        cache.insert(insertions)
        spent += time.perf_counter() - begin
        rig.commands.release(REGISTERS)
    pages.end(row)
    cache.release(lease)
    rig.commands.submit()
    return spent


def ideal(requests: Sequence[TraceRequest], start: float = 0.0) -> float:
    """Returns the block hit rate with room for everything.

    A block is a hit if an earlier request had it, as far as all blocks before it are hits.
    """
    seen: set[int] = set()
    hits = asked = 0
    first = int(len(requests) * start)
    for at, request in enumerate(requests):
        ids = request.hash_ids[: request.input_length // BLOCK]
        known = next((n for n, block in enumerate(ids) if block not in seen), len(ids))
        if at >= first:
            hits += known
            asked += len(request.hash_ids)
        seen.update(ids)
    return hits / max(1, asked)


def _prefix(policy: str, states: int, future: Future) -> Prefix:
    if policy == CLAIRVOYANT:
        return Prefix(Foresight(future), ForesightPages(future), most_states=states)
    of_states, of_pages = POLICIES[policy]
    return Prefix(of_states(), of_pages and of_pages(), most_states=states)


def _require(keys: Sequence[Sequence[int]], states: int, pages: int, policy: str, start: float) -> None:
    if policy not in NAMES:
        raise InvalidArgument(f"policy {policy!r}: expected {', '.join(NAMES)}")
    if not (is_count(states) and is_count(pages) and 1 <= states <= MOST and 1 <= pages <= MOST):
        raise InvalidArgument(f"states {states!r}, pages {pages!r}: expected at least 1 of each, at most {MOST}")
    if not keys:
        raise InvalidArgument("nothing to replay: no request")
    if not 0.0 <= start < 1.0:
        raise InvalidArgument(f"from {start}: expected a fraction from 0 to below 1")
    longest = max(map(len, keys))
    if longest > pages:
        raise InvalidArgument(f"pages {pages}: the longest request has {longest} blocks")
