"""Builds the body of a target rank's record from bodies of source ranks, among which heads are divided differently.

rank 0 of 2   heads 0 1 | group 0  ─┬─▶  rank 0 of 4   head 0 | group 0     a target rank reads from as few source
                                    └─▶  rank 1 of 4   head 1 | group 0     ranks as possible, and of replicas
rank 1 of 2   heads 2 3 | group 1  ──▶ ..                                   from the lowest rank

Uses no store and no key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from einops import rearrange

from memstate.checks import is_whole, whole
from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.state.layout import MOVE_BYTES, Plane, StateLayout
from memstate.state.sharding import Owned
from memstate.tiers.stores.base import Bytes


class Resplit:
    """Builds record bodies of one split from record bodies of another split.

    Only moves bytes. Planes without parts are whole on every rank. A body is a record without its header: one slot of a
    rank in slot-major order, aligned to 16 bytes. The scales `x.scale` of an int8 plane `x` must be cut like `x`.

    Args:
        layout: The whole model's states or KV pages, in any order; `layout.shard` says how both splits cut it.
        ranks: Number of source ranks.
        to_ranks: Number of target ranks.

    Raises:
        InvalidArgument: The number of units of a part is neither a multiple nor a divisor of a number of ranks.
        LayoutMismatch: A rank would hold values without their scales.

    Example:
        >>> from memstate.state.layout import Part
        >>> layout = StateLayout((Plane("ssm", (4, 8), torch.float32, parts=(Part("heads", 4),)),), layers=2)
        >>> Resplit(layout, ranks=4, to_ranks=2).sources(1)
        [2, 3]
    """

    def __init__(self, layout: StateLayout, ranks: int, to_ranks: int) -> None:
        self.layout = replace(layout, order="slot_major", alignment=MOVE_BYTES)
        _require_scales(self.layout)
        self.ranks, self.to_ranks = whole("ranks", ranks), whole("to_ranks", to_ranks)
        self._from, self._to = self.layout.shard(self.ranks), self.layout.shard(self.to_ranks)
        self._held = [[_held(plane, self.ranks, rank) for plane in layout.planes] for rank in range(self.ranks)]
        wanted = [[_held(plane, self.to_ranks, rank) for plane in layout.planes] for rank in range(self.to_ranks)]
        self._sources = [self._fewest(planes) for planes in wanted]
        self._moves = [self._cut(*each) for each in zip(wanted, self._sources, strict=True)]

    def __repr__(self) -> str:
        planes = ", ".join(plane.name for plane in self.layout.planes)
        return f"Resplit({planes} x {self.layout.layers} layers, {self.ranks} -> {self.to_ranks} ranks)"

    def sources(self, rank: int) -> list[int]:
        """Returns the source ranks from which a target rank's body is built: as few and as low ones as possible.

        Raises:
            InvalidArgument: There is no such target rank.
        """
        return list(self._sources[self._require_rank(rank)])

    def body(self, rank: int, bodies: Mapping[int, Bytes], out: Bytes) -> None:
        """Writes the body of a target rank, with zeros as padding.

        Args:
            rank: The target rank.
            bodies: Source rank -> its body, uint8 `byte`, contiguous. `sources(rank)` names the ranks.
            out: The target body, uint8 `byte`, contiguous; it must share no memory with the source bodies.

        Raises:
            InvalidArgument: A body is missing or has the wrong size; nothing was written.

        Syncs: no.
        """
        sources = self._sources[self._require_rank(rank)]
        for source in sources:
            if source not in bodies:
                raise InvalidArgument(f"bodies of ranks {sorted(bodies)}: rank {rank} also needs that of {source}")
            _require_body(f"body of rank {source}", bodies[source], self._from)
            if np.may_share_memory(bodies[source], out):
                raise InvalidArgument(f"out shares memory with the body of rank {source}: expected memory of its own")
        _require_body("out", out, self._to)
        if not out.flags.writeable:
            raise InvalidArgument("out is read-only: expected memory that can be written")
        held, planes = {source: _planes(self._from, bodies[source]) for source in sources}, _planes(self._to, out)
        for plane, source, taken, given in self._moves[rank]:
            planes[plane][:, :, given] = held[source][plane][:, :, taken]
        for _, padding in _blocks(self._to, out):
            padding[:] = 0

    def _fewest(self, wanted: Sequence[Sequence[Owned]]) -> list[int]:
        """Chooses the source ranks. Each wanted piece lies on neighbouring ranks: a run.

        Goes from the last run to the first, and takes the lowest rank of a run unless a rank in the run is already
        taken. So it takes as few ranks as possible, and of these choices the lowest ranks.
        """
        runs: list[range] = []
        for number, parts in enumerate(wanted):
            for place, want in enumerate(parts):
                holders: dict[tuple[int, int], list[int]] = {}
                for rank, planes in enumerate(self._held):
                    whole = planes[number][place].whole
                    if whole.start < want.whole.stop and want.whole.start < whole.stop:
                        holders.setdefault((whole.start, whole.stop), []).append(rank)
                runs += [range(ranks[0], ranks[-1] + 1) for ranks in holders.values()]
        taken: list[int] = []
        for run in sorted(runs, key=lambda run: run.start, reverse=True):
            if not taken or taken[-1] not in run:
                taken.append(run.start)
        return taken[::-1]

    def _cut(self, wanted: Sequence[Sequence[Owned]], sources: Sequence[int]) -> list[tuple[int, int, slice, slice]]:
        """Returns the copies that build the wanted pieces, each from the lowest source rank that has its elements.

        Returns:
            For each copy: (plane, source rank, range in the source, range in the target). Ranges count elements along
            the cut axis.
        """
        moves = []
        for number, parts in enumerate(wanted):
            for place, want in enumerate(parts):
                at, offset = want.whole.start, want.local.start - want.whole.start
                for source in sources:  # ascending, because pieces of higher ranks lie further along the axis
                    have = self._held[source][number][place]
                    if have.whole.start <= at < min(have.whole.stop, want.whole.stop):
                        end, back = min(have.whole.stop, want.whole.stop), have.local.start - have.whole.start
                        moves.append((number, source, slice(at + back, end + back), slice(at + offset, end + offset)))
                        at = end
                assert at == want.whole.stop, f"{want} is on none of the ranks {sources}"
        return moves

    def _require_rank(self, rank: int) -> int:
        if not is_whole(rank) or not 0 <= rank < self.to_ranks:
            raise InvalidArgument(f"rank {rank!r}: expected 0 to {self.to_ranks - 1}, of the target")
        return int(rank)


def _held(plane: Plane, ranks: int, rank: int) -> list[Owned]:
    """Returns which elements of a plane a rank holds, along the cut axis."""
    length = plane.shape[plane.axis] if plane.shape else 1
    return [
        owned if plane.parts else Owned(owned.part, slice(0, length), slice(0, length))
        for owned in plane.owned(ranks, rank)
    ]


def _blocks(layout: StateLayout, body: Bytes) -> list[tuple[Bytes, Bytes]]:
    """Returns (bytes, padding) of each plane of a body, both `layer byte`."""
    blocks = []
    for plane, row in zip(layout.planes, layout.table(), strict=True):
        shape = layout.layers_of(plane), row.payload + row.padding
        block = np.lib.stride_tricks.as_strided(body[row.offset :], shape, (row.layer_stride, 1))
        blocks.append((block[:, : row.payload], block[:, row.payload :]))
    return blocks


def _planes(layout: StateLayout, body: Bytes) -> list[Bytes]:
    """Returns views of a body's planes, `layer outer along byte`: `along` is the cut axis, `outer` the axes before."""
    views = []
    for plane, (block, _) in zip(layout.planes, _blocks(layout, body), strict=True):
        outer, along = prod(plane.shape[: plane.axis]), plane.shape[plane.axis] if plane.shape else 1
        inner = prod(plane.shape[plane.axis + 1 :]) * plane.dtype.itemsize
        views.append(
            rearrange(block, "layer (outer along byte) -> layer outer along byte", outer=outer, along=along, byte=inner)
        )
    return views


def _require_body(what: str, body: Bytes, layout: StateLayout) -> None:
    """Raises InvalidArgument if a body has the wrong dtype, shape or memory order."""
    size = layout.bytes_per_slot
    if body.dtype != np.uint8 or body.shape != (size,) or not body.flags.c_contiguous:
        raise InvalidArgument(
            f"{what}: {body.dtype} {body.shape}, expected {size} contiguous bytes, without the header"
        )


def _require_scales(layout: StateLayout) -> None:
    """Raises LayoutMismatch if a rank would hold values without their scales.

    Scales have the shape of the values, but length 1 along the axis whose values share one scale.
    """
    planes = {plane.name: plane for plane in layout.planes}
    for values in layout.planes:
        scales = planes.get(f"{values.name}.scale")
        if scales is None or values.dtype != torch.int8:
            continue
        shape, axis = values.shape, values.axis
        same = [
            (*shape[:shared], 1, *shape[shared + 1 :]) == scales.shape and (not values.parts or scales.axis == axis)
            for shared in range(len(shape))
        ]
        if not any(same) or scales.parts != values.parts:
            raise LayoutMismatch(
                f"{values!r} on axis {axis} with {scales!r} on axis {scales.axis}: ranks cut values and their scales"
                " alike only where no scale is of values of two heads; give both the same parts, or hand over records"
                " without int8"
            )
