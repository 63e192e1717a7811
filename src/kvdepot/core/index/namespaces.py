"""The namespaces of an index: found by the meaning of their chunks' bytes, recorded, and dropped once unused.

Used by core/ on the deciding thread. Invariant: two layouts share a namespace only if everything known about them
agrees.
"""

from __future__ import annotations

import itertools

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.memory.records import NamespaceRecord, Records, ShardRecord

__all__ = ["Namespaces"]


class Namespaces:
    """The namespaces of one index, and their records and those of their shards."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._known: dict[tuple[str, str, int], list[Namespace]] = {}  # by tenant, model, ranks
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Namespaces of {len(self._known)} models>"

    def all(self) -> list[Namespace]:
        """Every namespace, grouped by model, in the order of creation."""
        return [namespace for namespaces in self._known.values() for namespace in namespaces]

    def find(
        self,
        model: str,
        world_size: int,
        rank: int,
        fingerprint: bytes,
        blocks_in_chunk: int,
        tenant: str = "",
        size: int = 0,
    ) -> Namespace:
        """The namespace of one rank's layout; creates one unless everything known about an existing one agrees.

        size: bytes of this rank's shards; 0: not known. It is compared too, because the client could send a wrong
        fingerprint, and the size is what is copied.
        """
        namespaces = self._known.setdefault((tenant, model, world_size), [])
        for namespace in reversed(namespaces):
            same = (
                namespace.blocks_in_chunk == blocks_in_chunk and namespace.layouts.get(rank, fingerprint) == fingerprint
            )
            if same and (not size or namespace.sizes.get(rank, size) == size):
                break
        else:
            namespace = Namespace(next(self._numbers), tenant, model, world_size, blocks_in_chunk)
            namespaces.append(namespace)
        if rank not in namespace.layouts:
            namespace.layouts[rank] = fingerprint
        if size:
            namespace.sizes[rank] = size
        return namespace

    def for_lookup(self, model: str, world_size: int, blocks_in_chunk: int, tenant: str = "") -> list[Namespace]:
        """The namespaces for a lookup, which names no layout: those of registered engines, otherwise the newest."""
        namespaces = [
            namespace
            for namespace in self._known.get((tenant, model, world_size), ())
            if not blocks_in_chunk or namespace.blocks_in_chunk == blocks_in_chunk
        ]
        return [namespace for namespace in namespaces if namespace.live] or namespaces[-1:]

    def forget(self, namespace: Namespace) -> None:
        """Drop a namespace that has no chunks and no registered instance."""
        if not namespace.chunks and not namespace.live:
            namespaces = self._known.get((namespace.tenant, namespace.model, namespace.world_size), [])
            if namespace in namespaces:
                namespaces.remove(namespace)
                namespace.gone = True
                if not namespaces:
                    del self._known[namespace.tenant, namespace.model, namespace.world_size]
                self._records.erase(namespace.slot)
                namespace.slot, namespace.recorded = None, 0

    def record(self, chunk: Chunk, rank: int, serial: int) -> None:
        """Record a sealed shard, and first its namespace if necessary; without room for that, not the shard either."""
        namespace, shard, before = chunk.namespace, chunk.shards[rank], chunk.parent
        if namespace.recorded < len(namespace.layouts):
            self._record(namespace)
        if namespace.recorded == len(namespace.layouts):
            shard.slot = self._records.write(
                ShardRecord(
                    namespace.number, rank, chunk.key, b"" if before is None else before.key, chunk.position,
                    shard.extents, shard.size, serial, shard.checksum, chunk.salt, chunk.born,
                )
            )  # fmt: skip

    def _record(self, namespace: Namespace) -> None:
        """Replace its record. The new one is written before the old one is erased; without room, the old one stays."""
        slot = self._records.write(
            NamespaceRecord(
                namespace.number,
                namespace.tenant,
                namespace.model,
                namespace.world_size,
                namespace.blocks_in_chunk,
                namespace.layouts,
            )
        )
        if slot is not None:
            self._records.erase(namespace.slot)
            namespace.slot, namespace.recorded = slot, len(namespace.layouts)

    def adopt(self, namespaces: list[Namespace]) -> None:
        """Take over those that recovery.py read from the records. There must be none yet."""
        assert not self._known
        self._numbers = itertools.count(max((namespace.number for namespace in namespaces), default=0) + 1)
        for namespace in namespaces:
            self._known.setdefault((namespace.tenant, namespace.model, namespace.world_size), []).append(namespace)
