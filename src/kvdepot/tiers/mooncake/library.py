"""Types for the used part of Mooncake Store's client, which declares none, and the import of that client.

Its calls block, most without the GIL (see membership.py); a negative code is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from kvdepot import install
from kvdepot.errors import ConfigError

_DEBIAN = {"libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1", "libcurl": "libcurl4"}

Matrix = list[list[int]]
"""A list for each key: the addresses, the sizes, or the offsets of its pieces of memory."""


class ReplicateConfig(Protocol):
    replica_num: int


class _Buffer(Protocol):
    size: int


class _InMemory(Protocol):
    buffer_descriptor: _Buffer


class _OnDisk(Protocol):
    object_size: int


class Replica(Protocol):
    def is_memory_replica(self) -> bool: ...
    def get_memory_descriptor(self) -> _InMemory: ...
    def is_disk_replica(self) -> bool: ...
    def get_disk_descriptor(self) -> _OnDisk: ...


class MooncakeStore(Protocol):
    """A client; `library().MooncakeDistributedStore()`."""

    def setup(
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int: ...
    def close(self) -> object: ...
    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def is_exist(self, key: str) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> Mapping[str, Sequence[Replica]]: ...
    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Matrix, sizes: Matrix) -> list[int]: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: ReplicateConfig) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: Matrix, sizes: Matrix, offsets: Matrix
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def remove_by_regex(self, pattern: str, force: bool) -> int: ...


def library() -> ModuleType:
    """The library's module, imported at the first call. Raises a ConfigError that says what to install."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as exc:
        missing = next((package for lib, package in _DEBIAN.items() if lib in str(exc)), "")
        if missing:
            raise ConfigError(
                f"tier mooncake: {exc}; apt-get install {missing} (all it needs: {' '.join(_DEBIAN.values())})"
            ) from exc
        raise ConfigError(f"tier mooncake: {exc}; {install.advice('mooncake')}") from exc


def size_of(replicas: Sequence[Replica]) -> int:
    """Bytes of an object; 0 if no replica is in memory or on disk."""
    for replica in replicas:
        if replica.is_memory_replica():
            return replica.get_memory_descriptor().buffer_descriptor.size
        if replica.is_disk_replica():
            return replica.get_disk_descriptor().object_size
    return 0
