"""Makes every symptom of docs/faq.md happen, and cures it as the page says. Each test has the name of its anchor."""

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.testing import MemoryStore
from tests.support.fake_cuda import Stream, fake_cuda
from tests.support.sources import ROOT
from tests.test_docs import anchors

LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=2)
PROMPT = list(range(100, 140))


def manager(**settings: Any) -> ms.StateManager:
    return ms.StateManager(LAYOUT, **{"slots": 8, "max_requests": 4, "backend": "reference"} | settings)


def caching(**settings: Any) -> ms.StateManager:
    return manager(**{"pages": ms.Pages(size=4), "prefix": ms.Prefix()} | settings)


def decode(mem: ms.StateManager, rows: ms.Rows, steps: int) -> None:
    for _ in range(steps):
        mem.settle(mem.plan(rows))


def serve(mem: ms.StateManager, prompt: list[int], session: Any = None, answer: int = 0, **end: Any) -> int:
    """Reads a prompt and answers it with zeros; returns the length at which the request started."""
    rows = mem.admit([ms.Request("r", tokens=prompt, session=session)])
    start = mem.info(rows[0]).length
    while (length := mem.info(rows[0]).length) < len(prompt):
        mem.settle(mem.plan(rows, mem.chunk(rows[0], len(prompt) - length)))
    decode(mem, rows, answer)
    mem.end(rows, **{"keep": "cache", "tokens": [prompt + [0] * answer]} | end)
    return start


def test_every_symptom_of_the_page_is_made() -> None:
    headings = re.findall(r"^## .+$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    made = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert made - {"every-symptom-of-the-page-is-made"} == anchors("\n".join(headings))


def test_memstate_has_no_attribute_statemanager(tmp_path: Path) -> None:
    (tmp_path / "memstate").mkdir()
    (tmp_path / "memstate" / "__init__.py").write_text("class Connection: ...\n")
    code = "import memstate; memstate.StateManager"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert "module 'memstate' has no attribute 'StateManager'" in done.stderr


def test_configurationerror_when_the_manager_is_built() -> None:
    with pytest.raises(ms.errors.ConfigurationError, match=r"planes \d+ bytes.*lower slots"):
        manager(slots=10**12)


def test_outofslots_outofrows_or_outofpages() -> None:
    mem = manager(slots=1)
    rows = mem.admit([ms.Request("a")])
    with pytest.raises(ms.OutOfSlots):
        mem.admit([ms.Request("b")])
    mem.end(rows)
    mem.admit([ms.Request("b")])


def test_outofslots_though_requests_have_ended() -> None:
    mem = manager(slots=1, tracking=ms.Redirect(every=4))
    rows = mem.admit([ms.Request("a")])
    step = mem.plan(rows, 4)
    mem.settle(step, [True])
    with pytest.raises(ms.OutOfSlots):  # `settle` does not end rows
        mem.admit([ms.Request("b")])
    (snapshot,) = mem.end(rows, keep="handle")
    with pytest.raises(ms.OutOfSlots, match="1 held by snapshots"):
        mem.admit([ms.Request("b")])
    mem.drop([snapshot])
    mem.admit([ms.Request("b")])


def test_free_slots_stay_low_though_nothing_runs() -> None:
    mem = caching(slots=4)
    for first in range(4):
        serve(mem, [first, *PROMPT])
    assert mem.free_slots == 1 and mem.audit().owned_by_kind == {"cached": 3}
    assert len(mem.admit([ms.Request(name) for name in "abcd"])) == 4


def test_slots_leak_but_device_memory_is_flat() -> None:
    mem = manager()
    planes, free = mem.planes["ssm"].data_ptr(), mem.free_slots
    mem.admit([ms.Request("a")])  # this request never ends
    assert (mem.planes["ssm"].data_ptr(), mem.free_slots) == (planes, free - 1)


def test_the_audit_calls_a_slot_leaked_that_i_hold() -> None:
    mem = manager()
    slot = mem.pool.claim(1)
    assert mem.audit().leaked == slot.tolist()
    mem.pool.release(slot)
    mem.audit().raise_if_leaking()


def test_stalehandle() -> None:
    mem = manager()
    rows = mem.admit([ms.Request("a")])
    mem.end(rows)
    with pytest.raises(ms.StaleHandle, match="was ended"):
        mem.plan(rows)
    mem = caching()
    step = mem.plan(mem.admit([ms.Request("a")]))
    mem.settle(step)
    with pytest.raises(ms.StaleHandle, match="was settled"):
        mem.settle(step)
    chat = mem.sessions.open("chat")
    mem.sessions.close(chat)
    with pytest.raises(ms.StaleHandle, match="was closed"):
        mem.admit([ms.Request("b", tokens=PROMPT, session=chat)])


def test_broken() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    mem = manager()
    rows = mem.admit([ms.Request("a")])
    with pytest.raises(KeyboardInterrupt):
        mem.plan(rows, replay=interrupted)
    with pytest.raises(ms.Broken):
        mem.plan(rows)
    assert mem.recover().ended == ["a"]
    mem.admit([ms.Request("a")])


def test_a_call_from_another_thread_or_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(mem: ms.StateManager) -> list[str]:
        def call() -> None:
            try:
                mem.admit([ms.Request("a")])
            except ms.MemstateError as error:
                said.append(str(error))

        said: list[str] = []
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return said

    assert refused(manager()) == []
    assert "driven by one thread" in refused(manager(debug=True))[0]
    with fake_cuda(monkeypatch) as cuda:
        mem = manager(device="cuda:0")
        rows = mem.admit([ms.Request("a")])
        with cuda.stream(other := Stream(0)):
            with pytest.raises(ms.errors.InvalidArgument, match="stream"):
                mem.plan(rows)
            mem.device.use_stream(other)
            mem.plan(rows)


def test_the_first_step_is_slow() -> None:
    mem = caching()
    ms.warm_up(mem)
    launched = {name for name, count in mem.backend.counts.launches.items() if count}
    serve(mem, PROMPT)
    assert {name for name, count in mem.backend.counts.launches.items() if count} == launched


@pytest.mark.proof  # loads torch's compiler
def test_torchcompile_raises_unsupported() -> None:
    ops, plane, slots = ms.Backend("reference"), torch.randn(2, 5, 4), torch.tensor([3, 1])

    def layer(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, 2, 4)
        ops.gather_slots(plane * 2, slots, out)
        return out + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch"):
        torch.compile(layer, fullgraph=True, backend="eager")(plane, slots)
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(layer, backend=backend)(plane, slots), layer(plane, slots))


def test_a_step_takes_a_tenth_of_a_second_now_and_then() -> None:
    before = len(gc.get_objects())
    gc.collect()
    gc.freeze()
    after = len(gc.get_objects())
    gc.unfreeze()
    assert after < before / 50


def test_a_cuda_graph_computes_with_old_inputs_or_wrong_slots() -> None:
    mem, seen, fixed = manager(tracking=ms.Redirect(every=1)), [], []
    rows, inputs = mem.admit([ms.Request("a")]), torch.zeros(1)

    def replay() -> None:  # stands for a graph: `fixed` has the slots that it was captured with
        vectors = mem.launch(1)
        fixed.append(fixed[0] if fixed else vectors.write.tolist())
        seen.append((inputs.item(), fixed[-1] == vectors.write.tolist()))

    for token in (1, 2):
        mem.settle(mem.plan(rows, replay=replay))
        inputs.fill_(token)  # too late: the graph has run already
    assert seen == [(0, True), (1, False)]


def test_stepsnapshot_is_always_0() -> None:
    seen = {}
    for tracking in (ms.Redirect(every=2), ms.PingPong(every=2)):
        mem = manager(tracking=tracking)
        rows, seen[type(tracking)] = mem.admit([ms.Request("a")]), []
        for _ in range(4):
            step = mem.plan(rows)
            seen[type(tracking)].append(bool(step.snapshot.any()))
            mem.settle(step)
    assert seen == {ms.Redirect: [False] * 4, ms.PingPong: [False, True, False, True]}


def test_padding_rows_give_garbage() -> None:
    mem = manager()
    (row,) = mem.admit([ms.Request("a")])
    step = mem.plan([row, None])
    for state in mem.planes["ssm"]:
        state[step.write] = 1
    assert mem.planes["ssm"][0][step.read[1]].any()
    mem.device.scrub_null()
    assert not mem.planes["ssm"][0][step.read[1]].any()
    mem = manager(forward=ms.Forward(pad=-1))
    assert mem.plan([*mem.admit([ms.Request("a")]), None]).read.tolist()[1] == -1


def test_nan_in_the_states_with_debugtrue() -> None:
    def nan(**settings: Any) -> bool:
        mem = manager(tracking=ms.Redirect(every=2), **settings)
        mem.planes["ssm"].zero_()  # tests fill fresh memory with NaN
        rows = mem.admit([ms.Request("a")])
        for _ in range(3):
            step = mem.plan(rows)
            for state in mem.planes["ssm"]:
                state[step.write] += 1  # this kernel reads and writes the same slot
            if mem.planes["ssm"].isnan().any():
                with pytest.raises(ms.ForwardFault, match="in_place=True"):
                    mem.settle(step)
                return True
            mem.settle(step)
        return False

    assert not nan() and nan(debug=True) and not nan(debug=True, forward=ms.Forward(in_place=True))


def test_answers_differ_after_a_hit() -> None:
    def states(debug: bool) -> list[float]:
        mem, values = caching(tracking=ms.PingPong(every=4), debug=debug), []
        mem.planes["ssm"].zero_()
        for prompt in ([1], [1, 0, 0, 0, 0]):
            rows = mem.admit([ms.Request("r", tokens=prompt)])
            for _ in range(6 - mem.info(rows[0]).length):
                step = mem.plan(rows)
                for state in mem.planes["ssm"]:
                    state[step.write] = state[step.read] + 1  # nothing is stored at step.snapshot
                mem.settle(step)
            values.append(mem.planes["ssm"][0, step.write].mean().item())
            mem.end(rows, keep="cache", tokens=[[1, 0, 0, 0, 0, 0]])
        return values

    assert states(debug=False) == [6, 2]  # without the mistake, both would be 6
    with pytest.raises(ms.ForwardFault, match="plane 'ssm', layer 0, of row 1"):
        states(debug=True)


def test_the_hit_rate_is_0() -> None:
    mem = caching()
    assert [serve(mem, PROMPT, keep=None, tokens=None) for _ in range(2)] == [0, 0]
    assert mem.stats().prefix.inserted == 0 and mem.match(PROMPT).reason == "no_sharing"
    assert [serve(mem, [time, *PROMPT]) for time in range(2)] == [0, 0]
    assert str(mem.match([9, *PROMPT])) == "0 of 41 tokens by state, 0 by KV (41 no sharing)"
    assert [serve(mem, PROMPT) for _ in range(2)] == [0, 36]
    assert (mem.match(PROMPT, salt="other").length, mem.match(PROMPT).length) == (0, 36)


def test_the_second_request_misses_the_third_hits() -> None:
    mem = caching()
    assert [serve(mem, PROMPT[:20] + [last] * 8) for last in range(3)] == [0, 0, 20]
    mem = caching()
    rows = mem.admit([ms.Request("a", tokens=PROMPT[:20] + [0] * 8, snapshot_at=[20])])
    for _ in range(2):
        mem.settle(mem.plan(rows, mem.chunk(rows[0], 28)))
    mem.end(rows, keep="cache")
    assert serve(mem, PROMPT[:20] + [1] * 8) == 20


def test_hits_end_at_certain_lengths_only() -> None:
    def hit(size: int, grid: int | None = None) -> int:
        mem = caching(pages=ms.Pages(size=size), forward=ms.Forward(grid=grid))
        serve(mem, PROMPT)
        return serve(mem, PROMPT)

    assert (hit(size=16), hit(size=4), hit(size=4, grid=16)) == (32, 36, 32)


def test_the_prefix_cache_keeps_no_state_of_a_prompt() -> None:
    mem = caching(tracking=ms.NoTracking())
    assert [serve(mem, PROMPT) for _ in range(2)] == [0, 0]

    def whole(**settings: Any) -> tuple[int, int]:
        mem = caching(**settings)
        rows = mem.admit([ms.Request("a", tokens=PROMPT)])
        mem.settle(mem.plan(rows, len(PROMPT)))
        mem.end(rows, keep="cache")
        return mem.stats().missed, mem.match(PROMPT).length

    assert whole() == (1, 0) and whole(forward=ms.Forward(grid=4)) == (0, 36)


def test_the_next_turn_computes_the_answer_again() -> None:
    def starts(every: int, session: bool = False) -> int:
        mem = caching(tracking=ms.Redirect(every=every))
        chat = mem.sessions.open("chat") if session else None
        serve(mem, PROMPT, chat, answer=10)
        return serve(mem, PROMPT + [0] * 10 + [1], chat)

    assert (starts(256), starts(4), starts(256, session=True)) == (36, 48, 50)


def test_each_turn_of_a_chat_computes_the_last_one_again() -> None:
    """The template of a thinking model ends a prompt with two tokens that no later prompt has."""
    starts = {spare: list[int]() for spare in (1, 2)}
    for spare, lengths in starts.items():
        mem, told = caching(prefix=ms.Prefix(placement=ms.Ends(spare=spare))), PROMPT[:11]
        for turn in range(3):
            prompt = [*told, 7, 8]
            lengths.append(serve(mem, prompt, answer=4))
            told = [*told, *range(200 + 10 * turn, 208 + 10 * turn)]  # the answer without its thoughts, and a question
        assert bool(mem.stats().prefix.lost_no_snapshot) == (spare == 1)
    assert starts == {1: [0, 0, 8], 2: [0, 8, 16]}


def test_a_turn_of_a_session_starts_at_0() -> None:
    mem = caching()
    chat = mem.sessions.open("chat")
    serve(mem, PROMPT[:9], chat, keep=None, tokens=None)
    assert [serve(mem, PROMPT[:10], chat), serve(mem, PROMPT[:11], chat)] == [0, 10]
    assert mem.sessions.infos()[0].states
    assert serve(mem, [0, *PROMPT], chat) == 0


def test_end_or_publish_returns_none() -> None:
    mem = manager(tracking=ms.Redirect(every=8))
    rows = mem.admit([ms.Request("a")])
    step = mem.plan(rows)
    mem.plan(rows)  # this step is dead
    mem.settle(step, [True])
    assert mem.publish(rows) == [None] and mem.end(rows, keep="handle") == [None]


def test_snapshots_are_missing() -> None:
    def missing(slots: int) -> int:
        mem = manager(slots=slots, tracking=ms.Redirect(every=4))
        decode(mem, mem.admit([ms.Request("a")]), 6)
        return mem.stats().degraded

    assert (missing(slots=1), missing(slots=2)) == (1, 0)


def test_fork_end_or_plan_is_refused_for_a_row() -> None:
    mem = caching(pages=ms.Pages(count=16, size=4, per_row=8))
    rows = mem.admit([ms.Request("a", tokens=range(8))])
    step = mem.plan(rows, 8)
    with pytest.raises(ms.errors.InvalidArgument, match="settled or accepted"):
        mem.fork(rows[0], ["b"])
    mem.settle(step)
    with pytest.raises(ms.errors.InvalidArgument, match="call extend"):
        mem.plan(rows)
    mem.extend(rows, [9])
    mem.plan(rows)
    rings = ms.StateLayout([ms.Plane("ssm_k", (11, 2), torch.float32)], layers=2)
    layout = ms.StateLayout(LAYOUT.planes, layers=2, rows=rings)
    mem = ms.StateManager(layout, slots=8, max_requests=2, backend="reference", forward=ms.Forward(tail=4))
    rows = mem.admit([ms.Request("a")])
    mem.plan(rows, 3, drafts=2)
    mem.plan(rows, 3, drafts=2)
    with pytest.raises(ms.errors.InvalidArgument, match="call accept"):
        mem.end(rows)


def test_memstate_copies_states() -> None:
    def copies(tracking: ms.Tracking, **settings: Any) -> int:
        mem = manager(tracking=tracking, **settings)
        rows = mem.admit([ms.Request("a")])
        decode(mem, rows, 4)
        mem.plan(mem.admit([ms.Request("b", resume=mem.end(rows, keep="handle")[0])]))
        return mem.stats().copied_bytes // LAYOUT.bytes_per_slot

    in_place = ms.Forward(in_place=True)
    assert (copies(ms.Redirect(4)), copies(ms.PingPong(4)), copies(ms.Redirect(4), forward=in_place)) == (0, 1, 1)


def test_nothing_comes_back_from_storage_after_a_restart() -> None:
    def restarted(threshold: int, close: bool, model: str = "m") -> int:
        store = MemoryStore()
        for name in ("m", model):
            tiers = ms.Tiers(name, host_slots=8, store=store, prefetch=ms.Prefetch(threshold, stop="wait_complete"))
            mem = caching(tiers=tiers)
            fetch = mem.prefetch(PROMPT)
            while not mem.tiers.ready(fetch):
                mem.poll()
                mem.tiers.wait(fetch)
            start = serve(mem, PROMPT)
            if close:
                mem.close()
        return start

    assert [restarted(8, True), restarted(256, True), restarted(8, False), restarted(8, True, "n")] == [36, 0, 0, 0]
