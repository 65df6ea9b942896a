"""Cuts a tile of a recurrent state into pieces that say which elements a lane has. Knows no op and no slot.

A tile is `sum dim`: sums go over its first axis. If that axis is the fastest in memory, a lane has RUN neighbouring
elements of each piece. If the other axis is the fastest, a lane has PIECES neighbouring elements, one of each piece. So
a lane loads its elements of a vector along the first axis in whole words, and lanes exchange nothing.
"""

import triton
import triton.language as tl

from memstate.kernels.scaled import scaled, whole


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
        word = tl.multiple_of(ptr, 16).to(tl.pointer_type(tl.int64), bitcast=True)
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
