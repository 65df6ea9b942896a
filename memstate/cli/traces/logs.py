"""Reads lines of request logs: of vLLM, of SGLang, and requests in the form of OpenAI's API, one JSON object a line.

A reader turns a line into what it says about a request. It knows no other lines and no traces.
"""

import json
import re
from array import array
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from memstate.checks import shown, whole
from memstate.errors import ConfigurationError

TOKEN: Final = 4  # bytes


# From a text or a list of messages, and the tools offered, to tokens: `TOKEN` bytes each, the last perhaps fewer
Tokens = Callable[[Any, Any], bytes]


@dataclass(frozen=True)
class Said:
    """What a line says about a request.

    Args:
        name: The id of the request.
        at: Time of the line in milliseconds, None without one.
        prompt: The tokens given; None if the line is about the answer only.
        answer: Tokens generated that the line tells of; None if it tells of none.

    Raises:
        ValueError: No request can be like this.
    """

    name: str
    at: int | None
    prompt: bytes | None
    answer: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"request id {shown(self.name)}: expected a text")
        if self.prompt == b"":
            raise ValueError("the prompt is empty")
        if self.answer is not None:
            whole("tokens of the answer", self.answer, 0)


NO_YEAR: Final = range(946_684_800_000, 978_307_200_000)  # milliseconds of the year 2000: times without a year
TIME = re.compile(r"(\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d{3,6})?")
HEAD = re.compile(r"\](?:\x1b\[0m)? ")  # ends what a logger puts before a message, with or without colours
# A whole text, as repr() writes it. The parts are possessive: a text without an end costs its length, not its square.
TEXT: Final = r"""(?:'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+")"""
# A value with its name in front, as in rid='7', 'rid': '7' or prompt_token_ids: [1, 2]. A text is matched as a whole,
# so nothing inside it passes for a name. Behind a value that was cut short come three dots and its end; behind a text
# without an end comes nothing.
PART = re.compile(rf"""(?s)(?:\b(\w+)=|'(\w+)': |\b(\w+): )?({TEXT}|\[[\d, ]*\]|\b\d+\b)( \.\.\. )?|['"].*""")
# An id is the client's own words: what stands elsewhere than vLLM writes it comes from there
VLLM_ASKED = re.compile(rf"(?s)(?:Received request|Request) (\S+?)(?: details)?: prompt: (?:(?:None|{TEXT})(, .*))?")
VLLM_ANSWERED = re.compile(
    rf"(?s)Generated response (\S+)(?: \(streaming \w+\))?(?: details)?: (?:output: {TEXT}, )?"
    r"output_token_ids: (\[[\d, ]*\])(?:, |$)"
)
SGLANG = re.compile(r"(Receive|Finish): obj=")


def vllm(line: bytes, tokens: Tokens) -> Said | None:
    """Reads a line of vLLM, as text or as JSON; None if it does not tell of tokens.

    Raises:
        ValueError: The line is about a request, and its tokens cannot be read.
    """
    head, message = _message(line)
    if asked := VLLM_ASKED.match(message):
        behind = asked[2] or ""
        ids = _parts(behind).get("prompt_token_ids")
        if ids is None or ": prompt: " in behind:
            raise ValueError("prompt_token_ids missing behind the prompt")
        return Said(asked[1], _time(head), _packed(json.loads(ids)), None)
    if answered := VLLM_ANSWERED.match(message):
        return Said(answered[1], None, None, len(json.loads(answered[2])) or None)
    return None


def sglang(line: bytes, tokens: Tokens) -> Said | None:
    """Reads a line of SGLang, as text or as JSON; None if it does not tell of tokens.

    Raises:
        ValueError: The line is about a request, and its tokens cannot be read.
    """
    head, message = _message(line)
    entry = json.loads(message) if message.startswith('{"timestamp"') else {}
    if entry.get("event") == "request.finished":
        return Said(entry["rid"], None, None, entry["out"]["meta_info"].get("completion_tokens"))
    if entry.get("event") == "request.received":
        name, ids, text = entry["rid"], entry["obj"].get("input_ids"), entry["obj"].get("text")
    elif logged := SGLANG.match(message):
        parts = _parts(message)
        name = literal_eval(parts.get("rid", "''"))
        if logged[1] == "Finish":
            return Said(name, None, None, int(parts["completion_tokens"]) if "completion_tokens" in parts else None)
        ids, text = (literal_eval(parts[each]) if each in parts else None for each in ("input_ids", "text"))
    else:
        return None
    if ids is None and text is None:
        raise ValueError("neither input_ids nor text")
    return Said(name, _time(head), tokens(text, None) if ids is None else _packed(ids), None)


def openai(line: bytes, tokens: Tokens) -> Said | None:
    """Reads a request of chat or of completions, alone or with its response; None if the line is blank.

    Raises:
        ValueError: It is no such line.
    """
    if not line.strip():
        return None
    entry = json.loads(line)
    asked = entry.get("request") or entry.get("body") or entry
    answered = entry.get("response") or entry
    answered = answered.get("body") or answered if answered is not entry else entry
    messages, given = asked.get("messages"), asked.get("prompt")
    if messages and all(isinstance(each, dict) for each in messages):
        prompt = tokens(messages, asked.get("tools"))
    elif given and not messages:
        prompt = tokens(given, asked.get("tools")) if isinstance(given, str) else _packed(given)
    else:
        raise ValueError("neither messages nor prompt")
    times = (each.get(key) for key in ("timestamp", "created") for each in (entry, asked, answered))
    answer = (answered.get("usage") or {}).get("completion_tokens")
    if answer is None and (choices := answered.get("choices")):
        answer = count(tokens(choices[0].get("text") or choices[0]["message"]["content"] or "", None))
    return Said("", _time(next((time for time in times if time is not None), None)), prompt, answer)


READERS: Final[dict[str, Callable[[bytes, Tokens], Said | None]]] = {"vllm": vllm, "sglang": sglang, "openai": openai}


def count(tokens: bytes) -> int:
    """Returns how many tokens these are."""
    return -(-len(tokens) // TOKEN)


def guessed(given: Any, tools: Any) -> bytes:
    """Takes each `TOKEN` bytes of a text for a token. Messages and tools are texts of JSON."""
    texts = [given] if isinstance(given, str) else [json.dumps(each, ensure_ascii=False) for each in (tools, *given)]
    return "".join(texts).encode()


def tokenized(name: str) -> Tokens:
    """Returns the tokens of a tokenizer, with its template for messages.

    Args:
        name: A folder with the files of a tokenizer, or a model on the hub.

    Raises:
        ConfigurationError: Transformers is missing.
        OSError: There is no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            "a tokenizer needs Transformers: pip install '.[transformers]' in a checkout of memstate"
        ) from error
    tokenizer: Any = AutoTokenizer.from_pretrained(name)

    template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)

    def tokens(given: Any, tools: Any) -> bytes:
        return _packed(tokenizer.encode(given) if isinstance(given, str) else template(given, tools=tools))

    return tokens


def _message(line: bytes) -> tuple[str, str]:
    """Returns what a logger put before a message, with the time, and the message."""
    text = line.decode(errors="replace").rstrip()
    if text.startswith("{"):
        entry = json.loads(text)
        return str(entry.get("asctime")), str(entry.get("message"))
    head, *message = HEAD.split(text, maxsplit=1)
    return head, "".join(message)


def _parts(message: str) -> dict[str, str]:
    """Returns the named values of a message, the first of those with one name, without those that were cut short."""
    found: dict[str, str] = {}
    for equal, quoted, colon, value, cut in PART.findall(message):
        found.setdefault(equal or quoted or colon, "" if cut else value)
    return {name: value for name, value in found.items() if value}


def _packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def _time(value: Any) -> int | None:
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
