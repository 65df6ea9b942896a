"""The process that owns all requests. It starts the others, gives them requests, and takes requests back."""

import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext

from owner import Owner, Tokens
from worker import work

START_S = 60.0  # a process takes a while until it speaks first


class Front:
    """Owns requests, and moves them between processes that it has started.

    A process that dies, or says nothing for `patience` seconds, loses its requests to another one. If it was only slow,
    it hears that they are over once it speaks again.

    Args:
        place: Where the store of all processes is.
        context: How to start processes.
        works: What each process runs, with the place of the store and a pipe.
        patience: Seconds.

    Attributes:
        owners: Name of a request -> its owner.
        paused: Names of requests that are parked and wait for `give`.
        left: Process -> what it said that is left in it, once it has ended.
        computed: Number of tokens that these processes have computed.
        given: Number of times that a request was given to a process.
    """

    def __init__(
        self, place: str, context: BaseContext, works: tuple[Callable[[str, Connection], None], ...] = (work, work),
        patience: float = 10.0,
    ) -> None:  # fmt: skip
        self.owners, self.most, self.patience = dict[str, Owner](), dict[str, int](), patience
        self.given = self.computed = 0
        self.saved = dict[str, tuple[int, Tokens, bytes]]()  # epoch, tokens and manifest of what was parked last
        self.then = dict[str, int | None]()  # what was asked to park, and where it goes on; None: it pauses
        self.paused, self.left = set[str](), dict[int, dict[str, int]]()
        self.lines, self.processes = dict[int, Connection](), {}
        for at, each in enumerate(works):
            self.lines[at], other = context.Pipe()
            self.processes[at] = context.Process(target=each, args=(place, other))
            self.processes[at].start()
            other.close()  # so that the line ends with the process
        self.heard = dict.fromkeys(self.lines, time.monotonic() + START_S)

    def ask(self, name: str, prompt: Tokens, most: int, place: int) -> None:
        """Takes a request of `most` tokens, and gives it to a process."""
        self.owners[name], self.most[name] = Owner(prompt), most
        self.give(name, place)

    def give(self, name: str, place: int) -> None:
        """Gives a request to a process, with all its tokens, and with what was parked of it last."""
        self.paused.discard(name)
        self.then.pop(name, None)
        epoch, tokens = self.owners[name].give(place)
        self.tell(place, "run", name, epoch, tokens, self.most[name], self.saved.get(name))
        self.given += 1

    def runs(self) -> list[str]:
        """Returns the names of all requests that have not ended."""
        return [name for name, owner in self.owners.items() if not owner.ended]

    def until(self, done: Callable[[], bool]) -> None:
        """Waits until something is so."""
        while not done():
            self.turn()

    def move(self, name: str, tokens: int, then: int | None = None) -> None:
        """Parks a request once it has more than `tokens` tokens, and waits until it is parked, given anew, or ended.

        Args:
            name: Name of the request.
            tokens: Number of tokens, with the prompt.
            then: The process in which it goes on. None: `give` says that later.
        """
        owner = self.owners[name]
        self.until(lambda: owner.ended or len(owner.tokens) > tokens)
        self.then[name] = then
        self.tell(owner.place, "park", name, owner.epoch)
        self.until(lambda: owner.ended or name not in self.then)

    def tell(self, place: int, *message: object) -> None:
        """Sends a message, if the process lives."""
        with suppress(KeyError, OSError):  # if it is dead, `turn` finds that
            self.lines[place].send(message)

    def turn(self) -> None:
        """Hears what the processes say, and takes requests back from those that are dead or silent."""
        for line in wait(list(self.lines.values()), 0.02):
            place = next(at for at, one in self.lines.items() if one is line)
            try:
                kind, *given = line.recv()
            except (EOFError, OSError):
                del self.lines[place]
                continue
            self.heard[place] = time.monotonic()
            getattr(self, f"hear_{kind}")(place, *given)
        if not self.lines and not self.left:
            for process in self.processes.values():
                process.join()
            raise SystemExit(f"no process is left; they are {list(self.processes.values())}")
        fit = [at for at in self.lines if time.monotonic() < self.heard[at] + self.patience]
        for name in self.runs():
            if self.owners[name].place not in fit and name not in self.paused and fit:
                self.give(name, fit[0])

    def hear_count(self, place: int, name: str, epoch: int, position: int, token: int) -> None:
        """Hears a token."""
        self.over_if_old(place, name, epoch)
        if self.owners[name].count(epoch, position, token):
            self.owners[name].ended = len(self.owners[name].tokens) == self.most[name]

    def hear_parked(self, place: int, name: str, epoch: int, tokens: Tokens, manifest: bytes | None) -> None:
        """Hears that a request is parked, and in the store unless that failed."""
        self.over_if_old(place, name, epoch)
        if self.owners[name].adopt(epoch, tokens):
            if manifest is not None:
                self.saved[name] = (epoch, tokens, manifest)
            if (to := self.then.pop(name, None)) is None:
                self.paused.add(name)
            else:
                self.give(name, to)

    def hear_holds(self, place: int, holds: dict[str, int]) -> None:
        """Hears what a process has, which it says again and again: request -> epoch."""
        for name, epoch in holds.items():
            self.over_if_old(place, name, epoch)

    def over_if_old(self, place: int, name: str, epoch: int) -> None:
        """Tells a process that its epoch is over, if it is."""
        if self.owners[name].old(epoch):
            self.tell(place, "over", name, epoch)

    def hear_left(self, place: int, figures: dict[str, int], computed: int) -> None:
        """Hears the last of a process: what is left in it, and how many tokens it has computed."""
        self.left[place] = figures
        self.computed += computed

    def end(self) -> None:
        """Ends all processes. Each must have given everything back."""
        for place in list(self.lines):
            self.tell(place, "stop")
        self.until(lambda: not self.lines)
        for process in self.processes.values():
            process.join()
        if any(figure for figures in self.left.values() for figure in figures.values()):
            raise SystemExit(f"something is left: {self.left}")
