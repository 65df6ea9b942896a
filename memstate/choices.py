"""Says which launch configurations launches take, and from which files. Launches nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from memstate.checks import whole
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels import interpreter, tuned
from memstate.kernels.blocks import cut, key_sizes
from memstate.kernels.configs import CONFIGS
from memstate.kernels.dispatch import Backend
from memstate.kernels.own import Kernel
from memstate.kernels.reference.scaled import TOP
from memstate.kernels.tables import Mamba3State
from memstate.kernels.tuned_files import entries_of
from memstate.sheet import Table
from memstate.state.layout import FLOATS, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import named
from memstate.tiers.host.packing import RecordTable, in_records

Launch = tuple[str, tuple[int, ...], Callable[[Any], Any] | None]  # kernel, sizes of its key, how it cuts a row
MAMBA3 = set(Mamba3State._fields)
TRANSPOSED = ("value_key", "state_dim")  # orders of a state that kernels take as `plane.mT`


class LaunchChoice(NamedTuple):
    """The configuration that the launches of a kernel take.

    Attributes:
        kernel: The name of the kernel.
        key: The static sizes of the launches, by which files name configurations.
        configuration: The values of the configuration.
        file: The file that has it, "default" or "trial"; from how many rows on, if the file has another configuration
            for fewer; and why an entry of a file was not used.
        programs: Programs of a decode launch at the batch; None for other kernels, and without states.
    """

    kernel: str
    key: str
    configuration: str
    file: str
    programs: int | None


def explain(
    states: object = None, batch: int = 1, *, ranks: int = 1, ssm_dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Table[LaunchChoice]:  # fmt: skip
    """Returns which launch configurations launches take, from which files, and why entries of files are not used.

    Args:
        states: States of a model: a preset such as "qwen3_next", the path of a config.json, a configuration object or
            dict, or the `StateLayout` of the whole model. If a `StateLayout` does not say whose states it has, both
            `gated_delta` and `selective` are listed. None: what launches of this process have asked for so far.
        batch: Rows of a decode step.
        ranks: Tensor-parallel ranks.
        ssm_dtype: Dtype of the states; None: as in `presets.from_config`.
        device: Name of a device, as `torch.cuda.get_device_name()` returns it. It need not be here; its architecture
            is then not compared. None: the device that is here.

    Returns:
        A table of `LaunchChoice`. `pack_int8` counts for tiers with int8.

    Raises:
        InvalidArgument: An argument has no meaning, or the model is not known.
        ConfigurationError: Triton is not installed.
        ValueError: A file is invalid; says its name, the key and the numbers.

    Example:
        >>> import memstate as ms
        >>> [row.key for row in ms.explain("qwen3_next", device="cpu") if row.kernel == "gated_delta"]
        ['key=128,value=128,bytes=4,key_fastest=0,fp16=0']

    Syncs: no.
    """
    batch, ranks = whole("batch", batch), whole("ranks", ranks)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = tuned.device_name(here)
    device = own if device is None else device
    if not isinstance(device, str) or not device or device.startswith("cuda"):
        raise InvalidArgument(f"device={device!r}: expected the name of a device, such as 'NVIDIA H200', or None")
    if states is None:
        if (batch, ranks, ssm_dtype) != (1, 1, None):
            raise InvalidArgument(f"batch={batch}, ranks={ranks}, ssm_dtype={ssm_dtype}: expected states with them")
        asked = [_choice(kernel, key, found) for (kernel, key, of, _), found in tuned.ASKED.items() if of == device]
        so_far = "" if asked else ": nothing was launched"
        return Table(asked, f"what launches on {device} have taken so far{so_far}", grouped=2)
    if isinstance(states, Kernel):
        raise InvalidArgument(f"explain({states.name}): its arguments make the key: launch it, then call explain()")
    if interpreter.interpreted() is None:
        raise ConfigurationError("explain: states need Triton, which is not installed; it exists for Linux only")
    if ssm_dtype is not None and (isinstance(states, StateLayout) or ssm_dtype not in (*FLOATS, *TOP)):
        expected = "None for a StateLayout, whose planes have dtypes; else float32, bfloat16, float16, int16 or int8"
        raise InvalidArgument(f"ssm_dtype={ssm_dtype!r}: expected {expected}")
    name, _, layout = named(states, ranks=ranks, ssm_dtype=ssm_dtype)
    architecture = tuned.architecture(here) if device == own else ""
    rows = dict.fromkeys(_rows(Planes(layout, 1, Backend("reference"), rows=1), batch, device, architecture))
    known = "" if entries_of(device) or device == own else f"; no file is for {device!r}"
    return Table(rows, f"what launches of {name} take on {device}, batch {batch:,}{known}", grouped=2)


def _rows(planes: Planes, batch: int, device: str, architecture: str) -> Iterator[LaunchChoice]:
    from memstate.kernels import mamba3

    for kernel, sizes, tiling in _launches(planes, 64 if device.startswith("AMD") else 32):
        key = CONFIGS[kernel].key_of(*sizes)
        found = tuned.look_up(CONFIGS[kernel], key, device, architecture, batch)
        yield _choice(kernel, key, found, batch * prod(tiling(found.config)[0]) if tiling else None)
    if set(planes) == MAMBA3:  # its kernel has one configuration
        heads, dim, state = planes["ssm"].shape[2:]
        options = f"warps={mamba3.warps(dim, state)}"
        yield LaunchChoice("mamba3", f"dim={dim},state={state}", options, tuned.DEFAULT, batch * heads)


def _choice(kernel: str, key: str, found: tuned.Found, programs: int | None = None) -> LaunchChoice:
    options = " ".join(f"{name}={value}" for name, value in vars(found.config).items())
    rows = f"from {found.rows:,} rows" if found.rows > 1 else ""
    return LaunchChoice(kernel, key, options, "; ".join(filter(None, (found.file, rows, found.why))), programs)


def _launches(planes: Planes, threads: int) -> Iterator[Launch]:
    """Yields the launches that move slots, then those of decode steps, with int8 packing of their states.

    The names of the parts of planes say whose states these are: a delta rule has q, Mamba has x, and Mamba-2 also B.

    Args:
        planes: The planes of a slot.
        threads: Threads of a warp.
    """
    from memstate.kernels import conv, copy, gated_delta, pack_int8, selective

    for memory in filter(None, (planes, planes.rows)):
        yield "copy", copy.key_sizes(memory.plane_map), None
    blocks = [key_sizes(cut(region.tensor)) for region in planes.regions if region.plane.elements]
    yield from ((kernel, sizes, None) for kernel in ("gather", "scatter") for sizes in blocks)
    records = RecordTable(planes.regions, in_records(planes.layout, {}), planes.device)
    yield "pack", copy.key_sizes(records.map), None
    parts = {part.name for plane in planes.layout.planes for part in plane.parts}
    for plane, _, tensor, _ in planes.regions if set(planes) != MAMBA3 else ():
        kind, layer, turned = (plane.name.rstrip("0123456789"), len(plane.shape)), tensor[0], plane.order in TRANSPOSED
        if plane.dtype not in (*FLOATS, *TOP) or not plane.elements:
            continue
        if kind == ("conv", 2):
            windows = layer if layer.shape[1] <= layer.shape[2] else layer.mT
            taps = conv.key_sizes(windows)
            yield "conv", taps, partial(conv.tiling, windows, taps, threads=threads)
        heads = layer.mT if turned else layer if kind[1] == 3 else layer.unsqueeze(1)  # Mamba-1 has one head
        if kind == ("ssm", 3) and "x" not in parts and plane.order != "state_dim":
            keys = gated_delta.key_sizes(heads)
            yield "gated_delta", keys, partial(gated_delta.tiling, heads, keys)
            if plane.dtype in FLOATS:
                yield "pack_int8", pack_int8.key_sizes(tensor, 2 - turned), None  # a scale for each key
        if kind in (("ssm", 2), ("ssm", 3)) and "q" not in parts and plane.order != "value_key":
            tied = kind[1] == 3 and ("x" not in parts or "B" in parts)
            dims = selective.key_sizes(heads, tied)
            yield "selective", dims, partial(selective.tiling, heads, dims)
            if tied and plane.dtype in FLOATS:
                yield "pack_int8", pack_int8.key_sizes(tensor, 1 + turned), None  # a scale for each state
