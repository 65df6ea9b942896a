"""Reads lines of SGLang's request log, as text and as JSON."""

import json
import re
from ast import literal_eval
from typing import Any, Final

from memstate_tools.traces.lines import TEXT, message, parts, time
from memstate_tools.traces.said import Partial, Said, Tokens, packed, salted

EVENT = re.compile(r'(?s)\{.*"event": *"request\.')
LOGGED = re.compile(r"(Receive|Finish): obj=")
# fields of a request: their names stand directly in the outer brackets; names further inside belong to values
MARK = re.compile(rf"(?s){TEXT}|([\[({{])|([\])}}])|\b(\w+)=|['\"].*")
LEVEL_2: Final = 2048  # at log level 2, characters or tokens that a JSON log shows of a longer value, in two halves
KEYS: Final = ("lora_path", "extra_key", "cache_salt")
MEDIA: Final = ("image_data", "video_data", "audio_data")
CUT: Final = "a cut prompt, so log with --log-requests-level 3"
SESSION: Final = "a turn of a session"


def sglang(line: bytes, tokens: Tokens) -> list[Said]:
    """Reads a line of SGLang. A batch gives several requests. Returns nothing if the line has no tokens.

    Raises:
        ValueError: The line is about a request, but its tokens cannot be read; `Partial` if it has only some of them.
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
    values = parts(text)
    answer = int(values["completion_tokens"]) if "completion_tokens" in values else None
    return [Said(literal_eval(values.get("rid", "''")), None, None, answer)]


def _asked(at: int | None, given: dict[str, Any], tokens: Tokens) -> list[Said]:
    """Returns the requests of one object of the log."""
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

    def of(value: Any, place: int) -> Any:  # a list has one value per prompt, then one per further answer
        return value[place] if batch and isinstance(value, list) and place < len(value) else value

    said = []
    for place, prompt in enumerate(prompts):
        if _is_cut(prompt):
            raise Partial(CUT)
        media = [each for name in MEDIA if _is_given(each := of(given.get(name), place))]
        salt = salted(*(of(given.get(name), place) for name in KEYS), *media)
        read = tokens(prompt, None) if isinstance(prompt, str) else packed(prompt)
        said.append(Said(of(names, place), at, read, None, salt, bool(media)))
    return said


def _is_given(value: Any) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else value is not None


def _is_cut(value: Any) -> bool:
    if isinstance(value, str):  # only its length shows that a text was cut in the middle
        return value == "..." or (len(value) == LEVEL_2 + 3 and value[LEVEL_2 // 2 :].startswith("..."))
    return value is ... or "..." in value


def _fields(text: str) -> dict[str, str]:
    """Returns the fields of the object after `obj=`, as text."""
    fields: dict[str, str] = {}
    depth, name, start = 0, "", 0
    for mark in MARK.finditer(text, text.index("obj=") + 4):
        depth += bool(mark[1]) - bool(mark[2])
        if (mark[3] and depth == 1) or (mark[2] and not depth):
            if name:
                fields.setdefault(name, text[start : mark.start()].removesuffix(", "))
            if not depth:
                break
            name, start = mark[3], mark.end()
    return fields


def _value(written: str) -> Any:
    """Returns the value of a field; `...` if it was cut short, the text itself if it is no plain value."""
    if " ... " in re.sub(f"(?s){TEXT}", "", written):
        return ...
    try:
        return literal_eval(written)
    except (SyntaxError, ValueError):
        return written
