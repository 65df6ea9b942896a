"""Policies of the prefix cache: the order of eviction after given events, on real trees without a cache."""

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import islice

import pytest
import torch

from memstate.prefix.policies import FlopAware, Lru, LruPages, Place, ReturnRate, StatePolicy
from memstate.prefix.policies.learning import AGES, SHRINKAGE, WIDTHS, ReturnRates
from memstate.prefix.policies.return_rate import BOUNDARY, BRANCH, CLASSES, NAMED, PASSED, POOLED, USED, USED_PASSED
from memstate.prefix.tree import Node, Tree
from memstate.requests.handles import Snapshot
from memstate.requests.pages import NO_PAGES
from memstate.tokens import BYTES, SaltedTokens, encode, joined


class Forest:
    """A tree with named states, and a policy that is told of each change as the cache tells it."""

    def __init__(self, policy: StatePolicy, **states: Sequence[int]) -> None:
        self.policy, self.tree = policy, Tree(BYTES)
        self.named: dict[str, Node] = {}
        for name, blocks in states.items():
            self.add(name, *blocks)

    def add(self, name: str, *blocks: int, kind: str = "prompt") -> Node:
        node, _ = self.tree.insert(SaltedTokens(encode(blocks), None), array("q", blocks))
        node.snapshot = Snapshot(len(self.named), 0, len(blocks))
        self.named[name] = node
        self.policy.added(node, kind)
        return node

    def use(self, name: str) -> None:
        self.named[name].uses += 1
        self.policy.used(self.named[name])

    def drop(self, name: str) -> None:
        self.named[name].snapshot, self.named[name].evicted = None, True
        self.policy.dropped(self.named.pop(name))

    def order(self) -> str:
        """Returns the names in order of eviction."""
        names = {node: name for name, node in self.named.items()}
        return " ".join(names[node] for node in self.policy.victims())


A, B, C, D = (10, 11, 12, 13), (10, 11, 12, 13, 14, 15, 16, 17, 18, 19), (20, 21), (30,)  # B goes on from A


def test_a_use_refreshes_what_was_used_and_not_what_leads_to_it() -> None:
    forest = Forest(Lru(), a=A, b=B, c=C)
    assert forest.order() == "a b c"
    forest.use("b")
    assert forest.order() == "a c b"
    forest.use("a")
    forest.drop("c")
    assert forest.order() == "b a"
    forest.policy.reset()
    assert list(forest.policy.victims()) == []


@pytest.mark.parametrize("make", [Lru, FlopAware, ReturnRate])
def test_a_look_at_what_comes_next_changes_nothing(make: Callable[[], StatePolicy], generator: torch.Generator) -> None:
    """Of two equal policies, one is also asked for its order between events. Both must evict the same states."""
    looking, blind = Forest(make()), Forest(make())
    chance = random.Random(generator.initial_seed())
    for name in range(120):
        blocks = [chance.randrange(3) for _ in range(chance.randint(1, 6))]
        there, dropped = chance.random(), chance.random()
        for forest in (looking, blind):
            known = {tuple(node.path()): other for other, node in forest.named.items()}
            node, _ = forest.tree.insert(SaltedTokens(encode(blocks), None), array("q", blocks))
            forest.policy.asked(node, len(blocks))
            if node.snapshot is None:
                forest.add(str(name), *blocks)
            elif there < 0.5:
                forest.use(known[tuple(node.path())])
        for _ in range(chance.randrange(3)):
            list(islice(looking.policy.coming(), chance.randrange(5)))
        if dropped < 0.3:
            assert looking.order() == blind.order()
            assert [*looking.policy.coming()] == [*looking.policy.victims()]
            for forest in (looking, blind):
                forest.drop(forest.order().split()[0])


def test_pages_of_an_inner_run_are_as_recent_as_what_was_below_it() -> None:
    tree, policy = Tree(BYTES), LruPages()
    (short, _), (long, _), (other, _) = (
        tree.insert(SaltedTokens(encode(key), None), array("q", key)) for key in (C, A, D)
    )
    for node in (short, long, other):
        policy.leaf(node)
    assert list(policy.victims()) == [short, long, other]
    policy.used(short)
    assert list(policy.victims()) == [long, other, short]
    long.snapshot = Snapshot(1, 0, 4)
    below, _ = tree.insert(SaltedTokens(encode(B), None), array("q", B))
    policy.dropped(long)
    policy.leaf(below)
    policy.used(below)
    assert list(policy.victims()) == [other, short, below]
    policy.dropped(below)
    policy.leaf(long)
    assert list(policy.victims()) == [other, short, long]
    below.evicted = True
    assert policy.keeps(below) and not LruPages(tombstones=False).keeps(below)
    assert LruPages(tombstones=False).keeps(long)


def test_flop_aware_by_hand() -> None:
    """Ranks by (last use - oldest use) / span + alpha * saved / most saved.

    A state with two continuations goes last.
    """
    orders = {0.0: "a c b d", 0.5: "a c d b", 1.5: "c a d b", 5.0: "d c a b"}
    # a, c, b, d: recency 0, 1/3, 2/3, 1, and 4, 2, 6, 1 pages saved, of at most 6
    for alpha, order in orders.items():
        forest = Forest(FlopAware(alpha), a=A, c=C, b=B, d=D)
        assert forest.order() == order, alpha


def test_flop_aware_keeps_what_two_share() -> None:
    forest = Forest(FlopAware(0.0), a=A, c=C, b=B)
    assert forest.order() == "a c b"  # a state with one continuation, such as a, is not protected
    forest.add("x", *A, 99)
    assert forest.order() == "c b x a"
    forest.use("c")
    assert forest.order() == "b x c a"
    assert list(FlopAware().victims()) == []


def test_flop_aware_counts_compute_from_the_state_above() -> None:
    """To compute B's state again costs pages 4 to 10, since A above it has a state. For l it costs pages 0 to 7.

    The node between them, where another text parts, has no state.
    """
    forest = Forest(FlopAware(1000.0), b=B, l=(40, 41, 42, 43, 44, 45, 46), c=C, m=(50, 51, 52, 53, 54))
    above, _ = forest.tree.insert(SaltedTokens(encode(A), None), array("q", A))
    above.snapshot = Snapshot(9, 0, 4)
    forest.tree.insert(SaltedTokens(encode([*B[:7], 99]), None), array("q", [*B[:7], 99]))
    assert forest.order() == "c m b l"


@pytest.mark.parametrize("policy", [Lru(), FlopAware(), ReturnRate()], ids=repr)
def test_which_kinds_of_states_are_admitted(policy: StatePolicy) -> None:
    kinds = [kind for kind in ("boundary", "prompt", "branch", "end", "again") if policy.admits(Place(4, 1, kind))]
    assert kinds == ["boundary", "prompt", "branch", "end"] + ["again"] * isinstance(policy, ReturnRate)


def taught(rates: ReturnRates, kind: int, returns: float, n: int = 400, age: int = 0, growth: int = 0) -> None:
    """Lets n states reach an age.

    At this age a request asks for the share `returns` of the states; the other states reach all later ages, too.
    """
    for at in range(n):
        back = at < returns * n
        for reached in range(age + 1 if back else AGES):
            rates.enter(kind, reached, growth)
        if back:
            rates.asked(kind, age, growth)


def index(rates: ReturnRates, kind: int, age: int) -> float:
    """Returns the rate for a growth without data, so that only kind and age count."""
    return rates.rate(kind, age, 1)


def test_what_a_conversation_has_passed_is_of_a_class_of_its_own() -> None:
    policy = ReturnRate()
    bench = Forest(policy)
    prompt = bench.add("prompt", *range(10))
    assert prompt.worth.kind == 0
    answer = bench.add("answer", *range(11), kind="end")
    # the conversation goes on from the answer, so it has passed the prompt
    assert (prompt.worth.kind, answer.worth.kind) == (PASSED, 0)
    policy.asked(answer, 14)
    assert answer.worth.kind == USED
    turn = bench.add("turn", *range(14))
    assert (answer.worth.kind, turn.worth.kind) == (USED_PASSED, 1)
    far = bench.add("far", *range(40), kind="end")
    assert (turn.worth.kind, far.worth.kind) == (PASSED, 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("prompt", 0), ("end", 0), ("again", 0), ("branch", BRANCH), ("named", NAMED), ("every", BOUNDARY)],
)
def test_the_class_of_each_kind(kind: str, expected: int) -> None:
    assert Forest(ReturnRate()).add("it", 1, 2, 3, kind=kind).worth.kind == expected


def test_hazards_are_what_was_counted() -> None:
    """A rate is the share of states that return, divided by the mean number of requests for which a state is held.

    A state that returns is held for half the width of its age.
    """
    for age, share in ((0, 0.5), (3, 0.25), (7, 0.9)):
        rates = ReturnRates(2, 2, 2)
        taught(rates, 0, share, 40_000, age)
        before = index(rates, 0, age)
        rates.update()
        learned = share / (WIDTHS[age] * (1 - share / 2))
        assert index(rates, 0, age) == pytest.approx(learned, rel=0.01) != before
    assert index(rates, 0, 0) == pytest.approx(
        0.9 / (64 + 64 * 0.55), rel=0.01
    )  # the best horizon is 64 requests, and then age 7


def test_states_that_are_in_an_age_still_count_half() -> None:
    rates, n = ReturnRates(1, 1, 2), 10_000
    for at in range(4 * n):
        rates.enter(0, 3, 0)
        if at < n:
            rates.asked(0, 3, 0)
        elif at < 2 * n:
            rates.enter(0, 4, 0)
    rates.update()
    assert index(rates, 0, 3) == pytest.approx(1 / 3 / (WIDTHS[3] * (1 - 1 / 6)), rel=0.01)


def test_a_kind_that_knows_little_takes_the_figures_of_all_that_lend_theirs() -> None:
    fresh = index(ReturnRates(4, 3, 2), 2, 0)
    for teacher, changes in ((0, True), (1, True), (3, False)):
        rates = ReturnRates(4, 3, 2)
        taught(rates, teacher, 0.8)
        rates.update()
        assert (index(rates, 2, 0) == pytest.approx(fresh)) is not changes
        if changes:
            assert index(rates, 2, 0) == pytest.approx(index(rates, 3, 0)) and index(rates, 2, 0) > 2 * fresh
    own = ReturnRates(4, 3, 2)
    taught(own, 0, 0.8, 4000)
    taught(own, 2, 0.0, 4000)
    own.update()
    assert index(own, 2, 0) < 0.05 * index(own, 0, 0)  # figures of its own kind outweigh those of other kinds


def test_what_goes_far_beyond_the_state_returns_as_it_was_seen_to() -> None:
    rates = ReturnRates(1, 1, 3)
    for _ in range(2):  # the second round is weighed by what was learned in the first
        rates.fade(0.0)
        for growth, share in ((0, 0.1), (2, 0.7)):
            taught(rates, 0, share, 2000, growth=growth)
        rates.update()
    low, unknown, high = (rates.rate(0, 0, growth) for growth in range(3))
    assert low == pytest.approx(unknown * 0.1 / 0.4, rel=0.05) and high == pytest.approx(unknown * 0.7 / 0.4, rel=0.05)


def test_conclusions_are_drawn_when_told_and_fade_when_told() -> None:
    rates, fresh = ReturnRates(2, 2, 2), index(ReturnRates(2, 2, 2), 0, 0)
    taught(rates, 0, 0.9)
    assert index(rates, 0, 0) == fresh
    rates.update()
    learned = index(rates, 0, 0)
    rates.fade(0.5)
    assert index(rates, 0, 0) == learned
    rates.update()
    assert fresh < index(rates, 0, 0) < learned
    rates.fade(0.0)
    rates.update()
    assert index(rates, 0, 0) == fresh


def test_rates_are_the_best_over_all_horizons() -> None:
    """Compares each rate with the best over all horizons, computed one by one from the same chances."""
    draw, rates, n = random.Random("horizons"), ReturnRates(1, 1, 2), 20_000
    chances, left = [draw.choice((0.02, 0.1, 0.5)) for _ in range(10)], n
    for age, chance in enumerate(chances):
        back = round(left * chance)
        for at in range(left):
            rates.enter(0, age, 0)
            if at < back:
                rates.asked(0, age, 0)
        left -= back
    for _ in range(left):
        rates.enter(0, len(chances), 0)  # these states outlive the last age
    rates.update()
    hazards = [(chance, width) for chance, width in zip(chances, WIDTHS, strict=False)]
    for age in range(10):
        best, waited, alive = 0.0, 0.0, 1.0
        for chance, width in hazards[age:]:
            waited += alive * (chance * width / 2 + (1 - chance) * width)
            alive *= 1 - chance
            best = max(best, (1 - alive) / waited)
        assert index(rates, 0, age) == pytest.approx(best, rel=0.05), age
    assert n > SHRINKAGE * 100  # enough to outweigh the prior


class Prompts:
    """A tree of prompts that share no token; a call adds a prompt."""

    def __init__(self) -> None:
        self.tree, self.serial = Tree(BYTES), 0

    def __call__(self, pages: int, above: Node | None = None) -> Node:
        """Returns a new node with a state that no policy knows of, below the node `above`."""
        self.serial += 1
        key = joined(step.key for step in reversed(list(above.path()))) if above else b""
        key += encode([1000 * self.serial + i for i in range(pages)])
        node, _ = self.tree.insert(SaltedTokens(key, None), NO_PAGES)
        node.snapshot = Snapshot(self.serial, 0, node.end)
        return node


@pytest.mark.parametrize("returning", ["branch", "prompt"])
def test_return_rates_are_learned_by_kind(returning: str) -> None:
    """One of two kinds always returns. The older state is evicted first, but after 64 requests the other kind is."""
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


@pytest.mark.parametrize(("returning", "never"), [("chat", "search"), ("search", None), (None, "chat")])
def test_return_rates_are_learned_by_the_kind_of_the_request(returning: str | None, never: str | None) -> None:
    """All states are ends of prompts. Those of one kind of requests always return, the others never do."""
    policy, prompt = ReturnRate(), Prompts()

    def added(kind: str | None) -> Node:
        node = prompt(9)
        node.kind = kind
        policy.added(node, "prompt")
        return node

    due: Node | None = None
    for _ in range(65):
        policy.asked(due or prompt.tree.root(None), 12)
        due = added(returning)
        added(never)
    pair = added(returning), added(never)
    assert [node for node in policy.victims() if node in pair] == [*reversed(pair)]


def test_the_first_eight_kinds_of_requests_have_classes_of_their_own() -> None:
    policy, prompt = ReturnRate(), Prompts()
    classes = []
    for kind in (None, *"abcdefghij", None, "b"):
        node = prompt(9)
        node.kind = kind
        policy.added(node, "prompt")
        classes.append(node.worth.kind)
    assert classes[0] == classes[9] == classes[10] == classes[11] == 0 and classes[12] == classes[2]
    assert len(set(classes)) == 9 and len(policy.rates._seen) == CLASSES + 8 * POOLED


def test_a_state_inherits_the_requests_of_those_given_up_below_it() -> None:
    """Two states have the same length and age. One of them also counts the requests of dropped states below it."""
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
        policy.added(node, "prompt")  # the lower state serves its requests again
    assert policy.value(first.worth) == pytest.approx(policy.value(second.worth))
