"""Runs tests that others wrote, with memstate inside, and prints the tests that are lost.

    python -m tests.proof.peers            every suite that can run here; the same as `make peer-proof`
    python -m tests.proof.peers NAME...    these suites; one that cannot run fails

A suite is in `suites.py`, and its pytest plugin, which puts memstate in, in `inside/`. No test of others is in this
repository: a source archive of the installed version comes by pip, and a source tree is named by a variable such as
`TRANSFORMERS_TESTS`. Without it, the suite is skipped.

A test is *lost* if it fails with memstate and passes without. It is also lost if it passes, and memstate gave other
tokens than the other side's own cache, or left a slot that nobody owns. `lost.txt` has the known losses, with reasons.
Exits with 1 if the losses are not exactly those, if a test cannot be collected, or if too few tests had memstate
inside.
"""
