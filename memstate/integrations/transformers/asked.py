"""The base of a cache: the methods that layers of Transformers call, and those by which beam search reorders rows."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from memstate.errors import InvalidArgument
from memstate.integrations.transformers.held import Held


class GuardedCache(Cache):
    """A cache whose layers can be used only during a forward, and whose rows can be reordered."""

    _held: Held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a window of the batch, as in Transformers; None if no row has a state. Raises InvalidArgument."""
        if not self._held.rows:
            self._require_step()
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Adds new inputs to a window, as in Transformers. Raises InvalidArgument if no forward runs."""
        self._require_step()
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Stores a recurrent state, as in Transformers. Raises InvalidArgument if no forward runs."""
        self._require_step()
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values, as in Transformers. Raises InvalidArgument if no forward runs."""
        self._require_step()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _require_step(self) -> None:
        """Raises InvalidArgument if a layer calls while no forward runs."""
        if self._held.step is None:
            closed = self._held.closed
            why = f"the cache is closed: {closed}" if closed else "no forward of its model has begun"
            raise InvalidArgument(f"{why}; make a StateCache for the model that you call, and call that model")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces entry i of the batch by the old entry `beam_idx[i]`, for all i. Forks rows that are named twice.

        Args:
            beam_idx: index of the old entry for each new entry, `batch`.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; nothing changed.

        Syncs: yes, for the indices.
        """
        self._held.take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the named entries of the batch; see `reorder_cache`. Syncs: yes."""
        self._held.take(torch.arange(len(self._held.rows), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each entry of the batch; see `reorder_cache`. Syncs: no."""
        self._held.take([entry for entry in range(len(self._held.rows)) for _ in range(repeats)])

    @property
    def is_compileable(self) -> bool:
        """False, because each step has another plan."""
        return False
