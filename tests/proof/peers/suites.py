"""The suites: which tests of others run with memstate inside, and how a folder with them is made."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.proof.peers.sources import BUILD, archive, tree, unpack, version

HERE: Final = Path(sys.executable)
# The model types of Transformers whose tests run. All but recurrent_gemma keep their states in Transformers' cache.
FAMILIES: Final = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
TRANSFORMERS: Final = ("TRANSFORMERS_TESTS", "decba1d2ea4ed3cbf0495d1828abad4b2dba1846", "huggingface/transformers")
# Answers for names of a file that is not in the tree: tests on several devices use it, and they do not run here.
NOTHING: Final = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
"""


MAMBA: Final = ("MAMBA_TESTS", "e9594ce1c732d97440f0332fdc43170a2294dbfa", "state-spaces/mamba")
FLA: Final = ("FLA_TESTS", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89", "fla-org/flash-linear-attention")


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
    common = archive("transformers", version("transformers", HERE), HERE)
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
    return folder, HERE


def files(name: str, source: Path, *tests: str) -> tuple[Path, Path]:
    """Makes a folder with some files of tests, which then run on a CPU."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for each in tests:
        (folder / Path(each).name).write_text((source / each).read_text().replace('"cuda"', '"cpu"'))
    return folder, HERE


def mamba_ssm() -> tuple[Path, Path]:
    """Makes a folder with mamba_ssm's tests of its decode kernel."""
    return files("mamba_ssm", tree(*MAMBA), "tests/ops/triton/test_selective_state_update.py")


def fla() -> tuple[Path, Path]:
    """Makes a folder with fla's tests of two delta rules."""
    return files("fla", tree(*FLA), "tests/ops/test_gdn.py", "tests/ops/test_kda.py")


def of_transformers(kernels: str, tests: Sequence[str], inside: int) -> Suite:
    """Returns the suite of Transformers for one setting of `StateCache(kernels=)`."""
    name = f"transformers-{kernels}"
    variables = {"PEER_KERNELS": kernels, "HF_HUB_OFFLINE": "1"}
    pins = ["parameterized==0.9.0", "httpx==0.28.1", "httpcore==1.0.9"]
    return Suite(lambda: transformers(name), "in_transformers", tests, inside, variables, pins)


SUITES: Final[Mapping[str, Suite]] = {
    "transformers-gathered": of_transformers("gathered", ["tests/models"], 150),
    "transformers-slots": of_transformers("slots", ["tests/models", "-k", "generate or generation"], 40),
    "mamba_ssm": Suite(mamba_ssm, "in_mamba_ssm", ["test_selective_state_update.py"], 540, {}, []),
    # The gate belongs to a function before the step, and blocks of vLLM to another state.
    "fla": Suite(fla, "in_fla", [".", "-k", "test_fused_recurrent and not gate_in_kernel and not vllm"], 30, {}, []),
}
