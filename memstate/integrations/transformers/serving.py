"""`serve` and `stream`: continuous batching of what arrives, in one call."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.progress import shown
from memstate.integrations.transformers.prompts import Event, Prompt, Served
from memstate.integrations.transformers.running import Asked
from memstate.integrations.transformers.server import Server


def stream(
    model: Any, mem: StateManager, requests: Iterable[Any], *, progress: Any = False, **settings: Any
) -> Iterator[Event]:
    """Runs requests and yields every token as it is chosen, and every request as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. A list or other collection is checked before any of it starts. Other
            iterables are read as there is room; None in them means that nothing has arrived yet.
        progress: whether to show on the terminal what is done, runs and waits; also a console of rich.
        **settings: those of `Server`.

    Raises:
        ConfigurationError: `progress` without rich; or as `Server`.
        InvalidArgument: a request is wrong, as for `Server.submit`; the error names its place. Of a collection nothing
            has started then. If another iterable yields it, the requests that run are aborted.
        Exception: as `Server` and `Server.step`; the requests that run are aborted then.

    Syncs: yes, for the tokens.
    """
    server, more, listed = Server(model, mem, **settings), True, isinstance(requests, Collection)
    arrivals = _arrivals(server, requests)
    with shown(server, progress) if progress else nullcontext() as line:
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
                events = server.step()
                if line is not None:
                    line.add(events)
                yield from events
        finally:
            server.close()


def _arrivals(server: Server, requests: Iterable[Any]) -> Iterator[Asked | None]:
    """Returns requests that were checked: all of a list before the first one starts, others as they are read."""

    def made() -> Iterator[Asked | None]:
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

    return iter(list(made())) if isinstance(requests, Collection) else made()


def serve(
    model: Any, mem: StateManager, requests: Iterable[Any], *, progress: Any = False, **settings: Any
) -> Iterator[Served]:
    """Runs requests by continuous batching and yields each as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: as for `stream`.
        progress: as for `stream`.
        **settings: those of `Server`.

    Raises:
        Exception: as `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, progress=progress, **settings) if isinstance(event, Served))
