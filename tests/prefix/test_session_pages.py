"""KV pages of conversations: whatever turns do, a page keeps the tokens it stands for. I = 4, pages of 2 tokens."""

import pytest

from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, fork, told
from tests.support.ways import every_strategy_and_order

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone
OTHER = [*TEXT[:9], 77, 78, 79, 80]


@every_strategy_and_order
def test_B73_a_page_that_the_tree_has_is_not_written_again(backend: Backend, name: str, overlap: bool) -> None:
    """A turn begins in a page filled in part, fills it, gives it to the tree, is aborted; the next says otherwise."""
    talks, _, session = told(backend, name, overlap, first=9)
    row = talks.turn(TEXT, session)
    assert talks.mem.info(row).length == 9
    filled = owners.pages_of(talks.mem, row)[4]  # tokens 9 and 10
    talks.run(row, TEXT, publish=True)
    assert filled in talks.mem.prefix.tree.pages_to(talks.mem.prefix.leases[row.index].node)
    talks.mem.end([row])
    talks.look()
    row = talks.turn(OTHER, session)
    assert filled not in owners.pages_of(talks.mem, row)
    talks.run(row, OTHER, publish=True)
    talks.end(row)
    talks.look()
    assert talks.mem.match([*TEXT, 0]).kv_length == 14 and talks.mem.match([*OTHER, 0]).kv_length == 12


@every_strategy
def test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in(backend: Backend, name: str) -> None:
    """The state of 9 tokens would write behind them, in a page that is no longer the row's alone."""
    talks, _, session = told(backend, name, cache=False, first=9)
    older = talks.kept(session)[1:]
    row = talks.turn(TEXT, session)
    shared = owners.pages_of(talks.mem, row)[4:5]
    owners.kv_pages(talks.mem).share(shared)
    talks.mem.end([row])
    assert talks.kept(session) == older
    owners.kv_pages(talks.mem).release(shared)


@pytest.mark.sample(interpreter=1)
@every_strategy_and_order
def test_B73_forks_and_the_conversation_go_on_in_pages_of_their_own(backend: Backend, name: str, overlap: bool) -> None:
    talks, _, session = told(backend, name, overlap, first=7)
    row = talks.turn(TEXT[:8], session)
    early = fork(talks, row, "early")[0]  # before the turn's first step: where the session stands
    talks.run(row, TEXT[:11])
    (late,) = fork(talks, row, "late")
    for other, text in ((early, [*TEXT[:8], 77, 78]), (late, [*TEXT[:11], 88, 89])):
        assert owners.pages_of(talks.mem, other)[-1] not in owners.pages_of(talks.mem, row)
        talks.run(other, text, publish=True)
    talks.look()
    talks.end(row)
    talks.look()
    # With the forks still running. Under Redirect the state of 11 is what the last of them reads, and nobody's; that of
    # 8 would have saved less than a page over the session's 7, and so the first turn's is left.
    assert talks.whole(TEXT, session) == (6 if name == "redirect" else 11)
    for other in (late, early):
        talks.end(other)
        talks.look()


@pytest.mark.parametrize("name", ["ping-pong", "redirect"])
def test_B74_pages_of_an_idle_session_stay_and_go_with_it(backend: Backend, name: str) -> None:
    talks, mem, session = told(backend, name)
    talks.whole(TEXT, session)
    assert mem.prefix.tree.leased_pages == mem.prefix.tree.total_pages == 7
    assert mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 0
    talks.look()
    mem.sessions.close(session)
    assert mem.prefix.tree.leased_pages == 0 and mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 7
