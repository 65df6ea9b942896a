"""The prefix cache: finds snapshots again by token prefix. The tree decides, the command buffer executes.

tree       which prefixes have KV and which a state
policies/  what to admit and what to evict, for states and for KV
ranking    nodes by rank, for policies
match      what was found for a prompt, and why it was not more
cache      joins these with holders, pages and the command buffer
sessions   conversations whose states stay between their turns
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
