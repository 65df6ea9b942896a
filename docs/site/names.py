"""Makes the index of names: public names, methods, metrics, events of the log and options of commands, sorted.

The sources are docstrings, the tables of docs/metrics.md, and the declarations of the commands.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from code_map import ROOT, first_sentence  # `code_map` and `public` lie beside this file
from public import api, definition
from typer.main import get_command

from memstate.cli.app import app

HEAD = """---
search:
  exclude: true
---

# Index of names
"""


class Name(NamedTuple):
    """A line of the index.

    Attributes:
        name: The documented name, such as a method or a metric.
        link: Markdown target of its explanation.
        owner: The class or command to which the name belongs, or its kind.
        says: Its meaning in a sentence.
    """

    name: str
    link: str
    owner: str
    says: str

    def __str__(self) -> str:
        """Returns the name as a line of the index, in Markdown."""
        return f"* [`{self.name}`]{self.link}{self.owner and f' ({self.owner})'}: {self.says}"


def names() -> str:
    """Returns the page as Markdown."""
    entries = sorted({*of_the_library(), *of_the_metrics(), *of_the_commands()}, key=lambda name: (key(name), name))
    letters = groupby(entries, key=lambda name: key(name)[:1].upper())
    parts = [f"## {letter}\n\n" + lines(part) for letter, part in letters]
    return "\n".join([HEAD, *parts])


def key(name: Name) -> str:
    """Returns the key by which names are sorted."""
    return name.name.removeprefix("memstate").lstrip("-_ .").lower()


def lines(part: Iterable[Name]) -> str:
    """Returns the lines of some names."""
    return "".join(f"{name}\n" for name in part)


def of_the_library() -> Iterator[Name]:
    """Yields the names of the API, and the methods and properties of its classes."""
    for entry in (entry for entries in api().values() for entry in entries):
        node, doc = definition(entry.path)
        name, target = entry.path.rsplit(".", 1)[-1], f"[{entry.path}]"
        yield Name(name, target, "", first_sentence(doc))
        methods = [part for part in getattr(node, "body", ()) if isinstance(part, ast.FunctionDef)]
        if isinstance(node, ast.ClassDef):
            for method, says in {part.name: ast.get_docstring(part) for part in methods}.items():  # overloads only once
                if not method.startswith("_"):
                    yield Name(method, f"[{entry.path}.{method}]", f"`{name}`", first_sentence(says))


def of_the_metrics() -> Iterator[Name]:
    """Yields the metrics, and the events of the log."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name, says in re.findall(r"^\| `(memstate_\w+)` \|.*\| (.+) \|$", text, re.MULTILINE):
        yield Name(name, "(metrics.md#every-figure)", "metric", says)
    for logger, event, says in re.findall(
        r"^\| `(memstate\.\w+)` \| [A-Z]+ \| `([\w ]+)`: (.+) \|.*\|$", text, re.MULTILINE
    ):
        yield Name(event, "(metrics.md#logs)", f"log `{logger}`", says)


def of_the_commands() -> Iterator[Name]:
    """Yields the commands and their options."""
    target = "(start.md#the-command-line)"
    for command, declared in get_command(app).commands.items():
        yield Name(f"memstate {command}", target, "command", first_sentence(declared.help))
        for option in declared.params:
            if option.param_type_name == "option" and option.name != "help":
                yield Name(option.opts[0], target, f"`memstate {command}`", first_sentence(option.help))
