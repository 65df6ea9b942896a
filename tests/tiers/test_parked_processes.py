"""Requests that park in one process and go on in another say the tokens of a request that never parked."""

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from tests.support.elsewhere import opened, over, speak, station
from tests.support.mooncake_server import running_master
from tests.support.parked import Station
from tests.support.processes import python
from tests.support.sampling import PROOF
from tests.support.tiered import written
from tests.support.tiered_small import PAGE

REQUESTS, LONGEST = 200 if PROOF else 20, 120


@pytest.fixture(params=["file", pytest.param("mooncake", marks=pytest.mark.proof)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yields what names a store to another process."""
    with ExitStack() as held:
        if request.param == "file":
            yield str(tmp_path / "store")
        else:
            yield json.dumps(asdict(held.enter_context(running_master()).settings()))


def leave(at: Station, dice: random.Random, n: int) -> dict[str, Any]:
    """Parks a request or a session after random tokens, and writes it. Returns what another process must know."""
    length, goal, session = dice.randint(1, LONGEST), dice.randint(0, 9), n % 4 == 3
    prompt = [dice.randrange(50) for _ in range(max(1, length - goal))]
    job = {"salt": dice.choice([None, "tenant"]), "key": dice.choice(["", "secret"]), "user": f"seed {n}",
           "session": session, "new": [7, 8, 9] if session else [], "goal": dice.randint(1, 9)}  # fmt: skip
    talk = at.mem.sessions.open(n) if session else None
    (row,) = at.admit(prompt, salt=job["salt"], session=talk)
    at.reach(row)
    at.mem.poll()
    speak(at, row, length - len(prompt))
    text = at.text.pop(row)
    assert text == list(written(tuple(prompt), length - len(prompt)))
    if talk is not None:
        at.mem.end([row], keep="cache", tokens=[text])
    (parked,) = at.mem.park([talk or row], None, user=[job["user"].encode()])
    manifest = over(at, at.below.write(parked, text, key=job["key"].encode())).manifest
    at.mem.drop([parked])
    assert manifest is not None and len(manifest) <= 2**10 + 8 * length + 65 * -(-length // PAGE)
    return job | {"manifest": manifest.hex(), "text": text}


def test_B83_what_was_parked_goes_on_in_another_process_with_equal_tokens(where: str, tmp_path: Path) -> None:
    """At random lengths, from rows and sessions, under another strategy. Nothing is computed twice."""
    at, dice = station(opened(where), ms.Redirect(16 * PAGE)), random.Random(REQUESTS)
    jobs = [leave(at, dice, n) for n in range(REQUESTS)]
    (tmp_path / "jobs").write_text(json.dumps(jobs))
    told = json.loads(python("-m", "tests.support.elsewhere", where, tmp_path / "jobs", OMP_NUM_THREADS="1"))
    for job, (start, said) in zip(jobs, told, strict=True):
        assert start == len(job["text"])
        assert said == list(written((*job["text"], *job["new"]), job["goal"]))
    at.finish()
    at.mem.close()
