"""Names weights by the files from which they are loaded, without reading the weights.

    model     the files in its folder, or in the hub's snapshot: names, sizes, times, headers of safetensors
    adapter   the same for a LoRA adapter, when its first request arrives

vLLM's hashes depend on the name and path of an adapter, but not on the model. The times are those of the last write and
of the last change in the file system. So equal files with new times count as other weights: that can cost a hit, but
never causes a wrong token.
"""

import logging
import os
import stat
import time
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from memstate import logs
from memstate.errors import ConfigurationError
from memstate.tiers.records import DIGEST_BYTES

LOG = logs.logger("vllm")

# Load formats of vLLM that read the model's folder. Others make up weights, or read them from other places.
FROM_FOLDER = frozenset({
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
})  # fmt: skip
SIZE_BYTES = 8  # bytes before the header of a safetensors file; they give the header's size
HEADER_BYTES = 100 << 20  # the largest header that safetensors allows


class Files(NamedTuple):
    """The files of a folder, or a single file.

    Attributes:
        digest: Digest, 32 bytes, of names, sizes, times and headers.
        changed: Time of the last change of any of the files, in seconds since 1970.
    """

    digest: bytes
    changed: float


def identity(vllm_config: Any, name: str | None = None) -> Hashable:
    """Returns a value for the weights of a model and its drafter. Without `name`, it changes with the files.

    Args:
        vllm_config: vLLM's configuration.
        name: Name that the user gives to the weights, used instead of their path and files; or None.

    Raises:
        ConfigurationError: There is neither a name nor a file of the weights.
    """
    if name:
        return ("named", name)
    drafted = vllm_config.speculative_config
    models = [(vllm_config.model_config, vllm_config.load_config)]
    if drafted is not None and drafted.draft_model_config is not None:
        models.append((drafted.draft_model_config, drafted.draft_load_config or vllm_config.load_config))
    return tuple((model.model, _identity(model, load)) for model, load in models)


def _identity(model: Any, load: Any) -> bytes:
    how, away = str(load.load_format), getattr(model, "model_weights", "")
    own_files = None
    if how in FROM_FOLDER and not away:
        own_files = files(model.model, model.revision, load.download_dir)
    if own_files is None:
        raise ConfigurationError(
            f"store with weights that no file tells apart: {away or model.model} with load_format={how!r}; after a "
            "restart with others it would give wrong tokens; set 'model' in kv_connector_extra_config to a name of "
            "these weights, and to another whenever they change, or leave out 'store'"
        )
    return own_files.digest


def files(place: str, revision: str | None = None, downloads: str | None = None) -> Files | None:
    """Returns a digest of the files at a place. Of safetensors files, it reads only the headers.

    Args:
        place: A folder, a file, or a model of the Hugging Face hub that has been downloaded.
        revision: Revision of the hub's model.
        downloads: Folder of the hub's models; None for the usual folder.

    Returns:
        The files; None if there are none.
    """
    where = Path(os.path.expanduser(place))  # unchanged if there is no home folder
    if not os.path.exists(where):  # also if this user may not look there
        if (snapshot := _snapshot(place, revision, downloads)) is None:
            return None
        where = snapshot
    lines, changed = list[Hashable](), 0.0
    for path in sorted(_within(where)) if where.is_dir() else [where]:
        try:
            status = path.stat()  # of the file to which a link leads
            if not stat.S_ISREG(status.st_mode):
                continue
            header = _header(path) if path.suffix == ".safetensors" else b""
        except OSError:  # for example a broken link: vLLM cannot load it either
            continue
        times = (status.st_mtime_ns, status.st_ctime_ns)
        lines.append((os.path.relpath(path, where), status.st_size, *times, blake2b(header).hexdigest()))
        changed = max(changed, status.st_ctime)
    return Files(blake2b(repr(lines).encode(), digest_size=DIGEST_BYTES).digest(), changed) if lines else None


def _within(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder. Follows links. Skips hidden files, because they are not weights."""
    seen = set[str]()
    for at, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = [] if real in seen else sorted(each for each in folders if not each.startswith("."))
        seen.add(real)
        yield from (Path(at, name) for name in names if not name.startswith("."))


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.read(SIZE_BYTES)
        return size + file.read(min(int.from_bytes(size, "little"), HEADER_BYTES))


def _snapshot(model: str, revision: str | None, downloads: str | None) -> Path | None:
    """Returns the folder of a downloaded model of the hub, or None."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):  # another hub, with other folders
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=downloads, local_files_only=True))
    except (ImportError, OSError, ValueError):  # the library is missing, or the model or name is unknown
        return None


class Adapters:
    """Names LoRA adapters by their files, so that two versions with the same name and path have different names.

    vLLM loads an adapter before its first request, or with it. If the adapter's files have changed since the engine
    started, nobody knows which version vLLM has loaded. Then only this process uses the adapter's records.

    Args:
        began: Time at which the engine started, in seconds since 1970; None for now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = time.time() if began is None else began
        self._own = os.urandom(DIGEST_BYTES)
        self._known: dict[tuple[int, str], bytes] = {}

    def identity(self, request: Any) -> bytes:
        """Returns bytes that name the adapter of a request; empty if it has no adapter.

        Args:
            request: vLLM's request.
        """
        if (adapter := request.lora_request) is None:
            return b""
        which = (adapter.lora_int_id, adapter.lora_path)
        if which not in self._known:
            its_files = files(adapter.lora_path)
            if its_files is None or its_files.changed > self._began:
                why = "has no files" if its_files is None else "changed after the engine began"
                logs.event(LOG, logging.WARNING, "adapter not told apart", adapter=adapter.lora_name, why=why)
                self._known[which] = self._own
            else:
                self._known[which] = its_files.digest
        return self._known[which]
