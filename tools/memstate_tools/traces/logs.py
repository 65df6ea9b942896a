"""Reads request logs of vLLM and SGLang, and requests in the form of OpenAI's API, as one JSON object per line.

A reader turns one line into a list of `Said`, one for each request that the line is about.
"""

import json
import re
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from memstate.errors import ConfigurationError
from memstate_tools.traces.lines import TEXT, message, parts, time
from memstate_tools.traces.said import TOKEN, Partial, Said, Tokens, packed, salted
from memstate_tools.traces.sglang import sglang

# a request id is chosen by the client, so text that looks like a log line may come from an id
VLLM_ASKED = re.compile(rf"(?s)(?:Received request|Request) (\S+?)(?: details)?: prompt: (?:(None|{TEXT})(, .*))?")
VLLM_ADAPTER = re.compile(r"(?s)Received request (\S+?): params: .*, lora_request: (.*)")
VLLM_ANSWERED = re.compile(
    rf"(?s)Generated response (\S+)(?: \(streaming \w+\))?(?: details)?: (?:output: {TEXT}, )?"
    r"output_token_ids: (\[[\d, ]*\])(?:, |$)"
)
SHORT: Final = 8  # characters; a text that is not longer may have one token for each character
MAX_LOG_LEN: Final = "a cut prompt, with as many characters as tokens, so log without --max-log-len"
EMBEDS: Final = "a prompt with a part given as embeddings"
EARLIER: Final = "a turn without the turns before it, as previous_response_id or conversation says"
# how the types of media parts of a message begin, after an optional "input_"
MEDIA: Final = ("image", "audio", "video", "file")


def vllm(line: bytes, tokens: Tokens) -> list[Said]:
    """Reads a line of vLLM, as text or as JSON. Returns nothing if the line has neither tokens nor an adapter.

    Raises:
        ValueError: The line is about a request, but its tokens cannot be read; `Partial` if it has only some of them.
    """
    head, text = message(line)
    if asked := VLLM_ASKED.match(text):
        behind = asked[3] or ""
        listed = parts(behind).get("prompt_token_ids")
        if listed is None or ": prompt: " in behind:
            raise ValueError("prompt_token_ids missing behind the prompt")
        ids = json.loads(listed)
        if len(ids) > SHORT and asked[2] != "None" and len(literal_eval(asked[2])) == len(ids):
            raise Partial(MAX_LOG_LEN)
        if ", prompt_embeds shape: torch.Size" in behind:
            raise Partial(EMBEDS)
        return [Said(asked[1], time(head), packed(ids), None, _adapter(behind.rpartition(", lora_request: ")[2]))]
    if answered := VLLM_ANSWERED.match(text):
        return [Said(answered[1], None, None, len(json.loads(answered[2])) or None)]
    if (loaded := VLLM_ADAPTER.match(text)) and (salt := _adapter(loaded[2])):
        return [Said(loaded[1], None, None, None, salt)]
    return []


def openai(line: bytes, tokens: Tokens) -> list[Said]:
    """Reads a chat or completions request, alone or with its response. A list of prompts gives one request per prompt.

    Raises:
        ValueError: The line is no request; `Partial` if it has only a part of a prompt.
    """
    if not line.strip():
        return []
    entry = json.loads(line)
    asked = entry.get("request") or entry.get("body") or entry
    answered = entry.get("response") or entry
    answered = answered.get("body") or answered if answered is not entry else entry
    if asked.get("previous_response_id") or asked.get("conversation"):
        raise Partial(EARLIER)
    messages, given = asked.get("messages"), asked.get("prompt")
    media: list[Any] = []
    if messages and all(isinstance(each, dict) for each in messages):
        prompts = [tokens(_without_media(messages, media), asked.get("tools"))]
    elif given and not messages:
        batch = isinstance(given, list) and isinstance(given[0], str | list)
        prompts = [
            tokens(each, None) if isinstance(each, str) else packed(each) for each in (given if batch else [given])
        ]
    else:
        raise ValueError("neither messages nor prompt")
    times = (each.get(key) for key in ("timestamp", "created") for each in (entry, asked, answered))
    at = time(next((each for each in times if each is not None), None))
    keys = (asked.get(name) for name in ("model", "cache_salt", "extra_key", "lora_path"))
    salt = salted(*keys, *media)
    choices = answered.get("choices") or []
    answers: list[int | None] = [(answered.get("usage") or {}).get("completion_tokens")]
    if len(prompts) > 1 or answers == [None]:  # the usage counts the tokens of all prompts together
        texts = [each.get("text") or (each.get("message") or {}).get("content") or "" for each in choices]
        answers = [count(tokens(text, None)) for text in texts]
    if len(answers) < len(prompts) or len(answers) > len(prompts) > 1:
        answers = [None] * len(prompts)
    return [Said("", at, one, answer, salt, bool(media)) for one, answer in zip(prompts, answers, strict=False)]


READERS: Final[dict[str, Callable[[bytes, Tokens], list[Said]]]] = {"vllm": vllm, "sglang": sglang, "openai": openai}


def count(tokens: bytes) -> int:
    """Returns the number of tokens in packed bytes."""
    return -(-len(tokens) // TOKEN)


def guessed(given: Any, tools: Any) -> bytes:
    """Returns the bytes of a text as tokens of `TOKEN` bytes. Messages and tools are written as JSON first."""
    texts = [given] if isinstance(given, str) else [json.dumps(each, ensure_ascii=False) for each in (tools, *given)]
    return "".join(texts).encode()


def tokenized(name: str) -> Tokens:
    """Returns a function that turns texts and messages into tokens of a tokenizer, with its chat template.

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
        return packed(tokenizer.encode(given) if isinstance(given, str) else template(given, tools=tools))

    return tokens


def _adapter(written: str) -> str:
    """Returns the text by which vLLM tells an adapter from others; empty if there is no adapter."""
    return written if written.startswith("LoRARequest(") else ""


def _without_media(messages: list[dict[str, Any]], media: list[Any]) -> list[dict[str, Any]]:
    """Returns the messages with pictures, sound and films reduced to their types. The removed parts go to `media`."""

    def reduced(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or not kind.removeprefix("input_").startswith(MEDIA):
            return part
        media.append(part)
        return {"type": kind}

    return [
        each | {"content": [reduced(part) for part in each["content"]]}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
