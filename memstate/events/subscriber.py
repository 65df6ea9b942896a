"""Receives the events of many workers in order, and fills an index with them.

connected      asked for all batches that the worker keeps
next batch     applied
later batch    held, and the missing ones are asked for; if nobody has them, what the worker told before is forgotten
disconnected   forgotten: the worker cannot resume anything for us, and may be another process when it is back
too much held  as if disconnected: the answer does not come, so everything is asked for again
"""

from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.events.index import Index
from memstate.events.wire import END, SEQUENCE, unpack

LAST: Final = (2**63).to_bytes(SEQUENCE, "big")  # numbers from here on are negative ones, such as END
HELD: Final = 1 << 28  # bytes of batches behind a gap; also of a message: who sends a larger one is disconnected
ENTRY: Final = 200  # bytes that each of them takes besides its own
MESSAGES: Final = 1000  # of a worker that a call takes in, and as many that wait in its socket


@dataclass
class Source:
    """One worker's stream of batches.

    Attributes:
        endpoint: Address of its live batches.
        sub: Its live batches.
        monitor: Tells when `sub` is connected and when not.
        replay: Address where it is asked again, None for nowhere.
        dealer: Where it is asked again while it is connected.
        next: Number of the batch that comes next.
        held: Batches behind a gap, by number, as they came.
        nbytes: Bytes that they take.
        asked: From which number on it has been asked, None where no answer is under way.
    """

    endpoint: str
    sub: Any
    monitor: Any
    replay: str | None
    dealer: Any = None
    next: int = 0
    held: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0
    asked: int | None = None


class Subscriber:
    """Keeps an index up to date.

    Args:
        index: The index.
        topic: Topic of the messages.

    Attributes:
        faults: Messages that were no batches; what their worker had told is forgotten.

    Example:
        >>> subscriber = Subscriber(Index())
        >>> subscriber.add("a", "tcp://127.0.0.1:5557")
        >>> subscriber.poll()
        0
        >>> subscriber.close()
    """

    def __init__(self, index: Index, topic: str = "") -> None:
        self.index, self._topic, self.faults = index, topic.encode(), 0
        self._sources: dict[str, Source] = {}

    def add(self, worker: str, endpoint: str, replay: str | None = None) -> None:
        """Begins to listen to a worker, and asks it for all that it has told.

        Args:
            worker: Its name in the index.
            endpoint: Where it publishes.
            replay: Where it is asked again. None: what is missed is missed until its next snapshot.

        Raises:
            ConfigurationError: An address cannot be used, or there is a worker of this name.
        """
        if worker in self._sources:
            raise ConfigurationError(f"worker {worker!r} is there already: remove it first")
        for address in (endpoint, replay):
            if address is not None:
                self._connect(zmq.SUB, address).close()  # or a wrong address would show only later
        self._sources[worker] = self._listen(endpoint, replay)

    def _listen(self, endpoint: str, replay: str | None) -> Source:
        sub: Any = zmq.Context.instance().socket(zmq.SUB)
        monitor = sub.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        return Source(endpoint, self._connect(zmq.SUB, endpoint, sub), monitor, replay)

    @staticmethod
    def _connect(kind: int, endpoint: str, given: Any = None) -> Any:
        socket: Any = given or zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, HELD)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigurationError(f"events of {endpoint!r}: {error}; expected tcp://host:port") from error
        return socket

    def remove(self, worker: str) -> None:
        """Ends listening to a worker, and forgets what it has told."""
        source = self._sources.pop(worker, None)
        if source is not None:
            self._close(source)
        self.index.forget(worker)

    def poll(self) -> int:
        """Takes in what has arrived. Never waits.

        Returns:
            How many batches went into the index.
        """
        return sum(self._poll(worker, source) for worker, source in list(self._sources.items()))

    def close(self) -> None:
        """Closes the sockets. The index stays."""
        for source in self._sources.values():
            self._close(source)
        self._sources = {}

    @staticmethod
    def _close(source: Source) -> None:
        source.sub.disable_monitor()
        for socket in (source.sub, source.monitor, source.dealer):
            if socket is not None:
                socket.close()

    def _poll(self, worker: str, source: Source) -> int:
        applied = 0
        while source.monitor.poll(0):
            if recv_monitor_message(source.monitor)["event"] == zmq.EVENT_CONNECTED:
                self._begin(worker, source)
                continue
            self._listen_again(worker, source)
            return 0
        for _ in range(MESSAGES):
            if source.dealer is None or source.nbytes > HELD or not source.dealer.poll(0):
                break
            number, payload = _received(source.dealer)
            if number == END:
                if source.held and source.next == source.asked:
                    applied += self._skip(worker, source)
                source.asked = None
            else:
                applied += self._take(worker, source, number, payload)
        for _ in range(MESSAGES):
            if source.nbytes > HELD or not source.sub.poll(0):
                break
            applied += self._take(worker, source, *_received(source.sub))
        if source.nbytes > HELD:
            self._listen_again(worker, source)
        elif source.held and source.replay is None:
            applied += self._skip(worker, source)
        elif source.held and source.asked is None:
            self._ask(source)
        return applied

    def _listen_again(self, worker: str, source: Source) -> None:
        """Drops what waits in the sockets: a process that begins again numbers its batches from 0 on."""
        self._close(source)
        self.index.forget(worker)
        self._sources[worker] = self._listen(source.endpoint, source.replay)

    def _begin(self, worker: str, source: Source) -> None:
        """Asks a worker for all that it has told."""
        self.index.forget(worker)
        if source.replay is not None:
            source.dealer = self._connect(zmq.DEALER, source.replay)
            self._ask(source)

    def _take(self, worker: str, source: Source, number: bytes, payload: bytes) -> int:
        """Applies a batch and those that it leads to, or holds it; returns how many were applied."""
        try:
            if len(number) != SEQUENCE or number >= LAST:
                raise InvalidArgument(f"number {number!r} of a batch: expected {SEQUENCE} bytes, the first below 128")
            batch, at = unpack(payload), int.from_bytes(number, "big")
        except InvalidArgument:
            self.faults += 1
            self.index.forget(worker)
            return 0
        if at == source.next:
            self.index.apply(worker, batch)
            source.next += 1
            return 1 + self._apply(worker, source)
        if at > source.next and at not in source.held:
            source.held[at] = payload
            source.nbytes += len(payload) + ENTRY
        return 0

    def _apply(self, worker: str, source: Source) -> int:
        """Applies the held batches that are next."""
        applied = 0
        while (payload := source.held.pop(source.next, None)) is not None:
            source.next += 1
            source.nbytes -= len(payload) + ENTRY
            self.index.apply(worker, unpack(payload))
            applied += 1
        return applied

    def _skip(self, worker: str, source: Source) -> int:
        """Goes on behind a gap that cannot be filled: what the worker told before is not certain any more."""
        self.index.forget(worker)
        source.next = min(source.held)
        return self._apply(worker, source)

    def _ask(self, source: Source) -> None:
        if source.dealer is None:
            return
        source.asked = source.next
        source.dealer.send_multipart((b"", source.next.to_bytes(SEQUENCE, "big")))


def _received(socket: Any) -> tuple[bytes, bytes]:
    """Returns the number and the batch of the next message; a message of one frame has no number."""
    frames: list[bytes] = [b"", *socket.recv_multipart()]
    return frames[-2], frames[-1]
