"""Makes a small model, and requests with their right answers. Runs clients that compare the answers, or go away.

Then checks what is left in the server.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.support.http_clients import answered, asked, parts
from tests.support.tiny_models import tiny
from tests.support.tiny_served import alone
from tests.support.tiny_tokenizers import byte_level

TOPICS, VOCABULARY = 8, 300
MARGIN = 1e-3  # smallest distance of the two largest logits, as a share of the largest one; rounding is far smaller
TEMPLATE = "{% for one in messages %}<{{ one.role }}> {{ one.content }}\n{% endfor %}<assistant> "
ABORTED, BATCH = 0.3, 200  # share of requests whose client goes away; number of requests of a round
GROWTH = 1.05  # largest ratio of the memory at the end to that of the second minute


class Case(NamedTuple):
    """A request and its right answer."""

    path: str
    body: dict[str, Any]
    tokens: list[int]
    answer: str


def prepare(folder: Path, cases: int = 30, longest: int = 80) -> list[Case]:
    """Saves a model with its tokenizer to a folder. Returns requests. The last one has the longest answer."""
    model = tiny("qwen3_next", changes=(("vocab_size", VOCABULARY), ("max_position_embeddings", 2048)))
    tokenizer, draw = byte_level(VOCABULARY), random.Random(0)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def case(path: str, tokens: list[int], most: int, **body: Any) -> Iterator[Case]:
        known: dict[Any, Any] = {}
        answer = alone(model, tokens, known, most)
        pairs = [(logits.topk(2).values, logits.abs().max()) for logits in known.values()]
        if all(first - second > MARGIN * largest for (first, second), largest in pairs):
            yield Case(path, {**body, "max_tokens": most}, tokens, tokenizer.decode(answer, skip_special_tokens=True))

    def chat(most: int) -> Iterator[Case]:
        said = [{"role": "user", "content": "".join(draw.choices("adehmnopstw .", k=draw.randrange(8, 60)))}]
        tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        return case("/v1/chat/completions", tokens, most, messages=said)

    topics = [draw.choices(range(1, VOCABULARY), k=draw.randrange(16, 120)) for _ in range(TOPICS)]
    made, ends = list[Case](), tokenizer("x").input_ids  # each prompt ends with a whole character
    while len(made) < cases:
        tokens = draw.choice(topics) + draw.choices(range(1, VOCABULARY), k=draw.randrange(4, 40)) + ends
        made += case("/v1/completions", tokens, draw.randrange(4, 25), prompt=tokens)
        made += chat(draw.randrange(4, 25))
    while not (last := list(chat(longest))):
        pass
    return made + last


class Load:
    """The clients of one server.

    Args:
        port: port of the server.
        model: name of the model there.
        cases: requests with their right answers.
        clients: number of clients, each with one request at a time.
    """

    def __init__(self, port: int, model: str, cases: Sequence[Case], clients: int) -> None:
        self.port, self.model, self.cases, self.clients = port, model, cases, clients
        self.random, self.counts, self.wrong = random.Random(0), Counter[str](), list[str]()
        self.usual = 1.0  # duration of the last finished request, in seconds

    async def run(self, seconds: float, rounds: int) -> int:
        """Runs the whole load, and returns the exit status."""
        while True:
            try:
                await self._whole("/v1/models")
                break
            except OSError:
                await asyncio.sleep(0.5)
        leaks = await self.storm(seconds) if seconds else []
        ratios = [await self.pair(number) for number in range(rounds)]
        if ratios:
            print(f"requests a second over HTTP / without: {median(ratios):.3f}, of {sorted(ratios)}")
        for problem in [*self.wrong[:10], *leaks]:
            print(problem)
        return bool(self.wrong or leaks)

    async def storm(self, seconds: float) -> list[str]:
        """Runs clients for some time. Some go away. Returns a line for each request, row or fault that is left."""
        began, memory = time.monotonic(), list[float]()
        clients = [asyncio.create_task(self._client(began + seconds)) for _ in range(self.clients)]
        slow = asyncio.create_task(self._slow(began + seconds))
        while time.monotonic() < began + seconds:
            await asyncio.sleep(min(60, began + seconds - time.monotonic()))
            left = await self._whole("/left")
            memory.append(left["MB"])
            print(f"{time.monotonic() - began:5.0f} s {dict(self.counts)} {left}", flush=True)
        await asyncio.gather(slow, *clients)
        left = await self._whole("/left")
        while left["requests"] and time.monotonic() < began + seconds + 60:
            await asyncio.sleep(0.2)
            left = await self._whole("/left")
        print(f"at the end: {left}", flush=True)
        lines = [f"left: {name} {left[name]}" for name in ("requests", "rows", "faults") if left[name]]
        grown = left["MB"] > GROWTH * memory[min(1, len(memory) - 1)]
        return lines + [f"memory has grown: {memory}"] * grown

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            case, stream = self.random.choice(self.cases), self.random.random() < 0.5
            goes, began = self.random.random() < ABORTED, time.monotonic()
            leave = self.random.randrange(8) if goes and stream else 0
            try:
                async with asyncio.timeout(self.random.uniform(0, self.usual) if goes and not leave else None):
                    await self._ask(case, stream, leave=leave)
            except TimeoutError:
                self.counts["gone"] += 1
            else:
                self.counts["streams" if stream else "whole"] += 1
                self.usual = time.monotonic() - began

    async def _ask(self, case: Case, stream: bool, pause: float = 0, leave: int = 0, **more: Any) -> None:
        """Sends a request, and compares the answer. leave: number of parts after which it goes away (TimeoutError)."""
        body, said = {**case.body, **more, "model": self.model, "stream": stream}, list[Any]()
        if stream:
            async with asked(self.port, case.path, body, 4096 if pause else 0) as reader:
                try:
                    async for part in parts(reader, pause):
                        said += part["choices"]
                        if len(said) == leave:
                            raise TimeoutError
                except (asyncio.CancelledError, TimeoutError):
                    self.counts["gone after the first token"] += bool(said)
                    raise
            text = "".join(one["text"] if "text" in one else one["delta"]["content"] for one in said)
        else:
            said = (await self._whole(case.path, body))["choices"]
            text = said[0]["text"] if "text" in said[0] else said[0]["message"]["content"]
        if text != case.answer or said[-1]["finish_reason"] != "length":
            self.wrong.append(f"{body}: {text!r} instead of {case.answer!r}, {said[-1:]}")

    async def _slow(self, until: float) -> None:
        """Runs a client that reads so slowly that the buffer of its socket is full."""
        while time.monotonic() < until:
            await self._ask(self.cases[-1], stream=True, pause=0.02, logprobs=True, top_logprobs=20)
            self.counts["slow"] += 1

    async def _whole(self, path: str, body: Any = None) -> Any:
        status, said = await answered(self.port, path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {said}")
        return said

    async def pair(self, number: int) -> float:
        """Runs the same requests over HTTP and without it. Returns the ratio of their requests per second."""
        cases = [self.random.choice(self.cases) for _ in range(BATCH)]

        async def over_http() -> float:
            left, began = iter(cases), time.perf_counter()

            async def client() -> None:
                for case in left:
                    await self._ask(case, True, cache_salt=f"http {number}")

            await asyncio.gather(*(client() for _ in range(self.clients)))
            return time.perf_counter() - began

        async def direct() -> float:
            given = [(case.tokens, case.body["max_tokens"]) for case in cases]
            body = {"cases": given, "salt": f"direct {number}", "clients": self.clients}
            return await self._whole("/direct", body)

        rates, spent = dict[Any, float](), dict[Any, float]()
        for run in (direct, over_http) if number % 2 else (over_http, direct):
            before = (await self._whole("/left"))["cpu"]
            rates[run] = BATCH / await run()
            spent[run] = (await self._whole("/left"))["cpu"] - before
        print(
            f"over HTTP {rates[over_http]:.1f} requests a second, {spent[over_http]:.2f} s of CPU in the server; "
            f"without {rates[direct]:.1f}, {spent[direct]:.2f} s",
            flush=True,
        )
        return rates[over_http] / rates[direct]
