"""Sends the events of a manager over ZMQ, as vLLM and SGLang do. Has no thread: the loop calls `publish`.

PUB       topic, number of the batch (8 bytes, big-endian), batch
ROUTER    a number comes in; the batches from that number on go out, and END behind them

Readers are strangers: each call reads and answers a part of what they ask, however many there are. What is left waits
for the next call, and in a reader's own socket.
"""

from typing import Any, Final

import zmq

from memstate.checks import whole
from memstate.errors import ConfigurationError
from memstate.events.feed import Feed
from memstate.events.wire import END, SEQUENCE, AllBlocksCleared, pack

FRAMES: Final = 256  # of questions that a call reads; a question has three
ANSWERS: Final = 128  # batches that a call sends to readers that ask, and
ANSWERED: Final = 1 << 20  # their bytes: one batch may go beyond
QUESTION: Final = 1024  # bytes of a frame from a reader; who sends a longer one is disconnected
WAITING: Final = 64  # questions of one reader, and answers to it, that wait in its socket
LIVE: Final = 1000  # live batches that wait for one reader at least; it asks for what is lost beyond


class Publisher:
    """Publishes what the prefix cache of a manager can resume.

    A reader that misses batches asks for them by number. Its answer begins with the last snapshot, if that is newer. If
    neither is kept any more, the next batch is a snapshot. A reader has one answer at a time: its next question takes
    the place of the one before.

    Args:
        mem: A manager with a prefix cache.
        endpoint: Where readers subscribe, such as `"tcp://*:5557"`; a port of 0 takes a free one, see `endpoint`.
        replay: Where readers ask again. None: a late reader waits for the next snapshot.
        keep: Batches that are kept for readers that ask again.
        topic: Topic of the messages.
        rank: The worker's data-parallel rank, None for none.

    Attributes:
        endpoint: The address of subscriptions.
        replay: The address of questions, None for none.

    Raises:
        ConfigurationError: The manager has no prefix cache or another feed, or an address cannot be used.

    Example:
        >>> import torch, memstate as ms
        >>> from memstate.events import Publisher
        >>> layout = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2, pages=ms.Pages(size=4), prefix=ms.Prefix())
        >>> events = Publisher(mem, "tcp://127.0.0.1:0")
        >>> events.publish()  # once in each iteration of the loop; the first batch is a snapshot
        1
        >>> events.close()
    """

    def __init__(
        self, mem: Any, endpoint: str, replay: str | None = None, *, keep: int = 10_000, topic: str = "",
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self._keep, self._kept = whole("keep", keep), dict[int, bytes]()
        self._topic, self._number, self._snapshot = topic.encode(), 0, 0
        self._question: list[bytes] = []  # the first frames of the one that is being read
        self._answers: dict[bytes, int] = {}  # reader -> number of its next batch; whose turn it is comes first
        self._feed = Feed(mem, rank)
        self._sockets: list[Any] = []
        try:
            self._pub, self.endpoint = self._bind(zmq.PUB, endpoint)
            self._router: Any = None
            self.replay: str | None = None
            if replay is not None:
                self._router, self.replay = self._bind(zmq.ROUTER, replay)
        except ConfigurationError:
            self.close()
            raise

    def _bind(self, kind: int, endpoint: str) -> tuple[Any, str]:
        socket: Any = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, QUESTION)
        socket.setsockopt(zmq.RCVHWM, WAITING)
        socket.setsockopt(zmq.SNDHWM, WAITING if kind == zmq.ROUTER else max(self._keep, LIVE))
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or what a full socket does not take would be lost
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"events at {endpoint!r}: {error}; expected an address such as tcp://*:5557"
            ) from error
        return socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def publish(self) -> int:
        """Sends what has happened since the last call, and answers readers that ask again. Never waits.

        Call it once in each iteration. However many readers ask, and whatever they send, a call reads at most `FRAMES`
        frames of questions, and answers with at most `ANSWERS` batches and about `ANSWERED` bytes.

        Returns:
            How many batches were sent to all readers: 0 or 1.

        Syncs: no.
        """
        self._read()
        sent = self._send()
        self._answer()
        return sent

    def _send(self) -> int:
        batch = self._feed.take()
        if batch is None:
            return 0
        payload = pack(batch)
        self._pub.send_multipart((self._topic, self._number.to_bytes(SEQUENCE, "big"), payload))
        if isinstance(batch.events[0], AllBlocksCleared):
            self._snapshot = self._number
        self._kept[self._number] = payload
        self._number += 1
        self._kept.pop(self._number - self._keep - 1, None)
        return 1

    def _read(self) -> None:
        """Reads questions frame by frame, because a message may have any number of frames."""
        for _ in range(FRAMES if self._router is not None else 0):
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._question = [*self._question[:3], frame.bytes]
            if frame.more:
                continue
            asked, self._question = self._question, []
            if len(asked) == 3 and len(asked[2]) == SEQUENCE:  # else no question that anybody asks
                self._answers[asked[0]] = self._begin(int.from_bytes(asked[2], "big"))

    def _begin(self, first: int) -> int:
        """Returns the number of the batch that an answer begins with."""
        first = max(first, self._snapshot)
        if first < self._number - self._keep:
            self._feed.replaced()
            return self._number
        return min(first, self._number)

    def _answer(self) -> None:
        """Sends the next batches of answers, one to each reader in turn."""
        left, full = ANSWERED, dict[bytes, int]()
        for _ in range(ANSWERS):
            if left <= 0 or not self._answers:
                break
            reader = next(iter(self._answers))
            number = self._answers.pop(reader)
            number = number if number in self._kept else self._begin(number)
            payload = self._kept.get(number, b"")
            over = number == self._number
            frames = (b"", END) if over else (self._topic, number.to_bytes(SEQUENCE, "big"))
            try:
                self._router.send_multipart((reader, b"", *frames, payload), zmq.NOBLOCK, copy=False)
            except zmq.Again:  # it has not read what it was sent before
                full[reader] = number
            except zmq.ZMQError:  # it has gone
                continue
            else:
                left -= len(payload)
                if not over:
                    self._answers[reader] = number + 1
        self._answers |= full

    def close(self) -> None:
        """Ends the feed and closes the sockets. Batches that were not received by then may be lost."""
        self._feed.close()
        for socket in self._sockets:
            socket.close()
