"""Turns a request log into a trace without its texts.

The id of a block is a hash of the block and of all blocks before it, with a random key that is stored nowhere. So equal
ids mean equal prompts up to there, and nobody can find the text of an id by trying texts.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from memstate.cli.files import Progress, lines
from memstate.cli.traces.form import BLOCK, TraceRequest
from memstate.cli.units import several
from memstate.errors import InvalidArgument
from memstate_tools.traces.lines import NO_YEAR, unwrapped
from memstate_tools.traces.logs import READERS, count, guessed
from memstate_tools.traces.said import TOKEN, Partial, Said, Tokens

LONGEST_LINE: Final = 64 << 20  # bytes of a line: some million tokens, as text and as ids
WAITING: Final = 8192  # requests kept in memory, because answers come later and a log may not be in order of time
YEAR: Final = 366 * 86_400_000  # milliseconds
NAMED: Final = 5
UNREADABLE: Final = (AttributeError, LookupError, OverflowError, RecursionError, SyntaxError, TypeError, ValueError)
HINTS: Final = {
    "vllm": "vLLM logs tokens with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG",
    "sglang": "SGLang logs tokens with --log-requests --log-requests-level 3",
    "openai": 'expected lines such as {"created": 1700000000, "messages": [{"role": "user", "content": "Hello"}]}',
}


@dataclass
class Summary:
    """Counts of a converted log.

    Attributes:
        requests: Requests of the trace.
        without_answer: Requests whose answer is not in the log. Their output length is 0.
        without_time: Requests whose line has no time. They get the time of the previous line.
        skipped_lines: Lines about a request that could not be read.
        first_skipped: The first skipped lines, each with its number and the reason.
        with_media: Requests with pictures, sound or films. Logs lack the tokens of these, so the trace's prompts are
            too short.
        partial: Reason -> number of skipped lines that have only a part of a prompt.
    """

    requests: int = 0
    without_answer: int = 0
    without_time: int = 0
    skipped_lines: int = 0
    first_skipped: list[str] = field(default_factory=list)
    with_media: int = 0
    partial: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unread: dict[str, int] = {}  # reason -> number of lines, for the first reasons
        self._lines: dict[str, list[int]] = {}  # reason -> its first line numbers

    def __str__(self) -> str:
        untimed = f", {self.without_time} without a time" if self.without_time else ""
        answers = f"{self.without_answer} without {'its' if self.without_answer == 1 else 'their'} answer"
        media = f", {self.with_media} with pictures, sound or films that are not counted" if self.with_media else ""
        told = [f"{several(self.requests, 'request')}, {answers}{untimed}{media}."]
        if left := sum(self.partial.values()):
            why = f"because the log has only a part of {'it' if left == 1 else 'them'}"
            told.append(f"{several(left, 'request')} left out, {why}: {self._reasons(self.partial)}.")
        if unread := self.skipped_lines - left:
            more = unread - sum(self._unread.values())
            others = f"; {more} for other reasons" if more else ""
            told.append(f"{several(unread, 'line')} not read: {self._reasons(self._unread)}{others}.")
        return " ".join(told)

    def skip(self, number: int, error: Exception) -> None:
        """Counts a line that cannot be read, or that can be read only in part."""
        self.skipped_lines += 1
        why, of = _why(error), self.partial if isinstance(error, Partial) else self._unread
        if of is self.partial or why in of or len(of) < NAMED:
            of[why] = of.get(why, 0) + 1
            if len(lines := self._lines.setdefault(why, [])) < NAMED:
                lines.append(number)
        if len(self.first_skipped) < NAMED:
            self.first_skipped.append(f"line {number}: {why}")

    def _reasons(self, of: dict[str, int]) -> str:
        return "; ".join(f"{why} ({_placed(self._lines[why], count)})" for why, count in of.items())


def _why(error: Exception) -> str:
    """Returns what is wrong with a line, in plain words."""
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    return str(error) if isinstance(error, ValueError) else "not in the form of a request"


def _placed(lines: list[int], count: int) -> str:
    more = f" and {count - len(lines)} more" if count > len(lines) else ""
    return f"{'line' if count == 1 else 'lines'} {', '.join(map(str, lines))}{more}"


def convert(
    path: Path, kind: str, summary: Summary, tokens: Tokens = guessed, report: Progress | None = None
) -> Iterator[TraceRequest]:
    """Yields the requests of a log by time. The first one has time 0. At most `WAITING` are kept in memory.

    Args:
        path: The log, compressed with gzip or not.
        kind: One of `READERS`.
        summary: Gets the counts.
        tokens: Turns texts into tokens, if the log has no ids.
        report: Called sometimes with (bytes read, bytes in all).

    Raises:
        InvalidArgument: The file cannot be read, or has no request.
    """
    waiting = _Waiting(summary)
    for number, line in unwrapped(lines(path, LONGEST_LINE, HINTS[kind], report), LONGEST_LINE):
        try:
            for said in READERS[kind](line, tokens):
                waiting.add(said)
        except UNREADABLE as error:
            summary.skip(number, error)
        while len(waiting.order) > WAITING:
            yield waiting.oldest()
    while waiting.order:
        yield waiting.oldest()
    if not summary.requests:
        others = " or ".join(name for name in READERS if name != kind)
        other = "." if summary.partial else f"; or is it a log of {others}?"
        raise InvalidArgument(f"{str(path)!r}: no request with tokens in it: {HINTS[kind]}{other} {summary}")


class _Waiting:
    """Requests that are read and not yet written.

    Attributes:
        order: (time, number in the log) of each request, as a heap.
    """

    def __init__(self, summary: Summary) -> None:
        self.order: list[tuple[int, int]] = []
        self._summary = summary
        self._key = secrets.token_bytes(32)
        # number -> (id, request, whether its answer is known)
        self._asked: dict[int, tuple[str, TraceRequest, bool]] = {}
        self._numbers: dict[str, int] = {}  # id -> number
        self._newest = self._first = -1  # milliseconds; -1: no line had a time yet
        self._last = 0
        self._read = 0

    def add(self, said: Said) -> None:
        if said.prompt is None:
            # vLLM numbers the prompts of one completions request, but the answer of the first may lack its number
            place = self._numbers.get(said.name, self._numbers.get(f"{said.name}-0"))
            if place is not None:
                name, request, answered = self._asked[place]
                longer = request.output_length + (said.answer or 0)
                ids = self._salted(request.hash_ids, said.salt)
                request = replace(request, output_length=longer, hash_ids=ids)
                self._asked[place] = name, request, answered or said.answer is not None
            return
        answer = 0 if said.answer is None else said.answer
        request = TraceRequest(0, count(said.prompt), answer, self._salted(self._ids(said.prompt), said.salt))
        number = self._read = self._read + 1
        self._summary.with_media += said.media
        at = self._newest if said.at is None else said.at
        # the log has times without a year, and a new year has begun
        if at in NO_YEAR and YEAR // 2 < self._newest - at < 2 * YEAR:
            at += YEAR
        self._newest = at
        self._summary.without_time += said.at is None
        heappush(self.order, (at, number))
        self._asked[number] = said.name, request, said.answer is not None
        if said.name:
            self._numbers[said.name] = number

    def oldest(self) -> TraceRequest:
        at, number = heappop(self.order)
        name, request, answered = self._asked.pop(number)
        if self._numbers.get(name) == number:
            del self._numbers[name]
        if self._first < 0:
            self._first = at
        self._last = max(self._last, at - self._first)
        self._summary.requests += 1
        self._summary.without_answer += not answered
        return replace(request, timestamp=self._last)

    def _ids(self, prompt: bytes) -> tuple[int, ...]:
        size, ids, before = BLOCK * TOKEN, [], b""
        for start in range(0, len(prompt), size):
            before = blake2b(before + prompt[start : start + size], digest_size=8, key=self._key).digest()
            ids.append(int.from_bytes(before))
        return tuple(ids)

    def _salted(self, ids: tuple[int, ...], salt: str) -> tuple[int, ...]:
        """Returns ids that differ from those of all other salts. The same salt gives the same ids."""
        if not salt:
            return ids
        key = blake2b(salt.encode(errors="surrogatepass"), digest_size=32, key=self._key).digest()
        return tuple(int.from_bytes(blake2b(each.to_bytes(8), digest_size=8, key=key).digest()) for each in ids)
