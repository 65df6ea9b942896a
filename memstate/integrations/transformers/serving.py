"""`serve` and `stream`: continuous batching of requests as they arrive, in one call."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.prompts import Event, Prompt, Served
from memstate.integrations.transformers.running import Submission
from memstate.integrations.transformers.server import Server


def stream(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Event]:
    """Runs requests. Yields every token when it is chosen, and every request when it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. If they are in a list or another collection, all are checked before the
            first one starts. Other iterables are read when there is room; they yield None if no request is there yet.
        **settings: arguments of `Server`.

    Raises:
        ConfigurationError: for the reasons of `Server`.
        InvalidArgument: a request is not valid, see `Server.submit`; the error names its number. If the requests are in
            a collection, none has started. If they come from another iterable, running requests are aborted.
        Exception: `Server` or `Server.step` raised it; running requests are aborted.

    Syncs: yes, for the tokens.
    """
    server, more = Server(model, mem, **settings), True
    arrivals = _arrivals(server, requests)
    if listed := isinstance(requests, Collection):  # check all requests before the first one starts
        arrivals = iter(list(arrivals))
    try:
        while more or server.busy:
            while more and server.wants_more:
                arrived = next(arrivals, server)
                more = arrived is not server
                if not isinstance(arrived, Submission):
                    break
                server.ask(arrived)
                if not listed:  # admit now, so that no request is read before there is room for it
                    server.admit()
            yield from server.step()
    finally:
        server.close()


def _arrivals(server: Server, requests: Iterable[Any]) -> Iterator[Submission | None]:
    """Yields each request after its checks, at the moment it is read; None if no request is there yet."""
    numbers = count()
    for place, given in enumerate(requests):
        if given is None:
            yield None
            continue
        number, prompt = next(numbers), given if isinstance(given, Prompt) else Prompt(given)
        try:
            asked = server.checked(replace(prompt, id=number) if prompt.id is None else prompt)
        except InvalidArgument as error:
            raise InvalidArgument(f"requests[{place}]: {error}") from error
        yield asked


def serve(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Served]:
    """Runs requests by continuous batching. Yields each request when it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: requests as for `stream`.
        **settings: arguments of `Server`.

    Raises:
        Exception: for the reasons of `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, **settings) if isinstance(event, Served))
