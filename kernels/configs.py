"""Defines launch configurations: their axes, their keys, and the tiles that follow from them. Reads no file."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from memstate.kernels.tables import ACCESS_BYTES

ENTRIES = 256  # entries that a program looks at together
PROGRAMS_PER_SM = 4
MOVED = "unit tiles"  # key of kernels that move tiles: bytes that a lane moves, and tiles of a slot, or of a block
LONGEST = {True: 1024, False: 64}  # whether a column is contiguous -> limit of its values in an int8 block
MOST_WARPS = 16
LEAST_VALUES = 16  # fewest values of a delta tile, for elements of 4 bytes
ROW_BYTES = 64  # fewest neighbouring bytes of a state that lanes move together
SECTOR_BYTES = 32  # bytes that device memory reads or writes at a time
KEY_LANES = 8  # fewest lanes that share the keys of a value, with keys fastest


def _power_above(number: int) -> int:
    """Returns the least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def axis(*values: int, least: int, most: int, bits: bool = False, compiled: bool = True) -> Any:
    """Declares a field of a configuration, and how it is swept.

    Args:
        values: values that a sweep tries, the default first.
        least: least value that a file may have.
        most: largest value that a file may have.
        bits: whether results may have other bits under another value.
        compiled: whether compiled code depends on the value, which is then a power of two.
    """
    how = {"values": values, "least": least, "most": most, "bits": bits, "compiled": compiled}
    return field(default=values[0], metadata=how)


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel. The fields stand in the order in which a sweep tries them.

    The cheapest field comes first. Another number of programs needs no compilation. Other warps and entries need one,
    but do not change the block of bytes that a program moves at a time. A subclass names its kernel and the parts of
    the key, which are the static sizes that a launch gives to `config_of`.

    Raises:
        ValueError: says the number, and which numbers are allowed.
    """

    kernel: ClassVar[str]
    key: ClassVar[tuple[str, ...]]
    functions: ClassVar[tuple[Any, ...]] = ()  # of an operation of one's own: what it launches
    by_rows: ClassVar[bool] = False  # whether launches ask for the configuration of their rows

    def __init_subclass__(cls, kernel: str = "", key: str = "") -> None:
        if kernel:
            cls.kernel, cls.key = kernel, tuple(key.split())
            CONFIGS[kernel] = cls

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            power = each.metadata["compiled"] and not self.functions
            fits = type(value) is int and least <= value <= most
            if not fits or (power and value & (value - 1)):
                kind = "a power of two" if power else "a whole number"
                raise ValueError(f"{each.name} {value!r}: expected {kind} from {least} to {most}")

    @property
    def order(self) -> dict[str, int]:
        """The values that can change the order of a sum, and so the bits of results."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["bits"]}

    @classmethod
    def key_of(cls, *static: int) -> str:
        """Returns the key of a launch. Tiles are rounded up to a power of two, so similar planes share a key."""
        named = zip(cls.key, static, strict=True)
        return ",".join(f"{name}={_power_above(size) if name == 'tiles' else int(size)}" for name, size in named)


CONFIGS: dict[str, type[Config]] = {}  # kernel -> the class of its configurations


@dataclass(frozen=True)
class CopyConfig(Config, kernel="copy", key=MOVED):
    """The launch configuration of the copy kernel.

    Args:
        programs_per_sm: programs of a launch, for each multiprocessor.
        warps: warps of a program.
        entries: entries of the slot vectors that a program looks at together.
        lanes: words of a tile that a program moves at a time.
    """

    programs_per_sm: int = axis(PROGRAMS_PER_SM, 2, 8, 1, 16, least=1, most=32, compiled=False)
    warps: int = axis(4, 8, 2, least=1, most=16)
    entries: int = axis(ENTRIES, 512, 128, least=16, most=4096)
    lanes: int = axis(4096, 2048, 8192, 1024, least=128, most=16384)


@dataclass(frozen=True)
class GatherConfig(Config, kernel="gather", key=MOVED):
    """The launch configuration of the gather kernel.

    Args:
        warps: warps of a program.
        lanes: words of a tile.
    """

    warps: int = axis(4, 8, 2, least=1, most=16)
    lanes: int = axis(4096, 2048, 8192, 1024, least=128, most=16384)


@dataclass(frozen=True)
class ScatterConfig(CopyConfig, kernel="scatter", key=MOVED):
    """The launch configuration of the scatter kernel: fields of the copy kernel; `lanes` counts the words of a tile."""


@dataclass(frozen=True)
class PackConfig(CopyConfig, kernel="pack", key=MOVED):
    """The launch configuration of packing and unpacking records, with the fields of the copy kernel."""


@dataclass(frozen=True)
class Int8Config(Config, kernel="pack_int8", key="reduced inner bytes"):
    """The launch configuration of packing and unpacking as int8.

    Args:
        programs_per_sm: programs of a launch, for each multiprocessor.
        warps: warps of a program.
        block: elements of a block; 4096 are 32 per lane, two accesses of 16 bytes as int8. For planes of 2 bytes, 8192
            have as many bytes as 4096 of 4 bytes. They are not the default there: to pack, a thread then takes 158
            registers, so the fourth program of a multiprocessor waits until one of three ends (128 registers would be
            enough, but some columns spill). The key has the bytes, so a sweep on a GPU decides.
    """

    programs_per_sm: int = axis(PROGRAMS_PER_SM, 2, 8, 1, 16, least=1, most=32, compiled=False)
    warps: int = axis(4, 8, 2, least=1, most=16)
    block: int = axis(4096, 8192, 2048, least=512, most=32768)

    def blocks(self, columns: int, reduced: int, inner: int) -> tuple[int, int]:
        """Returns (columns of a block, values of each column in the block), powers of two.

        Args:
            columns: columns of one layer of one slot; the values of a column share a scale.
            reduced: values of a column.
            inner: elements from one value of a column to the next.
        """
        block_r = min(_power_above(reduced), LONGEST[inner == 1], self.block)
        return min(_power_above(columns), self.block // block_r), block_r


@dataclass(frozen=True)
class DeltaConfig(Config, kernel="gated_delta", key="key value bytes key_fastest fp16"):
    """The launch configuration of the gated delta step. `warp_elements` can change the order of a sum over keys.

    Args:
        warp_elements: elements of the state that a warp holds, for elements of 4 bytes; twice as many for elements of 2
            bytes or 1. So 2048 are 8 KB, in 64 fp32 hardware registers of a lane, or 128 for smaller elements.
        block_value: values of each key in a program, for elements of 4 bytes; twice as many for elements of 2 bytes or
            1. So 16 values are 64 bytes, whole memory sectors. Many values suit many rows, whose programs fill a
            device. Fewer than 16, in files of before, count as 16: they would be added up in another order.
    """

    by_rows: ClassVar[bool] = True
    warp_elements: int = axis(2048, 1024, 4096, 512, least=128, most=8192, bits=True)
    block_value: int = axis(LEAST_VALUES, 32, 64, least=4, most=128)

    def blocks(self, key: int, value: int, itemsize: int) -> tuple[int, int, int]:
        """Returns the keys and values of one tile (powers of two), and the warps that hold it.

        Args:
            key: keys of a head.
            value: values of a head.
            itemsize: bytes that an element of the state counts as, up to 8.
        """
        block_k, least = _power_above(key), min(4 * LEAST_VALUES // itemsize, _power_above(value))
        warps = min(MOST_WARPS, max(1, block_k * least * itemsize // (4 * self.warp_elements)))
        # as many warps for `least` values in every tile, so that a lane has the same keys
        times = min(max(self.block_value // LEAST_VALUES, 1), _power_above(value) // least, MOST_WARPS // warps)
        return block_k, least * times, warps * times


def shares(
    key_fastest: bool, itemsize: int, block_k: int, block_v: int, warps: int, threads: int = 32
) -> tuple[int, int]:
    """Returns (lanes that share the keys of a value in a piece of a tile, neighbouring keys of each lane).

    A piece has at least as many lanes as threads, so that no two warps hold the same lanes.

    Args:
        key_fastest: whether a slot stores `value key`.
        itemsize: bytes of an element of the state.
        block_k: keys of the tile.
        block_v: values of the tile.
        warps: warps of a program.
        threads: threads of a warp.
    """
    if key_fastest:
        run = min(ACCESS_BYTES // itemsize, block_k)
        return min(block_k // run, max(KEY_LANES, threads * warps // block_v)), run
    wide = ACCESS_BYTES // max(2, itemsize)  # of 1 byte, a lane has 16 neighbouring keys by 8 values
    return min(block_k, max(1, threads * warps // max(1, block_v // wide))), 1


@dataclass(frozen=True)
class SelectiveConfig(Config, kernel="selective", key="dim state tied bytes"):
    """The launch configuration of the selective step. It can change the order in which a sum over states is added up.

    Args:
        warp_elements: elements of the state that a warp holds; 2048 are 64 fp32 hardware registers per lane. If every
            element has its own `a`, a warp holds a quarter of this number.
        tile_warps: elements of a program, as a multiple of `warp_elements`.
    """

    warp_elements: int = axis(2048, 1024, 512, 256, least=128, most=8192, bits=True)
    tile_warps: int = axis(1, 2, 4, least=1, most=8, bits=True)

    def blocks(self, dim: int, state: int, tied: bool, least: int = 1) -> tuple[int, int, int]:
        """Returns the dims and states of one tile (powers of two), and the warps that hold it.

        Args:
            dim: dims of a head.
            state: states of a head.
            tied: whether a head has one `a`.
            least: fewest dims of a tile, unless the head has fewer. So, with dims fastest, a tile has whole sectors.
        """
        block_n = _power_above(state)
        elements = self.warp_elements if tied else max(1, self.warp_elements // 4)
        block_d = min(_power_above(dim), max(least, elements * self.tile_warps // block_n))
        return block_d, block_n, min(MOST_WARPS, max(1, block_d * block_n // elements))


def state_shares(
    dim_fastest: bool, itemsize: int, wide: int, block_d: int, block_n: int, warps: int, threads: int = 32
) -> tuple[int, int]:
    """Returns (lanes that share the states of a dim in a piece of a tile, neighbouring states of each lane).

    Few lanes need few exchanges for a sum, and repeat the work of a dim less often. Many lanes hold fewer elements of b
    and c each. With states fastest, a lane of a full tile has 2 dims, and neighbouring lanes have 64 bytes of a row.

    Args:
        dim_fastest: whether a slot stores `state dim`.
        itemsize: bytes of an element of the state.
        wide: neighbouring states that a lane moves at a time.
        block_d: dims of the tile.
        block_n: states of the tile.
        warps: warps of a program.
        threads: threads of a warp.
    """
    if dim_fastest:
        return min(block_n, max(1, threads * warps // max(1, block_d * itemsize // ACCESS_BYTES))), 1
    run = min(wide, block_n)
    return min(block_n // run, max(ROW_BYTES // (run * itemsize), 2 * threads * warps // block_d)), run


@dataclass(frozen=True)
class ConvConfig(Config, kernel="conv", key="taps channel_major bytes"):
    """The launch configuration of the convolution step.

    Args:
        warps: warps of a program.
        window_bytes: bytes of the window that 32 threads hold; the default is four taps of 16 bytes per thread, and
            less would be narrower. So programs are small, and a batch of 1 has many programs.
    """

    warps: int = axis(1, 2, 4, least=1, most=16)
    window_bytes: int = axis(2048, 4096, 1024, least=512, most=16384)

    def blocks(self, channels: int, taps: int, itemsize: int, threads: int = 32) -> tuple[int, int]:
        """Returns (channels of a program, channels that a lane accesses at a time), powers of two.

        Args:
            channels: channels of the convolution.
            taps: taps of the convolution.
            itemsize: bytes of an element of the state.
            threads: threads of a warp.
        """
        held = self.window_bytes * self.warps * threads // (32 * _power_above(taps) * itemsize)
        block = min(_power_above(channels), max(1, held))
        return block, min(block, ACCESS_BYTES // itemsize)
