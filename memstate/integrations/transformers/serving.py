"""`serve` and `stream`: continuous batching of what arrives, in one call."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.prompts import Event, Prompt, Served
from memstate.integrations.transformers.running import Asked
from memstate.integrations.transformers.server import Server


def stream(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Event]:
    """Runs requests and yields every token as it is chosen, and every request as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. A list or other collection is checked before any of it starts. Other
            iterables are read as there is room; None in them means that nothing has arrived yet.
        **settings: those of `Server`.

    Raises:
        ConfigurationError: as `Server`.
        InvalidArgument: a request is wrong, as for `Server.submit`; the error names its place. Of a collection nothing
            has started then. If another iterable yields it, the requests that run are aborted.
        Exception: as `Server` and `Server.step`; the requests that run are aborted then.

    Syncs: yes, for the tokens.
    """
    server, more = Server(model, mem, **settings), True
    arrivals = _arrivals(server, requests)
    if listed := isinstance(requests, Collection):  # all are checked before the first one starts
        arrivals = iter(list(arrivals))
    try:
        while more or server.busy:
            while more and server.wants_more:
                arrived = next(arrivals, server)
                more = arrived is not server
                if not isinstance(arrived, Asked):
                    break
                server.ask(arrived)
                if not listed:  # so that no more is read than there is room for
                    server.admit()
            yield from server.step()
    finally:
        server.close()


def _arrivals(server: Server, requests: Iterable[Any]) -> Iterator[Asked | None]:
    """Yields requests that were checked, as they are read."""
    numbers = count()
    for place, given in enumerate(requests):
        if given is None:
            yield None
            continue
        number, prompt = next(numbers), given if isinstance(given, Prompt) else Prompt(given)
        try:
            found = server.checked(replace(prompt, id=number) if prompt.id is None else prompt)
        except InvalidArgument as error:
            raise InvalidArgument(f"requests[{place}]: {error}") from error
        yield found


def serve(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Served]:
    """Runs requests by continuous batching and yields each as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: as for `stream`.
        **settings: those of `Server`.

    Raises:
        Exception: as `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, **settings) if isinstance(event, Served))
