"""Policies of callers: some offer a leaf or a state twice, or nothing; some keep only states of one kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages, Place
from memstate.prefix.tree import Node
from tests.prefix.test_prefix_refusals import plain, read_by
from tests.proof.stateful.script import Play, script
from tests.support import owners
from tests.support.serving import Server

Victims = Callable[[], Iterator[Node]]
T = [7 * n % 50 for n in range(60)]
OTHER = [*T[:8], 77, 78, 79, 80]
# how a policy changes what the least recently used would offer
OFFERS: dict[str, Callable[[Victims], Victims]] = {
    "all": lambda victims: victims,
    "twice": lambda victims: lambda: (node for node in victims() for _ in range(2)),
    "nothing": lambda victims: lambda: iter(()),
}
SIZES = {"strategy": "lazy", "prefix": True, "page_size": 4, "snapshots": 5, "rows": 3, "offers": tuple(OFFERS)}


def fill(play: Play, *texts: list[int]) -> None:
    """Makes the policies offer what the script says, and fills the cache with one state of each text."""
    for policy in (play.mem.prefix.settings.states, play.mem.prefix.settings.pages):
        policy.victims = OFFERS[play.offers](policy.victims)  # type: ignore[method-assign]
    for text in texts:
        play.turn(text, prompt=1)


@script(**SIZES, slots=4, most_states=(None, 2))
def test_states_that_a_policy_offers_twice_or_not_at_all_make_way_oldest_first(play: Play) -> None:
    prompts = [[100 * n + token for token in T[:8]] for n in range(3)]
    fill(play, *prompts)
    for prompt in prompts:
        play.match([*prompt, 1])
    rows = play.admit(None, None)
    play.reached(evicted_states=...)
    play.end(*rows, how="release")
    for prompt in prompts:
        play.match([*prompt, 1])


@script(**SIZES, pages=6)
def test_B17_a_leaf_that_a_policy_offers_twice_is_room_once(play: Play) -> None:
    fill(play, [190, 191, 192, 193])
    play.evict(states=1)
    (row,) = play.admit(T[:16])
    play.run(row, T[:16], publish=True)
    snaps = play.end(row, how="publish")  # this snapshot also holds the pages
    play.admit(range(150, 162))
    play.reached("OutOfPages", snapshots=len(snaps))


@script(**SIZES, pages=8)
def test_leaves_that_a_policy_does_not_offer_are_room(play: Play) -> None:
    fill(play, T[:16], OTHER)
    play.evict(pages=2)
    play.admit(None, length=32)
    play.reached(evicted_pages=...)


@script(**SIZES)
def test_a_leaf_whose_end_somebody_else_has_is_given_up_from_there_on(play: Play) -> None:
    fill(play, T[:16])
    play.evict(states=9)
    (leaf,) = [node for _, node in play.mem.prefix.tree.walk() if node.end == 4]
    with play.shared(leaf.pages[-1:]):
        play.evict(pages=3)


def test_leaves_whose_pages_others_have_too_hide_no_room_behind_them() -> None:
    """A page under two salts becomes free once both leaves are evicted.

    A trunk can be evicted even if the eviction of its branch has freed no page.
    """
    mem = plain(pages=ms.Pages(size=4, count=6, per_row=12))
    row = read_by(mem, T[:16], salt="a")
    mem.publish([row], keep="cache", tokens=[T[:16]])
    (handle,) = mem.end([row], keep="handle")
    assert handle
    (row,) = mem.admit([ms.Request("b", tokens=[*T[:16], 16], salt="b", resume=handle)])
    mem.drop([handle])
    mem.end([row], keep="cache", tokens=[T[:16]])
    assert mem.prefix and mem.prefix.tree.total_pages == 8 and mem.free_pages == 2
    assert [mem.prefix.can_evict(n) for n in (4, 5)] == [True, False]
    mem.end(mem.admit([ms.Request("c", length=24)]))
    assert mem.free_pages == 6


# Kinds of states


def server(backend: Backend, name: str, policy: Lru | None = None, **more: object) -> Server:
    prefix = ms.Prefix(states=policy or Lru(), pages=LruPages())
    return Server(backend, name, **({"every": 64, "slots": 14, "rows": 2, "prefix": prefix} | more))  # type: ignore[arg-type]


def boundaries(at: Server, row: ms.Row) -> list[int]:
    """Reads the prompt and one more token, publishing after each step; returns where the steps of the prompt ended."""
    prompt, seen = len(at.text[row]), []
    while at.mem.info(row).length < prompt:
        at.run([row])
        seen.append(at.mem.info(row).length)
        at.look()
    at.run([row])
    at.look()
    return seen


def test_states_have_the_kind_of_their_request_and_keep_it(backend: Backend) -> None:
    at = server(backend, "redirect")

    def kinds() -> dict[int, str | None]:
        return {node.end * at.page: node.kind for _, node in at.cache.tree.walk() if node.snapshot}

    at.turn(T[:9], kind="chat")
    assert kinds() == {8: "chat"}
    session = at.mem.sessions.open("talk")
    at.turn(T[:16], 5, session=session, kind="tool")
    at.mem._parts.room.give_way(owners.session(at.mem, session))
    assert kinds() == {8: "chat", 12: "tool", 20: "tool"}
    at.mem.submit()
    at.mem.recover()
    assert kinds() == {8: "chat", 12: "tool", 20: "tool"}


@pytest.mark.parametrize("kind", ["", "k" * 65, 3, b"chat", ["chat"]])
def test_kinds_that_are_no_short_words(backend: Backend, kind: Any) -> None:
    at = server(backend, "redirect")
    with pytest.raises(ms.InvalidArgument, match="expected None or a word of at most 64 characters"):
        at.mem.admit([ms.Request(0, kind=kind)])
    at.look()


class Picky(Lru):
    """A policy that keeps one kind of states."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.places = kind, list[Place]()

    def admits(self, place: Place) -> bool:
        self.places.append(place)
        return place.kind == self.kind


@pytest.mark.parametrize(
    ("kind", "stops", "states"),
    [("prompt", [20, 22], [20]), ("branch", [12, 22], [12]), ("every", [16, 22], [16]), ("named", [8, 22], [8]),
     ("boundary", [22], [32]), ("end", [22], [36])],
)  # fmt: skip
def test_only_what_the_policy_would_keep_is_asked_for_and_kept(
    kind: str, stops: list[int], states: list[int], backend: Backend
) -> None:
    policy = Picky(kind)
    at = server(backend, "redirect", policy, every=16)
    row = at.start(T[:13])
    at.run([row])
    at.publish([row])
    at.mem.end([row])
    at.cache.evict_states(9)
    policy.places.clear()
    row = at.start(T[:22], snapshot_at=[8])
    assert policy.places[:3] == [Place(3, 0, "branch"), Place(4, 0, "every"), Place(5, 0, "prompt")]
    assert boundaries(at, row) == ([*stops] if kind == "named" else sorted({8, *stops}))
    while at.mem.info(row).length < 36:
        at.run([row])
    at.end([row])
    at.look(idle=True)
    assert sorted(at.states()) == states
    assert {place.kind for place in policy.places[3:]} == {"named", "boundary", "end", kind}
    declined = at.mem.stats().prefix.declined
    assert declined == sum(place.kind != kind for place in policy.places[3:]) > 0
