"""`python -m memstate`: the command line."""

from memstate.cli.app import main

main()
