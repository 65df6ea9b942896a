"""Sizes that cannot fit are refused by name, with the numbers, before anything is allocated."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate import container, sizes
from memstate.engine.sizing import require_fit
from memstate.tiers.host.pool import RecordPool

GIB = 2**30
HUGE = 10**9
PLAIN = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=1)
WIDE = ms.StateLayout((ms.Plane("ssm", (2**40,), torch.float32),), layers=1)
LONG = ms.StateLayout(PLAIN.planes, layers=1, rows=WIDE)  # each row, too, has memory of its own
GIVEN = {"ssm": torch.zeros(1, 9, 4)}
CPU = ms.Backend("reference")
SMALL: dict[str, Any] = {"slots": 8, "max_requests": 2, "backend": "reference"}


@pytest.fixture(autouse=True)
def sixteen_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "memory", lambda device: 16 * GIB)


@pytest.fixture
def nothing_big(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if torch or numpy allocate, or if the traced memory of Python grows by 1 MiB."""

    def refused(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            raise AssertionError(f"{name}{given} before the refusal")

        return call

    assert ms.StateManager  # imported now: the import allocates more than is allowed below
    for module, names in ((torch, ("zeros", "empty", "full")), (np, ("zeros", "empty", "full", "arange"))):
        for name in names:
            monkeypatch.setattr(module, name, refused(name))
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20, f"{peak} bytes before the refusal"


def manager(**settings: Any) -> Any:
    given = SMALL | settings
    return ms.StateManager(given.pop("layout", PLAIN), **given)


def pages(count: int, size: int, per_row: int) -> ms.Pages:
    return ms.Pages(count=count, size=size, per_row=per_row)


CANNOT: dict[str, tuple[Callable[[], object], str]] = {
    "rows": (lambda: manager(max_requests=HUGE), r"max_requests=1000000000.*2147483647"),
    "preallocated": (lambda: manager(preallocated=HUGE), r"preallocated=1000000000"),
    "rows beyond int32": (lambda: manager(max_requests=2**40), r"cells .*: lower max_requests, .*needs"),
    "numpy's rows": (lambda: manager(max_requests=np.int32(HUGE)), "8000000256 cells"),
    "batch": (lambda: manager(max_batch=HUGE), r"max_batch=1000000000.*on cpu, which has 17179869184 bytes "
              r".16\.0 GiB.: step records 20000001024 bytes.*lower max_batch"),
    "slots": (lambda: manager(slots=2**40), r"776 slots, .* 2147483616: .*planes 17592186044432 bytes"),
    "slots of memory": (
        lambda: manager(slots=HUGE), r"slots=1000000000.*planes 16000000016 bytes.*lower snapshots .default: slots."
    ),
    "plane": (lambda: manager(layout=WIDE), r"slots=8.*16\.0 GiB.: planes 39582418599936 bytes.*lower slots"),
    "rows with memory": (lambda: manager(layout=LONG), r"planes of rows 13194139533312 bytes.*lower max_requests"),
    "rows beside given planes": (
        lambda: manager(layout=LONG, tensors=GIVEN), r"planes of rows 13194139533312 bytes.*lower max_requests"
    ),
    "snapshots": (lambda: manager(snapshots=2**31 - 1), "snapshots=2147483647"),
    "per_row": (lambda: manager(pages=pages(1, 16, 2**31 - 1)), "per_row=2147483647"),
    "page lists": (
        lambda: manager(pages=pages(2**31 - 1, 16, 1)), r"count=2147483647.*page lists.*lower Pages\(count=\)"
    ),
    "pages": (lambda: pages(2**40, 16, 1), "count=1099511627776.*2147483647"),
    "a wide table": (lambda: pages(1, 16, 2**40), "per_row=1099511627776"),
    "Planes": (lambda: ms.Planes(WIDE, 1, CPU), "planes 8796093022208 bytes"),
    "Planes of slots": (lambda: ms.Planes(PLAIN, 2**40, CPU), "slots=1099511627776"),
    "SlotAllocator": (lambda: ms.SlotAllocator(2**40, CPU), "slots=1099511627776.*2147483616"),
    "StateLayout": (
        lambda: ms.StateLayout((ms.Plane("ssm", (2**40, 2**40), torch.float32),), layers=1), "per slot.*922337203685477"
    ),
    "records": (lambda: RecordPool(HUGE, 4096), "1000000000 records of 4096 bytes are 3.73 TiB"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_fit_is_refused_before_anything_is_allocated(case: str, nothing_big: None) -> None:
    build, text = CANNOT[case]
    with pytest.raises((ms.ConfigurationError, ms.InvalidArgument), match=text):
        build()


def test_a_gpu_has_its_own_memory_and_the_host_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots must fit in the memory of the device, and page lists in the memory of the host."""
    room = {"cuda": 80 * GIB, "cpu": 4 * GIB}
    monkeypatch.setattr(sizes, "memory", lambda device: room[device.type])
    layout = ms.StateLayout((ms.Plane("ssm", (2**20,), torch.float32),), layers=1)
    given: dict[str, Any] = {
        "given": False, "max_requests": 8, "preallocated": 0, "snapshots": 8, "pages": ms.Pages(size=1), "max_batch": 8,
        "device": torch.device("cuda"),
    }  # fmt: skip
    require_fit(layout, slots=10_000, **given)
    with pytest.raises(ms.ConfigurationError, match=r"on cuda.*lower slots"):
        require_fit(layout, slots=40_000, **given)
    require_fit(layout, slots=40_000, **given | {"given": True})  # the engine provides the memory
    with pytest.raises(ms.ConfigurationError, match=r"on the host.*page lists 4800000000 bytes.*lower Pages\(count=\)"):
        require_fit(layout, slots=8, **given | {"pages": ms.Pages(count=10**8, size=1, per_row=1)})


def test_the_memory_of_this_machine_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert isinstance(sizes.memory(torch.device("cpu")), int) and sizes.memory(torch.device("cpu")) > 2**20


V1 = "31 24 0:27 {} {} rw - cgroup cgroup rw,memory"
V2 = "30 24 0:26 {} {} rw - cgroup2 cgroup2 rw,nsdelegate"
OTHER = "22 28 0:21 / /proc rw shared:14 - proc proc rw"
MEM = "/sys/fs/cgroup/memory"
GROUPS: dict[str, tuple[str, list[str], dict[str, str], int | None]] = {
    "v2": ("0::/a/b", [OTHER, V2.format("/", "/sys/fs/cgroup")], {"a/b/memory.max": "3000000"}, 3000000),
    "around v2": (
        "0::/a/b", [V2.format("/", "/sys/fs/cgroup")], {"a/b/memory.max": "max", "a/memory.max": "2000000"}, 2000000,
    ),
    "a container of v2": ("0::/", [V2.format("/", "/sys/fs/cgroup")], {"memory.max": "4000000"}, 4000000),
    "v1": (
        "4:cpu:/c\n3:cpuacct,memory:/docker/x\n0::/", [V1.format("/", MEM), V2.format("/", "/sys/fs/cgroup/unified")],
        {"memory/docker/x/memory.limit_in_bytes": "5000000", "memory/docker/memory.limit_in_bytes": "6000000"}, 5000000,
    ),
    "v1 whose top is the container's own group": (
        "3:memory:/docker/x/in", [V1.format("/docker/x", MEM)],
        {"memory/memory.limit_in_bytes": "7000000", "memory/in/memory.limit_in_bytes": str(2**63 - 4096)}, 7000000,
    ),
    "a group outside of what is mounted": (
        "0::/../../x", [V2.format("/", "/sys/fs/cgroup")], {"memory.max": "9000000", "x/memory.max": "1"}, 9000000,
    ),
    "no limit": ("3:memory:/a\n0::/a", [V1.format("/", MEM)], {"memory/a/memory.limit_in_bytes": str(2**63 - 1)}, None),
    "max": ("0::/", [V2.format("/", "/sys/fs/cgroup")], {"memory.max": "max"}, None),
    "no files": ("0::/a", [V2.format("/", "/sys/fs/cgroup")], {}, None),
    "not mounted": ("0::/a", [OTHER], {}, None),
    "another form": ("what", ["is this"], {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_a_container_has_the_least_limit_of_its_groups(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the part of the host's memory that the container may use counts."""
    groups, mounts, files, expected = GROUPS[case]
    told = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts)}
    told |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    least = container.limit(tmp_path)
    assert least >= 2**63 - 4096 if expected is None else least == expected
    monkeypatch.undo()
    monkeypatch.setattr(container, "limit", lambda: least)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}[name])
    assert sizes.memory(torch.device("cpu")) == (expected or 2**32)
    if expected:
        with pytest.raises(ms.ConfigurationError, match=f"on cpu, which has {expected} bytes .0.0 GiB.: "):
            manager(slots=10**6)


def test_without_files_of_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert container.limit(tmp_path) == sys.maxsize
