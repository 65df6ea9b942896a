"""A manager over planes of rows, planes with a grid, and planes whose fresh value is not zero."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend

INF = float("inf")
TAIL = ms.StateLayout((ms.Plane("tail", (3,), torch.float32, fill=-1.0),), layers=2)
SCORE = ms.Plane("score", (2,), torch.float32, layers=1, fill=-INF, grid=4)
LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32), SCORE), layers=2, rows=TAIL)
STRATEGIES = [ms.Redirect(every=8), ms.PingPong(every=8), ms.LazyPingPong(every=8)]


def manager(backend: Backend, **settings: object) -> ms.StateManager:
    given = {"slots": 16, "max_requests": 4, "tracking": ms.Redirect(every=8)} | settings
    return ms.StateManager(LAYOUT, backend=backend.name, device=backend.device, **given)


def forward(mem: ms.StateManager, step: ms.Step, amount: float = 1.0) -> None:
    """Adds `amount` to the state and to the row's memory of each entry."""
    for row, read, write, snapshot in zip(
        step.rows.tolist(), step.read.tolist(), step.write.tolist(), step.snapshot.tolist(), strict=True
    ):
        for name in mem.planes:
            for layer in mem.planes[name]:
                layer[write] = layer[read] + amount
                layer[snapshot] = layer[write] if snapshot else layer[snapshot]
        mem.planes.rows["tail"][:, row] += amount
    mem.device.scrub_null()


def tail(mem: ms.StateManager, row: ms.Row) -> float:
    values = mem.planes.rows["tail"][:, row.index].unique()
    assert len(values) == 1
    return float(values)


@pytest.mark.parametrize("tracking", STRATEGIES, ids=repr)
def test_B81_the_memory_of_a_row_is_fresh_follows_forks_and_is_not_published(
    backend: Backend, tracking: ms.Tracking
) -> None:
    mem = manager(backend, tracking=tracking, pages=ms.Pages(size=4), prefix=ms.Prefix())
    mem.planes.rows["tail"].fill_(7.0)
    a, b = mem.admit([ms.Request("a", tokens=range(3)), ms.Request("b")])
    step = mem.plan([a, b], [8, 3])
    forward(mem, step)
    mem.settle(step)
    assert (tail(mem, a), tail(mem, b)) == (0.0, 0.0)
    step = mem.plan([a])
    forward(mem, step, 5.0)
    mem.settle(step)
    (c,) = mem.fork(a, ["c"]).rows
    mem.submit()
    assert (tail(mem, a), tail(mem, c), tail(mem, b)) == (5.0, 5.0, 0.0)
    mem.end([b])
    mem.end([c], keep="cache", tokens=[list(range(9))])
    d, e = mem.admit([ms.Request("d", tokens=[*range(8), 99]), ms.Request("e")])
    assert mem.info(d).length in (0, 8)
    mem.submit()
    assert (tail(mem, d), tail(mem, e), tail(mem, a)) == (-1.0, -1.0, 5.0)


def test_B81_a_row_that_a_coming_forward_uses_is_fresh_only_after_it(backend: Backend) -> None:
    mem = manager(backend, max_requests=1)
    (a,) = mem.admit([ms.Request("a")])
    open_step = mem.plan([a])
    row = a.index
    mem.end([a])
    (b,) = mem.admit([ms.Request("b")])
    assert b.index == row
    forward(mem, open_step)  # the forward of "a", which uses the row until now
    assert mem.planes.rows["tail"][:, row].unique().tolist() == [0.0]
    mem.plan([b])
    assert mem.planes.rows["tail"][:, row].unique().tolist() == [-1.0]


def test_B81_a_fork_of_a_row_that_has_just_begun_is_fresh(backend: Backend) -> None:
    """The fork waits for a later packet: one packet copies and fills memory in no fixed order."""
    mem = manager(backend)
    mem.planes.rows["tail"].fill_(7.0)
    (a,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([a], [8]))
    (b,) = mem.admit([ms.Request("b", resume=mem.end([a], keep="handle")[0])])
    launches = mem.backend.counts.launches
    launches.clear()
    (c,) = mem.fork(b, ["c"]).rows
    mem.submit()
    assert launches["run_rows"] == 2 and (tail(mem, b), tail(mem, c)) == (-1.0, -1.0)


def test_B81_reorder_copies_rows_before_one_that_ends_is_used_again(backend: Backend) -> None:
    mem = manager(backend)
    rows = mem.admit([ms.Request(name) for name in "abc"])
    step = mem.plan(rows)
    forward(mem, step)
    mem.settle(step)
    for number, row in enumerate(rows):
        mem.planes.rows["tail"][:, row.index] = 10.0 * number
    reordered = mem.reorder(rows, [1, 1, 2, 2])
    mem.submit()
    assert [tail(mem, row) for row in reordered.rows] == [10.0, 10.0, 20.0, 20.0]


def test_counts_of_a_step_with_and_without_rows(backend: Backend) -> None:
    """A packet that starts rows takes one more launch than without planes of rows; every other step takes no more."""
    plain = ms.StateLayout(LAYOUT.planes, LAYOUT.layers)
    counted = []
    for layout in (plain, LAYOUT):
        mem = ms.StateManager(layout, slots=16, max_requests=4, backend=backend.name, device=backend.device)
        launches = mem.backend.counts.launches
        launches.clear()
        rows = mem.admit([ms.Request("a"), ms.Request("b")])
        mem.settle(mem.plan(rows))
        started = dict(launches)
        launches.clear()
        mem.settle(mem.plan(rows))
        counted.append((started, dict(launches), mem.backend.counts.uploads, mem.planes.traffic))
    (plain_start, plain_step, *plain_rest), (start, step, *rest) = counted
    assert start == plain_start | {"run_rows": 1} and (step, rest) == (plain_step, plain_rest)


def test_no_requests_start_no_rows(backend: Backend) -> None:
    mem = manager(backend)
    assert list(mem.admit([])) == [] and mem.backend.counts.launches["run_rows"] == 0
    mem.settle(mem.plan(mem.admit([ms.Request("a")])))


def test_a_manager_shows_the_bytes_of_rows(backend: Backend) -> None:
    mem = ms.StateManager(LAYOUT, slots=4, max_requests=4, backend=backend.name, device=backend.device)
    sizes = {part.name: part.size for part in mem.sheet().bars[1].parts}
    assert sizes["rows"] == mem.planes.rows.nbytes
    assert [row[0] for row in LAYOUT.sheet().sections[0].rows] == ["ssm", "score", "tail"]


def test_the_memory_of_rows_sleeps_and_wakes(backend: Backend) -> None:
    mem = manager(backend)
    (a,) = mem.admit([ms.Request("a")])
    step = mem.plan([a])
    forward(mem, step, 3.0)
    mem.settle(step)
    mem.device.sleep()
    with pytest.raises(ms.errors.Asleep):
        mem.planes.rows["tail"]
    mem.device.wake()
    assert tail(mem, a) == 2.0 and mem.planes.rows["tail"][:, 0].unique().tolist() == [-1.0]
    saved = mem.planes.rows.save(torch.tensor([a.index], device=backend.device))
    mem.end([a])
    (b,) = mem.admit([ms.Request("b")])
    mem.submit()
    mem.planes.rows.load(saved, torch.tensor([b.index], device=backend.device))
    assert tail(mem, b) == 2.0


def test_B80_lengths_of_kept_states_keep_to_the_grid(backend: Backend) -> None:
    """Pages hold 2 tokens, and a plane is whole only at multiples of 4 tokens."""
    pages = ms.Pages(size=2, count=40, per_row=12)
    mem = manager(backend, pages=pages, prefix=ms.Prefix(), forward=ms.Forward(grid=1))
    with pytest.raises(ms.ConfigurationError, match="every=6 is no multiple of 4"):
        manager(backend, pages=ms.Pages(size=2), tracking=ms.Redirect(every=6))
    (a,) = mem.admit([ms.Request("a", tokens=range(15), snapshot_at=[7])])
    assert mem.chunk(a, 7) == 4
    step = mem.plan([a], [15])
    assert step.marks.offset[: int(step.marks.count)].tolist() == [4, 12]  # without the plane's grid: 6 and 14
    mem.settle(step)
    mem.end([a], keep="cache", tokens=[list(range(15))])
    match = mem.match([*range(15), 20])
    assert (match.length, match.kv_length) == (12, 14)
    (b,) = mem.admit([ms.Request("b", tokens=[*range(14), 30, 31])])
    assert mem.info(b).length == 12  # no state can stand at the branch point 14
    step = mem.plan([b], [4])
    assert int(step.marks.count) == 0
    mem.settle(step)
    (snapshot,) = mem.end([b], keep="handle")
    assert snapshot is not None and snapshot.length == 16
    mem.drop([snapshot])
    (c,) = mem.admit([ms.Request("c", length=6)])
    mem.settle(mem.plan([c], [6]))  # 6 fills whole pages, but is no multiple of 4
    assert mem.end([c], keep="handle") == [None]


def test_B80_sessions_keep_to_the_grid(backend: Backend) -> None:
    mem = manager(backend, pages=ms.Pages(size=1), prefix=ms.Prefix(), forward=ms.Forward(grid=1))
    session = mem.sessions.open("talk")
    (a,) = mem.admit([ms.Request("a", tokens=range(6), session=session)])
    mem.settle(mem.plan([a], [6]))
    mem.end([a], keep="cache", tokens=[list(range(6))])
    (b,) = mem.admit([ms.Request("b", tokens=range(8), session=session)])
    assert mem.info(b).length == 4  # no state of 6 tokens was kept; the cache has one of 4
    mem.settle(mem.plan([b], [4]))
    mem.end([b], keep="cache", tokens=[list(range(8))])
    (c,) = mem.admit([ms.Request("c", tokens=range(9), session=session)])
    assert mem.info(c).length == 8


def test_B80_a_plane_that_is_never_whole_is_refused_by_name_where_states_are_kept(backend: Backend) -> None:
    ring = ms.StateLayout((ms.Plane("ring", (4,), torch.float32, grid=None),), layers=1)
    given = {"slots": 4, "max_requests": 2, "backend": backend.name, "device": backend.device}
    for settings in ({}, {"tracking": ms.NoTracking(), "prefix": ms.Prefix(), "pages": ms.Pages(size=4)}):
        with pytest.raises(ms.ConfigurationError, match=r"Plane\(ring.*never whole.*use tracking=ms.NoTracking"):
            ms.StateManager(ring, **given, **settings)
    with pytest.raises(ms.InvalidArgument, match=r"Plane\(ring.*whole at no length"):
        ms.capacity(ring, "1GiB", context=64, kv_bytes_per_token=8)
    mem = ms.StateManager(ring, **given, tracking=ms.NoTracking())
    (a,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([a], [64]))
    assert mem.end([a], keep="handle") == [None]
    mem.close()
