"""Tests `ms.explain`: what it says of launches must be what launches do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

import memstate as ms
from memstate.choices import LaunchChoice
from memstate.kernels import tuned, tuned_files
from memstate.kernels.configs import DeltaConfig, GatherConfig
from memstate.kernels.own import Kernel
from memstate.state.presets import CHECKPOINTS
from tests.kernels.test_tuned import deltas, folders, record, write
from tests.support.refusals import refusals
from tests.support.sampling import PROOF
from tests.support.sources import ROOT

H100 = "NVIDIA H100 80GB HBM3"
DELTA = "key=128,value=128,bytes=4,key_fastest=0,fp16=0"
__all__ = ["folders"]


def of(kernel: str, rows: list[LaunchChoice]) -> LaunchChoice:
    """Returns the only row of a kernel."""
    (row,) = (row for row in rows if row.kernel == kernel)
    return row


def test_keys_and_programs_are_those_of_real_launches_on_every_preset() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    command = [sys.executable, "-m", "tests.support.asked", "1" if PROOF else "5"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = ["conv", "copy", "gated_delta", "gather", "mamba3", "pack", "pack_int8", "scatter", "selective"]
    assert found == {"differing": [], "kernels": kernels, "presets": len(CHECKPOINTS)}


def test_a_row_has_the_configuration_and_its_file(folders: tuple[Path, Path]) -> None:
    config = {"warp_elements": 1024, "block_value": 32}
    entry = {**record()["entries"][0], "kernel": "gated_delta", "key": DELTA, "config": config}
    path = write(folders[1], record(device=H100, entries=[entry]), H100)
    rows = ms.explain("qwen3-next", 8, device=H100)
    assert of("gated_delta", rows) == ("gated_delta", DELTA, "warp_elements=1024 block_value=32", str(path), 8 * 32 * 4)
    assert of("copy", rows)[1:] == (
        "unit=16,tiles=4096", "programs_per_sm=4 warps=4 entries=256 lanes=4096", "default", None,
    )  # fmt: skip
    with tuned.trying(DeltaConfig(block_value=64)):
        assert of("gated_delta", ms.explain("qwen3_next", 8, device=H100))[2:] == (
            "warp_elements=2048 block_value=64", "trial", 8 * 32 * 2,
        )  # fmt: skip
    write(folders[1], record(device=H100, entries=[entry], versions={"triton": "3.0.0"}), H100)
    table = ms.explain("qwen3_next", device=H100)
    assert of("gated_delta", table).file == (
        f"default; {path.name} not used: measured with Triton 3.0.0, this is {triton.__version__}: "
        "run `memstate tune` again"
    )
    text = " ".join(str(table).split())  # nothing is cut
    assert "run `memstate tune` again" in text and f"what launches of qwen3_next take on {H100}, batch 1" in text
    assert dict(tuned.ASKED) == {}  # what is explained was not launched


def test_a_row_has_the_configuration_of_the_batch(folders: tuple[Path, Path]) -> None:
    path = write(folders[1], deltas((1, DeltaConfig()), (64, DeltaConfig(block_value=64))) | {"device": H100}, H100)
    for batch, block, file in ((8, 16, str(path)), (64, 64, f"{path}; from 64 rows")):
        programs = batch * 32 * 128 // block
        row = of("gated_delta", ms.explain("qwen3_next", batch, device=H100))
        assert row[2:] == (f"warp_elements=2048 block_value={block}", file, programs)


def test_without_states_it_says_what_launches_of_this_process_have_taken(folders: tuple[Path, Path]) -> None:
    assert ms.explain(device="cpu") == []
    cpu = torch.device("cpu")
    tuned.config_of(GatherConfig, cpu, 16, 5)
    assert ms.explain(device="cpu") == [("gather", "unit=16,tiles=8", "warps=4 lanes=4096", "default", None)]
    double = Kernel(lambda x, block: None, lambda x: None, lambda batch, make: {}, {"block": (8, 4)}, name="double")
    double(x=torch.ones(2))
    assert ms.explain(device="cpu")[1:] == [("double", "any=0", "block=8", f"default; {UNREGISTERED}", None)]
    assert ms.explain(device=H100) == []


def own(*shape: int, **plane: object) -> ms.StateLayout:
    return ms.StateLayout((ms.Plane("ssm", shape, torch.float32, **plane),), layers=2)  # type: ignore[arg-type]


def test_states_of_ones_own_without_parts_may_be_of_either_rule() -> None:
    moves = ["copy", "gather", "scatter", "pack"]
    for layout, steps in (
        (own(2, 16, 16), ["gated_delta", "pack_int8", "selective", "pack_int8"]),
        (own(2, 16, 16, order="value_key"), ["gated_delta", "pack_int8"]),
        (own(2, 16, 16, order="state_dim"), ["selective", "pack_int8"]),
        (own(64), []),
        (own(64, 16), ["selective"]),
    ):
        kernels = [row.kernel for row in ms.explain(layout, device="cpu")]
        assert kernels == moves + steps, layout
    (tied,) = {row.key for row in ms.explain(own(64, 16), device="cpu") if row.kernel == "selective"}
    assert tied == "dim=64,state=16,tied=0,bytes=4"


UNREGISTERED = "not registered, so no file counts: call register()"


test_arguments_that_mean_nothing_are_refused = refusals(
    ms.InvalidArgument,
    ({"states": "qwen3_next", "batch": 0}, "batch 0"),
    ({"states": "qwen3_next", "ranks": 0}, "ranks 0"),
    ({"states": "qwen3_next", "ranks": 64}, "64 ranks"),
    ({"states": "gpt2"}, "one of the presets qwen3_next"),
    ({"states": {"model_type": "llama"}}, "it has no known rule"),
    (
        {"states": own(2, 16, 16), "ssm_dtype": torch.float16},
        "ssm_dtype=torch.float16: expected None for a StateLayout",
    ),
    (
        {"states": "mamba", "ssm_dtype": torch.int32},
        "ssm_dtype=torch.int32: expected .* float16, int16 or int8",
    ),
    ({"batch": 64}, "batch=64, .*expected states with them"),
    ({"states": "mamba", "device": "cuda:0"}, "device='cuda:0': expected the name of a device"),
    ({"states": "mamba", "device": ""}, "device='': expected the name of a device"),
    call=lambda given: ms.explain(**given),
)


def test_a_file_that_cannot_be_used_is_named(folders: tuple[Path, Path]) -> None:
    path = folders[1] / tuned_files.file_name(H100)
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{path}: "):
        ms.explain("mamba", device=H100)
