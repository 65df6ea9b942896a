"""KV pages: the lowest free page comes first, shared pages are counted, and the device's table follows the host."""

import random
from collections import Counter

from memstate.requests.pages import PageAllocator
from tests.proof.stateful.script import Play, script


def test_a_shared_page_is_free_with_its_last_holder() -> None:
    pages = PageAllocator(3)
    first = pages.claim(2)
    pages.share(first)
    pages.share(first[:1])
    pages.release(first)
    assert pages.free == 1
    pages.release(first)
    assert pages.free == 2
    assert list(pages.claim(2)) == [2, 3]
    pages.release([1])
    assert pages.free == 1


def test_few_and_many_pages_are_the_lowest_free_ones() -> None:
    rng, pages, held = random.Random(3), PageAllocator(4000), set[int]()
    for _ in range(200):
        n = min(rng.choice((0, 1, 20, 23, 24, 1000)), pages.free)
        lowest = [page for page in range(1, 4001) if page not in held][:n]
        assert list(pages.claim(n)) == lowest
        held.update(lowest)
        gone, shared = (rng.sample(sorted(held), min(len(held), rng.choice((0, 1, 23, 24, 900)))) for _ in range(2))
        pages.share(shared)
        assert pages.alone(gone) == len({*gone} - {*shared})
        assert pages.miscounts(Counter([*held, *shared])) == []
        pages.release(shared)
        pages.release(gone)
        held.difference_update(gone)
        assert pages.miscounts(dict.fromkeys(held, 1)) == []


@script(strategy="redirect", slots=6, pages=10, page_size=4, pages_per_row=5)
def test_B31_a_snapshot_keeps_the_pages_of_its_tokens(play: Play) -> None:
    """Later, a short request gets the row of a longer one. It may read no page of that one."""
    (row,) = play.admit(None, length=17)
    play.run(row, list(range(8)))
    (snap,) = play.end(row, how="publish")
    (longer,), (short,) = play.admit(None, length=12, resume=snap), play.admit(None, length=4, resume=snap)
    play.drop(snap)
    play.end(longer, how="release")
    play.admit(None, length=4)
    play.step([short])
    play.end(short, how="release")
    play.admit(None, length=20)
    play.submit()
