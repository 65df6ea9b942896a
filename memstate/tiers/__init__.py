"""Tiers below the device: host memory, stores, and what moves states and KV pages between them.

manager     joins the parts; settings: what a caller chooses
keys        names of prefixes; records: one state or page as bytes
host/       host memory: which records are there, and their way to and from the slots
writeback   writes host records to a store
prefetch/   from a store into host memory while a request waits, agreed on between ranks
stores/     where records outlive the process
"""

from memstate.tiers.manager import TierManager
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.settings import Tiers
from memstate.tiers.stores import FileStore, Mooncake, MooncakeStore, Outcome, Store

__all__ = [
    "Fetch",
    "FileStore",
    "Mooncake",
    "MooncakeStore",
    "Outcome",
    "Prefetch",
    "Store",
    "TierManager",
    "Tiers",
]
