"""What the prefix cache and sessions are asked directly: match, evictions, opening and closing."""

from collections.abc import Callable, Hashable

import memstate as ms
from tests.proof.stateful.asking import Asking
from tests.proof.stateful.cache import Text
from tests.proof.stateful.machine import REFUSED, Faults
from tests.proof.stateful.planning import Handles
from tests.proof.stateful.prompting import NO_TOKENS, spelled
from tests.proof.stateful.settings import Digits


class Remembering(Asking):
    """Requests with tokens from beginning to end, and what happens between them."""

    settle: Callable[[Digits], None]
    poll: Callable[[Digits], None]
    work: Callable[[Digits], None]
    push_down: Callable[[Digits], None]
    fetch_first: Callable[[Digits, Text, Hashable], None]

    def serve(self, d: Digits) -> None:
        """A prompt or a turn, for some steps by itself, so that it leaves something for others."""
        if self.asleep:
            return
        self.let_expire()
        alive = [row for row, tenant in self.handles.items() if tenant.prompt and not tenant.finished]
        rows = [d.pick(*alive)] if alive and d(4) < 2 else []
        if not rows:
            if not self.model.free_rows:
                self.end_rows(d, list(self.handles)[: 1 + d(2)], "told" if self.settings.prefix else "abort")
            if self.lower:
                self.push_down(d)
            turn = any(not talk.row for talk in self.talks.values()) and d(2) == 1
            drawn = self.draw_prompted(d, f"request {self.calls}.0", turn)
            if self.lower and not turn and not drawn[2] and drawn[1].prompt:
                self.fetch_first(d, drawn[1].prompt, drawn[1].salt)
            rows = self.admit_all(d, [drawn])
        for _ in range(1 + d(6) if rows else 0):
            if not self._advance(d, rows):
                break
            if d(3) == 1:
                self.publish_told(d, rows)
        rows = [row for row in rows if row in self.handles]
        if rows and d(2 + 2 * bool(self.handles[rows[0]].talk)):
            self.end_rows(d, rows, d.pick("told", "told", "told", "retract told", "abort"))
            if d(3):
                self.serve(d)

    def _advance(self, d: Digits, rows: Handles) -> bool:
        """One step of one row, and what becomes of it."""
        while len(self.flights) > self.settings.overlap or (self.flights and d(3)):
            self.settle(Digits(0))
        tenant = self.handles[rows[0]]
        if tenant.finished:
            return False
        length = self.model.length(tenant)
        counts = [min(self.model.next_boundary(tenant) - length, 1 + d(8)) if d(3) else 1 + d(12)]
        handles = self.take_pages(Digits(0), rows, counts)
        if handles != rows or self.plan_batch(d, handles, counts) is None:
            return False
        while self.flights and d(4):
            self.settle(Digits(0))
        if self.lower and d(3):
            self.work(d)
            self.poll(d)
        return rows[0] in self.handles and not tenant.finished

    def publish_told(self, d: Digits, rows: Handles) -> None:
        """To the cache; turns of sessions too, and without a cache they alone may say their tokens."""
        tokens, texts, faults = self.tell(d, rows)
        faults |= self.row_faults(rows)
        snaps = self.attempt(faults, lambda: self.mem.publish(rows, keep="cache", tokens=tokens))
        if snaps is not REFUSED:
            tenants = [self.handles[row] for row in rows]
            bounds = [tenant.confirmed for tenant in tenants]
            self.model.keep_ends(tenants, bounds)
            self.model.promise(tenants, self.model.told(tenants, bounds, texts))
            kept = self.model.keep(tenants, [tenant.confirmed for tenant in tenants], texts, ended=False)
            self.note_snaps(snaps, kept)

    def match(self, d: Digits) -> None:
        """Compared with a search through all there is; it changes nothing, which `look` sees."""
        prompt, salt = self.draw_prompt(d), self.draw_salt(d)
        faults: Faults = set() if self.settings.prefix else {ms.ConfigurationError}
        given = spelled(d, prompt)
        if d(20) == 1:
            given = d.pick(*NO_TOKENS)
            if not isinstance(given, list) or given:
                faults.add(ms.InvalidArgument)
            prompt = ()
        match = self.attempt(faults, lambda: self.mem.match(given, salt))
        if match is REFUSED:
            return
        found = self.model.find(prompt, salt)
        state = found.stated.state if found.stated else None
        seen = (match.tokens, match.length, match.kv_length, match.evicted_length)
        self._same("match", seen, (found.tokens, found.length, found.kv, found.gone))
        hit = self.model.below.find(prompt, salt, found) if self.model.below else None
        hit = self.model.below.worth(hit, found.length) if self.model.below else None
        self._same("match in host memory", match.host_length, hit.length if hit else 0)
        self._same("snapshot", match.snapshot and match.snapshot.register, state and state.register)
        no_sharing, evicted, no_snapshot = found.lost()
        told = {"no_sharing": no_sharing, "evicted": evicted, "no_snapshot": no_snapshot}
        self._same("lost", dict(match.lost), told)
        assert sum(match.lost.values()) == len(prompt) - match.length
        why = [reason for reason in ("evicted", "no_snapshot", "no_sharing") if told[reason]]
        self._same("reason", match.reason, why[0] if why else "")

    def talk(self, d: Digits) -> None:
        """Opens a session; a second one may have the same name, but then a program could not tell them apart."""
        if len(self.talks) < 3:
            name, faults = f"talk {self.calls}", set[type[ms.MemstateError]]()
            priority, ttl = d.pick(0, 0, 1, -1), d.pick(None, 3, 1, 0)
            if d(30) == 1:
                priority, ttl = d.pick((0.5, None), (0, -1), (0, "x"))
                faults = {ms.InvalidArgument}
            session = self.attempt(faults, lambda: self.mem.sessions.open(name, priority=priority, ttl=ttl))
            if session is not REFUSED:
                self.talks[session] = self.model.open_talk(name, priority, ttl)

    def age(self, d: Digits) -> None:
        """Time passes; what that ends is seen by the next poll or admission."""
        self.model.seconds += d.pick(1, 2, 4)

    def let_expire(self) -> None:
        """Polls where a session has expired, so that a request is not drawn for what is gone at its admission."""
        if not self.asleep and any(map(self.model.expired, self.model.idle())):
            self.poll(Digits(0))

    def hush(self, d: Digits) -> None:
        """Closes one, or tries to."""
        session = d.pick(*self.talks, *self.closed) if self.talks or self.closed else None
        if d(9) == 1:
            session = d.pick("session", None)
        talk, faults = self.talks.get(session), set()
        if talk is None:
            faults = {ms.StaleHandle if isinstance(session, ms.Session) else ms.InvalidArgument}
        if self.attempt(faults, lambda: self.mem.sessions.close(session)) is not REFUSED:
            self.model.close_talk(self.talks.pop(session))
            self.closed.append(session)

    def forget_states(self, d: Digits) -> None:
        """Evictions that somebody asks for; asleep, when nothing can be sent, nobody does."""
        if self.mem.prefix is not None and not self.asleep:
            n = d(3)
            self._same("evicted states", self.mem.prefix.evict_states(n), self.model.evict_states(n))

    def forget_pages(self, d: Digits) -> None:
        if self.mem.prefix is not None and not self.asleep:
            n = d(6)
            self._same("evicted pages", self.mem.prefix.evict_pages(n), self.model.evict_pages(n))

    def forget_all(self, d: Digits) -> None:
        if self.mem.prefix is not None and not self.asleep and d(3) == 1:
            self.mem.prefix.clear()
            self.model.clear_cache()
