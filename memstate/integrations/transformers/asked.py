"""What layers and beams ask of a cache of Transformers: states, keys and values, and its rows in another order."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from memstate.errors import InvalidArgument
from memstate.integrations.transformers.held import Held


class Asked(Cache):
    """A cache that layers can use only while a forward runs that it knows of, and whose rows can be reordered."""

    _held: Held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a window of the batch, as Transformers does; None if no row has a state. Raises: InvalidArgument."""
        if not self._held.rows:
            self._require_step()
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Moves a window on, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Stores a recurrent state, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _require_step(self) -> None:
        """Refuses the call of a layer outside a forward. Raises: InvalidArgument."""
        if self._held.step is None:
            closed = self._held.closed
            why = f"the cache is closed: {closed}" if closed else "no forward of its model has begun"
            raise InvalidArgument(f"{why}; make a StateCache for the model that you call, and call that model")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes entry i of the batch what entry `beam_idx[i]` was: rows that go on twice are forked.

        Args:
            beam_idx: an entry of the batch for each entry, `batch`.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; the cache is as it was.

        Syncs: yes, for the indices.
        """
        self._held.take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some entries of the batch, as `reorder_cache`. Syncs: yes."""
        self._held.take(torch.arange(len(self._held.rows), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each entry of the batch, as `reorder_cache`. Syncs: no."""
        self._held.take([entry for entry in range(len(self._held.rows)) for _ in range(repeats)])

    @property
    def is_compileable(self) -> bool:
        """False: plans change from step to step."""
        return False
