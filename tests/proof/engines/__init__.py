"""Real engines on a CPU over memstate: their tokens, hits and leaks, beside runs without a cache.

    python -m tests.proof.engines [vllm|sglang ...] [--only SCENARIO ...] [--newest] [--json PATH]

An engine is a folder here, with `pins.txt`, the versions of its environment, and `run.py`, which is called there as
`python -m tests.proof.engines.NAME.run`. It prints a line a scenario, the engine's own last, and ends with 0 if all of
them passed.
"""
