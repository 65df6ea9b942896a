"""Runs every block of Python on the pages of docs/: programs as they are, parts with the names that they leave out.

Programs begin with `import`; `tests/test_docs.py` runs those of the guide. Parts run here, on fake CUDA devices where
they need streams or graphs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.tables import Cursor, StepRecord
from memstate.tiers.stores import mooncake
from tests.support.fake_cuda import FakeCuda, Stream, fake_cuda, launching
from tests.support.object_server import running_server
from tests.support.sources import ROOT
from tests.test_docs import BLOCK, PAGES

ELSEWHERE = {  # page -> the test that runs its blocks of code
    "docs/transformers.md": "tests/integrations/test_transformers_docs.py",
    "docs/tiers.md": "tests/tools/test_bench_tiers.py",
    "docs/machines.md": "tests/tools/test_bench_tiers.py",
    "docs/inspector.md": "tests/cli/test_inspect.py",
    "docs/integrate.md": "tests/test_compare.py",
}
LAYOUT = ms.StateLayout([ms.Plane("ssm", (2, 8, 8), torch.float32)], layers=2)


def blocks(page: str) -> list[str]:
    """Returns the blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def part(page: str, begins: str) -> str:
    """Returns the one block of a page that begins with this text."""
    (block,) = (block for block in blocks(page) if block.startswith(begins))
    return block


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


def manager(**settings: Any) -> ms.StateManager:
    return ms.StateManager(LAYOUT, slots=12, max_requests=4, **settings)


def left_out(page: str) -> list[str]:
    """Returns the first line of each block that no test runs as a program or names as a part."""
    programs = {code for code, _ in BLOCK.findall((ROOT / page).read_text())} if page in PAGES else set()
    first = {block: block.splitlines()[0] for block in blocks(page) if block not in programs}
    return [line for line in first.values() if f'part("{page}", "{line[:24]}' not in Path(__file__).read_text()]


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")))
def test_every_block_runs(page: str) -> None:
    if page in ELSEWHERE:
        assert f'"docs" / "{Path(page).name}"' in (ROOT / ELSEWHERE[page]).read_text()
    else:
        assert left_out(page) == [], "a program: name the page in PAGES of tests/test_docs.py; a part: run it here"


def test_layouts() -> None:
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    names: dict[str, Any] = {"ms": ms, "config": config, "planes": LAYOUT.planes}
    exec(part("docs/guide.md", "layout = ms.presets.qwen3_next(ranks=4)"), names)
    assert (names["layout"].layers, names["layout"].order) == (36, "slot_major")


class Graph:
    """A stand-in for a CUDA graph, whose replay repeats the captured launches."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


def test_a_graph_holds_a_whole_step(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        stream = cuda.new_stream()
        with cuda.capture(stream):
            cuda.lag(stream)
            yield
        graph.launches = [launch for _, launch in cuda.lagging.pop(stream)]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    mem = manager(device="cuda:0", backend="reference", tracking=ms.Redirect(2))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])

    def forward(read: torch.Tensor, write: torch.Tensor, snapshot: torch.Tensor) -> None:
        for state in mem.planes["ssm"]:
            state[write.long()] = state[read.long()] + 1

    names: dict[str, Any] = {
        "ms": ms, "torch": torch, "mem": mem, "rows": rows, "sizes": (1, 2), "graphs": {},
        "forward": launching("forward", forward),
    }  # fmt: skip
    block = part("docs/guide.md", "ms.warm_up(mem)  # compiles")
    exec(block, names)
    for _ in range(2):
        exec(block[block.index("step = mem.plan") :], names)
    assert [len(graph.launches) for graph in names["graphs"].values()] == [4, 4]
    snapshots = mem.end(rows, keep="handle", lengths=[2, 2])
    (row,) = mem.admit([ms.Request("c", resume=snapshots[0])])
    step = mem.plan([row])
    assert mem.planes["ssm"][0][step.read.long()].unique().tolist() == [2.0]


def test_a_graph_holds_a_whole_step_with_drafts() -> None:
    rings = ms.StateLayout([ms.Plane("ssm_k", (11, 2, 8), torch.float32)], layers=2)
    layout = ms.StateLayout(LAYOUT.planes, layers=2, rows=rings)
    mem = ms.StateManager(layout, slots=12, max_requests=4, overlap=False, forward=ms.Forward(tail=4))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 3))
    seen = []

    def forward(vectors: StepRecord, lengths: torch.Tensor, cursor: Cursor) -> None:
        seen.append((lengths.tolist(), cursor.label.tolist(), cursor.pending.tolist(), cursor.store.tolist()))
        mem.device.tails.accepted[:2] = torch.tensor([4, 2])  # type: ignore[union-attr]

    names: dict[str, Any] = {"mem": mem, "rows": rows, "Cursor": Cursor, "forward": forward}
    for _ in range(2):
        exec(part("docs/speculation.md", "def whole_step(batch):"), names)
        mem.accept(names["step"], [4, 2], written=True)
    assert seen == [([3, 3], [3, 3], [0, 0], [-1, -1]), ([7, 5], [3, 3], [4, 2], [4, 2])]


def test_T19_a_tree_goes_on_as_a_sequence() -> None:
    rings = ms.StateLayout([ms.Plane("ssm_x", (11, 2), torch.float32), ms.Plane("ssm_b", (11, 1), torch.float32),
        ms.Plane("ssm_dt", (11, 1), torch.float32)], layers=2)  # fmt: skip
    layout = ms.StateLayout([ms.Plane("ssm", (2, 1), torch.float32)], layers=2, rows=rings)
    mem = ms.StateManager(layout, slots=12, max_requests=4, overlap=False, forward=ms.Forward(tail=4))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 3))
    places = [mem.planes.tail("ssm", layer).x for layer in range(2)]

    def forward(step: ms.Step, width: int, parents: torch.Tensor) -> None:
        assert parents.shape == (2, width) and step.lengths.tolist() == [3, 3]
        for layer, ring in enumerate(places):
            for row in step.rows.tolist():
                ring[row, 3:7] = torch.arange(4.0)[:, None] + 10 * layer + 100 * row

    names: dict[str, Any] = {"torch": torch, "mem": mem, "rows": rows, "forward": forward}
    exec(part("docs/speculation.md", "parents = torch.tensor([[-1"), names)
    for layer, ring in enumerate(places):
        (a, b), more = names["step"].rows.tolist(), 10 * layer
        assert (ring[a, 3:6, 0] - more - 100 * a).tolist() == [0, 2, 3]
        assert (ring[b, 3:7, 0] - more - 100 * b).tolist() == [0, 1, 2, 3]
    assert [mem.info(row).length for row in rows] == [6, 5]


def test_a_forward_on_another_stream_lies_between_two_plans(cuda: FakeCuda) -> None:
    mem = manager(device="cuda:0", backend="reference")
    names: dict[str, Any] = {
        "torch": torch, "mem": mem, "rows": mem.admit([ms.Request("a")]), "forward": None,
        "forward_stream": Stream(0), "work_stream": cuda.current_stream(0),
        "run": lambda forward, step: cuda.launch("forward"),
    }  # fmt: skip
    block = part("docs/guide.md", "step = mem.plan(rows)\nforward_stream.wait_stream(work_stream)")
    exec(block, names)
    exec(block, names)
    first, second = cuda.given("plan")
    (forward, _) = cuda.given("forward")
    assert forward.stream is names["forward_stream"]
    assert forward.behind(first) and second.behind(forward)


def test_placements_and_chunks() -> None:
    names: dict[str, Any] = {"ms": ms}
    exec(part("docs/prefill.md", "from memstate.prefix.placement import Placement"), names)
    mem = manager(pages=ms.Pages(size=4), prefix=ms.Prefix(placement=names["Halves"]()))
    names |= {"mem": mem, "row": mem.admit([ms.Request("r", tokens=range(32))])[0], "budget": 30}
    exec(part("docs/prefill.md", "tokens = mem.chunk(row, budget)"), names)
    assert names["tokens"] == 16  # without a grid, the chunk ends at the mark in the middle


def chunk_with_marks(grid: int) -> dict[str, Any]:
    """Returns the variables of a forward in a step of 8 tokens, which keeps the state after 4 tokens."""
    conv = ms.Plane("conv", (3, 8), torch.float32)
    layout = ms.StateLayout([ms.Plane("ssm", (2, 4, 4), torch.float32), conv], layers=1)
    settings: dict[str, Any] = {"pages": ms.Pages(size=4), "prefix": ms.Prefix(), "forward": ms.Forward(grid=grid)}
    settings["backend"] = "reference"
    mem = ms.StateManager(layout, slots=8, max_requests=2, **settings)
    step = mem.plan(mem.admit([ms.Request("r", tokens=range(8), snapshot_at=[4])]), 8)
    assert step.marked == 1
    return {"mem": mem, "step": step, "backend": mem.backend, "slot": int(step.marks.slot[0])}


def test_kernels_store_states_at_marks() -> None:
    names = chunk_with_marks(grid=1)
    planes = names["mem"].planes
    names |= {name: torch.ones(1, 8, 2, 4) for name in "qkv"} | {name: torch.ones(1, 8, 2) for name in ("beta",)}
    names |= {"decay": torch.zeros(1, 8, 2), "ssm": planes["ssm"][0], "conv": planes["conv"][0], "bias": None}
    names |= {"x": torch.arange(64.0).view(1, 8, 8), "weight": torch.ones(8, 4)}
    exec(part("docs/prefill.md", "backend.gated_delta_step("), names)
    assert planes["conv"][0, names["slot"]].tolist() == names["x"][0, 1:4].tolist()  # the inputs of tokens 2 to 4
    assert planes["ssm"][0, names["slot"]].any()


def test_states_at_marks_come_out_of_a_chunked_kernel() -> None:
    names = chunk_with_marks(grid=4)
    planes = names["mem"].planes
    names |= {"h": torch.arange(64.0).view(1, 2, 2, 4, 4), "inputs": torch.arange(64.0).view(1, 8, 8)}
    names |= {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}
    names |= {"first_piece": torch.tensor([0, 2], dtype=torch.int32)}
    exec(part("docs/prefill.md", "if step.marked:").replace("chunk=64", "chunk=4"), names)
    assert planes["ssm"][0, names["slot"]].tolist() == names["h"][0, 1].tolist()  # the state before the second piece
    assert planes["conv"][0, names["slot"]].tolist() == names["inputs"][0, 1:4].tolist()


def test_tiers_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: backend)  # this test has no other processes
    names: dict[str, Any] = {"torch": torch, "Tiers": ms.Tiers, "FileStore": ms.FileStore, "folder": tmp_path}
    names |= {"kv": None, "rank": 1, "ranks": 2}
    exec(part("docs/tiers.md", "group = torch.distributed.new_group("), names)
    assert (names["tiers"].group, names["tiers"].rank) == ("gloo", 1)


def test_settings_of_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "MooncakeStore", lambda settings: settings)  # there is no master at this address
    names: dict[str, Any] = {}
    exec(part("docs/mooncake.md", "from memstate.tiers.stores.mooncake import"), names)
    assert names["store"].segment_bytes == 64 << 30


def test_options_of_objects() -> None:
    with running_server() as server:
        names: dict[str, Any] = {"ms": ms}
        exec(part("docs/tiers.md", "store = ms.Objects(").replace("http://127.0.0.1:9000", server.url), names)
        assert names["store"].exists([f"state-{'0' * 64}"]) == [False]


def test_a_clock_and_a_store_of_tests() -> None:
    names: dict[str, Any] = {}
    exec(part("docs/guide.md", "from memstate.testing import Clock, MemoryStore"), names)
    assert names["clock"]() == 60 and names["store"].broken


def test_metrics() -> None:
    names: dict[str, Any] = {"mem": manager(backend="reference")}
    exec(part("docs/metrics.md", "from memstate import metrics").replace("9470", "0"), names)
    names["server"].close()


# Your engine keeps its KV


def test_the_page_on_own_blocks_has_the_calls_of_its_example() -> None:
    page, example = "docs/own_blocks.md", (ROOT / "examples" / "own_blocks.py").read_text()
    calls = part("docs/own_blocks.md", "# Start a request: as fa")
    there = {plain(line) for line in example.splitlines()}
    assert [line for line in calls.splitlines() if plain(line) and plain(line) not in there] == []
    names: dict[str, Any] = {"ms": ms, "torch": torch, "BLOCK": 4, "tokens": [*range(9)], "cached": 4}
    exec(part("docs/own_blocks.md", "layout = ms.StateLayout("), names)
    assert names["mem"].prefix.settings.keyed and not left_out(page)
    names["mem"] = manager(prefix=ms.Prefix(), pages=ms.Pages(size=4))
    exec(part("docs/own_blocks.md", "match = mem.match(tokens,"), names)
    assert names["match"].kv_length == 4


def plain(line: str) -> str:
    """Returns a line of code without its comment, its indentation and `self`."""
    return line.split("#")[0].strip().replace("self.", "")
