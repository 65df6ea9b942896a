"""Makes HTTP clients over plain sockets. They are cheap, and can close their connection at any moment."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def asked(port: int, path: str, body: Mapping[str, Any] | None, buffer: int = 0) -> AsyncIterator[Any]:
    """Sends a request, and yields a reader of the answer. The end of the block closes the connection at any time.

    Args:
        port: Port of the server.
        path: Path of the endpoint.
        body: Body of a POST; None for a GET.
        buffer: Limit of the bytes that the socket receives before they are read; 0 for the default.
    """
    here = socket.socket()
    if buffer:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    here.setblocking(False)
    await asyncio.get_running_loop().sock_connect(here, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=here, limit=buffer or 2**16)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'POST' if data else 'GET'} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def answered(port: int, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Sends a request, and returns the status and the JSON object of the answer."""
    async with asked(port, path, body) as reader:
        head, _, data = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(data)


async def parts(reader: asyncio.StreamReader, pause: float = 0) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of a streamed answer up to its end.

    Args:
        reader: Reader of the answer.
        pause: Seconds to wait between two lines, as a slow client does.
    """
    while b"[DONE]" not in (line := await reader.readline()):
        assert line, "the stream has no end"
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
        if pause:
            await asyncio.sleep(pause)
