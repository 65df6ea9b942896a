"""The clairvoyant policies of a replay, by hand: who goes first where all requests are known."""

from memstate.cli.replay.foresight import NEVER, Foresight, ForesightPages, Future
from memstate.cli.replay.requests import Units, served
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.prefix.policies import Place
from memstate.prefix.tree import Tree
from memstate.tokens import BYTES, Prompt, encode
from tests.prefix.test_policies import Forest

REQUESTS = [[1, 2, 3], [4], [1, 2, 5], [4, 6], [1, 2, 3, 7], [8]]  # known of them: none, none, 2, 4, 3, none


def future_of(requests: list[list[int]]) -> Future:
    """With a token after the filled blocks of each; a block is one unit, so that a key names it."""
    trace = [TraceRequest(0, BLOCK * len(ids) + 1, 0, (*ids, 90 + at)) for at, ids in enumerate(requests)]
    return Future(served(trace, Units(BLOCK)), 1)


def test_the_future_knows_where_known_parts_will_end() -> None:
    future = future_of(REQUESTS)
    table = {2: [2, 2, *[NEVER] * 4], 4: [3, 3, 3, *[NEVER] * 3], 3: [4, 4, 4, 4, NEVER, NEVER]}
    table |= dict.fromkeys((1, 5, 7, 8, 99), [NEVER] * 6)
    wanted = [[2, 3], [1], [], [], [], []]
    for future.now in range(6):
        assert {block: future.next(block) for block in table} == {
            block: row[future.now] for block, row in table.items()
        }
        assert future.wanted() == wanted[future.now]
    assert [future.after(1) for future.now in (0, 1)] == [NEVER, 3]


def test_the_clairvoyant_keeps_what_is_needed_soonest_and_nothing_that_never_is() -> None:
    future = future_of(REQUESTS)
    forest = Forest(Foresight(future))
    assert [forest.policy.admits(Place(n, 0, "prompt")) for n in (1, 2, 3)] == [False, True, True]
    forest.add("three", 1, 2, 3)  # at 4
    forest.add("two", 1, 2)  # at 2
    future.now = 1
    forest.add("four", 4)  # at 3
    assert forest.order() == "three four two"
    future.now = 2
    forest.use("two")  # never again
    assert forest.order() == "two three four"
    assert not forest.policy.admits(Place(2, 0, "prompt"))
    future.now = 3
    forest.use("four")  # nor that one, which was told later
    assert forest.order() == "two four three"
    forest.drop("two")
    assert forest.order() == "four three"


def test_the_clairvoyant_gives_up_pages_that_are_needed_latest() -> None:
    future, tree = future_of(REQUESTS), Tree(BYTES)
    policy = ForesightPages(future)
    nodes = {
        name: tree.insert(Prompt(encode(key), None), key)[0] for name, key in (("3", [1, 2, 3]), ("4", [4]), ("8", [8]))
    }
    for node in nodes.values():
        policy.leaf(node)
    names = {node: name for name, node in nodes.items()}

    def order() -> str:
        return " ".join(names[node] for node in policy.victims())

    assert order() == "8 3 4"  # never, at 4, at 3
    future.now = 3
    policy.used(nodes["4"])
    assert order() == "8 4 3"
    policy.dropped(nodes["8"])
    policy.used(nodes["8"])  # no leaf: nothing to place
    assert order() == "4 3"
