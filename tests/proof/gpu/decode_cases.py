"""Has the cases of `decode`: each times one thing in its forms, and compares bits where there are two ways to them."""

from functools import partial
from itertools import product

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels import remembered
from memstate.kernels.configs import DeltaConfig, Int8Config
from memstate.kernels.tuned import trying
from memstate_tools.models import model_of, toy_of
from memstate_tools.workload import make
from tests.proof.gpu.decode_inputs import Arguments, nbytes, positional, wrong_bytes
from tests.proof.gpu.decode_run import Act, Run
from tests.support.decode_case import same_bits

FP32, BF16 = torch.float32, torch.bfloat16
BLOCKS = (16, 32, 64)
REPLAYS, TURN = 1000, 10  # replays of the pair; those between two comparisons
SLOW, TOY_SLOW = 64, 2  # tokens of a convolution that takes far longer than the start of the step behind it
LAYERS, TOY_LAYERS = 36, 2  # pairs of a replayed graph: those of Qwen3-Next
LAST = 3.0  # seconds that must be left to begin another case


# -- conv, then delta --------------------------------------------------------------------------------------------------


class Pair:
    """A convolution and the gated delta step behind it: as two calls, or as one operation."""

    def __init__(self, run: Run, rows: int, tokens: int = 1, place: bool = False, seed: int = 1) -> None:
        torch.manual_seed(seed)
        inputs, self._ops = run.inputs, run.ops
        heads, _, keys, values = inputs.delta_shape
        self.conv_given = inputs.conv(rows, tokens, place)
        self.mixed = self.conv_given["out"]
        slots = {name: self.conv_given[name] for name in ("read", "write", "snapshot", "tokens")}
        self.delta_given: Arguments = inputs.cut(self.mixed) | inputs.gates(rows, tokens) | slots
        self.delta_given |= inputs.state(rows, (heads, keys, values), FP32, 1)
        self._both = positional("conv_step", self.conv_given), positional("gated_delta_step", self.delta_given)

    def conv(self) -> None:
        self._ops.conv_step(**self.conv_given)

    def delta(self) -> None:
        self._ops.gated_delta_step(**self.delta_given)

    def two(self) -> None:
        self.conv()
        self.delta()

    def one(self) -> None:
        self._ops.conv_delta_step(*self._both)

    @property
    def written(self) -> dict[str, Tensor]:
        given = self.delta_given
        return {"out": given["out"], "state": given["state"], "window": self.conv_given["state"], "mixed": self.mixed}


def pair(run: Run, rows: int) -> None:
    made = Pair(run, rows)
    us = {f"us_{name}": run.us(getattr(made, name)) for name in ("conv", "delta", "two")}
    figures: dict[str, object] = {"rows": rows, **us, "us_two_in_graph": run.graph_us(made.two)}
    figures |= {"us": (taken := run.us(made.one)), "us_in_graph": run.graph_us(made.one)}
    if rows == run.many:
        run.figures |= {"pair": taken, "apart": min(us["us_two"], us["us_conv"] + us["us_delta"])}
    run.line("pair", **figures)


def replays(run: Run, rows: int) -> None:
    """Replays two pairs on the same slots, in place, beside the same steps as two launches each.

    The convolution has many tokens, so the step behind it has started long before q, k and v are there. These are NaN
    at first.
    """
    few = run.machine.toy or run.machine.compiling
    tokens = TOY_SLOW if few else SLOW
    mine, other = (Pair(run, rows, tokens, place=True) for _ in range(2))

    def steps(side: Pair, step: Act) -> None:
        for _ in range(2):
            side.mixed.fill_(float("nan"))
            step()

    acts = list[Act]()
    for side, step in ((mine, mine.one), (other, other.two)):
        act = partial(steps, side, step)
        act()
        run.machine.wait()
        acts.append(run.machine.capture(act))
    wrong, done = "", 0
    while done < (TURN if few else REPLAYS) and not wrong and run.machine.left > LAST:
        other.conv_given["x"].copy_(mine.conv_given["x"].normal_())
        for act in acts:
            for _ in range(TURN):
                act()
        done += TURN
        differ = [name for name, each in mine.written.items() if not same_bits(each, other.written[name])]
        wrong = f"pair of {rows} rows, replay {done}: {', '.join(differ)} differ from two launches" if differ else ""
    run.failed(wrong)
    run.line(
        "replays of the pair", rows=rows, replays=done, equal=not wrong, tokens=tokens, us_conv=run.us(mine.conv),
        us_two=run.us(mine.two), us=run.us(mine.one),
    )  # fmt: skip


# -- states in fewer bits ----------------------------------------------------------------------------------------------


def whole(run: Run, op: str, dtype: torch.dtype, rows: int) -> None:
    """Times states of whole numbers, and compares their bytes with the definition."""
    axis, of = (1, run.inputs.delta) if op == "gated_delta_step" else (2, run.inputs.mamba)
    for chance in (False, True):
        how = {"op": op, "dtype": dtype, "rows": rows, "rounds": "by chance" if chance else "nearest"}
        torch.manual_seed(rows)
        few, given = ({**of(n, dtype), **(run.inputs.by_chance(n) if chance else {})} for n in (2, rows))
        wrong = wrong_bytes(op, getattr(run.ops, op), few, axis)
        run.differs(wrong and f"{how['rounds']}: {wrong}")
        us = run.us(partial(getattr(run.ops, op), **given))
        if (op, dtype, rows, chance) == ("gated_delta_step", torch.int8, run.many, False):
            run.figures["int8"] = us
        run.line("whole numbers", **how, equal=not wrong, us=us, **run.beside_copies(nbytes(given), us))


# -- gated delta, selective --------------------------------------------------------------------------------------------


def blocks(run: Run, rows: int, dtype: torch.dtype, key_fastest: bool = False) -> None:
    """Times blocks of the gated delta step, to another slot and in place, and compares their bits."""
    first: list[Tensor] = []
    for block in BLOCKS:
        with trying(DeltaConfig(block_value=block)):
            torch.manual_seed(rows)
            given = run.inputs.delta(rows, dtype, key_fastest=key_fastest)
            step = partial(run.ops.gated_delta_step, **given)
            step()
            left = [given["out"].clone(), given["state"][given["write"].long()]]
            first = first or left
            equal = all(map(same_bits, left, first))
            us = run.us(step)
            place = run.us(partial(step, write=given["read"]))
        beside = run.beside_copies(nbytes(given), us)
        how = {"rows": rows, "dtype": dtype, "block": block, "fastest": "key" if key_fastest else "value"}
        run.differs("" if equal else f"delta {how}: other bits than with a block of {BLOCKS[0]}")
        run.line(
            "delta", **how, equal=equal, us=us, us_in_place=place, us_copy_slots=run.slots_us(rows, dtype), **beside
        )
        if rows == run.many and not key_fastest:
            name, share = f"delta {dtype}", beside["share_of_copy"]
            run.figures[name] = max(share, run.figures.get(name, 0.0))
            run.figures.setdefault(f"us {dtype}", us)  # of the default block


def evicted(run: Run, rows: int, dtype: torch.dtype) -> None:
    """Times blocks of the gated delta step with `evict_first`, beside those without."""
    step = run.evicting
    for block in BLOCKS if step else BLOCKS[:1]:
        if step is None:
            run.line("evict_first", rows=rows, dtype=dtype, note="no tiles to change in this tree")
            return
        torch.manual_seed(rows)
        given, taken = run.inputs.delta(rows, dtype), {}
        for name, act in (("us_without", run.ops.gated_delta_step), ("us", step)):
            with trying(DeltaConfig(block_value=block)):  # forgets the launches of the other
                taken[name] = run.us(partial(act, **given))
                taken[f"{name}_in_place"] = run.us(partial(act, **given | {"write": given["read"]}))
        run.line("evict_first", rows=rows, dtype=dtype, block=block, **taken)


def verified(run: Run, rows: int, dtype: torch.dtype, tree: bool) -> None:
    """Times a step that verifies drafts, beside plain decode."""
    torch.manual_seed(rows)
    given, plain = run.inputs.drafts(rows, dtype, tree), run.inputs.delta(rows, dtype)
    us, one = (run.us(partial(run.ops.gated_delta_step, **each)) for each in (given, plain))
    run.line(
        "verified tree" if tree else "verified step", rows=rows, dtype=dtype, us=us, us_plain=one,
        bytes_plain=nbytes(plain), **run.beside_copies(nbytes(given), us),
    )  # fmt: skip


def selective(run: Run, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    given = run.inputs.mamba(rows, dtype)
    us = run.us(partial(run.ops.selective_step, **given))
    run.line("selective", rows=rows, dtype=dtype, us=us, **run.beside_copies(nbytes(given), us))


# -- the host, records -------------------------------------------------------------------------------------------------


def host(run: Run, rows: int) -> None:
    """Takes the host time of launches that are kept, of the long way, and of replays."""
    made = Pair(run, rows)
    for name, act in {"conv": made.conv, "delta": made.delta, "pair": made.one}.items():
        act()
        kept, long = run.host_us(act), run.host_us(act, before=remembered.forget)
        run.figures |= {f"kept {name}": kept, f"long {name}": long}
        run.line("host", call=name, rows=rows, us_kept=kept, us_long=long)

    many = TOY_LAYERS if run.machine.toy else LAYERS

    def layers() -> None:
        for _ in range(many):
            made.two()

    for count, act in ((1, made.two), (many, layers)):
        if not run.machine.compiling:
            run.line("host of a replay", rows=rows, pairs=count, us=run.host_us(run.machine.capture(act)))


def floor(run: Run) -> None:
    """Times a call that does next to nothing: a part of every other figure."""
    one = torch.zeros(1, device=run.machine.device)
    run.line("floor", us=run.us(one.zero_), us_in_graph=run.graph_us(one.zero_))


def records(run: Run, rows: int) -> None:
    """Times int8 records of 2-byte planes with blocks of 8 and 16 KB."""
    model = model_of("qwen3_next", 1, BF16)
    model = toy_of(model, "pack_int8") if run.machine.toy else model
    model = model._replace(layout=ms.StateLayout(model.layout.planes, layers=1))
    work = make("pack_int8", model, rows, run.ops, seed=1)
    copy = run.copy_us(work.nbytes["pack int8"])
    for block, programs in product((4096, 8192), (4, 16)):
        with trying(Int8Config(block=block, programs_per_sm=programs)):
            taken = {f"us_{op.split()[0]}": run.us(act) for op, act in work.acts.items()}
        run.line("int8 records, bf16", slots=rows, block=block, programs_per_sm=programs, us_copy=copy, **taken)
