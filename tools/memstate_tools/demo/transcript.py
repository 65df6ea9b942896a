"""What a run leaves behind to be compared: tokens, logits, and the bytes of states. Knows no model."""

from dataclasses import dataclass, field

from memstate.engine.manager import StateManager
from memstate.requests.handles import Row, Snapshot
from memstate_tools.demo import peek
from memstate_tools.demo.stepper import Logits


@dataclass
class Transcript:
    """What came out of one conversation.

    Attributes:
        tokens: The whole token stream.
        answers: The answers in it.
        logits: By position, where a token was sampled.
        states: Bytes of a state, by the number of tokens it stands for.
    """

    tokens: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    logits: dict[int, Logits] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Sighting:
    """The bytes of a state that the manager held, and the token length it stood for according to its label."""

    conversation: int
    length: int
    what: str
    data: bytes


class Witness:
    """Reads states back while the manager runs, from where the device's own registers say they are.

    A published snapshot is read after the plan that submits its move, so that looking submits nothing of its own.

    Attributes:
        sightings: States that were read.
        missed: Snapshots that were given up before they could be read.
    """

    def __init__(self, mem: StateManager) -> None:
        self.mem = mem
        self.sightings: list[Sighting] = []
        self.missed = 0
        self._waiting: list[tuple[int, Snapshot, str]] = []

    def watch(self, conversation: int, snapshot: Snapshot, what: str) -> None:
        """Notes a snapshot just published or kept by a conversation."""
        self._waiting.append((conversation, snapshot, what))

    def look(self) -> None:
        """Reads the snapshots noted since, unless they are gone. Their moves must have been submitted.

        Syncs: yes, where there are any.
        """
        for conversation, snapshot, what in self._waiting:
            if peek.exists(self.mem, snapshot):
                self._see(conversation, snapshot.register, what)
            else:
                self.missed += 1
        self._waiting.clear()

    def look_now(self) -> None:
        """Does the same at any time: submits first what is recorded.

        Syncs: yes, where there are any.
        """
        if self._waiting:
            self.mem.submit()
            self.look()

    def see_live(self, conversation: int, row: Row, why: str, most: int) -> None:
        """Reads the live state of a row about to end, also that of a dead step.

        Args:
            conversation: Number of the conversation.
            row: The row.
            why: It ends.
            most: Tokens of its text. With guesses, the device may have gone on behind the end.

        Syncs: yes.
        """
        self._see(conversation, peek.state_register(self.mem, row), f"live state when {why}", most)

    def _see(self, conversation: int, register: int, what: str, most: int | None = None) -> None:
        slot, length = peek.slot_and_label(self.mem, register)
        if most is not None and length > most:
            return
        self.sightings.append(Sighting(conversation, length, what, peek.state_bytes(self.mem.planes, slot)))
