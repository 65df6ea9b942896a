"""What broken copies of the prefix cache, of sessions and of the ledger showed that no other test looks at."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.engine.pool import StatePool
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Registers
from memstate.prefix.policies import Lru, LruPages, ReturnRate
from memstate.prefix.tree import Node, Tree
from memstate.requests.handles import Snapshot
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.journal import Change
from memstate.slots.registers import RegisterFile
from memstate.state.planes import Planes
from memstate.tokens import Prompt, encode
from tests.support.command_bench import require_unordered
from tests.support.scan import scan_registers
from tests.support.serving import Server

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


T = [7 * n % 50 for n in range(60)]
PAGE = 8  # bytes of a page of one token


def server(backend: Backend, **more: object) -> Server:
    prefix = ms.Prefix(states=Lru(), pages=LruPages())
    sizes = {"every": 64, "slots": 12, "rows": 2, "pages": 24}
    return Server(backend, whole=True, **(sizes | {"prefix": prefix} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["publish", "release", "retract", "cancel"])
def test_tokens_that_are_not_the_rows_are_refused(call: str, backend: Backend) -> None:
    """A state would be found under what it does not stand for."""
    at = server(backend)
    row = at.start(T[:9])
    at.run([row], publish=False)
    others = ([*T[:5], 99, *T[6:12]], T[4:9], [99, *T[:9]])
    step = at.step([row], run=False) if call == "cancel" else None
    before = (at.mem.stats(), at.mem.info(row).length)
    for wrong in others:
        with pytest.raises(ms.InvalidArgument, match="not those of its prompt"):
            if step:
                at.mem.cancel(step, keep="cache", tokens=[wrong])
            else:
                getattr(at.mem, call)([row], keep="cache", tokens=[wrong])
        assert (at.mem.stats(), at.mem.length(row)) == before and at.mem.rows.any_alive
    if step:
        at.mem.cancel(step, keep="cache", tokens=[T[:9]])
    else:
        at.end([row])  # all of them, and what came after
    assert at.mem.match(T[:9]).kv_length == 8


def test_fewer_tokens_than_a_state_stands_for_do_not_find_it(backend: Backend) -> None:
    at = server(backend, every=8)
    row = at.start(T[:17])
    at.prefill(row, publish=False)
    for n, length in ((12, 8), (17, 16)):
        (found,) = at.mem.publish([row], keep="cache", tokens=[T[:n]])
        assert found and found.length == at.mem.match(T[: n + 1]).length == length
    at.end([row])


def test_one_page_that_a_handle_has_too_is_no_room(backend: Backend) -> None:
    at = server(backend, pages=8)
    row = at.start(T[:8])
    at.prefill(row, publish=False)
    (handle,) = at.mem.publish([row])
    at.end([row])
    assert handle and list(handle.pages) == [page for _, node in at.cache.tree.walk() for page in node.pages]
    before = (replace(at.mem.stats(), short_of_pages=1), at.cache.tree.total_pages)
    with pytest.raises(ms.OutOfPages):
        at.mem.admit([ms.Request("b", length=28)])  # seven pages, six are free
    stats, total = before
    assert (at.mem.stats(), at.cache.tree.total_pages) == (replace(stats, short_of_pages=1), total)
    at.mem.drop([handle])
    (row,) = at.mem.admit([ms.Request("b", length=28)])


# -- policies, on nodes alone -----------------------------------------------------------------------


class Prompts:
    """Prompts that share nothing, each of so many pages, and a tree for them."""

    def __init__(self) -> None:
        self.tree, self.serial = Tree(PAGE), 0

    def __call__(self, pages: int, above: Node | None = None) -> Node:
        """A new node with a state that no policy knows of; above: what it goes on from."""
        self.serial += 1
        key = b"".join(step.key for step in reversed(list(above.path()))) if above else b""
        key += encode([1000 * self.serial + i for i in range(pages)])
        node, _ = self.tree.insert(Prompt(key, None), [])
        node.snapshot = Snapshot(self.serial, 0, node.end)
        return node


@pytest.mark.parametrize("returning", ["branch", "prompt"])
def test_return_rates_are_learned_by_kind(returning: str) -> None:
    """Of two kinds one always comes back and the other never does: 64 requests later, the other one goes first.

    Before, it is the older one.
    """
    policy, prompt = ReturnRate(), Prompts()
    never = "prompt" if returning == "branch" else "branch"

    def order() -> list[str]:
        pair = {prompt(9): returning, prompt(9): never}
        for node, kind in pair.items():
            policy.added(node, kind)
        return [pair[node] for node in policy.victims() if node in pair]

    assert order() == [returning, never]
    due: Node | None = None
    for _ in range(65):
        policy.asked(due or prompt.tree.root(None), 12)
        due = prompt(9)
        policy.added(due, returning)
        policy.added(prompt(9), never)
    assert order() == [never, returning]


def test_a_state_inherits_the_requests_of_those_given_up_below_it() -> None:
    """Two of the same length and age; what goes on from one of them was given up, and will be asked for there."""
    policy, prompt = ReturnRate(), Prompts()
    first, second = prompt(9), prompt(9)
    below = [prompt(2, first), prompt(2, first)]
    for node in (first, second, *below):
        policy.added(node, "prompt")
    assert policy.value(first.worth) == pytest.approx(policy.value(second.worth))
    for node in below:
        policy.dropped(node)
        node.snapshot = None
    assert list(policy.victims()) == [second, first]
    assert policy.value(first.worth) == pytest.approx(3 * policy.value(second.worth))
    for node in below:
        policy.added(node, "prompt")  # it serves itself again
    assert policy.value(first.worth) == pytest.approx(policy.value(second.worth))


# -- what is recorded -------------------------------------------------------------------------------


@pytest.mark.sample(interpreter=0)
def test_the_journal_names_every_change_of_owners(backend: Backend) -> None:
    at = server(backend, journal=50, direct_hits=False, overlap=False)
    row = at.start(T[:8])
    live = 3 * row.index
    at.prefill(row, publish=False)
    at.end([row])
    (kept,) = at.states().values()
    at.cache.evict_states(1)
    changes: list[Change] = at.mem.journal.changes
    assert [change.serial for change in changes] == list(range(1, len(changes) + 1))
    told = [(change.what, change.register, change.source, change.label) for change in changes]
    assert told == [("claim", live, 0, 0), ("move", kept.register, live, 8), ("release", kept.register, 0, 8)]
    assert changes[0].owner == changes[1].source_owner == f"row {row.index} (request 'of 8') live"
    assert str(kept.register) in changes[2].owner
    assert [change.submit for change in changes] == [1, 2, 2] and at.mem.stats().packets == 1  # the next packet
    for n in range(60):
        at.mem.end([at.start([n])])
    assert len(at.mem.journal.changes) == 50 and at.mem.journal.changes[-1].serial == 3 + 2 * 60


def test_the_order_of_record_is_kept_for_many_registers_too(backend: Backend) -> None:
    """More than a loop looks at: moves of what was moved, and copies of what is given up and taken again."""
    n, layout = 12, ms.StateLayout((ms.Plane("s", (4,), torch.float32),), layers=1)
    allocator, storage = SlotAllocator(3 * n, backend), Planes(layout, 3 * n, backend)
    file = RegisterFile(allocator, n, 3 * n)
    buffer, carry_out = CommandBuffer(file, StatePool(allocator, storage).run_data), backend.ownership

    def guarded(table: Registers, packet: Tensor) -> None:
        require_unordered(packet.tolist())
        carry_out(table, packet)

    backend.ownership = guarded  # type: ignore[attr-defined]
    one, two, three = ([*range(first, first + n)] for first in range(file.first_holder, file.first_holder + 3 * n, n))
    buffer.claim(one)
    buffer.submit()
    slots = file.table.slots[one].long()
    storage["s"][0, slots] = torch.arange(n, dtype=torch.float32, device=backend.device)[:, None]
    file.table.labels[one] = torch.arange(10, 10 + n, dtype=torch.int32, device=backend.device)
    file.labels[one] = np.arange(10, 10 + n)

    buffer.move(two, one)
    buffer.move(one, two[::-1])  # in the other order
    buffer.claim(three)
    buffer.copy(three, one)
    buffer.release(one)
    buffer.claim(two)
    buffer.zero(two)  # in the slots that were released
    buffer.submit()

    expected = np.arange(n)[::-1]
    assert scan_registers(file).problems == []
    assert file.table.labels[three].tolist() == file.labels[three].tolist() == (expected + 10).tolist()
    assert storage["s"][0, file.table.slots[three].long(), 0].tolist() == expected.tolist()
    assert not storage["s"][0, file.table.slots[two].long()].any()
    assert not file.held[one].any() and allocator.free == n
