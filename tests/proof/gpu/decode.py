"""Measures decode steps, each beside a plain copy of as many bytes, and says which bars hold.

Alone, with its own compiling, it takes less than 170 s: `python -m tests.proof.gpu.decode --out DIR [--toy]`. DIR gets
the files of `tests.proof.gpu_proof`, which benchmarks/results keeps for each device; `decode` of its proofs.json has a
line for each thing. Times are device times of one call that finds nothing of it in the cache. What is newest comes
first, and for what has no time left, a line says so. A bar that is missed is no failure, but other bits are.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from memstate_tools.bench.clock import TooSlow
from tests.proof import gpu_proof
from tests.proof.gpu.decode_cases import (
    BF16,
    FP32,
    LAST,
    blocks,
    evicted,
    floor,
    host,
    pair,
    records,
    replays,
    selective,
    verified,
    whole,
)
from tests.proof.gpu.decode_run import MANY, Run
from tests.proof.gpu.machine import Machine, Result, TimeIsUp
from tests.proof.gpu_proof import PROGRAM, Part

FLOATS, WHOLE = (FP32, BF16, torch.float16), (torch.int16, torch.int8)
ROWS, SOME = (1, 8, MANY, 256), (1, 8, MANY)
SECONDS = 162.0  # of the whole program, which needs some more to begin and to end
ALONE = (Part("compiling", 52, f"{PROGRAM} --only decode"), Part("decode", 110))


def cases(machine: Machine) -> Iterator[tuple[str, Callable[[Run], None]]]:
    """Yields (what, case), the newest first. What is only compiled needs one number of rows."""
    few = machine.toy or machine.compiling
    rows, some, many = ((1,), (1,), 1) if few else (ROWS, SOME, MANY)
    yield "floor", partial(floor)
    yield from (("pair", partial(pair, rows=n)) for n in some[::-1])
    yield from (("replays of the pair", partial(replays, rows=n)) for n in some)
    yield from (("delta", partial(blocks, rows=many, dtype=dtype)) for dtype in FLOATS)
    for op, dtype in product(("gated_delta_step", "selective_step"), WHOLE):
        yield "whole numbers", partial(whole, op=op, dtype=dtype, rows=many)
    yield "host", partial(host, rows=some[-1])
    for n, dtype, tree in product(some[::-1], FLOATS[:2], (False, True)):
        yield "verified tree" if tree else "verified step", partial(verified, rows=n, dtype=dtype, tree=tree)
    yield from (("selective", partial(selective, rows=many, dtype=dtype)) for dtype in FLOATS[:2])
    for n, dtype in product([n for n in rows if n != many], FLOATS):
        yield "delta", partial(blocks, rows=n, dtype=dtype)
    yield from (("delta", partial(blocks, rows=many, dtype=dtype, key_fastest=True)) for dtype in FLOATS)
    yield from (("evict_first", partial(evicted, rows=n, dtype=dtype)) for n, dtype in product(rows[::-1], FLOATS))
    yield "int8 records, bf16", partial(records, rows=many)


def bars(figures: dict[str, float]) -> dict[str, str]:
    """Returns bar -> held, missed or not measured, with both numbers."""
    found = {}
    for bar, name, limit, factor, less, least in (
        ("delta, 64 rows, fp32, best block: share of a plain copy", f"delta {FP32}", "", 0.94, 0.0, True),
        ("host of a kept delta, us: at most a third of the long way", "kept delta", "long delta", 1 / 3, 0.0, False),
        ("pair, 64 rows, us: at most conv + delta - 4", "pair", "apart", 1.0, 4.0, False),
        ("int8, 64 rows, nearest, us: at most 1.7 times bf16", "int8", f"us {BF16}", 1.7, 0.0, False),
    ):
        value, other = figures.get(name), figures.get(limit) if limit else 1.0
        if value is None or other is None:
            found[bar] = "not measured"
            continue
        most = factor * other - less
        held = value >= most if least else value <= most
        found[bar] = f"{'held' if held else 'missed'}: {value:.4g}, {'at least' if least else 'at most'} {most:.4g}"
    return found


def prove(machine: Machine, result: Result) -> None:
    """Runs all cases. The result has the lines, and each bar."""
    result |= {"lines": [], "bars": bars({})}
    late = 0
    with TemporaryDirectory() as folder:
        run = Run(machine, result, Path(folder))
        for what, case in machine.mine(list(cases(machine))):
            if machine.left < LAST:
                late += 1
                run.line(what, note="late: not measured", **case.keywords)  # type: ignore[attr-defined]
                continue
            try:
                case(run)
            except TooSlow as error:
                run.line(what, note=str(error))
            except Exception as error:  # the other cases still run
                traceback.print_exc()
                run.failed(f"{what}: {type(error).__name__}: {error}"[:500])
                run.line(what, note="failed")
            result["bars"] = bars(run.figures)
    if late:
        raise TimeIsUp(f"{late} cases were late")


if __name__ == "__main__":
    sys.exit(gpu_proof.main(ALONE, SECONDS))
