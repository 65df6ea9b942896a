"""Tiers below the device: host memory, stores, and the transfers of states and KV pages between them.

manager     connects the parts below; settings has the choices of a caller
keys        computes the digests of prefixes
records     seals and checks the bytes of one state or page
host/       holds records in host memory, and copies them to and from the slots
writeback   writes host records to a store
prefetch/   reads records from a store into host memory while a request waits; ranks agree on the result
stores/     keep records that outlive the process
"""

from memstate.tiers.manager import TierManager
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.settings import Tiers
from memstate.tiers.stores import FileStore, Mooncake, MooncakeStore, Objects, Outcome, Store

__all__ = [
    "Fetch", "FileStore", "Mooncake", "MooncakeStore", "Objects", "Outcome", "Prefetch", "Store", "TierManager",
    "Tiers",
]  # fmt: skip
