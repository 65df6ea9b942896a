"""A storage of SGLang's HiCache over a store of memstate: KV pages and states under SGLang's keys, in batches."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import compress
from typing import Any
from zlib import crc32

import numpy as np
import torch
from sglang.srt.mem_cache import hicache_storage as theirs
from torch import Tensor

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.integrations.sglang.staging import Staging
from memstate.tiers.stores.base import Bytes, Outcome, Store

CRC = 4  # bytes of the checksum that ends a record
KV = str(theirs.PoolName.KV.value)


def bytes_of(tensor: Tensor) -> Bytes:
    """Returns the bytes of a tensor in host memory, without a copy.

    Raises:
        InvalidArgument: the argument is not a contiguous tensor in host memory.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{shown(tensor)}: expected a tensor in contiguous host memory")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidArgument(f"tensor of {tuple(tensor.shape)} on {tensor.device}: expected contiguous host memory")
    data: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return data


def checksum(name: str, body: Bytes) -> bytes:
    """Returns the checksum of a record's name and body."""
    return crc32(body.data, crc32(name.encode())).to_bytes(CRC, "little")


def require_as_many(names: list[str], data: list[Bytes]) -> None:
    """Raises an error unless there is one tensor for each key.

    Raises:
        InvalidArgument: there are more or fewer tensors than keys.
    """
    if len(names) != len(data):
        raise InvalidArgument(f"{len(names)} keys with {len(data)} tensors: expected one for each")


class StoreStorage(theirs.HiCacheStorage):
    """Writes records of SGLang's HiCache to a `Store`, such as `FileStore` or `MooncakeStore`, and reads them again.

    A record's name is a hash of SGLang's key, the pool and `identity`. Records are written whole or not at all, and end
    with a crc32 of name and bytes. A read returns only records that are sound and have the right name and size.

    Args:
        config: SGLang's settings; model and ranks become part of every name.
        store: the store.
        identity: text for everything else on which the bytes depend, such as dtypes and the layout of a page.

    Example::

        storage = StoreStorage(config, FileStore("/cache"), identity="bf16 page_first")
        storage.set("key", tensor), storage.exists("key")
    """

    def __init__(self, config: Any, store: Store, identity: str = "") -> None:
        self._store = store
        self._reading, self._writing = Staging(store), Staging(store)
        shared = (config.model_name, config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size, identity)
        shard = (config.tp_rank, config.tp_size)
        self._shard = repr((*shared, *shard))
        self._whole = repr(shared) if config.is_mla_model else self._shard  # KV of MLA is the same on every rank
        self.registered_pools: dict[Any, Any] = {}

    def name(self, key: str, pool: str = KV) -> str:
        """Returns the name of a record.

        Args:
            key: SGLang's key of a page.
            pool: the pool of the page. Names of states differ from rank to rank, names of MLA's KV do not.
        """
        whose = self._whole if pool == KV else self._shard
        return f"{'kv' if pool == KV else 'state'}-{sha256(repr((whose, pool, key)).encode()).hexdigest()}"

    def get(self, key: str, target_location: Tensor | None = None, target_sizes: Any = None) -> Tensor | None:
        """Reads a record.

        Args:
            key: SGLang's key of the record.
            target_location: contiguous host memory of the record's size, to which the record is read.
            target_sizes: unused.

        Returns:
            `target_location`; None if there is no such record.

        Raises:
            InvalidArgument: `target_location` is missing.
        """
        if target_location is None:
            raise InvalidArgument(f"get({key!r}): expected target_location, host memory to read to")
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """Reads records; see `get`."""
        if target_locations is None:
            raise InvalidArgument(f"batch_get of {len(keys)} keys: expected target_locations, host memory to read to")
        read = self._read([self.name(key) for key in keys], [bytes_of(each) for each in target_locations])
        return [place if done else None for place, done in zip(target_locations, read, strict=True)]

    def set(self, key: str, value: Tensor | None = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Writes a record.

        Args:
            key: SGLang's key of the record.
            value: tensor in host memory with the bytes of the record.
            target_location: unused.
            target_sizes: unused.

        Returns:
            Whether reads now find the record.
        """
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:  # fmt: skip
        """Writes records; see `set`. Returns whether reads now find all of them."""
        if values is None:
            raise InvalidArgument(f"batch_set of {len(keys)} keys: expected values, tensors in host memory")
        data = [bytes_of(each.contiguous() if isinstance(each, Tensor) else each) for each in values]
        return all(self._write([self.name(key) for key in keys], data))

    def exists(self, key: str) -> bool:
        """Returns whether a record exists."""
        return self._store.exists([self.name(key)])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many of the first records exist without a gap."""
        return self._without_gap(keys, KV)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:  # fmt: skip
        """Returns how much of a prefix can be restored, with the pages of all pools.

        Args:
            keys: keys of the prefix's pages.
            pool_transfers: the pools besides KV, each with a rule that says which pages it needs: all pages, or only
                the last ones, as for states.
            extra_info: unused.

        Returns:
            SGLang's `PoolTransferResult`: the longest prefix, the pages of each pool, and every possible length.

        Raises:
            InvalidArgument: a pool has an unknown rule.
        """
        pages = self._without_gap(keys, KV)
        hits = {theirs.PoolName.KV: pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not lengths:
                break
            there = self._store.exists([self.name(key, str(transfer.name.value)) for key in keys[:pages]])
            if transfer.hit_policy == theirs.PoolHitPolicy.ALL_PAGES:
                works = [n for n in range(1, pages + 1) if all(there[:n])]
            elif transfer.hit_policy == theirs.PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                works = [n for n in range(1, pages + 1) if all(there[max(0, n - last) : n])]
            else:
                raise InvalidArgument(f"{transfer.name}: the rule {transfer.hit_policy} is not known here")
            if works:
                hits[transfer.name] = works[-1]
            lengths = [n for n in lengths if n in works]
        return theirs.PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Reads pages of pools into host memory.

        Args:
            transfers: one transfer for each pool, with the keys and host positions of its pages.
            extra_info: unused.

        Returns:
            Pool -> whether each page was read.
        """
        read: dict[Any, list[bool]] = {}
        for transfer in transfers:
            pool, places, names = self._places(transfer)
            data = [pool.get_dummy_flat_data_page() for _ in places]
            done = self._read(names, [bytes_of(page) for page in data])
            for place, page in compress(zip(places, data, strict=True), done):
                pool.set_from_flat_data_page(place, page)
            read[transfer.name] = done or [False] * len(transfer.keys or ())
        return read

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Writes pages of pools from host memory. Returns pool -> whether each page was written."""
        written: dict[Any, list[bool]] = {}
        for transfer in transfers:
            pool, places, names = self._places(transfer)
            done = self._write(names, [bytes_of(pool.get_data_page(at, flat=True).contiguous()) for at in places])
            written[transfer.name] = done or [False] * len(transfer.keys or ())
        return written

    def _read(self, names: list[str], places: list[Bytes]) -> list[bool]:
        """Reads records. Writes to a place only if its record is sound. Returns for each record whether it is sound."""
        require_as_many(names, places)
        done: list[bool] = []
        with self._reading.lock:
            for at, records in self._reading.parts([place.size + CRC for place in places]):
                some, outcomes = names[at : at + len(records)], self._store.get(names[at : at + len(records)], records)
                for name, place, record, outcome in zip(some, places[at:], records, outcomes, strict=False):
                    body = record[:-CRC]
                    sound = outcome == Outcome.DONE and bytes(record[-CRC:]) == checksum(name, body)
                    if sound:
                        place[:] = body
                    done.append(sound)
        return done

    def _write(self, names: list[str], data: list[Bytes]) -> list[bool]:
        require_as_many(names, data)
        done: list[bool] = []
        with self._writing.lock:
            for at, records in self._writing.parts([body.size + CRC for body in data]):
                some = names[at : at + len(records)]
                for name, body, record in zip(some, data[at:], records, strict=False):
                    record[:-CRC] = body
                    record[-CRC:] = np.frombuffer(checksum(name, body), np.uint8)
                done += [outcome == Outcome.DONE for outcome in self._store.put(some, records)]
        return done

    def _without_gap(self, keys: list[str], pool: str) -> int:
        there = self._store.exists([self.name(key, pool) for key in keys])
        return there.index(False) if False in there else len(there)

    def _places(self, transfer: Any) -> tuple[Any, list[int], list[str]]:
        """Returns (pool, start of each page, record names) of a transfer. No pages if positions do not match keys."""
        if transfer.name not in self.registered_pools:
            raise InvalidArgument(f"pool {transfer.name!r}: expected one of {list(self.registered_pools)}")
        pool = self.registered_pools[transfer.name]
        size = getattr(pool, "page_size", 1) or 1
        keys, at = transfer.keys or (), transfer.host_indices
        if at is None or at.numel() != len(keys) * size:
            return pool, [], []
        return pool, at[::size].tolist(), [self.name(key, str(transfer.name.value)) for key in keys]
