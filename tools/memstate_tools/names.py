"""Names that options of the tools accept. The module imports no torch, so that `--help` and completion are fast."""

from typing import Literal

Strategy = Literal["none", "ping-pong", "lazy", "redirect"]
Backend = Literal["auto", "reference", "interpreter", "cuda"]
Model = Literal["gdn", "mamba2", "kda"]
StateOrder = Literal["key-value", "value-key", "dim-state", "state-dim"]
Layout = Literal["layer-major", "slot-major"]
Engine = Literal["own", "in-place", "arena"]
Storage = Literal["none", "file", "objects", "mooncake"]
Write = Literal["through", "selective", "back"]
Sabotage = Literal["swap", "stale"]
Benchmark = Literal["all", "launches", "host", "alloc", "track", "copy", "state", "prefix", "tiers", "transformers"]
TraceKind = Literal["chat", "shared-prompt", "agent", "mixed", "vllm", "sglang", "openai"]
