"""States once more, independently of the rules, which change of owner each launch may make.

A slot is free, or in a live register, a lane or a holder. `ALLOWED` has the pairs (owner before, owner after). A slot
that goes from one register of a row to another stays in its row.
"""

from collections.abc import Callable
from typing import Any

from memstate.kernels.tables import LIMIT_CELL, REGISTERS_PER_ROW, Count, Rules, Section, Strategy
from memstate.slots.registers import RegisterFile

FREE, LIVE, LANE, HOLDER = "free", "live", "lane", "holder"
NOTHING: set[tuple[str, str]] = set()
TURN = {(FREE, LIVE), (LIVE, LANE), (LANE, LIVE)}
TAKE = {(FREE, LANE)}
ALLOWED = {
    "plan": {
        Strategy.NONE: NOTHING, Strategy.PING_PONG: TAKE, Strategy.LAZY: TAKE, Strategy.REDIRECT: TURN,
        Strategy.WINDOW: NOTHING,
    },
    "accept": {
        Strategy.NONE: NOTHING, Strategy.PING_PONG: TAKE, Strategy.LAZY: TAKE, Strategy.REDIRECT: TURN | TAKE,
    },
}  # fmt: skip
# A packet that releases and claims can give a slot to anybody.
MOVED = {(LIVE, HOLDER), (LANE, HOLDER)}
RELEASED = {(LIVE, FREE), (LANE, FREE), (HOLDER, FREE)}
CLAIMED = {(FREE, LIVE), (FREE, LANE)}


class Launches:
    """Compares the owners of all slots before and after each launch on a register file."""

    def __init__(self, file: RegisterFile, rules: Rules) -> None:
        self._slots, self._counters = file.table.slots.numpy(), file.table.counters.numpy()
        self._first_holder, self._strategy = file.first_holder, Strategy(rules.strategy)
        self.spent = False  # whether the last plan or accept was refused a claim, with no slot free or a limit of 0
        self.wrong = ""  # the first change that is not allowed
        for name in ("plan", "accept", "ownership"):
            setattr(file, name, self._watched(name, getattr(file, name)))

    def _watched(self, name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def watched(*arguments: Any) -> None:
            before, refused = self._owners(), int(self._counters[Count.DEGRADED])
            launch(*arguments)
            after = self._owners()
            if name in ("plan", "accept"):
                no_budget = not arguments[0][LIMIT_CELL] or not self._counters[Count.FREE]
                self.spent = bool(no_budget and self._counters[Count.DEGRADED] > refused)
            if before == after:
                return
            if name == "ownership":
                allowed = self._of_packet(arguments[0])
            else:
                window = name == "plan" and arguments[-1].strategy == Strategy.WINDOW
                allowed = ALLOWED[name][Strategy.WINDOW if window else self._strategy]
            for slot in before.keys() | after.keys():
                of, to = before.get(slot, 0), after.get(slot, 0)
                if of == to or allowed is None:
                    continue
                inside = name == "ownership" or not of or not to or of // REGISTERS_PER_ROW == to // REGISTERS_PER_ROW
                if (self._kind(of), self._kind(to)) not in allowed or not inside:
                    self.wrong = self.wrong or f"{name} took slot {slot} from register {of} to {to}"

        return watched

    def _of_packet(self, packet: Any) -> set[tuple[str, str]] | None:
        moves, releases, claims = packet[: Section.CLAIMS + 1].tolist()
        if releases and (claims or moves):
            return None
        found = (MOVED if moves else NOTHING) | (RELEASED if releases else NOTHING)
        return found | (CLAIMED | {(LIVE, LIVE)} if claims else NOTHING)

    def _owners(self) -> dict[int, int]:
        return {slot: register for register, slot in enumerate(self._slots.tolist()) if slot}

    def _kind(self, register: int) -> str:
        if not register:
            return FREE
        return HOLDER if register >= self._first_holder else LANE if register % REGISTERS_PER_ROW else LIVE
