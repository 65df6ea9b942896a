"""Makes conversations of chats and agents: the messages of each request, in chat templates, with words as tokens.

Each template parts elsewhere: the next prompt differs from this prompt and its answer from this place on:

plain       nowhere: the next prompt repeats the answer
opens       at the end of this prompt: the answer begins with thoughts, which the next prompt leaves out
thinks      2 tokens before the end of this prompt, which ends with "<think>"
shut        4 tokens before the end of this prompt, which ends with empty thoughts
long        10 tokens before the end of this prompt
loops       at the first thoughts after the last question: prompts repeat thoughts only until the next question
"""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from jinja2 import Environment

Message = dict[str, Any]

_TOOLS: Final = "{% if tools %}<start>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<end>\n{% endif %}"
_CALLS: Final = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
_SAID: Final = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}" + _CALLS + "<end>\n{% endfor %}"
)  # messages without their thoughts
_OPEN: Final = "{% if add_generation_prompt %}<start>assistant\n{% endif %}"

TEMPLATES: Final = {
    "plain": _TOOLS + _SAID + _OPEN,
    "opens": _TOOLS + _SAID + _OPEN,
    "thinks": _TOOLS + _SAID + _OPEN.replace("{% endif %}", "<think>\n{% endif %}"),
    "shut": _TOOLS + _SAID + _OPEN.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}"),
    "long": _TOOLS + _SAID + _OPEN.replace("{% endif %}", "<a><b><c><d><e><f><g><h><i>\n{% endif %}"),
    "loops": _TOOLS + """\
{% set last = namespace(question=-1) %}
{% for m in messages %}
{% if m.role == "user" %}{% set last.question = loop.index0 %}{% endif %}
{% endfor %}
{% for m in messages %}<start>{{ m.role }}
{% if m.role == "assistant" and loop.index0 > last.question %}<think>
{{ m.reasoning_content or "" }}
</think>

{% endif %}{{ m.content }}""" + _CALLS + "<end>\n{% endfor %}" + _OPEN.replace("{% endif %}", "<think>\n{% endif %}"),
}  # fmt: skip
BEFORE: Final = {"opens": "<think>\n"}  # template -> text that the model says before its thoughts
FUNCTIONS: Final = ("read_file", "search", "run")
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}}
    for name in FUNCTIONS
]


class Turn(NamedTuple):
    """One request of a conversation.

    Attributes:
        messages: the messages that the client sends.
        reply: the model's answer, with its thoughts.
    """

    messages: list[Message]
    reply: Message


class Words:
    """A tokenizer whose tokens are words, tags, line ends and punctuation marks. Its vocabulary grows as it reads."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return [self._ids.setdefault(word, len(self._ids)) for word in split(text)]


def split(text: str) -> list[str]:
    """Returns the tokens of a text as strings."""
    return re.findall(r"</?\w+>|\w+|\n+|[^\w\s]", text)


class Template:
    """A chat template with its tokenizer.

    Args:
        name: one of `TEMPLATES`.
        words: the tokenizer.
    """

    def __init__(self, name: str, words: Words) -> None:
        made = Environment(trim_blocks=True, lstrip_blocks=True)
        made.filters["tojson"] = json.dumps
        self.name, self._words, self._made = name, words, made.from_string(TEMPLATES[name])

    def prompt(self, messages: Sequence[Message], **other: Any) -> list[int]:
        """Returns the tokens of a prompt."""
        return self._words(self._made.render(messages=messages, add_generation_prompt=True, **other))

    def said(self, reply: Message) -> list[int]:
        """Returns the tokens that the model says for an answer. The next prompt may write the answer otherwise."""
        thoughts = reply.get("reasoning_content")
        text = "" if thoughts is None else f"{BEFORE.get(self.name, '')}{thoughts}\n</think>\n\n"
        calls = "".join(f"<call>{json.dumps(call['function'])}</call>" for call in reply.get("tool_calls", ()))
        return self._words(f"{text}{reply['content']}{calls}<end>")

    def conversation(self, turns: Iterator[Turn], **other: Any) -> list[tuple[list[int], list[int]]]:
        """Returns the prompt and the answer of each turn."""
        return [(self.prompt(turn.messages, **other), self.said(turn.reply)) for turn in turns]


class Draw:
    """Draws texts of made-up words.

    Args:
        seed: anything with a stable `repr`.
    """

    def __init__(self, *seed: Any) -> None:
        self.random = random.Random(repr(seed))

    def text(self, median: float, sigma: float = 0.6) -> str:
        """Returns a sentence of about `median` words."""
        count = max(3, int(self.random.lognormvariate(math.log(median), sigma)))
        return " ".join(f"w{self.random.randrange(1500)}" for _ in range(count)) + "."


def system(seed: int, words: int = 350) -> str:
    """Returns a system prompt of about `words` words."""
    return Draw("system", seed).text(words, 0.01)


def chat(seed: Any, turns: int = 6, told: str = "", thinks: bool = True) -> Iterator[Turn]:
    """Yields the turns of a chat. The client sends thoughts back; templates drop them.

    Args:
        seed: seed of the texts.
        turns: number of turns.
        told: the system prompt.
        thinks: whether answers have thoughts.
    """
    draw, messages = Draw("chat", seed), [{"role": "system", "content": told}]
    for _ in range(turns):
        messages = [*messages, {"role": "user", "content": draw.text(80)}]
        reply = {"role": "assistant", "content": draw.text(200)}
        if thinks:
            reply["reasoning_content"] = draw.text(300)
        yield Turn(messages, reply)
        messages = [*messages, reply]


def agent(seed: Any, loops: int = 3, calls: int = 4, told: str = "", thinks: bool = True) -> Iterator[Turn]:
    """Yields the requests of an agent. After each question it calls tools a few times, then answers.

    Args:
        seed: seed of the texts.
        loops: number of questions.
        calls: number of tool calls per question.
        told: the system prompt.
        thinks: whether answers have thoughts.
    """
    draw, messages = Draw("agent", seed), [{"role": "system", "content": told}]
    for loop in range(loops):
        messages = [*messages, {"role": "user", "content": draw.text(60)}]
        for call in range(calls + 1):
            reply: Message = {"role": "assistant", "content": "" if call < calls else draw.text(120)}
            if thinks:
                reply["reasoning_content"] = draw.text(80)
            if call < calls:
                function = {"name": draw.random.choice(FUNCTIONS), "arguments": {"path": draw.text(4)}}
                reply["tool_calls"] = [{"type": "function", "id": f"call{loop:02d}{call:03d}", "function": function}]
            yield Turn(messages, reply)
            messages = [*messages, reply]
            if call < calls:
                id = reply["tool_calls"][0]["id"]
                messages = [*messages, {"role": "tool", "content": draw.text(250, 1), "tool_call_id": id}]


def interleaved(conversations: Sequence[Sequence[Any]], seed: int = 0) -> Iterator[tuple[int, Any]]:
    """Yields (number of the conversation, turn) of all turns, mixed at random. Turns of one conversation stay in order.

    Args:
        conversations: the turns of each conversation.
        seed: seed of the order.
    """
    draw, at = random.Random(seed), [0] * len(conversations)
    while left := [number for number, turns in enumerate(conversations) if at[number] < len(turns)]:
        number = draw.choice(left)
        yield number, conversations[number][at[number]]
        at[number] += 1
