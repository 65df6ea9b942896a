"""Moves requests that run between processes, all on this machine, and compares them with undisturbed runs.

python examples/many_machines/moves.py FOLDER                      # the store is a folder
python examples/many_machines/moves.py mooncake://127.0.0.1:50051  # the store is memory of the processes

1. Prefill there, decode here: the first process computes prompts, the second one the answers.
2. Migrate under load: requests move, one after the other, while the others run.
3. Preempt by priority: an urgent request takes the place of another one, which goes on later.
"""

import multiprocessing as mp
import sys
from collections.abc import Callable

import torch
from front import Front
from owner import Tokens
from toy import WHOLE, folded
from worker import SLOTS, sampled

MOST = 64  # tokens of a request, with its prompt
PROMPTS = {f"request {n}": tuple(100 * n + at for at in range(13 + 3 * n)) for n in range(SLOTS + 1)}


def undisturbed(prompt: Tokens) -> Tokens:
    """Returns the tokens of a request that nobody moves."""
    tokens, state, done = list(prompt), torch.zeros(WHOLE.layers, *WHOLE.planes[0].shape), 0
    while len(tokens) < MOST:
        state, done = folded(state, tokens[done:], 0), len(tokens)
        tokens.append(sampled(state, torch.tensor(tokens)))
    return tuple(tokens)


def prefill_there(front: Front) -> None:
    """Lets the first process compute prompts, and the second one answers."""
    for name, prompt in PROMPTS.items():
        front.ask(name, prompt, MOST, 0)
    for name, prompt in PROMPTS.items():
        front.move(name, len(prompt), then=1)


def migrate(front: Front) -> None:
    """Moves requests in the middle of their answers, one after the other, while the others run."""
    for name, prompt in PROMPTS.items():
        front.ask(name, prompt, MOST, 0)
    for name, prompt in PROMPTS.items():
        front.move(name, len(prompt) + 5, then=1)


def preempt(front: Front) -> None:
    """Fills the first process, then parks a request there for an urgent one, and lets it go on in the same process."""
    *names, urgent = PROMPTS
    for name in names:
        front.ask(name, PROMPTS[name], MOST, 0)
    least = names[-1]  # has the lowest priority
    front.move(least, len(PROMPTS[least]) + 5)
    front.ask(urgent, PROMPTS[urgent], MOST, 0)
    front.until(lambda: front.owners[urgent].ended)
    if least in front.paused:  # otherwise it had ended before
        front.give(least, 0)


def run(place: str, plan: Callable[[Front], None]) -> None:
    """Runs a plan to its end, and compares all tokens."""
    front = Front(place, mp.get_context("spawn"))
    plan(front)
    front.until(lambda: not front.runs())
    front.end()
    if wrong := [name for name, prompt in PROMPTS.items() if front.owners[name].tokens != undisturbed(prompt)]:
        raise SystemExit(f"{plan.__name__}: other tokens of {wrong}")
    twice = front.computed - len(PROMPTS) * (MOST - 1)  # nobody computes the last token
    print(
        f"{plan.__name__}: {len(PROMPTS)} requests, given {front.given} times, have the tokens of undisturbed runs; "
        f"{twice} tokens computed twice; nothing is left"
    )


if __name__ == "__main__":
    for each in (prefill_there, migrate, preempt):
        run(sys.argv[1], each)
