"""Tests `mst.chat`: for each template, the lengths at which later prompts part, and the hits at these lengths."""

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import pytest

import memstate as ms
from tests.support.chats import TEMPLATES, TOOLS, Message, Turn, agent, chat
from tests.support.tiny_models import tiny
from tests.support.tiny_tokenizers import byte_level

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from tests.integrations.servers import Judged

PAGE = 16
SYSTEM = {"role": "system", "content": "You are a helpful assistant, and you answer in two sentences."}
TAILS = {"plain": None, "opens": None, "thinks": "<think>\n", "shut": "<think>\n\n</think>\n\n", "loops": "<think>\n",
         "long": "<a><b><c><d><e><f><g><h><i>\n"}  # fmt: skip


def asks(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Asked:
    """A tokenizer of bytes that notes the settings of each rendering, and may refuse messages.

    Args:
        template: the chat template.
        refuses: a function that raises for messages that it refuses.
    """

    def __init__(self, template: str, refuses: Callable[[list[Message]], Any] = lambda _: None) -> None:
        self.own, self.refuses, self.given = byte_level(), refuses, list[dict[str, Any]]()
        self.own.chat_template = template

    def apply_chat_template(self, messages: list[Message], **given: Any) -> Any:
        self.given.append(given)
        self.refuses(messages)
        return self.own.apply_chat_template(messages, number=len(self.given), **given)

    def heads(self, prompt: mst.Prompt) -> list[str]:
        """Returns for each length in a prompt's `snapshot_at` the text of the prompt up to this length."""
        return [self.own.decode(prompt.tokens[:at]) for at in prompt.snapshot_at]


def parting(one: Any, other: Any) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("talk", "tools"), [(chat, None), (agent, TOOLS)])
def test_prompts_part_at_the_lengths_that_were_named(
    name: str, talk: Callable[..., Iterator[Turn]], tools: list[Any] | None
) -> None:
    tokenizer, named, before = Asked(TEMPLATES[name]), set[int](), None
    for turn in talk(f"{name} named", told=SYSTEM["content"]):
        prompt = mst.chat(tokenizer, turn.messages, tools=tools)
        if before:
            at = parting(before.tokens, prompt.tokens)
            assert at in named or at == len(before.tokens), turn.messages
        named.update(prompt.snapshot_at)
        before = prompt
    other = mst.chat(tokenizer, [{"role": "system", "content": SYSTEM["content"]}, asks("Other words.")], tools=tools)
    assert before and parting(before.tokens, other.tokens) in named


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_lengths_of_a_prompt(name: str) -> None:
    tokenizer = Asked(TEMPLATES[name])
    prompt = mst.chat(tokenizer, [SYSTEM, asks("Why?")])
    text, tail = tokenizer.own.decode(prompt.tokens), TAILS[name]
    head, *rest = tokenizer.heads(prompt)
    assert (head, text) == (text[: text.index("Why?")], text)
    assert rest == ([] if tail is None else [text.removesuffix(tail)])


def test_a_chat_may_begin_with_several_messages_of_the_system_or_with_none() -> None:
    tokenizer = Asked(TEMPLATES["plain"])
    developer = {"role": "developer", "content": "Be short."}
    (head,) = tokenizer.heads(mst.chat(tokenizer, [SYSTEM, developer, asks("Why?"), says("So."), asks("When?")]))
    assert head.endswith("Be short.<end>\n<start>user\n")
    assert tokenizer.heads(mst.chat(tokenizer, [asks("Why?")])) == ["<start>user\n"]


def test_ends_of_lines_that_are_one_token_do_not_move_the_end_of_a_head() -> None:
    tokenizer = Asked(TEMPLATES["plain"])
    tokenizer.own.add_tokens(["\n\n"])
    assert tokenizer.heads(mst.chat(tokenizer, [asks("Why?")])) == ["<start>user\n"]


@pytest.mark.parametrize(("tools", "heads"), [(None, []), ([], []), (TOOLS, ["[user]Why?["])])
def test_the_next_call_is_asked_for_where_there_are_tools(tools: list[Any] | None, heads: list[str]) -> None:
    said = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer = Asked("{% if messages[-1].role == 'tool' %}[user]Why?[call]{% else %}" + said + "{% endif %}")
    prompt = mst.chat(tokenizer, [asks("Why?")], tools=tools)
    assert tokenizer.own.decode(prompt.tokens) == "[user]Why?[assistant]"
    assert tokenizer.heads(prompt) == ["[user]", *heads]
    assert all(given["tools"] is tools for given in tokenizer.given)


def test_a_template_that_refuses_one_probe_answers_the_others() -> None:
    def refuses(messages: list[Message]) -> None:
        if messages[-1] == asks("."):
            raise ValueError("no second question")

    tokenizer = Asked(TEMPLATES["shut"], refuses)
    first, other = tokenizer.heads(mst.chat(tokenizer, [asks("Why?")], tools=TOOLS))
    assert (first[-5:], other[-11:]) == ("user\n", "assistant\n<")  # both "<call>" and "<think>" begin with "<"


def test_a_template_that_refuses_all_probes_gives_a_prompt_and_no_length() -> None:
    class Refusal(Exception):
        pass

    def refuses(messages: list[Message]) -> None:
        if messages != [asks("Why?")]:
            raise Refusal

    tokenizer = Asked(TEMPLATES["thinks"], refuses)
    prompt = mst.chat(tokenizer, [asks("Why?")], tools=TOOLS)
    assert (tokenizer.own.decode(prompt.tokens)[-8:], prompt.snapshot_at, len(tokenizer.given)) == ("<think>\n", [], 4)
    with pytest.raises(Refusal):
        mst.chat(tokenizer, [asks("When?")])


def test_a_tokenizer_that_changes_messages_changes_no_other_chat() -> None:
    def empties(messages: list[Message]) -> None:
        for one in messages[1:]:
            one["content"] = ""

    asked, messages = Asked(TEMPLATES["thinks"]), [SYSTEM, asks("Why?")]
    before = mst.chat(asked, messages, tools=TOOLS)
    mst.chat(Asked(TEMPLATES["thinks"], empties), [SYSTEM, asks("Why?")], tools=TOOLS)
    assert mst.chat(asked, messages, tools=TOOLS) == before


def test_templates_that_want_questions_and_answers_in_turn_are_asked_in_turn() -> None:
    def refuses(messages: list[Message]) -> None:
        for number, one in enumerate(messages):
            assert one["role"] == ("user", "assistant")[number % 2]

    tokenizer = Asked(TEMPLATES["shut"], refuses)
    prompt = mst.chat(tokenizer, [asks("Why?")])
    head, text = tokenizer.heads(prompt)
    assert (head, text) == ("<start>user\n", tokenizer.own.decode(prompt.tokens).removesuffix(TAILS["shut"] or ""))
    for given, end in (
        ({"continue_final_message": True}, "assistant\nSo"),
        ({"add_generation_prompt": False}, "So<end>\n"),
    ):
        prompt = mst.chat(tokenizer, [asks("Why?"), says("So")], **given)
        assert tokenizer.own.decode(prompt.tokens).endswith(end)
        assert tokenizer.heads(prompt) == ["<start>user\n"]


def test_a_prompt_that_ends_with_a_result_of_a_tool_and_one_that_goes_on_with_thoughts() -> None:
    tokenizer = Asked(TEMPLATES["loops"])
    first, *_, last = [turn.messages for turn in agent("result", loops=1)]
    begun, later = (mst.chat(tokenizer, messages, tools=TOOLS) for messages in (first, last))
    assert last[-1]["role"] == "tool"
    head, other = tokenizer.heads(begun)
    assert tokenizer.heads(later) == [head, f"{other}<"]  # "<call>" and "<think>" share "<"
    thoughts = [*first, {"role": "assistant", "content": "x", "reasoning_content": "I th"}]
    prompt = mst.chat(tokenizer, thoughts, continue_final_message="reasoning_content")
    assert tokenizer.own.decode(prompt.tokens).endswith("<think>\nI th")
    assert tokenizer.heads(prompt)[1].endswith(other[-80:])


def test_what_changes_with_each_rendering_ends_all_that_is_behind_it() -> None:
    tokenizer = Asked("Number {{ number }} {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    prompt = mst.chat(tokenizer, [SYSTEM, asks("Why?")])
    assert tokenizer.heads(prompt) == ["Number "]


def test_what_a_template_takes_reaches_it() -> None:
    tokenizer = Asked(TEMPLATES["plain"])
    shown = "{{ documents[0].title }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    given: Any = {"documents": [{"title": "Laws", "text": ""}], "enable_thinking": False, "chat_template": shown}
    prompt = mst.chat(tokenizer, [SYSTEM, asks("Why?")], **given)
    assert tokenizer.own.decode(prompt.tokens) == f"LawsFalse{SYSTEM['content']}Why?"


def test_what_would_give_no_tokens_of_one_chat_is_refused_by_name() -> None:
    tokenizer, chat = Asked(TEMPLATES["plain"]), [asks("Why?")]
    with pytest.raises(ms.InvalidArgument, match=r"leave out tokenize=, return_tensors=: .* a Prompt with the tokens"):
        mst.chat(tokenizer, chat, tokenize=False, return_tensors="pt", enable_thinking=True)
    with pytest.raises(ms.InvalidArgument, match="leave out return_dict="):
        mst.chat(tokenizer, chat, return_dict=False)
    with pytest.raises(ms.InvalidArgument, match=r"2 chats: expected one, so call mst\.chat for each"):
        mst.chat(tokenizer, [chat, chat])
    assert tokenizer.given == []


def test_messages_may_be_read_once_alone() -> None:
    tokenizer, messages = Asked(TEMPLATES["shut"]), [SYSTEM, asks("Why?")]
    expected = mst.chat(tokenizer, messages)
    once = mst.chat(tokenizer, (one for one in messages))
    assert (once.tokens, once.snapshot_at) == (expected.tokens, expected.snapshot_at)


class Served(Judged):
    """A server of a tiny model, and a tokenizer of bytes.

    Args:
        name: name of the chat template.
        session: whether prompts are turns of a session.
    """

    def __init__(self, name: str, session: bool = False) -> None:
        pages, model = ms.Pages(size=PAGE, count=400, per_row=100), tiny("qwen3_next", changes=(("vocab_size", 300),))
        super().__init__(model=model, slots=64, pages=pages, tracking=ms.Redirect(every=256), prefix=ms.Prefix())
        self.chats, self.session = Asked(TEMPLATES[name]), self.mem.sessions.open("talk") if session else None

    def prompt(self, messages: list[Message], **template: Any) -> mst.Prompt:
        return mst.chat(self.chats, messages, **template)

    def cached(self, prompt: mst.Prompt) -> int:
        id = len(self.asked)
        self.ask(id, text=prompt.tokens, most=4, session=self.session, snapshot_at=prompt.snapshot_at)
        return self.results()[id].cached


@pytest.mark.parametrize("session", [False, True])
def test_tails_of_19_bytes_are_all_that_a_turn_computes_again(session: bool) -> None:
    served, history, before = Served("shut", session), [SYSTEM], None
    for turn in range(5):
        history = [*history, asks(f"Question number {turn}: what do you think of the weather of today?")]
        prompt = served.prompt(history)
        cached = served.cached(prompt)
        if before:
            at = parting(before.tokens, prompt.tokens)
            assert at == len(before.tokens) - 19
            assert at - PAGE < cached <= at
        history, before = [*history, says("A short and stable answer.")], prompt
    assert before
    assert len(before.tokens) - served.cached(before) <= PAGE + 1


def test_an_agent_and_its_second_user_hit_all_that_they_can() -> None:
    served = Served("loops")
    first, *_ = turns = [turn.messages for turn in short_agent()]
    assert len(served.prompt(first, tools=TOOLS).tokens) % PAGE <= len("<think>\n")  # the prompt's end cannot hit
    for messages in turns:
        served.cached(served.prompt(messages, tools=TOOLS))
    for messages in ([*turns[-1], says("Done."), asks("And now?")], [SYSTEM, asks("Another one?")]):
        prompt, begun = (served.prompt(one, tools=TOOLS) for one in (messages, first))
        at = parting(begun.tokens, prompt.tokens)
        assert at - PAGE < served.cached(prompt) <= at


def short_agent() -> Iterator[Turn]:
    messages = [SYSTEM, asks("What is in the second file?")]
    for call in range(5):
        function = {"name": "read_file", "arguments": {"path": f"f{call}"}}
        reply = {"role": "assistant", "content": "", "reasoning_content": f"I look at file {call}.",
                 "tool_calls": [{"type": "function", "id": f"call00000{call}", "function": function}]}  # fmt: skip
        yield Turn(messages, reply)
        result = {"role": "tool", "content": f"The text of file {call}.", "tool_call_id": f"call00000{call}"}
        messages = [*messages, reply, result]
    yield Turn(messages, says("Done."))
