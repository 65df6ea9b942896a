"""Stores keep records beyond the life of a process: files, Mooncake, or any class with the methods of `Store`."""

from memstate.tiers.stores.base import Outcome, Store
from memstate.tiers.stores.file import FileStore
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore

__all__ = ["FileStore", "Mooncake", "MooncakeStore", "Outcome", "Store"]
