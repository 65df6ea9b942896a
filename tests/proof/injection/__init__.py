"""Raises exceptions inside public calls, and judges the state that is left.

To run everything: python -m tests.proof.injection.

points     counts the lines of a call, and raises an exception at one of them
verdict    compares managers before and after a call, and says whether one is broken
torn       runs scripts and random programs, whose calls are also made in forked processes, where an exception ends them
"""
