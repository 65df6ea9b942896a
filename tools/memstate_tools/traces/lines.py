"""Takes lines of logs apart: what a container put around them, the logger's head, named values, times."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from memstate.errors import InvalidArgument

NO_YEAR: Final = range(946_684_800_000, 978_307_200_000)  # milliseconds of the year 2000: times without a year
TIME = re.compile(r"(\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d{3,6})?")
HEAD = re.compile(r"\](?:\x1b\[0m)? ")  # ends what a logger puts before a message, with or without colours
# A whole text, as repr() writes it. The parts are possessive: a text without an end costs its length, not its square.
TEXT: Final = r"""(?:'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+")"""
# A value with its name in front, as in rid='7', 'rid': '7' or prompt_token_ids: [1, 2]. A text is matched as a whole,
# so nothing inside it passes for a name. Behind a value that was cut short come three dots and its end; behind a text
# without an end comes nothing.
PART = re.compile(rf"""(?s)(?:\b(\w+)=|'(\w+)': |\b(\w+): )?({TEXT}|\[[\d, ]*\]|\b\d+\b)( \.\.\. )?|['"].*""")
CRI = re.compile(rb"\S+ (stdout|stderr) ([PF])(?::\S+)? ")  # Kubernetes: P is a part of a line, F its end
DOCKER: Final = {"log", "stream", "time", "attrs"}
COMPOSE = re.compile(r"\S+ +\| (?=\{)")


def unwrapped(numbered: Iterable[tuple[int, bytes]], longest: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that a server wrote, of a file as Docker (json-file) or Kubernetes keeps it, or of a plain one.

    Both cut a long line into several. A line has the number of its last part.

    Args:
        numbered: Lines with their numbers.
        longest: Bytes of a line at most.

    Raises:
        InvalidArgument: The parts of a line are longer.
    """
    begun: dict[str, bytearray] = {}  # by stream, as parts of two streams may alternate
    number = 0
    for number, line in numbered:
        stream, part, ends = _part(line)
        if not stream:
            yield number, line
            continue
        whole = begun.setdefault(stream, bytearray())
        whole += part
        if len(whole) > longest:
            raise InvalidArgument(f"line {number}: the parts of a line are longer than {longest} bytes")
        if ends:
            yield number, bytes(begun.pop(stream))
    for rest in begun.values():
        yield number, bytes(rest)


def message(line: bytes) -> tuple[str, str]:
    """Returns what a logger put before a message, with the time, and the message."""
    text = COMPOSE.sub("", line.decode(errors="replace").rstrip(), 1)
    if text.startswith("{"):
        entry = json.loads(text)
        if str(entry.get("event")).startswith("request."):  # SGLang's, whose file has no head
            return str(entry.get("timestamp")), text
        return str(entry.get("asctime")), str(entry.get("message"))
    head, *rest = HEAD.split(text, maxsplit=1)
    return head, "".join(rest)


def parts(text: str) -> dict[str, str]:
    """Returns the named values of a message, the first of those with one name, without those that were cut short."""
    found: dict[str, str] = {}
    for equal, quoted, colon, value, cut in PART.findall(text):
        found.setdefault(equal or quoted or colon, "" if cut else value)
    return {name: value for name, value in found.items() if value}


def time(value: Any) -> int | None:
    """Returns milliseconds, None without a time. A time without a year is in `NO_YEAR`."""
    if isinstance(value, str) and (found := TIME.search(value)):
        text = found[0] if found[1] else f"2000-{found[0]}"
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)
    if isinstance(value, str) and value.replace(".", "", 1).isdecimal():
        value = float(value)
    if type(value) not in (int, float):
        return None
    if not 0 <= value < 1e14:  # seconds pass 1e11 in the year 5138, milliseconds 1e14
        raise ValueError(f"time {value}: expected seconds or milliseconds since 1970")
    return int(value if value > 1e11 else value * 1000)


def _part(line: bytes) -> tuple[str, bytes, bool]:
    """Returns a stream, what the line has of it, and whether a line of it ends here; no stream for a plain line."""
    if found := CRI.match(line):
        return found[1].decode(), line[found.end() :].rstrip(b"\r\n"), found[2] == b"F"
    if line.startswith(b'{"') and b'"stream"' in line:
        try:
            entry = json.loads(line)
        except ValueError:
            return "", line, True
        text, stream = entry.get("log"), entry.get("stream")
        if isinstance(text, str) and isinstance(stream, str) and stream and entry.keys() <= DOCKER:
            return stream, text.encode(errors="surrogatepass"), text.endswith("\n")
    return "", line, True
