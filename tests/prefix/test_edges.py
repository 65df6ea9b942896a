"""Room counted to the last slot and page, and what is kept while room is made."""

import pytest

from memstate import InvalidArgument
from memstate.integrations.sglang.prefix import PrefixPart
from memstate.kernels.dispatch import Backend
from tests.support.talks import Talks

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


def test_a_node_stays_while_a_register_is_freed_for_its_state(backend: Backend) -> None:
    """The only register is that of a state below it; once that has gone, nothing else would keep the node."""
    talks = Talks(backend, "none", overlap=False, slots=6, pages=0, pages_per_row=0, snapshots=1)
    talks.run(row := talks.turn([1, 2, 3, 4]), [1, 2, 3, 4])
    talks.whole([1, 2, 3, 4, 5, 6, 7, 8])
    assert talks.cached() == [8]
    talks.end(row)
    assert talks.cached() == [4]
    assert talks.mem.match([1, 2, 3, 4, 9]).length == 4
    talks.look()


def test_a_hit_is_not_locked_whose_state_has_another_owner_by_now() -> None:
    """The engine uses the id of the state again, and the cache gets it for another prompt."""
    cache = PrefixPart(2)
    cache.insert([1, 2, 3, 4], [10, 11], 7)
    hit = cache.match([1, 2, 3, 4, 5])
    assert cache.evict(states=1).states == [7]
    cache.insert([5, 6, 7, 8], [12, 13], 7)
    with pytest.raises(InvalidArgument, match="has been evicted since it was matched"):
        cache.lock(hit)
    assert cache.evict(states=1).states == [7], "nothing is locked"
