"""examples/serve_http: OpenAI's objects and errors; a client that goes away, and one that reads slowly."""

import asyncio
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tests.support.http_clients import answered, asked, parts
from tests.support.tiny_models import tiny
from tests.support.tiny_served import alone, managed
from tests.support.tiny_tokenizers import byte_level

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import uvicorn

import memstate as ms
import memstate.integrations.transformers as mst
from examples.serve_http.app import app

CHAT, TEXT, NAME, NEW = "/v1/chat/completions", "/v1/completions", "tiny", 6
TEMPLATE = """{% for one in messages %}{% if one.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
{{ one.content }}
{% endfor %}"""
SAID = [{"role": "user", "content": "went home"}]
PROMPT = list(range(20, 60))


class Here:
    """The example, in threads of this process."""

    def __init__(self) -> None:
        self.model, self.tokenizer = tiny("qwen3_next", changes=(("vocab_size", 300),)), byte_level()
        self.tokenizer.chat_template = TEMPLATE
        pages = ms.Pages(size=4, count=400, per_row=100)
        self.mem = managed(self.model, slots=32, max_requests=4, pages=pages)
        self.server = mst.Server(self.model, self.mem, tokenizer=self.tokenizer)
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
        assert not self.mem.rows
        assert self.mem.audit().clean

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return asyncio.run(answered(self.port, path, {"model": NAME, "max_tokens": NEW, **body}))

    def stream(self, path: str, **body: Any) -> list[Any]:
        async def read() -> list[Any]:
            async with asked(self.port, path, {"model": NAME, "max_tokens": NEW, "stream": True, **body}) as reader:
                return [part async for part in parts(reader)]

        return asyncio.run(read())

    def text(self, tokens: list[int], new: int = NEW) -> str:
        return self.tokenizer.decode(alone(self.model, tokens, {}, new), skip_special_tokens=True)


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.close()


def gone(here: Here) -> bool:
    """Waits until nothing runs and nothing waits. The driving thread looks: elsewhere a step may be half done."""
    until = time.monotonic() + 60
    while here.server.call(lambda: here.server.waiting or here.server.running).result(60):
        assert time.monotonic() < until
        time.sleep(0.01)
    return here.server.call(lambda: not here.mem.rows).result(60)


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
    *said, usage = here.stream(CHAT, messages=SAID, stream_options={"include_usage": True})
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
    streamed = [""] * 3
    for part in here.stream(CHAT, **body):
        for choice in part["choices"]:
            streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == texts


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (TEXT, {"prompt": PROMPT, "max_tokens": 1000}, 400, "context_length_exceeded"),
        (TEXT, {"prompt": PROMPT, "model": "other"}, 404, "model_not_found"),
        (TEXT, {"prompt": PROMPT, "max_tokens": 300, "timeout": 1e-9}, 504, "timeout"),
        (TEXT, {"prompt": PROMPT, "best_of": 2}, 400, "best_of: Extra inputs are not permitted"),
        (TEXT, {"prompt": [300]}, 400, "the vocabulary of the model has 300"),
        (TEXT, {"prompt": PROMPT, "n": 2}, 400, "Greedy methods"),
        (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, 400, "no tools here"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_errors_are_openais_objects(here: Here, path: str, body: Any, status: int, said: str) -> None:
    for stream in (False, True):
        found, answer = here.post(path, **body, stream=stream)
        assert found == status
        assert said in (answer["error"]["code"] or answer["error"]["message"])


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
    assert gone(here)
    audit = here.server.call(here.mem.audit).result(60)
    assert audit.clean, audit


def test_a_slow_reader_holds_up_nobody(here: Here) -> None:
    async def beside() -> tuple[str, str]:
        body = {
            "model": NAME,
            "messages": SAID,
            "max_tokens": 350,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
        async with asked(here.port, CHAT, body, buffer=4096) as reader:
            await reader.readline()
            other = await answered(here.port, TEXT, {"model": NAME, "prompt": PROMPT, "max_tokens": NEW})
            assert gone(here)  # its tokens are all there, and it has read almost none
            said = [part["choices"][0]["delta"]["content"] async for part in parts(reader)]
        return other[1]["choices"][0]["text"], "".join(said)

    other, slow = asyncio.run(beside())
    assert (other, slow) == (here.text(PROMPT), here.text(here.tokenizer("went home\n").input_ids, 350))


def test_sessions_go_on_and_fork(here: Here) -> None:
    answer = here.post(TEXT, prompt=PROMPT, session="talk")[1]["choices"][0]["text"]
    assert answer == here.text(PROMPT)
    turn = [*PROMPT, *alone(here.model, PROMPT, {}, NEW)]
    for session, fork, more in (("other", "talk", [7, 8]), ("talk", None, [9])):
        status, said = here.post(TEXT, prompt=[*turn, *more], session=session, fork=fork)
        assert (status, said["choices"][0]["text"]) == (200, here.text([*turn, *more]))
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == len(turn) - 1
    for wrong in ({"session": "third", "fork": "nobody"}, {"fork": "talk"}, {"session": "other", "fork": "talk"}):
        assert here.post(TEXT, prompt=PROMPT, **wrong)[0] == 404
    for empty in ({"session": ""}, {"fork": ""}):
        assert here.post(TEXT, prompt=PROMPT, **empty)[0] == 400
    assert {one.session.id for one in here.mem.sessions.infos()} == {"talk", "other"}


def test_what_operators_read(here: Here) -> None:
    async def read() -> tuple[Any, bytes]:
        async with asked(here.port, "/metrics", None) as reader:
            return await answered(here.port, "/v1/models"), await reader.read()

    (status, models), figures = asyncio.run(read())
    assert (status, models["data"][0]["id"]) == (200, NAME)
    assert b"memstate_slots{" in figures


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
        with pytest.raises(openai.BadRequestError, match="need"):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1000)
