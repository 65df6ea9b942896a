"""Compares the bytes of a state with those that SGLang's own classes of configurations reckon."""

import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import memstate as ms
from docs.site.models import MODELS
from memstate.state.presets import from_config

sglang = pytest.importorskip("sglang", reason="needs SGLang, see docs/sglang.md")

FILES = (
    "bailing_hybrid", "falcon_h1", "gigachat35", "granitemoehybrid", "interns2_mobius", "jet_nemotron", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "minicpm", "nemotron_h", "qwen3_5", "qwen3_next", "qwen4_exp",
)  # fmt: skip
# Types that SGLang reads with the class of another one, or whose class needs fields that decide no state.
READ_AS = {"bailing_moe_v3": "bailing_hybrid", "bailing_moe_linear": "bailing_hybrid"}
RANKS = (1, 2, 4, 8, 16)


class Parallel(SimpleNamespace):
    """What SGLang's classes ask of a process: its ranks. All else is False."""

    def __getattr__(self, name: str) -> bool:
        return False


@contextlib.contextmanager
def classes() -> Iterator[tuple[Mapping[str, Any], Parallel]]:
    """Yields (type of a model -> SGLang's class of its configuration, the ranks that they see).

    The package of configurations imports much more, so its files are imported without it.
    """
    with pytest.MonkeyPatch.context() as patch:
        package, parallel = ModuleType("sglang.srt.configs"), Parallel(attn_tp_size=1, tp_size=1)
        package.__path__ = [str(Path(sglang.__path__[0], "srt", "configs"))]
        patch.setitem(sys.modules, package.__name__, package)
        patch.setattr(importlib.import_module("sglang.srt.runtime_context"), "get_parallel", lambda: parallel)
        found: dict[str, Any] = {}
        for name in FILES:
            for each in vars(importlib.import_module(f"{package.__name__}.{name}")).values():
                kind = getattr(each, "model_type", None)
                if isinstance(each, type) and kind and hasattr(each, "mamba2_cache_params"):
                    found[kind] = each
        yield found, parallel


@pytest.mark.filterwarnings("ignore")
def test_sglang_reckons_the_same_bytes() -> None:
    compared = set()
    with classes() as (found, parallel):
        for name, model in MODELS.items():
            config = copy.deepcopy(model["config"])
            kind = READ_AS.get(config["model_type"], config["model_type"])
            if kind not in found:
                continue
            theirs = found[kind](**copy.deepcopy(config) | {"model_type": kind})
            for ranks in RANKS:
                parallel.attn_tp_size = parallel.tp_size = ranks
                try:
                    expected = theirs.mamba2_cache_params.mamba_cache_per_req
                    if kind == "jet_nemotron":  # its pool also has windows of q and k, which no step reads
                        expected -= 24 * 2 * (12 // ranks) * 96 * 3 * 2
                except AssertionError:  # the heads do not divide
                    with pytest.raises(ms.InvalidArgument):
                        from_config(config, ranks=ranks)
                    continue
                if kind == "jet_nemotron" and 12 % ranks:
                    continue
                assert from_config(config, ranks=ranks).bytes_per_slot == expected, (name, ranks)
                compared.add((name, ranks))
    assert len(compared) >= 150  # 34 models
