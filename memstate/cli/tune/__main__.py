"""Does one task with the configurations given as arguments, a line of JSON each: the process of the other kind."""

import json
import sys
from contextlib import redirect_stdout

from memstate.cli.tune.tasks import TASKS
from memstate.kernels.tuned import CopyConfig


def main(task: str, argument: str, configs: str) -> None:
    """configs: a JSON list of their fields. What a task finds goes to stdout as soon as it is found."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):  # where a tool fails Triton prints its complaints
        for config in json.loads(configs):
            lines.write(json.dumps(TASKS[task](CopyConfig(**config), argument)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
