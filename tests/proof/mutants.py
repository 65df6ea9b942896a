"""The kernels with one thing wrong each, made from their source; `tests.proof.test_interleave` must find them all."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from memstate.kernels.dispatch import OPS

KERNELS = Path(__file__).parents[2] / "kernels"
OUTSIDE, NULL, CHANGED = "outside the tensors", "in a null slot", "may not change"
CONFLICT, DIFFERENT = r"program \d+ stores, program \d+", "other bytes"
UNORDERED = "without a barrier between"


class Mutant(NamedTuple):
    """What to replace in the module of an operation, and how it is found out."""

    op: str
    old: str
    new: str
    found: str


STRIDE = "item += tl.num_programs(0)"
MUTANTS = {
    "claim reads past the bitmap": Mutant(
        "claim", "mask=index < words, other=0", "mask=index <= words, other=0", OUTSIDE
    ),
    "claim takes a slot too many": Mutant(
        "claim", "kept = word & (-2 << last)", "kept = word & (-4 << last)", DIFFERENT
    ),
    "release of any id": Mutant("release", "(wide > 0) & (wide <= capacity)", "wide > 0", OUTSIDE),
    "release of null": Mutant(
        "release", "(wide > 0) & (wide <= capacity)", "(wide >= 0) & (wide <= capacity)", DIFFERENT
    ),
    "sections without padding": Mutant("ownership", "first + (n + 3) // 4 * 4", "first + n", f"{OUTSIDE}|{DIFFERENT}"),
    "claims of block after block": Mutant(
        "ownership", "mask=(need != 0) & (slot != 0)", "mask=index < BLOCK", f"{OUTSIDE}|{DIFFERENT}"
    ),
    "phases without barriers": Mutant("ownership", "tl.debug_barrier()", "pass", UNORDERED),
    "an audit without barriers": Mutant("audit", "tl.debug_barrier()", "pass", UNORDERED),
    "owners that are not counted one by one": Mutant(
        "audit",
        'tl.atomic_add(out_ptr + owner, tl.full(owner.shape, 1, tl.int32), mask=slot != 0, sem="relaxed")',
        "tl.store(out_ptr + owner, tl.load(out_ptr + owner, mask=slot != 0) + 1, mask=slot != 0)",
        UNORDERED,
    ),
    "resolve of any register": Mutant("resolve", "(register > 0) & (register < size)", "register > 0", OUTSIDE),
    "resolve by every program": Mutant(
        "resolve", "index = tl.program_id(0) * BLOCK +", "index = 0 * tl.program_id(0) +", CONFLICT
    ),
    "owners of no slot": Mutant("audit", "owner = tl.where(inside, slot, 0)", "owner = slot", OUTSIDE),
    "plan of more than the batch": Mutant(
        "plan", "tl.where(real, row, 0), mask=inside", "tl.where(real, row, 0)", OUTSIDE
    ),
    "plan labels the null row": Mutant(
        "plan", "labels_ptr + live, after, mask=real", "labels_ptr + live, after, mask=inside", DIFFERENT
    ),
    "plan writes what it reads": Mutant("plan", "tl.store(out_rows_ptr", "tl.store(rows_ptr", CHANGED),
    "settle of dead entries": Mutant("settle", "same &= result != DEAD", "same &= result != DEAD + 1", DIFFERENT),
    "accept of more than the batch": Mutant("accept", "mark - length, 0), mask=inside", "mark - length, 0)", OUTSIDE),
    "copies of any slot": Mutant("copy_slots", "(slot > 0) & (slot <= capacity)", "slot > 0", f"{OUTSIDE}|{CHANGED}"),
    "copies to null": Mutant("copy_slots", "due = (to != 0) & (of != 0)", "due = (of != 0)", NULL),
    "copies from null": Mutant("copy_slots", "due = (to != 0) & (of != 0)", "due = (to != 0)", DIFFERENT),
    "copies by every program": Mutant("copy_slots", STRIDE, "item += 1", CONFLICT),
    "zeros in null": Mutant("zero_slots", "due = to != 0", "due = index < n", NULL),
    "zeros from the first item on": Mutant(
        "zero_slots", "item = tl.program_id(0)", "item = tl.program_id(0) // 2", CONFLICT
    ),
    "registers below 0": Mutant("run_data", "mask=register > 0, other=0", "mask=register < capacity, other=0", OUTSIDE),
    "tiles too long": Mutant(
        "run_data",
        "index = at + tl.arange(0, LANES)",
        "index = at + 1 + tl.arange(0, LANES)",
        f"{OUTSIDE}|{CHANGED}|{DIFFERENT}",
    ),
    "convolution stores null": Mutant(
        "conv_step", "new[part], mask=tl.where(real, fits, False)", "new[part], mask=fits", NULL
    ),
    "convolution of any channel": Mutant("conv_step", "inside = channel < CHANNELS", "inside = channel >= 0", OUTSIDE),
    "gated delta reads null": Mutant(
        "gated_delta_step", "mask=tl.where(read > 0, in_tile, False)", "mask=in_tile", NULL
    ),
    "gated delta stores null": Mutant("gated_delta_step", "mask=tl.where(real, in_tile, False)", "mask=in_tile", NULL),
    "gated delta, one head for all": Mutant(
        "gated_delta_step", "tile_ptr = state_ptr + head * (KEY * VALUE)", "tile_ptr = state_ptr", CONFLICT
    ),
    "selective snapshots to null": Mutant(
        "selective_step", "mask=tl.where(snapshot > 0, in_tile, False)", "mask=in_tile", NULL
    ),
    "selective, blocks overlap": Mutant(
        "selective_step", "dim = tl.program_id(0) * BLOCK_D", "dim = tl.program_id(0) * (BLOCK_D // 2)", CONFLICT
    ),
    "gather of any slot": Mutant("gather_slots", "(slot > 0) & (slot <= last)", "slot > 0", OUTSIDE),
    "gather of null": Mutant("gather_slots", "mask=tl.where(known, inside, False)", "mask=inside", NULL),
    "gather by every program": Mutant(
        "gather_slots", "item = tl.program_id(0)", "item = tl.program_id(0) // 2", CONFLICT
    ),
    "scatter to any slot": Mutant("scatter_slots", "(slot > 0) & (slot <= last)", "slot > 0", f"{OUTSIDE}|{CHANGED}"),
    "scatter by every program": Mutant("scatter_accepted", STRIDE, "item += 1", CONFLICT),
    "scatter of any count": Mutant(
        "scatter_accepted", "(count >= 1) & (count <= steps)", "(count >= 1)", f"{OUTSIDE}|{CHANGED}"
    ),
    "scatter of places that are not": Mutant("scatter_inputs", "tl.where(inside, place, 0)", "place", OUTSIDE),
}


def mutated(op: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The module of an operation with every occurrence of some text replaced, loaded beside the right one."""
    source = (KERNELS / f"{OPS[op]}.py").read_text()
    for old, new in changes:
        assert old in source, f"kernels/{OPS[op]}.py has no more {old!r}: mutate what stands there now"
        source = source.replace(old, new)
    path = folder / f"{OPS[op]}.py"
    path.write_text(source)
    spec = spec_from_file_location(f"memstate.kernels.mutated_{OPS[op]}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
