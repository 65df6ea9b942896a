"""Ends rows and publishes their states: `end`, `publish`, `cancel` and `park` of the manager.

A kept state becomes a handle, or goes to the prefix cache; the states of a turn go to its session. All that a parked
request has goes to host memory. Everything else becomes free. This module only calls the parts that own slots and
pages; they have the rules.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import Literal

from memstate.checks import numbers_of, sequence, shown
from memstate.engine.stepping import Stepping
from memstate.engine.world import Verbs, World
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Parked, Row, Session, Snapshot
from memstate.requests.holdings import PUBLISHED
from memstate.requests.pages import Ids
from memstate.requests.steps import Step
from memstate.tiers.host.tier import Part
from memstate.tokens import BYTES, Key, Keys, SaltedTokens, Tokens

PER_ROW = REGISTERS_PER_ROW
Keep = Literal["handle", "cache"]
Named = Sequence[Tokens | Keys | None] | None  # tokens of each row, or with a keyed cache its keys


def require_keep(keep: Keep | None, tokens: object, lengths: object = None) -> None:
    """Raises an error unless `keep` is valid, and `tokens` and `lengths` fit it.

    Raises:
        InvalidArgument: `keep` is not valid, or `tokens` or `lengths` do not fit it.
    """
    if keep is not None and (not isinstance(keep, str) or keep not in ("handle", "cache")):
        raise InvalidArgument(f"keep={keep!r}: expected None, 'handle' or 'cache'")
    if keep != "cache" and tokens is not None:
        raise InvalidArgument(f"tokens= or keys= with keep={keep!r}: only keep='cache' takes them")
    if keep is None and lengths is not None:
        raise InvalidArgument("lengths= without keep=: say where the states go, 'handle' or 'cache'")


class Ending(Verbs):
    """Publishes states of rows, ends rows, and parks rows and idle sessions.

    This part changes what rows, sessions and the prefix cache own. Of the open step it only notes that rows have
    published what the step computes, so that the step cannot be cancelled.

    Args:
        world: the tables of the manager.
        stepping: knows the open step, which perhaps still has to compute what is published.
    """

    def __init__(self, world: World, stepping: Stepping) -> None:
        super().__init__(world)
        self._stepping, self._ends = stepping, world.guard.changing("end")

    def end(
        self, rows: Sequence[Row], keep: Keep | None, tokens: Named, lengths: Sequence[int] | None
    ) -> list[Snapshot | None]:
        """See `StateManager.end`."""
        numbers = self._table.indices(rows)
        if self._file.undecided:
            self._stepping.require_told(numbers)
        if keep is None and tokens is None and lengths is None:
            with self._ends:
                return self.free(numbers, None, None, "ended")
        if not isinstance(keep, str) or keep != ("handle" if tokens is None else "cache"):
            require_keep(keep, tokens, lengths)
        keys = self._keys(tokens, numbers) if keep == "cache" else None
        known = list(map(self._table.confirmed_at.__getitem__, numbers))
        if lengths is not None:
            known = list(map(min, known, numbers_of("lengths", lengths, len(numbers))))
        if keys is not None:
            self._require_all(numbers, known, keys)
        elif self._sessions.by_row:
            self._require_no_turns(numbers)
        before = self._stepping.lengths_before() if self._stepping.open is not None else {}
        told = self._told(numbers, known, keys) if before else None
        with self._ends:
            snapshots = self.free(numbers, known, keys, "ended")
            if before:
                self._promise(numbers, told, snapshots, before)
            return snapshots

    def publish(self, rows: Sequence[Row], keep: Keep, tokens: Named, strict: bool) -> list[Snapshot | None]:
        """See `StateManager.publish`."""
        numbers = self._table.indices(rows)
        if self._file.undecided:
            self._stepping.require_told(numbers)
        if keep is None:
            raise InvalidArgument("keep=None: publish keeps states, as a 'handle' or in the 'cache'")
        require_keep(keep, tokens)
        keys = self._keys(tokens, numbers) if keep == "cache" else None
        known = [self._table.confirmed_at[row] for row in numbers]
        if keys is not None:
            bare = [at for at in range(len(numbers)) if tokens is None or tokens[at] is None]
            self._require_all([numbers[at] for at in bare], [known[at] for at in bare], [keys[at] for at in bare])
        if strict:
            bounds = known if keys is None else list(map(min, known, (len(key) // BYTES for key in keys)))
            self._require_answers(numbers, bounds)
        before = self._stepping.lengths_before()
        told = self._told(numbers, known, keys) if before else None
        with self._guard.changing("publish"):
            self._stepping.keep_ends(numbers, known, self._sessions.by_row)
            snapshots = self._leave(numbers, known, keys)
            if before:
                self._promise(numbers, told, snapshots, before)
            return snapshots

    def cancel(self, step: Step, keep: Keep | None, tokens: Named) -> list[Snapshot | None]:
        """See `StateManager.cancel`."""
        current = self._stepping.current(step).tolist()
        require_keep(keep, tokens)
        keys = self._keys(tokens, current) if keep == "cache" else None
        if keep == "handle":
            self._require_no_turns(current)
        self._stepping.require_cancellable(step)
        with self._guard.changing("cancel"):
            entries, rows = self._stepping.cancel(step)
            known = None if keep is None else [self._table.confirmed_at[row] for row in rows]
            states = self.free(
                rows, known, None if keys is None else [keys[entry] for entry in entries], "cancelled with its step"
            )
            snapshots: list[Snapshot | None] = [None] * len(step.numbers)
            for entry, state in zip(entries, states, strict=True):
                snapshots[entry] = state
            return snapshots

    def park(
        self, handles: Sequence[Row | Session], tokens: Sequence[Tokens | None] | None, user: Sequence[bytes] | None
    ) -> list[Parked]:
        """See `StateManager.park`."""
        if self._tiers is None or self._cache.below is None:
            why = "build the manager with tiers=ms.Tiers(...), and do not close it before"
            raise ConfigurationError(f"requests are parked in host memory: {why}")
        if self._tiers.settings.int8:
            raise ConfigurationError("park with Tiers(int8=): a parked state must be exact, and these records are not")
        handles = sequence("rows or sessions", handles, "park([row])")
        named = sequence("sequences of tokens", [None] * len(handles) if tokens is None else tokens, "tokens=[[1, 2]]")
        users = sequence("bytes", [b""] * len(handles) if user is None else user, 'user=[b""]')
        if not len(handles) == len(named) == len(users) or not all(isinstance(one, bytes) for one in users):
            raise InvalidArgument(f"tokens={shown(tokens)}, user={shown(user)}: expected one for each, user in bytes")
        sessions = [self._sessions.get(one).handle for one in handles if isinstance(one, Session)]
        rows = [self._table.index(one) for one in handles if not isinstance(one, Session)]
        if len(set(handles)) != len(handles):
            raise InvalidArgument(f"a row or session is named twice in {list(handles)}")
        self._stepping.require_told(rows)
        self._require_no_turns(rows)
        drafted = {row for step in self._log.unsettled if step.drafted for row in self._stepping.current(step).tolist()}
        if wrong := sorted(drafted.intersection(rows)):
            raise InvalidArgument(f"rows {wrong} are in a step with drafts: call accept, then park")
        if wrong := [row for row in rows if self._table.finished[row]]:
            raise InvalidArgument(f"rows {wrong} are finished: end them")
        below, host, leaving = self._tiers.parked, self._tiers.host, dict[Parked, list[Part]]()
        for one, given, more in zip(handles, named, users, strict=True):
            of = self._leaving(one, given, more)
            leaving[of[0]] = list(below.parts(*of))
        host.require_awake("park")
        below.require_room([part for parts in leaving.values() for part in parts if part.of is not host.of_kv])
        before, lengths = self._stepping.lengths_before(), [self._file.length(row) for row in rows]
        with self._guard.changing("park"):
            below.park(leaving)
            self.free(rows, None, None, "parked")
            self._stepping.promise(rows, lengths, before)
            for session in sessions:
                self._cache.release(self._sessions.close(session))
            return [*leaving]

    def _leaving(self, one: Row | Session, tokens: Tokens | None, user: bytes) -> tuple[Parked, int, int, Ids]:
        """Returns the handle of a row or session that leaves, and its register, row and pages."""
        if isinstance(one, Session):
            if tokens is not None:
                raise InvalidArgument(f"tokens of session {one.id!r}: a session knows its tokens: give None for it")
            session = self._sessions.get(one)
            if not session.kept:
                raise InvalidArgument(f"session {one.id!r} keeps no state, so there is nothing to park: close it")
            state = session.kept[0]
            return Parked(state.length, 0, session.prompt, user), state.register, 0, session.pages
        row = self._table.index(one)
        length, pending, prompt = self._file.length(row), self._file.pending_at[row], self._cache.leases[row].prompt
        if tokens is not None:
            prompt = prompt._replace(key=self._key(row, tokens))
        parked = Parked(length, pending, prompt, user, length > 0 and (pending > 0 or self._fills))
        return parked, self._file.origin(row), row, self._pages.of(row)

    def _told(self, rows: Sequence[int], known: Sequence[int], keys: Sequence[Key] | None) -> list[int] | None:
        """Returns the length of KV that the cache or a session gets from each row; None if handles are published."""
        if keys is None:
            return None
        lengths = [min(n, len(key) // BYTES) for n, key in zip(known, keys, strict=True)]
        turns = self._sessions.by_row
        return [n if row in turns else self._pages.floor(n) for row, n in zip(rows, lengths, strict=True)]

    def _promise(
        self, rows: Sequence[int], told: Sequence[int] | None, snapshots: Sequence[Snapshot | None],
        before: dict[int, int],
    ) -> None:  # fmt: skip
        """Notes the published length of each row, which the open step perhaps must still compute."""
        self._stepping.promise(rows, told or [state.length if state else 0 for state in snapshots], before)

    def _keys(self, tokens: Named, rows: Sequence[int]) -> list[Key]:
        """Returns the tokens of each row as a key. Refuses tokens that differ from the row's prompt, as far as both go.

        Args:
            tokens: one sequence for each row; None for a row, or for all, stands for the prompt.
            rows: the row numbers. An entry of row 0 needs no tokens.

        Returns:
            One key for each row.

        Raises:
            InvalidArgument: a row has no tokens, or its tokens differ from its prompt.
            ConfigurationError: a row is not a turn of a session, and there is no prefix cache.
        """
        if tokens is None:
            tokens = [None] * len(rows)
        word = self._cache.names.word
        if type(tokens) is not list:
            sequence(f"sequences of {word}", tokens, f"{word}=[[1, 2, 3]], one per row")
        if len(tokens) != len(rows):
            raise InvalidArgument(f"{word} of {len(tokens)} rows, expected {len(rows)}: one sequence per row")
        if not self._cache.enabled and not all(map(self._sessions.by_row.__contains__, filter(None, rows))):
            raise ConfigurationError(
                "keep='cache' needs a prefix cache: build the manager with prefix=ms.Prefix(), or use keep='handle'"
            )
        return [self._key(row, given) if row else b"" for row, given in zip(rows, tokens, strict=True)]

    def _key(self, row: int, given: Tokens | Keys | None) -> Key:
        """Returns the tokens of a row as a key. Without `given`, they are the prompt.

        If `given` is the object that the row was admitted with, only the tokens behind the prompt are encoded. Of keys,
        only new ones are. Tokens that differ from the prompt are refused: matches would find wrong states.

        Raises:
            InvalidArgument: no tokens are given, and no prompt is known; or tokens and prompt differ.
        """
        lease, names, word = self._cache.leases.get(row), self._cache.names, self._cache.names.word
        prompt, encoded = (lease.prompt.key, lease.encoded) if lease else (b"", b"")
        if given is None and prompt:
            return prompt
        if given is None:
            raise InvalidArgument(
                f"row {row} (request {shown(self._table.ids[row])}): keep='cache' needs its {word}, and none are "
                f"known: give {word}=[...], or admit it with Request({word}=) to a manager with a prefix cache"
            )
        known = encoded or prompt if names.keyed or (lease and given is lease.given) else b""
        key = names.continued(known, given) if known else names.encode(given)
        for one in prompt, encoded:
            if not (key is one or key[: len(one)] == one[: len(key)]):
                raise InvalidArgument(
                    f"row {row} (request {shown(self._table.ids[row])}): the {word} are not those of its prompt: hand "
                    "over all of them, from the first on"
                )
        return key

    def _leave(
        self, rows: Sequence[int], known: Sequence[int], keys: Sequence[Key] | None, ended: bool = False
    ) -> list[Snapshot | None]:
        """Publishes states of each row: to the prefix cache if there are `keys`, otherwise the newest one as a handle.

        Args:
            rows: the row numbers.
            known: the confirmed length of each row. No published snapshot is longer.
            keys: one key for each row. None: publish handles.
            ended: whether the rows have ended. If so, their live states can be published, too.

        Returns:
            One snapshot for each row, or None.
        """
        if keys is None:
            return self._newest(rows, known, ended) if self._marks.kept else self._publish(rows, known, ended)
        if not self._cache.enabled:
            return [None] * len(rows)
        size, given = self._pages.page_size, []
        for row, most, key in zip(rows, known, keys, strict=True):
            n = min(most, len(key) // BYTES)
            length, lease = self._pages.floor(n), self._cache.leases[row]
            lease.encoded = key[: length * BYTES] if self._cache.names.keyed else b""
            prompt, end = SaltedTokens(key, *lease.prompt[1:]), length // size
            given.append((lease, prompt, end, self._pages.of(row, end), self._states_of(row, n, ended)))
        return self._cache.file(given)

    def _require_answers(self, rows: Sequence[int], known: Sequence[int]) -> None:
        """Raises an error unless each running row has a snapshot, and there are holders and slots to publish them all.

        Args:
            rows: the row numbers.
            known: confirmed length of each row.

        Raises:
            InvalidArgument: a snapshot, a holder or a slot is missing.
        """
        ends = [row for row in self._marks.at_ends(rows, known) if row not in self._sessions.by_row]
        rest = {
            row: self._mirror.answer(row, n, ended=False)
            for row, n in zip(rows, known, strict=True)
            if row not in ends and self._mark_of(row, n, ended=False) is None
        }
        room = max(0, min(self._holdings.free, self._file.allocator.free - self._file.allocator.reserve))
        if len(ends) > room:
            raise InvalidArgument(
                f"{len(ends)} states at marks to publish, room for {room}: drop snapshots, or raise slots="
            )
        if len(rest) + len(ends) > self._holdings.free:
            raise InvalidArgument(
                f"{len(rest) + len(ends)} snapshots to publish, room for {self._holdings.free}: drop some, or raise "
                "snapshots="
            )
        if missing := [row for row, answer in rest.items() if not answer]:
            raise InvalidArgument(
                f"rows {missing} have no snapshot to publish: none was due yet, or it was published before"
            )

    def _publish(self, rows: Sequence[int], known: Sequence[int], ended: bool) -> list[Snapshot | None]:
        """Publishes the newest state in the registers of each row, as a handle."""
        holdings, answer = self._holdings, self._mirror.answer
        answers: dict[int, int] = {}  # row -> the register to publish
        for row, n in zip(rows, known, strict=True):
            if register := answer(row, n, ended):
                answers[row] = register
        if (over := len(answers) - holdings.free) > 0:
            holdings.refused += over
            answers = dict(islice(answers.items(), holdings.free))
        shared: Iterable[Sequence[int]] = repeat(())
        if self._pages.allocator.pages:
            shared = map(self._pages.share, answers, map(self._file.label_at.__getitem__, answers.values()))
        states = holdings.move_in([*answers.values()], PUBLISHED, shared)
        holdings.published += len(states)
        return list(map(dict(zip(answers, states, strict=True)).get, rows))

    def _newest(self, rows: Sequence[int], known: Sequence[int], ended: bool) -> list[Snapshot | None]:
        """Publishes the newest state of each row, at a mark or in a lane, as a handle."""
        states, rest = dict[int, Snapshot | None](), dict[int, int]()
        for row, n in zip(rows, known, strict=True):
            if (mark := self._mark_of(row, n, ended)) is None:
                rest[row] = n
            else:
                states[row] = self._holdings.give(mark, PUBLISHED, self._pages.share(row, mark.length))
                self._marks.remove(row, mark)
        states.update(zip(rest, self._publish([*rest], [*rest.values()], ended), strict=True))
        return [states[row] for row in rows]

    def _mark_of(self, row: int, known: int, ended: bool) -> Snapshot | None:
        """Returns the row's newest state at a mark; None for none, or if a register of the row has a newer state."""
        mark = self._marks.newest(row, known)
        answer = 0 if mark is None else self._mirror.answer(row, known, ended)
        return None if mark is not None and self._file.label_at[answer] > mark.length else mark

    def _states_of(self, row: int, known: int, ended: bool) -> list[tuple[int, int, str]]:
        """Returns the states that go from a row to the prefix cache: (register, length, kind) of each, ascending.

        Args:
            row: number of the row.
            known: length up to which the states of the row are real.
            ended: whether the row has ended. If it was a turn, the states in its registers go to its session instead.
        """
        states = self._marks.hand_over(row, known) if self._marks.kept else []
        if ended and self._sessions.by_row and self._sessions.keeps(row, self._cache):
            return states
        if answer := self._mirror.answer(row, known, ended):
            label = self._file.label_at[answer]
            states.append((answer, label, self._marks.kind_of(row, label) or ("end" if ended else "boundary")))
        return states

    def _require_all(self, rows: Sequence[int], known: Sequence[int], keys: Sequence[Key]) -> None:
        """Refuses fewer tokens than the length up to which the states of a row are kept.

        Args:
            rows: the row numbers.
            known: for each row, the length up to which its states are kept.
            keys: one key for each row.

        Raises:
            InvalidArgument: the tokens of a row are too few.
        """
        names = self._cache.names
        for row, n, key in zip(rows, known, keys, strict=True):
            if len(key) // BYTES < n - n % names.size:
                raise InvalidArgument(
                    f"row {row} (request {shown(self._table.ids[row])}): {'keys of ' * names.keyed}{len(key) // BYTES} "
                    f"tokens, and {n} are confirmed: give all of them as {names.word}=[...], also those that the "
                    "answer leaves out. To keep only states of fewer tokens, name their lengths with lengths=[...]"
                )

    def _require_no_turns(self, rows: Sequence[int]) -> None:
        """Refuses rows that are turns of sessions: a session needs the tokens of its states, so they cannot be handles.

        Raises:
            InvalidArgument: a row is a turn of a session.
        """
        if turns := [row for row in rows if row in self._sessions.by_row]:
            why = "end them with keep='cache' and tokens=[...]; an idle session can be parked"
            raise InvalidArgument(f"rows {turns} are turns of sessions: {why}")

    def free(
        self, rows: Sequence[int], known: Sequence[int] | None, keys: Sequence[Key] | None, how: str
    ) -> list[Snapshot | None]:
        """Ends rows and frees what they hold.

        Args:
            rows: the row numbers.
            known: the confirmed length of each row. None: nothing is kept, and turns are aborted.
            keys: one key for each row, or None.
            how: word for the errors of stale handles, such as "ended".

        Returns:
            One snapshot for each row, or None.
        """
        snapshots: list[Snapshot | None] = [None] * len(rows)
        # End the reads first: then a state that only these rows read can be evicted, to make room for what they leave.
        file = self._file
        if self._holdings.readers:
            self._holdings.reads_done([file.source_at[row] for row in rows])
        if known is not None and (keys is None or self._cache.enabled):
            snapshots = self._leave(rows, known, keys, ended=True)
        if self._sessions.by_row:
            self._end_turns(rows, known, keys)
        registers: list[int] = []
        cells: list[int] = []
        for row in rows:  # `tracked` stays: the next request of the row writes it, if its own is another
            registers += range(PER_ROW * row, PER_ROW * row + PER_ROW)
            if file.source_at[row]:
                file.source_at[row] = 0
                cells.append(file.starts["source"] + row)
            if file.tails:  # even if the host counts 0: the device may count tokens of a step that was never accepted
                file.pending_at[row] = file.newest[row] = 0
                cells += file.starts["pending"] + row, file.starts["newest"] + row
        self._commands.release(registers)
        if cells:
            self._commands.write(cells, [0] * len(cells))
        if self._cache.leases:
            self._cache.end(rows)
        if self._pages.allocator.pages:
            self._pages.end(rows)
        self._marks.end(rows)
        self._table.release(rows, how)
        return snapshots

    def _end_turns(self, rows: Sequence[int], known: Sequence[int] | None, keys: Sequence[Key] | None) -> None:
        """Ends the turns among rows; see `free`."""
        turns, limits = self._sessions.by_row, self._sessions.limits
        later: tuple[list[int], list[int]] | None = None
        if len(rows) > 1 and limits.most_states is None and len(rows) * PER_ROW <= self._holdings.free:
            later = [], []  # no state makes way for another, so one operation can move all
        for at, row in enumerate(rows):
            if row in turns:
                real = self._table.confirmed_at[row] if known is None else known[at]
                key, lease = keys[at] if keys is not None else None, self._cache.leases.get(row)
                if self._sessions.end(row, real, key, lease, self._cache, self._room.free_registers, later):
                    del self._cache.leases[row]
                if limits.most_states is not None:
                    self._room.trim()
        if later:
            self._commands.move(*later)
