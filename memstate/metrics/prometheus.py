"""Exports figures through Prometheus's official client (extra `metrics`), and serves them over HTTP."""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from memstate.checks import is_count
from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.metrics.reading import ExportedManager
from memstate.metrics.table import COMMON, FIGURES, Figure

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

PORT = 9470
Managers = StateManager | Mapping[str, StateManager]


def _client() -> Any:
    """Imports the official client.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import prometheus_client.core
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"metrics need {error.name}: pip install '.[metrics]' in a checkout of memstate"
        ) from error
    return prometheus_client


def sources_of(
    mem: Managers, tenant: Callable[[Hashable], str] | None, top: int, steps: bool
) -> dict[str, ExportedManager]:
    """Returns, for the name of each manager, the object from which its figures are read.

    Args:
        mem: a manager, or managers by name. A manager without a name is called "main".
        tenant: function that returns the name of a salt's tenant; None: tenants are not counted.
        top: limit of the tenants that are named.
        steps: whether to time calls.

    Raises:
        InvalidArgument: an argument is not valid, or calls are timed already. Then no manager is timed.
        Broken: a call of a manager was interrupted. Then no manager is timed.
    """
    named = mem if isinstance(mem, Mapping) else {"main": mem}
    if not named or not all(isinstance(name, str) and isinstance(each, StateManager) for name, each in named.items()):
        raise InvalidArgument(f"{mem!r}: expected a StateManager, or a mapping of names to StateManagers")
    for name in named:
        if name != name.encode(errors="replace").decode():
            raise InvalidArgument(f"name {name!r}: it has surrogates, which UTF-8 does not; use another")
    if tenant is not None and not callable(tenant):
        raise InvalidArgument(f"tenant={tenant!r}: expected a function, salt -> name, or None")
    if not is_count(top) or top < 1:
        raise InvalidArgument(f"top={top!r}: expected a number of tenants, from 1 on")
    made: dict[str, ExportedManager] = {}
    try:
        for name, each in named.items():
            made[name] = ExportedManager(each, tenant, top, steps)
    except Exception:
        for source in made.values():
            source.close()
        raise
    return made


class Collector:
    """Reads managers at each scrape: a custom collector for any registry of the official client.

    It does not keep managers alive. It leaves out managers that have been deleted.

    Args:
        sources: for the name of each manager, the object from which its figures are read.
    """

    def __init__(self, sources: Mapping[str, ExportedManager]) -> None:
        self._sources, self._core = sources, _client().core

    def describe(self) -> "Iterable[Metric]":
        """Yields every metric, without samples. A registry uses them to refuse metrics that it has already."""
        return (self._family(figure) for figure in FIGURES)

    def collect(self) -> "Iterable[Metric]":
        """Yields every metric that has samples now.

        Syncs: no.
        """
        readings = [((name, one.rank), read) for name, one in self._sources.items() if (read := one.read()) is not None]
        for figure in FIGURES:
            family = self._family(figure)
            for labels, reading in readings:
                if figure.kind == "histogram" and reading.steps is not None:
                    family.add_metric([*labels], reading.steps.cumulative, reading.steps.total)
                for values, value in figure.read(reading):
                    family.add_metric([*labels, *values], value)
            if family.samples:
                yield family

    def _family(self, figure: Figure) -> Any:
        family = getattr(self._core, f"{figure.kind.capitalize()}MetricFamily")
        return family(figure.name, figure.help, labels=[*COMMON, *figure.labels])

    def close(self) -> None:
        """Ends the timing of calls."""
        for source in self._sources.values():
            source.close()


def collector(
    mem: Managers, *, tenant: Callable[[Hashable], str] | None = None, top: int = 10, steps: bool = False
) -> Collector:
    """Returns a collector of one or more managers, for a registry of your own.

    Call it in the thread of the loop. All managers of one registry need one common collector.

    Args:
        mem: the manager, or managers by name. The name becomes the label `manager`; for a single manager it is "main".
            The label `rank` is the rank of the manager's tiers.
        tenant: function that returns the name of a salt's tenant, such as `str`. With it, there are figures for each
            tenant, and each scrape walks over the whole prefix cache. None: no salt leaves the process.
        top: limit of the tenants that are named; all others together are "other".
        steps: whether to time the calls of the manager. Then each call reads the clock twice.

    Raises:
        ConfigurationError: the official client is not installed.
        InvalidArgument: an argument is not valid, or the calls are timed already.
        Broken: a call was interrupted: call `recover` or `reset` first.

    Syncs: no.

    Example:
        >>> import torch, memstate as ms
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> registry = CollectorRegistry()
        >>> registry.register(collector(mem))
        >>> print([line for line in generate_latest(registry).decode().splitlines() if '"free"' in line][0])
        memstate_slots{manager="main",owner="free",rank="0"} 8.0
    """
    _client()
    return Collector(sources_of(mem, tenant, top, steps))


def registry(
    mem: Managers, *, tenant: Callable[[Hashable], str] | None = None, top: int = 10, steps: bool = False
) -> "CollectorRegistry":
    """Returns a new registry with the collector of these managers, for example for `make_asgi_app(registry)`.

    Args:
        mem: the manager, or managers by name.
        tenant: function that returns the name of a salt's tenant; None: tenants are not counted.
        top: limit of the tenants that are named; all others together are "other".
        steps: whether to time the calls of the manager.

    Raises:
        ConfigurationError: the official client is not installed.
        InvalidArgument: an argument is not valid, or the calls are timed already.
        Broken: a call was interrupted: call `recover` or `reset` first.

    Syncs: no.
    """
    return _registered(collector(mem, tenant=tenant, top=top, steps=steps))


def _registered(made: Collector) -> "CollectorRegistry":
    registry: CollectorRegistry = _client().CollectorRegistry()
    registry.register(made)
    return registry


class FigureServer:
    """A server that gives out figures over HTTP in its own threads, until `close`.

    Attributes:
        url: address of the figures.
        port: port of the server.
    """

    def __init__(self, made: Collector, port: int, address: str) -> None:
        self._collector = made
        self._server, self._thread = _client().start_http_server(port, address, _registered(made))
        self.port: int = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"FigureServer({self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and the timing of calls. A client that is connected still gets its answer."""
        self._collector.close()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def serve(
    mem: Managers, port: int = PORT, *, address: str = "127.0.0.1", tenant: Callable[[Hashable], str] | None = None,
    top: int = 10, steps: bool = False,
) -> FigureServer:  # fmt: skip
    """Serves the figures of managers over HTTP, for Prometheus and for `memstate top`.

    It uses the official client's `start_http_server`, which has no password and no encryption. By default only this
    machine can connect. A client that connects and sends nothing occupies a thread: if clients are unknown, put a proxy
    in front of the server.

    Args:
        mem: the manager, or managers by name.
        port: the port. 0: the system chooses a free one, which `FigureServer.port` shows.
        address: the address to listen at; "0.0.0.0" means all addresses of this machine.
        tenant: function that returns the name of a salt's tenant; None: tenants are not counted.
        top: limit of the tenants that are named; all others together are "other".
        steps: whether to time the calls of the manager.

    Returns:
        The server. `close` ends it; so does the end of a `with` block.

    Raises:
        ConfigurationError: the official client is not installed.
        InvalidArgument: an argument is not valid, the port is taken, or the calls are timed already.
        Broken: a call was interrupted: call `recover` or `reset` first.

    Syncs: no.
    """
    if not is_count(port) or port > 65535:
        raise InvalidArgument(f"port={port!r}: expected 0 to 65535")
    if not isinstance(address, str):
        raise InvalidArgument(f"address={address!r}: expected a text, such as '127.0.0.1' or '0.0.0.0'")
    made = collector(mem, tenant=tenant, top=top, steps=steps)
    try:
        return FigureServer(made, port, address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the address is no valid host name
        made.close()
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"port={port}, address={address!r}: {why}; choose another") from error
