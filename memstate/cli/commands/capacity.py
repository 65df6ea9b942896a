"""The command `memstate capacity`: plans the memory of a deployment."""

import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from memstate.cli import names
from memstate.cli.options import Json
from memstate.cli.output import emit_text, one_line_errors, progress


def capacity(
    *,
    model: Annotated[
        str | None, Argument(help="A preset such as qwen3_next, or the path of a config.json or its folder.")
    ] = None,
    memory: Annotated[
        str, Option(help="Memory of one GPU for states and KV: what weights and activations leave, such as 40GiB.")
    ],
    context: Annotated[str, Option(help="Tokens of a request, prompt and answer, such as 32k.")],
    layout: Annotated[
        Path | None,
        Option(help="Instead of a model: a JSON file with a layout of your own. Its KV is that of --kv-bytes."),
    ] = None,
    concurrency: Annotated[
        int | None, Option(help="Requests that run at a time. Default: as many as fit, with an empty cache.")
    ] = None,
    tp: Annotated[int, Option(help="Tensor-parallel ranks.")] = 1,
    every: Annotated[int, Option(help="Tokens between two snapshots of decode.")] = 256,
    page_size: Annotated[int, Option(help="Tokens of a KV page.")] = 64,
    dtype: Annotated[
        names.PlannedDtype | None, Option(help="Type of the ssm planes. Default: the model's, mostly float32.")
    ] = None,
    conv_dtype: Annotated[
        names.StateDtype | None, Option(help="Type of the convolution windows. Default: the model's.")
    ] = None,
    layers: Annotated[
        str | None,
        Option(metavar="FROM:TO", help="Layers of a pipeline stage: 0:12 are the first twelve. Default: all."),
    ] = None,
    kv_dtype: Annotated[names.KvDtype, Option(help="Type of keys and values.")] = "bfloat16",
    kv_bytes: Annotated[
        int | None,
        Option(help="KV bytes of a token on one GPU. Default: the model's. 0: KV is elsewhere.", min=0, max=2**31 - 1),
    ] = None,
    overlap: Annotated[int, Option(help="1: plan the next step before the last one is settled.", min=0, max=1)] = 1,
    in_place: Annotated[bool, Option("--in-place", metavar="", help="Kernels of the forward update one slot.")] = False,
    prefills: Annotated[
        int,
        Option(
            help="Prompts that are read at the same time. The plan keeps room for states inside each; 0: none.", min=0
        ),
    ] = 1,
    tokens_per_second: Annotated[
        float, Option(help="Decode tokens of all requests together, for what snapshots cost.")
    ] = 1000.0,
    host_memory: Annotated[str | None, Option(help="Host memory for a tier below, such as 200GiB.")] = None,
    speculate: Annotated[
        int, Option(metavar="T", help="Tokens of a step with drafts; every request then has a tail. 0: no drafts.")
    ] = 0,
    trace: Annotated[
        Path | None, Option(help="Requests in the format of the Mooncake traces: replay them with each split.")
    ] = None,
    limit: Annotated[int | None, Option(help="Requests of the trace to read. Default: all.")] = None,
    start: Annotated[
        float, Option("--from", help="Share of the trace that warms the cache up and is not counted.")
    ] = 0.0,
    json_path: Json = None,
) -> None:
    """Plan the memory of a deployment.

    It says what fits under which strategy, and where the border between states and KV should lie. Needs no GPU.
    """
    if (model is None) == (layout is None):
        raise typer.BadParameter("expected a MODEL or --layout, one of the two")
    import torch

    from memstate.cli.layouts import read as read_layout
    from memstate.engine.capacity import capacity as planned

    stage = re.fullmatch(r"(\d{1,9}):(\d{1,9})", layers) if layers is not None else None
    if layers is not None and stage is None:
        raise typer.BadParameter(f"layers {layers!r}: expected FROM:TO, such as 0:12 for the first twelve")
    span = range(int(stage[1]), int(stage[2])) if stage else None
    dtypes = {"float8": torch.float8_e4m3fn}
    with one_line_errors():
        plan = planned(
            read_layout(layout) if layout else model, memory, context=context, concurrency=concurrency, ranks=tp,
            every=every, page_size=page_size,
            ssm_dtype=dtype and getattr(torch, dtype), conv_dtype=conv_dtype and getattr(torch, conv_dtype),
            kv_dtype=dtypes.get(kv_dtype) or getattr(torch, kv_dtype),
            kv_bytes_per_token=kv_bytes, overlap=bool(overlap), in_place=in_place, prefills=prefills,
            tokens_per_second=tokens_per_second, host_memory=host_memory, speculate=speculate,
            layers=span,
        )  # fmt: skip
        if trace is not None:
            from memstate.cli.replay import rated
            from memstate.cli.traces.form import read

            with progress("replay", "requests") as report:
                plan = rated(plan, read(trace, limit), start, report)
    emit_text(json_path, plan.to_json(), str(plan))
