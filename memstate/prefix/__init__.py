"""The prefix cache: finds snapshots again by token prefix. The tree decides, the command buffer executes.

tree       knows which prefixes have KV and which have a state
policies/  decide which states and which KV to admit and to evict
ranking    keeps nodes in the order of their ranks, for policies
names      encodes what names a prefix: tokens, or the keys of an engine's KV blocks
match      is the result of a lookup: how far it reaches, and why no further
contents   evicts states and pages
cache      connects the parts above with holders, pages and the command buffer
sessions   keep the states of conversations between their turns
room       frees slots and pages by evicting cached states and emptying idle sessions
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
