"""`python -m memstate`: the command line."""

from memstate.cli import main

main()
