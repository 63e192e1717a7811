"""The namespaces of an index: finds the one whose bytes mean the same, records namespaces, and drops unused ones.

Used by core/ on the deciding thread. Invariant: two layouts share a namespace only if everything known about them
agrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvdepot.core.index.chunk import Chunk, Namespace, Scope, Shard, join_groups
from kvdepot.core.index.writers import Writers
from kvdepot.memory.records import NamespaceRecord, Records, ShardRecord
from kvdepot.protocol.wire import Group


class Namespaces:
    """The namespaces of one index, with the records of namespaces and shards."""

    def __init__(self, records: Records, chunk_tokens: int = 0) -> None:
        """chunk_tokens: tokens per chunk of namespaces that do not say it."""
        self.generation = 0  # removals that have begun
        self.withdrawals = 0  # the number of times that chunks were hidden from requests that had found them
        self._records = records
        self.writers = Writers(records)
        self._chunk_tokens = chunk_tokens
        self.emptied: dict[Namespace, None] = {}  # namespaces that have lost their last chunk since `drop_emptied`
        self.known: dict[tuple[str, str, int], list[Namespace]] = {}  # the first groups, by tenant, model and ranks
        self._numbers = itertools.count(1)

    def all(self) -> list[Namespace]:
        """Every namespace, grouped by model, in the order of creation."""
        return [each for firsts in self.known.values() for first in firsts for each in first.groups]

    def find_groups(
        self, model: str, world_size: int, rank: int, groups: Sequence[Group], tenant: str = "", chunk_tokens: int = 0
    ) -> list[Namespace]:
        """The namespaces of a model's KV cache groups, as one rank describes them; creates them unless everything known
        agrees.

        Sizes are compared too, because the client could send a wrong fingerprint, and the size is what is copied.
        """
        chunk_tokens = chunk_tokens or self._chunk_tokens
        known = self.known.setdefault((tenant, model, world_size), [])
        for first in reversed(known):
            if _agree(first.groups, rank, groups, chunk_tokens):
                found = first.groups
                break
        else:
            found = [
                Namespace(
                    next(self._numbers), tenant, model, world_size, each.blocks_in_chunk, chunk_tokens, each.reach
                )
                for each in groups
            ]
            join_groups(found)
            known.append(found[0])
        for namespace, each in zip(found, groups, strict=True):
            namespace.layouts.setdefault(rank, each.fingerprint)
            if each.size:
                namespace.sizes[rank] = each.size
        return found

    def drop_emptied(self) -> None:
        """Forget namespaces that have lost their last chunk; not during a decision, which may be about them."""
        while self.emptied:
            self.forget(self.emptied.popitem()[0])

    def forget(self, namespace: Namespace) -> None:
        """Drop a namespace, with its model's other groups, if none of them has chunks or a registered instance."""
        if namespace.chunks or namespace.live or namespace.is_quarantined:
            return
        groups = namespace.groups
        if len(groups) > 1 and any(each.chunks or each.live for each in groups):
            return
        firsts = self.known.get((namespace.tenant, namespace.model, namespace.world_size), [])
        if groups[0] in firsts:
            firsts.remove(groups[0])
            if not firsts:
                del self.known[namespace.tenant, namespace.model, namespace.world_size]
            for each in groups:
                each.gone = True
                self._records.erase(each.slot)
                each.slot, each.recorded = None, 0

    def quarantine(self, namespace: Namespace) -> None:
        """Let no lookup find a namespace's chunks any more. The quarantine survives a restart, as the chunks do."""
        namespace.is_quarantined = True
        self.withdrawals += 1
        if namespace.recorded:
            self._record(namespace)

    def release(self, namespace: Namespace) -> None:
        namespace.is_quarantined = False
        if namespace.recorded:
            self._record(namespace)
        self.forget(namespace)

    def begin_removal(
        self, namespaces: Iterable[Namespace], salt: bytes | None, hides: bool, writer: str = ""
    ) -> Scope:
        """Begin to remove the existing chunks of these namespaces, this salt (None: any) and this writer (empty: any).
        hides: hide them now."""
        self.generation += 1
        self.withdrawals += 1
        scope = Scope(self.generation, dict.fromkeys(namespaces), salt, hides, writer)
        for namespace in scope.namespaces if hides else ():
            namespace.hiding.append(scope)
        return scope

    def end_removal(self, scope: Scope) -> None:
        """End a removal: all its chunks are gone or pending removal."""
        for namespace in scope.namespaces:
            if scope.hides:
                namespace.hiding.remove(scope)
            self.forget(namespace)

    def record(self, chunk: Chunk, rank: int, serial: int) -> None:
        """Record a sealed shard in place of its earlier record. Its namespace and its writer are recorded first if
        necessary; without room for these records, the shard is not recorded."""
        namespace, shard, before = chunk.namespace, chunk.shards[rank], chunk.parent
        self.erase(shard)
        if namespace.recorded < len(namespace.layouts):
            self._record(namespace)
        writer = self.writers.add_shard(shard.writer) if namespace.recorded == len(namespace.layouts) else None
        if writer is not None:
            shard.slot = self._records.write(
                ShardRecord(
                    namespace.number, rank, chunk.key, b"" if before is None else before.key, chunk.position,
                    shard.extents, shard.size, serial, shard.checksum, chunk.salt, chunk.born, writer,
                )
            )  # fmt: skip
            if shard.slot is None:
                self.writers.drop_shard(shard.writer)

    def erase(self, shard: Shard) -> None:
        if shard.slot is not None:
            self._records.erase(shard.slot)
            shard.slot = None
            self.writers.drop_shard(shard.writer)

    def _record(self, namespace: Namespace) -> None:
        """Replace a namespace's record: the new one is written before the old one is erased; without room, the old one
        stays."""
        slot = self._records.write(
            NamespaceRecord(
                namespace.number,
                namespace.tenant,
                namespace.model,
                namespace.world_size,
                namespace.blocks_in_chunk,
                namespace.layouts,
                namespace.chunk_tokens,
                namespace.group,
                namespace.groups[0].number,
                [(each.reach, each.blocks_in_chunk) for each in namespace.groups],
                namespace.is_quarantined,
            )
        )
        if slot is not None:
            self._records.erase(namespace.slot)
            namespace.slot, namespace.recorded = slot, len(namespace.layouts)

    def adopt(self, namespaces: list[Namespace]) -> None:
        """Add the namespaces that recovery.py has read, all groups of each model. There must be none yet."""
        assert not self.known
        self._numbers = itertools.count(max((namespace.number for namespace in namespaces), default=0) + 1)
        for each in namespaces:
            each.chunk_tokens = each.chunk_tokens or self._chunk_tokens
            if each.groups[0] is each:
                self.known.setdefault((each.tenant, each.model, each.world_size), []).append(each)


def _agree(known: list[Namespace], rank: int, groups: Sequence[Group], chunk_tokens: int) -> bool:
    """Whether everything known about a model's namespaces agrees with what one rank says about its groups."""
    if len(known) != len(groups) or known[0].chunk_tokens != chunk_tokens:
        return False
    return all(
        (namespace.reach, namespace.blocks_in_chunk) == (each.reach, each.blocks_in_chunk)
        and namespace.layouts.get(rank, each.fingerprint) == each.fingerprint
        and (not each.size or namespace.sizes.get(rank, each.size) == each.size)
        for namespace, each in zip(known, groups, strict=True)
    )
