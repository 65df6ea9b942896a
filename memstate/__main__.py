"""Runs the command line for `python -m memstate`."""

from memstate.cli.app import main

main()
