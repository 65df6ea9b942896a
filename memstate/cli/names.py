"""Names that command-line options accept. Imports nothing, so that `--help` and shell completion answer at once."""

from typing import Literal

StateDtype = Literal["float32", "bfloat16", "float16"]
KvDtype = Literal["bfloat16", "float16", "float32", "float8"]
