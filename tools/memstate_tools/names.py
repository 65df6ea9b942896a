"""Names that options of the tools accept. Imports nothing, so that `--help` and shell completion answer at once."""

from typing import Literal

Strategy = Literal["none", "ping-pong", "lazy", "redirect"]
Backend = Literal["auto", "reference", "interpreter", "cuda"]
Model = Literal["gdn", "mamba2", "kda"]
StateOrder = Literal["key-value", "value-key", "dim-state", "state-dim"]
Layout = Literal["layer-major", "slot-major"]
Engine = Literal["own", "in-place", "arena"]
Storage = Literal["none", "file", "mooncake"]
Write = Literal["through", "selective", "back"]
Sabotage = Literal["swap", "stale"]
Benchmark = Literal["all", "launches", "host", "alloc", "track", "copy", "state", "prefix", "tiers", "transformers"]
TraceKind = Literal["chat", "shared-prompt", "agent", "mixed", "vllm", "sglang", "openai"]
