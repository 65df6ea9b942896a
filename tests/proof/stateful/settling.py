"""What becomes of planned steps: settle, accept and cancel, as they are meant and as they are not."""

from collections.abc import Callable
from typing import Any

import numpy as np

import memstate as ms
from tests.proof.stateful.machine import REFUSED, Faults, foreign
from tests.proof.stateful.planning import NO_LIMIT, Handles, Planning
from tests.proof.stateful.settings import Digits


class Settling(Planning):
    """What a decode loop does once results are known, or never will be."""

    tell: Callable[[Digits, Handles], tuple[Any, list[tuple[int, ...]], Faults]]

    def _wrong_step(self, d: Digits) -> ms.Step | None:
        steps = [foreign().step, foreign().window, *self.settled, *[flight.step for flight in self.flights[1:]]]
        return steps[d(len(steps))]

    def _step_faults(self, step: ms.Step, window: bool) -> Faults:
        faults: Faults = set()
        if step.window != window:
            faults.add(ms.InvalidArgument)
        if step not in [flight.step for flight in self.flights]:
            faults.add(ms.StaleHandle)
        elif step is not self.flights[0].step:
            faults.add(ms.InvalidArgument)
        return faults

    def settle(self, d: Digits) -> None:
        """The oldest step; a speculative one is accepted."""
        wrong = d(30)
        if self.in_gap and len(self.flights) < 2:  # the results of the newest step are not there
            return
        if not self.flights and wrong > 1:
            self.plan(d)
            return
        if not self.flights or wrong == 1:
            step = self._wrong_step(d)
            assert step
            faults = self._step_faults(step, False)
            if faults:
                self.attempt(faults, lambda: self.mem.settle(step, [False] * len(step.numbers)))
            return
        flight = self.flights[0]
        if flight.planned.window and wrong != 2:
            self.accept(d)
            return
        entries = flight.planned.entries
        over = [d(12) == 1 for _ in entries]
        given: Any = d.pick(over, np.array(over, bool), over if any(over) else None)
        faults = self._step_faults(flight.step, False)
        if wrong == 3:
            given = d.pick([*over, True], [1] * len(over), "x")
            if given:
                faults.add(ms.InvalidArgument)
        packets = self.model.packets
        with self.counted() as spent:
            settled = self.attempt(faults, lambda: self.mem.settle(flight.step, given))
        if settled is not REFUSED:
            self.model.settle(flight.planned, over)
            assert spent["ownership"] == self.model.packets - packets and not spent["plan"], spent
            assert not spent["syncs"] or self.settings.debug, spent
            self.forget_step(flight)

    def accept(self, d: Digits) -> None:
        flight = next((flight for flight in self.flights if flight.planned.window), None)
        if flight is None:
            step = d.pick(*[flight.step for flight in self.flights[:1]], foreign().window, *self.settled)
            faults = self._step_faults(step, True) | {ms.InvalidArgument}  # its windows do not fit either
            self.attempt(faults, lambda: self.mem.accept(step, [0] * len(step.numbers), {}))
            return
        entries, step = flight.planned.entries, flight.step
        accepted = [len(tokens) - d(len(tokens) + 1) for tokens in flight.tokens]
        over = [d(12) == 1 for _ in entries]
        limit = d.pick(NO_LIMIT, NO_LIMIT, NO_LIMIT, 0, 1)
        windows, given, faults = dict(flight.windows), list(accepted), self._step_faults(step, True)
        wrong = d(40)
        if wrong == 1 and given:
            given[-1] = len(flight.tokens[-1]) + 1
        elif wrong == 2:
            given.append(0)
            given.append(0)
        elif wrong == 3:
            windows.pop("fold")
        elif wrong == 4:
            windows["fold"] = windows["fold"].float()
        elif wrong == 5:
            windows["fold"] = windows["fold"][:, :, : max(map(len, flight.tokens), default=1) - 1]
        elif wrong == 6:
            windows["more"] = windows["fold"]
        if wrong in (2, 3, 4, 6) or (wrong in (1, 5) and given and (wrong == 1 or any(flight.tokens))):
            faults.add(ms.InvalidArgument)
        elif wrong == 5:
            windows = dict(flight.windows)
        call = lambda: self.mem.accept(step, given, windows, over, limit=limit)  # noqa: E731
        if self.attempt(faults, call) is not REFUSED:
            rows = [(self.model.tenant(entry), entry.before) for entry in entries]
            self.model.accept(flight.planned, accepted, over, limit)
            if self.lower:
                self.lower.forward([(row, n, entry.after - n) for entry, (row, n) in zip(entries, rows, strict=True) if
                                    row and entry.after])  # fmt: skip
            self.forget_step(flight)
            told = [entry.after for entry in entries]
            self._same("after what was accepted", step.after.tolist(), told)

    def cancel(self, d: Digits) -> None:
        """The newest step: one that has been planned for this, perhaps with a settle between, or whichever there is.

        A step that has run is given up only where no snapshot waits for a copy: it may have been published already.
        """
        how = d(4)
        flight = self.flights[-1] if self.flights and not self.model.due else None
        if self.in_gap:
            flight = self.flights[-1]
        elif how or not flight:
            flight = self.plan(d, window=self.settings.speculation and d(2) == 1, run=False)
            if flight and how == 2 and len(self.flights) > 1:
                self.settle(d)
        if d(20) == 1 or not flight:
            step = d.pick(foreign().step, *self.settled, *[flight.step for flight in self.flights[:-1]])
            current = [flight.step for flight in self.flights]
            self.attempt({ms.InvalidArgument if step in current else ms.StaleHandle}, lambda: self.mem.cancel(step))
            if not flight:
                return
        publish = d(2) == 1
        if flight not in self.flights:
            return
        model = self.model
        entries = [entry for entry in flight.planned.entries if model.tenant(entry)]
        handles = {row: handle for handle, row in self.handles.items()}
        faults: Faults = set()
        tokens = texts = None
        if d(3) == 1:
            named = [handles.get(model.tenant(entry)) for entry in flight.planned.entries]  # type: ignore[arg-type]
            tokens, texts, faults = self.tell(d, named)
        elif publish and any(entry.row and entry.row.talk for entry in entries):
            faults = {ms.InvalidArgument}
        keep: Any = "cache" if tokens is not None else "handle" if publish else None
        call = lambda: self.mem.cancel(flight.step, keep, tokens=tokens)  # noqa: E731
        promised = model.promised or flight.planned is not model.open  # its forward must run, or has been launched
        if promised:
            faults.add(ms.InvalidArgument)
        snaps = self.attempt(faults, call)
        if snaps is REFUSED and (self.asleep or promised):  # its forward runs
            return
        if snaps is REFUSED:  # it has no forward, so that it must go
            publish, tokens, texts = False, None, None
            snaps = self.attempt(set(), call)
        rows = model.cancelled(flight.planned)
        used = [snap.register for snap in snaps if snap] if publish else None
        if texts is not None:
            texts = [text for text, entry in zip(texts, flight.planned.entries, strict=True) if entry in entries]
        kept = iter(model.end(rows, used, [row.confirmed for row in rows], texts))
        self.note_snaps(snaps, [next(kept) if entry in entries else None for entry in flight.planned.entries])
        self.forget_rows([handle for handle, row in self.handles.items() if row in rows])
        self.forget_step(flight)
