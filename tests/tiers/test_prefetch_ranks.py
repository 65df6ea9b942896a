"""Prefetches of several ranks in one process: all decide alike in the same polls, whatever one rank lacks."""

from collections.abc import Callable
from typing import Any

import pytest

from memstate.errors import AgreementLost
from memstate.tiers.prefetch import votes as rounds
from memstate.tiers.prefetch.agreement import Words
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.prefetch_rig import Rig, digests
from tests.support.virtual import Together

CHUNK = 8
WAIT = Prefetch(stop="wait_complete", chunk=CHUNK)
EVERY = range(16, 1025, 16)


class Ranks:
    """Ranks that run the same scheduler: each call is made on all of them, one after the other.

    `all_have` are settings that every rank has; `given` has one dict of further settings per rank.
    """

    def __init__(self, *given: dict[str, Any], **all_have: Any) -> None:
        together = Together(len(given))
        self.rigs = [Rig(ranks=together.of(rank), **all_have | own) for rank, own in enumerate(given)]
        self.keys = [digests(f"rank {rank}", 64) for rank in range(len(given))]
        self.fetches: list[list[Fetch]] = []  # one list per prefetch: its `Fetch` on each rank
        self.ended: list[list[int]] = [[] for _ in given]  # per rank: the polls in which its prefetches ended
        self.polls = 0

    def stock(self, *states: Any, kv: int = 64) -> None:
        for rig, keys, ends in zip(self.rigs, self.keys, states, strict=True):
            rig.stock(keys, range(kv), ends)

    def start(self, tokens: int = 1024, covered: int = 0) -> list[Fetch]:
        self.fetches.append([rig.start(tokens, keys, covered) for rig, keys in zip(self.rigs, self.keys, strict=True)])
        return self.fetches[-1]

    def poll(self, ready: bool = False) -> None:
        """Runs one iteration of every rank's scheduler; with `ready`, each rank first asks to admit its requests."""
        self.polls += 1
        for rank, rig in enumerate(self.rigs):
            for fetches in self.fetches if ready else ():
                rig.prefetcher.ready(fetches[rank])
            before = [fetches[rank].done for fetches in self.fetches]
            rig.prefetcher.poll()
            after = [fetches[rank].done for fetches in self.fetches]
            self.ended[rank] += [self.polls] * (sum(after) - sum(before))
            rig.clock.advance(1)

    def run(self, polls: int = 60) -> None:
        for _ in range(polls):
            self.poll()

    def check(self, *outcomes: str, length: int) -> None:
        """Requires these outcomes of the last prefetch, in the same poll and with the same contents on all ranks."""
        for rig in self.rigs:
            rig.check()
        assert [fetch.outcome for fetch in self.fetches[-1]] == list(outcomes)
        assert {fetch.length for fetch in self.fetches[-1]} == {length}
        assert all(ended == self.ended[0] for ended in self.ended)
        looks = [rig.available(keys) for rig, keys in zip(self.rigs, self.keys, strict=True)]
        assert max(looks) == min(looks) and looks[0] in (length, 0)


@pytest.mark.parametrize(
    ("states", "length"),
    [([[512, 1024], [512, 768]], 512), ([[512, 1024], [768, 1024], [768, 1024], EVERY], 1024), ([[768], []], 0),
     ([[240, 512], [240, 768]], 0)],
)  # fmt: skip
def test_B63_ranks_agree_on_a_length_that_all_of_them_have(states: list[list[int]], length: int) -> None:
    """The shortest of the ranks' longest hits is not enough: in the first case, it is 768, a length that one rank
    lacks.
    """
    ranks = Ranks(*[{}] * len(states), settings=WAIT)
    ranks.stock(*states)
    ranks.start()
    ranks.run()
    none = ["missed" if not any(n >= 256 for n in ends) else "disagreed" for ends in states]
    ranks.check(*(["complete"] * len(states) if length else none), length=length)
    for rig in ranks.rigs:
        assert len(rig.kv) == length // 16 and len(rig.states) == min(length, 1)
        read = [name for name in rig.store.asked("get") if name.startswith("state")]
        assert len(read) == min(length, 1), "the state at the length agreed on, and no other"


@pytest.mark.parametrize("polls", [1, 4, 11])
def test_B61_one_rank_that_wants_an_end_is_enough(polls: int) -> None:
    """Clocks differ, so the timeout is over on one rank first. Two polls later, the prefetch ends on all ranks."""
    settings = Prefetch(stop="timeout", timeout=1000.0, timeout_per_page=0.0, chunk=CHUNK)
    ranks = Ranks({}, {}, {}, settings=settings, workers=1)
    ranks.stock(*[[1024]] * 3)
    ranks.start()
    ranks.run(polls)
    ranks.fetches[0][1].began -= 1000.0
    ranks.poll(ready=True)
    ranks.run(3)
    whole = polls >= 10  # the last chunk arrives before the other ranks hear of the timeout
    ranks.check(*["complete" if whole else "stopped"] * 3, length=1024 if whole else 0)


def test_many_prefetches_take_turns_in_exchanges_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that ranks exchange in a poll has room for only two of the nine prefetches.

    Storage never answers for two of the prefetches; these do not block the others.
    """
    monkeypatch.setattr(rounds, "WORDS", 2 + 2 * 3)
    ranks = Ranks({}, {}, settings=WAIT, kv=600, states=20, workers=8, latency=iter([1e9] * 4 + [1.0] * 999).__next__)
    ranks.stock([*EVERY], [*EVERY])
    for n in range(9):
        ranks.start(1024 - 16 * n)
    ranks.run(200)
    assert [[fetch.done for fetch in fetches] for fetches in ranks.fetches] == [[False] * 2] * 2 + [[True] * 2] * 7
    assert [fetches[0].length for fetches in ranks.fetches[2:]] == [1024 - 16 * n for n in range(2, 9)]
    assert ranks.ended[0] == ranks.ended[1]
    for fetches in ranks.fetches[:2]:
        for rig, fetch in zip(ranks.rigs, fetches, strict=True):
            rig.prefetcher.cancel(fetch)
    ranks.run(3)
    for rig in ranks.rigs:
        rig.check()


class Broken:
    """A group of two ranks whose exchange of words fails at the moment `when`: "sent" or "waited for"."""

    done, left = False, 3

    def __init__(self, when: str) -> None:
        self.when = when

    def exchange(self, words: Words) -> "Broken":
        self.words = words
        self._come("sent")
        return self

    def result(self) -> Words:
        self._come("waited for")
        return self.words

    def _come(self, now: str) -> None:
        self.left -= self.when == now
        if self.left < 0:
            raise AgreementLost("the other one has gone")


@pytest.mark.parametrize("when", ["sent", "waited for"])
def test_a_lost_group_gives_everything_back_and_says_so_once(when: str) -> None:
    rig, keys = Rig(WAIT, ranks=Broken(when), workers=1), digests("a", 64)
    rig.stock(keys, range(64), [512, 1024])
    fetches = [rig.start(1024, keys), rig.start(512, keys)]
    with pytest.raises(AgreementLost, match="the other one has gone; restart them together"):
        rig.run()
    assert [fetch.outcome for fetch in fetches] == ["lost", "lost"]
    rig.check()
    assert rig.prefetcher.stats().waits > 0
    assert rig.start(1024, keys).outcome == "lost"
    rig.run()
    rig.check()
    assert rig.kv.pool.free == rig.kv.pool.records


def told(*rigs: Rig) -> None:
    """Requires that in its next poll each rank reports a difference, and gives back all that its prefetches hold."""
    for rig in rigs:
        with pytest.raises(AgreementLost, match="they started or cancelled different prefetches"):
            rig.prefetcher.poll()
        rig.check()


DIFFERENCES: dict[str, Callable[[Rig, list[bytes]], object]] = {
    "one more": lambda rig, keys: [rig.start(tokens, keys) for tokens in (1024, 1000, 512)],
    "one less": lambda rig, keys: rig.start(1024, keys),
    "other pages": lambda rig, keys: [rig.start(tokens, keys) for tokens in (1024, 512)],
    "other tokens": lambda rig, keys: [rig.start(1024, keys), rig.start(1000, keys, covered=16)],
    "begun later": lambda rig, keys: [rig.prefetcher.cancel(rig.start(512, keys)), *both(rig, keys)],
}


def both(rig: Rig, keys: list[bytes]) -> list[Fetch]:
    return [rig.start(1024, keys), rig.start(1000, keys)]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_whose_prefetches_differ_in_one_thing_are_told(name: str) -> None:
    """Messages differ in their numbers only, not in their sizes: under gloo, other sizes would end the process."""
    ranks = Ranks({}, {}, settings=WAIT)
    for rig, keys, start in zip(ranks.rigs, ranks.keys, (both, DIFFERENCES[name]), strict=True):
        start(rig, keys)
        rig.prefetcher.poll()
    told(*ranks.rigs)


class Beside:
    """A group of two ranks. The other rank sends the same words as this one, except for one bit of its check word.

    `lacks` says whether the other rank lacks this bit or adds it.
    """

    done = True

    def __init__(self, lacks: bool) -> None:
        self.lacks = lacks

    def exchange(self, words: Words) -> "Beside":
        other = words.copy()
        other[0] = words[0] & (words[0] - 1) if self.lacks else words[0] | (words[0] + 1)
        other[1] = ~other[0]
        self._words = words & other
        return self

    def result(self) -> Words:
        return self._words


@pytest.mark.parametrize("lacks", [False, True])
def test_each_word_of_a_check_counts(lacks: bool) -> None:
    """Every word is sent inverted, too: the words are combined by AND, so one word alone would miss an added bit."""
    rig, keys = Rig(WAIT, ranks=Beside(lacks)), digests("a", 64)
    rig.start(1024, keys)
    rig.prefetcher.poll()
    told(rig)
