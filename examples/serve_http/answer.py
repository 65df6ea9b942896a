"""Runs one request, and makes OpenAI's objects from its events. A client that goes away aborts it."""

import json
import time
from asyncio import CancelledError, ensure_future
from contextlib import aclosing, suppress
from typing import Any, Final

from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse

from examples.serve_http.asked import Chat, Completion
from memstate.integrations.transformers import Prompt, Server, Token

STATUS: Final = {"too_large": 400, "invalid": 400, "failed": 500, "no_room": 503, "aborted": 503, "timeout": 504}
START: Final = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def problem(status: int, message: str, code: str | None = None) -> HTTPException:
    """Returns why there is no answer, with an error object as its detail."""
    kind = "invalid_request_error" if status < 429 else "server_error"
    return HTTPException(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})


class Answer(Response):
    """The answer to one request, whole or in parts. The request is submitted when the answer is to be sent.

    Args:
        server: runs it.
        prompt: the request.
        asked: what the client has sent.
        tokenizer: for the text of single tokens.
    """

    background = None

    def __init__(self, server: Server, prompt: Prompt, asked: Chat | Completion, tokenizer: Any) -> None:
        self._server, self._prompt, self._asked, self._tokenizer = server, prompt, asked, tokenizer
        self._chat, self._stream = isinstance(asked, Chat), asked.stream
        kind = "chat.completion" + ".chunk" * asked.stream if self._chat else "text_completion"
        self._head = {"id": f"{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": asked.model}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends it, as an ASGI application."""
        # the body is there already, so `receive` returns when the client has gone
        work, gone = ensure_future(self._answer(scope, receive, send)), ensure_future(receive())
        gone.add_done_callback(lambda _: work.cancel())
        work.add_done_callback(lambda _: gone.cancel())
        with suppress(CancelledError):
            await work

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        found, parts = dict[int, list[Any]](), list[Any]()  # events by sample; of a stream, what is not sent yet

        async def say(last: bool = False) -> None:
            body = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n" * last
            parts.clear()
            await send({"type": "http.response.body", "body": body.encode(), "more_body": not last})

        try:
            async with aclosing(self._server.stream(self._prompt)) as events:
                async for event in events:
                    if (reason := getattr(event, "reason", None)) in STATUS:
                        code = "context_length_exceeded" if reason == "too_large" else reason
                        raise problem(STATUS[reason], event.error or f"the request has ended: {reason}", code)
                    if self._stream:
                        if not found:
                            await send({**START})
                        parts.append({**self._head, "choices": [self._choice([event], event.sample not in found)]})
                        if reason is None:  # the end of a sample goes with what comes next
                            await say()
                    found.setdefault(event.sample, []).append(event)
        except HTTPException as error:
            if not (found and self._stream):
                raise
            parts.append(error.detail)
        else:
            ends = [events[-1] for events in found.values()]
            prompt, new = len(self._prompt.tokens), sum(len(end.tokens) for end in ends)
            usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            usage["prompt_tokens_details"] = {"cached_tokens": max(e.cached for e in ends), "missed": ends[0].missed}
            if not self._stream:
                choices = [self._choice(events) for _, events in sorted(found.items())]
                return await JSONResponse({**self._head, "choices": choices, "usage": usage})(scope, receive, send)
            if self._asked.stream_options.get("include_usage"):
                parts.append({**self._head, "choices": [], "usage": usage})
        return await say(last=True)

    def _choice(self, events: list[Any], first: bool = True) -> dict[str, Any]:
        """Returns a sample or, in a stream, what one more event adds to it."""
        tokens = [event for event in events if isinstance(event, Token)]
        text, reason = "".join(token.text for token in tokens), getattr(events[-1], "reason", None)
        role = {"role": "assistant"} if first else {}
        said = {"delta" if self._stream else "message": {**role, "content": text}} if self._chat else {"text": text}
        logprobs = None if self._prompt.logprobs is None else {"content": [self._logprobs(token) for token in tokens]}
        said |= {"logprobs": logprobs, "finish_reason": "stop" if reason == "end" else reason}
        return {"index": events[-1].sample, **said}

    def _logprobs(self, one: Token) -> dict[str, Any]:
        """Returns a token with its logprob, and the most likely ones. Tokenizers do not tell bytes."""
        ids = ((one.token, one.logprob), *one.top)
        own, *top = [{"token": self._tokenizer.decode([id]), "logprob": value, "bytes": None} for id, value in ids]
        return {**own, "top_logprobs": top}
