"""Moves requests that run between two processes on this machine, and compares them with undisturbed runs.

python examples/many_machines/moves.py FOLDER                      # the store is a folder
python examples/many_machines/moves.py s3://bucket/prefix          # the store is a bucket, or gs:// or az://
python examples/many_machines/moves.py mooncake://127.0.0.1:50051  # the store is memory of the processes

1. Prefill there, decode here: the first process computes prompts, the second one the answers.
2. Migrate under load: requests move, one after the other, while the others run.
3. Preempt by priority: an urgent request takes the slot of another one, which goes on later.
"""

import multiprocessing as mp
import sys
from collections.abc import Sequence

import torch
from front import Front
from owner import Tokens
from toy import WHOLE, folded
from worker import SLOTS, sampled

MOST = 200  # tokens of a request, with its prompt


def undisturbed(prompt: Tokens, most: int) -> Tokens:
    """Returns the tokens of a request that nobody moves."""
    tokens, state, done = list(prompt), torch.zeros(WHOLE.layers, *WHOLE.planes[0].shape), 0
    while len(tokens) < most:
        state, done = folded(state, tokens[done:], 0), len(tokens)
        tokens.append(sampled(state, torch.tensor(tokens)))
    return tuple(tokens)


def prefill_there(front: Front, prompts: dict[str, Tokens]) -> None:
    """Lets the first process compute prompts, and the second one answers."""
    for name, prompt in prompts.items():
        front.ask(name, prompt, MOST, 0)
    for name, prompt in prompts.items():
        front.move(name, len(prompt), then=1)


def migrate(front: Front, prompts: dict[str, Tokens]) -> None:
    """Moves requests in the middle of their answers, one after the other, while the others run."""
    for name, prompt in prompts.items():
        front.ask(name, prompt, MOST, 0)
    for name, prompt in prompts.items():
        front.move(name, len(prompt) + 5, then=1)


def preempt(front: Front, prompts: dict[str, Tokens]) -> None:
    """Fills the first process, then parks a request there for an urgent one, and lets it go on in the same process."""
    *names, urgent = prompts
    for name in names:
        front.ask(name, prompts[name], MOST, 0)
    least = names[-1]  # has the lowest priority
    front.move(least, len(prompts[least]) + 5)
    front.ask(urgent, prompts[urgent], MOST, 0)
    front.until(lambda: front.owners[urgent].ended)
    if least in front.paused:  # otherwise it had ended before
        front.give(least, 0)


def main(arguments: Sequence[str]) -> None:
    """Runs the three plans one after the other."""
    front, asked = Front(arguments[0], mp.get_context("spawn")), 0
    for plan in (prefill_there, migrate, preempt):
        prompts = {f"{plan.__name__} {n}": tuple(100 * n + at for at in range(13 + 3 * n)) for n in range(SLOTS + 1)}
        before, asked = front.given, asked + len(prompts)
        plan(front, prompts)
        front.until(lambda: not front.runs())
        wrong = [name for name, prompt in prompts.items() if front.owners[name].tokens != undisturbed(prompt, MOST)]
        if wrong or front.given - before <= len(prompts):
            raise SystemExit(f"{plan.__name__}: other tokens of {wrong}; given {front.given - before} times")
        print(f"{plan.__name__}: {len(prompts)} requests have the tokens of undisturbed runs")
    front.end()
    print(
        f"{front.computed - asked * (MOST - 1)} tokens computed twice; nothing is left in {len(front.left)} processes"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(sys.argv[1:])
