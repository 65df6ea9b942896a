"""Runs a part of the proof on a GPU: `python -m tests.proof.gpu PART ..`; see `machine`."""

import sys
from importlib import import_module

from tests.proof.gpu.machine import main

main(import_module(f"tests.proof.gpu.{sys.argv.pop(1)}").prove)
