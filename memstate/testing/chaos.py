"""Injects faults into one manager from outside, and counts and logs them, so that an engine can be tested with them.

claims, admissions     slots are short: snapshots are skipped, requests have to wait
store_fails            storage fails
store_late_s           storage is slow
polls                  transfers, writes and prefetches take longer
"""

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from memstate.checks import is_whole
from memstate.engine.admission import Lack
from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError, InvalidArgument, OutOfSlots
from memstate.requests.handles import Row
from memstate.requests.steps import Step
from memstate.stats import ChaosStats
from memstate.tiers import Store
from memstate.tiers.stores.base import Bytes, Outcome

VARIABLE = "MEMSTATE_CHAOS"
SHARES = ("claims", "admissions", "store_fails", "polls")
MOST_LATE_S = 3600
log = logging.getLogger("memstate.chaos")


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Says how often faults are injected on purpose. They change no result: an engine is only slower, with fewer hits.

    Each fault is counted in `mem.stats().chaos`, and is one line of the logger "memstate.chaos" with level INFO.

    The same seed and the same calls give the same faults. Threads call the store, so the order of its calls can differ
    from run to run. Give all ranks the same settings, because ranks must poll equally often.

    Args:
        seed: start of the random numbers.
        claims: probability that an optional claim of a step is refused. After the first refused claim, the step gets no
            more slots, as if none were free, and skips the snapshots that need one.
        admissions: probability that `admit` or `fork` finds too few slots while a request runs. The call raises
            OutOfSlots. If the request would load states from host memory, the call first tries again without loading
            them.
        store_fails: probability that a call of the store fails. It raises OSError, or answers wrongly for one name:
            that the record is missing, or that the call failed for it.
        store_late_s: largest delay of each call of the store, in seconds.
        polls: probability that a `poll` does nothing, below 1.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> Chaos(seed=1, claims=0.1)
        Chaos(seed=1, claims=0.1, admissions=0.0, store_fails=0.0, store_late_s=0.0, polls=0.0)
    """

    seed: int = 0
    claims: float = 0.0
    admissions: float = 0.0
    store_fails: float = 0.0
    store_late_s: float = 0.0
    polls: float = 0.0

    def __post_init__(self) -> None:
        if not is_whole(self.seed):
            raise ConfigurationError(f"chaos: seed={self.seed!r}: expected a whole number")
        for name in SHARES:
            share = getattr(self, name)
            if not _within(share, 1) or (share == 1 and name == "polls"):
                most = "up to, but not, 1: a loop may wait for what polls advance" if name == "polls" else "to 1"
                raise ConfigurationError(f"chaos: {name}={share!r}: expected a probability from 0 {most}")
        if not _within(self.store_late_s, MOST_LATE_S):
            raise ConfigurationError(f"chaos: store_late_s={self.store_late_s!r}: expected 0 to {MOST_LATE_S} seconds")


def _within(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def chaos_from(environment: Mapping[str, str]) -> Chaos | None:
    """Reads the variable MEMSTATE_CHAOS, such as "seed=1,claims=0.1,polls=0.2".

    Args:
        environment: the variables of the process.

    Returns:
        The settings. None: the variable is missing or empty.

    Raises:
        ConfigurationError: the text is not a list of settings, or a value is out of range.
    """
    if not (text := environment.get(VARIABLE, "")):
        return None
    given: dict[str, Any] = {}
    kinds = {field.name: int if field.name == "seed" else float for field in fields(Chaos)}
    try:
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name in given:
                raise ConfigurationError(f"{name} twice")
            convert = kinds[name]
            given[name] = convert(value)
        chaos = Chaos(**given)
    except (KeyError, ValueError) as error:  # a ConfigurationError is a ValueError
        raise ConfigurationError(
            f"{VARIABLE}={text!r}: {error}; expected settings such as seed=1,claims=0.1, of {', '.join(kinds)}"
        ) from error
    log.warning("%s=%s injects faults on purpose", VARIABLE, text)
    return chaos


class Faults:
    """Draws, counts and logs the faults of one manager. It wraps methods of the manager, from outside.

    Args:
        chaos: how often each kind happens.

    Raises:
        InvalidArgument: `chaos` is no `Chaos`.

    Example:
        >>> import torch, memstate as ms
        >>> from memstate.testing import Chaos, Faults
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> faults = Faults(Chaos(seed=1, admissions=0.5))
        >>> mem = faults.inject(ms.StateManager(layout, slots=8, max_requests=4))
        >>> mem.stats().chaos.admissions
        0
    """

    def __init__(self, chaos: Chaos) -> None:
        if not isinstance(chaos, Chaos):
            raise InvalidArgument(f"Faults({chaos!r}): expected memstate.testing.Chaos(...)")
        self.chaos, self._injected = chaos, False
        self._lock = threading.RLock()  # threads call the store
        self._counts: Counter[str] = Counter()
        self._draws = {field.name: random.Random(f"{field.name} {chaos.seed}") for field in fields(ChaosStats)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Faults | None":
        """Returns the faults of the variable MEMSTATE_CHAOS, such as "seed=1,claims=0.1"; None if it is not set.

        Args:
            environment: the variables. Default: those of the process.

        Raises:
            ConfigurationError: the text is not a list of settings, or a value is out of range.
        """
        chaos = chaos_from(os.environ if environment is None else environment)
        return cls(chaos) if chaos is not None else None

    def store(self, store: Store) -> "FaultyStore":
        """Returns a store that is slow and fails, for `ms.Tiers(store=...)`.

        Args:
            store: the store that keeps the records.
        """
        return FaultyStore(store, self)

    def inject(self, mem: StateManager) -> StateManager:
        """Injects the faults into the calls of a manager. Call it before the first request.

        Args:
            mem: the manager whose calls are to fail at times.

        Returns:
            The manager.

        Raises:
            InvalidArgument: `mem` is no manager or has faults already, or this object was injected into another
                manager.
        """
        if not isinstance(mem, StateManager) or self._injected:
            raise InvalidArgument(f"inject({mem!r}): expected a StateManager, one for each Faults(...)")
        parts = mem._parts
        if parts.chaos is not None:
            raise InvalidArgument("this manager has faults already: inject once, with all of them in one Chaos(...)")
        parts.chaos, self._injected = self.stats, True
        stepping, admission, marks, mirror = parts.stepping, parts.admission, parts.marks, parts.mirror
        plan, make_room = stepping.plan, admission.make_room

        def refused() -> int:
            return mirror.degraded + marks.refused

        def faulty_plan(
            rows: Sequence[Row | None], tokens: int | Sequence[int], limit: int,
            replay: Callable[[], object] | None = None, drafts: int | Sequence[int] = 0, defer: int = 0,
        ) -> Step:  # fmt: skip
            real = stepping.batch(rows, tokens, drafts).rows
            with self.claims(len(real), limit, refused) as allowed:
                return plan(rows, tokens, allowed, replay, drafts, defer)

        def faulty_room(rows: int, pages: int, slots: int) -> Lack | None:
            runs = parts.table.free < parts.table.rows  # when no request runs, an engine may take a refusal as final
            if runs and rows and self.happens("admissions", f"{rows} requests find too few slots"):
                allocator, held = parts.allocator, parts.sessions.held
                evictable = parts.holdings.evictable("snapshot") + parts.cache.evictable_states
                error = OutOfSlots(slots, allocator.free, evictable, allocator.capacity, held)
                error.add_note("memstate: refused on purpose, see memstate.testing")
                return error
            return make_room(rows, pages, slots)

        stepping.plan = faulty_plan  # type: ignore[method-assign]
        admission.make_room = faulty_room  # type: ignore[method-assign]
        if (tiers := parts.tiers) is not None:
            poll = tiers.poll

            def faulty_poll() -> None:
                if not self.happens("polls", "a poll does nothing"):
                    poll()

            tiers.poll = faulty_poll  # type: ignore[method-assign]
        return mem

    def stats(self) -> ChaosStats:
        """Returns how many faults of each kind were injected since the start.

        Syncs: no.
        """
        with self._lock:
            return ChaosStats(**self._counts)

    def happens(self, kind: str, what: str) -> bool:
        """Draws whether a fault happens. If so, counts and logs it.

        Args:
            kind: name of the setting with the probability of the fault, such as "claims".
            what: the effect of the fault, for the log.

        Returns:
            Whether the fault happens.
        """
        share = getattr(self.chaos, kind)
        with self._lock:
            fault = bool(share) and self._draws[kind].random() < share
            if fault:
                self._note(kind, what)
        return fault

    def _note(self, kind: str, what: str) -> None:
        with self._lock:
            self._counts[kind] += 1
            log.info("fault %d, %s %d: %s", self._counts.total(), kind, self._counts[kind], what)

    @contextmanager
    def claims(self, rows: int, limit: int, refused: Callable[[], int]) -> Iterator[int]:
        """Limits the optional claims of the step in the `with` block. Counts a fault if a claim is refused.

        Args:
            rows: rows of the step.
            limit: largest number of claims that the caller allows.
            refused: returns the number of claims and marks that were refused since the start.

        Yields:
            The largest number of claims that the step can make.
        """
        share, draw, before = self.chaos.claims, self._draws["claims"], refused()
        allowed = next((n for n in range(rows) if draw.random() < share), limit) if share else limit
        yield min(allowed, limit)
        if allowed < limit and (lost := refused() - before):
            self._note("claims", f"a step of {rows} rows could make {allowed}, {lost} were refused")

    def answer(self, call: str, names: Sequence[str]) -> int | None:
        """Delays a call of the store, and decides whether it fails.

        Args:
            call: name of the method.
            names: names of the records.

        Returns:
            Index of the name that gets a wrong answer. None: all answers are right.

        Raises:
            OSError: the call fails.
        """
        if most := self.chaos.store_late_s:
            with self._lock:
                seconds = self._draws["store_late"].uniform(0, most)
                self._note("store_late", f"{call} of {len(names)} records waits {seconds:.6f} s")
            time.sleep(seconds)
        if not self.happens("store_fails", f"{call} of {len(names)} records"):
            return None
        with self._lock:
            place = self._draws["store_fails"].randrange(-1, len(names))
        if place < 0:
            raise OSError(f"{call} of {len(names)} records fails on purpose: chaos")
        return place


class FaultyStore:
    """Delays calls of a store, and makes some of them fail. All other attributes are those of the store.

    Args:
        store: the store whose calls are delayed or fail.
        faults: draws the faults.
    """

    def __init__(self, store: Store, faults: Faults) -> None:
        self._store, self._faults = store, faults

    def __repr__(self) -> str:
        return f"{self._store!r} with chaos"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy.copy asks for such names before `_store` is set
            raise AttributeError(name)
        return getattr(self._store, name)

    def register(self, memory: Tensor) -> None:
        """See `Store.register`."""
        self._store.register(memory)

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See `Store.exists`. A wrong answer says that the record is missing."""
        wrong = self._faults.answer("exists", names)
        return [there and at != wrong for at, there in enumerate(self._store.exists(names))]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store.get`. A wrong answer is MISSING at an even index and FAILED at an odd one."""
        wrong = self._faults.answer("get", names)
        outcomes = list(self._store.get(names, buffers))
        if wrong is not None:
            outcomes[wrong] = (Outcome.MISSING, Outcome.FAILED)[wrong % 2]
        return outcomes

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store.put`. A wrong answer is FAILED, although the record is written."""
        wrong = self._faults.answer("put", names)
        outcomes = list(self._store.put(names, buffers))
        if wrong is not None:
            outcomes[wrong] = Outcome.FAILED
        return outcomes

    def discard(self, names: Sequence[str]) -> None:
        """See `Store.discard`. The records are removed even if the call fails."""
        wrong = self._faults.answer("discard", names)
        self._store.discard(names)
        if wrong is not None:
            raise OSError(f"discard of {len(names)} records fails on purpose: chaos")
