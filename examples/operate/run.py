"""Runs one trouble of a server, to be studied with metrics, logs and `memstate top`. docs/metrics.md explains each.

python examples/operate/run.py hit-rate      the hit rate falls: why?
python examples/operate/run.py leak          slots run out: who has them?
python examples/operate/run.py tenant        which tenant holds the pool?
python examples/operate/run.py storage       is storage keeping up?

Each trouble serves its figures at http://127.0.0.1:9470/metrics. In another terminal: memstate top
"""

import logging
import sys
import time

from troubles import TROUBLES

from memstate import logs, metrics


def main(trouble: str, steps: int = 10**9, pause: float = 0.02) -> None:
    """Runs one trouble, with its figures at the usual port and its events on stdout."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logs.JsonFormatter())
    logging.getLogger("memstate").addHandler(handler)
    logging.getLogger("memstate").setLevel(logging.INFO)
    loop = TROUBLES[trouble]()
    with metrics.serve(next(loop), tenant=str, steps=True) as server:
        print(f"memstate top {server.url}", flush=True)
        for _ in zip(range(steps), loop, strict=False):
            time.sleep(pause)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TROUBLES:
        sys.exit(f"usage: python examples/operate/run.py {' | '.join(TROUBLES)}")
    main(sys.argv[1])
