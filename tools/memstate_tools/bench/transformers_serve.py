"""Benchmarks continuous batching of a Transformers model, compared with the model's own cache and with `generate`.

Both sides run in one process and on one thread, in turns; each turn begins with the other side. On a CPU a figure is
the CPU time of this thread. The ratio is the median of the ratios of all turns.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from random import Random
from statistics import median, quantiles
from typing import Any, Final

import torch

from memstate.requests.tracking import Redirect
from memstate_tools.bench.clock import Act, cpu_seconds, host_seconds
from memstate_tools.bench.task import Measured, Setting, Task, take_turns
from memstate_tools.threads import one_thread

OWN, GENERATE = "own-cache", "generate"
EVERY: Final = 16  # tokens between snapshots
PROMPT, NEW, TOY_NEW, SHORTEST, LONGEST = 32, 32, 4, 4, 120  # tokens
ROWS, TOY_ROWS = (1, 8, 32), (2,)
STEPS, TOY_STEPS, BATCHES, TOY_BATCHES = 61, 3, 7, 2
WARM_UPS: Final = 2
CHUNK: Final = 4096  # large enough for all prompts, so that `serve` reads them at once, as `generate` does
SETTINGS: Final[dict[str, Any]] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "head_dim": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LARGER: Final[dict[str, Any]] = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"] * 4, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "initializer_range": 0.05,
}  # fmt: skip
GPU_ONLY: Final = ("fla", "mamba_ssm", "causal_conv1d")


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Hides packages from imports. Transformers uses these packages if they can be imported, but they need a GPU."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # importing a module that is None fails
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)


@cache
def model_on(device: str, larger: bool = False) -> Any:
    """Returns a Qwen3-Next with random weights, tiny or with 32 M parameters. It never ends a text by itself."""
    torch.manual_seed(0)
    with hidden(GPU_ONLY if device == "cpu" else ()):
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        model: Any = Qwen3NextForCausalLM(Qwen3NextConfig(**SETTINGS | (LARGER if larger else {})))
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def beside(
    op: str, case: str, ours: Act, other: Act, turns: int, device: torch.device, peer: str, tokens: int = 0
) -> list[Measured]:
    """Returns the time of a call compared with that of a peer's call, and the quartiles of the ratio.

    With `tokens`, the figure is a rate instead of a time. The two calls take turns in being first. A time is the CPU
    time of this thread; on a GPU it is the time until the device is done.

    Syncs: yes, on a GPU.
    """
    spent: dict[str, list[float]] = {"ours": [], "other": []}

    def until_done(act: Act) -> None:
        act()
        torch.cuda.synchronize(device)

    def time(turn: int, name: str, act: Act) -> None:
        on_cpu = device.type == "cpu"
        spent[name].append(cpu_seconds(act, device) if on_cpu else host_seconds(partial(until_done, act), device))

    with one_thread():
        take_turns({"ours": ours, "other": other}, {}, WARM_UPS + turns, time, "transformers")
    sides = [times[WARM_UPS:] for times in spent.values()]
    value, peers = (tokens / median(side) if tokens else median(side) * 1e6 for side in sides)
    ratios = [theirs / mine if tokens else mine / theirs for mine, theirs in zip(*sides, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return [
        Measured(op, case, value, "tokens/s" if tokens else "host us", peer, peers, middle),
        Measured(op, case, low, "ratio, lower quartile"),
        Measured(op, case, high, "ratio, upper quartile"),
    ]


def prompts_of(rows: int, mixed: bool) -> list[list[int]]:
    """Returns random prompts, of one length or of mixed lengths."""
    random = Random(rows)
    lengths = [random.randint(SHORTEST, LONGEST) if mixed else PROMPT for _ in range(rows)]
    return [[random.randint(3, 96) for _ in range(length)] for length in lengths]


class ServedSides:
    """One model that either memstate's `serve` or the model's own `generate` runs.

    Args:
        setting: the setting of the benchmark.
        rows: prompts of the batch.
        mixed: whether the prompts have mixed lengths.
        larger: whether the model has 32 M parameters; otherwise it is tiny.
    """

    def __init__(self, setting: Setting, rows: int, mixed: bool = False, larger: bool = False) -> None:
        import memstate.integrations.transformers as mst

        self.setting, self.device, self.prompts, self._mst = setting, setting.device, prompts_of(rows, mixed), mst
        self.model, self.new = model_on(str(setting.device), larger), setting.sizes(NEW, TOY_NEW)
        backend = "reference" if setting.device.type == "cpu" else setting.backend
        self.mem = mst.manager(
            self.model, slots=4 * rows, max_requests=rows, tokens=256, backend=backend, tracking=Redirect(every=EVERY)
        )
        longest = max(map(len, self.prompts))
        padded = [
            ([0] * (longest - len(one)) + one, [0] * (longest - len(one)) + [1] * len(one)) for one in self.prompts
        ]
        self.ids, self.mask = torch.tensor(padded, device=self.device).unbind(1)

    def serve(self) -> list[list[int]]:
        """Returns the answers of `serve`."""
        given = [self._mst.Prompt(one, number, most=self.new) for number, one in enumerate(self.prompts)]
        answers = {one.id: one.tokens for one in self._mst.serve(self.model, self.mem, given, chunk=CHUNK)}
        return [answers[number] for number in range(len(given))]

    def generate(self) -> list[list[int]]:
        """Returns the answers of `generate`."""
        out = self.model.generate(
            self.ids, attention_mask=self.mask, max_new_tokens=self.new, do_sample=False, pad_token_id=0
        )
        answers: list[list[int]] = out[:, self.ids.shape[1] :].tolist()
        return answers

    def wrong(self) -> str:
        """Compares the answers of `serve` and `generate`. Returns what is wrong; empty if nothing is."""
        return "" if self.serve() == self.generate() else "serve and generate choose other tokens"

    def own(self, mode: Callable[[], Any]) -> Act:
        """Reads the prompts with the model's own cache. Returns a call that computes the next token of each row."""
        from memstate.integrations.transformers.own import cache_argument, own_cache

        argument, kept, token = cache_argument(self.model), own_cache(self.model), self.ids[:, :1]

        def forward(ids: torch.Tensor) -> None:
            start = kept.get_seq_length()
            positions = torch.arange(start, start + ids.shape[1], device=self.device).expand(len(ids), -1)
            with mode():
                self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{argument: kept})

        forward(self.ids)
        return lambda: forward(token)

    def steps(self, case: str) -> list[Measured]:
        """Times decode steps, compared with decode steps with the model's own cache."""
        steps, figures, case = self.setting.sizes(STEPS, TOY_STEPS), list[Measured](), self.setting.case(case)
        for mode, what in ((torch.no_grad, case), (torch.inference_mode, f"{case}, both in inference mode")):
            server = self._mst.Server(self.model, self.mem, chunk=CHUNK)
            for number, one in enumerate(self.prompts):
                server.submit(self._mst.Prompt(one, number, most=2 * (WARM_UPS + steps)))
            server.step()  # this step reads the prompts
            figures += beside("step", what, server.step, self.own(mode), steps, self.device, OWN)
            server.close()
        return figures

    def batches(self, case: str) -> list[Measured]:
        """Times whole batches of `serve`, compared with those of `generate`."""
        turns, tokens = self.setting.sizes(BATCHES, TOY_BATCHES), len(self.prompts) * self.new
        return beside("batch", self.setting.case(case), self.serve, self.generate, turns, self.device, GENERATE, tokens)


def _task(
    kind: str, case: str, make: Callable[[], ServedSides], measure: Callable[[ServedSides, str], list[Measured]]
) -> Task:
    return Task(f"transformers, {kind}, {case}", lambda: make().wrong(), lambda: measure(make(), case))


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of decode steps, then those of whole batches of equal and of mixed lengths."""
    try:
        import memstate.integrations.transformers  # noqa: F401
    except ImportError as error:
        print(f"transformers: left out: {error}", file=sys.stderr)
        return
    for rows in setting.sizes(ROWS, TOY_ROWS):
        for larger in (False, True):
            case = f"R={rows}{', 32 M parameters' * larger}"
            yield _task("step", case, partial(ServedSides, setting, rows, larger=larger), ServedSides.steps)
        for mixed in (False, True) if rows > 1 else (False,):
            for larger in (False, True):
                case = f"R={rows}, {'mixed' if mixed else 'equal'} lengths{', 32 M parameters' * larger}"
                yield _task("batch", case, partial(ServedSides, setting, rows, mixed, larger), ServedSides.batches)
