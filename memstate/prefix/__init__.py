"""The prefix cache: finds snapshots again by token prefix. The tree decides, the command buffer executes.

tree       knows which prefixes have KV and which have a state
policies/  decide which states and which KV to admit and to evict
ranking    keeps nodes in the order of their ranks, for policies
names      encodes tokens, or the keys of an engine's blocks
match      is the result of a lookup: how far it reaches, and why no further
contents   evicts states and pages
cache      joins these with holders, pages and the command buffer
sessions   keep the states of conversations between their turns
room       makes cached states and idle sessions make way
"""

from memstate.prefix.cache import PrefixCache
from memstate.prefix.conversation import SessionInfo
from memstate.prefix.match import Match
from memstate.prefix.policies import Lru, LruPages, PagePolicy, Place, StatePolicy
from memstate.prefix.session_settings import SessionLimits
from memstate.prefix.settings import Prefix

__all__ = [
    "Lru", "LruPages", "Match", "PagePolicy", "Place", "Prefix", "PrefixCache", "SessionInfo", "SessionLimits",
    "StatePolicy",
]  # fmt: skip
