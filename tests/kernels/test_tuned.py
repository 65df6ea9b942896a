"""Tests launch configurations: which one a launch takes, which files are refused, and equal bytes under all of them."""

import inspect
import json
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from memstate.kernels import copy, tuned, tuned_files
from memstate.kernels.configs import CopyConfig, DeltaConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.tuned import launch_of, trying
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from tests.kernels.test_copy import LAYOUTS, moved, packet_of
from tests.kernels.test_gated_delta import build
from tests.support.decode_case import Row

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
NAME = tuned.device_name(DEVICE)
ODD = CopyConfig(entries=16, lanes=256, warps=2, programs_per_sm=3)
UNIT, TILES = 16, 5
KEY = CopyConfig.key_of(UNIT, TILES)
DELTA, WIDE = DeltaConfig.key_of(128, 128, 4, False, False), DeltaConfig(block_value=64)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Empty folders for shipped files and for the user's files, in a process that has read no file yet."""
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    shipped.mkdir()
    user.mkdir()
    monkeypatch.setattr(tuned_files, "SHIPPED", shipped)
    monkeypatch.setenv("MEMSTATE_TUNED", str(user))
    tuned.forget()
    yield shipped, user
    tuned.forget()


def record(config: CopyConfig = ODD, key: str = KEY, **changes: Any) -> dict[str, Any]:
    """Returns the content of a file of launch configurations for this device."""
    entry = {
        "kernel": "copy", "key": key, "config": asdict(config), "value": 1.5e12, "unit": "bytes/s", "checked": True,
    }  # fmt: skip
    whole = {"format": 1, "device": NAME, "date": "2026-01-31", "versions": {}, "timed": True, "entries": [entry]}
    return whole | changes


def write(folder: Path, content: dict[str, Any], device: str = NAME) -> Path:
    path = folder / tuned_files.file_name(device)
    path.write_text(json.dumps(content))
    tuned.forget()
    return path


def taken(tiles: int = TILES, unit: int = UNIT) -> CopyConfig:
    """Returns the configuration that a launch on this device takes."""
    return launch_of(CopyConfig, DEVICE, unit, tiles)[1]


# -- choice of a configuration ---------------------------------------------------------------------


def test_a_timed_file_of_this_device_is_taken_for_planes_of_its_size(folders: tuple[Path, Path]) -> None:
    assert launch_of(CopyConfig, DEVICE, UNIT, TILES) == (tuned.programs(DEVICE), CopyConfig())
    assert asdict(CopyConfig()) == {"programs_per_sm": 4, "warps": 4, "entries": 256, "lanes": 4096}
    write(folders[1], record())
    assert launch_of(CopyConfig, DEVICE, UNIT, TILES) == (3 * tuned.multiprocessors(DEVICE), ODD)
    assert [taken(tiles) == ODD for tiles in (4, 5, 8, 9)] == [False, True, True, False]
    assert taken(unit=8) == CopyConfig()


def test_keys_round_tiles_up_to_a_power_of_two() -> None:
    rounded = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 2376: 4096, 4097: 8192}
    assert [CopyConfig.key_of(8, tiles) for tiles in rounded] == [f"unit=8,tiles={tiles}" for tiles in rounded.values()]


def test_the_users_file_goes_before_the_shipped_one_key_by_key(folders: tuple[Path, Path]) -> None:
    shipped, user = folders
    both = record(CopyConfig(warps=8))
    both["entries"] += record(CopyConfig(warps=2), CopyConfig.key_of(UNIT, 64))["entries"]
    write(shipped, both)
    assert taken() == CopyConfig(warps=8)
    write(user, record())
    assert (taken(), taken(64), taken(65)) == (ODD, CopyConfig(warps=2), CopyConfig())


def test_a_delta_step_asks_for_the_order_and_the_dtype_of_its_state(folders: tuple[Path, Path]) -> None:
    old = "key=128,value=128,bytes=2"  # before, the key said neither; such states were bf16 with values fastest
    entry = entry_with(kernel="gated_delta", key=old, config=asdict(DeltaConfig(block_value=32)))
    path = write(folders[1], entry)
    asked = [(False, False), (True, False), (False, True)]
    keys = [DeltaConfig.key_of(128, 128, 2, *last) for last in asked]
    assert keys[1:] == [f"{old},key_fastest=1,fp16=0", f"{old},key_fastest=0,fp16=1"]
    assert list(tuned_files.configurations(path, NAME)) == [("gated_delta", keys[0])]
    found = [tuned.config_of(DeltaConfig, DEVICE, 128, 128, 2, *last).block_value for last in asked]
    assert found == [32, 16, 16] and tuned.last_key("gated_delta") == keys[2]


def deltas(*entries: tuple[int, DeltaConfig], **made: str) -> dict[str, Any]:
    """Returns the content of a file with entries of one key of delta steps: (rows, configuration)."""
    (entry,) = record()["entries"]
    entry |= {"kernel": "gated_delta", "key": DELTA, "made": made}
    return record(entries=[entry | {"rows": rows, "config": asdict(config)} for rows, config in entries])


def found(*batches: int) -> list[tuple[int, int]]:
    """Returns the configurations of delta steps of these batches."""
    configs = (tuned.config_of(DeltaConfig, DEVICE, 128, 128, 4, False, False, rows=batch) for batch in batches)
    return [(config.warp_elements, config.block_value) for config in configs]


def test_an_entry_holds_from_its_rows_on_and_all_of_a_key_come_from_one_file(folders: tuple[Path, Path]) -> None:
    shipped, user = folders
    write(shipped, deltas((1, DeltaConfig()), (64, WIDE)))
    assert found(1, 63, 64, 1000) == [(2048, 16), (2048, 16), (2048, 64), (2048, 64)]
    assert [(rows, each.config.block_value) for (*_, rows), each in tuned.ASKED.items()] == [(1, 16), (64, 64)]
    write(user, deltas((1, DeltaConfig(warp_elements=1024))))
    assert found(8, 64) == [(1024, 16)] * 2  # with the 64 of the shipped file, results would depend on the batch
    content = deltas((1, DeltaConfig(warp_elements=512)), (64, DeltaConfig(512, 64)), triton="3.0.0")
    content["entries"] += deltas((1, DeltaConfig()), (8, DeltaConfig(block_value=32)))["entries"]
    write(user, content)
    assert found(7, 8, 64) == [(2048, 16), (2048, 32), (2048, 32)]  # entries of another Triton do not mix with them


def test_a_launch_asks_with_its_rows(folders: tuple[Path, Path], generator: torch.Generator) -> None:
    write(folders[1], deltas((1, DeltaConfig()), (2, WIDE)))
    for rows in ([Row(1, 1)], [Row(1, 1), Row(2, 2)]):
        backend = Backend("auto", DEVICE)
        build(backend, generator, rows, dims=(1, 1, 128, 128)).step(backend)
    assert [(rows, each.config.block_value) for (*_, rows), each in tuned.ASKED.items()] == [(1, 16), (2, 64)]


def test_look_ups_are_recorded_with_the_file_that_has_the_entry(folders: tuple[Path, Path]) -> None:
    assert taken() == CopyConfig() and dict(tuned.ASKED) == {("copy", KEY, NAME, 1): (CopyConfig(), "default", "", 1)}
    path = write(folders[1], record())
    assert taken() == ODD and dict(tuned.ASKED) == {("copy", KEY, NAME, 1): (ODD, str(path), "", 1)}
    with trying(CopyConfig(warps=8)):
        assert tuned.last_key("copy") == ""  # a trial starts without look-ups, and its own are forgotten
        assert taken(64) == CopyConfig(warps=8)
        assert list(tuned.ASKED.values()) == [(CopyConfig(warps=8), "trial", "", 1)]
    taken(64)
    assert [key for _, key, *_ in tuned.ASKED] == [KEY, tuned.last_key("copy")] == [KEY, "unit=16,tiles=64"]
    old = write(folders[1], record(versions={"triton": "3.0.0"}))
    other = write(folders[0], record(CopyConfig(warps=2)))
    taken()
    why = f"{old.name} not used: measured with Triton 3.0.0, this is {triton.__version__}: run `memstate tune` again"
    assert dict(tuned.ASKED) == {("copy", KEY, NAME, 1): (CopyConfig(warps=2), str(other), why, 1)}
    with pytest.raises(ValueError, match="remove the file"):
        tuned.look_up(CopyConfig, KEY, NAME.upper())
    assert tuned.look_up(CopyConfig, KEY, "NVIDIA of nobody") == (CopyConfig(), "default", "", 1)


def test_an_architecture_that_is_not_known_is_not_compared(folders: tuple[Path, Path]) -> None:
    write(folders[1], entry_with(made={"architecture": "sm_70"}) | {"device": "NVIDIA V100"}, "NVIDIA V100")
    for architecture, found in (("", ODD), ("sm_70", ODD), ("sm_90", CopyConfig())):
        assert tuned.look_up(CopyConfig, KEY, "NVIDIA V100", architecture).config == found


def test_nothing_that_was_not_timed_changes_a_launch(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        write(folder, record(timed=False))
    assert taken() == CopyConfig()
    write(folders[0], record())
    assert taken() == ODD  # the untimed file does not hide the timed one


def test_files_of_other_devices_are_not_read_and_renamed_ones_are_refused(folders: tuple[Path, Path]) -> None:
    for other, name in (("NVIDIA H200 NVL", "nvidia-h200-nvl.json"), ("../A (b)", "a-b.json")):
        assert write(folders[1], record(device=other), other).name == name
    (folders[1] / "broken.json").write_text("{")
    assert taken() == CopyConfig()
    path = write(folders[1], record(device="NVIDIA H200"))
    with pytest.raises(ValueError, match=rf"{path}: .*measured on 'NVIDIA H200', this is '.*': remove"):
        taken()


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert tuned_files.user_folder() == tmp_path / "user"
    monkeypatch.setenv("MEMSTATE_TUNED", "")
    assert tuned_files.user_folder() == tmp_path / "xdg" / "memstate" / "tuned"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned_files.user_folder() == tmp_path / ".config" / "memstate" / "tuned"
    monkeypatch.setenv("MEMSTATE_TUNED", "~/own")
    assert tuned_files.user_folder() == tmp_path / "own"


def test_a_home_that_is_not_known_is_refused_and_as_a_default_no_file(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    write(folders[0], record())
    for chosen in ("", "~nobody/tuned"):
        monkeypatch.setenv("MEMSTATE_TUNED", chosen)
        with pytest.raises(ValueError, match=r"~.*/tuned: there is no such home: MEMSTATE_TUNED names another folder"):
            tuned_files.user_folder()
    with pytest.raises(ValueError, match="no such home"):
        taken()
    monkeypatch.setenv("MEMSTATE_TUNED", "")
    assert taken() == ODD


def test_files_are_read_once(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folders[1], record())
    reads = []
    real = tuned_files.configurations
    monkeypatch.setattr(tuned_files, "configurations", lambda *given: reads.append(given) or real(*given))
    assert [taken(), taken(6), taken()] == [ODD] * 3
    assert reads == [(path, NAME)]
    before = launch_of.cache_info().hits
    path.unlink()
    assert taken() == ODD and launch_of.cache_info().hits == before + 1


# -- entries that were measured with something else ------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [f"{each.levelname} {each.getMessage()}" for each in caplog.records]
    caplog.clear()
    return found


def test_entries_of_another_triton_or_source_are_not_used_and_one_line_says_why(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "memstate.tuned")
    here = {"triton": triton.__version__, "architecture": tuned.architecture(DEVICE)}
    here["source"] = tuned_files.source_of(CopyConfig)
    write(folders[1], entry_with(made={"torch": "1.0", **here}))
    assert taken() == ODD and told(caplog) == []
    for changed, says in (
        ({"triton": "3.0.0"}, f"measured with Triton 3.0.0, this is {triton.__version__}: run `memstate tune` again"),
        ({"architecture": "sm_70"}, f"measured on sm_70, this is {here['architecture']}"),
        ({"source": "0" * 16}, "the kernel copy has changed since: run `memstate tune` again"),
    ):
        path = write(folders[1], entry_with(made=here | changed))
        assert [taken(), taken(6), taken(7)] == [CopyConfig()] * 3
        assert told(caplog) == [f"WARNING not used file='{path}' why={says!r}"]

    content = entry_with(made=here | {"triton": "3.0.0"})
    content["entries"] += record(CopyConfig(warps=8))["entries"]  # the same key, measured here
    write(folders[1], content)
    assert taken() == CopyConfig(warps=8)
    assert [line.split("file")[0] for line in told(caplog)] == ["INFO used "]
    write(folders[0], record(CopyConfig(warps=2)))
    write(folders[1], entry_with(made=here | {"triton": "3.0.0"}))
    assert taken() == CopyConfig(warps=2)  # the shipped one
    assert [line.split()[0] for line in told(caplog)] == ["INFO", "WARNING"]


def test_another_patch_of_triton_generates_the_same_code(folders: tuple[Path, Path]) -> None:
    release = ".".join(triton.__version__.split(".")[:2])
    write(folders[1], record(versions={"torch": "2.0", "triton": f"{release}.99"}))
    assert taken() == ODD
    write(folders[1], record(versions={"torch": "2.0", "triton": "3.0.0"}))  # files of format 1 say it once
    assert taken() == CopyConfig()


def test_a_helper_in_another_module_counts_unless_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(number: int) -> str:
        (tmp_path / "own_helper.py").write_text(f"def helped(x):\n    return {number} * x\n")
        (tmp_path / "own_launch.py").write_text(
            "from own_helper import helped\n\ndef launch(x):\n    return helped(x)\n"
        )
        for name in ("own_helper", "own_launch"):
            sys.modules.pop(name, None)
        linecache.clearcache()
        invalidate_caches()
        return tuned_files.digest(import_module("own_launch").launch)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert hashed(1) == hashed(1) != hashed(2)
    monkeypatch.setattr(tuned_files, "INSTALLED", (f"{tmp_path.resolve()}/",))
    assert hashed(1) == hashed(2)


def test_the_source_of_a_kernel_has_what_it_uses_and_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed() -> str:
        tuned_files._source_of.cache_clear()
        return tuned_files.source_of(CopyConfig)

    before, code = hashed(), inspect.getsource
    edits = {  # function -> its source, changed -> whether the hash is another one
        ("_move_tile", "tl.store(", "tl.store(  # a comment\n"): False,
        ("_move", "):", "):  # a comment"): False,
        ("_move_tile", "tl.store(", "tl.load("): True,
    }
    for (name, old, new), other in edits.items():
        change = lambda function: code(function).replace(old, new if function.__name__ == name else old)  # noqa: B023, E731
        monkeypatch.setattr(inspect, "getsource", change)
        assert (hashed() != before) == other, (name, new)
    monkeypatch.setattr(inspect, "getsource", code)
    assert hashed() == before
    monkeypatch.setattr(copy, "COPY", 77)
    assert hashed() != before
    monkeypatch.undo()
    assert hashed() == before


def test_shipped_files_say_with_which_triton_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = [tuned_files.read(path) for path in tuned_files.SHIPPED.glob("*.json")]
    assert files and all(entry["made"]["triton"] for file in files for entry in file["entries"])


# -- files that are refused ------------------------------------------------------------------------


def entry_with(**changes: Any) -> dict[str, Any]:
    content = record()
    content["entries"][0] |= changes
    return content


def deltas_from(*rows: int, **changes: int) -> dict[str, Any]:
    return deltas((1, DeltaConfig()), *((least, replace(WIDE, **changes)) for least in rows))


def config_with(**changes: Any) -> dict[str, Any]:
    return entry_with(config=asdict(ODD) | changes)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (record(format=3), "format 3, expected 1 or 2: run `memstate tune` again"),
        ([], r"\[\], expected an object with format, device"),
        (record(extra=1), "has .*extra.*; expected format, .* and no other"),
        ({k: v for k, v in record().items() if k != "timed"}, "expected .*timed"),
        (record(timed=1), "timed 1, expected bool"),
        (record(entries={}), "entries {}, expected list"),
        (record(entries=[3]), "entry 0: 3, expected an object"),
        (entry_with(key="tiles=8"), "copy, tiles=8: expected each key once, with numbers for unit, tiles"),
        (record(entries=2 * record()["entries"]), "copy, unit=16,tiles=8: expected each key once"),
        (entry_with(checked=False), "copy, unit=16,tiles=8: not checked"),
        (entry_with(value="fast"), "value 'fast', expected float"),
        (config_with(lanes=300), "copy, unit=16,tiles=8: lanes 300: expected a power of two from 128 to 16384"),
        (config_with(warps=32), "warps 32: expected a power of two from 1 to 16"),
        (config_with(programs_per_sm=0), "programs_per_sm 0: expected a whole number from 1 to 32"),
        (config_with(warps=4.0), "warps 4.0, expected int"),
        (entry_with(made={"commit": "a"}), "unit=16,tiles=8: made: has commit, date; expected date, torch, triton"),
        (entry_with(made={"triton": 3}), "made: triton 3, expected str"),
        (config_with(stages=3), "copy, unit=16,tiles=8: has .*stages.*; expected programs_per_sm, warps"),
        (deltas_from(8, 8), f"gated_delta, {DELTA}: expected each key once"),
        (
            deltas_from(8, warp_elements=1024),
            f"{DELTA}: rows 8: expected an entry without rows before it, with the same warp_elements",
        ),
        (deltas((8, WIDE)), f"{DELTA}: rows 8: expected an entry without rows before it"),
        (deltas_from(0), f"gated_delta, {DELTA}: rows 0, expected 1 or more"),
        (deltas_from(True), "rows True, expected int"),
        (entry_with(rows=2), "copy, unit=16,tiles=8: rows 2, expected 1$"),
        (entry_with(config={"lanes": 4096}), "has lanes; expected programs_per_sm, warps, entries, lanes"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(folders: tuple[Path, Path], content: Any, says: str) -> None:
    path = write(folders[1], content)
    with pytest.raises(ValueError, match=says) as error:
        taken()
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("text", "says"), [("{", "Expecting"), ("[" * 200_000, ".*recursion")], ids=["", "deep"])
def test_a_file_that_is_no_json_is_refused(folders: tuple[Path, Path], text: str, says: str) -> None:
    path = write(folders[0], {})
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: {says}"):
        taken()


def test_a_folder_that_cannot_be_read_is_named(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTATE_TUNED", str(folders[1] / ("x" * 300)))
    tuned.forget()
    with pytest.raises(ValueError, match=r"xxx/.*: File name too long: MEMSTATE_TUNED names the folder"):
        taken()


def test_a_default_that_cannot_be_looked_at_is_no_file(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := folders[1] / "memstate" / "tuned").mkdir(parents=True)
    write(own, record())
    (folders[0] / "file").touch()
    monkeypatch.setenv("MEMSTATE_TUNED", "")
    for home in (folders[1], folders[1] / ("x" * 300), folders[0] / "file" / "home"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        tuned.forget()
        assert taken() == (ODD if home == folders[1] else CopyConfig())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders[1]))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as if the file belonged to another user
    tuned.forget()
    assert taken() == CopyConfig()


# -- launches --------------------------------------------------------------------------------------


class Launches:
    """A stand-in for the copy kernel, which records each launch and passes it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, ...]] = []
        self._kernel = copy._move
        monkeypatch.setattr(copy, "KEPT", KeptLaunch(self, {}))

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **given: Any) -> None:
            self.seen.append((grid[0], given["ENTRIES"], given["LANES"], given["num_warps"]))
            # `launch` returns None in place of the compiled kernel. So no kernel is kept for later launches.
            self._kernel[grid](*args, **given)

        return launch


def test_launches_take_the_configuration_of_a_file(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    storage = Planes(StateLayout([Plane("ssm", (40,), torch.float32)], layers=TILES), 3, Backend("auto", DEVICE))
    ids = torch.ones(1, dtype=torch.int32, device=DEVICE)
    storage.copy(ids + 1, ids)
    write(folders[1], record())
    storage.copy(ids + 1, ids)
    storage.zero(ids)
    storage.run_data(ids.repeat(3), packet_of([(1, 2)], DEVICE))
    with trying(CopyConfig(lanes=512)):
        storage.zero(ids)
    processors = tuned.multiprocessors(DEVICE)
    default, odd = (tuned.programs(DEVICE), 256, 4096, 4), (3 * processors, 16, 256, 2)
    assert launches.seen == [default, odd, odd, odd, (4 * processors, 256, 512, 4)]


def test_a_trial_ends_with_an_error_as_well(folders: tuple[Path, Path]) -> None:
    with pytest.raises(RuntimeError), trying(ODD), trying(CopyConfig(warps=8)):
        assert taken() == CopyConfig(warps=8)
        raise RuntimeError
    assert taken() == CopyConfig()
    write(folders[1], record(CopyConfig(warps=2)))
    with trying(ODD):
        assert taken() == ODD  # a trial takes precedence over files
    assert taken() == CopyConfig(warps=2)


@pytest.mark.sample
@pytest.mark.parametrize(
    "config",
    [
        CopyConfig(programs_per_sm=1),
        CopyConfig(programs_per_sm=3),
        CopyConfig(entries=16),
        CopyConfig(lanes=256),
        CopyConfig(entries=512, lanes=8192, warps=8),
        CopyConfig(entries=16, lanes=128, warps=1, programs_per_sm=7),
    ],
    ids=str,
)
@pytest.mark.parametrize("planes", ["several tiles", "int8 and fp8"])
def test_bytes_are_the_same_in_every_configuration(generator: torch.Generator, config: CopyConfig, planes: str) -> None:
    backend = Backend("auto", DEVICE)
    engine, plane_map = moved(backend, generator, LAYOUTS[planes], 9, "layer_major")
    n = 35  # number of entries: with chunks of 16, several chunks have work
    dst, src = [0] * n, [7] * n
    for at, to, of in ((0, 3, 9), (15, 1, 7), (16, 4, 8), (34, 2, 9)):
        dst[at], src[at] = to, of
    with trying(config):
        backend.copy_slots(plane_map, engine.ids(*dst), engine.ids(*src))
        engine.expect_all((3, 9), (1, 7), (4, 8), (2, 9))
        backend.zero_slots(plane_map, engine.ids(*dst[:20], -1, 10))
        engine.expect_all((3, None), (1, None), (4, None))
        backend.run_data(plane_map, engine.ids(0, 5, 6, 8), packet_of([(1, 3)] + [(0, 0)] * 20 + [(2, -1)], DEVICE))
        engine.expect_all((5, 8), (6, None))
