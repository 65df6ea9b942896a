"""Takes lines of logs apart: wrappers of containers, the logger's head, named values and times."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from memstate.errors import InvalidArgument

# milliseconds of the year 2000, in which times without a year are placed
NO_YEAR: Final = range(946_684_800_000, 978_307_200_000)
TIME = re.compile(r"(\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d{3,6})?")
HEAD = re.compile(r"\](?:\x1b\[0m)? ")  # end of a logger's head, with or without colours
# a whole text, as repr() writes it; the parts are possessive, so a text without an end takes linear time
TEXT: Final = r"""(?:'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+")"""
# A value with its name in front, as in rid='7', 'rid': '7' or prompt_token_ids: [1, 2]. A text is matched as a whole,
# so nothing inside it passes for a name. A value that was cut short is followed by three dots and its end. A text
# without an end takes the rest of the line.
PART = re.compile(rf"""(?s)(?:\b(\w+)=|'(\w+)': |\b(\w+): )?({TEXT}|\[[\d, ]*\]|\b\d+\b)( \.\.\. )?|['"].*""")
CRI = re.compile(rb"\S+ (stdout|stderr) ([PF])(?::\S+)? ")  # Kubernetes: P marks a part of a line, F its last part
DOCKER: Final = {"log", "stream", "time", "attrs"}
COMPOSE = re.compile(r"\S+ +\| (?=\{)")


def unwrapped(numbered: Iterable[tuple[int, bytes]], longest: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that a server wrote, from a plain file or from a log file of Docker (json-file) or Kubernetes.

    Docker and Kubernetes split long lines. A joined line has the number of its last part.

    Args:
        numbered: Lines with their numbers.
        longest: Largest number of bytes of a line.

    Raises:
        InvalidArgument: The joined parts of a line are longer than `longest`.
    """
    begun: dict[str, bytearray] = {}  # stream -> its unfinished line, because parts of two streams may alternate
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
    """Returns the logger's head of a line, with the time, and the message after it."""
    text = COMPOSE.sub("", line.decode(errors="replace").rstrip(), 1)
    if text.startswith("{"):
        entry = json.loads(text)
        if str(entry.get("event")).startswith("request."):  # SGLang's file of events has no head
            return str(entry.get("timestamp")), text
        return str(entry.get("asctime")), str(entry.get("message"))
    head, *rest = HEAD.split(text, maxsplit=1)
    return head, "".join(rest)


def parts(text: str) -> dict[str, str]:
    """Returns name -> value of a message. Of equal names the first counts; values that were cut short are left out."""
    values: dict[str, str] = {}
    for equal, quoted, colon, value, cut in PART.findall(text):
        values.setdefault(equal or quoted or colon, "" if cut else value)
    return {name: value for name, value in values.items() if value}


def time(value: Any) -> int | None:
    """Returns milliseconds; None if the value is no time. A time without a year is placed in `NO_YEAR`."""
    if isinstance(value, str) and (match := TIME.search(value)):
        text = match[0] if match[1] else f"2000-{match[0]}"
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)
    if isinstance(value, str) and value.replace(".", "", 1).isdecimal():
        value = float(value)
    if type(value) not in (int, float):
        return None
    if not 0 <= value < 1e14:  # as seconds 1e11 is the year 5138, as milliseconds 1e14
        raise ValueError(f"time {value}: expected seconds or milliseconds since 1970")
    return int(value if value > 1e11 else value * 1000)


def _part(line: bytes) -> tuple[str, bytes, bool]:
    """Returns for a line of the file: its stream ("" if plain), its text, and whether the server's line ends there."""
    if match := CRI.match(line):
        return match[1].decode(), line[match.end() :].rstrip(b"\r\n"), match[2] == b"F"
    if line.startswith(b'{"') and b'"stream"' in line:
        try:
            entry = json.loads(line)
        except ValueError:
            return "", line, True
        text, stream = entry.get("log"), entry.get("stream")
        if isinstance(text, str) and isinstance(stream, str) and stream and entry.keys() <= DOCKER:
            return stream, text.encode(errors="surrogatepass"), text.endswith("\n")
    return "", line, True
