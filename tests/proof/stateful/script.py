"""Scripts: tests that only say what is called. The model judges each call.

After each call, `Play` compares registers, labels, slots, owners, pages, sessions, cache, statistics and every byte
with the model. A call that must be refused has to be refused, with the numbers of the model. So no script contains an
expected number.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature
from itertools import count, product
from typing import Any, NamedTuple

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.cache import Start
from tests.proof.stateful.machine import Faults, Flight, Handles
from tests.proof.stateful.operations import Operations
from tests.proof.stateful.settings import Digits, Settings
from tests.support import owners

ALL = ("none", "ping-pong", "lazy", "redirect")
COPIED = {"strategy": "redirect", "direct_hits": False}  # hits copy the state
USUAL = {"slots": 24, "rows": 4, "every": 4, "page_size": 2, "pages": 80, "pages_per_row": 24}
PLAIN = Digits(0)  # of all that programs draw, the simplest choice
FIGURES = ("snapshots", "refused_claims", "published", "dropped", "refused", "missed", "copied", "zeroed")


class Driven(Operations):
    """A machine whose rows compute the tokens that a script says. texts: row of the model -> its tokens."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        self.texts: dict[Any, Sequence[int]] = {}
        super().__init__(settings, backend)

    def feed(self, row: Any, length: int, n: int) -> list[int]:
        text = tuple(self.texts.get(row, ()))
        text += (row.prompt or ())[len(text) :]
        text += tuple(range(10_000 + len(text), 10_000 + length + n))
        return list(text[length : length + n])

    def look(self) -> None:
        super().look()
        if not self.asleep:
            self.ask(PLAIN)


def verb(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call of scripts: compares both sides afterwards, and lists the calls before it if it fails."""

    @wraps(call)
    def made(play: "Play", *args: Any, **more: Any) -> Any:
        if play.inside:
            return call(play, *args, **more)
        given = [*map(_short, args), *(f"{name}={_short(value)}" for name, value in more.items())]
        play.calls.append(f"{call.__name__}({', '.join(given)})")
        play.inside = True
        try:
            answer = call(play, *args, **more)
            play.machine.look()
            play.machine.look_at_launches()
        finally:
            play.inside = False
        return answer

    return made


def _short(value: Any) -> str:
    if isinstance(value, ms.Row):
        return f"row {value.index}"
    if isinstance(value, ms.Session):
        return f"session {value.id!r}"
    if isinstance(value, Flight):
        return "the step"
    if isinstance(value, list | tuple) and any(isinstance(one, ms.Row | ms.Session) for one in value):
        return f"[{', '.join(map(_short, value))}]"
    text = repr(list(value) if isinstance(value, range) else value)
    return text if len(text) < 60 else f"{text[:50]} ..."


class Play:
    """A manager and its model, with the calls of scripts.

    Rows, sessions and snapshots are the handles of memstate. Axes of a script that are no settings are attributes: with
    `@script(at=("admit", "poll"))`, `play.at` is "admit" or "poll".

    Example:
        >>> play = Play(Backend("reference", "cpu"), strategy="lazy")
        >>> (row,) = play.admit([1, 2, 3])
        >>> play.run(row, [1, 2, 3, 4, 5])
        >>> _ = play.end(row)
        >>> play.finish()
    """

    driven = Driven  # class of the machine

    def __init__(self, backend: Backend, **axes: Any) -> None:
        given = dict(USUAL)
        for name, value in axes.items():
            given |= value if isinstance(value, Mapping) else {name: value}
        known = Settings.__dataclass_fields__
        self._own = {name: value for name, value in given.items() if name not in known}
        self._read, self._named = set[str](), set[str]()
        self.settings = Settings(**{name: value for name, value in given.items() if name in known})
        self.machine = self.driven(self.settings, Backend(backend.name, backend.device))
        self.mem, self.model = self.machine.mem, self.machine.model
        self.calls: list[str] = []
        self.inside = False  # whether a verb runs
        self._names = map("r{}".format, count(1))

    def __getattr__(self, name: str) -> Any:
        if name in Settings.__dataclass_fields__:
            return getattr(self.settings, name)
        if name not in vars(self).get("_own", ()):
            raise AttributeError(f"{name!r}: neither a verb nor an axis of this script")
        self._read.add(name)
        return self._own[name]

    @contextmanager
    def explained(self) -> Any:
        """Adds settings, calls and refusals to an exception that leaves the block."""
        try:
            yield
        except Exception as error:
            if not hasattr(error, "__notes__"):
                calls = [f"{n}. {one}" for n, one in enumerate(self.calls, 1)]
                errors = [f"refused so far: {dict(self.machine.errors)}"] if self.machine.errors else []
                error.add_note("\n".join([str(self.settings), *calls, *errors]))
            raise

    # Requests

    @verb
    def admit(self, *prompts: Any, sessions: Sequence[Any] = (), faults: Faults = frozenset(), **more: Any) -> Handles:  # type: ignore[assignment]
        """Admits requests in one call. Returns their rows; [] if the call is refused.

        prompts: tokens of each; None for a request without tokens. sessions: session of each, or None. faults: errors
        that the model does not foresee. more: other fields of `ms.Request`, the same for all.
        """
        machine, drawn = self.machine, []
        machine.let_expire()
        for at, prompt in enumerate(prompts):
            request = ms.Request(next(self._names), tokens=None if prompt is None else list(prompt),
                                 session=sessions[at] if sessions else None, **more)  # fmt: skip
            drawn.append((request, *self._start(request, set(faults))))
        return machine.admit_all(PLAIN, drawn)

    def _start(self, request: ms.Request, faults: Faults) -> tuple[Start, Faults]:
        """Returns the start of a request in the model, and the errors that its admission may raise."""
        machine, text = self.machine, None if request.tokens is None else tuple(request.tokens)
        wants = machine.wants(request.snapshot_at, *([len(text)] if text else []))  # beyond a prompt, none is kept
        start = Start(request.id, wants=wants, prompt=text, salt=request.salt, talk=machine.talks.get(request.session))
        start.given, start.reach = text or (), machine.reached(text or (), request.reach)
        if request.resume is not None:
            start.origin = machine.snaps.get(request.resume)
            start.length, start.shared = request.resume.length, request.resume.pages
            faults |= set() if start.origin else {ms.StaleHandle}
        if request.session is not None and not start.talk:
            faults.add(ms.StaleHandle)
        if start.talk and start.talk.row:
            faults.add(ms.InvalidArgument)  # one turn at a time
        length = max(len(text or ()), start.length) if request.length is None else request.length
        faults |= machine._of_sizes(length, request.snapshot_at, start)
        if text and not faults:
            self.model.look_up(start)
        return start, faults

    @verb
    def step(
        self, rows: Sequence[Any], counts: Any = 1, drafts: Any = (), accepted: Any = None, run: bool = True,
        ended: Sequence[Any] = (), **more: Any,
    ) -> Flight | None:  # fmt: skip
        """Plans a step and runs it. Settles the oldest steps, until as many are unsettled as overlapping allows.

        counts, drafts: one number, or one for each row. accepted: tokens of each entry that are real; None: all. run:
        False plans only. ended: rows whose last token the settled step computes. more: `limit`, `defer`, and whether
        the forward `replays`. Returns None if pages or the plan are refused.
        """
        counts, drafts = ([n] * len(rows) if isinstance(n, int) else list(n) for n in (counts, drafts))
        named = [(row, n) for row, n in zip(rows, counts, strict=True) if row in self.machine.handles]
        if self.settings.pages and named:
            lengths = [self.machine._most(self.machine.handles[row]) + n for row, n in named]
            if not self.machine.extend([row for row, _ in named], lengths):
                return None
        flight = self.machine.plan_batch(PLAIN, list(rows), counts, run=run, drafts=drafts, accepted=accepted, **more)
        while flight and run and len(self.machine.flights) > self.settings.overlap:
            self.settle(ended)
        return flight

    @verb
    def launch(self, flight: Any, tell: bool = False) -> None:
        """Runs the forward of a step that was only planned. tell: whether the manager hears of it at once."""
        self.machine.forward(flight)
        if tell:
            self.machine.tell_launched()

    @verb
    def settle(self, ended: Sequence[Any] = (), written: bool = False) -> None:
        """Settles the oldest step, or accepts it if it has drafts. ended: rows that have finished.

        written: whether the device gets the numbers of accepted tokens before the host does.
        """
        machine = self.machine
        flight = machine.flights[0]
        gone = [machine.handles[row] for row in ended if row in machine.handles]
        over = [entry.row in gone for entry in flight.planned.entries]
        if not flight.planned.drafted:
            machine.settle_step(flight, over, over if any(over) else None)
            return
        if written and not flight.written:
            machine.write(flight)
        machine.accept_step(flight, flight.accepted, flight.accepted, over, flight.written)

    @verb
    def land(self) -> None:
        """Settles all steps."""
        while self.machine.flights:
            self.settle()

    @verb
    def run(self, row: Any, text: Sequence[int], dead: bool = False, **how: Any) -> None:
        """Computes a row up to the end of a text; then settles all. dead: whether it plans one step too many."""
        self.run_all([row], [text], land=False, **how)
        if dead:
            self.step([row], 1, ended=[row])
        self.land()

    @verb
    def run_all(self, rows: Sequence[Any], texts: Sequence[Sequence[int]], publish: bool = False, most: int = 3,
                obey: bool = True, land: bool = True) -> None:  # fmt: skip
        """Computes rows in common steps up to the ends of their texts.

        publish: whether they publish to the cache after each step. most: largest number of tokens of a row in a step.
        obey: whether steps end at boundaries. land: whether it settles all steps. Rows that have got to the end of
        their text are padding.
        """
        model, handles, ends = self.model, self.machine.handles, dict(zip(rows, map(len, texts), strict=True))
        self.machine.texts |= {handles[row]: text for row, text in zip(rows, texts, strict=True)}
        while going := [row for row in rows if model.length(handles[row]) < ends[row]]:
            lengths = [model.length(handles[row]) for row in going]
            stops = [model.next_boundary(handles[row]) if obey else ends[row] for row in going]
            counts = [min(stop, ends[row], n + most) - n for row, stop, n in zip(going, stops, lengths, strict=True)]
            batch = [row if row in going else None for row in rows]
            if not self.step(batch, [counts.pop(0) if row else 1 for row in batch]):
                break
            if publish:
                self.machine.publish_told(PLAIN, going)
        if land:
            self.land()

    @verb
    def end(self, *rows: Any, how: str = "", lengths: Any = None, land: bool = True) -> list[Any]:
        """Ends rows. Returns handles of their snapshots.

        how: "told" gives them with their tokens to the cache, and those of turns to their sessions; "publish" returns
        handles; "release" keeps nothing; "": "told" if there is somebody to tell. lengths: the largest length that each
        row may keep. land: whether it settles all steps.
        """
        machine, before = self.machine, set(self.machine.snaps)
        turns = [row in machine.handles and machine.handles[row].talk for row in rows]
        how = how or ("told" if self.settings.prefix or all(turns) else "release")
        given = {"told": False, "publish": True, "release": False}[how]
        machine.end_as(PLAIN, list(rows), how, given if lengths is None else lengths)
        if land:
            self.land()
        return [snap for snap in machine.snaps if snap not in before]

    @verb
    def turn(self, text: Sequence[int], session: Any = None, prompt: int | None = None, how: str = "",
             **more: Any) -> None:  # fmt: skip
        """Runs a request from its admission to its end. prompt: number of tokens of `text` that the request names.

        more: arguments of `run`, and fields of the request.
        """
        running = {name: more.pop(name) for name in ("publish", "dead", "most", "obey") if name in more}
        rows = self.admit(text[:prompt], sessions=[session], **more)
        for row in rows:
            self.run(row, text, **running)
        self.end(*rows, how=how)

    @verb
    def publish(self, *rows: Any, handles: bool = False, strict: bool = False) -> list[Any]:
        """Publishes rows to the cache. handles: as handles, which it returns."""
        machine, before = self.machine, set(self.machine.snaps)
        if handles:
            tenants = [machine.handles[row] for row in rows]
            faults = machine.row_faults(list(rows)) | machine._undecided(list(rows))
            if strict and not self.model.strictly_publishable(tenants, [tenant.confirmed for tenant in tenants]):
                faults.add(ms.InvalidArgument)
            machine.publish_rows(list(rows), faults, strict)
        else:
            machine.publish_told(PLAIN, list(rows))
        return [snap for snap in machine.snaps if snap not in before]

    @verb
    def cancel(self, flight: Any, how: str = "release") -> None:
        """Cancels the newest step, which has not run; its rows end. how: as in `end`."""
        machine = self.machine
        handles = {row: handle for handle, row in machine.handles.items()}
        rows = [handles.get(self.model.tenant(entry)) for entry in flight.planned.entries]
        told = machine.tell(PLAIN, rows) if how == "told" else ()
        machine.cancel_step(flight, {"told": "cache", "publish": "handle", "release": None}[how], *told)

    @verb
    def fork(self, row: Any, *names: str) -> Handles:
        """Forks a row. Returns the new rows; [] if the call is refused."""
        machine = self.machine
        rows = machine.fork_row(row, list(names), set())
        for new in rows:
            machine.texts[machine.handles[new]] = machine.texts.get(machine.handles[row], ())
        return rows

    @verb
    def reorder(self, rows: Sequence[Any], entries: Sequence[int]) -> Handles:
        """Lets rows go on from others. entries: for each row afterwards, the entry of `rows` that it goes on from."""
        machine = self.machine
        texts = [machine.texts.get(machine.handles.get(rows[entry]), ()) for entry in entries if entry < len(rows)]
        result = machine.reorder_rows(list(rows), list(entries))
        for row, text in zip(result, texts, strict=False):
            machine.texts[machine.handles[row]] = text
        return result

    @verb
    def arrive(self, rows: Sequence[Any], lengths: Sequence[int]) -> None:
        """Lets states of these lengths arrive in rows from elsewhere."""
        self.machine.let_arrive(list(rows), list(lengths))

    @verb
    def lacks(self, rows: Sequence[Any], count: int = 1) -> None:
        """Compares how many slots the next plan of these rows lacks."""
        self.machine.same_shortfall(list(rows), [count] * len(rows), set())

    @verb
    def read_slots(self, *handles: Any) -> None:
        """Asks for slots of rows and snapshots. They are compared as soon as they are known."""
        self.machine.read_slots_of(list(handles), set())

    @verb
    def chunk(self, row: Any, most: int) -> int:
        """Returns the number of tokens of the next chunk of a row, at most `most`, that loses no mark."""
        n = self.model.chunk(self.machine.handles[row], most)
        self.machine._same("chunk", self.mem.chunk(row, most), n)
        return n

    @verb
    def ask(self, row: Any, lengths: list[int]) -> None:
        """Names lengths of a row at which states are kept while it reads its prompt."""
        self.machine.ask_for(row, lengths)

    @verb
    def extend(self, row: Any, length: int) -> bool:
        """Takes the pages that a row needs up to a length. Returns whether it got them."""
        return self.machine.extend([row], [length])

    @verb
    def drop(self, *snaps: Any) -> None:
        """Drops published handles."""
        known = all(snap in self.machine.snaps for snap in snaps)
        self.machine.drop_snaps(list(snaps), set() if known else {ms.StaleHandle})

    @verb
    def park(self, *rows: Any, sessions: Sequence[Any] = (), told: bool = False) -> list[Any]:
        """Parks rows and sessions in one call. told: whether it names all tokens. Returns handles; [] if refused."""
        return self.machine.park_all(list(rows), sessions, told)

    @verb
    def resume(self, *parked: Any, size: int | None = None, told: bool = False, sessions: Sequence[Any] = (),
               snapshot_at: Sequence[int] = ()) -> Handles:  # fmt: skip
        """Goes on from parked requests in one call. Returns their rows; [] if the call is refused.

        told: whether they name their tokens. sessions: session of each, or None.
        """
        machine, turns = self.machine, sessions or [None] * len(parked)
        machine.let_expire()
        return machine.admit_all(PLAIN, [
            machine.start_parked(next(self._names), one, size, told, turn, snapshot_at)
            for one, turn in zip(parked, turns, strict=True)
        ])  # fmt: skip

    @verb
    def forget(self, *parked: Any) -> None:
        """Drops parked requests."""
        self.machine.drop_away(list(parked))

    # Sessions, the cache, time

    @verb
    def open(self, *names: str, priority: int = 0, ttl: float | None = None) -> list[Any]:
        """Opens sessions and returns them."""
        return [self.machine.open_session(set(), name, priority, ttl) for name in names]

    @verb
    def set(self, session: Any, **given: Any) -> None:
        """Sets the priority or the ttl of a session."""
        self.machine.set_session(session, given)

    @verb
    def fork_session(self, session: Any, name: str = "twin") -> Any:
        """Forks a session. Returns the new one; None if the call is refused."""
        return self.machine.twin_of(session, name)

    @verb
    def close(self, session: Any) -> None:
        """Closes a session."""
        self.machine.close_session(session)

    @verb
    def rest(self, session: Any) -> None:
        """Lets an idle session make way now."""
        self.machine.rest(session)

    @verb
    def evict(self, states: int = 0, pages: int = 0) -> None:
        """Evicts cached states and KV pages."""
        same, cache = self.machine._same, self.mem.prefix
        if states:
            same("evicted states", cache.evict_states(states), self.model.evict_states(states))
        if pages:
            same("evicted pages", cache.evict_pages(pages), self.model.evict_pages(pages))

    @verb
    def match(self, tokens: Sequence[int], salt: Any = None) -> None:
        """Asks what the cache has for a prompt."""
        self.machine.match_of(tuple(tokens), salt)

    @verb
    def wait(self, seconds: float) -> None:
        """Advances the clock of the sessions."""
        self.model.seconds += seconds

    @verb
    def poll(self) -> None:
        self.machine.poll(PLAIN)

    # Tiers

    @verb
    def prefetch(self, text: Sequence[int], salt: Any = None, session: Any = None) -> Any:
        """Starts a prefetch of a prompt. Returns it; None if the call is refused."""
        talk = self.machine.talks.get(session)
        return self.machine.prefetch_for(PLAIN, tuple(text), talk.salt if talk else salt, session)

    @verb
    def fetch(self, text: Sequence[int], salt: Any = None, session: Any = None) -> Any:
        """Prefetches a prompt, and lets threads work until the prefetch is done. Returns it."""
        fetch = self.prefetch(text, salt, session)
        while fetch and not fetch.done:
            self.work()
            self.poll()
        return fetch

    @verb
    def ready(self, fetch: Any) -> None:
        """Asks whether a prefetch is ready, which may stop it."""
        self.machine.ready_for(fetch)

    @verb
    def unfetch(self, fetch: Any) -> None:
        """Cancels a prefetch."""
        self.machine.unfetch_of(fetch)

    @verb
    def work(self, jobs: int = 1, at: int = 0, finish: bool = True) -> None:
        """Lets threads run jobs, from the `at`-th one that has not ended. finish: False only begins them."""
        lower = self.machine.lower
        for job in lower.open_jobs[at:][:jobs]:
            lower.work(job, finish)

    @verb
    def drain(self) -> None:
        """Sends what is due, polls, and lets threads work until all that has begun is done."""
        self.submit()
        for _ in range(3):
            self.poll()
            self.work(99)
        while self.machine.lower.open_jobs:
            self.poll()
            self.work(99)
        self.poll()

    @verb
    def go_down(self) -> None:
        """Saves what the cache has, then evicts all states and pages from the device."""
        self.submit()
        self.poll()
        self.poll()
        self.evict(states=99, pages=99)
        self.submit()
        self.poll()

    @verb
    def tick(self, seconds: float) -> None:
        """Advances the clock of the tiers."""
        self.machine.lower.advance(seconds)

    @verb
    def stock(self, text: Sequence[int], *ends: int, salt: Any = None, gap: int = -1) -> None:
        """Puts records of a prompt into storage: states at `ends`, in tokens, and all KV pages but page `gap`."""
        size = self.settings.page_size
        self.machine.lower.stock(tuple(text), salt, [end // size for end in ends], gap)

    @verb
    def spoil(self, kind: str, text: Sequence[int], fault: str, salt: Any = None) -> None:
        """Sets a fault of a record in storage, "gone" deletes it, "" mends it. text: all tokens up to its end."""
        self.machine.lower.spoil(kind, (salt, tuple(text)), fault)

    @verb
    def break_store(self, broken: bool = False, forgetful: bool = False) -> None:
        """Makes all calls of storage fail, or only those that ask what there is; without arguments mends it."""
        self.machine.lower.break_all(broken, forgetful)

    @verb
    def thin(self, states: int = 0, pages: int = 0) -> None:
        """Evicts states and KV pages from host memory."""
        self.machine.thin_by(0, states)
        if pages:
            self.machine.thin_by(1, pages)

    @verb
    def flush(self) -> None:
        """Writes all to storage."""
        self.machine.flush(PLAIN)

    @verb
    def empty_host(self) -> None:
        """Clears host memory."""
        self.machine.empty_host(Digits(1))

    # The device

    @verb
    def claim(self, n: int) -> list[int]:
        """Claims slots by id. Returns the ids; [] if the call is refused."""
        return self.machine.claim_ids(n)

    @verb
    def release(self, ids: Sequence[int]) -> None:
        """Releases slots by id."""
        self.machine.release_ids(ids)

    @verb
    def submit(self) -> None:
        self.machine.submit(PLAIN)

    @verb
    def nap(self, keep: bool = True) -> None:
        """Puts the states to sleep, and wakes them."""
        self.machine.sleep(Digits(0 if keep else 1))
        self.machine.wake(PLAIN)

    @verb
    def recover(self, held: Sequence[int] = ()) -> None:
        """Ends all requests, and keeps published, cached and idle states that are certain."""
        self.machine.recover_all(held)

    @verb
    def sleep(self, keep: bool = True) -> None:
        self.machine.sleep(Digits(0 if keep else 1))

    @verb
    def wake(self) -> None:
        self.machine.wake(PLAIN)

    @verb
    def audit(self) -> None:
        """Compares the report of an audit."""
        self.machine.audit(PLAIN)

    @verb
    def picture(self) -> None:
        """Compares what `inspect` shows: owners and names of registers, also those that only the device knows."""
        self.machine.snapshot(PLAIN)

    @verb
    def check(self) -> None:
        """Reads the number of free slots from the device."""
        self.machine.check(PLAIN)

    @verb
    def reset(self) -> None:
        """Makes everything free, after a failure."""
        self.machine.reset(PLAIN)

    @verb
    def refuses(self, error: Any, call: Callable[[], Any], match: str | None = None) -> None:
        """Asserts that a call raises an error with this text. The comparison afterwards shows that nothing changed."""
        with pytest.raises(error, match=match):
            call()

    @contextmanager
    def shared(self, pages: Sequence[int]) -> Any:
        """Makes somebody else one more owner of KV pages for the block."""
        allocator = owners.kv_pages(self.mem)
        allocator.share(pages)
        self.model.page_users.update(pages)
        yield
        allocator.release(pages)
        self.model.page_users -= Counter(pages)

    # Ends

    def reached(self, *names: str, **counts: Any) -> None:
        """Asserts that a script has reached what it is about.

        names: errors that calls have raised, and figures of the model that are not 0. counts: what the script says of
        itself, such as a list that must not be empty.
        """
        there = {name: getattr(self.model, name) for name in FIGURES} | dict(self.model.figures)
        if below := self.model.below:
            there |= below.figures | below.counts | below.flaws | {"thinned": sum(one.evicted for one in below.shelves)}
        there |= dict(self.machine.errors) | counts
        self._named |= {*names}
        missed = [name for name in (*names, *counts) if not there.get(name)]
        assert not missed, f"the script does not reach {missed}: { ({name: n for name, n in there.items() if n}) }"

    def may_raise(self, *errors: str) -> None:
        """Names errors that calls raise in some cases of a script. Those that none of its cases names fail it."""
        self._named |= {*errors}

    def finish(self) -> None:
        """Ends everything, and asserts that all slots and pages are free, and that the script read its axes."""
        self.calls.append("finish()")
        unread = sorted(self._own.keys() - self._read)
        assert not unread, f"{unread}: neither settings nor axes that the script reads"
        silent = sorted(self.machine.errors.keys() - self._named)
        assert not silent, f"calls were refused: name {silent} in reached(), or let the script have room"
        self.land()
        self.machine.close()


class Script(NamedTuple):
    """What a script does, and its cases: settings and attributes of `Play`."""

    run: Callable[[Play], None]
    cases: list[dict[str, Any]]


def script(**axes: Any) -> Callable[[Callable[[Play], None]], Callable[..., None]]:
    """Makes a test of a script.

    axes: settings, or attributes of `Play`. A tuple has a value for each case, of which `make test` runs a sample. A
    dictionary in a tuple has several settings.
    """
    fixed = {name: value for name, value in axes.items() if not isinstance(value, tuple)}
    varied = {name: value for name, value in axes.items() if isinstance(value, tuple)}
    assert all(varied.values()), f"a script without cases: {axes}"
    given = [key for name, values in varied.items() for key in _keys(name, values)]
    assert len(given) == len(set(given)), f"two axes give the same setting: {sorted(given)}"

    def made(of: Callable[[Play], None]) -> Callable[..., None]:
        def run(play: Play) -> None:
            with play.explained():
                assert of(play) is None, "a script returns nothing, and is no generator"  # type: ignore[func-returns-value]
                play.finish()

        @wraps(of)
        def test(backend: Backend, **case: Any) -> None:
            run(Play(backend, **(fixed | case)))

        names = "backend", *varied
        test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
        for name, values in reversed(varied.items()):
            test = pytest.mark.parametrize(name, values, ids=[_id(name, value) for value in values])(test)
        test.script = Script(run, [fixed | dict(zip(varied, one, strict=True)) for one in product(*varied.values())])  # type: ignore[attr-defined]
        return pytest.mark.sample(pytest.mark.script(test))

    return made


def _keys(name: str, values: tuple[Any, ...]) -> set[str]:
    """Returns the settings and attributes that an axis gives."""
    return {key for value in values for key in (value if isinstance(value, Mapping) else [name])}


def _id(name: str, value: Any) -> str | None:
    """Returns how a case names a value; None: as pytest does."""
    if isinstance(value, bool):
        return f"{'' if value else 'no '}{name}"
    return " ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, Mapping) else None
