"""Policies of the prefix cache: small objects that decide which states and pages to keep."""

from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.policies.flop_aware import FlopAware, gain
from memstate.prefix.policies.lru import Lru, LruPages
from memstate.prefix.policies.return_rate import ReturnRate, ReturnRatePages
from memstate.prefix.tree import Node

__all__ = [
    "FlopAware",
    "Lru",
    "LruPages",
    "Node",
    "PagePolicy",
    "Place",
    "ReturnRate",
    "ReturnRatePages",
    "StatePolicy",
    "gain",
]
