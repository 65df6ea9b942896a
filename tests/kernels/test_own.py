"""Tests operations of one's own: kernels from outside of memstate, which join every backend and every list of tests.

Run as a program, this file compiles the launch of each such operation and writes as JSON what was launched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.errors import ConfigurationError
from memstate.kernels import own, tuned
from memstate.kernels.configs import CONFIGS, CopyConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.own import KERNELS, Kernel
from memstate.kernels.tuned import launch_of, trying
from memstate_tools.bench import run
from memstate_tools.launches import compiling
from memstate_tools.maker import Maker
from memstate_tools.tuning.subject import subjects
from memstate_tools.workload import make, same_bytes
from tests.kernels.test_tuned import DEVICE, NAME, ODD, TILES, UNIT, record, write
from tests.proof.gpu import determinism, sanitizer, touch
from tests.proof.gpu.proved import newest_first
from tests.proof.test_gpu_proof import Referring, on_cpu
from tests.support.kernel_runs import not_interpreted
from tests.support.op_case import every
from tests.support.refusals import refusals
from tests.support.running_mean import running_mean
from tests.support.sampling import PROOF
from tests.support.sources import ROOT
from tests.test_pages import part

CPU = torch.device("cpu")
every()  # registers what packages offer
OWN = {running_mean.name: running_mean, **KERNELS}
each_own = pytest.mark.parametrize("op", OWN)
LINE = f"running_mean = {running_mean.launch.__module__}:running_mean"
JOINED = (
    "tests/kernels/test_own.py::test_kernel_and_reference_do_the_same_and_leave_other_memory[interpreter-3-1-ema]",
    "tests/proof/test_gpu_proof.py::test_a_launch_in_other_memory_does_the_same_there[interpreter-ema]",
    "tests/proof/test_interleave.py::test_no_program_sees_what_another_one_does[ema]",
    "tests/proof/test_interleave.py::test_no_schedule_changes_a_byte_or_touches_a_wrong_one[ema]",
    "tests/kernels/test_own.py::test_its_launch_compiles[ema]",
)[: None if PROOF else 3]


def offer(folder: Path, line: str) -> None:
    """Writes into a folder what `pip install` writes there of a package with this entry point."""
    package = folder / "own-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{own.GROUP}]\n{line}\n")


def forget(name: str) -> None:
    """Undoes `Kernel.register`."""
    delattr(Backend, name)
    del CONFIGS[name], KERNELS[name]


@pytest.fixture
def registered() -> Iterator[None]:
    """Registers the operation of these tests during a test."""
    running_mean.register()
    yield
    forget("running_mean")


# -- what tests run of each operation of one's own ---------------------------------------------------------------------


@each_own
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 33])
def test_kernel_and_reference_do_the_same_and_leave_other_memory(
    backend: Backend, op: str, batch: int, seed: int
) -> None:
    """Two launches give the same bytes. Some rows are padding. Around each tensor is poison, which must stay."""
    backends = Backend("reference", backend.device), backend, backend
    expected, *made = (make(OWN[op], None, batch, each, seed, padded=True) for each in backends)
    for one in (expected, *made):
        one.acts[op]()
    assert made[0].differing(expected) == ""
    assert [name for name, tensor in made[0].written.items() if not same_bytes(tensor, made[1].written[name])] == []


@each_own
def test_its_launch_compiles(op: str) -> None:
    (launched,) = (each for each in not_interpreted(__file__) if each["op"] == op)
    assert launched["kernels"] and launched["states"] == list(OWN[op].state)


def compiled() -> Iterator[dict[str, Any]]:
    for name, kernel in OWN.items():
        given = kernel.case(3, Maker(CPU, 1))
        with compiling("sm_90") as seen:
            kernel(**given)
        states = [at for at in kernel.state if any(launch.arguments_in([given[at]]) for launch in seen)]
        kernels = [launch.kernel.fn.__name__ for launch in seen if launch.compiled.asm["ptx"]]
        yield {"op": name, "kernels": kernels, "states": states}


# -- the lists ---------------------------------------------------------------------------------------------------------


@on_cpu
def test_one_file_and_one_line_are_in_all_lists(tmp_path: Path) -> None:
    """The file of CONTRIBUTING, outside of the repository, is run by the tests of all operations."""
    (tmp_path / "ema.py").write_text(part("CONTRIBUTING.md", '"""A moving mean'))
    offer(tmp_path, "ema = ema:ema")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *JOINED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"{len(JOINED)} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.usefixtures("registered")
def test_the_proof_on_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "running_mean" in newest_first() and determinism.repeated_op("running_mean", Referring(), 2) == ""
    assert "_running_mean" in sanitizer.kernel_names()
    monkeypatch.setattr(touch, "newest_first", lambda: ["running_mean"])
    assert touch.small(Referring()).counts.launches["running_mean"] == 3


@on_cpu
@pytest.mark.usefixtures("registered")
def test_the_benchmark_of_states_times_it() -> None:
    outcome = run(["state"], toy=True, case="running_mean")
    assert outcome.wrong == [] and {entry.case for entry in outcome.entries} == {"toy R=2"}


# -- registering -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_every_backend_has_a_registered_operation(backend: Backend) -> None:
    given = running_mean.case(3, Maker(backend.device, 1))
    outs = []
    for each in (backend, Backend("reference", backend.device)):
        each.running_mean(**given)  # type: ignore[attr-defined]
        outs.append(given["out"].clone())
        assert each.counts.launches == {"running_mean": 1}
    torch.testing.assert_close(*outs)
    assert Backend.running_mean.__wrapped__ is running_mean.reference  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="kernel 'running_mean': the name is taken; give another one as `name=`"):
        replace(running_mean, launch=lambda **given: None).register()


@pytest.mark.usefixtures("registered")
def test_a_kernel_that_registers_again_takes_the_place_of_the_old_one(backend: Backend) -> None:
    given = running_mean.case(2, Maker(backend.device, 1))
    backend.running_mean(**given)  # type: ignore[attr-defined]
    replace(
        running_mean, reference=lambda **given: given["out"].zero_(), space={"BLOCK": (64,), "warps": (1,)}
    ).register()
    backend.running_mean(**given)  # type: ignore[attr-defined]
    assert CONFIGS["running_mean"]().BLOCK == 64  # type: ignore[attr-defined]
    assert backend.name != "reference" or not given["out"].any()


@pytest.mark.parametrize("name", ["copy", "copy_slots", "counts", "device", "name"])
def test_a_name_that_a_backend_has_is_taken(name: str) -> None:
    """`copy` is a kernel with configurations, `copy_slots` an operation; the others are attributes of a backend."""
    with pytest.raises(ValueError, match=rf"'{name}': .*(?:taken|already)"):
        replace(running_mean, name=name).register()
    assert name not in KERNELS and (name in CONFIGS) == (name == "copy")


test_what_is_no_kernel_is_refused = refusals(
    ValueError,
    ({"reference": None}, "kernel 'running_mean': expected three functions: launch, reference, case"),
    ({"case": 3}, "kernel 'running_mean': expected three functions"),
    ({"name": "running mean"}, "kernel 'running mean': expected a Python name"),
    ({"space": {"warps": ()}}, r"kernel 'running_mean': axis 'warps' has \(\), expected whole numbers"),
    ({"space": {"warps": (2, 0.5)}}, r"axis 'warps' has \(2, 0.5\)"),
    ({"space": {"warps": (2, -1)}}, r"axis 'warps' has \(2, -1\)"),
    ({"name": "class"}, "kernel 'class': expected a Python name"),
    ({"name": "all"}, "kernel 'all': expected a Python name"),
    ({"space": {"key_of": (1,)}, "launch": print}, "axis 'key_of': expected another Python name"),
    ({"space": {"waves": (1,)}}, "`launch` has no parameter 'waves', an axis of `space`"),
    call=lambda given: replace(running_mean, **given),
)


def test_a_kernel_without_a_name_has_that_of_its_launch() -> None:
    assert replace(running_mean, name="").name == "launch"


def test_entry_points_are_loaded_once_when_an_unknown_operation_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, LINE)
    monkeypatch.syspath_prepend(tmp_path)
    names, usual = [], Kernel.register
    monkeypatch.setattr(Kernel, "register", lambda kernel: names.append(kernel.name) or usual(kernel))
    own.load.cache_clear()
    for _ in range(2):
        assert callable(Backend("reference").running_mean)  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="no attribute 'running_means'"):
            Backend("reference").running_means  # type: ignore[attr-defined]  # noqa: B018
    assert names.count("running_mean") == 1
    forget("running_mean")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nowhere:ema", "ModuleNotFoundError: No module named 'nowhere'"),
        ("os:sep", "AttributeError: 'str' object has no"),
        (
            f"{running_mean.launch.__module__}:running_mean",
            "ValueError: its kernel has the name 'running_mean': give both",
        ),
    ],
)
def test_an_entry_point_that_is_broken_is_named(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, f"broken = {value}")
    monkeypatch.syspath_prepend(tmp_path)
    own.load.cache_clear()
    for _ in range(2):
        with pytest.raises(AttributeError, match=f"entry point broken = {value} of own: {said}"):
            Backend("reference").broken  # type: ignore[attr-defined]  # noqa: B018
        assert not hasattr(Backend("reference"), "other")  # the broken one breaks nothing else
        with pytest.raises(ConfigurationError, match="entry point broken"):
            subjects("broken", [])
    monkeypatch.undo()
    own.load()


def test_a_key_of_other_numbers_is_refused() -> None:
    kernel = replace(running_mean, key=lambda given: {"size": 1.5})
    with pytest.raises(ValueError, match=r"kernel 'running_mean': key size=1\.5, expected whole numbers"):
        kernel(**kernel.case(1, Maker(CPU, 1)))


@pytest.mark.usefixtures("registered")
def test_arguments_may_have_no_names() -> None:
    given = running_mean.case(2, Maker(CPU, 1))
    order = ("x", "state", "read", "write", "snapshot", "tokens", "out")
    for backend in (Backend("reference"), Backend("auto")):
        backend.running_mean(*(given[name] for name in order))  # type: ignore[attr-defined]
    assert not given["out"].isnan().any()


# -- configurations ----------------------------------------------------------------------------------------------------


def test_a_launch_takes_what_a_file_has_for_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was written by a process that knows the operation, and is read at first by one that does not."""
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path))
    content, taken = record(), []
    content["entries"] += record()["entries"]
    content["entries"][1] |= {"kernel": "noted", "key": "size=208", "config": {"BLOCK": 256, "warps": 2}}
    write(tmp_path, content)
    assert launch_of(CopyConfig, DEVICE, UNIT, TILES)[1] == ODD
    kernel = replace(running_mean, name="noted", launch=lambda BLOCK, warps, **given: taken.append((BLOCK, warps)))
    kernel.register()
    for size in (208, 207):
        kernel(state=torch.zeros(1, size, device=DEVICE))
    assert taken == [(256, 2), (128, 1)]
    assert [*tuned.ASKED][-2:] == [("noted", f"size={n}", NAME, 1) for n in (208, 207)]
    with trying(kernel.kind(BLOCK=128, warps=2)):
        kernel(state=torch.zeros(1, 208, device=DEVICE))
    assert taken[2:] == [(128, 2)]
    forget("noted")
    tuned.forget()


if __name__ == "__main__":
    json.dump(list(compiled()), sys.stdout)
