"""Policies of the prefix cache: small objects that decide which states and pages to keep."""

from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.policies.flop_aware import FlopAware
from memstate.prefix.policies.greedy_dual import GreedyDual, gain
from memstate.prefix.policies.lru import Lru, LruPages
from memstate.prefix.policies.path_cap import PathCap
from memstate.prefix.policies.return_rate import ReturnRate, ReturnRatePages
from memstate.prefix.tree import Node

__all__ = [
    "FlopAware",
    "GreedyDual",
    "Lru",
    "LruPages",
    "Node",
    "PagePolicy",
    "PathCap",
    "Place",
    "ReturnRate",
    "ReturnRatePages",
    "StatePolicy",
    "gain",
]
