"""Tests names of weights: a name changes exactly if a file that vLLM loads changes."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memstate.errors import ConfigurationError
from memstate.integrations.vllm import weights
from memstate.integrations.vllm.weights import Adapters, files, identity

COMMIT = "c" * 40


def safetensors(path: Path, fill: int, size: int = 64, **metadata: str) -> None:
    """Writes a file of one tensor; files of equal sizes have equal headers."""
    header = json.dumps({"__metadata__": metadata, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes([fill]) * size)


def digest(place: Path | str, *args: Any) -> bytes:
    listed = files(str(place), *args)
    assert listed is not None
    return listed.digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sharded checkpoint, a configuration and a hidden folder."""
    made = tmp_path / "model"
    (made / ".cache").mkdir(parents=True)
    for at in (1, 2):
        safetensors(made / f"model-0000{at}-of-00002.safetensors", at)
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model in the hub's cache: a snapshot is a folder of links to blobs."""
    made = tmp_path / "hub" / "models--org--name"
    for each in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (made / each).mkdir(parents=True)
    (made / "refs" / "main").write_text(COMMIT)
    safetensors(made / "blobs" / "one", 1)
    (made / "snapshots" / COMMIT / "model.safetensors").symlink_to("../../blobs/one")
    return made


def replaced(folder: Path) -> None:
    """Writes other weights of the same size, with the times of the old file."""
    path = folder / "model-00002-of-00002.safetensors"
    before = path.stat()
    safetensors(path, 9)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "equal size, and the old times": replaced,
    "touched": lambda folder: os.utime(folder / "model-00001-of-00002.safetensors"),
    "header": lambda folder: safetensors(folder / "model-00001-of-00002.safetensors", 1, format="pt"),
    "size": lambda folder: safetensors(folder / "model-00001-of-00002.safetensors", 1, size=65),
    "a shard is gone": lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
    "one more, .bin": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"weights"),
    "another name": lambda folder: (folder / "config.json").rename(folder / "other.json"),
    "in a folder below": lambda folder: shutil.copytree(folder, folder / "part"),
    "behind a link to a folder": lambda folder: (folder / "part").symlink_to(folder.parent / "elsewhere"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_in_the_files_is_other_weights(folder: Path, what: str) -> None:
    (folder.parent / "elsewhere").mkdir()
    safetensors(folder.parent / "elsewhere" / "more.safetensors", 3)
    before = digest(folder)
    assert digest(folder) == before
    CHANGES[what](folder)
    assert digest(folder) != before


def test_headers_count_where_times_and_sizes_say_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of files are compared, since a file system may give all files the same times."""
    stat = Path.stat

    def timeless(path: Path, **options: Any) -> Any:
        real = stat(path, **options)
        return SimpleNamespace(st_mode=real.st_mode, st_size=real.st_size, st_mtime_ns=0, st_ctime_ns=0, st_ctime=0.0)

    monkeypatch.setattr(Path, "stat", timeless)
    before = digest(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "same")
    os.replace(folder / "same", folder / "model-00001-of-00002.safetensors")
    assert digest(folder) == before
    safetensors(folder / "model-00001-of-00002.safetensors", 1, size=64, a="b")
    long = (folder / "model-00001-of-00002.safetensors").stat().st_size
    one = digest(folder)
    safetensors(folder / "model-00001-of-00002.safetensors", 1, size=64, a="c")
    assert (folder / "model-00001-of-00002.safetensors").stat().st_size == long
    assert len({before, one, digest(folder)}) == 3


def test_what_is_hidden_or_no_file_changes_nothing(folder: Path) -> None:
    before = digest(folder)
    (folder / ".cache" / "lock").write_text("")
    (folder / "model.safetensors.lost").symlink_to("nowhere")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe.safetensors")  # nobody writes to this pipe, so opening it would wait for ever
    assert digest(folder) == before


def test_links_that_lead_round_end(folder: Path) -> None:
    (folder / "round").symlink_to(folder)
    assert digest(folder) == digest(folder)


def test_one_file_is_a_model_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF, quantised")
    before = digest(path)
    path.write_bytes(b"GGUF, of others")
    assert digest(path) != before


def test_little_is_read_of_a_large_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is sparse and has 1 TiB. The header of another file claims an impossible length."""
    with (folder / "huge.safetensors").open("wb") as file:
        file.write((16).to_bytes(8, "little") + b" " * 16)
        file.truncate(1 << 40)
    digest(folder)
    monkeypatch.setattr(weights, "HEADER_BYTES", 1 << 10)
    with (folder / "huge.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    digest(folder)


def test_a_model_of_the_hub_is_the_blobs_that_its_snapshot_links_to(hub: Path) -> None:
    pytest.importorskip("huggingface_hub")
    downloads = str(hub.parent)
    before = digest("org/name", None, downloads)
    assert digest("org/name", "main", downloads) == digest("org/name", COMMIT, downloads) == before
    safetensors(hub / "blobs" / "one", 2)
    assert digest("org/name", None, downloads) != before
    assert files("org/name", "v2", downloads) is None
    assert files("org/name:Q4_K_M", None, downloads) is files("no such/model of any/hub", None, downloads) is None


@pytest.mark.parametrize("place", ["~no-such-user/model", "x" * 300 + "/model"])
def test_a_place_that_cannot_be_looked_at_has_no_files(place: str) -> None:
    assert files(place) is None


def test_another_hub_has_folders_of_its_own(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert files("org/name", None, str(hub.parent)) is None


def config(model: Path | str, load_format: str = "auto", **fields: Any) -> Any:
    """Returns the parts of vLLM's configuration that memstate reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, **fields),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=None,
    )


@pytest.mark.parametrize("how", ["dummy", "tensorizer", "modelexpress", "ipc_cache", "plugin"])
def test_weights_that_no_file_tells_apart_are_refused_unless_they_are_named(folder: Path, how: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"model with load_format='{how}'; .* set 'model' in kv_connector_extra"
    ):
        identity(config(folder, how))
    assert (
        identity(config(folder, how), "mine")
        == identity(config("/elsewhere"), "mine")
        != identity(config(folder, how), "his")
    )


def test_weights_from_afar_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="s3://bucket/model with load_format='runai_streamer'"):
        identity(config(folder, "runai_streamer", model_weights="s3://bucket/model"))
    (tmp_path / "nothing").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match=str(place)):
            identity(config(place))


def test_the_drafter_counts(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    safetensors(draft / "model.safetensors", 1)
    both = config(folder)
    both.speculative_config = SimpleNamespace(draft_model_config=config(draft).model_config, draft_load_config=None)
    before = identity(both)
    assert before != identity(config(folder))
    safetensors(draft / "model.safetensors", 2)
    assert identity(both) != before
    both.speculative_config.draft_load_config = config(draft, "dummy").load_config
    with pytest.raises(ConfigurationError, match="draft with load_format='dummy'"):
        identity(both)
    both.speculative_config.draft_model_config = None  # drafters without a model, such as n-grams
    assert identity(both) == identity(config(folder))


def asks(path: Path | str, number: int = 1) -> Any:
    """Returns a request for the adapter at a path, with this number."""
    return SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=number, lora_name="ours", lora_path=str(path)))


def test_adapters_are_told_apart_by_their_files(folder: Path) -> None:
    first, same = Adapters().identity(asks(folder)), Adapters().identity(asks(folder))
    assert first == same != b""
    safetensors(folder / "model-00001-of-00002.safetensors", 7)
    assert Adapters().identity(asks(folder)) != first
    assert Adapters().identity(SimpleNamespace(lora_request=None)) == b""


def test_an_adapter_that_changed_after_the_engine_began_is_its_own(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files may be newer than the adapter that vLLM has loaded.

    So the records of this adapter get a name that only this process uses.
    """
    caplog.set_level("WARNING", "memstate")
    began = max(path.stat().st_ctime for path in folder.iterdir()) - 1
    one, other = Adapters(began), Adapters(began)
    assert one.identity(asks(folder)) == one.identity(asks(folder)) != other.identity(asks(folder))
    said = [record.getMessage() for record in caplog.records]
    # `one` and `other` log a line each
    assert said == ["adapter not told apart adapter='ours' why='changed after the engine began'"] * 2
    assert Adapters(time.time() + 1).identity(asks(folder)) != one.identity(asks(folder))


def test_an_adapter_without_files_is_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "memstate")
    one = Adapters()
    assert one.identity(asks(tmp_path / "missing")) not in (b"", Adapters().identity(asks(tmp_path / "missing")))
    assert "why='has no files'" in caplog.text


def test_an_adapter_stays_what_it_was_while_the_engine_runs(folder: Path) -> None:
    """vLLM loads changed files only after a restart, or under another number of the adapter."""
    adapters = Adapters(time.time() + 60)
    before = adapters.identity(asks(folder))
    safetensors(folder / "model-00001-of-00002.safetensors", 7)
    assert adapters.identity(asks(folder)) == before != adapters.identity(asks(folder, number=2))
