"""What all stores do: records are whole or missing, and the same for every process."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.tiers import FileStore, MooncakeStore, Objects
from memstate.tiers.stores.base import Outcome
from tests.support import mooncake_server, object_server
from tests.support.store_rig import RECORDS, SIZE, Rig, fresh, peer

MISSING, DONE, DAMAGED, _ = Outcome


@pytest.fixture(scope="module")
def held() -> Iterator[dict[str, Any]]:
    """The servers that the stores of this file need, once they have been started, and what ends them."""
    with ExitStack() as ending:
        yield {"ending": ending}


def server(held: dict[str, Any], of: Any) -> Any:
    if of not in held:
        held[of] = held["ending"].enter_context(of())
    return held[of]


@pytest.fixture(scope="module", params=["file", "memory", "folder", "s3", "mooncake p2p", "mooncake http"])
def rig(held: dict[str, Any], request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Rig]:
    kind, folder = request.param, tmp_path_factory.mktemp("stores")
    if kind.startswith("mooncake"):
        settings = server(held, mooncake_server.running_master).settings(http=kind.endswith("http"))
        made = Rig(MooncakeStore(settings), f"MooncakeStore({replace(settings, segment_bytes=0)!r})")
    elif kind == "file":
        made = Rig(FileStore(folder), f"FileStore({str(folder)!r})")
    else:
        pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]' in a checkout")
        url = {"memory": "memory:///", "folder": f"file://{folder}/new", "s3": "s3://bucket/a/b"}[kind]
        options = server(held, object_server.running_proxy).options() if kind == "s3" else {}
        made = Rig(Objects(url, **options), f"Objects({url!r}, **{options!r})" if kind != "memory" else "")
    yield made
    made.store.close()


def test_what_was_put_is_found_and_nothing_beside_it_is_written(rig: Rig, generator: torch.Generator) -> None:
    names = [fresh() for _ in range(8)]
    wanted = rig.fill(generator, *range(8))
    assert rig.store.exists(names) == [False] * 8
    assert rig.store.put(names, rig.buffers(*range(8))) == [DONE] * 8
    beside = rig.fill(generator, *range(RECORDS))
    assert rig.store.exists([*names, fresh()]) == [True] * 8 + [False]
    assert rig.store.get([names[5], fresh(), names[2]], rig.buffers(11, 13, 15)) == [DONE, MISSING, DONE]
    assert rig.holds([wanted[5], wanted[2]], 11, 15)
    assert rig.holds([beside[i] for i in (10, 12, 14, 16)], 10, 12, 14, 16)
    rig.store.discard([*names[:2], fresh()])
    assert rig.store.exists(names) == [False] * 2 + [True] * 6
    assert rig.store.get([], []) == rig.store.put([], []) == rig.store.exists([]) == []
    assert not rig.store.faults


@pytest.mark.parametrize("other", [1, SIZE - 1])
@pytest.mark.parametrize("longer", [False, True])
def test_a_record_of_another_size_is_damaged_once(
    rig: Rig, generator: torch.Generator, other: int, longer: bool
) -> None:
    whole, part = rig.pool.buffer(2), rig.pool.buffer(3)[:other]
    written, read = (whole, part) if longer else (part, whole)
    name, sound = fresh(), fresh()
    wanted = rig.fill(generator, 4)
    assert rig.store.put([name, sound], [written, rig.pool.buffer(4)]) == [DONE, DONE]
    assert rig.store.get([name, sound], [read, rig.pool.buffer(5)]) == [DAMAGED, DONE]
    assert rig.holds(wanted, 5)
    assert rig.store.get([name], [read]) == [MISSING]
    assert rig.store.put([name], [read]) == [DONE]
    assert rig.store.get([name], [read]) == [DONE]


def test_names_may_come_twice_and_every_letter_of_them_counts(rig: Rig, generator: torch.Generator) -> None:
    name, other = fresh(), fresh().replace("0", "f", 1)
    names = [name, other, name.replace("kv", "state"), *(fresh() for _ in range(4))]
    wanted = rig.fill(generator, *range(7))
    assert rig.store.put([*names, names[5]], rig.buffers(*range(7), 5)) == [DONE] * 8
    rig.fill(generator, 0)
    assert rig.store.put(names[:1], rig.buffers(0)) == [DONE]  # a repeated put changes no byte
    assert rig.store.get([*names, names[5]], rig.buffers(*range(7, 15))) == [DONE] * 8
    assert rig.holds([*wanted, wanted[5]], *range(7, 15))
    rig.store.discard(names)


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.uint8), np.zeros(4, np.int16), np.zeros(8, np.uint8)[::2]])
def test_buffers_that_cannot_be_meant(rig: Rig, bad: Any) -> None:
    name = fresh()
    for call in (rig.store.get, rig.store.put):
        with pytest.raises(InvalidArgument, match="buffer of"):
            call([name, fresh()], [rig.pool.buffer(0), bad])
    assert rig.store.exists([name]) == [False]


def test_arguments_that_cannot_be_meant(rig: Rig) -> None:
    frozen = rig.pool.buffer(0)[:]
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="writable"):
        rig.store.get([fresh()], [frozen])
    assert rig.store.put([fresh()], [frozen]) == [DONE]
    with pytest.raises(InvalidArgument, match="2 names with 1 buffers"):
        rig.store.get([fresh(), fresh()], rig.buffers(0))


NAMES = ["", "a/b", "..", ".", ".hidden", "a.tmp", "/etc/passwd", "a" * 101, "a\n", "a\0", "ä", "a b", "\\", b"a", None]
NAMES += ["a", "id_rsa", "kv-", "0" * 64, f"kv-{'0' * 63}", f"kv-{'0' * 65}", f"kv-{'A' * 64}", f"kv-{'0' * 64}\n"]
NAMES += [f"other-{'0' * 64}", f"state-{'g' * 64}", f"/kv-{'0' * 64}", f"kv-{'0' * 64}".encode(), f"kv/{'0' * 64}", 3]


def test_names_that_no_record_gets_are_refused(rig: Rig) -> None:
    first, buffers = fresh(), rig.buffers(0, 1)
    for name in NAMES:
        for call, *more in (
            (rig.store.exists,),
            (rig.store.get, buffers),
            (rig.store.put, buffers),
            (rig.store.discard,),
        ):
            with pytest.raises(InvalidArgument, match="expected state- or kv-"):
                call([first, name], *more)
    assert rig.store.exists([first]) == [False]


@pytest.mark.sample(2)
def test_two_processes_see_each_others_records(rig: Rig, generator: torch.Generator) -> None:
    if not rig.again:
        pytest.skip("no other process sees this store")
    mine, theirs = fresh(), fresh()
    wanted = rig.fill(generator, 0)
    assert rig.store.put([mine], rig.buffers(0)) == [DONE]
    reader = peer(rig.again, mine, theirs, 90)
    assert rig.store.get([theirs], rig.buffers(1)) == [DONE]
    assert rig.holds([wanted[0] ^ 90], 1)
    reader.communicate()
    # the record is still there after its writer: Mooncake's writer gave no memory
    assert rig.store.get([theirs], rig.buffers(2)) == [DONE]
