"""Runs moto, an S3 server in one Python process, on loopback during a benchmark. Figures are those of the server."""

import http.client
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from memstate.tiers import Objects
from memstate_tools.bench.tiers_mooncake import HOST, PATIENCE_S, Unavailable, answering, free_ports, start

INSTALL = "pip install obstore 'moto[s3]' flask flask-cors"
NEEDED = ("obstore", "moto", "flask", "flask_cors")


@contextmanager
def bucket() -> Iterator[Objects]:
    """Yields a store of an empty bucket.

    Raises:
        Unavailable: There can be no S3 server here.
    """
    if lacks := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Unavailable(f"no {', '.join(lacks)}; {INSTALL}")
    with ExitStack() as processes:
        (port,) = free_ports(1)
        address = answering("moto", port, start(processes, "-m", "moto.server", "-H", HOST, "-p", str(port)))
        connection = http.client.HTTPConnection(address)
        connection.request("PUT", "/memstate")
        connection.getresponse().close()
        connection.close()
        store = Objects(
            "s3://memstate/bench", timeout=PATIENCE_S, endpoint=f"http://{address}", region="us-east-1",
            access_key_id="any", secret_access_key="any",
        )  # fmt: skip
        processes.callback(store.close)
        yield store
