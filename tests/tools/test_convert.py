"""Tests the conversion of logs to traces: hits, order, limits, secrecy of texts, and broken lines."""

import gzip
import json
import random
import re
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memstate.cli import files
from memstate.cli.replay import replay
from memstate.cli.traces import BLOCK, TraceRequest, form
from memstate.errors import InvalidArgument
from memstate_tools.traces import convert, logs
from tests.support.command import memstate
from tests.support.sources import ROOT

Request = tuple[list[int], int]  # (prompt, number of generated tokens)
Read = Callable[..., tuple[list[TraceRequest], convert.Summary]]
TEXT = "it's a \"trap\": prompt_token_ids: [9], input_ids=[9], rid='x', 'completion_tokens': 9"


def conversations(seed: int, requests: int) -> list[Request]:
    """Returns requests of conversations that begin with one of two system prompts, in random order."""
    draw = random.Random(seed)
    fresh = lambda count: [draw.randrange(150_000) for _ in range(count)]  # noqa: E731
    opened = [fresh(draw.randint(300, 1400)) for _ in range(2)]
    made: list[Request] = []
    for _ in range(requests):
        prompt = draw.choice(opened) + fresh(draw.randint(1, 900))
        made.append((prompt, answer := draw.randint(1, 300)))
        opened.append(prompt + fresh(answer))
    return made


def vllm(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns the lines of a request and of its answer, as vLLM 0.33 writes them."""
    head = f"11-28 10:01:{number % 60:02d} [entrypoints/.../utils/request_logger.py"
    return (
        f"(APIServer pid=7) DEBUG {head}:55] Request chatcmpl-{number} details: prompt: {TEXT!r}, "
        f"prompt_token_ids: {list(prompt)}, prompt_embeds shape: None.\n"
        f"(APIServer pid=7) INFO {head}:65] Received request chatcmpl-{number}: params: SamplingParams(n=1, "
        f"stop=['a']), lora_request: None.\n",
        f"(APIServer pid=7) DEBUG {head}:101] Generated response chatcmpl-{number} details: "
        f"output_token_ids: {list(range(answer))}\n"
        f"(APIServer pid=7) INFO {head}:108] Generated response chatcmpl-{number}: output: {TEXT!r}, "
        "finish_reason: stop\n",
    )


def vllm_streamed(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns vLLM's lines in JSON for a streamed completion.

    The answer's line names the request without the last number, that of the prompt in the request.
    """

    def line(message: str) -> str:
        return json.dumps({"asctime": f"2026-11-28 10:01:{number % 60:02d},598", "message": message}) + "\n"

    asked = f"Request cmpl-{number}-0 details: prompt: {TEXT!r}, prompt_token_ids: {list(prompt)}, "
    delta = f"Generated response cmpl-{number} (streaming delta) details: output_token_ids: [5]"
    return line(asked), line(delta) * answer + line(
        f"Generated response cmpl-{number} (streaming complete) details: output_token_ids: None"
    )


def vllm_before(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns the lines of older vLLM versions, with colours: one line has the whole request."""
    return (
        f"\x1b[32mINFO\x1b[0m 11-28 10:01:{number % 60:02d} \x1b[90m[logger.py:43]\x1b[0m Received request r{number}: "
        f"prompt: {TEXT!r}, params: SamplingParams(stop=['a']), prompt_token_ids: {list(prompt)}, embeds: None\n",
        f"INFO 11-28 10:01:59 [logger.py:79] Generated response r{number}: output: {TEXT!r}, "
        f"output_token_ids: {list(range(answer))}, finish_reason: stop\n",
    )


def sglang(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns the lines of a request and of its answer, as SGLang 0.5.23 writes them at level 3."""
    head = f"[2026-11-28 10:02:{number % 60:02d}]"
    obj = (
        f"GenerateReqInput(rid='r{number}', text=None, input_ids={list(prompt)}, sampling_params={{'stop': {TEXT!r}}})"
    )
    out = f"{{'text': {TEXT!r}, 'meta_info': {{'id': 'r{number}', 'prompt_tokens': 1, 'completion_tokens': {answer}}}}}"
    return f"{head} Receive: obj={obj}\n", f"{head} Finish: obj={obj}, out={out}\n"


def sglang_json(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns the lines that SGLang writes with `--log-requests-format json`."""
    at, rid = f"2026-11-28 10:02:{number % 60:02d}", f"r{number}"
    obj = {"rid": rid, "text": None, "input_ids": list(prompt)}
    out = {"text": TEXT, "meta_info": {"completion_tokens": answer}}
    lines = ({"event": "request.received", "obj": obj}, {"event": "request.finished", "obj": obj, "out": out})
    asked, answered = (f"[{at}] {json.dumps({'timestamp': at, 'rid': rid, **line})}\n" for line in lines)
    return asked, answered


def openai(number: int, prompt: Sequence[int], answer: int) -> tuple[str, str]:
    """Returns one line with a request to the completions API, in tokens, and the usage of its response."""
    body = {"prompt": list(prompt), "max_tokens": 4000}
    line = {
        "timestamp": 1764324000 + number % 60,
        "request": body,
        "response": {"usage": {"completion_tokens": answer}},
    }
    return json.dumps(line) + "\n", ""


WRITERS: dict[Callable[..., tuple[str, str]], str] = {
    vllm: "vllm", vllm_streamed: "vllm", vllm_before: "vllm", sglang: "sglang", sglang_json: "sglang",
    openai: "openai",
}  # fmt: skip


def log(path: Path, lines: Sequence[str]) -> Path:
    """Writes a log of the given lines, with other lines between them. Compresses it if the name ends with .gz.

    Returns its path.
    """
    content = "INFO 11-28 10:00:00 [api_server.py:1] Started\n\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def converted(path: Path, kind: str, **given: Any) -> tuple[list[TraceRequest], convert.Summary]:
    summary = convert.Summary()
    return list(convert.convert(path, kind, summary, **given)), summary


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """A function that converts a log of the given kind and lines, and returns its requests and the summary."""

    def of(kind: str, *lines: str, **given: Any) -> tuple[list[TraceRequest], convert.Summary]:
        (tmp_path / "log").write_text("".join(lines))
        return converted(tmp_path / "log", kind, **given)

    return of


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_replay_of_the_trace_has_the_hits_of_the_tokens(tmp_path: Path, write: Callable[..., Any]) -> None:
    requests = conversations(5, 40)
    pairs = [write(number, *request) for number, request in enumerate(requests)]
    asked, answered = (list(each) for each in zip(*pairs, strict=True))
    lines = [line for pair in zip([*asked, "", ""], ["", "", *answered], strict=True) for line in pair]
    if WRITERS[write] == "openai":  # an openai log has no other lines
        lines = ["".join(lines)]
    trace, summary = converted(log(tmp_path / "server.log.gz", lines), WRITERS[write])
    assert summary == convert.Summary(40)
    assert [(one.input_length, one.output_length) for one in trace] == [(len(given), out) for given, out in requests]
    assert [one.timestamp // 1000 for one in trace] == list(range(40))
    numbers: dict[tuple[int, ...], int] = {}
    known, seen = 0, set[tuple[int, ...]]()
    exact = []
    for one, (given, out) in zip(trace, requests, strict=True):
        starts = [tuple(given[: at + BLOCK]) for at in range(0, len(given), BLOCK)]
        exact.append(
            TraceRequest(one.timestamp, len(given), out, tuple(numbers.setdefault(s, len(numbers)) for s in starts))
        )
        filled = [start for start in starts if len(start) % BLOCK == 0]
        known += next((at for at, start in enumerate(filled) if start not in seen), len(filled))
        seen.update(filled)
    got, expected = (replay(each, 64, 4096, "return-rate") for each in (trace, exact))
    measured = ("us_per_match", "us_per_insert")
    assert {k: v for k, v in asdict(got).items() if k not in measured} == {
        k: v for k, v in asdict(expected).items() if k not in measured
    }
    assert got.ideal_hit_rate == known / sum(len(one.hash_ids) for one in exact) > 0.2 and got.block_hit_rate > 0.2


def test_messages_share_what_their_texts_share(read: Read) -> None:
    """Each turn repeats the messages before it.

    The text of tools comes before the messages. 4 bytes of text are a token.
    """
    messages: list[dict[str, str]] = [{"role": "system", "content": "s" * 5000}]
    tools = [{"type": "function", "function": {"name": "look", "description": "d" * 3000}}]
    lines = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn}" * 3000})
        lines.append(json.dumps({"created": 1764324000.5 + turn, "messages": messages, "tools": tools}))
        messages.append({"role": "assistant", "content": "a" * 2000})
        answer = {"choices": [{"message": messages[-1]}]}
        lines[-1] = json.dumps({"body": json.loads(lines[-1]), "response": {"body": answer}})
    lines.append(json.dumps({"created": 1764324009, "messages": messages}))  # no tools, no answer
    trace, summary = read("openai", "\n".join(lines))
    assert summary == convert.Summary(5, without_answer=1)
    assert [one.timestamp for one in trace] == [0, 1000, 2000, 3000, 8500]
    assert [one.output_length for one in trace] == [500] * 4 + [0]
    for before, after in pairwise(trace[:4]):
        filled = before.input_length // BLOCK
        assert filled > 3 and after.hash_ids[:filled] == before.hash_ids[:filled]
        assert abs(after.input_length - before.input_length - 5000 / 4) < 40
    assert not set(trace[4].hash_ids) & set(trace[3].hash_ids)


def test_tokens_of_a_tokenizer(read: Read, tmp_path: Path) -> None:
    """A word is a token. The template adds one token per message for its role, and one before the answer."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `transformers` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    vocabulary = {name: at for at, name in enumerate(("<unk>", "user", "assistant", "hello", "world"))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "words")
    message = {"role": "user", "content": "hello world " * 300}
    answer = {"choices": [{"text": "hello hello hello"}]}
    lines = [{"messages": [message], "response": answer}, {"messages": [message, {"role": "user", "content": "world"}]}]
    tokens = logs.tokenized(str(tmp_path / "words"))
    trace, _ = read("openai", "\n".join(map(json.dumps, lines)), tokens=tokens)
    assert [(one.input_length, one.output_length) for one in trace] == [(602, 3), (604, 0)]
    assert trace[0].hash_ids[0] == trace[1].hash_ids[0] and trace[0].hash_ids[1] != trace[1].hash_ids[1]


def test_ids_differ_from_run_to_run(read: Read) -> None:
    """Each run hashes with a new key, so nobody can compute the id of a text. In one run, equal texts have one id."""
    lines = [part for number in range(2) for part in vllm(number, [7] * 700, 1)]
    ((first, second), _), ((other, _), _) = read("vllm", *lines), read("vllm", *lines)
    assert first.hash_ids == second.hash_ids and not set(first.hash_ids) & set(other.hash_ids)
    assert len(set(first.hash_ids)) == 2


def test_requests_are_in_the_order_of_time_across_the_end_of_a_year(read: Read) -> None:
    parts = [vllm(number, [number] * 10, 1)[0] for number in range(3)]
    dates = ("12-31 23:59:59", "12-31 23:59:58", "01-01 00:00:01")
    lines = [re.sub(r"11-28 [\d:]+", date, part) for part, date in zip(parts, dates, strict=True)]
    trace, _ = read("vllm", *lines)
    assert [one.timestamp for one in trace] == [0, 1000, 3000]


def timed(path: Path, times: Sequence[Any]) -> tuple[list[tuple[int, int]], convert.Summary]:
    """Converts a log of requests with the given times; returns (time, line) of each request, and the summary.

    The prompt of a request has as many tokens as the number of its line.
    """
    path.write_text("".join(json.dumps({"created": at, "prompt": [1] * n}) + "\n" for n, at in enumerate(times, 1)))
    trace, summary = converted(path, "openai")
    return [(one.timestamp, one.input_length) for one in trace], summary


def test_times_with_a_year_are_taken_as_they_are(tmp_path: Path) -> None:
    order, _ = timed(tmp_path / "log", ["2025-07-01 00:00:00", "2024-07-01T00:00:00Z", 1719792001, 1719792002000])
    assert order == [(0, 2), (1000, 3), (2000, 4), (365 * 86_400_000, 1)]
    order, summary = timed(tmp_path / "log", [1_700_000_000, 9e15, 1_700_000_001, 99_999_999_999, 1_700_000_002])
    assert [at for at, _ in order[:3]] == [0, 1000, 2000] and summary.skipped_lines == 1
    assert timed(tmp_path / "log", [0, 1, 2.5])[0] == [(0, 1), (1000, 2), (2500, 3)]


def test_a_request_without_a_time_has_that_of_the_line_before(tmp_path: Path) -> None:
    order, summary = timed(tmp_path / "log", [None, True, "1700000000", "soon", "1700000001.5", None])
    assert order == [(0, 1), (0, 2), (0, 3), (0, 4), (1500, 5), (1500, 6)]
    assert summary == convert.Summary(6, without_answer=6, without_time=4)
    assert str(summary) == "6 requests, 6 without their answer, 4 without a time."


def test_a_text_without_an_end_is_read_once(tmp_path: Path) -> None:
    """A parser that starts again at each character would need quadratic time: hours for this text."""
    text = r"It\'s \"x\", isn\'t it: " * 50_000
    path = log(tmp_path / "log", [f"{ASKED}'{text}\n", f"{ASKED}None, prompt_token_ids: [1], stop='{text}\n"])
    code = (
        "from memstate_tools.traces import convert; from pathlib import Path; s = convert.Summary(); "
        f"print([one.input_length for one in convert.convert(Path({str(path)!r}), 'vllm', s)], s.skipped_lines)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[1] 1\n"


def test_the_answer_of_an_id_like_a_line_is_not_taken_for_that_of_another(read: Read) -> None:
    asked, answered = vllm_before(1, [1, 2], 3)
    fake = answered.replace("r1:", "r1: output_token_ids: [1, 2, 3, 4] b:")
    trace, _ = read("vllm", asked, fake, answered)
    assert [one.output_length for one in trace] == [3]


def test_few_requests_are_in_memory(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 3, an answer is dropped if 3 other requests have come since the request that it answers."""
    monkeypatch.setattr(convert, "WAITING", 3)
    pairs = [vllm(number, [number] * 10, 2) for number in range(6)]
    lines = [*(asked for asked, _ in pairs), *(answered for _, answered in pairs)]
    trace, summary = read("vllm", *lines)
    assert [one.output_length for one in trace] == [0, 0, 0, 2, 2, 2]
    assert summary == convert.Summary(6, without_answer=3)


GOOD = {kind: "".join(write(1, [1, 2, 3], 4)) for write, kind in WRITERS.items()}
ASKED = "INFO 11-28 10:01:22 [x.py:1] Request a details: prompt: "
UNREAD = [line.split(" | ") for line in Path(__file__).with_name("unread.txt").read_text("utf-8").splitlines()[2:]]


@pytest.mark.parametrize(("kind", "why", "bad"), [*UNREAD, ("openai", "not UTF-8", '{"prompt": "\udce9"}')])
def test_broken_lines_are_counted_and_named(tmp_path: Path, kind: str, why: str, bad: str) -> None:
    path = tmp_path / "log"
    path.write_bytes((GOOD[kind] + f"{bad}\n" * 7 + GOOD[kind]).encode(errors="surrogateescape"))
    at = GOOD[kind].count("\n") + 1
    trace, summary = converted(path, kind)
    assert len(trace) == summary.requests == 2 and summary.skipped_lines == 7
    assert [line.split(":")[0] for line in summary.first_skipped] == [f"line {at + n}" for n in range(5)]
    assert all(why in line for line in summary.first_skipped)
    where = f"(lines {', '.join(str(at + n) for n in range(5))} and 2 more)."
    assert str(summary).endswith(where) and "Error" not in str(summary)


def received(**given: Any) -> tuple[str, str]:
    """Returns the line of a request of SGLang, as text and as JSON."""
    obj = {"rid": "a", "text": None, "input_ids": None, **given}
    fields = ", ".join(f"{name}={value!r}" for name, value in obj.items())
    head = "[2026-11-28 10:02:01] "
    entry = {"timestamp": "2026-11-28T10:02:01.5", "event": "request.received", "rid": obj["rid"], "obj": obj}
    return f"{head}Receive: obj=GenerateReqInput({fields})\n", f"{head}{json.dumps(entry)}\n"


LONG = "word " * 3000
CUT_TEXT = LONG[:1024] + "..." + LONG[-1024:]
PARTS = {
    "SGLang, JSON, text": ("sglang", received(text=CUT_TEXT)[1], "a cut prompt"),
    "SGLang, JSON, ids": ("sglang", received(input_ids=[1, "...", 2])[1], "a cut prompt"),
    "SGLang, JSON, a text of a batch": ("sglang", received(rid=["a", "b"], text=["x", CUT_TEXT])[1], "a cut prompt"),
    "SGLang, a session": ("sglang", received(session_params={"id": "s", "rid": "r"}, input_ids=[7])[0], "session"),
    "SGLang, a session, JSON": ("sglang", received(session_params={"id": "s"}, input_ids=[7])[1], "session"),
    "vLLM, --max-log-len": ("vllm", f"{ASKED}'a lot of text', prompt_token_ids: {[1] * 13}, \n", "--max-log-len"),
    "vLLM, embeddings": ("vllm", f"{ASKED}None, prompt_token_ids: [1], prompt_embeds shape: torch.Size([9]).\n", "emb"),
    "OpenAI, a turn": ("openai", '{"previous_response_id": "r", "prompt": "and then?"}\n', "turns before"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bad", "why"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_prompt_is_refused_and_counted_with_its_reason(read: Read, kind: str, bad: str, why: str) -> None:
    trace, summary = read(kind, GOOD[kind] + bad * 7)
    assert len(trace) == 1 and summary.skipped_lines == 7
    ((reason, times),) = summary.partial.items()
    assert (
        why in reason
        and times == 7
        and f"7 requests left out, because the log has only a part of them: {reason} (lines " in str(summary)
    )


def test_each_line_is_told_of_once_and_in_words(read: Read) -> None:
    turn = '{"previous_response_id": "r", "prompt": "and then?"}\n'
    _, summary = read("openai", '{"prompt": "a"}\n', turn, "\nx\n")
    (reason,) = summary.partial
    assert str(summary) == (
        "1 request, 1 without its answer, 1 without a time. 1 request left out, because the log has only a part of it: "
        f"{reason} (line 2). 1 line not read: not JSON (line 4)."
    )
    for n in range(9):
        summary.skip(5 + n, ValueError(f"reason {n}"))
    assert "10 lines not read: not JSON (line 4); reason 0 (line 5);" in str(summary)
    assert str(summary).endswith("; reason 3 (line 8); 5 for other reasons.")


@pytest.mark.parametrize("head", [{}, {"timestamp": "2026-11-28T10:02:01.5"}], ids=["no time", "its time behind"])
def test_a_log_with_parts_alone_says_what_it_left_out(read: Read, head: dict[str, str]) -> None:
    asked = {"event": "request.received", "rid": "a", "obj": {"text": CUT_TEXT}, **head}
    with pytest.raises(InvalidArgument, match="no request with tokens in it") as refused:
        read("sglang", json.dumps(asked) + "\n")
    assert "1 request left out, because the log has only a part of it: a cut prompt" in str(refused.value)
    assert "is it a log of" not in str(refused.value)


def test_dots_of_a_text_itself_are_no_cut(read: Read) -> None:
    lines = [line for text in ("wait... what?", "a, extra_key='x' ... b", "x" * 2051) for line in received(text=text)]
    trace, summary = read("sglang", *lines)
    assert summary.skipped_lines == 0 and [one.input_length for one in trace] == [4, 4, 6, 6, 513, 513]


@pytest.mark.parametrize("form", [0, 1], ids=["text", "JSON"])
def test_a_batch_is_as_many_requests(read: Read, form: int) -> None:
    asked = received(rid=["r1", "r2"], input_ids=[[7] * 600, [8] * 90], lora_path=["x", "x"], image_data=[None, None])
    texts = received(rid=["r3", "r4"], text=["a" * 8, "b" * 80])
    trace, summary = read("sglang", asked[form], texts[form], *(sglang(n, [], 10 * n)[1] for n in (2, 1, 4, 3)))
    assert summary == convert.Summary(4)
    lengths = [(one.input_length, one.output_length) for one in trace]
    assert lengths == [(600, 10), (90, 20), (2, 30), (20, 40)]


def test_a_list_of_prompts_is_as_many_requests(read: Read) -> None:
    body = {"prompt": ["a" * 8, "b" * 80], "usage": {"completion_tokens": 9}}
    answered = body | {"choices": [{"text": "c" * 4}, {"text": "d" * 16}]}
    lines = (json.dumps(one) + "\n" for one in (body, answered, {"prompt": [[1, 2], [3]]}))
    trace, summary = read("openai", *lines)
    lengths = [(one.input_length, one.output_length) for one in trace]
    assert lengths == [(2, 0), (20, 0), (2, 1), (20, 4), (2, 0), (1, 0)] and summary.without_answer == 4


def adapted(adapter: str) -> str:
    """Returns vLLM's lines of a request for an adapter."""
    named = f"LoRARequest(lora_name={adapter!r}, lora_int_id=1, lora_path='/x')"
    return vllm(1, [7] * 600, 1)[0].replace("lora_request: None", f"lora_request: {named}")


def picture(url: str) -> str:
    parts = [{"type": "text", "text": "t" * 4000}, {"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n"


IDS = [7] * 600
SALTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "SGLang, adapters": ("sglang", lambda one: received(input_ids=IDS, lora_path=one)[0]),
    "SGLang, adapters, JSON": ("sglang", lambda one: received(input_ids=IDS, lora_path=one)[1]),
    "SGLang, tenants": ("sglang", lambda one: received(input_ids=IDS, extra_key=one)[0]),
    "SGLang, salts": ("sglang", lambda one: received(input_ids=IDS, cache_salt=one)[1]),
    "SGLang, pictures": ("sglang", lambda one: received(input_ids=IDS, image_data=[one])[0]),
    "vLLM, adapters": ("vllm", adapted),
    "vLLM, adapters, before": (
        "vllm", lambda one: f"{ASKED}None, prompt_token_ids: {IDS}, lora_request: LoRARequest(lora_name={one!r}).\n",
    ),
    "OpenAI, models": ("openai", lambda one: json.dumps({"prompt": IDS, "model": one}) + "\n"),
    "OpenAI, salts": ("openai", lambda one: json.dumps({"prompt": IDS, "cache_salt": one}) + "\n"),
    "OpenAI, pictures": ("openai", picture),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "line"), SALTS.values(), ids=SALTS)
def test_prompts_of_other_adapters_tenants_or_pictures_share_nothing(
    read: Read, kind: str, line: Callable[[str], str]
) -> None:
    (first, other, again), summary = read(kind, *map(line, "xyx"))
    assert first.hash_ids == again.hash_ids and not set(first.hash_ids) & set(other.hash_ids)
    assert first.input_length == other.input_length and summary.skipped_lines == 0
    pictured = 3 * ("image" in line("x"))
    assert summary.with_media == pictured and ("not counted" in str(summary)) == bool(pictured)


def test_the_bytes_of_a_picture_are_no_tokens(read: Read) -> None:
    (one,), _ = read("openai", picture("data:image/png;base64," + "A" * 90_000))
    assert 1000 < one.input_length < 1050


@pytest.mark.parametrize("bare", [False, True], ids=["with a head", "without"])
@pytest.mark.parametrize("wrap", ["docker", "kubernetes"])
def test_what_a_container_wraps_is_read_and_put_together(read: Read, wrap: str, bare: bool) -> None:
    """Container runtimes cut a long line into parts. Lines of the other output stream can lie between the parts."""
    asked, answered = sglang_json(1, range(9000), 4)
    lines = []
    for whole in (asked, answered):
        text = whole.partition("] ")[2] if bare else whole
        parts = [text[at : at + 16384] for at in range(0, len(text), 16384)]
        for place, part in enumerate([*parts, "noise\n"]):
            stream, ends = ("stderr" if part == "noise\n" else "stdout"), part.endswith("\n")
            if wrap == "docker":
                line = json.dumps({"log": part, "stream": stream, "time": "2026-11-28T10:02:01.000000001Z"})
            else:
                line = f"2026-11-28T10:02:01.000000001Z {stream} {'F' if ends else 'P'} {part.rstrip()}"
            lines.insert(-1 if place == len(parts) else len(lines), line + "\n")
    assert len(lines) > 6
    lines.append('{"event": "of another"}\n')
    trace, summary = read("sglang", *lines)
    assert summary == convert.Summary(1) and [(one.input_length, one.output_length) for one in trace] == [(9000, 4)]


def test_the_parts_of_a_line_have_its_limit(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "LONGEST_LINE", 100)
    part = json.dumps({"log": "x" * 40, "stream": "stdout", "time": ""}) + "\n"
    with pytest.raises(InvalidArgument, match="line 3: the parts of a line are longer than 100 bytes"):
        read("sglang", part * 3)


@pytest.mark.parametrize(("kind", "begins"), [("vllm", "DEBUG 11-"), ("sglang", "[2026-")])
def test_the_line_on_the_page_is_read(kind: str, begins: str) -> None:
    lines = (ROOT / "docs" / "capacity.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(begins))
    (said,) = logs.READERS[kind](line.encode(), logs.guessed)
    assert said.at is not None and said.prompt == array("i", [5159, 836]).tobytes()


@pytest.mark.parametrize("kind", logs.READERS)
def test_what_has_no_request_is_refused_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": 3}\n')
    for content, why in ((None, "no request with tokens in it"), (gzip.compress(b"a" * 999)[:-3], "cut short")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=why) as caught:
            form.write(tmp_path / "out", convert.convert(path, kind, convert.Summary()))
        assert convert.HINTS[kind] in str(caught.value) or content is not None
        others = [f"is it a log of {each} or " in str(caught.value) for each in logs.READERS if each != kind]
        assert any(others) == (content is None)
    assert [each.name for each in tmp_path.iterdir()] == ["log"]


def test_a_line_has_a_limit_and_reading_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path / "log", ["".join(vllm(number, [1], 1)) for number in range(3)])
    monkeypatch.setattr(files, "REPORT_EVERY", 2)
    told: list[tuple[int, int]] = []
    converted(path, "vllm", report=lambda done, total: told.append((done, total)))
    assert told and {total for _, total in told} == {path.stat().st_size} and told == sorted(told)
    monkeypatch.setattr(convert, "LONGEST_LINE", 100)
    with pytest.raises(InvalidArgument, match="line 1: longer than 100 bytes"):
        converted(path, "vllm")


def test_the_command(tmp_path: Path) -> None:
    path, out = log(tmp_path / "log", ["".join(sglang(1, range(700), 4))]), tmp_path / "t.jsonl.gz"
    done = memstate("trace", "sglang", "--from", path, "--out", out, "--json", "-")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out) == asdict(convert.Summary(1))
    (one,) = form.read(out)
    assert (one.timestamp, one.input_length, one.output_length) == (0, 700, 4)
    assert b"rid" not in gzip.decompress(out.read_bytes())
    made = memstate("trace", "chat", "--requests", "3", "--out", out, "--json", "-")
    assert json.loads(made.out)["requests"] == len(form.read(out)) == 3
