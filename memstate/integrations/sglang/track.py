"""The track buffer of a request: the slots that it uses in turn for its tracked states."""

from typing import Any

import torch
from torch import Tensor


class TrackBuffer:
    """Slots of one request for tracked states; -1 is an empty entry.

    Replaces a small tensor of SGLang. The host holds its entries as views, so that reading or changing an entry
    launches nothing. Nothing writes to the views.

    Args:
        slots: ids of slots of several requests.
        first: index in `slots` of this request's first id.
        held: number of this request's ids; they fill the first entries.
        size: number of entries; entries without a slot are empty.
        none: a tensor with -1, for empty entries.

    Attributes:
        empty: for each entry whether it is empty. The request has the same list object.
    """

    __slots__ = ("_changed", "_first", "_held", "_none", "_slots", "empty")

    def __init__(self, slots: Tensor, first: int, held: int, size: int, none: Tensor) -> None:
        self._slots, self._first, self._held, self._none = slots, first, held, none
        self._changed: dict[int, Tensor] = {}
        self.empty = [False] * held + [True] * (size - held)

    def entry(self, at: int) -> Tensor:
        """Returns an entry as a tensor with one id."""
        if self.empty[at] or at in self._changed:
            return self._changed.get(at, self._none)
        return self._slots[self._first + at : self._first + at + 1]

    def put(self, at: int, slot: Tensor | None) -> Tensor:
        """Changes an entry.

        Args:
            at: number of the entry.
            slot: its new slot, as a tensor with one id; None to empty the entry.

        Returns:
            The entry's new id, as a tensor with one id.
        """
        self.empty[at] = slot is None
        self._changed[at] = self._none if slot is None else slot.reshape(1)
        return self._changed[at]

    def owned(self, state: Tensor, keep: int | None = None) -> list[Tensor]:
        """Returns the slots of the request, in as few tensors as possible.

        Args:
            state: the slot of the request's state.
            keep: number of an entry that is left out, because its slot has another owner now; None for no entry.
        """
        end = 0
        while end < self._held and end != keep and end not in self._changed:
            end += 1
        slots = [self._slots[self._first - 1 : self._first + end]] if self._first and end else []
        # the id of the state does not lie right before those of the entries in one tensor
        if not slots or slots[0].data_ptr() != state.data_ptr():
            slots, end = [state.unsqueeze(0)], 0
        return slots + [self.entry(at) for at in range(end, len(self.empty)) if at != keep and not self.empty[at]]

    def ids(self) -> Tensor:
        """Returns all entries."""
        if self._held == len(self.empty) and not self._changed:
            return self._slots[self._first : self._first + self._held]
        return torch.cat([self.entry(at) for at in range(len(self.empty))])

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        """Compares each entry with a value. SGLang 0.5.22 uses this to find the slots of a session that it frees."""
        return self.ids().ne(other)

    def __getitem__(self, at: int | slice | Tensor) -> Tensor:
        if not isinstance(at, int):
            return self.ids()[at]
        return self.entry(at)[0] if self.empty[at] or self._changed else self._slots[self._first + at]

    def __len__(self) -> int:
        return len(self.empty)

    def numel(self) -> int:
        """Returns the number of entries."""
        return len(self.empty)

    def tolist(self) -> list[int]:
        """Returns the entries as numbers.

        Syncs: yes.
        """
        slots: list[int] = self.ids().tolist()
        return slots

    def __repr__(self) -> str:
        return f"TrackBuffer({self.empty.count(False)} of {len(self)} entries hold a slot)"
