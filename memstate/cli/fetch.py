"""Fetches one small document over HTTP, with limits of size and time, without redirects and proxies."""

import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

from memstate.errors import InvalidArgument

SILENCE: Final = 10.0  # seconds in which the server may send nothing
WHOLE: Final = 60.0  # seconds that the whole body may take
PIECE: Final = 1 << 16


def fetch(url: str, largest: int, silence: float = SILENCE, whole: float = WHOLE) -> bytes:
    """Returns the body of a server's answer to one GET.

    The request goes straight to the host of the URL: proxies of the environment are ignored, and a redirect is an
    error.

    Args:
        url: The address, http:// or https://.
        largest: Largest number of bytes of the body.
        silence: Seconds in which the server may send nothing.
        whole: Seconds that the whole body may take.

    Raises:
        InvalidArgument: The URL is not valid, the server cannot be reached or answers with a status other than 200, the
            body is too long, or the body takes too long. The message names the URL.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidArgument("expected http://host:port/path, without a user name")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=silence)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "application/json"})
            return _body(connection.getresponse(), largest, whole)
        finally:
            connection.close()
    except TimeoutError as error:
        raise InvalidArgument(f"{url!r}: the server said nothing for {silence:g} seconds") from error
    except (OSError, ValueError, HTTPException) as error:
        raise InvalidArgument(f"{url!r}: {error or type(error).__name__}") from error


def _body(response: HTTPResponse, largest: int, whole: float) -> bytes:
    if response.status != 200:
        raise InvalidArgument(f"the server answers {response.status} {response.reason}, expected 200")
    if (response.length or 0) > largest:
        raise InvalidArgument(f"it has {response.length} bytes, expected at most {largest}")
    content, until = bytearray(), time.monotonic() + whole
    while piece := response.read1(PIECE):
        content += piece
        if len(content) > largest:
            raise InvalidArgument(f"it has more than {largest} bytes")
        if time.monotonic() > until:
            raise InvalidArgument(f"it is not there after {whole:g} seconds")
    if response.length:
        raise InvalidArgument(f"it is cut short: {response.length} bytes are missing")
    return bytes(content)
