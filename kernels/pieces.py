"""Moves tiles of a recurrent state, cut into pieces that say which elements a lane has. Knows no op.

A tile is `sum dim`: sums go over its first axis. If that axis is the fastest in memory, a lane has RUN neighbouring
elements of each piece. If the other axis is the fastest, a lane has PIECES neighbouring elements, one of each piece. So
a lane loads its elements of a vector along the first axis in whole words, and lanes exchange nothing.
"""

import triton
import triton.language as tl

from memstate.kernels.scaled import draws, scaled, whole


@triton.jit
def _element(word, part: tl.constexpr, dtype: tl.constexpr):
    """Returns element `part` of an 8-byte word, in fp32. A bf16 is the upper half of an fp32: one instruction."""
    if dtype == tl.bfloat16:
        half = (word >> (part // 2 * 32)).to(tl.int32)
        bits = (half & -65536) if part % 2 else half << 16
        element = bits.to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        element = (word >> (16 * part)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        element = (word >> (32 * part)).to(tl.int32).to(tl.float32, bitcast=True)
    return element


@triton.jit
def _inside(ptr, at, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Returns the elements at `at`, zeros from SIZE on; WHOLE says that all are below SIZE."""
    return tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=at < SIZE, other=0)


@triton.jit
def _run(ptr, at, SIZE: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """Returns RUN neighbouring elements of each lane, in fp32: RUN tensors `lane`. Elements from SIZE on are zeros.

    If the shape alone says that every vector begins on a 16-byte boundary (see `check_tokens`), each lane loads the few
    words of 8 bytes that it uses, one or two at a time. So lanes exchange nothing.

    `ptr` points to the first element of the vector; `at` is the first element of each lane's run. WHOLE says that no
    run goes beyond SIZE.
    """
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    PER_WORD: tl.constexpr = 64 // bits
    # Up to 8 lanes load two words each at a time, 16 words together, and each lane only its own words.
    WORDS: tl.constexpr = 2 if RUN * bits % 128 == 0 and at.shape[0] <= 8 else 1
    elements = ()
    if SIZE * bits % 128 == 0 and RUN * bits % 64 == 0:
        word = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for piece in tl.static_range(RUN // (PER_WORD * WORDS)):
            first = at // PER_WORD + piece * WORDS
            if WORDS == 2:
                words_at = tl.multiple_of(first, 2)[:, None] + tl.arange(0, 2)[None, :]
                pair = tl.split(_inside(word, words_at, SIZE // PER_WORD, WHOLE))
            else:
                pair = (_inside(word, first, SIZE // PER_WORD, WHOLE),)
            for half in tl.static_range(WORDS):
                for part in tl.static_range(PER_WORD):
                    elements += (_element(pair[half], part, ptr.dtype.element_ty),)
    else:
        for part in tl.static_range(RUN):
            elements += (_inside(ptr, at + part, SIZE, WHOLE).to(tl.float32),)
    return elements


@triton.jit
def apart(tensor, COUNT: tl.constexpr):
    """Returns the COUNT tensors along the last axis, in order. COUNT is 1, 2, 4, 8 or 16."""
    tensors = (tensor,)
    for level in tl.static_range(4):
        if 1 << level < COUNT:
            even = ()
            odd = ()
            for part in tl.static_range(1 << level):
                columns = tensors[part]
                if 2 << level < COUNT:
                    columns = columns.reshape(*tensor.shape[:-1], COUNT >> (level + 1), 2)
                pair = tl.split(columns)
                even += (pair[0],)
                odd += (pair[1],)
            tensors = even + odd
    return tensors


@triton.jit
def together(tensors, COUNT: tl.constexpr):
    """Returns the tensor that has these COUNT tensors along its last axis: the inverse of `apart`."""
    for level in tl.static_range(4):
        if 1 << level < COUNT:
            pairs = ()
            for part in tl.static_range(COUNT >> (level + 1)):
                pair = tl.join(tensors[part], tensors[part + (COUNT >> (level + 1))])
                pairs += (pair.reshape(*pair.shape[:-2], 2 << level) if level else pair,)
            tensors = pairs
    return tensors[0]


@triton.jit
def lane_part(lane, LANES: tl.constexpr, APART: tl.constexpr):
    """Returns which part of a vector a lane has: such that sums pair the same parts, however many lanes a warp has."""
    return lane % (LANES // APART) * APART + lane // (LANES // APART) if APART > 1 else lane


@triton.jit
def vector(
    ptr, SIZE: tl.constexpr, SUM_FASTEST: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr,
    APART: tl.constexpr = 1, JOINED: tl.constexpr = False,
):  # fmt: skip
    """Returns a vector along the axis of sums, in fp32: a tensor `lane` for each element of a lane.

    If JOINED, one tensor for each piece.
    """
    lane = tl.arange(0, LANES)
    WHOLE: tl.constexpr = LANES * RUN * PIECES == SIZE
    if not SUM_FASTEST:
        return _run(ptr, lane_part(lane, LANES, APART) * PIECES, SIZE, PIECES, WHOLE)
    tensors = ()
    for piece in tl.static_range(PIECES):
        run = _run(ptr, (piece * LANES + lane) * RUN, SIZE, RUN, WHOLE)
        tensors += (together(run, RUN).reshape(LANES * RUN),) if JOINED else run
    return tensors


@triton.jit
def halves(word):
    """Returns the low and the high bf16 of each 32-bit word, in fp32: one instruction each."""
    return (word << 16).to(tl.float32, bitcast=True), (word >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(block, COUNT: tl.constexpr):
    """Splits a block `lane*COUNT value` into COUNT tensors `lane value`: the neighbouring rows that each lane holds."""
    if COUNT > 1:
        block = block.reshape(block.shape[0] // COUNT, COUNT, block.shape[1]).trans(0, 2, 1)
    return apart(block, COUNT)


@triton.jit
def joined(rows, COUNT: tl.constexpr):
    """Returns the block `lane*COUNT value` that has these rows: the inverse of `_rows_of`."""
    block = together(rows, COUNT)
    if COUNT > 1:
        block = block.trans(0, 2, 1).reshape(block.shape[0] * COUNT, block.shape[1])
    return block


@triton.jit
def _load(ptr, mask, SUM_FASTEST: tl.constexpr, RUN: tl.constexpr, EARLY: tl.constexpr):
    """Returns a piece of a tile in fp32: RUN tensors `lane dim`. Zeros outside `mask`.

    Whole numbers stay as they are. If EARLY, the loads go past the first cache, because the launch in front of this one
    still runs.

    Two neighbouring bf16 elements of a lane are joined again to the word that was loaded, which costs nothing, and are
    converted together. To convert each element alone takes 1.5 times as many instructions.
    """
    loaded = ()
    cache: tl.constexpr = ".cg" if EARLY else ""
    if ptr.dtype.element_ty.is_int():
        loaded += _rows_of(tl.load(ptr, mask=mask, other=0, cache_modifier=cache), RUN)
    elif ptr.dtype.element_ty == tl.bfloat16 and (RUN if SUM_FASTEST else ptr.shape[1]) > 1:
        word = ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
        bits = tl.load(word, mask=mask, other=0, cache_modifier=cache).to(tl.uint32)
        if SUM_FASTEST:
            rows = _rows_of(bits, RUN)
            for row in tl.static_range(0, RUN, 2):
                loaded += halves(rows[row] | (rows[row + 1] << 16))
        else:
            pair = tl.split(bits.reshape(bits.shape[0], bits.shape[1] // 2, 2))
            both = halves(pair[0] | (pair[1] << 16))
            loaded += (tl.join(both[0], both[1]).reshape(bits.shape[0], bits.shape[1]),)
    else:
        loaded += _rows_of(tl.load(ptr, mask=mask, other=0.0, cache_modifier=cache).to(tl.float32), RUN)
    return loaded


@triton.jit
def tile_of(
    plane, slot, SIZE: tl.constexpr, PIECE_STEP: tl.constexpr, STRIDE: tl.constexpr, SUM_FASTEST: tl.constexpr,
    RUN: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Returns the tile of a slot in fp32: PIECES * RUN tensors `lane dim`. It is zeros for slot 0.

    Args:
        plane: (memory of the first piece of the tile in slot 0, distance from slot to slot, both for the scales, which
            may be None, the places of the first piece along the axis of sums, and which of the other axis are inside).
        slot: the slot.
        SIZE: elements along the axis of sums.
        PIECE_STEP: elements along this axis from one piece to the next.
        STRIDE: distance of two neighbours along this axis.
        SUM_FASTEST: whether this axis is the fastest.
        RUN: neighbouring elements of a piece that are tensors of their own.
        PIECES: pieces of the tile.
        EARLY: whether the launch in front of this one still runs.
    """
    ptr, apart, scales_ptr, scales_apart, index, inside = plane
    tile = ()
    # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
    for piece in tl.static_range(PIECES):
        mask = tl.where(slot > 0, (index + piece * PIECE_STEP < SIZE)[:, None] & inside[None, :], False)
        tile += _load(ptr + slot * apart + piece * (PIECE_STEP * STRIDE), mask, SUM_FASTEST, RUN, EARLY)
    if scales_ptr is not None:
        mask = tl.where(slot > 0, inside, False)
        cache: tl.constexpr = ".cg" if EARLY else ""
        scale = tl.load(scales_ptr + slot * scales_apart, mask=mask, other=0.0, cache_modifier=cache)
        tile = scaled(tile, scale, PIECES * RUN)
    return tile


@triton.jit
def store_tile(
    plane, slots, s, drawn, SIZE: tl.constexpr, PIECE_STEP: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Stores a tile to some slots, unless they are 0; see `tile_of`. `drawn` are draws for the tile, see `whole`."""
    ptr, apart, scales_ptr, scales_apart, index, inside = plane
    if scales_ptr is not None:
        s, scale = whole(s, drawn, ptr.dtype.element_ty, PIECES * RUN)
    for which in tl.static_range(len(slots)):
        slot = slots[which]
        if slot > 0:
            if scales_ptr is not None:
                tl.store(scales_ptr + slot * scales_apart, scale, mask=inside)
            for piece in tl.static_range(PIECES):
                mask = (index + piece * PIECE_STEP < SIZE)[:, None] & inside[None, :]
                part = ()
                for row in tl.static_range(RUN):
                    part += (s[piece * RUN + row],)
                block = joined(part, RUN).to(ptr.dtype.element_ty)
                tl.store(ptr + slot * apart + piece * (PIECE_STEP * STRIDE), block, mask=mask)


@triton.jit
def store_row(
    ptr, first, at, row, mask, SIZE: tl.constexpr, SUM_FASTEST: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Stores a result of sums, SIZE elements from `first` on: those at `at`. Slots begin at multiples of UNIT."""
    if SUM_FASTEST or SIZE * ptr.dtype.element_ty.primitive_bitwidth % 128 != 0:
        tl.store(ptr + (first + at), row, mask=mask)
    else:
        # Several lanes have the same elements. The first of them stores, so lanes exchange nothing.
        WIDTH: tl.constexpr = min(16, UNIT * ptr.dtype.element_ty.primitive_bitwidth // 8)  # bytes that it stores
        lane = tl.arange(0, LANES)[:, None]
        same = tl.broadcast_to(row[None, :], (LANES, row.shape[0]))
        start = tl.multiple_of(ptr + first, WIDTH)
        tl.store(start + at[None, :] + tl.zeros_like(lane), same, mask=(lane == 0) & mask[None, :])


@triton.jit
def drawn_for(
    s, chance, length, real, SUM_FASTEST: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr,
    APART: tl.constexpr = 1,
):  # fmt: skip
    """Returns draws for a tile, split as `vector` does; None if `chance` is None, otherwise see `draws`."""
    drawn = None
    if chance is not None:
        drawn = ()
        lane = tl.arange(0, LANES)
        if SUM_FASTEST:
            for piece in tl.static_range(PIECES):
                drawn += draws(chance, length, real, (piece * LANES + lane) * RUN, s[piece * RUN], RUN)
        else:
            drawn = draws(chance, length, real, lane_part(lane, LANES, APART) * PIECES, s[0], PIECES)
    return drawn


@triton.jit
def rounded(tiles, dtype: tl.constexpr, PIECES: tl.constexpr, drawn=None):
    """Returns the pieces rounded to the dtype of a slot; bf16 in pairs, which takes fewer and faster instructions.

    Whole numbers are rounded with the draws `drawn`, see `memstate.kernels.scaled.whole`.
    """
    stored = ()
    if dtype.is_int():
        numbers, scale = whole(tiles, drawn, dtype, PIECES)
        stored = scaled(numbers, scale, PIECES)
    elif dtype == tl.bfloat16 and PIECES > 1:
        for piece in tl.static_range(0, PIECES, 2):
            low = tiles[piece].to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = tiles[piece + 1].to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            stored += halves(low | (high << 16))
    else:
        for piece in tl.static_range(PIECES):
            stored += (tiles[piece].to(dtype).to(tl.float32),)
    return stored


@triton.jit
def dot(vectors, tiles, PIECES: tl.constexpr):
    """Returns sums over the first axis, as a tensor `dim`: over the elements of each lane in order, then over lanes."""
    products = vectors[0][:, None] * tiles[0]
    for piece in tl.static_range(1, PIECES):
        products = tl.fma(vectors[piece][:, None], tiles[piece], products)
    return tl.sum(products, 0)
