"""Sends the events of a manager over ZMQ, as vLLM and SGLang do. Has no thread: the loop calls `publish`.

PUB       topic, number of the batch (8 bytes, big-endian), batch
ROUTER    a reader sends a number (a question); it gets the batches from this number on, then END (the answer)

Any number of readers may ask. So each call of `publish` reads and answers only a limited part of their questions. The
other questions wait in the sockets for the next call.
"""

from typing import Any, Final

import zmq

from memstate.checks import whole
from memstate.errors import ConfigurationError
from memstate.events.feed import Feed
from memstate.events.wire import END, SEQUENCE, AllBlocksCleared, pack

FRAMES: Final = 256  # limit of the frames that one call reads; a question has three frames
ANSWERS: Final = 128  # limit of the batches that one call sends as answers
ANSWERED: Final = 1 << 20  # bytes of answers after which one call sends no further batch
QUESTION: Final = 1024  # limit of the bytes of a frame; ZMQ disconnects a reader that sends a longer one
WAITING: Final = 64  # limit of the questions of one reader that wait in the socket, and of the answers to it
LIVE: Final = 1000  # live batches that may wait for one reader, or `keep` if that is more; later ones are lost


class Publisher:
    """Publishes what the prefix cache of a manager can resume.

    A reader that lacks batches asks for all batches from a number on. If a snapshot was sent after that number, the
    answer begins with the newest snapshot. If the publisher no longer keeps the batch with which the answer should
    begin, it makes the next batch a snapshot. A new question of a reader ends the answer to its earlier question.

    Args:
        mem: A manager with a prefix cache.
        endpoint: Address to which readers subscribe, such as `"tcp://*:5557"`. With port 0, the system chooses a free
            port, which the attribute `endpoint` shows.
        replay: Address at which readers ask for batches again. None: a late reader waits for the next snapshot.
        keep: Number of batches that are kept for readers who ask.
        topic: Topic of the messages.
        rank: The worker's data-parallel rank, None for none.

    Attributes:
        endpoint: The address for subscriptions.
        replay: The address for questions, None for none.

    Raises:
        ConfigurationError: The manager has no prefix cache or has a feed already, or an address cannot be used.

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
        self._question: list[bytes] = []  # frames of a question that is not complete yet
        self._answers: dict[bytes, int] = {}  # number of each reader's next batch; readers in order of turns
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
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # if a reader's queue is full, raise; do not drop the message
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"events at {endpoint!r}: {error}; expected an address such as tcp://*:5557"
            ) from error
        return socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def publish(self) -> int:
        """Sends the events since the last call, and answers questions of readers. Never waits.

        Call it once in each iteration of the loop. A call reads at most `FRAMES` frames of questions, and answers with
        at most `ANSWERS` batches and about `ANSWERED` bytes.

        Returns:
            How many batches were sent to all readers: 0 or 1.

        Syncs: no.
        """
        self._read()
        sent = self._send()
        self._answer()
        return sent

    def _send(self) -> int:
        if (batch := self._feed.take()) is None:
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
        """Reads questions, frame by frame: a message from a reader may have any number of frames."""
        for _ in range(FRAMES if self._router is not None else 0):
            try:
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._question = [*self._question[:3], frame.bytes]
            if frame.more:
                continue
            asked, self._question = self._question, []
            if len(asked) == 3 and len(asked[2]) == SEQUENCE:  # other messages are ignored
                self._answers[asked[0]] = self._begin(int.from_bytes(asked[2], "big"))

    def _begin(self, first: int) -> int:
        """Returns the number of the first batch of the answer to a question for all batches from `first` on."""
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
            except zmq.Again:  # the reader's queue is full: try again in the next call
                full[reader] = number
            except zmq.ZMQError:  # the reader has gone
                continue
            else:
                left -= len(payload)
                if not over:
                    self._answers[reader] = number + 1
        self._answers |= full

    def close(self) -> None:
        """Ends the feed and closes the sockets. Batches that are still on their way to readers may be lost."""
        self._feed.close()
        for socket in self._sockets:
            socket.close()
