"""Runs the prompts of a request, and makes OpenAI's objects from events. If the client leaves, aborts the prompts."""

import json
import time
from asyncio import CancelledError, Queue, ensure_future, get_running_loop
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse

from examples.serve_http.asked import ChatBody, Completion
from memstate.integrations.transformers import Event, Prompt, Served, Server, Token

STATUS: Final = {"too_large": 400, "invalid": 400, "failed": 500, "no_room": 503, "aborted": 503, "timeout": 504}
START: Final = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def problem(status: int, message: str, code: str | None = None) -> HTTPException:
    """Returns the exception of a failed request, with OpenAI's error object as its detail."""
    kind = "invalid_request_error" if status < 429 else "server_error"
    return HTTPException(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})


class Answer(Response):
    """The answer to one request, whole or in parts. The request is submitted when the answer is sent.

    Args:
        server: runs the request.
        prompts: prompts of the request.
        asked: body of the request.
        tokenizer: decodes single tokens.

    Attributes:
        over: a future that is done when the answer has ended.
    """

    background = None

    def __init__(self, server: Server, prompts: Sequence[Prompt], asked: ChatBody | Completion, tokenizer: Any) -> None:
        self._server, self._prompts, self._asked, self._tokenizer = server, prompts, asked, tokenizer
        self.over = get_running_loop().create_future()
        self._chat, self._stream = isinstance(asked, ChatBody), asked.stream
        kind = "chat.completion" + ".chunk" * asked.stream if self._chat else "text_completion"
        self._head = {"id": f"{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": asked.model}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the answer, as an ASGI application."""
        # the body has been read, so `receive` returns when the client has gone
        work, gone = ensure_future(self._answer(scope, receive, send)), ensure_future(receive())
        gone.add_done_callback(lambda _: work.cancel())
        work.add_done_callback(lambda _: gone.cancel())
        try:
            with suppress(CancelledError):
                await work
        finally:
            self.over.set_result(None)

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Runs the prompts together, and yields (number of the choice, event)."""
        events, loop, ids = Queue[tuple[int, Event]](), get_running_loop(), list[Any]()
        left = self._asked.n * len(self._prompts)
        try:
            for number, prompt in enumerate(self._prompts):

                def put(event: Event, first: int = number * self._asked.n) -> None:
                    loop.call_soon_threadsafe(events.put_nowait, (first + event.sample, event))

                ids.append(self._server.submit(prompt, to=put))
            while left:
                index, event = await events.get()
                left -= isinstance(event, Served)
                yield index, event
        finally:
            for id in ids if left else ():
                self._server.abort(id)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        # choice -> its events; parts of a stream that are not sent yet
        by_choice, parts = dict[int, list[Any]](), list[Any]()

        async def say(last: bool = False) -> None:
            body = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n" * last
            parts.clear()
            await send({"type": "http.response.body", "body": body.encode(), "more_body": not last})

        try:
            async with aclosing(self._events()) as events:
                async for index, event in events:
                    if (reason := getattr(event, "reason", None)) in STATUS:
                        code = "context_length_exceeded" if reason == "too_large" else reason
                        raise problem(STATUS[reason], event.error or f"the request has ended: {reason}", code)
                    if self._stream:
                        if not by_choice:
                            await send({**START})
                        parts.append({**self._head, "choices": [self._choice(index, [event], index not in by_choice)]})
                        if reason is None:  # the end of a sample is sent with the next part
                            await say()
                    by_choice.setdefault(index, []).append(event)
        except HTTPException as error:
            if not (by_choice and self._stream):
                raise
            parts.append(error.detail)
        else:
            ends, n = [events[-1] for _, events in sorted(by_choice.items())], self._asked.n
            prompt, new = sum(len(one.tokens) for one in self._prompts), sum(len(end.tokens) for end in ends)
            cached = sum(max(end.cached for end in ends[at : at + n]) for at in range(0, len(ends), n))
            usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            usage["prompt_tokens_details"] = {"cached_tokens": cached, "missed": ends[0].missed}
            if not self._stream:
                choices = [self._choice(*one) for one in sorted(by_choice.items())]
                return await JSONResponse({**self._head, "choices": choices, "usage": usage})(scope, receive, send)
            if self._asked.stream_options.get("include_usage"):
                parts.append({**self._head, "choices": [], "usage": usage})
        return await say(last=True)

    def _choice(self, index: int, events: list[Any], first: bool = True) -> dict[str, Any]:
        """Returns a choice made of its events; for a stream, only the part that these new events add."""
        tokens = [event for event in events if isinstance(event, Token)]
        text, reason = "".join(token.text for token in tokens), getattr(events[-1], "reason", None)
        role = {"role": "assistant"} if first else {}
        said = {"delta" if self._stream else "message": {**role, "content": text}} if self._chat else {"text": text}
        logprobs = (
            None if self._prompts[0].logprobs is None else {"content": [self._logprobs(token) for token in tokens]}
        )
        said |= {"logprobs": logprobs, "finish_reason": "stop" if reason == "end" else reason}
        return {"index": index, **said}

    def _logprobs(self, one: Token) -> dict[str, Any]:
        """Returns a token with its logprob, and the most likely tokens. `bytes` is None: tokenizers do not know it."""
        ids = ((one.token, one.logprob), *one.top)
        own, *top = [{"token": self._tokenizer.decode([id]), "logprob": value, "bytes": None} for id, value in ids]
        return {**own, "top_logprobs": top}
