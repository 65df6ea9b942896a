"""Runs real engines on a CPU over memstate, and compares tokens, hits and leaks with runs without a cache.

    python -m tests.proof.engines [vllm|sglang ...] [--only SCENARIO ...] [--newest] [--json PATH]

Each engine has a folder here. Its `pins.txt` has the versions of its environment. Its `run.py` runs in this environment
as `python -m tests.proof.engines.NAME.run`, and prints a line for each scenario and a last line for the engine. It ends
with 0 if all scenarios passed.
"""
