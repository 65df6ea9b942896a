"""The prefix cache: finds snapshots again by token prefix. The tree decides, the command buffer executes.

tree       which prefixes have KV and which a state
policies/  what to admit and what to evict, for states and for KV
ranking    nodes by rank, for policies
match      what a lookup found, and why it was not more
cache      all of it together, on snapshots, pages and the command buffer
"""

from memstate.prefix.cache import PrefixCache
from memstate.prefix.match import Match
from memstate.prefix.policies import Lru, LruPages, PagePolicy, Place, StatePolicy
from memstate.prefix.settings import Prefix

__all__ = ["Lru", "LruPages", "Match", "PagePolicy", "Place", "Prefix", "PrefixCache", "StatePolicy"]
