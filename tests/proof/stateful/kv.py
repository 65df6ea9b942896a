"""The KV pages of an engine: what a forward writes and reads there, and the comparison of every byte.

KV of a token is made of all tokens up to it, so that a page under the wrong prefix is found out.
"""

from collections.abc import Sequence

import numpy as np
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from tests.proof.stateful.memory import POISON
from tests.proof.stateful.model import Model
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Settings

ELEMENTS = 2  # a token and layer


def elements(settings: Settings, number: int | None) -> np.ndarray:
    """uint32 `layer element` of one token; poison for none."""
    weights = np.arange(settings.layers * ELEMENTS, dtype=np.uint64).reshape(-1, ELEMENTS) * 2 + 3
    if number is None:
        return np.full(weights.shape, int.from_bytes(bytes([POISON] * 4), "little"), np.uint32)
    return (np.uint64(number) * weights).astype(np.uint32)


class EngineKv:
    """Pages in the order of slots that states are not in."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        order = "slot_major" if s.layout.order == "layer_major" else "layer_major"
        layout = ms.StateLayout((ms.Plane("k", (s.page_size, ELEMENTS), torch.int32),), s.layers, order)  # type: ignore[arg-type]
        self.storage = Planes(layout, s.pages, Backend(backend.name, backend.device))
        self.plane = self.storage["k"]  # layer page token element

    def attach(self, model: Model) -> None:
        assert model.below
        self.model, self.below = model, model.below

    def forward(self, rows: Sequence[tuple[Row, int, int]]) -> None:
        """Each row reads all KV before, and writes that of its tokens."""
        for row, before, _ in rows:
            if self.model.rows.get(row.number) is row:  # else it was given up between plan and forward
                self.below.require_kv(row, before)
        for row, before, n in rows:
            for page, at, number in self.below.write_kv(row, before, n):
                self._put(page, at, number)

    def arrive(self, rows: Sequence[Row]) -> None:
        """KV of rows whose states were computed elsewhere."""
        size = self.settings.page_size
        for row in rows:
            for at in range(len(row.text)):
                page, place, number = row.pages[at // size], at % size, self.below.number(row.text[: at + 1])
                self.below.kv[page][place] = number
                self._put(page, place, number)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(to, of) each, as a fork asks for it."""
        for to, of in copies:
            self.below.kv[to] = list(self.below.kv[of])
            self.plane[:, to] = self.plane[:, of]

    def _put(self, page: int, at: int, number: int) -> None:
        self.plane[:, page, at] = self._tensor(elements(self.settings, number))

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.view(np.int32)).to(self.plane.device)

    def look(self) -> None:
        """Compares every page that somebody has; the others are poisoned."""
        self.below.lose_kv()
        seen = self.plane.cpu().numpy().view(np.uint32)
        for page, numbers in enumerate(self.below.kv[1:], 1):
            if self.model.page_users[page]:
                told = np.stack([elements(self.settings, number) for number in numbers], 1)
                where = f"KV page {page} holds {seen[:, page].tolist()}, expected {told.tolist()}"
                assert np.array_equal(seen[:, page], told), where
        free = [page for page in range(1, self.settings.pages + 1) if not self.model.page_users[page]]
        self.plane[:, free] = self._tensor(elements(self.settings, None))[:, None, None]
