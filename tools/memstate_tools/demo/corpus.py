"""Makes conversations of several turns with shared system prompts, from documentation strings or from a file.

A token is a byte.
"""

import importlib
import inspect
import random
from dataclasses import dataclass
from pathlib import Path

from memstate.cli.files import objects
from memstate.errors import InvalidArgument

MODULES = (
    "argparse", "array", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv",
    "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "gzip", "hashlib", "heapq", "html",
    "inspect", "io", "itertools", "json", "locale", "logging", "math", "operator", "pathlib", "pprint", "random", "re",
    "sched", "secrets", "shlex", "shutil", "statistics", "string", "struct", "textwrap", "threading", "tokenize",
    "uuid", "zipfile",
)  # fmt: skip
SHORTEST = 40  # characters of the shortest docstring that is quoted
LONGEST = 4096  # largest number of bytes of a conversation from a file: attention is padded to the longest conversation


@dataclass(frozen=True)
class ChatScript:
    """A system prompt and the user's text of each turn, as bytes. The answers are generated."""

    number: int
    system: bytes
    turns: tuple[bytes, ...]

    @property
    def prompt_bytes(self) -> int:
        """Number of bytes of system prompt and all turns, without answers."""
        return len(self.system) + sum(map(len, self.turns))


def from_docstrings(requests: int, seed: int) -> list[ChatScript]:
    """Returns conversations with `requests` turns in all. The same seed and Python give the same conversations.

    A third of the conversations share each system prompt. Lengths vary so that they fall before, on and after multiples
    of every page and chunk size.

    Raises:
        InvalidArgument: This Python has no documentation strings.
    """
    chance = random.Random(f"memstate demo {seed}")
    modules = list(MODULES)
    chance.shuffle(modules)
    subjects = (subject for subject in map(_read_module, modules) if subject is not None)
    systems: list[tuple[bytes, list[str]]] = []
    for _, (name, summary, texts) in zip(range(3), subjects, strict=False):
        system = f"About Python's {name}: {summary}\n"
        systems.append((system.encode()[: chance.randint(40, 56)], texts))
    if not systems:
        raise InvalidArgument("no documentation strings in this Python (started with -OO?): use --input FILE")
    conversations: list[ChatScript] = []
    while requests > 0:
        shared, texts = systems[len(conversations) % len(systems)]
        count = min(requests, chance.randint(1, 4))
        turns = tuple(chance.choice(texts).encode()[: chance.randint(9, 26)] for _ in range(count))
        conversations.append(ChatScript(len(conversations), shared, turns))
        requests -= count
    return conversations


def from_file(path: Path) -> list[ChatScript]:
    """Reads one JSON object per line: {"system": "text", "turns": ["text", ...]}; "system" may be left out.

    Raises:
        InvalidArgument: The file cannot be read, or a line is no conversation. The message names file and line.
    """
    conversations: list[ChatScript] = []
    for place, entry in objects(path, '{"system": "...", "turns": ["..."]}'):
        where, system, turns = f"input {place}", entry.get("system", ""), entry.get("turns")
        if not isinstance(system, str):
            raise InvalidArgument(f'{where}: "system" must be a text')
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise InvalidArgument(f'{where}: "turns" must be a list of one or more texts that are not empty')
        try:
            conversation = ChatScript(len(conversations), system.encode(), tuple(turn.encode() for turn in turns))
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{where}: half a surrogate pair cannot be encoded ({error.reason})") from error
        if conversation.prompt_bytes > LONGEST:
            raise InvalidArgument(
                f"{where}: {conversation.prompt_bytes} bytes, the demo's model takes {LONGEST} at most"
            )
        conversations.append(conversation)
    if not conversations:
        raise InvalidArgument(f"input {path}: no conversation in it")
    return conversations


def first_requests(conversations: list[ChatScript], requests: int) -> list[ChatScript]:
    """Returns the first conversations, with `requests` turns in all."""
    kept = []
    for conversation in conversations:
        turns = conversation.turns[:requests]
        if turns:
            kept.append(ChatScript(conversation.number, conversation.system, turns))
        requests -= len(turns)
    return kept


def _read_module(name: str) -> tuple[str, str, list[str]] | None:
    """Returns a module's name, its summary and a question for each documented name; None if there are too few."""
    try:
        module = importlib.import_module(name)
    except ImportError:  # some builds of Python leave out modules
        return None
    things = {thing: value for thing, value in sorted(vars(module).items()) if thing[0] != "_" and callable(value)}
    docs = {thing: _doc(value) for thing, value in things.items()}
    texts = [f"{thing}? {doc}\n" for thing, doc in docs.items() if len(doc) >= SHORTEST]
    summary = _doc(module)
    return (name, summary, texts) if len(summary) >= SHORTEST and len(texts) >= 4 else None


def _doc(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())
