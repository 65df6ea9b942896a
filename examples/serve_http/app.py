"""The endpoints. They run in one asyncio loop, and a thread of its own drives the model."""

from asyncio import wrap_future
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any, Final

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from examples.serve_http.answer import Answer, problem
from examples.serve_http.asked import Chat, Completion
from memstate import InvalidArgument, MemstateError, metrics
from memstate.integrations.transformers import Prompt, Server

NEW: Final = 256  # new tokens at most, where a client does not say
QUEUE: Final = 256  # requests that wait at most
SESSIONS: Final = 1000  # open ones; then the one that was used least recently is closed


def app(server: Server, tokenizer: Any, name: str) -> FastAPI:
    """Returns the application. It drives the server from its start to its end, and closes it.

    Args:
        server: the server, with the tokenizer.
        tokenizer: the model's.
        name: the model's, for clients.
    """
    mem, driver, talks = server.mem, Thread(target=server.run), dict[str, Any]()  # the driver's

    @asynccontextmanager
    async def life(_: FastAPI) -> Any:
        driver.start()
        yield
        server.close()
        driver.join()

    async def refused(_: Any, error: Any) -> Response:
        if isinstance(error, RequestValidationError):
            error = problem(400, "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()))
        own = 400 if isinstance(error, InvalidArgument) else 503 if isinstance(error, MemstateError) else 500
        status, said = getattr(error, "status_code", own), getattr(error, "detail", str(error))
        return JSONResponse(said if isinstance(said, dict) else problem(status, said).detail, status)

    kinds = (HTTPException, RequestValidationError, MemstateError, Exception)
    made = FastAPI(title="memstate", lifespan=life, exception_handlers=dict.fromkeys(kinds, refused))
    figures, about = metrics.registry(mem), {"id": name, "object": "model", "created": 0, "owned_by": "memstate"}
    made.add_api_route("/metrics", lambda: Response(generate_latest(figures), media_type=CONTENT_TYPE_LATEST))
    made.add_api_route("/v1/models", lambda: {"object": "list", "data": [about]})
    made.add_api_route("/health", lambda: Response(status_code=200 if driver.is_alive() else 503))

    def opened(name: str | None, fork: str | None) -> Any:
        if fork is not None and (name is None or name in talks or fork not in talks):
            raise problem(404, f"fork={fork!r}: expected an open session, and in session= a new one", "no_session")
        # the one that was used last is the last
        talks[name] = talks.pop(name, None) or (server.fork(talks[fork], name) if fork else mem.sessions.open(name))
        if len(talks) > SESSIONS:
            mem.sessions.close(talks.pop(next(iter(talks))))
        return talks[name]

    async def answer(asked: Chat | Completion) -> Response:
        if asked.model != name:
            raise problem(404, f"the model {asked.model!r} is not here: take {name!r}", "model_not_found")
        if server.waiting >= QUEUE:
            raise problem(429, f"{QUEUE} requests wait: try again later", "rate_limit_exceeded")
        try:
            tokens = asked.tokens(tokenizer)
        except Exception as error:  # a template says no in its own way
            raise problem(400, f"the messages do not fit the model's template: {error!r}") from error
        most = asked.max_tokens or max(1, min(NEW, mem.pages.per_row * mem.pages.size - len(tokens) + 1))
        top = asked.top_logprobs if getattr(asked, "logprobs", False) else None
        named = asked.session or asked.fork
        session = await wrap_future(server.call(lambda: opened(asked.session, asked.fork))) if named else None
        prompt = Prompt(
            tokens, config=asked.config(server.model.generation_config), most=most, seed=asked.seed, session=session,
            salt=asked.cache_salt, logprobs=top, priority=asked.priority, tenant=asked.user, timeout=asked.timeout,
        )  # fmt: skip
        return Answer(server, prompt, asked, tokenizer)

    @made.post("/v1/chat/completions")
    async def chat(asked: Chat) -> Response:
        return await answer(asked)

    @made.post("/v1/completions")
    async def completions(asked: Completion) -> Response:
        return await answer(asked)

    return made
