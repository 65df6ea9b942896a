"""Tests examples/serve_http: OpenAI's objects and errors, and clients that leave or read slowly."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from threading import Event, Thread
from typing import Any

import pytest

from tests.support.chats import TEMPLATES, TOOLS
from tests.support.http_clients import answered, asked, parts
from tests.support.tiny_models import tiny
from tests.support.tiny_tokenizers import byte_level

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import uvicorn

import memstate as ms
from examples.serve_http.app import app
from examples.serve_http.asked import ChatBody, Completion
from tests.integrations.servers import Judged, answer

CHAT, TEXT, NAME, NEW = "/v1/chat/completions", "/v1/completions", "tiny", 6
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{% for one in messages %}{% if one.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
{{ one.content }}
{% endfor %}"""
SAID = [{"role": "user", "content": "went home"}]
PROMPT = list(range(20, 60))
SYSTEM = {"role": "system", "content": "You are a helpful assistant, and you answer in two sentences."}


def calls(arguments: Any, number: int = 0, **other: Any) -> dict[str, Any]:
    """Returns the message of an assistant that calls a tool."""
    function = {"name": "read_file", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": f"call{number:05}", "type": "function", "function": function}],
            **other}  # fmt: skip


def rendered(template: str, **body: Any) -> str:
    """Returns the text of a chat's prompt in a template."""
    tokenizer = byte_level()
    tokenizer.chat_template = template
    (prompt,) = ChatBody.model_validate({"model": NAME, "messages": SAID, **body}).prompts(tokenizer)
    text: str = tokenizer.decode(prompt.tokens)
    return text


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


class Here(Judged):
    """The example server, in threads of this process.

    Args:
        template: the chat template.
        page: tokens of a page; a prompt and its answer have at most 100 pages.
    """

    def __init__(self, template: str = TEMPLATE, page: int = 4) -> None:
        model, tokenizer = tiny("qwen3_next", changes=(("vocab_size", 300),)), byte_level()
        tokenizer.chat_template = template
        settings: Any = {"pages": ms.Pages(size=page, count=400, per_row=100), "tracking": ms.Redirect(every=page)}
        super().__init__(model=model, tokenizer=tokenizer, slots=32, max_requests=4, prefix=ms.Prefix(), **settings)
        config = uvicorn.Config(app(self.server, self.tokenizer, NAME), port=0, log_level="error")
        self.http = uvicorn.Server(config)
        self.thread = Thread(target=self.http.run)
        self.thread.start()
        while not self.http.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        self.http.should_exit = True
        self.thread.join()
        self.ends()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return asyncio.run(answered(self.port, path, {"model": NAME, "max_tokens": NEW, **body}))

    def streamed(self, path: str, **body: Any) -> list[Any]:
        async def read() -> list[Any]:
            async with asked(self.port, path, {"model": NAME, "max_tokens": NEW, "stream": True, **body}) as reader:
                return [part async for part in parts(reader)]

        return asyncio.run(read())

    def joined(self, path: str, number: int, **body: Any) -> list[str]:
        """Returns the texts of the choices of a streamed answer."""
        texts = [""] * number
        for part in self.streamed(path, **body):
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"] if path == TEXT else choice["delta"]["content"]
        return texts

    def text(self, tokens: list[int], new: int = NEW) -> str:
        return self.tokenizer.decode(answer(self.model, tokens, new), skip_special_tokens=True)


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.close()


@pytest.fixture(scope="module")
def agents() -> Iterator[Here]:
    made = Here(TEMPLATES["loops"], page=16)
    yield made
    made.close()


def wait_until_gone(here: Here) -> None:
    """Waits until no request runs or waits, and the manager has no row.

    The thread that drives the server looks, between two steps: another thread could look in the middle of a step.
    """
    server, until = here.server, time.monotonic() + 60
    while server.call(lambda: server.waiting or server.running or here.mem.rows).result(60):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_whole_answers_are_those_of_the_model_alone(here: Here) -> None:
    for cached, missed in ((0, "no_sharing"), (36, "")):
        status, said = here.post(TEXT, prompt=PROMPT, cache_salt="whole")
        (choice,) = said["choices"]
        assert (status, choice["text"], choice["finish_reason"]) == (200, here.text(PROMPT), "length")
        assert said["usage"] == {
            "prompt_tokens": 40, "completion_tokens": NEW, "total_tokens": 46,
            "prompt_tokens_details": {"cached_tokens": cached, "missed": missed},
        }  # fmt: skip


def test_streams_of_a_chat_join_to_the_answer(here: Here) -> None:
    *said, usage = here.streamed(CHAT, messages=SAID, stream_options={"include_usage": True})
    choices = [choice for part in said for choice in part["choices"]]
    tokens = here.tokenizer("went home\n").input_ids
    assert "".join(choice["delta"]["content"] for choice in choices) == here.text(tokens)
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", *[None] * NEW]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * NEW, "length"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], len(tokens) + NEW)
    assert {part["object"] for part in said} == {"chat.completion.chunk"}


def test_a_text_is_a_prompt_too_and_a_stop_string_ends_it(here: Here) -> None:
    whole = here.text(here.tokenizer("went").input_ids)
    _, said = here.post(TEXT, prompt="went", stop=[whole[2:4]])
    assert (said["choices"][0]["text"], said["choices"][0]["finish_reason"]) == (whole[:2], "stop")


def test_samples_have_seeds_and_logprobs(here: Here) -> None:
    body: Any = {"messages": SAID, "n": 3, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2}
    _, said = here.post(CHAT, **body)
    texts = [choice["message"]["content"] for choice in said["choices"]]
    assert ([choice["index"] for choice in said["choices"]], len(set(texts))) == ([0, 1, 2], 3)
    assert said["usage"]["completion_tokens"] == 3 * NEW
    for choice in said["choices"]:
        for token in choice["logprobs"]["content"]:
            first, second = token["top_logprobs"]
            assert first["logprob"] >= second["logprob"]
            assert first["logprob"] >= token["logprob"]
    assert here.joined(CHAT, 3, **body) == texts


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (TEXT, {"prompt": PROMPT, "max_tokens": 1000}, 400, "context_length_exceeded"),
        (TEXT, {"prompt": PROMPT, "model": "other"}, 404, "model_not_found"),
        (TEXT, {"prompt": PROMPT, "max_tokens": 300, "timeout": 1e-9}, 504, "timeout"),
        (TEXT, {"prompt": PROMPT, "best_of": 2}, 400, "best_of: Input should be 1"),
        (TEXT, {"prompt": PROMPT, "beams": 2}, 400, "beams: Extra inputs are not permitted"),
        (TEXT, {"prompt": PROMPT, "temperature": 1e-300}, 400, "temperature: Value error, expected 0, or at least"),
        (TEXT, {"prompt": PROMPT, "presence_penalty": 0.5}, 400, "presence_penalty: Input should be 0"),
        (TEXT, {"prompt": PROMPT, "stop": ["x"] * 17}, 400, "at most 16"),
        (TEXT, {"prompt": PROMPT, "n": 5, "temperature": 1.0}, 400, "(--rows)"),
        (TEXT, {"prompt": [PROMPT] * 64, "n": 3, "temperature": 1.0}, 400, "128 answers to all prompts"),
        (TEXT, {"prompt": [PROMPT] * 129}, 400, "at most 128"),
        (TEXT, {"prompt": [PROMPT] * 2, "session": "two"}, 400, "a session goes on with one"),
        (TEXT, {"prompt": [PROMPT, [300]]}, 400, "the vocabulary of the model has 300"),
        (CHAT, {"messages": SAID, "tools": [{"type": "function"}]}, 400, "tools.0.function: Field required"),
        (CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": "required"}, 400, "Input should be 'none' or 'auto'"),
        (CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": TOOLS[0]}, 400, "Input should be 'none' or 'auto'"),
        (CHAT, {"messages": [*SAID, calls("{")]}, 400, "tool_calls.0.function.arguments: Invalid JSON: EOF"),
        (CHAT, {"messages": [*SAID, calls("[1]")]}, 400, "function.arguments: Input should be"),
        (CHAT, {"messages": [*SAID, calls({})]}, 400, "function.arguments: JSON input should be string"),
        (CHAT, {"messages": SAID, "chat_template_kwargs": {"chat_template": "x", "tools": 1, "tokenize": 0}}, 400,
         "chat_template_kwargs: leave out chat_template, tokenize, tools: no switch of a template"),
        (CHAT, {"messages": SAID, "chat_template_kwargs": {"messages": 1}}, 400, "multiple values for argument"),
        (CHAT, {"messages": SAID, "max_completion_tokens": 1}, 400, "max_tokens is there, too: give one of the two"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "weight": 1}]}, 400,
         "messages.0.weight: fields of messages beyond content and tool_calls must be texts"),
        (CHAT, {"messages": [{"content": "who"}]}, 400, "messages.0.role: Field required"),
        (CHAT, {"messages": SAID, "response_format": {"type": "json_object"}}, 400, "Input should be 'text'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "Input should be 'text'"),
        (TEXT, {"prompt": [300]}, 400, "the vocabulary of the model has 300"),
        (TEXT, {"prompt": PROMPT, "n": 2}, 400, "n above 1 needs temperature or top_p"),
        (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, 400, "no tools here"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_errors_are_openais_objects(here: Here, path: str, body: Any, status: int, said: str) -> None:
    for stream in (False, True):
        got, answer = here.post(path, **body, stream=stream)
        assert got == status
        assert said in (answer["error"]["code"] or answer["error"]["message"])


@pytest.mark.parametrize("prompt", [["42", 1], [True], [1.0], [[1], "a"], 42])
def test_nothing_but_a_whole_number_is_a_token(here: Here, prompt: Any) -> None:
    status, said = here.post(TEXT, prompt=prompt)
    assert status == 400
    assert said["error"]["message"].startswith("prompt: Input should be a valid string")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('[{"model": "tiny"}]', "the body: Input should be an object"),
        ("", "the body: Field required"),
        ("{} x", "character 3: JSON decode error"),
        ({"stop": 5}, "stop: Input should be a valid string, or Input should be a valid list"),
        ({"stream_options": {"all": True}}, "stream_options.all: Input should be 'include_usage'"),
        ({"messages": ["went"]}, "messages.0: Input should be an object"),
        ({"messages": [*SAID, {"role": "user", "content": [{"type": "text", "text": "a", "bold": 1}]}]},
         "messages.1.content.0.bold: Extra inputs are not permitted"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0: Input should be an object"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: Input should be an object"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_no_type_of_this_server(here: Here, body: Any, said: str) -> None:
    sent = body if isinstance(body, str) else json.dumps({"model": NAME, "messages": SAID, **body})
    connection = HTTPConnection("127.0.0.1", here.port)
    connection.request("POST", CHAT, sent, {"content-type": "application/json"})
    with closing(connection), connection.getresponse() as response:
        assert (response.status, json.loads(response.read())["error"]["message"]) == (400, said)


def test_what_is_too_long_names_the_option_of_the_server(here: Here) -> None:
    status, said = here.post(TEXT, prompt=PROMPT, max_tokens=362)
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
    assert said["error"]["message"] == "40 tokens of a prompt and 362 of its answer need more than 400: raise --tokens"


@pytest.mark.parametrize("prompts", [["went", "home", "42"], [PROMPT, PROMPT[:9], [7, 8]]])
@pytest.mark.parametrize("n", [1, 2])
def test_each_prompt_of_a_list_has_its_choices(here: Here, prompts: Any, n: int) -> None:
    tokens = [one if isinstance(one, list) else here.tokenizer(one).input_ids for one in prompts]
    more: Any = {"cache_salt": f"list {n}"} | ({"n": 2, "temperature": 1e-6} if n > 1 else {})
    _, said = here.post(TEXT, prompt=prompts, **more)
    expected = [here.text(one) for one in tokens for _ in range(n)]
    assert [choice["index"] for choice in said["choices"]] == list(range(3 * n))
    assert [choice["text"] for choice in said["choices"]] == expected
    assert said["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert said["usage"]["completion_tokens"] == 3 * n * NEW
    assert here.joined(TEXT, 3 * n, prompt=prompts, **more) == expected


def test_values_that_ask_for_nothing_and_parts_of_text_are_taken(here: Here) -> None:
    usual: Any = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "metadata": {"a": "b"}, "tools": [],
        "response_format": {"type": "text"}, "store": False, "n": None, "stop": None, "stream_options": None,
    }  # fmt: skip
    said = [
        {"role": "user", "content": [{"type": "text", "text": "went "}, {"type": "text", "text": "home"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    status, answer = here.post(CHAT, messages=said, **usual)
    text = here.text(here.tokenizer("went home\n\n").input_ids)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)


def test_templates_see_tools_calls_results_and_thoughts(here: Here) -> None:
    said = [SYSTEM, *SAID, calls('{"path": "a"}', content=None, reasoning_content="I look."), result("text")]

    def seen(**more: Any) -> Any:
        body = {"messages": said, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, **more}
        return json.loads(rendered("{{ [messages, tools, enable_thinking] | tojson }}", **body))

    messages, tools, thinking = seen()
    messages[2].pop("thinking")  # Transformers adds thoughts under this name, too
    assert messages == [SYSTEM, *SAID, calls({"path": "a"}, content="", reasoning_content="I look."), result("text")]
    assert (tools, thinking) == (TOOLS, False)
    assert seen(tool_choice="auto")[1] == TOOLS
    assert seen(tool_choice="none")[1] is seen(tools=[])[1] is None
    assert here.post(CHAT, messages=said[:3], tools=TOOLS[:1])[0] == 200


def test_what_clients_add_for_other_servers_changes_no_prompt(here: Here) -> None:
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    own: Any = {"messages": [*SAID, calls("{}", content="")], "tools": TOOLS}
    marked: Any = json.loads(json.dumps(own)) | {"parallel_tool_calls": False}
    marked["messages"][0] = {"role": "user", "content": [{"type": "text", "text": "went home", **mark}], **mark}
    for one in (marked, marked["messages"][1]["tool_calls"][0], marked["tools"][0], marked["tools"][1]["function"]):
        one |= mark
    marked["messages"][1]["tool_calls"][0] |= {"index": 1}
    marked["messages"][1]["tool_calls"][0]["function"]["arguments"] = ""
    shown = "{{ [messages, tools] | tojson }}"
    assert rendered(shown, **own) == rendered(shown, **marked)
    assert here.post(CHAT, **marked)[0] == 200


def test_switches_of_a_template_reach_it() -> None:
    def shown(**given: Any) -> Any:
        template = "{{ [reasoning_effort is defined and reasoning_effort, clear_thinking, budget] | tojson }}"
        return json.loads(rendered(template, **given))

    switches = {"clear_thinking": False, "budget": 512}
    assert shown(chat_template_kwargs=switches) == [False, False, 512]
    assert shown(reasoning_effort="low", chat_template_kwargs=switches) == ["low", False, 512]
    own = {**switches, "reasoning_effort": "high"}
    assert shown(reasoning_effort="low", chat_template_kwargs=own) == ["high", False, 512]


def test_tools_that_a_template_does_not_show_are_refused(agents: Here) -> None:
    deaf: Any = "{% for one in messages %}{{ one.content }}{% endfor %}"
    with pytest.raises(ms.InvalidArgument, match=r"tools: the template .* shows it none"):
        rendered(deaf, tools=TOOLS)
    assert rendered(deaf, tools=TOOLS, tool_choice="none") == "went home"
    agents.tokenizer.chat_template, own = deaf, agents.tokenizer.chat_template
    try:
        status, said = agents.post(CHAT, messages=SAID, tools=TOOLS)
    finally:
        agents.tokenizer.chat_template = own
    assert (status, said["error"]["message"][:19]) == (400, "tools: the template")


def test_a_template_that_wants_arguments_as_a_text_gets_them() -> None:
    said = "{% for call in one.tool_calls or [] %}{{ ' call ' + call.function.arguments }}{% endfor %}"
    template = "{% for one in messages %}{{ one.content }}" + said + "{% endfor %}"
    assert rendered(template, messages=[*SAID, calls('{"path": "ä"}')]) == 'went home call {"path":"ä"}'


def test_the_second_user_of_a_system_prompt_hits_it(agents: Here) -> None:
    head = len(agents.tokenizer.apply_chat_template([SYSTEM], return_dict=False)) + len("<start>user\n")
    for question, cached in (("What is in it?", 0), ("Why is that so?", head // 16 * 16)):
        _, said = agents.post(CHAT, messages=[SYSTEM, {"role": "user", "content": question}], cache_salt="users")
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("session", [None, "loop"])
def test_the_question_behind_a_loop_of_calls_hits_the_first_prompt_of_the_loop(
    agents: Here, session: str | None
) -> None:
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "What is in all of the files?"}]
    sent: Any = {"tools": TOOLS, "cache_salt": f"agent {session}", "session": session}
    first = agents.post(CHAT, messages=messages, **sent)[1]["usage"]["prompt_tokens"]
    for number in range(5):
        call = calls(json.dumps({"path": f"f{number}"}), number, content=None, reasoning_content=f"File {number} next.")
        messages = [*messages, call, result(f"The text of file {number}.", number)]
        status, said = agents.post(CHAT, messages=messages, **sent)
        assert (status, said["usage"]["prompt_tokens_details"]["cached_tokens"] > first - 16) == (200, True)
    more = [{"role": "assistant", "content": "Words."}, {"role": "user", "content": "Which?"}]
    _, said = agents.post(CHAT, messages=[*messages, *more], **sent)
    parting = first - len("<think>\n")
    assert first % 16 <= len("<think>\n")  # so short that the state at the prompt's end cannot hit
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == parting // 16 * 16


@pytest.mark.parametrize("told", [True, False])
def test_a_large_body_is_refused_before_it_is_read(here: Here, told: bool) -> None:
    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        length = "Content-Length: 60000000" if told else "Transfer-Encoding: chunked"
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n".encode())
        if not told:
            writer.write((b"10000\r\n" + b" " * 2**16 + b"\r\n") * 16 + b"1\r\n \r\n")
        try:
            return await asyncio.wait_for(reader.readline(), 60)
        finally:
            writer.transport.abort()

    assert b" 413 " in asyncio.run(send())


def test_a_client_that_still_sends_a_large_body_reads_why_it_is_refused(here: Here) -> None:
    status, body = here.post(TEXT, prompt="went " * 2_000_000)
    assert status == 413 and "this server reads 1048576" in body["error"]["message"]


def test_texts_become_tokens_beside_the_loop(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, own = Event(), Event(), Completion.prompts

    def slow(asked: Completion, tokenizer: Any) -> list[list[int]]:
        began.set()
        assert go.wait(60)
        return own(asked, tokenizer)

    async def beside() -> tuple[int, int]:
        body = {"model": NAME, "prompt": "went", "max_tokens": NEW}
        first = asyncio.create_task(answered(here.port, TEXT, body))
        await asyncio.to_thread(began.wait, 60)
        try:
            other, _ = await asyncio.wait_for(answered(here.port, "/v1/models"), 30)
        finally:
            go.set()
        return other, (await first)[0]

    monkeypatch.setattr(Completion, "prompts", slow)
    assert asyncio.run(beside()) == (200, 200)


def test_a_body_that_is_no_json_is_refused(here: Here) -> None:
    assert here.post(TEXT, prompt="\ud800")[0] == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 0.05, 0.5])
def test_a_client_that_goes_away_aborts_its_request(here: Here, stream: bool, after: float) -> None:
    async def leave() -> None:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 350, "stream": stream, "n": 2, "temperature": 1.0}
        async with asked(here.port, TEXT, body):
            await asyncio.sleep(after)

    asyncio.run(leave())
    wait_until_gone(here)
    audit = here.server.call(here.mem.audit).result(60)
    assert audit.clean, audit


def test_a_slow_reader_holds_up_nobody(here: Here) -> None:
    async def beside() -> tuple[str, str]:
        body: Any = {"model": NAME, "messages": SAID, "max_tokens": 150, "stream": True}
        body |= {"logprobs": True, "top_logprobs": 20}
        async with asked(here.port, CHAT, body, buffer=4096) as reader:
            await reader.readline()
            other = await answered(here.port, TEXT, {"model": NAME, "prompt": PROMPT, "max_tokens": NEW})
            wait_until_gone(here)  # the slow client has read almost nothing of the answer
            said = [part["choices"][0]["delta"]["content"] async for part in parts(reader)]
        return other[1]["choices"][0]["text"], "".join(said)

    other, slow = asyncio.run(beside())
    assert (other, slow) == (here.text(PROMPT), here.text(here.tokenizer("went home\n").input_ids, 150))


def test_sessions_go_on_and_fork(here: Here) -> None:
    first = here.post(TEXT, prompt=PROMPT, session="talk")[1]["choices"][0]["text"]
    assert first == here.text(PROMPT)
    turn = [*PROMPT, *answer(here.model, PROMPT)]
    for session, fork, more in (("other", "talk", [7, 8]), ("talk", None, [9])):
        status, said = here.post(TEXT, prompt=[*turn, *more], session=session, fork=fork)
        assert (status, said["choices"][0]["text"]) == (200, here.text([*turn, *more]))
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == len(turn) - 1
    for wrong, status, text in (
        (
            {"session": "third", "fork": "nobody"},
            404,
            "fork='nobody': no such session is open; sessions of other salts",
        ),
        ({"fork": "talk"}, 400, "fork='talk' needs session="),
        ({"session": "other", "fork": "talk"}, 400, "session='other' is open: a fork needs a new name; sessions of"),
    ):
        got, said = here.post(TEXT, prompt=PROMPT, **wrong)
        assert (got, said["error"]["message"][: len(text)]) == (status, text)
    for empty in ({"session": ""}, {"fork": ""}):
        assert here.post(TEXT, prompt=PROMPT, **empty)[0] == 400
    assert {one.session.id for one in here.mem.sessions.infos()} == {"talk", "other"}


def test_a_session_is_found_under_its_salt_alone(here: Here) -> None:
    first = here.post(TEXT, prompt=PROMPT, session="mine", cache_salt="a")[1]["choices"][0]["text"]
    turn = [*PROMPT, *answer(here.model, PROMPT), 5]
    assert first == here.text(PROMPT)
    assert here.post(TEXT, prompt=turn, session="new", fork="mine", cache_salt="b")[0] == 404
    for salt, cached in (("b", 0), ("a", len(turn) - 2)):
        _, said = here.post(TEXT, prompt=turn, session="mine", cache_salt=salt)
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert said["choices"][0]["text"] == here.text(turn)


def test_a_fork_waits_for_the_turn_that_runs(here: Here) -> None:
    async def both() -> tuple[int, int]:
        long = {"model": NAME, "prompt": PROMPT, "max_tokens": 100, "session": "long", "stream": True}
        fork = {"model": NAME, "prompt": PROMPT, "max_tokens": NEW, "session": "twin", "fork": "long"}
        async with asked(here.port, TEXT, long) as reader:
            await anext(parts(reader))
            late, _ = await answered(here.port, TEXT, {**fork, "session": "late", "timeout": 1e-9})
            status, said = await answered(here.port, TEXT, fork)
            assert said["choices"][0]["text"] == here.text(PROMPT)
        return late, status

    assert asyncio.run(both()) == (504, 200)


def test_what_operators_read(here: Here) -> None:
    async def read() -> tuple[Any, bytes]:
        async with asked(here.port, "/metrics", None) as reader:
            return await answered(here.port, "/v1/models"), await reader.read()

    (status, models), figures = asyncio.run(read())
    assert (status, models["data"][0]["id"]) == (200, NAME)
    assert b"memstate_slots{" in figures


def test_a_model_is_found_by_its_name(here: Here) -> None:
    status, said = asyncio.run(answered(here.port, f"/v1/models/{NAME}"))
    assert (status, said["id"], said["object"]) == (200, NAME, "model")
    status, said = asyncio.run(answered(here.port, "/v1/models/a/b"))
    assert (status, said["error"]["code"]) == (404, "model_not_found")


def test_the_official_client(here: Here) -> None:
    openai = pytest.importorskip("openai")
    given: Any = {"base_url": f"http://127.0.0.1:{here.port}/v1", "api_key": "none", "max_retries": 0}

    async def streamed() -> str:
        async with openai.AsyncOpenAI(**given) as client:
            parts = await client.chat.completions.create(model=NAME, messages=SAID, max_tokens=NEW, stream=True)
            return "".join([part.choices[0].delta.content async for part in parts])

    text = here.text(here.tokenizer("went home\n").input_ids)
    assert asyncio.run(streamed()) == text
    with openai.OpenAI(**given) as client:
        said = client.chat.completions.create(
            model=NAME, messages=SAID, max_completion_tokens=NEW, logprobs=True, top_logprobs=1,
            extra_body={"session": "client"},
        )  # fmt: skip
        assert (said.choices[0].message.content, said.choices[0].finish_reason) == (text, "length")
        tokens = [token.top_logprobs[0].token for token in said.choices[0].logprobs.content]
        assert "".join(tokens[:1]) == said.choices[0].logprobs.content[0].token
        assert client.completions.create(model=NAME, prompt=PROMPT, max_tokens=NEW).choices[0].text == here.text(PROMPT)
        assert [model.id for model in client.models.list()] == [NAME]
        wanted = [{"type": "function", "id": "call00000", "function": {"name": "run", "arguments": "{}"}}]
        called = type(said.choices[0].message)(role="assistant", content=None, tool_calls=wanted)
        more: Any = [*SAID, called, {"role": "user", "content": "and"}]
        assert client.chat.completions.create(model=NAME, messages=more, max_tokens=NEW, tools=TOOLS[:1]).choices
        with pytest.raises(openai.BadRequestError, match="need"):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1000)
