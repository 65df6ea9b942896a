"""Policies of callers: some offer a leaf or a state twice, or nothing; some keep only states of one kind."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, Place
from memstate.prefix.tree import Node
from tests.prefix.test_prefix_refusals import plain, read_by
from tests.proof.stateful.script import Play, script

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
    play.reached("evicted_states")
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
    play.reached("evicted_pages")


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

KINDS = {"strategy": "redirect", "prefix": True, "every": 64, "page_size": 4}


@pytest.mark.script
def test_states_have_the_kind_of_their_request_and_keep_it(backend: Backend) -> None:
    play = Play(backend, **KINDS)
    kinds = lambda: {node.end * 4: node.kind for node in play.mem.prefix.stated()}  # noqa: E731
    play.turn(T[:9], kind="chat")
    assert kinds() == {8: "chat"}
    (talk,) = play.open("talk")
    play.turn(T[:20], talk, prompt=16, kind="tool")
    play.rest(talk)
    assert kinds() == {8: "chat", 12: "tool", 20: "tool"}
    play.submit()
    play.mem.recover()
    assert kinds() == {8: "chat", 12: "tool", 20: "tool"}


@script(**KINDS)
def test_G1_kinds_that_are_no_short_words_are_refused(play: Play) -> None:
    for wrong in ("", "k" * 65, 3, b"chat", ["chat"]):
        requests = [ms.Request(0, kind=wrong)]  # type: ignore[arg-type]
        call = partial(play.mem.admit, requests)
        play.refuses(ms.InvalidArgument, call, "expected None or a word of at most 64 characters")


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
def test_only_what_the_policy_would_keep_is_asked_for_and_kept(kind: str, stops: list[int], states: list[int]) -> None:
    policy, seen, length = Picky(kind), set[int](), 0
    prefix, pages = ms.Prefix(policy, placement=ms.Ends(16)), ms.Pages(size=4, count=40, per_row=12)
    mem = plain(slots=14, tracking=ms.Redirect(16), prefix=prefix, pages=pages)
    mem.end([read_by(mem, T[:13], 13)], keep="cache")
    assert mem.prefix and mem.prefix.evict_states(9) <= 1
    policy.places.clear()
    (row,) = mem.admit([ms.Request("a", tokens=T[:22], length=40, snapshot_at=[8])])
    assert policy.places[:3] == [Place(3, 0, "branch"), Place(4, 0, "every"), Place(5, 0, "prompt")]
    while length < 36:
        mem.settle(mem.plan([row], min(mem.info(row).next_boundary, 22) - length if length < 22 else 1))
        mem.publish([row], keep="cache", tokens=[T])
        seen.add(length := mem.info(row).length)
    mem.end([row], keep="cache", tokens=[T])
    assert sorted(seen - set(range(23, 37))) == sorted({8, *stops})
    assert [node.end * 4 for node in mem.prefix.stated()] == states
    assert {place.kind for place in policy.places[3:]} == {"named", "boundary", "end", kind}
    declined = mem.stats().prefix.declined
    assert declined == sum(place.kind != kind for place in policy.places[3:]) > 0
