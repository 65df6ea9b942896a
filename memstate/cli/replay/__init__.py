"""Replays traces: serves each request through a manager as an engine does, but its forward computes nothing.

requests   turns a trace into prompts and answers in tokens
serving    the loop: admit, plan of chunks, settle, publish, release
bound      the hit rate that no policy exceeds
runs       one replay for each policy and number of states; refuses invalid arguments
report     the figures and their table
plans      the splits of a memory plan, each with the hit rate of a trace
"""

from memstate.cli.replay.plans import rated
from memstate.cli.replay.report import Replayed, UpperBound, table
from memstate.cli.replay.runs import BOUND, NAMES, bound, compare, replay
from memstate.cli.replay.serving import Loop

__all__ = ["BOUND", "NAMES", "Loop", "Replayed", "UpperBound", "bound", "compare", "rated", "replay", "table"]
