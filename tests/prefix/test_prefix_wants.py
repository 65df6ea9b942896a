"""Snapshots that a request takes of its own prompt: at the branch point, and at the end.

Pages hold 4 tokens. `boundaries` returns the lengths at which a prefill without any limit stops.
"""

from typing import Any

import numpy as np
import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages, Place
from tests.support import owners
from tests.support.planes import both_orders, every_snapshot
from tests.support.serving import Server

T = [7 * n % 50 for n in range(60)]


def server(backend: Backend, name: str, policy: Lru | None = None, **more: object) -> Server:
    prefix = ms.Prefix(states=policy or Lru(), pages=LruPages())
    return Server(backend, name, **({"every": 64, "slots": 14, "rows": 2, "prefix": prefix} | more))  # type: ignore[arg-type]


def kv_of(at: Server, tokens: list[int]) -> None:
    """Caches the KV of whole pages, and no state."""
    row = at.start(tokens)
    at.prefill(row, publish=False)
    at.publish([row])
    at.mem.end([row])
    at.cache.evict_states(99)
    for _, node in at.cache.tree.walk():
        node.evicted = False  # as if the node had never had a state


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


CASES = {  # every, tokens with cached KV, tokens of the prompt, where its steps end, lengths of its states
    "both": (64, 9, 22, [8, 20, 22], [8, 20]),
    "both, chunks at multiples": (8, 13, 22, [8, 12, 16, 20, 22], [8, 12, 16, 20]),
    "the branch point on a multiple": (8, 9, 22, [8, 16, 20, 22], [8, 16, 20]),
    "the prompt's end on a multiple": (8, 13, 18, [8, 12, 16, 18], [8, 12, 16]),
    "the whole prompt on a multiple": (8, 9, 16, [8, 12, 16], [8, 12]),
    "both on multiples": (8, 9, 17, [8, 16, 17], [8, 16]),
    "branch point and prompt's end in one": (64, 13, 15, [12, 15], [12]),
    "all three in one": (4, 13, 14, [4, 8, 12, 14], [4, 8, 12]),
    "neighbours": (64, 9, 13, [8, 12, 13], [8, 12]),
    "the prompt ends at its end": (64, 9, 16, [8, 12, 16], [8, 12]),
    "the prompt ends a page behind it": (64, 9, 12, [8, 12], [8]),
    "shorter than a page": (64, 0, 3, [3], []),
}


@pytest.mark.sample
@both_orders
@every_snapshot
def test_B49_junction_and_prompt_end_are_both_taken(name: str, overlap: bool, backend: Backend) -> None:
    for case in CASES if backend.name == "reference" else ("both", "all three in one"):
        every, kv, length, stops, states = CASES[case]
        at = server(backend, name, every=every, overlap=overlap)
        if kv:
            kv_of(at, T[:kv])
            assert not at.states() and at.mem.match(T[:length]).kv_length == kv // 4 * 4
        row = at.start(T[:length])
        assert (case, boundaries(at, row)) == (case, stops)
        assert (case, sorted(at.states())) == (case, states)
        at.end([row])


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


@pytest.mark.parametrize("name", ["redirect", "ping-pong"])
def test_a_row_that_reads_keeps_states_where_another_prompt_parts(name: str, backend: Backend) -> None:
    at = server(backend, name)
    row = at.start(T[:30])
    at.run([row], 6)
    with pytest.raises(ms.InvalidArgument, match=r"snapshot_at=\[-4\]: expected lengths in tokens"):
        at.mem.snapshot_at(row, [-4])
    at.mem.snapshot_at(row, np.array([7, 15, 20]))  # 7 is too late: the row has passed 4, the page boundary before it
    assert boundaries(at, row) == [12, 20, 28, 30]
    for tokens, length in (([*T[:12], 1], 12), ([*T[:23], 1], 20), ([*T[:11], 1], 0)):
        assert at.mem.match(tokens).length == length
