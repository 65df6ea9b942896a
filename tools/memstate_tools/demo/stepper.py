"""Runs the forward of a padded batch and samples its tokens: as a call on a CPU, as a replayed CUDA graph on a GPU.

The first input token of a step may be the token that the last step sampled. It stays on the device, so the next step
can start before the host knows the last results. With guesses, the next step begins after the accepted ones. Only the
device knows their number, so it chooses the inputs from that place on.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstate.kernels.tables import Cursor, StepMarks
from memstate_tools.demo.model import VOCABULARY, DemoMemory, HybridModel, StepPlaces
from memstate_tools.demo.trees import ALONE, DeviceTree, DraftTree, StepTree

Logits = npt.NDArray[np.float32]


class Inputs:
    """The inputs of one step, filled by the host.

    Attributes:
        tokens: Byte values, `batch side token+slack`, from `start` on: the step may begin up to `slack` tokens later.
            Side 0 has the known tokens and first guesses, other sides the further guesses for the same positions.
        start: Tokens folded before, as far as the host knows, `batch`.
        fed: Whether the first token is the one sampled for this row a step ago, `batch`.
        drafts: Number of guesses at the end of each row's tokens, `batch`.
        noise: Added to logits before the argmax, `batch depth+slack vocabulary`.
    """

    def __init__(self, batch: int, width: int, tree: DraftTree = ALONE, slack: int = 0) -> None:
        self.width, sides = width, 1 + max(tree.sides)
        self.packed = np.zeros((batch, sides * (width + slack) + 3), np.int64)
        self.tokens = self.packed[:, :-3].reshape(batch, sides, -1)
        self.start, self.fed, self.drafts = self.packed[:, -3], self.packed[:, -2], self.packed[:, -1]
        self.noise = np.zeros((batch, tree.depth + 1 + slack, VOCABULARY), np.float32)


class Results:
    """Sampled tokens and logits of one step, on their way to the host."""

    def __init__(self, sampled: Tensor, logits: Tensor) -> None:
        # copied, because the next step overwrites them
        self._sampled, self._logits = (self._copy(x) for x in (sampled, logits))
        self._event = torch.cuda.Event() if sampled.is_cuda else None
        if self._event:
            self._event.record()

    def _copy(self, x: Tensor) -> Tensor:
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return copy.copy_(x, non_blocking=True)

    def read(self) -> tuple[list[list[int]], Logits]:
        """Returns tokens `batch node` and logits `batch node vocabulary`.

        Syncs: yes, on this step alone.
        """
        if self._event:
            self._event.synchronize()
        return self._sampled.tolist(), self._logits.numpy()


class Stepper:
    """Runs steps of a few shapes, such as `batch chunk` and `batch 1`, of one model on one memory.

    On CUDA each shape is captured twice: the forward alone, and with all launches before it. The vectors of a step are
    part of the graph, so they must be the same tensors every time. Warm-up runs on null rows and changes no state.

    Args:
        model: The model whose forward runs.
        memory: Planes, pages and page table.
        batch: Number of rows.
        chunk: Tokens of a prefill step.
        launch: Launches the plan before the forward of a step, and returns its slots.
        marks: The marks of steps on the device; None: steps have no marks.
        tree: The tree of tokens of a decode step. A token is sampled after each of them.
        slack: Tokens by which a row may be longer than the host knows.
        keep_path: Closes the gaps that rejected branches of a tree leave in the tails.
    """

    def __init__(
        self, model: HybridModel, memory: DemoMemory, batch: int, chunk: int,
        launch: Callable[[], StepPlaces] | None = None, marks: StepMarks | None = None, tree: DraftTree = ALONE,
        slack: int = 0, keep_path: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        self._marks, self._keep_path = marks, keep_path if tree.branches else None
        self.model, self.memory, self.batch, self._launch = model, memory, batch, launch
        self.device = memory.page_table.device
        self._tree, self._slack = DeviceTree(tree, self.device), slack
        self.widths = (*dict.fromkeys((1, len(tree), chunk)),)
        made = {width: Inputs(batch, width, tree, slack) for width in self.widths}
        self._packed = {width: torch.from_numpy(inputs.packed).to(self.device) for width, inputs in made.items()}
        self._noise = torch.from_numpy(made[1].noise).to(self.device)
        self._next = self._zeros(batch, dtype=torch.int64)
        self._logits = self._zeros(batch, len(tree), VOCABULARY, dtype=torch.float32)
        self._sampled = self._zeros(batch, len(tree), dtype=torch.int64)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        if self.device.type == "cuda":
            self._warm_up()

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def run(self, inputs: Inputs, slots: StepPlaces | None = None) -> Results:
        """Submits one step. Changes the memory at the slots and pages of real rows.

        Args:
            inputs: The inputs of the rows.
            slots: The slots of the step. None: they are launched first, on CUDA in the same graph.

        Syncs: no.
        """
        self._upload(inputs.packed, self._packed[inputs.width])
        self._upload(inputs.noise, self._noise)
        if self.device.type == "cuda":
            self._graph(inputs.width, slots).replay()
        else:
            self._body(inputs.width, slots)
        return Results(self._sampled, self._logits)

    def _upload(self, values: npt.NDArray[np.generic], to: Tensor) -> None:
        """Uploads an array. The pinned copy is new each time; torch frees it only after the transfer."""
        source = torch.from_numpy(values)
        to.copy_(source.pin_memory() if to.is_cuda else source, non_blocking=True)

    def _body(self, width: int, slots: StepPlaces | None) -> None:
        if slots is None:
            assert self._launch is not None
            slots = self._launch()
        packed = self._packed[width]
        start, fed, drafts = packed[:, -3:].unbind(1)
        shift = torch.zeros_like(start)  # number of accepted guesses
        if slots.cursor is not None:
            shift = torch.where(slots.rows > 0, slots.cursor.label + slots.cursor.pending - start, 0)
        tree, at = self._tree, torch.arange(width, device=self.device)
        grown = StepTree(tree, (slots.tokens - drafts - 1).clamp(min=0))
        side, place = tree.sides[grown.nodes(at)], shift[:, None] + grown.spread(tree.depths, at)
        tokens = packed.gather(1, side * (width + self._slack) + place)
        tokens[:, 0] = torch.where(fed > 0, self._next, tokens[:, 0])
        if width == 1:  # a decode step has no marks
            slots = slots._replace(marks=None)
        start = start + shift
        logits = self.model.forward(tokens, start, grown, slots, self.memory)
        self._logits.copy_(logits)
        noise = self._noise.gather(1, (shift[:, None] + tree.depths)[:, :, None].expand(-1, -1, VOCABULARY))
        self._sampled.copy_((logits + noise).argmax(-1))
        self._accept(tokens, start, grown, drafts, slots)

    def _accept(self, tokens: Tensor, start: Tensor, grown: StepTree, drafts: Tensor, slots: StepPlaces) -> None:
        """Finds the accepted guesses, keeps the token after them, and closes the gaps that rejected branches leave."""
        last = self._tree.walk(tokens.gather(1, grown.tokens(tokens.shape[1])), self._sampled, drafts)
        self._next.copy_(self._sampled.gather(1, last[:, None])[:, 0])
        if slots.accepted is not None:
            slots.accepted.copy_(slots.tokens - drafts + self._tree.depths[last])
        if self._keep_path is not None:
            nodes = grown.path(last)
            self.model.keep_path(start, nodes, slots, self.memory)
            self._keep_path(nodes)

    def _graph(self, width: int, slots: StepPlaces | None) -> torch.cuda.CUDAGraph:
        key = width, slots is None
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # this records the body and runs nothing
                self._body(width, slots)
            self._graphs[key] = graph
        return self._graphs[key]

    def _warm_up(self) -> None:
        """Compiles every kernel before the first capture, on a side stream as captures require."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for width in self.widths:
                rows, tokens, read, write, snapshot, accepted, *columns = (
                    self._zeros(self.batch, dtype=torch.int32) for _ in range(10)
                )
                cursor = Cursor(*columns) if self.memory.tails else None
                self._body(width, StepPlaces(rows, tokens, read, write, snapshot, self._marks, cursor, accepted))
        torch.cuda.current_stream(self.device).wait_stream(side)
