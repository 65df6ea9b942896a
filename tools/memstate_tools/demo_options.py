"""The options of `memstate demo`, which are also the settings of a run. The module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from memstate_tools import names
from memstate_tools.options import BackendOption, output_file


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options, each with its help."""

    strategy: Annotated[names.Strategy, Option(help="When snapshots are taken.")] = "redirect"
    backend: BackendOption = "auto"
    requests: Annotated[
        int | None,
        Option(min=1, help="Requests to run, counted over all conversations. Default: 20, or the whole --input."),
    ] = None
    slots: Annotated[int, Option(min=1, help="Capacity of the state pool.")] = 12
    track_every: Annotated[int, Option(min=1, help="Tokens between snapshots; a multiple of the page size.")] = 16
    fail_claims: Annotated[
        float, Option(min=0.0, max=1.0, help="Share of the optional claims that fail, from 0 to 1.")
    ] = 0.0
    input: Annotated[
        Path | None,
        Option(help='Conversations to run: a file with lines of {"system": "text", "turns": ["text", ..]}.'),
    ] = None
    model: Annotated[names.Model, Option(help="Kind of the model's recurrent layers.")] = "gdn"
    layout: Annotated[names.Layout, Option(help="Order of the state planes in memory.")] = "layer-major"
    state_order: Annotated[
        names.StateOrder | None,
        Option(help="Order of a recurrent state in memory, dim-state or state-dim of mamba2; default: the first one."),
    ] = None
    engine: Annotated[
        names.Engine,
        Option(
            help="own: memstate allocates. in-place: kernels use one slot a row. "
            "arena: the engine allocates states and KV pages in one block."
        ),
    ] = "own"
    overlap: Annotated[int, Option(help="1: plan the next step before the last one is settled.", min=0, max=1)] = 1
    speculate: Annotated[
        str,
        Option(
            metavar="T|tree",
            help="Tokens of a step of decode, all but one of them guessed: up to 64 in a row, or 7 as a tree. 0: none.",
        ),
    ] = "0"
    tail: Annotated[
        int,
        Option(
            metavar="N", min=0, max=64, help="Store a state every N tokens; until then their inputs wait. 0: always."
        ),
    ] = 0
    inspect: Annotated[
        str | None,
        Option(
            metavar="PATH",
            callback=output_file,
            help="Write the owners of all slots after the last request to this file.",
        ),
    ] = None
    sessions: Annotated[int, Option(min=0, help="The first so many conversations run as streaming sessions.")] = 0
    host_slots: Annotated[
        int | None,
        Option(min=1, help="States that fit in host memory. Default: none or, with storage, twice the slots."),
    ] = None
    storage: Annotated[names.Storage, Option(help="Where states are stored below host memory.")] = "none"
    storage_path: Annotated[
        str | None,
        Option(
            metavar="PLACE", help="Folder for --storage file, by default a temporary one. URL for --storage objects."
        ),
    ] = None
    mooncake_master: Annotated[str, Option(help="host:port of the master for --storage mooncake.")] = "127.0.0.1:50051"
    mooncake_segment: Annotated[int, Option(min=0, help="Bytes that this process gives to the Mooncake store.")] = 0
    write: Annotated[names.Write, Option(help="When states are written to host memory.")] = "through"
    pages: Annotated[
        int | None, Option(min=1, help="KV pages. Default: few enough that they run out now and then.")
    ] = None
    page_size: Annotated[int, Option(min=1, help="Tokens in a page.")] = 8
    chunk: Annotated[int, Option(min=1, max=2**31 - 1, help="Tokens of a prompt in one step, at most.")] = 64
    placement: Annotated[str, Option(help="Where prompts keep states: ends, ends-only, every-N or nowhere.")] = "ends"
    plant_leak: Annotated[
        bool, Option("--plant-leak", metavar="", help="Empty a register by hand; pass if the audit names it.")
    ] = False
    sabotage: Annotated[
        names.Sabotage | None, Option(help="Put a wrong state in place of a snapshot; pass if the comparison fails.")
    ] = None
    park: Annotated[
        bool, Option("--park", metavar="", help="Park requests instead of sending them back. Needs --host-slots.")
    ] = False
    seed: Annotated[int, Option(min=-(2**63), max=2**63 - 1, help="Seed of conversations, arrivals and weights.")] = 0
