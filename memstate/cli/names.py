"""Names that command-line options accept. The module imports no torch, so that `--help` and completion are fast."""

from typing import Literal

StateDtype = Literal["float32", "bfloat16", "float16"]
PlannedDtype = Literal[StateDtype, "int16", "int8"]
KvDtype = Literal["bfloat16", "float16", "float32", "float8"]
