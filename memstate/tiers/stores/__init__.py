"""Storage backends, where records outlive the process, behind one small protocol."""

from memstate.tiers.stores.base import Outcome, Store
from memstate.tiers.stores.file import FileStore
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore

__all__ = ["FileStore", "Mooncake", "MooncakeStore", "Outcome", "Store"]
