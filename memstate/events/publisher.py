"""Sends the events of a manager over ZMQ, as vLLM and SGLang do. Has no thread: the loop calls `publish`.

PUB       topic, number of the batch (8 bytes, big-endian), batch
ROUTER    a number comes in; the batches from that number on go out, and END behind them
"""

from collections import deque
from typing import Any

import zmq

from memstate.checks import whole
from memstate.errors import ConfigurationError
from memstate.events.feed import Feed
from memstate.events.wire import END, SEQUENCE, pack


class Publisher:
    """Publishes what the prefix cache of a manager can resume.

    A reader that misses batches asks for them by number. If they are not kept any more, the next batch is a snapshot.

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
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=whole("keep", keep))
        self._topic, self._number = topic.encode(), 0
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
        socket.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else 100_000)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"events at {endpoint!r}: {error}; expected an address such as tcp://*:5557"
            ) from error
        return socket, socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def publish(self) -> int:
        """Sends what has happened since the last call, and answers readers that ask again. Never waits.

        Call it once in each iteration.

        Returns:
            How many batches were sent to all readers: 0 or 1.

        Syncs: no.
        """
        self._answer()
        batch = self._feed.take()
        if batch is None:
            return 0
        payload = pack(batch)
        self._pub.send_multipart((self._topic, self._number.to_bytes(SEQUENCE, "big"), payload))
        self._kept.append((self._number, payload))
        self._number += 1
        return 1

    def _answer(self) -> None:
        while self._router is not None and self._router.poll(0):
            frames = self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQUENCE:
                continue  # no question that anybody asks
            reader, first = frames[0], int.from_bytes(frames[2], "big")
            if first < self._number and first < self._kept[0][0]:
                self._feed.replaced()
            for number, payload in self._kept:
                if number >= first:
                    self._reply(reader, self._topic, number.to_bytes(SEQUENCE, "big"), payload)
            self._reply(reader, b"", END, b"")

    def _reply(self, reader: bytes, *frames: bytes) -> None:
        assert self._router is not None
        self._router.send_multipart((reader, b"", *frames))

    def close(self) -> None:
        """Ends the feed and closes the sockets. Batches that were not received by then may be lost."""
        self._feed.close()
        for socket in self._sockets:
            socket.close()
