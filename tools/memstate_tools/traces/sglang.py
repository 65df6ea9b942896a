"""Reads lines of SGLang's log of requests, as text and as JSON."""

import json
import re
from ast import literal_eval
from typing import Any, Final

from memstate_tools.traces.lines import TEXT, message, parts, time
from memstate_tools.traces.said import Partial, Said, Tokens, packed, salted

EVENT = re.compile(r'(?s)\{.*"event": *"request\.')
LOGGED = re.compile(r"(Receive|Finish): obj=")
# The fields of a request in a line: their names stand in the first brackets; those further inside are values
MARK = re.compile(rf"(?s){TEXT}|([\[({{])|([\])}}])|\b(\w+)=|['\"].*")
LEVEL_2: Final = 2048  # characters or tokens that JSON shows of a longer value: its halves, and dots between them
KEYS: Final = ("lora_path", "extra_key", "cache_salt")
MEDIA: Final = ("image_data", "video_data", "audio_data")
CUT: Final = "a cut prompt, so log with --log-requests-level 3"
SESSION: Final = "a turn of a session"


def sglang(line: bytes, tokens: Tokens) -> list[Said]:
    """Reads a line of SGLang; a batch is as many requests. Empty if the line does not tell of tokens.

    Raises:
        ValueError: The line is about a request, and its tokens cannot be read; `Partial` if it has some of them.
    """
    head, text = message(line)
    entry = json.loads(text) if EVENT.match(text) else {}
    if entry.get("event") == "request.finished":
        return [Said(entry["rid"], None, None, entry["out"]["meta_info"].get("completion_tokens"))]
    if entry.get("event") == "request.received":
        return _asked(time(head), entry["obj"] | {"rid": entry["rid"]}, tokens)
    logged = LOGGED.match(text)
    if not logged:
        return []
    if logged[1] == "Receive":
        return _asked(time(head), {name: _value(value) for name, value in _fields(text).items()}, tokens)
    found = parts(text)
    answer = int(found["completion_tokens"]) if "completion_tokens" in found else None
    return [Said(literal_eval(found.get("rid", "''")), None, None, answer)]


def _asked(at: int | None, given: dict[str, Any], tokens: Tokens) -> list[Said]:
    """Returns the requests that one object asks for."""
    ids, text = given.get("input_ids"), given.get("text")
    asked = text if ids is None else ids
    if not asked:
        raise ValueError("neither input_ids nor text")
    if ids is not None and not isinstance(ids, list) and ids is not ...:
        raise ValueError("input_ids is no list of tokens")
    if given.get("session_params"):
        raise Partial(SESSION)
    if _is_cut(asked):
        raise Partial(CUT)
    batch = isinstance(asked, list) and isinstance(asked[0], list | str)
    prompts = asked if batch else [asked]
    names = given.get("rid") or ""

    def of(value: Any, place: int) -> Any:  # a value for each prompt, and once more for each further answer
        return value[place] if batch and isinstance(value, list) and place < len(value) else value

    found = []
    for place, prompt in enumerate(prompts):
        if _is_cut(prompt):
            raise Partial(CUT)
        media = [each for name in MEDIA if _is_given(each := of(given.get(name), place))]
        salt = salted(*(of(given.get(name), place) for name in KEYS), *media)
        read = tokens(prompt, None) if isinstance(prompt, str) else packed(prompt)
        found.append(Said(of(names, place), at, read, None, salt, bool(media)))
    return found


def _is_given(value: Any) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else value is not None


def _is_cut(value: Any) -> bool:
    if isinstance(value, str):  # of the halves of a long text nothing tells but their lengths
        return value == "..." or (len(value) == LEVEL_2 + 3 and value[LEVEL_2 // 2 :].startswith("..."))
    return value is ... or "..." in value


def _fields(text: str) -> dict[str, str]:
    """Returns the fields of the object behind `obj=`, as they are written."""
    found: dict[str, str] = {}
    depth, name, start = 0, "", 0
    for mark in MARK.finditer(text, text.index("obj=") + 4):
        depth += bool(mark[1]) - bool(mark[2])
        if (mark[3] and depth == 1) or (mark[2] and not depth):
            if name:
                found.setdefault(name, text[start : mark.start()].removesuffix(", "))
            if not depth:
                break
            name, start = mark[3], mark.end()
    return found


def _value(written: str) -> Any:
    """Returns a field's value; three dots if it was cut, its own words if it is no plain value."""
    if " ... " in re.sub(f"(?s){TEXT}", "", written):
        return ...
    try:
        return literal_eval(written)
    except (SyntaxError, ValueError):
        return written
