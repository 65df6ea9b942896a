"""Records of a run for the comparison: tokens, logits, and the bytes of states."""

from dataclasses import dataclass, field

from memstate.engine.manager import StateManager
from memstate.requests.handles import Row, Snapshot
from memstate_tools.demo import peek
from memstate_tools.demo.stepper import Logits


@dataclass
class Transcript:
    """The record of one conversation.

    Attributes:
        tokens: All tokens.
        answers: Tokens of each answer.
        logits: Position -> logits, where a token was sampled.
        states: Number of tokens -> bytes of the state after them.
    """

    tokens: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    logits: dict[int, Logits] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Sighting:
    """A state that the manager held.

    Attributes:
        conversation: Number of the conversation.
        length: Tokens of the state, by its label.
        what: Kind of the state, for messages.
        data: Bytes of the state.
    """

    conversation: int
    length: int
    what: str
    data: bytes


class Witness:
    """Reads states back while the manager runs, from the slots that the device's registers name.

    A published snapshot is read after the plan that submits its move. So reading submits nothing by itself.

    Attributes:
        sightings: States that were read.
        missed: Snapshots that were dropped before they could be read.
    """

    def __init__(self, mem: StateManager) -> None:
        self.mem = mem
        self.sightings: list[Sighting] = []
        self.missed = 0
        self._waiting: list[tuple[int, Snapshot, str]] = []

    def watch(self, conversation: int, snapshot: Snapshot, what: str) -> None:
        """Notes a snapshot that a conversation has just published or kept."""
        self._waiting.append((conversation, snapshot, what))

    def look(self) -> None:
        """Reads the noted snapshots that still exist. Their moves must have been submitted.

        Syncs: yes, if there are any.
        """
        for conversation, snapshot, what in self._waiting:
            if peek.exists(self.mem, snapshot):
                self._see(conversation, snapshot.register, what)
            else:
                self.missed += 1
        self._waiting.clear()

    def look_now(self) -> None:
        """Submits recorded changes, then reads the noted snapshots.

        Syncs: yes, if there are any.
        """
        if self._waiting:
            self.mem.submit()
            self.look()

    def see_live(self, conversation: int, row: Row, why: str, most: int) -> None:
        """Reads the live state of a row that is about to end, even if a step after the end of the text wrote it.

        Args:
            conversation: Number of the conversation.
            row: The row that is about to end.
            why: Why it ends, for messages.
            most: Number of tokens of its text. A state after more tokens is left out: wrong guesses can cause one.

        Syncs: yes.
        """
        self._see(conversation, peek.state_register(self.mem, row), f"live state when {why}", most)

    def _see(self, conversation: int, register: int, what: str, most: int | None = None) -> None:
        slot, length = peek.slot_and_label(self.mem, register)
        if most is not None and length > most:
            return
        self.sightings.append(Sighting(conversation, length, what, peek.state_bytes(self.mem.planes, slot)))
