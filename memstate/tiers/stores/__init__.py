"""Stores keep records beyond a process: files, objects, Mooncake, or any class with the methods of `Store`."""

from memstate.tiers.stores.base import Outcome, Store
from memstate.tiers.stores.file import FileStore
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from memstate.tiers.stores.objects import Objects

__all__ = ["FileStore", "Mooncake", "MooncakeStore", "Objects", "Outcome", "Store"]
