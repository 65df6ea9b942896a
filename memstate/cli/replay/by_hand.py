"""Replays a trace through the prefix cache alone, with states put where an ideal engine would have them.

One page is one block of the trace. Requests come in order, one at a time: match the filled blocks, take pages for the
rest, insert them with a state at their end and at the branch point, where the policy admits one; submit; release the
row. Answers play no part. Slots, registers, pages and the command buffer are the library's; there are no planes.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from memstate.cli.policies import prefix_of
from memstate.cli.replay.foresight import Foresight, ForesightPages, Future
from memstate.cli.replay.report import Replayed, ideal
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import Prefix, PrefixCache
from memstate.prefix.lease import Lease
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.slots.allocator import SlotAllocator
from memstate.slots.audit import audit
from memstate.slots.commands import CommandBuffer
from memstate.slots.inspect import inspect
from memstate.slots.registers import RegisterFile
from memstate.tokens import Prompt, encode

ROW = 1
REGISTERS = [*range(REGISTERS_PER_ROW * ROW, REGISTERS_PER_ROW * (ROW + 1))]
Progress = Callable[[int, int], None]


class Rig:
    """One row, a prefix cache and what it stands on."""

    def __init__(self, prefix: Prefix, states: int, pages: int, width: int) -> None:
        backend = Backend("reference", "cpu")
        self.allocator = SlotAllocator(states + REGISTERS_PER_ROW, backend)
        self.file = RegisterFile(self.allocator, ROW, 2 * states + 4, width)
        self.commands = CommandBuffer(self.file)
        self.pages = PageTable(pages, 1, self.commands)
        self._holdings = Holdings(self.commands, self.pages.allocator)
        self.cache = PrefixCache(prefix, self.commands, self.pages, self._holdings)

    def read(self, lease: Lease) -> None:
        """Notes that the row has read the state of its lease."""
        if lease.match.snapshot:
            self._holdings.end_read(lease.match.snapshot.register)

    def state(self, register: int, length: int) -> None:
        """Puts a state of so many blocks into a register of the row, as if it had been computed."""
        self.commands.claim([register])
        self.file.labels[register] = length
        self.commands.write(self.file.address("labels", [register]), [length])

    def leaked(self) -> int:
        """Returns the slots that are leaked, doubly owned, or owned but free, once all is submitted."""
        self.commands.submit()
        registers = [node.snapshot.register for node in self.cache.stated() if node.snapshot]
        named = {register: ("cached", f"register {register}") for register in registers}
        report = audit(inspect(self.file, named), named)
        return self.allocator.capacity - report.free - len(named) + len(report.double_owned) + len(report.lost)


def replay(
    requests: Sequence[TraceRequest], states: int, pages: int, policy: str | None, start: float = 0.0,
    progress: Progress | None = None,
) -> Replayed:  # fmt: skip
    """Replays a trace with room for so many states and pages.

    Args:
        requests: The trace; each fits the pages.
        states: States that fit.
        pages: KV pages that fit.
        policy: A name of `memstate.cli.policies.POLICIES`. None: the clairvoyant bound.
        start: Fraction of the requests that only warm the cache up.
        progress: Called with requests done and to do.

    Syncs: no.
    """
    keys = [list(request.hash_ids[: request.input_length // BLOCK]) for request in requests]
    future = Future(keys)
    if policy is None:
        prefix = Prefix(Foresight(future), ForesightPages(future), most_states=states)
    else:
        prefix = prefix_of(policy, states)
    rig = Rig(prefix, states, pages, max(map(len, keys)))
    first = int(len(requests) * start)
    matches: list[float] = []
    inserts: list[float] = []
    misses: Counter[str] = Counter()
    hits, asked = [0, 0], [0, 0]  # while the cache warms up, and after
    for at, (request, ids) in enumerate(zip(requests, keys, strict=True)):
        future.now = at
        begin = time.perf_counter()
        prompt = Prompt(encode(ids), None)
        match = rig.cache.match(prompt, len(ids))
        matched = time.perf_counter()
        lease = rig.cache.hold(match, prompt)
        rig.cache.use(lease)
        spent = _insert(rig, lease, prompt, len(ids))
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
        policy=policy or "clairvoyant", placement="by-hand", states=states, pages=pages, start=start,
        requests=len(requests) - first, block_hit_rate=hits[1] / max(1, asked[1]),
        ideal_hit_rate=ideal(requests, start), whole_hit_rate=sum(hits) / max(1, sum(asked)),
        us_per_match=median(matches) * 1e6,
        us_per_insert=median(inserts) * 1e6, evicted_states=stats.evicted_states, evicted_pages=stats.evicted_pages,
        leaked_slots=rig.leaked(), misses_by_reason=dict(misses),
    )  # fmt: skip


def _insert(rig: Rig, lease: Lease, prompt: Prompt, blocks: int) -> float:
    """Inserts a request's blocks with its states, and ends its row; returns the seconds that the inserts took."""
    cache, pages, row = rig.cache, rig.pages, [ROW]
    shared = cache.tree.pages_to(lease.node)
    cache.evict_pages(blocks - len(shared) - pages.allocator.free)
    pages.start(row, [shared], [blocks - len(shared)])
    rig.read(lease)
    kinds = dict(cache.marks(replace(lease.match, tokens=blocks + 1)))  # a part of a block follows
    wanted = list(kinds)
    if isinstance(cache.settings.states, Foresight):
        wanted = cache.settings.states.future.wanted()
    ids, spent = pages.of(ROW), 0.0
    for first in range(0, max(len(wanted), 1), len(REGISTERS)):
        chosen = wanted[first : first + len(REGISTERS)]
        states = [(of, at, kinds.get(at, "boundary")) for of, at in zip(REGISTERS, chosen, strict=False)]
        for register, length, _ in states:
            rig.state(register, length)
        end = blocks if first + len(REGISTERS) >= len(wanted) else chosen[-1]
        rig.commands.submit()  # the states are computed by then
        begin = time.perf_counter()
        cache.file([(lease, prompt.head(end), ids[:end], states)])
        spent += time.perf_counter() - begin
        rig.commands.release(REGISTERS)
    pages.end(row)
    cache.release(lease.node)
    rig.commands.submit()
    return spent
