"""A manager over planes of rows, planes with a grid, and planes whose fresh value is not zero."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import ALL, Play, script

INF = float("inf")
TAIL = ms.StateLayout((ms.Plane("tail", (3,), torch.float32, fill=-1.0),), layers=2)
SCORE = ms.Plane("score", (2,), torch.float32, layers=1, fill=-INF, grid=4)
LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32), SCORE), layers=2, rows=TAIL)
KINDS = {"parts": ("fold", "score"), "alone": 4, "tails": True, "every": 8}
T = list(range(30))


def manager(backend: Backend, **settings: object) -> ms.StateManager:
    given = {"slots": 16, "max_requests": 4, "tracking": ms.Redirect(every=8)} | settings
    return ms.StateManager(LAYOUT, backend=backend.name, device=backend.device, **given)


@script(strategy=ALL[1:], prefix=True, page_size=4, case=KINDS)
def test_B81_the_memory_of_a_row_is_fresh_follows_forks_and_is_not_published(play: Play) -> None:
    (a,), (b,) = play.admit(T[:3]), play.admit(None)
    play.step([b], 3)
    play.run(a, T[:9])
    (c,) = play.fork(a, "c")
    play.step([c])
    play.end(b, how="release")
    play.end(a, c)
    play.step(play.admit([*T[:8], 99], [5]))
    play.reached("hit_tokens")


@script(strategy="redirect", rows=1, overlap=True, case=KINDS)
def test_B81_a_row_that_a_coming_forward_uses_is_fresh_only_after_it(play: Play) -> None:
    (a,) = play.admit(None)
    step = play.step([a], run=False)
    play.end(a, how="release", land=False)
    (b,) = play.admit(None)
    play.launch(step)
    play.step([b])


@script(strategy=ALL[1:], case=KINDS)
def test_B81_a_fork_of_a_row_that_has_just_begun_is_fresh(play: Play) -> None:
    """The fork waits for a later packet: one packet copies and fills memory in no fixed order."""
    play.turn(T[:8], how="publish")
    (b,) = play.admit(None, resume=next(iter(play.machine.snaps)))
    (c,) = play.fork(b, "c")
    play.submit()
    play.step([b, c])


@script(strategy=ALL[1:], prefix=True, page_size=2, grid=1, case=KINDS)
def test_B80_lengths_of_kept_states_keep_to_the_grid(play: Play) -> None:
    """Pages hold 2 tokens, and a plane is whole only at multiples of 4 tokens."""
    (a,) = play.admit(T[:15], snapshot_at=[7])
    play.machine.texts[play.machine.handles[a]] = T
    play.step([a], play.chunk(a, 7))
    play.step([a], 15 - play.model.length(play.machine.handles[a]))
    play.end(a)
    play.match([*T[:15], 20])
    (b,) = play.admit([*T[:14], 30, 31])  # no state can stand at the branch point 14
    play.step([b], 4)
    play.end(b, how="publish")
    (c,) = play.admit(None, length=6)
    play.step([c], 6)  # 6 fills whole pages, but is no multiple of 4
    play.end(c, how="publish")
    play.reached("hit_tokens", "published")


@script(strategy=ALL[1:], prefix=True, page_size=1, grid=1, case=KINDS)
def test_B80_sessions_keep_to_the_grid(play: Play) -> None:
    (talk,) = play.open("talk")
    for length in (6, 8, 9):
        play.turn(T[:length], talk)
    play.reached("hit_tokens")


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
    mem.submit()
    memory = mem.planes.rows["tail"]
    memory[:, a.index] = 2.0
    mem.device.sleep()
    with pytest.raises(ms.errors.Asleep):
        mem.planes.rows["tail"]
    mem.device.wake()
    memory = mem.planes.rows["tail"]
    assert memory[:, [a.index, 0]].unique().tolist() == [-1.0, 2.0]
    saved = mem.planes.rows.save(torch.tensor([a.index], device=backend.device))
    mem.end([a])
    (b,) = mem.admit([ms.Request("b")])
    mem.submit()
    mem.planes.rows.load(saved, torch.tensor([b.index], device=backend.device))
    assert (memory[:, b.index] == 2.0).all()


def test_B80_a_plane_that_is_never_whole_is_refused_by_name_where_states_are_kept(backend: Backend) -> None:
    ring = ms.StateLayout((ms.Plane("ring", (4,), torch.float32, grid=None),), layers=1)
    given = {"slots": 4, "max_requests": 2, "backend": backend.name, "device": backend.device}
    for settings in ({}, {"tracking": ms.NoTracking(), "prefix": ms.Prefix(), "pages": ms.Pages(size=4)}):
        with pytest.raises(ms.ConfigurationError, match=r"Plane\(ring.*never whole.*use tracking=ms.NoTracking"):
            ms.StateManager(ring, **given, **settings)
    with pytest.raises(ms.InvalidArgument, match=r"Plane\(ring.*whole at no length"):
        ms.capacity(ring, "1GiB", context=64, kv_bytes_per_token=8)
    with pytest.raises(ms.ConfigurationError, match="every=6 is no multiple of 4"):
        manager(backend, pages=ms.Pages(size=2), tracking=ms.Redirect(every=6))
    mem = ms.StateManager(ring, **given, tracking=ms.NoTracking())
    (a,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([a], [64]))
    assert mem.end([a], keep="handle") == [None]
    mem.close()
