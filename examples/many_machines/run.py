"""Serves prompts from several processes that share their states through one store, all on this machine.

python examples/many_machines/run.py FOLDER                      # the store is a folder
python examples/many_machines/run.py s3://bucket/prefix          # the store is a bucket, or gs:// or az://
python examples/many_machines/run.py mooncake://127.0.0.1:50051  # the store is memory of the processes; needs a master

1. Two processes: the second starts from states that the first has computed (share.py).
2. Two ranks of tensor parallelism, each with half of every state, agree on where a request starts (ranks.py).
3. A process without tensor parallelism starts from the states that the two ranks left in the store (ranks.py).
"""

import multiprocessing as mp
import sys
import tempfile

from ranks import another_split, rank_of_two
from share import first_process, second_process


def together(place: str, *works: tuple) -> None:
    """Runs functions at the same time, each in its own process."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(len(works), timeout=60)
    processes = [context.Process(target=work, args=(place, barrier, *arguments)) for work, *arguments in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed: see above")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        together(sys.argv[1], (first_process,), (second_process,))
        ranks = ((rank_of_two, f"{folder}/meeting", rank) for rank in range(2))
        together(sys.argv[1], *ranks, (another_split,))
