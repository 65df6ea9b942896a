"""Records: sealed bytes follow docs/record-format.md, and every damage is found."""

import random
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstate import Plane, StateLayout
from memstate.errors import InvalidArgument
from memstate.tiers import records as module
from memstate.tiers.keys import fingerprint
from memstate.tiers.records import FLAWS, RecordFormat
from memstate.tiers.stores.base import Bytes
from tests.support.given import in_order

ROOT = Path(__file__).parents[2]
SMALL = StateLayout((Plane("conv", (3,), torch.bfloat16), Plane("ssm", (2, 5), torch.int16)), layers=2)
LAYOUTS = {
    "small": SMALL,
    "no padding": StateLayout((Plane("ssm", (4, 4), torch.float32),), layers=3),
    "one byte": StateLayout((Plane("flag", (), torch.int8),), layers=1),
    "an empty plane": StateLayout((Plane("none", (0,), torch.int8), Plane("c", (17,), torch.int8)), layers=2),
    "nothing": StateLayout((Plane("none", (0, 3), torch.float32),), layers=2),
    "many planes": StateLayout(tuple(Plane(f"p{n}", (n,), torch.int8) for n in range(9)), layers=5),
    "layers of their own": StateLayout(
        (
            Plane("a", (3,), torch.int8, layers=3),
            Plane("b", (5,), torch.int16),
            Plane("c", (17,), torch.int8, layers=1),
        ),
        2,
    ),
    "pages": StateLayout((Plane("k", (4, 2, 3), torch.float16), Plane("v", (4, 2, 3), torch.float16)), layers=2),
}
PRINT, KEY, LENGTH = fingerprint("model", SMALL, None, 4, 0, 1), bytes(range(32)), 1024
STATE = RecordFormat("state", SMALL, PRINT)

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def garbage(size: int, seed: int = 0) -> Bytes:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(size)), np.uint8)


def sealed(form: RecordFormat, seed: int = 0, key: bytes = KEY, length: int = LENGTH) -> Bytes:
    buffer = garbage(form.nbytes, seed)
    form.seal(buffer, key, length)
    return buffer


def payload(form: RecordFormat) -> np.ndarray[Any, Any]:
    """Returns a mask of the bytes of a record that hold elements of planes, not header or padding."""
    marks, at = np.zeros(form.nbytes, bool), form.header_bytes
    for plane, _ in in_order(form.layout):
        marks[at : at + plane.nbytes] = True
        at += -(-plane.nbytes // 16) * 16
    assert at == form.nbytes
    return marks


def number(record: Bytes, at: int, size: int) -> int:
    return int.from_bytes(record[at : at + size].tobytes(), "little")


@every_layout
@pytest.mark.parametrize("kind", ["state", "kv"])
def test_record_is_what_the_document_says(kind: Any, layout: StateLayout) -> None:
    """Checks every byte with the numbers of the document alone."""
    form = RecordFormat(kind, layout, PRINT)
    before = garbage(form.nbytes)
    record = sealed(form)
    planes = len(layout.planes)
    assert form.header_bytes == -(-(104 + 4 * planes) // 64) * 64
    assert form.body_bytes == sum(-(-plane.nbytes // 16) * 16 for plane, _ in in_order(layout))
    assert record[:8].tobytes() == b"memstate"
    assert (number(record, 8, 2), number(record, 10, 2)) == (1, {"state": 1, "kv": 2}[kind])
    assert number(record, 12, 4) == form.header_bytes
    assert (record[16:48].tobytes(), record[48:80].tobytes()) == (PRINT, KEY)
    assert (number(record, 80, 8), number(record, 88, 8), number(record, 96, 4)) == (LENGTH, form.body_bytes, planes)
    at, sums = form.header_bytes, dict.fromkeys(layout.planes, 0)
    for plane, _ in in_order(layout):
        block = -(-plane.nbytes // 16) * 16
        sums[plane] = zlib.crc32(record[at : at + block].tobytes(), sums[plane])
        at += block
    assert [number(record, 100 + 4 * index, 4) for index in range(planes)] == list(sums.values())
    assert not record[100 + 4 * planes : form.header_bytes - 4].any()
    assert number(record, form.header_bytes - 4, 4) == zlib.crc32(record[: form.header_bytes - 4])
    marks = payload(form)
    assert (record[marks] == before[marks]).all()
    assert not record[form.header_bytes :][~marks[form.header_bytes :]].any()
    assert form.flaw(record, KEY, LENGTH) == ""


def test_document_has_the_offsets_of_the_header() -> None:
    table = re.findall(r"^\| (\d+) \| (\d+) \|", (ROOT / "docs" / "record-format.md").read_text(), re.MULTILINE)
    assert [(int(at), int(size)) for at, size in table] == [
        (0, 8), (8, 2), (10, 2), (12, 4), (16, 32), (48, 32), (80, 8), (88, 8), (96, 4)
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("alignment", [16, 256])
def test_the_order_on_the_device_is_not_in_the_record(order: str, alignment: int) -> None:
    form = RecordFormat("state", replace(SMALL, order=order, alignment=alignment), PRINT)
    assert (form.nbytes, form.header_bytes, form.layout) == (STATE.nbytes, STATE.header_bytes, STATE.layout)
    assert sealed(form).tobytes() == sealed(STATE).tobytes()


@pytest.mark.parametrize("name", ["small", "many planes", "layers of their own"])
def test_B67_B79_every_flipped_bit_is_found(name: str) -> None:
    """No byte of a record is left out, padding included."""
    form = RecordFormat("state", LAYOUTS[name], PRINT)
    record = sealed(form)
    for at in range(form.nbytes):
        expected = "checksum" if at >= form.header_bytes else "magic" if at < 8 else "version" if at < 10 else "header"
        for bit in range(8):
            record[at] ^= 1 << bit
            assert form.flaw(record, KEY, LENGTH) == expected, f"bit {bit} of byte {at}"
            record[at] ^= 1 << bit
    assert form.flaw(record, KEY, LENGTH) == ""


def test_B67_every_truncation_is_found() -> None:
    record = sealed(STATE)
    for size in range(STATE.nbytes):
        assert STATE.flaw(record[:size], KEY, LENGTH) == "truncated"
        half = garbage(STATE.nbytes, 1)  # the rest of the buffer has older bytes
        half[:size] = record[:size]
        assert STATE.flaw(half, KEY, LENGTH) in FLAWS
        half[size:] = 0
        assert STATE.flaw(half, KEY, LENGTH) in (FLAWS if record[size:].any() else "")
    assert STATE.flaw(np.append(record, record[:1]), KEY, LENGTH) == "truncated"


def test_B67_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (0, 2, 256, 65535):
        with monkeypatch.context() as patch:
            patch.setattr(module, "VERSION", version)
            record = sealed(STATE)
            assert STATE.flaw(record, KEY, LENGTH) == ""
        assert STATE.flaw(record, KEY, LENGTH) == "version"


def test_B67_foreign_records_are_refused() -> None:
    """Each record is undamaged, but has another key, length, kind or fingerprint."""
    record = sealed(STATE)
    assert STATE.flaw(record, KEY[::-1], LENGTH) == "foreign"
    assert STATE.flaw(record, KEY[:31], LENGTH) == "foreign"
    assert [STATE.flaw(record, KEY, length) for length in (LENGTH - 1, 0, -1, 2**70)] == ["foreign"] * 4
    assert RecordFormat("kv", SMALL, PRINT).flaw(record, KEY, LENGTH) == "foreign"
    assert RecordFormat("state", SMALL, PRINT[::-1]).flaw(record, KEY, LENGTH) == "foreign"


def test_B67_records_of_other_planes_are_foreign() -> None:
    """The records have equal sizes, but other planes, or a header of another size."""
    shapes = {"layers": (16, 1, 3), "planes": (16, 3, 1), "short": (512, 1, 1), "long": (16, 24, 1)}
    forms = {}
    for name, (nbytes, planes, layers) in shapes.items():
        layout = StateLayout(tuple(Plane(f"p{n}", (nbytes,), torch.int8) for n in range(planes)), layers)
        forms[name] = RecordFormat("state", layout, PRINT)
    assert (forms["short"].header_bytes, forms["long"].header_bytes) == (128, 256)
    for one, other in (("layers", "planes"), ("planes", "layers"), ("short", "long"), ("long", "short")):
        reader, writer = forms[one], forms[other]
        assert reader.nbytes == writer.nbytes
        assert reader.flaw(sealed(writer), KEY, LENGTH) == "foreign"


@given(st.binary(max_size=STATE.nbytes + 8), st.integers(0, STATE.nbytes))
def test_garbage_never_raises(data: bytes, at: int) -> None:
    assert STATE.flaw(np.frombuffer(data, np.uint8), KEY, LENGTH) in FLAWS
    record = sealed(STATE)
    before = record.tobytes()
    record[at : at + len(data)] = np.frombuffer(data, np.uint8)[: STATE.nbytes - at]
    assert (STATE.flaw(record, KEY, LENGTH) == "") == (record.tobytes() == before)


BUFFERS = [garbage(STATE.nbytes - 1), garbage(STATE.nbytes + 1), garbage(2 * STATE.nbytes)[::2],
           garbage(STATE.nbytes).view(np.int8), garbage(STATE.nbytes).reshape(2, -1)]  # fmt: skip
REFUSED: list[tuple[Any, Any, str]] = [  # a call, the buffer, the message
    *((lambda _, key=key: STATE.name(key), None, "expected 32 bytes") for key in (b"", bytes(33), bytearray(32), None)),
    *((lambda buffer, key=key: STATE.seal(buffer, key, 1), garbage(STATE.nbytes), "expected 32 bytes")
      for key in (b"", bytes(31), "k" * 32)),
    *((lambda buffer, n=n: STATE.seal(buffer, KEY, n), garbage(STATE.nbytes), f"length={n}") for n in (0, -1, 2**63)),
    *((lambda buffer: STATE.seal(buffer, KEY, 1), each, f"expected {STATE.nbytes} contiguous") for each in BUFFERS),
    *((lambda _, form=form: RecordFormat(form[0], SMALL, form[1]), None, "expected")
      for form in (("page", PRINT), ("state", b"short"), ("kv", PRINT.hex()))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "buffer", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(call: Any, buffer: Any, message: str) -> None:
    before = None if buffer is None else buffer.copy()
    with pytest.raises(InvalidArgument, match=message):
        call(buffer)
    assert buffer is None or (buffer == before).all()
