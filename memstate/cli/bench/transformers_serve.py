"""Continuous batching of a tiny model of Transformers, beside the model's own cache and beside `generate`.

Both sides run in one process, on one thread and in turns, each time with the other one first. On a CPU a figure is CPU
time of this thread. What is compared is always of one turn, and the ratio is the median over the turns.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from random import Random
from statistics import median, quantiles
from typing import Any, Final

import torch

from memstate.cli.bench.task import Figure, Setting, Task
from memstate.requests.tracking import Redirect

OWN, GENERATE = "own-cache", "generate"
EVERY: Final = 16  # tokens between snapshots
PROMPT, NEW, TOY_NEW, SHORTEST, LONGEST = 32, 32, 4, 4, 120  # tokens
ROWS, TOY_ROWS = (1, 8, 32), (2,)
STEPS, TOY_STEPS, BATCHES, TOY_BATCHES = 61, 3, 7, 2
WARM_UPS: Final = 2
CHUNK: Final = 4096  # so that serve reads all prompts at once, as generate does
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
Act = Callable[[], object]


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Hides packages. Transformers prefers these wherever they can be imported, and they need a GPU."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # an import of None fails
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)


@cache
def model_on(device: str, larger: bool = False) -> Any:
    """Returns a Qwen3-Next with random weights, tiny or of 32 M parameters, which never ends a text by itself."""
    torch.manual_seed(0)
    with hidden(GPU_ONLY if device == "cpu" else ()):
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        model: Any = Qwen3NextForCausalLM(Qwen3NextConfig(**SETTINGS | (LARGER if larger else {})))
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def seconds(act: Act, device: torch.device) -> float:
    """Returns what a call takes: CPU time of this thread, or on a GPU the time until the device is done.

    Syncs: yes, on a GPU.
    """
    if device.type == "cpu":
        begin = time.thread_time_ns()
        act()
        return (time.thread_time_ns() - begin) * 1e-9
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    act()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def paired(ours: Act, other: Act, turns: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Returns the seconds of both calls in each turn; they take turns in being first."""
    found: tuple[list[float], list[float]] = [], []
    with one_thread():
        for turn in range(WARM_UPS + turns):
            for side in (0, 1) if turn % 2 else (1, 0):
                found[side].append(seconds((ours, other)[side], device))
    return found[0][WARM_UPS:], found[1][WARM_UPS:]


def beside(op: str, case: str, sides: tuple[list[float], list[float]], peer: str, tokens: int = 0) -> list[Figure]:
    """Returns a time beside a peer's, or with `tokens` a rate, and the quartiles of the ratio."""
    unit, rate = ("tokens/s", True) if tokens else ("host us", False)
    value, peers = (tokens / median(side) if rate else median(side) * 1e6 for side in sides)
    ratios = [other / mine if rate else mine / other for mine, other in zip(*sides, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return [
        Figure(op, case, value, unit, peer, peers, middle),
        Figure(op, case, low, "ratio, lower quartile"),
        Figure(op, case, high, "ratio, upper quartile"),
    ]


def prompts_of(rows: int, mixed: bool) -> list[list[int]]:
    """Returns random prompts, all of one length or of mixed lengths."""
    random = Random(rows)
    lengths = [random.randint(SHORTEST, LONGEST) if mixed else PROMPT for _ in range(rows)]
    return [[random.randint(3, 96) for _ in range(length)] for length in lengths]


class Sides:
    """One model, served and by itself.

    Args:
        setting: where it runs.
        prompts: of the batch.
        larger: whether the model has 32 M parameters, and is not tiny.
    """

    def __init__(self, setting: Setting, prompts: Sequence[list[int]], larger: bool = False) -> None:
        import memstate.integrations.transformers as mst

        self.device, self.prompts, self._mst = setting.device, prompts, mst
        self.model, rows = model_on(str(setting.device), larger), len(prompts)
        backend = "reference" if setting.device.type == "cpu" else setting.backend
        self.mem = mst.manager(
            self.model, slots=4 * rows, max_requests=rows, tokens=256, backend=backend, tracking=Redirect(every=EVERY)
        )
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(one)) + one for one in prompts]
        self.ids = torch.tensor(padded, device=self.device)
        self.mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=self.device)

    def serve(self, most: int) -> list[list[int]]:
        """Returns the answers of `serve`."""
        given = [self._mst.Prompt(one, number, most=most) for number, one in enumerate(self.prompts)]
        found = {one.id: one.tokens for one in self._mst.serve(self.model, self.mem, given, chunk=CHUNK)}
        return [found[number] for number in range(len(given))]

    def generate(self, most: int) -> list[list[int]]:
        """Returns the answers of `generate`."""
        out = self.model.generate(
            self.ids, attention_mask=self.mask, max_new_tokens=most, do_sample=False, pad_token_id=0
        )
        answers: list[list[int]] = out[:, self.ids.shape[1] :].tolist()
        return answers

    def wrong(self, most: int) -> str:
        """Compares the answers."""
        return "" if self.serve(most) == self.generate(most) else "serve and generate choose other tokens"

    def server(self, most: int) -> Any:
        """Returns a server whose requests have read their prompts."""
        server = self._mst.Server(self.model, self.mem, chunk=CHUNK)
        for number, one in enumerate(self.prompts):
            server.submit(self._mst.Prompt(one, number, most=most))
        server.step()
        return server

    def own(self, mode: Callable[[], Any]) -> Act:
        """Returns a call that runs the next token of each row with the model's own cache, behind the prompts."""
        from memstate.integrations.transformers.probe import own_cache

        kept, token = own_cache(self.model), self.ids[:, :1]

        def forward(ids: torch.Tensor) -> None:
            start = kept.get_seq_length()
            positions = torch.arange(start, start + ids.shape[1], device=self.device).expand(len(ids), -1)
            with mode():
                self.model(
                    input_ids=ids, position_ids=positions, past_key_values=kept, use_cache=True, logits_to_keep=1
                )

        forward(self.ids)
        return lambda: forward(token)


class Parts:
    """What the parts of a step take.

    Args:
        server: whose parts are timed from now on.
        device: where it runs.
    """

    def __init__(self, server: Any, device: torch.device) -> None:
        self.spent = defaultdict[str, float](float)
        self._device = device
        batches = server._batches
        self._time("plan", server.mem, "plan")
        self._time("settle", server.mem, "settle")
        self._time("states in", batches.states, "begin")
        self._time("states out", batches.states, "end")
        self._time("columns", batches, "_inputs")
        self._time("choose", server, "_choose")
        self._time("forward, KV included", batches, "model")
        for layer in batches.cache.layers:
            if hasattr(layer, "place"):
                self._time("KV", layer, "update")

    def _time(self, part: str, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            out: list[Any] = []
            self.spent[part] += seconds(lambda: out.append(call(*args, **kwargs)), self._device)
            return out[0]

        setattr(owner, name, timed)


def _decode(setting: Setting, rows: int, larger: bool) -> list[Figure]:
    sides, steps = Sides(setting, prompts_of(rows, False), larger), _turns(setting)[0]
    case = setting.case(f"R={rows}{', 32 M parameters' if larger else ''}")
    figures = []
    for mode, what in ((torch.no_grad, case), (torch.inference_mode, f"{case}, both in inference mode")):
        server = sides.server(2 * (WARM_UPS + steps))
        figures += beside("step", what, paired(server.step, sides.own(mode), steps, sides.device), OWN)
        server.close()
    server = sides.server(2 * (WARM_UPS + steps))
    for _ in range(WARM_UPS):
        server.step()
    parts = Parts(server, sides.device)
    with one_thread():
        for _ in range(steps):
            server.step()
    server.close()
    return figures + [Figure(part, case, spent / steps * 1e6, "host us") for part, spent in parts.spent.items()]


def _batch(setting: Setting, rows: int, mixed: bool) -> list[Figure]:
    sides, (_, turns), new = Sides(setting, prompts_of(rows, mixed)), _turns(setting), _new(setting)
    times = paired(lambda: sides.serve(new), lambda: sides.generate(new), turns, sides.device)
    case = setting.case(f"R={rows}, {'mixed' if mixed else 'equal'} lengths")
    return beside("batch", case, times, GENERATE, rows * new)


def _turns(setting: Setting) -> tuple[int, int]:
    return (TOY_STEPS, TOY_BATCHES) if setting.toy else (STEPS, BATCHES)


def _new(setting: Setting) -> int:
    return TOY_NEW if setting.toy else NEW


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields decode steps of running batches, then whole batches of equal and of mixed lengths."""
    try:
        import memstate.integrations.transformers  # noqa: F401
    except ImportError as error:
        print(f"transformers: left out: {error}", file=sys.stderr)
        return

    def check(rows: int, mixed: bool, larger: bool = False) -> str:
        return Sides(setting, prompts_of(rows, mixed), larger).wrong(_new(setting))

    for rows in TOY_ROWS if setting.toy else ROWS:
        for larger in (False, True):
            name = f"transformers, step, R={rows}{', 32 M parameters' if larger else ''}"
            yield Task(name, partial(check, rows, False, larger), partial(_decode, setting, rows, larger))
        for mixed in (False, True) if rows > 1 else (False,):
            name = f"transformers, batch, R={rows}{', mixed' if mixed else ''}"
            yield Task(name, partial(check, rows, mixed), partial(_batch, setting, rows, mixed))
