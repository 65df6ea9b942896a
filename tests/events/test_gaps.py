"""What a subscriber does with the batches behind a gap that nobody fills."""

from collections.abc import Iterator

import pytest

from memstate.events import Batch, BlockStored, Index, Subscriber
from memstate.events.wire import pack


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    subscriber = Subscriber(Index())
    subscriber.add("w", "tcp://127.0.0.1:9")  # nobody is there, and none is asked again
    yield subscriber
    subscriber.close()


def test_every_batch_behind_a_gap_is_applied_in_order(subscriber: Subscriber) -> None:
    """5 and 6 follow each other; 9 lies behind a second gap, and what came before that is not certain any more."""
    source = subscriber._sources["w"]
    known = lambda n: bool(subscriber.index.find([n, n, 0]))  # noqa: E731
    for n in (9, 6, 5):
        batch = pack(Batch(0.0, [BlockStored([n], None, [n, n], 2)]))
        assert subscriber._take("w", source, n.to_bytes(8, "big"), batch) == 0
    assert subscriber.poll() == 2 and source.next == 7
    assert (known(5), known(6), known(9)) == (True, True, False)
    assert subscriber.poll() == 1 and source.next == 10
    assert (known(5), known(6), known(9)) == (False, False, True)
    assert not source.held and source.nbytes == 0
