"""Parked requests that travel through a store to another manager: over faults of the store, late, cancelled, lost."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.requests.handles import Parked
from memstate.tiers import manager, parcel
from memstate.tiers.stores.file import FileStore
from memstate.tiers.travel import Trip
from memstate.tokens import EMPTY
from tests.support.build import on
from tests.support.parked import FILLED, OTHER, ROWS, TEXT, Station, refused, tailed, whole
from tests.support.planes import LAYOUT
from tests.support.tiered_small import CPU, PAGE
from tests.support.virtual import AtOnce, ByHand, Clock, MemoryStore

WIDE = [-(2**63), 2**63 - 1, -1, 2**32, 2**32 - 1, 0, 7, 8, 9, 10, 11]
SALTS = [None, "tenant", b"\xff", -(2**70), ("a", (1, b"b", None))]


class Shelf(MemoryStore):
    """A store that removes what it is told to discard."""

    def discard(self, names: Sequence[str]) -> None:
        super().discard(names)
        for name in names:
            self.records.pop(name, None)


def station(store: Any, **tiers: Any) -> Station:
    return Station({"store": store, "executor": AtOnce()} | tiers)


def parked(at: Station, text: Sequence[int] = TEXT[:11], known: bool = True, **more: Any) -> Parked:
    """Returns a parked request, whose bytes are all in host memory."""
    (row,) = at.admit(text, **more)
    at.reach(row)
    (one,) = at.park(row, known=known)
    at.mem.submit()
    at.mem.poll()
    return one


def over(mem: ms.StateManager, trip: Trip) -> Trip:
    """Polls until a trip is over."""
    for _ in range(9):
        mem.poll()
    assert trip.done
    mem.audit().raise_if_leaking()
    return trip


def written(at: Station, one: Parked, **more: Any) -> bytes:
    trip = over(at.mem, at.below.write(one, **more))
    assert not trip.why and trip.manifest is not None
    return trip.manifest


def arrive(at: Station, manifest: bytes, text: Sequence[int], **more: Any) -> Parked:
    trip = over(at.mem, at.below.read(manifest, **more))
    assert not trip.why and trip.parked is not None
    at.text[trip.parked] = list(text)
    return trip.parked


def job(hand: ByHand) -> None:
    """Runs the last job that was handed in."""
    assert hand.jobs[-1].begin()
    hand.jobs[-1].finish()


def sealed(manifest: bytes, shared: bytes = b"") -> bytes:
    """Returns a manifest with the digest that its body should have."""
    return manifest[:-32] + parcel.digest_of(manifest[:-32], shared)


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [b"", b"k" * 64])
@pytest.mark.parametrize("salt", SALTS)
def test_a_request_goes_on_in_another_manager(store: FileStore, salt: Any, key: bytes) -> None:
    """Inside a page, with its tokens, its salt and the caller's bytes. From there it travels back."""
    here, there = station(store), station(FileStore(store.folder.path))
    (row,) = here.admit(TEXT[:11], salt=salt)
    here.reach(row)
    (one,) = here.mem.park([row], [TEXT[:11]], user=[b"seed 7"])
    here.text[one] = here.text.pop(row)
    manifest = written(here, one, key=key)
    came = arrive(there, manifest, TEXT[:11], salt=salt, key=key)
    assert (came.length, came.pending, came.user, came.prompt) == (11, 0, b"seed 7", one.prompt)
    back = arrive(here, written(there, came, key=key), TEXT[:11], salt=salt, key=key)
    for at, each in ((there, [came]), (here, [one, back])):
        at.scribble()
        for row in at.resume(each, session=None):
            at.step([row], 1)
        at.finish()


@pytest.mark.parametrize("key", [b"", b"key"])
def test_any_ids_and_kinds_travel(key: bytes) -> None:
    """Also tokens that are told only when the request is written. Half of a pair of surrogates is a kind."""
    here, there = station(shelf := Shelf()), station(shelf)
    one = parked(here, WIDE[:6], kind="\ud800")
    came = arrive(there, written(here, one, tokens=WIDE, key=key), WIDE[:6], key=key)
    assert (came.length, came.prompt.key, came.prompt.kind) == (6, ms.tokens.encode(WIDE), "?")
    refused(
        there.mem, ms.InvalidArgument, "come first", lambda: there.mem.admit([ms.Request(0, tokens=OTHER, resume=came)])
    )
    there.scribble()
    (row,) = there.resume([came], tokens=[*WIDE, 5])
    there.step([row], 3)
    there.finish()


def test_a_request_without_tokens_travels_without_records() -> None:
    here, there = station(shelf := Shelf()), station(shelf)
    (row,) = here.admit(TEXT[:5])
    (one,) = here.park(row)
    came = arrive(there, written(here, one), TEXT[:5])
    assert not shelf.asked("put") and came.length == 0
    there.resume([came])
    there.finish()


def test_a_manifest_can_be_read_twice() -> None:
    """Whose turn it is says the owner of the request. Neither copy shares a record with the other."""
    here, there = station(shelf := Shelf()), station(shelf)
    manifest = written(here, parked(here))
    both = [arrive(there, manifest, TEXT[:11]) for _ in range(2)]
    there.mem.drop(both[:1])
    del there.text[both[0]]
    there.scribble()
    there.resume(both[1:])
    there.finish()


@pytest.mark.parametrize(("rows", "steps", "pending"), [(ROWS, [3, 1], 1), (ROWS, [4], 0), (FILLED, [4], 0)])
def test_memory_of_rows_travels(rows: ms.StateLayout, steps: list[int], pending: int) -> None:
    """To managers whose rows have such memory. Others refuse it, and leave the records where they are."""
    shelf = Shelf()
    tail = 2 if rows is ROWS else 0
    tiers = lambda: ms.Tiers("toy", host_slots=4, write="back", ahead=0, store=shelf, executor=AtOnce())  # noqa: E731
    make = lambda **more: tailed(**{"tiers": tiers(), "tracking": ms.Redirect(PAGE)} | more)  # noqa: E731
    here, there = (make(rows=rows, tail=tail) for _ in range(2))
    (row,) = here.admit([ms.Request(0, 40)])
    for n, defer in zip(steps, [None, 4], strict=False):
        here.settle(here.plan([row], n) if defer is None else here.plan([row], n, defer=defer))
    for plane in here.planes.rows.values():
        plane[:, row.index] = 31
    here.submit()
    (one,) = here.park([row])
    manifest = over(here, here.tiers.write(one)).manifest
    before = dict(shelf.records)
    for other in (make(rows=None, tail=0), make(rows=None), make(rows=FILLED if rows is ROWS else ROWS)):
        refused(other, ms.InvalidArgument, "of another model, layout", lambda other=other: other.tiers.read(manifest))
    assert shelf.records == before and not shelf.asked("discard")
    trip = over(there, there.tiers.read(manifest))
    (row,) = there.admit([ms.Request(0, 40, resume=trip.parked)])
    there.submit()
    assert (there.info(row).length, trip.parked.pending) == (4, pending)
    if pending or rows is FILLED:
        assert all((plane[:, row.index] == 31).all() for plane in there.planes.rows.values())
    there.audit().raise_if_leaking()


def test_a_session_travels_without_memory_of_a_row() -> None:
    """Its turn has ended. The row that goes on has fresh memory."""
    shelf = Shelf()
    tiers = lambda: ms.Tiers("toy", host_slots=4, write="back", ahead=0, store=shelf, executor=AtOnce())  # noqa: E731
    here, there = (tailed(FILLED, 0, tiers=tiers(), tracking=ms.Redirect(PAGE)) for _ in range(2))
    talk = here.sessions.open("talk")
    (row,) = here.admit([ms.Request(0, tokens=TEXT[:5], session=talk)])
    here.settle(here.plan([row], 4))
    here.settle(here.plan([row], 1))
    here.end([row], keep="cache", tokens=[TEXT[:5]])
    here.submit()
    (one,) = here.park([talk])
    trip = over(there, there.tiers.read(over(here, here.tiers.write(one)).manifest))
    for plane in there.planes.rows.values():
        plane[:] = 5
    (row,) = there.admit([ms.Request(0, 40, resume=trip.parked)])
    there.submit()
    assert (one.memory, trip.parked.memory, there.info(row).length) == (False, False, 5)
    assert all((plane[:, row.index] == 77).all() for plane in there.planes.rows.values())
    there.audit().raise_if_leaking()


# -- what is sent ----------------------------------------------------------------------------------


def test_what_the_store_has_is_not_sent() -> None:
    """Of a prompt that was published, only the state and the last page go. A second write sends nothing."""
    here, there = station(shelf := Shelf(), write="through"), station(shelf)
    (row,) = here.start(TEXT[:11])
    here.mem.publish([row], keep="cache", tokens=[TEXT[:11]])
    for _ in range(3):
        here.mem.submit()
        here.mem.poll()
    assert sorted(name.split("-")[0] for name in shelf.asked("put")) == ["kv", "kv", "state"]
    shelf.calls.clear()
    (one,) = here.park(row, known=True)
    manifest = written(here, one)
    assert sorted(name.split("-")[0] for name in shelf.asked("put")) == ["kv", "state"]
    shelf.calls.clear()
    assert written(here, one) == manifest and not shelf.asked("put")
    there.scribble()
    there.resume([arrive(there, manifest, TEXT[:11])])
    there.finish()


def test_after_a_pre_copy_the_freeze_moves_a_state_and_two_pages_at_most() -> None:
    """Publications send what is whole while the request runs, one step late. It parks in a step, at any length."""
    found = set()
    for n in range(2 * PAGE, 3 * PAGE):
        here = Station({"store": (shelf := Shelf()), "write": "through"}, tracking=ms.Redirect(PAGE))
        (row,) = here.admit(TEXT[:1])
        here.text[row] = TEXT[: n + 1]  # said after a prompt of one token
        while here.mem.info(row).length < n:
            here.step([row], 1)
            here.mem.publish([row], keep="cache", tokens=[TEXT[: n + 1]])
            here.mem.submit()
            here.mem.poll()
        before, sent = here.below.host.moved, len(shelf.asked("put"))
        (one,) = here.step([row], 1, lambda step, here=here, row=row: here.park(row, known=True))
        written(here, one)
        states, _, pages, _ = (now - then for now, then in zip(here.below.host.moved, before, strict=True))
        assert (states, len(shelf.asked("put")) - sent) == (1, 1 + pages)
        found.add(pages)
    assert found == {1, 2}


@pytest.mark.parametrize("key", [b"", b"key"])
@pytest.mark.parametrize("n", [1, 8, 63])
def test_a_manifest_is_small(n: int, key: bytes) -> None:
    here = station(Shelf())
    manifest = written(here, parked(here, TEXT[:n]), key=key)
    assert len(manifest) <= 2**10 + 8 * n + 65 * -(-n // PAGE)


def test_a_manifest_that_nobody_would_read_is_not_written() -> None:
    """The limit is 16 MiB. Nothing is sent, and the request stays."""
    here, there = station(shelf := Shelf()), station(shelf)
    rows = here.start(TEXT[:5], OTHER[:5])
    large, fits = here.mem.park(rows, user=[bytes(2**24), bytes(2**24 - 2**11)])
    here.text.clear()
    refused(here.mem, ms.InvalidArgument, "16777216 at most", lambda: here.below.write(large))
    tokens = [*TEXT[:5], *[0] * 2**21]
    refused(here.mem, ms.InvalidArgument, "16777216 at most", lambda: here.below.write(large, tokens))
    assert not shelf.calls
    assert arrive(there, written(here, fits), OTHER[:5]).user == fits.user


def test_a_manifest_is_read_from_any_view_of_its_bytes() -> None:
    """Entries of a view may be wider than a byte. Other views are refused."""
    there = station(Shelf())
    empty = len(parcel.pack("", Parked(5, 0, EMPTY), [], b""))
    manifest = parcel.pack("", Parked(5, 0, EMPTY, bytes(-empty % 8)), [], b"")
    for view in (bytearray(manifest), memoryview(manifest), memoryview(manifest).cast("Q")):
        assert parcel.unpack(view, "", None, b"")[0].length == 5  # type: ignore[arg-type]
    for bad in (memoryview(manifest)[::2], memoryview(b"1").cast("B", []), manifest.hex()):
        refused(there.mem, ms.InvalidArgument, "manifest", lambda bad=bad: there.below.read(bad))


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [b"", b"key"])
def test_B86_no_flipped_bit_and_no_cut_is_accepted(key: bytes) -> None:
    here, there = station(shelf := Shelf()), station(shelf)
    manifest = written(here, parked(here, TEXT[:5]), key=key)
    shelf.calls.clear()
    before = whole(there.mem)
    flipped = [manifest[:at] + bytes([manifest[at] ^ 1 << at % 8]) + manifest[at + 1 :] for at in range(len(manifest))]
    cut = [manifest[:end] for end in range(len(manifest))]
    for bad in (*flipped, *cut, manifest[1:], manifest + b"\0", b"", bytes(2**24 + 64)):
        with pytest.raises(ms.InvalidArgument, match="no manifest"):
            there.below.read(bad, key=key)
    assert whole(there.mem) == before and not shelf.calls


def test_numbers_that_contradict_each_other_are_refused_under_any_digest() -> None:
    """Without a key, anybody can seal a manifest. Each bit of the numbers in its head is turned."""
    here, there = station(shelf := Shelf()), station(shelf)
    one = parked(here, TEXT[:5])
    manifest = written(here, one)
    refused_, failed = 0, 0
    first = manifest.index(b"\0") + 1
    for at, bit in product(range(first, first + parcel._NUMBERS.size), range(8)):
        bad = sealed(manifest[:at] + bytes([manifest[at] ^ 1 << bit]) + manifest[at + 1 :])
        try:
            trip = there.below.read(bad)
        except (ms.InvalidArgument, ms.OutOfRecords):
            refused_ += 1
        else:  # another length, with as many records of its own: they do not stand for it
            failed += bool(over(there.mem, trip).why)
    assert refused_ + failed == 8 * parcel._NUMBERS.size and failed < 4 and not shelf.asked("discard")
    there.mem.audit().raise_if_leaking()
    assert len(there.below.parked) == 0


@pytest.mark.parametrize(
    "other", [{"salt": "b"}, {"salt": None}, {"key": b""}, {"key": b"other"}], ids=lambda other: str(other)
)
def test_B86_another_key_or_salt_is_refused(other: dict[str, Any]) -> None:
    here, there = station(shelf := Shelf()), station(shelf)
    manifest = written(here, parked(here, salt="a"), key=b"key")
    says = "sealed with another key" if "key" in other else "or salt"
    given = {"salt": "a", "key": b"key"} | other
    refused(there.mem, ms.InvalidArgument, says, lambda: there.below.read(manifest, **given))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"model": "other\n"}, r"model='toy', here model='other\\n'"),
        ({"page_size": 2 * PAGE}, f"page size={PAGE}, here page size={2 * PAGE}"),
        ({"rank": 1}, "rank=0 of 2, here rank=1 of 2"),
        ({"planes": LAYOUT.planes[:1]}, r"layout=\w{64}, here layout=\w{64}"),
    ],
    ids=["model", "page size", "rank", "layout"],
)
def test_B86_another_model_layout_page_size_or_rank_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    shelf = Shelf()

    def make(planes: Any = LAYOUT.planes, page_size: int = PAGE, model: str = "toy", rank: int = 0) -> ms.StateManager:
        tiers = ms.Tiers(model, host_slots=4, store=shelf, executor=AtOnce(), rank=rank, ranks=2, group=object())
        layout = ms.StateLayout(planes, layers=2)
        return on(CPU, layout, slots=8, max_requests=3, prefix=ms.Prefix(), page_size=page_size, tiers=tiers)

    here, there = make(), make(**other)
    (row,) = here.admit([ms.Request(0, 9)])
    here.settle(here.plan([row], 9))
    (one,) = here.park([row])
    manifest = over(here, here.tiers.write(one)).manifest
    wrong = f"of another model, layout, page size, rank or salt: {says}$"
    refused(there, ms.InvalidArgument, wrong, lambda: there.tiers.read(manifest))


@pytest.mark.parametrize(
    ("says", "call"),
    [
        ("manifest of NoneType", lambda below, one: below.read(None)),
        ("manifest of str", lambda below, one: below.read("manifest")),
        ("manifest of list", lambda below, one: below.read([1, 2])),
        ("key= of str", lambda below, one: below.read(b"", key="k")),
        ("key= of NoneType", lambda below, one: below.write(one, key=None)),
        ("at most 64 bytes", lambda below, one: below.write(one, key=bytes(65))),
        ("seconds=None", lambda below, one: below.read(b"", seconds=None)),
        ("seconds=nan", lambda below, one: below.read(b"", seconds=float("nan"))),
        ("seconds=-1", lambda below, one: below.write(one, seconds=-1)),
        ("seconds='3'", lambda below, one: below.write(one, seconds="3")),
        ("no parked request", lambda below, one: below.write("request")),
        ("no parked request", lambda below, one: below.write([one])),
        ("come first", lambda below, one: below.write(one, TEXT[:3])),
        ("come first", lambda below, one: below.write(one, OTHER)),
        ("whole numbers", lambda below, one: below.write(one, [1.5])),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(says: str, call: Callable[..., object]) -> None:
    here = station(Shelf())
    one = parked(here)
    refused(here.mem, ms.InvalidArgument, says, lambda: call(here.below, one))
    written(here, one)


@pytest.mark.parametrize(
    "wrong", [0, "", [], {}, torch.zeros(1, 2), [b"", b""]], ids=lambda value: type(value).__name__
)
def test_park_wants_tokens_and_bytes_for_each_handle(wrong: Any) -> None:
    here = station(Shelf())
    rows = here.start(TEXT[:5])
    refused(here.mem, ms.InvalidArgument, "expected", lambda: here.mem.park(rows, wrong))
    refused(here.mem, ms.InvalidArgument, "expected", lambda: here.mem.park(rows, user=wrong))


def test_handles_of_others_and_managers_without_storage_are_refused() -> None:
    here, there, bare = station(shelf := Shelf()), station(shelf), Station()
    one = parked(here)
    manifest = written(here, one)
    refused(there.mem, ms.StaleHandle, "another manager", lambda: there.below.write(one))
    for call in (lambda: bare.below.read(manifest), lambda: bare.below.write(parked(bare))):
        with pytest.raises(ms.ConfigurationError, match="no storage"):
            call()
    here.resume([one])
    refused(here.mem, ms.StaleHandle, "it went on", lambda: here.below.write(one))


def test_too_little_host_memory_is_back_pressure() -> None:
    """A read takes what nobody needs, and claims nothing if that is too little."""
    here = station(shelf := Shelf())
    manifest = written(here, parked(here))
    there = station(shelf, host_slots=1)
    mine = parked(there, OTHER[:5])
    refused(there.mem, ms.OutOfRecords, "1 state records", lambda: there.below.read(manifest))
    there.mem.drop([mine])
    there.text.clear()
    there.resume([arrive(there, manifest, TEXT[:11])])
    there.finish()
    small = station(shelf, host_pages=2)
    refused(small.mem, ms.OutOfRecords, "3 kv records", lambda: small.below.read(manifest))


# -- what fails on the way -------------------------------------------------------------------------


class Liar(Shelf):
    """A store whose next answers to one method are wrong. `wrong`: method -> function of its right answer."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, Callable[[Any], Any]] = {}

    def exists(self, names: Sequence[str]) -> Any:
        return self.wrong.get("exists", lambda told: told)(super().exists(names))

    def put(self, names: Sequence[str], buffers: Any) -> Any:
        return self.wrong.get("put", lambda told: told)(super().put(names, buffers))

    def get(self, names: Sequence[str], buffers: Any) -> Any:
        return self.wrong.get("get", lambda told: told)(super().get(names, buffers))


def fails(told: Any) -> Any:
    raise ConnectionResetError("storage went away")


WRONG = {"raises": fails, "too few": lambda told: told[:-1], "too many": lambda told: [*told, told[0]],
         "nothing": lambda told: None, "numbers": lambda told: [7 for _ in told]}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("method", ["exists", "put", "get"])
def test_a_store_that_fails_fails_the_trip_only(method: str, what: str) -> None:
    """The request stays, and a second try succeeds. Records of the try that failed are not sent again."""
    here, there = station(shelf := Liar()), station(shelf)
    one = parked(here)
    shelf.wrong = {method: WRONG[what]}
    trip = over(here.mem, here.below.write(one))
    assert bool(trip.manifest) == (not trip.why) == (method == "get" or (method, what) == ("exists", "numbers"))
    manifest = trip.manifest
    if method != "get" and manifest is None:
        shelf.wrong = {}
        manifest = written(here, one)
    free = whole(there.mem)
    trip = over(there.mem, there.below.read(manifest))
    if method == "get" or (method, what) == ("exists", "numbers"):
        assert trip.why and trip.parked is None and whole(there.mem)["records"] == free["records"]
        return
    assert trip.parked is not None
    here.resume([one])


def test_a_write_fails_whose_first_records_made_way_for_the_last_ones(tmp_path: Path) -> None:
    here = station(store := FileStore(tmp_path, capacity=1000))
    one = parked(here)
    trip = over(here.mem, here.below.write(one))
    assert store.evicted and trip.manifest is None and trip.why.endswith("raise its capacity')")
    here.resume([one])


@pytest.mark.parametrize("fault", ["vanished", "half", "garbage", "denied", "raises"])
@pytest.mark.parametrize("kind", ["state", "kv"])
def test_a_record_that_is_missing_or_damaged_fails_the_read(kind: str, fault: str) -> None:
    here, there = station(shelf := Shelf()), station(shelf)
    manifest = written(here, parked(here))
    shelf.faults[max(name for name in shelf.records if name.startswith(kind))] = fault
    before = whole(there.mem)
    trip = over(there.mem, there.below.read(manifest))
    assert trip.parked is None and ("record" in trip.why or "went away" in trip.why) and " '" not in trip.why
    assert whole(there.mem)["records"] == before["records"] and len(there.below.parked) == 0


def test_a_sound_record_of_another_writer_is_refused_with_a_key() -> None:
    """Whoever writes to the store can seal a record. Its digest is in the manifest."""
    here, there = station(shelf := Shelf()), station(shelf)
    keyed, open_ = (written(here, parked(here, TEXT[:5], known=False), key=key) for key in (b"key", b""))
    form = here.below.host.states.form
    for name in [name for name in shelf.records if name.startswith("state")]:
        shelf.records[name] = forged(form, shelf.records[name], name, 5)
    assert "other bytes than its manifest says" in over(there.mem, there.below.read(keyed, key=b"key")).why
    assert over(there.mem, there.below.read(open_)).parked, "a store without a key must be private"


def forged(form: Any, record: bytes, name: str, length: int) -> bytes:
    """Returns a sound record of other bytes under the same name."""
    bytes_ = torch.frombuffer(bytearray(record), dtype=torch.uint8).numpy()
    bytes_[form.header_bytes] ^= 1
    form.seal(bytes_, bytes.fromhex(name.split("-")[1]), length)
    return bytes_.tobytes()


@pytest.mark.parametrize("key", [b"", b"key"])
def test_a_page_that_the_store_has_under_its_usual_key_is_its_own_affair(key: bytes) -> None:
    """It may have other bytes, as those of another machine have. Prompts would use it, too."""
    here, there = station(shelf := Shelf()), station(shelf)
    one = parked(here)
    manifest, form = written(here, one, key=key), here.below.host.kv.form
    usual = [form.name(part.key) for part in here.below.parked._of[one] if part.key]
    shelf.records |= {name: forged(form, shelf.records[name], name, PAGE * n) for n, name in enumerate(usual, 1)}
    trip = over(there.mem, there.below.read(manifest, key=key))
    assert len(usual) == 2 and trip.parked is not None and len(manifest) < len(shelf.records) * 64 + 600


def test_a_made_up_manifest_deletes_no_record_of_others() -> None:
    """It names the page of somebody else in place of its own last page, so that the record has a flaw."""
    here, there = station(shelf := Shelf()), station(shelf)
    one = parked(here)
    manifest, parts = written(here, one), here.below.parked._of[one]
    own = next(part.entry.key for part in parts if part.of is here.below.host.of_kv and not part.key and part.entry)
    bad = sealed(manifest.replace(own, parts[0].key))
    before = dict(shelf.records)
    trip = over(there.mem, there.below.read(bad))
    assert ": foreign" in trip.why and shelf.records == before and not shelf.asked("discard")


# -- late, cancelled, lost -------------------------------------------------------------------------


def begun(write: bool, when: str) -> tuple[Station, Trip, ByHand, Clock]:
    """Returns a trip, before its thread has begun, or while it runs, or when it is done and not polled."""
    shelf, hand, clock = Shelf(), ByHand(), Clock()
    at = station(shelf, clock=clock)
    one = parked(at)
    manifest = None if write else written(at, one)
    at.below._workers.executor = hand
    trip = at.below.write(one) if write else at.below.read(manifest)
    at.mem.poll()
    assert len(hand.jobs) == 1
    if when != "queued":
        assert hand.jobs[0].begin()
    if when == "done":
        hand.jobs[0].finish()
    return at, trip, hand, clock


def late(at: Station, trip: Trip, clock: Clock) -> None:
    clock.advance(31)


def cancelled(at: Station, trip: Trip, clock: Clock) -> None:
    trip.cancel("")  # it has failed, whatever the reason


@pytest.mark.parametrize("end", [late, cancelled])
@pytest.mark.parametrize("when", ["queued", "runs", "done"])
@pytest.mark.parametrize("write", [True, False])
def test_a_trip_ends_at_any_moment(
    write: bool, when: str, end: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its records are pinned until the thread is done with them, and free then. The log has one line."""
    at, trip, hand, clock = begun(write, when)
    (one, *_) = list(at.below.parked._of)
    end(at, trip, clock)
    at.mem.poll()
    assert trip.done and trip.why == end.__name__ and trip.manifest is None and trip.parked is None
    at.mem.audit().raise_if_leaking()
    assert len(at.below.parked) == (1 if when == "done" else 2), "the thread has the records still"
    if when == "queued":
        hand.jobs[0].begin()
    if when != "done":
        hand.jobs[0].finish()
    at.mem.poll()
    assert list(at.below.parked._of) == [one] and not at.below.parked.trips
    trip.cancel("again")
    told = [text for record in caplog.records if "trip" in (text := record.getMessage())]
    assert trip.why == end.__name__ and told == [f"trip failed tokens=11 why={trip.why!r}"]
    at.resume([one])
    at.finish()
    assert all(each.cache.pool.claimed == 0 for each in at.below.host.sets)


@pytest.mark.parametrize("seconds", [10**400, float("inf")])
def test_a_trip_may_take_any_number_of_seconds(seconds: float) -> None:
    here = station(Shelf())
    one = parked(here)
    came = over(here.mem, here.below.read(written(here, one, seconds=seconds), seconds=seconds))
    assert came.parked is not None and not came.why


@pytest.mark.parametrize("how", ["resume", "drop"])
@pytest.mark.parametrize("when", ["before", "queued", "runs", "done"])
def test_a_request_goes_on_or_ends_while_it_is_written(how: str, when: str) -> None:
    """The trip succeeds, with the bytes of the request as it was parked, also if a part was still on the device."""
    if when == "before":
        at = station(Shelf(), host_pages=3)
        other, one = at.park(*at.start(OTHER[:11], TEXT[:11]))
        trip, hand = at.below.write(one), ByHand()
        at.mem.poll()
        assert not trip.done and trip.job is None and len(at.below.parked.above) == 3
        hasty = over(at.mem, at.below.write(one, seconds=0))
        assert hasty.why == "late, before it began: poll more often, or take more host_pages"
    else:
        at, trip, hand, _ = begun(True, when)
        one = trip.of
    if how == "resume":
        (row,) = at.resume([one])
        at.step([row], 2)
    else:
        at.mem.drop([one])
        del at.text[one]
    if when != "done":
        with pytest.raises(ms.InvalidArgument, match="on their way"):
            at.mem.close()
    if when == "before":
        at.mem.drop([other])
        del at.text[other]
    for each in hand.jobs if when in {"queued", "runs"} else ():
        each.begun = when == "runs" or each.begin()
        each.finish()
    at.below._workers.executor = AtOnce()
    over(at.mem, trip)
    assert trip.manifest is not None and not trip.why
    at.mem.end([row for row in at.text if isinstance(row, ms.Row)])
    at.text.clear()
    at.scribble()
    at.resume([arrive(at, trip.manifest, TEXT[:11])])
    at.finish()


def test_a_request_that_is_still_read_can_neither_end_nor_go_on() -> None:
    """Nobody has its handle. So no record is freed while a thread writes into it."""
    at, trip, hand, _ = begun(False, "runs")
    assert trip.parked is None and trip.of not in at.below.parked._of
    for call in (lambda: at.mem.drop([trip.of]), lambda: at.mem.admit([ms.Request("r", resume=trip.of)])):
        refused(at.mem, ms.StaleHandle, "parked request of 11 tokens", call)
    hand.jobs[0].finish()
    came = over(at.mem, trip).parked
    at.mem.drop([came])
    at.resume(list(at.text))
    at.finish()


@pytest.mark.parametrize("how", ["clear", "recover"])
@pytest.mark.parametrize("write", [True, False])
def test_trips_are_lost_when_host_memory_is_emptied(how: str, write: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The log counts each request once, and none that is still to come."""
    at, trip, hand, _ = begun(write, "queued")
    at.below.clear() if how == "clear" else at.mem.recover(keep=False)
    told = [text for record in caplog.records if "lost" in (text := record.getMessage())]
    assert trip.done and trip.why == "lost in recover() or clear()" and not at.below.parked.trips
    assert told == ["parked requests lost requests=1", f"trip failed tokens=11 why={trip.why!r}"]
    at.text.clear()
    job(hand)  # its thread comes late: it does no work
    at.mem.poll()
    assert trip.parked is None and trip.manifest is None
    at.finish()


def test_a_write_that_ends_early_leaves_what_an_earlier_manifest_names() -> None:
    here, there = station(shelf := Shelf()), station(shelf)
    one = parked(here, known=False)
    manifest = written(here, one)
    here.below._workers.executor = hand = ByHand()
    trip = here.below.write(one)
    here.mem.poll()
    trip.cancel()
    job(hand)
    over(here.mem, trip)
    assert trip.why == "cancelled"
    here.mem.drop([one])
    here.text.clear()
    there.resume([arrive(there, manifest, TEXT[:11])])
    there.finish()
