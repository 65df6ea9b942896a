"""Does one task with configurations, a line of JSON each: the process of the other kind.

Arguments: the task, its argument, and a JSON list of the configurations' fields.
"""

import json
import sys

from memstate.cli.tune.tasks import TASKS
from memstate.cli.worker import serve
from memstate.kernels.tuned import CopyConfig

if __name__ == "__main__":
    task, argument, configs = sys.argv[1:]
    serve(lambda: (TASKS[task](CopyConfig(**config), argument) for config in json.loads(configs)))
