"""The endpoints. They run in one asyncio loop; one thread drives the model, and another one tokenizes texts."""

from asyncio import Future, get_running_loop, wait, wrap_future
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Thread
from typing import Any, Final

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from examples.serve_http.answer import Answer, problem
from examples.serve_http.asked import CHOICES, ChatBody, Completion, wrong
from memstate import InvalidArgument, MemstateError, metrics
from memstate.integrations.transformers import Server

NEW: Final = 256  # new tokens at most, if the client gives no limit
QUEUE: Final = 256  # waiting prompts at most
# largest body: this many bytes, or this many bytes for each token of a request if that is more
BYTES: Final = (2**20, 16)
FORGOTTEN: Final = 2**27  # bytes of a too large body that are read and dropped
SESSIONS: Final = 1000  # open sessions at most; beyond them, the least recently used one is closed


class Announced:
    """Refuses a body whose announced length is too large. If no length is announced, routes count the bytes.

    Args:
        app: application that answers all other requests.
        most: bytes of the largest body.
    """

    def __init__(self, app: Any, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers at once, then reads and drops the body: a client that still sends must not see a reset."""
        said = dict(scope.get("headers", ())).get(b"content-length", b"")
        if not said.isdigit() or int(said) <= self._most:
            await self._app(scope, receive, send)
            return
        text = f"a body of {int(said)} bytes: this server reads {self._most}, and {BYTES[1]} for each of --tokens"
        refusal, left = JSONResponse(problem(413, text).detail, 413, {"connection": "close"}), FORGOTTEN
        await send({"type": "http.response.start", "status": 413, "headers": refusal.raw_headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        while left > 0 and (part := await receive()).get("more_body"):
            left -= len(part["body"])
        await send({"type": "http.response.body"})


def app(server: Server, tokenizer: Any, name: str) -> FastAPI:
    """Returns the application. It runs the server from startup to shutdown, and then closes it.

    Args:
        server: the server, with the tokenizer.
        tokenizer: tokenizer of the model.
        name: name of the model, for clients.
    """
    mem, driver, texts = server.mem, Thread(target=server.run), ThreadPoolExecutor(1)
    # tokens of prompt and answer; the last token of an answer is not read
    limit = min(mem.pages.per_row, mem.pages.count) * mem.pages.size
    rows = mem.stats().rows
    talks = dict[Any, Any]()  # for the driver's thread only: (salt, name) -> session, the most recently used last
    turns = dict[Future[None], Any]()  # for the loop only: future of a running turn -> (salt, name) of its session

    @asynccontextmanager
    async def life(_: FastAPI) -> Any:
        driver.start()
        yield
        server.close()
        driver.join()
        texts.shutdown()

    async def refused(request: Any, error: Any) -> Response:
        if isinstance(error, RequestValidationError):
            json = "json" in request.headers.get("content-type", "")
            error = problem(400, wrong(error.errors()) if json else "send the header content-type: application/json")
        own = 400 if isinstance(error, InvalidArgument) else 503 if isinstance(error, MemstateError) else 500
        status, said = getattr(error, "status_code", own), getattr(error, "detail", str(error))
        return JSONResponse(said if isinstance(said, dict) else problem(status, said).detail, status)

    kinds = (HTTPException, RequestValidationError, MemstateError, Exception)
    handlers, most = dict.fromkeys(kinds, refused), max(BYTES[0], BYTES[1] * limit)
    made = FastAPI(title="memstate", lifespan=life, exception_handlers=handlers)
    made.add_middleware(Announced, most=most)
    figures, about = metrics.registry(mem), {"id": name, "object": "model", "created": 0, "owned_by": "memstate"}
    made.add_api_route("/metrics", lambda: Response(generate_latest(figures), media_type=CONTENT_TYPE_LATEST))
    made.add_api_route("/v1/models", lambda: {"object": "list", "data": [about]})
    made.add_api_route("/v1/models/{id:path}", lambda id: about if known(id) else None)
    made.add_api_route("/health", lambda: Response(status_code=200 if driver.is_alive() else 503))

    def known(id: str) -> bool:
        if id != name:
            raise problem(404, f"the model {id!r} is not here: take {name!r}", "model_not_found")
        return True

    def opened(own: Any, other: Any, asked: ChatBody | Completion) -> Any:
        if asked.fork and other not in talks:
            said = f"fork={asked.fork!r}: no such session is open; sessions of other salts are not seen"
            raise problem(404, said, "no_session")
        if asked.fork and own in talks:
            said = f"session={asked.session!r} is open: a fork needs a new name; sessions of other salts are not seen"
            raise problem(400, said, "session_exists")
        fresh = asked.session if own not in talks else None
        if fresh:
            talks[own] = server.fork(talks[other], fresh) if asked.fork else mem.sessions.open(fresh)
        talks[own] = talks.pop(own)
        if len(talks) > SESSIONS:
            mem.sessions.close(talks.pop(next(iter(talks))))
        return talks[own]

    async def answer(asked: ChatBody | Completion) -> Response:
        known(asked.model)
        try:
            prompts = await get_running_loop().run_in_executor(texts, asked.prompts, tokenizer)
        except Exception as error:  # templates raise their own errors
            said = f"the prompt does not fit the tokenizer and its template: {error!r}"
            raise problem(400, str(error) if isinstance(error, InvalidArgument) else said) from error
        if server.waiting + len(prompts) > QUEUE:
            raise problem(429, f"{QUEUE} prompts wait: try again later", "rate_limit_exceeded")
        longest = max(len(prompt.tokens) for prompt in prompts)
        most = asked.max_tokens or max(1, min(NEW, limit - longest + 1))
        if longest + most - 1 > limit:
            said = f"{longest} tokens of a prompt and {most} of its answer need more than {limit}: raise --tokens"
            raise problem(400, said, "context_length_exceeded")
        if asked.n > rows or asked.n * len(prompts) > CHOICES:
            raise problem(400, f"n={asked.n}: expected at most {rows} (--rows), and {CHOICES} answers to all prompts")
        config = asked.config(server.model.generation_config)
        if asked.n > 1 and not config.do_sample:
            raise problem(400, "n above 1 needs temperature or top_p, and no temperature of 0")
        if asked.fork and not asked.session:
            raise problem(400, f"fork={asked.fork!r} needs session=, the name of the new one")
        session, own, other = None, (asked.cache_salt, asked.session), (asked.cache_salt, asked.fork)
        if asked.session or asked.fork:
            if len(prompts) > 1:
                raise problem(400, f"{len(prompts)} prompts, and a session goes on with one")
            while asked.fork and (busy := [turn for turn, its in turns.items() if its == other]):
                _, late = await wait(busy, timeout=asked.timeout)
                if late:
                    raise problem(504, f"turns of {asked.fork!r} still run", "timeout")
            session = await wrap_future(server.call(lambda: opened(own, other, asked)))
        top = asked.top_logprobs if getattr(asked, "logprobs", False) else None
        made = Answer(server, [replace(
            prompt, config=config, most=most, seed=asked.seed, session=session, salt=asked.cache_salt, logprobs=top,
            priority=asked.priority, tenant=asked.user, timeout=asked.timeout,
        ) for prompt in prompts], asked, tokenizer)  # fmt: skip
        if session:
            turns[made.over] = own
            made.over.add_done_callback(turns.pop)
        return made

    @made.post("/v1/chat/completions", max_body_size=most)
    async def chat(asked: ChatBody) -> Response:
        return await answer(asked)

    @made.post("/v1/completions", max_body_size=most)
    async def completions(asked: Completion) -> Response:
        return await answer(asked)

    return made
