"""A refusal costs nobody anything: what is called room can be had, and where it cannot, nothing has gone."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.cli.policies import POLICIES
from memstate.prefix.policies import Lru, LruPages, ReturnRate
from memstate.prefix.tree import Node
from tests.support import owners
from tests.support.build import Whole, build
from tests.support.held import held

LAYOUT = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), 1)
BACK_PRESSURE = (ms.OutOfSlots, ms.OutOfPages, ms.OutOfRows)
PAGES, SIZE = 12, 4
T = list(range(16))


def manager(prefix: ms.Prefix, **settings: Any) -> ms.StateManager:
    sizes = {"slots": 8, "max_requests": 3, "pages": PAGES, "page_size": SIZE, "pages_per_row": PAGES, "snapshots": 5}
    given = sizes | {"tracking": ms.LazyPingPong(4), "prefix": prefix, "backend": "reference"} | settings
    return build(LAYOUT, **given)  # type: ignore[arg-type]


def prefill(mem: ms.StateManager, row: ms.Row, tokens: list[int]) -> None:
    """To the end of the tokens, or as far as there are pages."""
    while (done := mem.info(row).length) < len(tokens):
        end = min(mem.info(row).next_boundary, len(tokens))
        mem.extend([row], [end])
        mem.settle(mem.plan([row], [end - done]))


def turn(mem: ms.StateManager, tokens: list[int], session: ms.Session | None = None) -> None:
    (row,) = mem.admit([ms.Request("turn", tokens=tokens, session=session)])
    prefill(mem, row, tokens)
    mem.publish([row], keep="cache", tokens=[tokens])
    mem.end([row], keep="cache", tokens=[tokens])


def nobody_is_on_what_is_gone(mem: ms.StateManager) -> bool:
    """No lease keeps a node without KV: what is evicted is nobody's."""
    assert mem.prefix
    return not any(node.leases for _, node in mem.prefix.tree.walk() if node.ghost)


def room(mem: ms.StateManager) -> int:
    """The most pages that the cache says it could free."""
    assert mem.prefix
    return max((n for n in range(1, PAGES + 1) if mem.prefix.can_evict(n)), default=0)


class Twice(LruPages):
    """Offers each leaf twice, as a policy may that looks at some again."""

    def victims(self) -> Iterator[Node]:
        for node in super().victims():
            yield node
            yield node


def test_B17_a_leaf_that_a_policy_offers_twice_is_room_once() -> None:
    mem = manager(ms.Prefix(Lru(), Twice()), pages=6)
    turn(mem, [90, 91, 92, 93])
    assert mem.prefix and mem.prefix.evict_states(1) == 1
    (row,) = mem.admit([ms.Request("a", tokens=T)])
    prefill(mem, row, T)
    mem.publish([row], keep="cache", tokens=[T])
    assert mem.end([row], keep="handle") != [None]  # this snapshot has the pages too
    before = held(mem)
    assert (mem.free_pages, room(mem)) == (1, 1)  # a request wants three
    with pytest.raises(ms.OutOfPages):
        mem.admit([ms.Request("other", tokens=range(50, 62))])
    assert held(mem) == before and nobody_is_on_what_is_gone(mem)


def test_leaves_whose_pages_others_have_too_hide_no_room_behind_them() -> None:
    """A page under two salts is free once both are gone, and the trunk once a branch is that frees nothing."""
    mem = manager(ms.Prefix(states=ReturnRate()), pages=6)
    (row,) = mem.admit([ms.Request("a", tokens=T, salt="a")])
    prefill(mem, row, T)
    mem.publish([row], keep="cache", tokens=[T])
    (handle,) = mem.end([row], keep="handle")
    assert handle
    (row,) = mem.admit([ms.Request("b", tokens=[*T, 16], salt="b", resume=handle)])
    mem.drop([handle])
    mem.end([row], keep="cache", tokens=[T])
    assert mem.prefix and mem.prefix.tree.total_pages == 8 and mem.free_pages == 2
    assert room(mem) == 4
    mem.end(mem.admit([ms.Request("c", length=6 * SIZE)]))
    assert mem.free_pages == 6


class Shy(LruPages):
    """Offers nothing."""

    def victims(self) -> Iterator[Node]:
        return iter(())


def test_leaves_that_a_policy_does_not_offer_are_room() -> None:
    mem = manager(ms.Prefix(states=Lru(), pages=Shy()), pages=8)
    turn(mem, T)
    turn(mem, [*T[:8], 77, 78, 79, 80])
    assert mem.prefix and mem.free_pages == 3 and room(mem) == 5
    assert mem.prefix.evict_pages(2) == 2 and mem.prefix.tree.total_pages == 3  # children before what leads to them
    mem.end(mem.admit([ms.Request("a", length=8 * SIZE)]))


@pytest.mark.parametrize("pages", [LruPages, Shy])
def test_a_leaf_whose_end_somebody_else_has_is_given_up_from_there_on(pages: type[LruPages]) -> None:
    mem = manager(ms.Prefix(states=Lru(), pages=pages(), placement=Whole(None)), ends=True)
    turn(mem, T)
    assert mem.prefix and mem.prefix.evict_states(8) == 1
    ((_, leaf),) = mem.prefix.tree.walk()
    last = leaf.pages[-1:]
    owners.kv_pages(mem).share(last)
    assert room(mem) == mem.prefix.evict_pages(3) == 3
    owners.kv_pages(mem).release(last)
    assert mem.free_pages == PAGES


class Walk:
    """Requests and turns at random in little room; refusals are looked at from all sides."""

    def __init__(self, mem: ms.StateManager, choose: random.Random) -> None:
        self.mem, self.choose = mem, choose
        self.texts = [[choose.randrange(3) for _ in range(40)] for _ in range(2)]
        self.said: dict[ms.Session, list[int]] = {mem.sessions.open(at): [] for at in range(2)}
        self.rows: dict[ms.Row, tuple[ms.Session | None, list[int]]] = {}
        self.handles: list[ms.Snapshot] = []
        self.refused = 0

    def step(self) -> None:
        """One operation, which changes nothing if it is refused."""
        names = ["admit"] * 4 + (["run"] * 5 + ["end"] * 2 + ["publish", "abort", "handle", "fork"]) * bool(self.rows)
        name = self.choose.choice([*names, "drop", "evict"])
        self.before = held(self.mem)
        try:
            getattr(self, name)()
        except BACK_PRESSURE:
            self.refused += 1
            assert held(self.mem) == self.before, name
        assert nobody_is_on_what_is_gone(self.mem), name

    def admit(self) -> None:
        idle = [session for session in self.said if session not in [of for of, _ in self.rows.values()]]
        session = self.choose.choice([*idle, None])
        text = [*self.said[session], 1] if session and self.choose.random() < 0.7 else []
        text = text if len(text) > 1 else self.choose.choice(self.texts)[: self.choose.randint(3, 40)]
        resume = self.choose.choice([*self.handles, None]) if session is None else None
        salt = self.choose.choice([None, None, 1])
        request = ms.Request("walk", tokens=text, session=session, salt=salt, resume=resume)
        more = [ms.Request("more", tokens=self.texts[0][:6])] * (self.choose.random() < 0.2)
        rows = self.mem.admit([request, *more])
        self.rows |= zip(rows, [(session, text), (None, self.texts[0])], strict=False)

    def any_row(self) -> ms.Row:
        return self.choose.choice(list(self.rows))

    def run(self) -> None:
        row = self.any_row()
        end = min(self.mem.info(row).next_boundary, max(len(self.rows[row][1]), self.mem.info(row).length + 1), 40)
        if end > self.mem.info(row).length:
            self.mem.extend([row], [end])
            self.before = held(self.mem)
            self.mem.settle(self.mem.plan([row], [end - self.mem.info(row).length]))

    def known(self, row: ms.Row) -> list[int]:
        text = self.rows[row][1]
        return [*text, *[7] * 40][: max(self.mem.info(row).confirmed, 1)]

    def publish(self) -> None:
        row = self.any_row()
        self.mem.publish([row], keep="cache", tokens=[self.known(row)])

    def end(self) -> None:
        row = self.any_row()
        session, said = self.rows[row][0], self.known(row)
        self.mem.end([row], keep="cache", tokens=[said])
        del self.rows[row]
        if session:
            self.said[session] = said

    def handle(self) -> None:
        row = self.any_row()
        if self.rows[row][0] is None:
            self.handles += [handle for handle in self.mem.end([row], keep="handle") if handle]
            del self.rows[row]

    def abort(self) -> None:
        row = self.any_row()
        self.mem.end([row])
        del self.rows[row]

    def fork(self) -> None:
        row = self.any_row()
        if self.mem.info(row).confirmed and owners.free(self.mem):
            for other in self.mem.fork(row, ["fork"]).rows:
                self.rows[other] = None, self.rows[row][1]

    def drop(self) -> None:
        if self.handles:
            self.mem.drop([self.handles.pop()])

    def evict(self) -> None:
        """What is called room is there, and no more than that."""
        assert self.mem.prefix
        if self.choose.random() < 0.3:
            most = room(self.mem)
            assert self.mem.prefix.evict_pages(self.choose.choice([most, PAGES + 1])) == most
        else:
            self.mem.prefix.evict_states(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", [*POLICIES, "shy"])
def test_B17_refusals_at_random_change_nothing(policy: str, generator: torch.Generator) -> None:
    refused = 0
    for seed in torch.randint(2**31, (30,), generator=generator).tolist():
        states, pages = POLICIES.get(policy, (Lru, Shy))
        prefix = ms.Prefix(states=states(), pages=pages() if pages else None)
        walk = Walk(manager(prefix), random.Random(seed))
        for _ in range(80):
            walk.step()
        refused += walk.refused
        walk.mem.end(list(walk.rows))
        walk.mem.drop(walk.handles)
        for session in walk.said:
            walk.mem.sessions.close(session)
        walk.mem.prefix.clear()
        walk.mem.audit().raise_if_leaking()
        assert (walk.mem.free_slots, walk.mem.free_pages) == (8, PAGES)
    assert refused > 30
