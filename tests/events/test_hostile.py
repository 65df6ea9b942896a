"""Hostile readers and workers: what one call does for them is bounded, and a good reader gets everything.

Tests count at real sockets on loopback, and look at no clock.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from memstate.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Publisher
from memstate.events import publisher as sending
from memstate.events import subscriber as reading
from memstate.events.wire import END, pack
from tests.events.test_feed import manager, serve
from tests.events.test_subscriber import ANY, Pair, until

FRAMES, BATCHES, BYTES = 256, 128, 1 << 20  # limits of one call: frames that it reads, batches and bytes that it sends


class Told:
    """A feed whose batches and snapshots all have the same size in bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.whole, self.more, self.snapshots = size, True, False, 0
        self.close = lambda: None

    def take(self) -> EventBatch | None:
        events: list[Any] = [AllBlocksCleared()] if self.whole else []
        if not (self.whole or self.more):
            return None
        self.snapshots += self.whole
        self.whole = self.more = False
        return EventBatch(0.0, [*events, BlockRemoved([bytes(self.size)])])

    def replaced(self) -> None:
        self.whole = True


class Counted:
    """The socket on which readers ask; counts the frames, batches and bytes that went through it since `begin`."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.sent = socket, dict[bytes, list[bytes]]()
        self.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def begin(self) -> None:
        self.frames = self.read = self.batches = self.bytes = 0

    def recv(self, *given: Any, **more: Any) -> Any:
        frame = self._socket.recv(*given, **more)
        self.frames, self.read = self.frames + 1, self.read + len(frame)
        return frame

    def send_multipart(self, frames: Any, *given: Any, **more: Any) -> Any:
        self._socket.send_multipart(frames, *given, **more)
        self.sent.setdefault(frames[0], []).append(frames[-2])
        self.batches, self.bytes = self.batches + 1, self.bytes + len(frames[-1])


class Rig:
    """A publisher that has published some batches, and its readers."""

    def __init__(self, batches: int, size: int = 10, keep: int = 10_000) -> None:
        self.told = Told(size)
        self.events = Publisher(manager(), ANY, ANY, keep=keep)
        self.events._feed.close()
        self.events._feed = self.told  # type: ignore[assignment]
        self.router = self.events._router = Counted(self.events._router)
        self.readers: list[Any] = []
        self.tell(batches)

    def reader(self, **options: int) -> Any:
        made: Any = zmq.Context.instance().socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.connect(self.events.replay)
        self.readers.append(made)
        return made

    def tell(self, batches: int) -> None:
        """Publishes batches while no reader has asked."""
        for _ in range(batches):
            self.told.more = True
            self.events.publish()
        self.router.begin()

    def call(self) -> None:
        """Publishes once, and checks what the call has done for readers."""
        self.router.begin()
        self.events.publish()
        assert self.router.frames <= FRAMES
        assert self.router.batches <= BATCHES
        assert self.router.bytes <= BYTES + self.told.size + 100  # the last batch may exceed the limit

    def answer(self, reader: Any) -> list[int]:
        """Returns the numbers of the batches that a reader receives until its answer ends."""
        received: list[bytes] = []

        def receive() -> None:
            self.call()
            while reader.poll(0) and END not in received:
                received.append(reader.recv_multipart()[-2])

        until(lambda: END in received, receive)
        return [int.from_bytes(number, "big") for number in received[:-1]]

    def serves(self, numbers: Sequence[int], number: int = 0) -> Any:
        """Requires that a reader that asks gets these numbers, and returns the reader."""
        reader = self.reader()
        ask(reader, number)
        assert self.answer(reader) == list(numbers)
        return reader

    def close(self) -> None:
        self.events.close()
        for each in self.readers:
            each.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """A maker of rigs, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(closing(Rig(*given, **more)))


def ask(reader: Any, number: int = 0) -> None:
    reader.send_multipart((b"", number.to_bytes(8, "big")), zmq.NOBLOCK)


@pytest.mark.parametrize(("batches", "size"), [(1000, 10), (20, BYTES // 3)], ids=["many", "large"])
def test_a_join_is_answered_over_several_calls(make: Callable[..., Rig], batches: int, size: int) -> None:
    make(batches, size).serves(range(batches))


def test_a_hundred_unread_questions_are_one_answer(make: Callable[..., Rig]) -> None:
    """Another reader is answered as well."""
    rig = make(500)
    greedy = rig.reader(RCVHWM=1)
    for _ in range(100):
        ask(greedy)
    until(lambda: len(rig.router.sent) == 1, rig.call)
    rig.serves(range(500))
    first = rig.router.sent[next(iter(rig.router.sent))]
    assert len(first) <= 3 * 501  # a question during the answer begins the answer anew


@pytest.mark.parametrize("wrong", [[b"", b"short"], [b"alone"], [b"", bytes(8), b"more"], [b"", b"x" * 1000]])
def test_wrong_questions_do_not_keep_a_call(make: Callable[..., Rig], wrong: list[bytes]) -> None:
    rig = make(1)
    crowd = [rig.reader(SNDHWM=5000) for _ in range(2)]
    for each in crowd:
        for _ in range(3000):
            each.send_multipart(wrong, zmq.NOBLOCK)
    until(lambda: bool(rig.events._router.poll(100)), lambda: None)
    for _ in range(30):
        rig.call()
    rig.serves([0])


def test_a_message_of_many_frames_is_read_over_several_calls(make: Callable[..., Rig]) -> None:
    rig = make(1)
    reader = rig.reader()
    reader.send_multipart([b"", bytes(8), *[b"x"] * 5000])
    until(lambda: bool(rig.events._router.poll(100)), lambda: None)
    for _ in range(5002 // FRAMES + 1):
        rig.call()
    ask(reader)
    assert rig.answer(reader) == [0]


def test_who_sends_a_giant_message_is_disconnected(make: Callable[..., Rig]) -> None:
    rig = make(1)
    reader = rig.reader()
    monitor = reader.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    reader.send_multipart((b"", bytes(10 << 20)))
    ended: list[object] = []

    def look() -> None:
        rig.call()
        assert not rig.router.read
        if monitor.poll(0):
            ended.append(recv_monitor_message(monitor))

    until(lambda: bool(ended), look)
    reader.disable_monitor()
    rig.serves([0])


def test_a_reader_that_does_not_read_is_sent_no_more_than_waits_for_it(make: Callable[..., Rig]) -> None:
    """The rest of the answer is sent when the reader reads, and takes no memory until then.

    Another reader is answered meanwhile.
    """
    rig = make(400, 1 << 17)
    silent = rig.reader(RCVHWM=1, RCVBUF=1 << 16)
    ask(silent)
    until(lambda: len(rig.router.sent) == 1, rig.call)
    rig.serves(range(400))
    for _ in range(400):
        rig.call()
    (most,) = (len(sent) for sent in rig.router.sent.values() if sent[-1] != END)
    assert most < 300  # of 400 batches; those that were sent wait in the system's sockets
    assert rig.answer(silent) == list(range(400))


def test_a_reader_that_has_gone_is_forgotten(make: Callable[..., Rig]) -> None:
    rig = make(50, BYTES)
    reader = rig.reader()
    ask(reader)
    until(lambda: bool(rig.events._answers), rig.call)
    reader.close()
    until(lambda: not rig.events._answers, rig.call)


def test_old_questions_cost_one_snapshot_while_it_is_kept(make: Callable[..., Rig]) -> None:
    """A snapshot needs a walk over the whole cache, so one snapshot serves many questions."""
    rig = make(10, keep=4)
    reader = rig.reader()
    for asked in range(3):
        ask(reader, asked)
        numbers = rig.answer(reader)
        assert numbers[0] == 10 and rig.told.snapshots == 2
    rig.tell(4)
    ask(reader)
    assert rig.answer(reader)[0] == 15 and rig.told.snapshots == 3


@pytest.mark.parametrize("number", [3, 2**64 - 1])
def test_a_question_for_what_is_to_come_is_answered_by_the_end(make: Callable[..., Rig], number: int) -> None:
    make(3).serves([], number)


@pytest.mark.parametrize("keep", [3, 10_000])
def test_a_late_reader_is_whole_although_each_call_sends_one_batch(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New batches come faster than the answer is sent. If few batches are kept, a snapshot replaces the answer."""
    monkeypatch.setattr(sending, "ANSWERS", 1)
    with closing(Pair(keep=keep)) as pair:
        for n in range(8):
            serve(pair.mem, [n] * 8)
            pair.events.publish()
        pair.listen()
        until(lambda: bool(pair.events._answers), pair.turn)
        for n in range(8, 10):
            serve(pair.mem, [n] * 8)
            pair.turn()
        until(lambda: all(pair.knows([n] * 8) for n in range(10)), pair.turn)


# -- workers ------------------------------------------------------------------------------------------


def batch(number: int, size: int = 0) -> bytes:
    return pack(EventBatch(0.0, [BlockStored([number], None, [number] * 4, 4), BlockRemoved([bytes(size)])]))


class Looked(dict[int, Any]):
    """The dict of batches that a subscriber holds back; counts the entries that a loop over it reads."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        for each in super().__iter__():
            self.seen += 1
            yield each


@pytest.fixture
def worker() -> Iterator[Pair]:
    """A publisher, and a subscriber that has heard its first batch."""
    with closing(Pair()) as made:
        made.listen()
        until(lambda: (made.source.next, made.source.asked) == (1, None), made.turn)
        yield made


def test_what_is_behind_a_gap_is_not_looked_through_at_each_message(worker: Pair) -> None:
    worker.source.held = looked = Looked()
    for number in range(3, 503):
        worker.send(number, batch(number))
    until(lambda: len(looked) == 500, worker.subscriber.poll)
    assert looked.seen == 0
    for number in (1, 2):
        worker.send(number, batch(number))
    until(lambda: worker.source.next == 503, worker.subscriber.poll)
    assert looked.seen == 0 and not looked


def test_what_is_held_is_bounded_by_bytes_and_more_is_asked_for_again(
    worker: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 10_000
    monkeypatch.setattr(reading, "HELD", 20 * size)
    before, numbers = worker.source, iter(range(3, 1000))

    def more() -> None:
        number = next(numbers)
        worker.send(number, batch(number, size))
        worker.subscriber.poll()
        assert len(worker.source.held) <= 21

    until(lambda: worker.source is not before, more)
    until(lambda: worker.source.next == 1, worker.turn)
    assert worker.index.workers == ("w",)


def test_a_call_takes_in_a_part_of_what_a_worker_sends(worker: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MESSAGES", 10, raising=False)
    for number in range(1, 101):
        worker.send(number, batch(number))
    until(lambda: bool(worker.source.sub.poll(100)), lambda: None)
    taken: list[int] = []
    until(lambda: worker.source.next == 101, lambda: taken.append(worker.subscriber.poll()))
    assert sum(taken) == 100 and max(taken) <= 10


def test_batches_that_are_lost_behind_an_answer_are_asked_for_again(worker: Pair) -> None:
    """The answer has advanced the index, so the index forgets nothing."""
    worker.send(3, batch(3))
    until(lambda: worker.source.asked == 1, worker.subscriber.poll)
    worker.subscriber._take("w", worker.source, (1).to_bytes(8, "big"), batch(1))  # as if an answer brought it
    until(lambda: worker.source.asked == 2, worker.turn)
    assert worker.index.find([1] * 5)
