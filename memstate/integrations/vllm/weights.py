"""What tells weights apart without reading them: the files that they come from.

    model     its folder, or that of the hub's snapshot: names, sizes and times of its files, headers of safetensors
    adapter   the same of a LoRA adapter, when its first request comes

vLLM's hashes know an adapter by its name and its path, and nothing of the model. Times are those of the last write and
of the last change that the file system noted. So equal files under new times are other weights: a miss, no wrong token.
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

# Formats of vLLM that load what is in the folder of the model. Others make weights up, or have them from elsewhere.
FROM_FOLDER = frozenset({
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
})  # fmt: skip
SIZE_BYTES = 8  # of a safetensors header's size, in front of it
HEADER_BYTES = 100 << 20  # the largest header that safetensors allows


class Files(NamedTuple):
    """The files in one place.

    Attributes:
        digest: 32 bytes for what they are called, their sizes, times and headers.
        changed: When the last of them changed, in seconds since 1970.
    """

    digest: bytes
    changed: float


def identity(vllm_config: Any, name: str | None = None) -> Hashable:
    """Returns what tells the weights of a model, and of its drafter, from others at the same path.

    Args:
        vllm_config: vLLM's configuration.
        name: Name of the weights, which stands for their path and their files; None for none.

    Raises:
        ConfigurationError: Nothing tells them apart, and they have no name.
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
    found = None
    if how in FROM_FOLDER and not away:
        found = files(model.model, model.revision, load.download_dir)
    if found is None:
        raise ConfigurationError(
            f"store with weights that no file tells apart: {away or model.model} with load_format={how!r}; after a "
            "restart with others it would give wrong tokens; set 'model' in kv_connector_extra_config to a name of "
            "these weights, and to another whenever they change, or leave out 'store'"
        )
    return found.digest


def files(place: str, revision: str | None = None, downloads: str | None = None) -> Files | None:
    """Returns what tells the files in a place from others there, without reading more than headers.

    Args:
        place: A folder, a file, or a model of the Hugging Face hub that has been downloaded.
        revision: Revision of the hub's model.
        downloads: Where the hub's models are, None for the usual folder.

    Returns:
        What they are; None where there is no file.
    """
    where = Path(os.path.expanduser(place))  # as it is where there is no home
    if not os.path.exists(where):  # False also where nobody may look
        snapshot = _snapshot(place, revision, downloads)
        if snapshot is None:
            return None
        where = snapshot
    lines, changed = list[Hashable](), 0.0
    for path in sorted(_within(where)) if where.is_dir() else [where]:
        try:
            status = path.stat()  # of the file that a link leads to
            if not stat.S_ISREG(status.st_mode):
                continue
            header = _header(path) if path.suffix == ".safetensors" else b""
        except OSError:  # such as a link that leads nowhere: vLLM cannot load it either
            continue
        times = (status.st_mtime_ns, status.st_ctime_ns)
        lines.append((os.path.relpath(path, where), status.st_size, *times, blake2b(header).hexdigest()))
        changed = max(changed, status.st_ctime)
    return Files(blake2b(repr(lines).encode(), digest_size=DIGEST_BYTES).digest(), changed) if lines else None


def _within(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder, also behind links. Hidden ones are no weights."""
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
    """Returns the folder of a model of the hub, as far as it has been downloaded."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):  # another hub, with folders of its own
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=downloads, local_files_only=True))
    except (ImportError, OSError, ValueError):  # no such library, model or name
        return None


class Adapters:
    """Tells LoRA adapters from others under the same name and path.

    vLLM loads an adapter before its first request or with it. If its files have changed since the engine began, nothing
    says which of them vLLM has loaded. Then its records belong to this process alone.

    Args:
        began: When the engine began, in seconds since 1970; None for now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = time.time() if began is None else began
        self._own = os.urandom(DIGEST_BYTES)
        self._known: dict[tuple[int, str], bytes] = {}

    def identity(self, request: Any) -> bytes:
        """Returns what tells the adapter of a request apart, empty for none.

        Args:
            request: vLLM's request.
        """
        adapter = request.lora_request
        if adapter is None:
            return b""
        which = (adapter.lora_int_id, adapter.lora_path)
        if which not in self._known:
            found = files(adapter.lora_path)
            if found is None or found.changed > self._began:
                why = "has no files" if found is None else "changed after the engine began"
                logs.event(LOG, logging.WARNING, "adapter not told apart", adapter=adapter.lora_name, why=why)
                self._known[which] = self._own
            else:
                self._known[which] = found.digest
        return self._known[which]
