"""Delta steps with tiles of several numbers of values, whose results must have the same bits.

The order of a sum follows from the layout that the compiler chooses for a tile. An interpreter has no such layout.
"""

from typing import Any

import torch
from torch import Tensor

from memstate.kernels.configs import DeltaConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import trying
from tests.kernels.test_gated_delta import build
from tests.kernels.test_tails import with_tail
from tests.support.decode_case import Row, same_bits

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
BLOCKS = (32, 64, 128)
KINDS: dict[str, dict[str, Any]] = {
    "delta": {}, "gates": {"gates": True}, "kda": {"gates": True, "per_key": True},
    "rwkv7": {"low_rank": True, "per_key": True},
}  # fmt: skip
TOKENS = {"plain": 2, "tail": 3, "tree": 4}
TREE = [[-1, 0, 0, 1], [-1, 0, 1, 0]]  # the parent of each token, of two rows
RING = 12
Step = tuple[str, torch.dtype, bool, str, int, int]  # kind, dtype of the state, keys fastest, form, keys, values
OFTEN: list[Step] = [
    ("gates", FULL, False, "plain", 64, 64),
    ("kda", BRAIN, False, "plain", 32, 128),
    ("gates", HALF, True, "plain", 32, 64),
    ("gates", BRAIN, False, "tail", 64, 64),
    ("rwkv7", FULL, False, "tree", 32, 64),
    ("kda", FULL, True, "tail", 32, 64),
]
REST: list[Step] = [
    ("rwkv7", FULL, False, "plain", 64, 64), ("gates", FULL, False, "plain", 128, 128),
    ("kda", FULL, False, "plain", 128, 128), ("rwkv7", FULL, False, "tail", 64, 64),
    ("gates", FULL, False, "plain", 96, 96), ("gates", BRAIN, False, "plain", 128, 80),
    ("delta", FULL, False, "plain", 128, 24), ("gates", HALF, False, "plain", 128, 128),
    ("gates", FULL, False, "plain", 256, 128), ("gates", BRAIN, False, "tree", 128, 128),
    ("kda", FULL, False, "tail", 128, 128), ("gates", BRAIN, True, "tail", 128, 128),
    ("kda", FULL, True, "plain", 128, 128), ("gates", BRAIN, False, "plain", 64, 64),
    ("gates", FULL, False, "plain", 32, 128), ("rwkv7", BRAIN, False, "plain", 64, 64),
    ("rwkv7", HALF, True, "tree", 64, 64), ("gates", FULL, False, "plain", 512, 64),
]  # fmt: skip


def name_of(step: Step) -> str:
    kind, dtype, key_fastest, form, keys, values = step
    order = "value key" if key_fastest else "key value"
    return f"{kind}, {str(dtype).removeprefix('torch.')}, {order}, {form}, {keys} x {values}"


def differing(backend: Backend, step: Step, seed: int, blocks: tuple[int, ...] = BLOCKS) -> str:
    """Returns for which values of a tile a step writes other bits than for 16; "" for none."""
    expected = _written(backend, step, seed, 16)
    wrong = [block for block in blocks if not all(map(same_bits, _written(backend, step, seed, block), expected))]
    return f"tiles of {', '.join(map(str, wrong))} values differ from those of 16" if wrong else ""


def _written(backend: Backend, step: Step, seed: int, block_value: int) -> list[Tensor]:
    """Returns what a step writes: its output, the memory of all states, and the rings."""
    kind, state, key_fastest, form, *size = step
    generator, tokens = torch.Generator().manual_seed(seed), TOKENS[form]
    rows = [Row(1, 2, 3, tokens), Row(4, 4, 0, tokens)]
    case = build(
        backend, generator, rows, tokens, state, BRAIN, (2, 1, *size), value_key=key_fastest, **KINDS[kind]
    )  # fmt: skip
    rings = [] if form == "plain" else with_tail(case, generator, RING, [1, 2], [5, 9], [2, 3], [2, 1])
    if form == "tree":
        case.shared["parents"] = torch.tensor(TREE, dtype=torch.int32, device=backend.device)
    with trying(DeltaConfig(block_value=block_value)):
        return [case.step(backend), case.memory.whole, *rings]
