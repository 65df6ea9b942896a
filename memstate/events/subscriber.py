"""Receives the events of many workers in order, and fills an index with them.

a worker connects      its part of the index is emptied, and it is asked for all batches that it keeps
the next batch comes   it is applied
a later batch comes    it is held, and the missing ones are asked for; if the worker no longer keeps them, its part of
                       the index is emptied, and the held batches are applied
a worker disconnects   its part of the index is emptied, because another process may connect in its place
too much is held       the missing batches do not come: the worker is connected again, with new sockets
"""

from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.events.index import Index
from memstate.events.wire import END, SEQUENCE, unpack

LAST: Final = (2**63).to_bytes(SEQUENCE, "big")  # numbers from here on are negative as signed numbers, such as END
HELD: Final = 1 << 28  # limit of the bytes of a worker's held batches, and of one message: ZMQ refuses larger ones
ENTRY: Final = 200  # bytes that a held batch takes in addition to its payload
MESSAGES: Final = 1000  # of one worker: how many one call reads at most, and how many wait in the socket


@dataclass
class WorkerStream:
    """One worker's stream of batches.

    Attributes:
        endpoint: Address of its live batches.
        sub: Socket of its live batches.
        monitor: Socket that tells when `sub` connects and disconnects.
        replay: Address at which the worker answers questions about missing batches, None for none.
        dealer: Socket for questions; None unless the worker is connected.
        next: Number of the batch to apply next.
        held: Payloads of the batches that wait because an earlier batch is missing, by the number of the batch.
        nbytes: Bytes that the held batches take.
        asked: Number in the question whose answer is under way, None for none.
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
    """Keeps an index up to date with the events of workers.

    Args:
        index: The index.
        topic: Topic of the messages.

    Attributes:
        faults: Number of messages that were not valid batches. After such a message, the index forgets its worker.

    Example:
        >>> subscriber = Subscriber(Index())
        >>> subscriber.add("a", "tcp://127.0.0.1:5557")
        >>> subscriber.poll()
        0
        >>> subscriber.close()
    """

    def __init__(self, index: Index, topic: str = "") -> None:
        self.index, self._topic, self.faults = index, topic.encode(), 0
        self._sources: dict[str, WorkerStream] = {}

    def add(self, worker: str, endpoint: str, replay: str | None = None) -> None:
        """Begins to listen to a worker, and asks it for all batches that it keeps.

        Args:
            worker: Name of the worker in the index.
            endpoint: Address at which the worker publishes.
            replay: Address for questions about missing batches. None: after lost batches, the index is incomplete until
                the next snapshot.

        Raises:
            ConfigurationError: An address cannot be used, or a worker of this name was added before.
        """
        if worker in self._sources:
            raise ConfigurationError(f"worker {worker!r} is there already: remove it first")
        for address in (endpoint, replay):
            if address is not None:
                self._connect(zmq.SUB, address).close()  # so that a wrong address raises now, not in a later `poll`
        self._sources[worker] = self._listen(endpoint, replay)

    def _listen(self, endpoint: str, replay: str | None) -> WorkerStream:
        sub: Any = zmq.Context.instance().socket(zmq.SUB)
        monitor = sub.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        return WorkerStream(endpoint, self._connect(zmq.SUB, endpoint, sub), monitor, replay)

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
        """Stops listening to a worker, and removes the worker from the index."""
        if (source := self._sources.pop(worker, None)) is not None:
            self._close(source)
        self.index.forget(worker)

    def poll(self) -> int:
        """Reads the messages that have arrived, and applies batches. Never waits.

        Returns:
            How many batches were applied to the index.
        """
        return sum(self._poll(worker, source) for worker, source in list(self._sources.items()))

    def close(self) -> None:
        """Closes the sockets. The index stays."""
        for source in self._sources.values():
            self._close(source)
        self._sources = {}

    @staticmethod
    def _close(source: WorkerStream) -> None:
        source.sub.disable_monitor()
        for socket in (source.sub, source.monitor, source.dealer):
            if socket is not None:
                socket.close()

    def _poll(self, worker: str, source: WorkerStream) -> int:
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

    def _listen_again(self, worker: str, source: WorkerStream) -> None:
        """Forgets a worker and connects new sockets. Drops waiting messages: a new process counts from 0 again."""
        self._close(source)
        self.index.forget(worker)
        self._sources[worker] = self._listen(source.endpoint, source.replay)

    def _begin(self, worker: str, source: WorkerStream) -> None:
        """Forgets a worker, and asks it for all batches that it keeps."""
        self.index.forget(worker)
        if source.replay is not None:
            source.dealer = self._connect(zmq.DEALER, source.replay)
            self._ask(source)

    def _take(self, worker: str, source: WorkerStream, number: bytes, payload: bytes) -> int:
        """Applies a batch and the held batches that follow it, or holds it. Returns how many batches were applied."""
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

    def _apply(self, worker: str, source: WorkerStream) -> int:
        """Applies the held batches that follow the last applied one. Returns how many."""
        applied = 0
        while (payload := source.held.pop(source.next, None)) is not None:
            source.next += 1
            source.nbytes -= len(payload) + ENTRY
            self.index.apply(worker, unpack(payload))
            applied += 1
        return applied

    def _skip(self, worker: str, source: WorkerStream) -> int:
        """Gives up missing batches: forgets the worker, then applies its held batches. Returns how many."""
        self.index.forget(worker)
        source.next = min(source.held)
        return self._apply(worker, source)

    def _ask(self, source: WorkerStream) -> None:
        if source.dealer is None:
            return
        source.asked = source.next
        source.dealer.send_multipart((b"", source.next.to_bytes(SEQUENCE, "big")))


def _received(socket: Any) -> tuple[bytes, bytes]:
    """Returns number and payload of the next message; the number is empty if the message has only one frame."""
    frames: list[bytes] = [b"", *socket.recv_multipart()]
    return frames[-2], frames[-1]
