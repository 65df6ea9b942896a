"""A process that goes on from requests which another one has parked: `python -m tests.support.elsewhere STORE JOBS`.

A row says the token that its state stands for, as `written` of tests/support/tiered.py does without a manager.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memstate as ms
from memstate.tiers.stores.base import Store
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from memstate.tiers.travel import Trip
from tests.support.parked import Station
from tests.support.tiered_small import PAGE
from tests.support.virtual import AtOnce


def opened(where: str) -> Store:
    """Returns the store of a folder, or of JSON with the settings of Mooncake."""
    return MooncakeStore(Mooncake(**json.loads(where))) if where[0] == "{" else ms.FileStore(where)


def station(store: Store, tracking: ms.Tracking, **more: Any) -> Station:
    tiers = {"store": store, "executor": AtOnce(), "host_slots": 8, "host_pages": 90}
    return Station(tiers, tracking=tracking, pages=90, **more)


def speak(at: Station, row: ms.Row, goal: int) -> None:
    """Lets a row sample tokens, each from the bytes of its state, and computes them."""
    for _ in range(goal):
        (slot,) = at.mem.device.read_slots([row]).wait().tolist()
        at.text[row].append((int(at.mem.planes["long"][0, slot, 0]) >> 40) % 50)
        at.reach(row)
        at.mem.poll()


def over(at: Station, trip: Trip) -> Trip:
    while not trip.done:
        at.mem.poll()
    assert not trip.why, trip.why
    return trip


def go_on(at: Station, job: dict[str, Any]) -> tuple[int, Sequence[int]]:
    """Goes on from a manifest. Returns the length at which it starts, and all tokens."""
    trip = over(at, at.below.read(bytes.fromhex(job["manifest"]), job["salt"], key=job["key"].encode()))
    assert trip.parked is not None and trip.parked.user.decode() == job["user"]
    text, new, session = job["text"], job["new"], at.mem.sessions.open("talk") if job["session"] else None
    (row,) = at.mem.admit(
        [ms.Request("again", tokens=text + new, salt=job["salt"], resume=trip.parked, session=session)]
    )
    at.text[row], start = text + new, at.mem.info(row).length
    at.reach(row)
    speak(at, row, job["goal"])
    said = at.text.pop(row)
    at.mem.end([row], keep="cache", tokens=[said])
    if session is not None:
        (row,) = at.mem.admit([ms.Request("next", tokens=[*said, 1], salt=job["salt"], session=session)])
        assert at.mem.info(row).length == len(said)
        at.mem.end([row])
        at.mem.sessions.close(session)
    return start, said


if __name__ == "__main__":
    there = station(opened(sys.argv[1]), ms.PingPong(16 * PAGE), slots=9)
    print(json.dumps([go_on(there, job) for job in json.loads(Path(sys.argv[2]).read_text())]))
    there.finish()
    there.mem.close()
