"""Tiers below the device: host memory, storage, and the transfers of states and KV pages between them."""

from memstate.tiers.handover.handover import Handed, HandOver
from memstate.tiers.handover.resplit import Resplit
from memstate.tiers.manager import TierManager
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.settings import Tiers
from memstate.tiers.stores import FileStore, Mooncake, MooncakeStore, Outcome, Store

__all__ = [
    "Fetch",
    "FileStore",
    "HandOver",
    "Handed",
    "Mooncake",
    "MooncakeStore",
    "Outcome",
    "Prefetch",
    "Resplit",
    "Store",
    "TierManager",
    "Tiers",
]
