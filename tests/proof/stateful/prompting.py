"""Requests with tokens: prompts that often begin alike, turns of sessions, and what a caller says of rows."""

from array import array
from typing import Any

import numpy as np
import torch

import memstate as ms
from tests.proof.stateful.cache import Text
from tests.proof.stateful.machine import Faults, foreign
from tests.proof.stateful.planning import Handles
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Digits
from tests.proof.stateful.settling import Settling
from tests.proof.stateful.talking import Start, Talk

STEMS: tuple[Text, ...] = (
    (0, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2, 1, 0),
    (0, 1, 2, 0, 1, 1, 2, 1, 1, 0, 2, 2, 0, 1),
    (2, 0, 0, 1, 2, 1, 0, 0, 2, 1, 1, 2, 0, 2),
)  # fmt: skip
NO_TOKENS: tuple[Any, ...] = ([], [0.5], [[1, 2]], [2**64], "text", 5, torch.zeros(2))
SALTS = (None, None, None, "salt")


class Prompting(Settling):
    """What requests are made of."""

    salts: tuple[Any, ...] = ()  # of the prompt drawn last

    def draw_salt(self, d: Digits) -> Any:
        salts, self.salts = self.salts, ()
        return d.pick(*(salts * 6 + SALTS))

    @property
    def longest(self) -> int:
        """Tokens of a prompt."""
        width = self.settings.page_size * self.settings.pages_per_row
        return min(24, max(1, width - 4)) if self.settings.pages else 24

    def draw_prompt(self, d: Digits, talk: Talk | None = None) -> Text:
        """Something that was there before, cut somewhere, and a few tokens more."""
        if talk and d(5):
            base: Text = d.pick(talk.told, talk.told, talk.told, talk.text, talk.told[: d(len(talk.told) + 1)])
        else:
            if self.lower and d(2) and (texts := self.lower.texts(d)):
                self.salts, text = d.pick(*[((salt,), tokens) for salt, tokens in texts])
                return (*text, *[d(3) for _ in range(1 + d(4))])[: self.longest]
            there = [one.tokens for one in (*self.model.entries[-2:], *self.model.stated[-3:])]
            base = d.pick(STEMS[d(3)], *there)
            base = base[: len(base) - d.pick(0, 0, 0, 1, 2, d(len(base) + 1))]
        tail = tuple(d(3) for _ in range(d(4)))
        return (base[: self.longest - len(tail)] + tail) or (0,)

    def draw_request(self, d: Digits, name: str) -> tuple[ms.Request, Start, Faults]:
        """A request, what the model makes of it, and what is wrong with it."""
        ways = ("new", "new", "resume", "prompt", "prompt", "turn") if self.settings.prefix else (
            "new", "new", "new", "resume", "resume", "resume", "prompt", "turn")  # fmt: skip
        how = d.pick(*ways)
        if how in ("prompt", "turn"):
            return self.draw_prompted(d, name, turn=how == "turn")
        faults: Faults = set()
        resume: Any = d.pick(*self.snaps) if how == "resume" and self.snaps else None
        length: Any = d.pick(0, 0, d(5), d(9), 3 * d(9))
        snapshot_at: Any = d.pick([], [(resume.length if resume else 0) + self.settings.page_size * d(9)])
        wrong = d(50)
        if wrong == 1:
            resume = d.pick(foreign().snapshot, *self.dropped, *self.cached, "snapshot")
        elif wrong == 2:
            length = d.pick(-1, 2**31, True, 1000)
        elif wrong == 3:
            snapshot_at = d.pick([-1], [self.settings.page_size + 1], [1.5], 8, "8", None)
        start = Start(name, wants=wants(snapshot_at))
        if resume is not None:
            start.origin = self.snaps.get(resume)
            if start.origin:
                start.length, start.shared = resume.length, resume.pages
            else:  # what the cache has is found by its tokens, with its pages
                there = resume in self.cached and resume not in self.stale()
                void = isinstance(resume, ms.Snapshot) and not there
                faults.add(ms.StaleHandle if void else ms.InvalidArgument)
        faults |= self._of_sizes(length, snapshot_at, start)
        return ms.Request(name, length, resume, snapshot_at), start, faults

    def _of_sizes(self, length: Any, snapshot_at: Any, start: Start) -> Faults:
        if not isinstance(snapshot_at, list | tuple) or any(
            type(n) is not int or not 0 <= n < 2**31 for n in (length, *snapshot_at)
        ) or any(n % self.settings.page_size for n in snapshot_at):  # fmt: skip
            return {ms.InvalidArgument}
        start.size = length
        return {ms.InvalidArgument} if self.settings.pages and self.model.too_wide(length) else set()

    def draw_prompted(self, d: Digits, name: str, turn: bool) -> tuple[ms.Request, Start, Faults]:
        faults: Faults = set()
        idle = [session for session, talk in self.talks.items() if not talk.row]
        kept = [session for session in idle if self.talks[session].kept]
        session: Any = d.pick(*idle, *kept * 4) if turn and idle else None
        talk = self.talks.get(session)
        prompt, salt = self.draw_prompt(d, talk), self.draw_salt(d)
        if talk and talk.told and d(8):
            salt = talk.salt
        length = d.pick(None, None, None, len(prompt) + d(4), d(len(prompt)))
        page = self.settings.page_size
        snapshot_at = d.pick((), (), [page * d(9)], (page * d(9), page * d(9), page * d(9)))
        tokens: Any = spelled(d, prompt)
        resume: Any = None
        wrong = d(40)
        if wrong == 1:
            tokens = d.pick(*NO_TOKENS)
            faults.add(ms.InvalidArgument)
        elif wrong == 2:
            busy = [session for session, talk in self.talks.items() if talk.row]
            session, talk = d.pick("session", *busy, *self.closed, ms.Session("nobody's", 0)), None
            known = isinstance(session, ms.Session) and session not in self.talks
            faults.add(ms.StaleHandle if known else ms.InvalidArgument)
        elif wrong == 3 and session:
            tokens = None
            faults.add(ms.InvalidArgument)
        elif wrong == 4 and session and self.snaps:
            resume = next(iter(self.snaps))
            faults.add(ms.InvalidArgument)
        start = Start(name, wants=wants(snapshot_at), prompt=prompt, salt=salt, talk=talk)
        faults |= self._of_sizes(len(prompt) if length is None else length, snapshot_at, start)
        if not faults:
            self.model.look_up(start)
        return ms.Request(name, length, resume, snapshot_at, tokens, salt, session), start, faults

    # What a caller says of rows

    def known(self, row: Row) -> Text:
        """Prompt and answer, as far as they are decided."""
        return row.text + (row.prompt or ())[len(row.text) :]

    def tell(self, d: Digits, rows: Handles) -> tuple[list[Any], list[Text], Faults]:
        """Tokens of rows for the cache: as given, as meant, and what is wrong with them."""
        faults: Faults = set()
        keys = []
        for row in rows:
            tenant = self.handles.get(row)
            text = self.known(tenant) if tenant else ()
            keys.append(d.pick(text, text, text, text, text[: d(len(text) + 1)], (*text, 7, 7)))
        given: Any = [spelled(d, key) for key in keys]
        wrong = d(40)
        if wrong == 1:
            given = d.pick(given[1:], [*given, [1]], 3)
            if given == 3 or len(given) != len(rows):
                faults.add(ms.InvalidArgument)
        elif wrong == 2 and rows:
            given = [*given[:-1], d.pick(*NO_TOKENS[1:], None)]
            if rows[-1] is not None:
                faults.add(ms.InvalidArgument)
        turns = [row is None or (row in self.handles and self.handles[row].talk) for row in rows]
        if not self.settings.prefix and not all(turns):
            faults.add(ms.ConfigurationError)
        return given, keys, faults


def wants(lengths: Any) -> list[tuple[int, str]]:
    """What a request names itself, each once."""
    named = lengths if isinstance(lengths, list | tuple) else ()
    return [(at, "named") for at in sorted({n for n in named if isinstance(n, int)}) if at]


def spelled(d: Digits, tokens: Text) -> Any:
    """Tokens in one of the forms that are taken."""
    how = d(8)
    if how == 1:
        return tokens
    if how == 2:
        return np.array(tokens, d.pick(np.int64, np.int16, np.int32, np.uint64))
    if how == 3:
        return torch.tensor(tokens, dtype=torch.int64)
    if how == 4:
        return array("q", tokens)
    return list(tokens)
