"""`memstate capacity`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from memstate.cli import names
from memstate.cli.options import Json
from memstate.cli.output import Progress, emit_text, one_line_errors, progress
from memstate.errors import InvalidArgument

if TYPE_CHECKING:
    from memstate.cli.traces import TraceRequest
    from memstate.engine.capacity import Capacity


def capacity(
    model: Annotated[str, Argument(help="A preset such as qwen3_next, or the path of a config.json or its folder.")],
    memory: Annotated[
        str, Option(help="Memory of one GPU for states and KV: what weights and activations leave, such as 40GiB.")
    ],
    context: Annotated[str, Option(help="Tokens of a request, prompt and answer, such as 32k.")],
    concurrency: Annotated[
        int | None, Option(help="Requests that run at a time. Default: as many as fit, with an empty cache.")
    ] = None,
    tp: Annotated[int, Option(help="Tensor-parallel ranks.")] = 1,
    every: Annotated[int, Option(help="Tokens between two snapshots of decode.")] = 256,
    page_size: Annotated[int, Option(help="Tokens of a KV page.")] = 64,
    dtype: Annotated[names.StateDtype, Option(help="Type of the ssm planes.")] = "float32",
    kv_dtype: Annotated[names.KvDtype, Option(help="Type of keys and values.")] = "bfloat16",
    kv_bytes: Annotated[
        int | None,
        Option(help="Bytes of a token of KV on one GPU. Default: from the configuration. 0: KV is elsewhere."),
    ] = None,
    overlap: Annotated[int, Option(help="1: plan the next step before the last one is settled.", min=0, max=1)] = 1,
    in_place: Annotated[bool, Option("--in-place", metavar="", help="Kernels of the forward update one slot.")] = False,
    prefills: Annotated[int, Option(help="Prompts that are read at a time.")] = 1,
    tokens_per_second: Annotated[
        float, Option(help="Decode tokens of all requests together, for what snapshots cost.")
    ] = 1000.0,
    host_memory: Annotated[str | None, Option(help="Host memory for a tier below, such as 200GiB.")] = None,
    trace: Annotated[
        Path | None, Option(help="Requests in the format of the Mooncake traces: replay them with each split.")
    ] = None,
    limit: Annotated[int | None, Option(help="Requests of the trace to read. Default: all.")] = None,
    start: Annotated[
        float, Option("--from", help="Share of the trace that warms the cache up and is not counted.")
    ] = 0.0,
    json_path: Json = None,
) -> None:
    """Plan the memory of a deployment: what fits, under which strategy, and where the border to KV should lie."""
    import torch

    from memstate.engine.capacity import capacity as planned

    dtypes = {"float8": torch.float8_e4m3fn}
    with one_line_errors():
        plan = planned(
            model, memory, context=context, concurrency=concurrency, ranks=tp, every=every, page_size=page_size,
            ssm_dtype=getattr(torch, dtype), kv_dtype=dtypes.get(kv_dtype) or getattr(torch, kv_dtype),
            kv_bytes_per_token=kv_bytes, overlap=bool(overlap), in_place=in_place, prefills=prefills,
            tokens_per_second=tokens_per_second, host_memory=host_memory,
        )  # fmt: skip
        if trace is not None:
            from memstate.cli.traces.form import read

            with progress("replay") as report:
                plan = rated(plan, read(trace, limit), start, report)
    emit_text(json_path, plan.to_json(), str(plan))


def rated(
    plan: "Capacity", requests: "Sequence[TraceRequest]", start: float = 0.0, report: Progress | None = None
) -> "Capacity":
    """Replays a trace with the states and pages of each split, as `memstate replay` does.

    A page of the replay is a block of 512 tokens, so `every` is rounded up to blocks. A split without cached states has
    no hits. For a model without KV the replay has pages for the whole trace.

    Args:
        plan: The plan.
        requests: The trace.
        start: Fraction of the requests that only warm the cache up.
        report: Called with requests done and to do.

    Returns:
        The plan with the hit rates of its splits.

    Raises:
        InvalidArgument: A request is longer than the context of the plan, or the trace cannot be replayed.
    """
    from memstate.cli import replay as replaying
    from memstate.cli.traces import BLOCK

    lengths = [request.input_length + request.output_length for request in requests]
    if max(lengths, default=0) > plan.context:
        raise InvalidArgument(
            f"context={plan.context}: the longest request of the trace has {max(lengths)} tokens; plan with as many"
        )
    everything = sum(-(-length // BLOCK) for length in lengths)
    loop = replaying.Loop(every=-(-plan.every // BLOCK) * BLOCK, running=plan.concurrency)
    rates = []
    for at, split in enumerate(plan.splits):
        if not split.cached_states:
            rates.append(0.0)
            continue

        def so_far(done: int, of: int, before: int = at) -> None:
            if report:
                report(before * of + done, len(plan.splits) * of)

        pages = split.pages * split.page_size // BLOCK if plan.kv is not None else everything
        found = replaying.replay(requests, split.cached_states, pages, "return-rate", start, so_far, loop)
        rates.append(found.block_hit_rate)
    return plan.with_hit_rates(rates)
