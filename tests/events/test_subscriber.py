"""Events over ZMQ on loopback: numbers, gaps, late readers, workers that begin again, and several workers."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from memstate.errors import ConfigurationError
from memstate.events import BlockStored, EventBatch, Index, Publisher, Subscriber
from memstate.events.wire import pack
from tests.events.test_feed import manager, serve

ANY = "tcp://127.0.0.1:0"


def until(done: Callable[[], bool], work: Callable[[], object]) -> None:
    """Calls `work` until `done` returns True, for at most 30 seconds."""
    end = time.monotonic() + 30
    while not done():
        work()
        assert time.monotonic() < end, "30 seconds, and it is not done"
        time.sleep(0.001)


class Pair:
    """A manager that publishes, and an index that listens."""

    def __init__(self, replay: str | None = ANY, **given: object) -> None:
        self.mem = manager(slots=20)
        self.events = Publisher(self.mem, ANY, replay, **given)
        self.index = Index()
        self.subscriber = Subscriber(self.index)

    def listen(self, name: str = "w") -> None:
        self.subscriber.add(name, self.events.endpoint, self.events.replay)

    def turn(self) -> None:
        self.events.publish()
        self.subscriber.poll()

    def begin_again(self) -> None:
        """Closes the publisher, and lets another manager publish at its address."""
        self.events.close()
        self.mem = manager()
        serve(self.mem, [2] * 8)

        def begin() -> None:
            with suppress(ConfigurationError):  # the port becomes free a moment after the close
                self.events = Publisher(self.mem, self.events.endpoint, self.events.replay)
                self.events.publish()

        until(lambda: self.mem.prefix.watcher is self.events._feed, begin)

    @property
    def source(self) -> Any:
        """The subscriber's record of the worker."""
        return self.subscriber._sources["w"]

    def send(self, number: int, payload: bytes) -> None:
        """Sends a batch to the subscriber past the publisher, which does not know it."""
        self.events._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def knows(self, prompt: list[int]) -> bool:
        return [each.length for each in self.index.find([*prompt, 0])] == [len(prompt)]

    def close(self) -> None:
        self.subscriber.close()
        self.events.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    """A maker of pairs, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(closing(Pair(**given)))


@pytest.mark.parametrize("keep", [10_000, 2], ids=["from what is kept", "from a snapshot"])
def test_a_late_reader_learns_all(make: Callable[..., Pair], keep: int) -> None:
    pair = make(keep=keep)
    for n in range(5):
        serve(pair.mem, [n] * 8)
        pair.events.publish()
    pair.listen()
    until(lambda: all(pair.knows([n] * 8) for n in range(5)), pair.turn)


def test_a_gap_is_filled_by_the_missing_batches(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.listen()
    until(lambda: pair.knows([]) or pair.index.workers == ("w",), pair.turn)
    serve(pair.mem, [1] * 8)
    pair.events.publish()
    until(lambda: bool(pair.source.sub.poll(0)), lambda: None)
    pair.source.sub.recv_multipart()  # this message is lost
    serve(pair.mem, [2] * 8)
    until(lambda: pair.knows([1] * 8) and pair.knows([2] * 8), pair.turn)


def test_a_gap_that_nobody_can_fill_forgets_what_came_before(make: Callable[..., Pair]) -> None:
    """A publisher cannot fill a gap if, for example, it keeps too few batches and sends no snapshot."""
    pair = make()
    pair.listen()
    until(lambda: pair.index.workers == ("w",), pair.turn)
    late = EventBatch(0.0, [BlockStored([7], None, [5, 5, 5, 5], 4)])
    pair.subscriber._take("w", pair.source, (9).to_bytes(8, "big"), pack(late))
    until(lambda: pair.source.next == 10, pair.turn)
    assert pair.index.find([5, 5, 5, 5, 5])[0].kv == 4


def test_a_reader_that_cannot_ask_learns_what_it_hears(make: Callable[..., Pair]) -> None:
    pair = make(replay=None)
    serve(pair.mem, [1] * 8)
    pair.events.publish()  # nobody listens yet
    pair.listen()

    def more() -> None:
        serve(pair.mem, [2] * 8)
        pair.turn()
        pair.mem.prefix.clear()

    until(lambda: pair.knows([2] * 8), more)
    assert pair.index.find([1] * 9) == []
    pair.mem.recover(keep=False)
    serve(pair.mem, [3] * 8)
    until(lambda: pair.knows([3] * 8), pair.turn)  # the reader learns it from a snapshot


def test_a_worker_that_begins_again(make: Callable[..., Pair]) -> None:
    pair = make()
    pair.listen()
    serve(pair.mem, [1] * 8)
    until(lambda: pair.knows([1] * 8), pair.turn)
    pair.begin_again()
    until(lambda: pair.knows([2] * 8), pair.turn)
    assert pair.index.find([1] * 9) == []


def test_what_a_worker_told_before_it_began_again_is_not_heard_behind_it(make: Callable[..., Pair]) -> None:
    """While nobody polls, the worker's last batches wait in the socket.

    Their numbers are higher than those of the new batches.
    """
    pair = make()
    pair.listen()
    until(lambda: pair.index.workers == ("w",), pair.turn)
    for n in range(3, 8):
        serve(pair.mem, [n] * 8)
        pair.events.publish()
    until(lambda: bool(pair.source.sub.poll(0)), lambda: None)
    pair.begin_again()
    time.sleep(0.3)  # in this time the socket would connect again by itself
    until(lambda: pair.knows([2] * 8), pair.turn)
    serve(pair.mem, [1] * 8)
    until(lambda: pair.knows([1] * 8), pair.turn)
    assert [pair.index.find([n] * 9) for n in range(3, 8)] == [[]] * 5


EMPTY = pack(EventBatch(0.0, []))
OTHER = {
    "rubbish": [b"", (7).to_bytes(8, "big"), b"rubbish"], "alone": [b"alone"], "short": [b"", b"short", EMPTY],
    "no number": [b"", b"\xff" * 8, EMPTY],
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER)
def test_messages_that_are_no_batch_are_counted_and_cost_what_their_worker_had_told(
    make: Callable[..., Pair], what: str
) -> None:
    pair = make()
    pair.listen()
    serve(pair.mem, [1] * 8)
    until(lambda: pair.knows([1] * 8), pair.turn)
    pair.events._pub.send_multipart(OTHER[what])
    until(lambda: pair.subscriber.faults == 1, pair.turn)
    assert pair.index.find([1] * 9) == []
    serve(pair.mem, [2] * 8)
    until(lambda: pair.knows([2] * 8), pair.turn)


def test_addresses_that_cannot_be_used(make: Callable[..., Pair]) -> None:
    mem = manager()
    for endpoint, replay in (("nowhere", None), (ANY, "nowhere")):
        with pytest.raises(ConfigurationError, match="events at"):
            Publisher(mem, endpoint, replay)
    pair = make()
    with pytest.raises(ConfigurationError, match="events of 'nowhere'"):
        pair.subscriber.add("x", "nowhere")
    pair.listen()
    with pytest.raises(ConfigurationError, match="there already"):
        pair.listen()
    pair.subscriber.remove("w")
    pair.listen()


def test_the_worker_that_goes_furthest_comes_first_and_one_that_is_removed_is_forgotten(
    make: Callable[..., Pair],
) -> None:
    first, *_ = pairs = [make() for _ in range(4)]
    for number, pair in enumerate(pairs):
        for prompt in (list(range(8 * (number + 1))), [90 + number] * 8):  # the first prompts are nested
            serve(pair.mem, prompt)
        first.subscriber.add(f"worker {number}", pair.events.endpoint, pair.events.replay)

    def turn() -> None:
        for pair in pairs:
            pair.events.publish()
        first.subscriber.poll()

    asked = list(range(33))
    until(lambda: [each.length for each in first.index.find(asked)] == [32, 24, 16, 8], turn)
    assert [each.worker for each in first.index.find(asked)] == [f"worker {number}" for number in (3, 2, 1, 0)]
    assert [each.worker for each in first.index.find([92] * 9)] == ["worker 2"]
    first.subscriber.remove("worker 3")
    assert [each.length for each in first.index.find(asked)] == [24, 16, 8]


def test_every_batch_behind_a_gap_is_applied_in_order() -> None:
    """Batches 5 and 6 follow each other; 9 comes after a second gap, so blocks from before this gap are forgotten."""
    with closing(Subscriber(Index())) as subscriber:
        subscriber.add("w", "tcp://127.0.0.1:9")  # nobody listens there, so nothing is asked for again
        source = subscriber._sources["w"]
        for n in (9, 6, 5):
            batch = pack(EventBatch(0.0, [BlockStored([n], None, [n, n], 2)]))
            assert subscriber._take("w", source, n.to_bytes(8, "big"), batch) == 0
        for applied, after, known in ((2, 7, [5, 6]), (1, 10, [9])):
            assert subscriber.poll() == applied and source.next == after
            assert [n for n in (5, 6, 9) if subscriber.index.find([n, n, 0])] == known
        assert not source.held and source.nbytes == 0
