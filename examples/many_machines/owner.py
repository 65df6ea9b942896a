"""Says who may speak for a request: six rules, of its owner and of every process. They know no state, pipe or clock.

1. The newest epoch alone counts, and of it the next token (`Owner.count`, `Owner.adopt`).
2. The owner raises the epoch before it gives the request to anybody, and sends all tokens along (`Owner.give`).
3. A process takes higher epochs only (`Seat.run`).
4. A parked state is used only where its tokens come first; elsewhere they are computed again (`Seat.use`).
5. What is parked runs on the owner's word (`Seat.speaks`).
6. Old epochs are told "over", and what has them goes (`Owner.old`, `Seat.over`).

So never two may speak, and nothing is lost in silence while the owner lives: what dies costs a recompute.
"""

from typing import Any

Tokens = tuple[int, ...]


class Owner:
    """Has a request: all tokens that count, and the number of times that it was given to a process, its epoch."""

    def __init__(self, prompt: Tokens = ()) -> None:
        self.tokens, self.epoch, self.place, self.ended = prompt, 0, -1, False

    def give(self, place: int) -> tuple[int, Tokens]:
        """Gives the request to a process, for whatever reason and at any time. Returns what to send there."""
        self.epoch += 1
        self.place = place
        return self.epoch, self.tokens

    def count(self, epoch: int, position: int, token: int) -> bool:
        """Hears a token. Returns whether it counts."""
        counts = not self.ended and epoch == self.epoch and position == len(self.tokens)
        if counts:
            self.tokens += (token,)
        return counts

    def adopt(self, epoch: int, tokens: Tokens) -> bool:
        """Hears that the request is parked, and with which tokens. Returns whether they count."""
        counts = not self.ended and epoch == self.epoch and tokens[: len(self.tokens)] == self.tokens
        if counts:
            self.tokens = tokens
        return counts

    def old(self, epoch: int) -> bool:
        """Returns whether who speaks with this epoch is told that it is over."""
        return self.ended or epoch < self.epoch


class Seat:
    """What a process may do for a request. `parked` has a state from which it can go on, and that state's tokens."""

    def __init__(self) -> None:
        self.seen, self.runs = 0, False
        self.parked: tuple[Tokens, Any] | None = None

    def speaks(self) -> bool:
        """Returns whether the request may go on here."""
        return self.runs

    def run(self, epoch: int) -> bool:
        """Hears the owner's word to run. Returns whether it is taken; then what runs with an older epoch ends."""
        taken = epoch > self.seen
        if taken:
            self.seen, self.runs = epoch, True
        return taken

    def use(self, tokens: Tokens) -> Any:
        """Returns the state from which to go on with the owner's tokens; None: compute them all."""
        parked, self.parked = self.parked, None
        return parked[1] if parked and parked[0] == tokens[: len(parked[0])] else None

    def park(self, tokens: Tokens, state: Any) -> None:
        """Stops, and keeps the state. `tokens`: all that were told."""
        self.runs, self.parked = False, (tokens, state)

    def take(self, epoch: int, tokens: Tokens, state: Any) -> None:
        """Keeps a state that was parked elsewhere in this epoch, if there is nothing here."""
        if epoch >= self.seen and not self.runs and not self.parked:
            self.seen, self.parked = epoch, (tokens, state)

    def over(self, epoch: int) -> bool:
        """Hears that an epoch is over. Returns whether what is here goes."""
        goes = epoch >= self.seen
        if goes:
            self.runs, self.parked = False, None
        return goes
