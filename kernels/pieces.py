"""A tile of a recurrent state in pieces, of which a lane knows its elements. Knows no op and no slot.

A tile is `sum dim`: its first axis is the one that sums go over. With that axis fastest in memory a lane has RUN
neighbouring elements of each piece; with the other one fastest, PIECES neighbouring ones, one of each piece. So a lane
loads what it needs of a vector along that axis in whole words, and nothing is exchanged.
"""

import triton
import triton.language as tl


@triton.jit
def _element(word, part: tl.constexpr, dtype: tl.constexpr):
    """An element of a word of 8 bytes, in fp32. A bf16 is the upper half of its fp32: one instruction for each."""
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
    """Elements, and zeros behind the last of SIZE. WHOLE: none is."""
    return tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=at < SIZE, other=0)


@triton.jit
def _run(ptr, at, SIZE: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """RUN neighbouring elements of each lane, in fp32: one tensor `lane` for each. Zeros behind the last of SIZE.

    They are moved 16 bytes at a time where the shape alone says that every run lies on 16 bytes: see `check_tokens`. So
    few words of 8 bytes are loaded by the lanes that use them, and nothing is exchanged.

    ptr: the first element of the vector. at: the first element of each lane's run. WHOLE: all runs are inside.
    """
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    PER_WORD: tl.constexpr = 64 // bits
    WORDS: tl.constexpr = (
        2 if RUN * bits % 128 == 0 and at.shape[0] <= 8 else 1
    )  # 16 words are loaded where they are used
    found = ()
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
                    found += (_element(pair[half], part, ptr.dtype.element_ty),)
    else:
        for part in tl.static_range(RUN):
            found += (_inside(ptr, at + part, SIZE, WHOLE).to(tl.float32),)
    return found


@triton.jit
def _joined(columns, COUNT: tl.constexpr):
    """One tensor of COUNT tensors, a power of two: element i of each lane is that of column i."""
    for level in tl.static_range(3):
        if 1 << level < COUNT:
            pairs = ()
            for part in tl.static_range(COUNT >> (level + 1)):
                pair = tl.join(columns[part], columns[part + (COUNT >> (level + 1))])
                pairs += (pair.reshape(pair.shape[0], 2 << level) if level else pair,)
            columns = pairs
    found = columns[0]
    if COUNT > 1:
        found = found.reshape(found.shape[0] * COUNT)
    return found


@triton.jit
def vector(
    ptr, SIZE: tl.constexpr, SUM_FASTEST: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """The elements of a vector along the axis of sums, as the pieces have them: a tensor for each, in fp32."""
    lane = tl.arange(0, LANES)
    WHOLE: tl.constexpr = LANES * RUN * PIECES == SIZE
    if not SUM_FASTEST:
        return _run(ptr, lane * PIECES, SIZE, PIECES, WHOLE)
    found = ()
    for piece in tl.static_range(PIECES):
        found += (_joined(_run(ptr, (piece * LANES + lane) * RUN, SIZE, RUN, WHOLE), RUN),)
    return found


@triton.jit
def halves(word):
    """The two bf16 elements of each word of 32 bits, in fp32: one instruction for each."""
    return (word << 16).to(tl.float32, bitcast=True), (word >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded(tiles, dtype: tl.constexpr, PIECES: tl.constexpr):
    """The pieces as a slot would have them; two of bf16 at a time, which takes fewer and faster instructions."""
    found = ()
    if dtype == tl.bfloat16 and PIECES > 1:
        for piece in tl.static_range(0, PIECES, 2):
            low = tiles[piece].to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = tiles[piece + 1].to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
            found += halves(low | (high << 16))
    else:
        for piece in tl.static_range(PIECES):
            found += (tiles[piece].to(dtype).to(tl.float32),)
    return found


@triton.jit
def dot(vectors, tiles, PIECES: tl.constexpr):
    """Sums over the first axis, `dim`: those of a lane one after the other, then those of all lanes."""
    found = vectors[0][:, None] * tiles[0]
    for piece in tl.static_range(1, PIECES):
        found = tl.fma(vectors[piece][:, None], tiles[piece], found)
    return tl.sum(found, 0)
