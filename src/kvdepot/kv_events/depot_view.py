"""Events under the depot's own topic: every chunk in memory, by kvdepot's keys, without tokens.

Used by publisher.py, on its thread. Keys are kvdepot's own, not hashes of vLLM's blocks. A router computes them from a
prompt's tokens, with `ChunkChain(chunk_size, derive_root())` (protocol/keys.py; for what else enters a root or a key,
see `root` and `extras` in integrations/vllm/identity.py).

Events are maps with their `type`, as in vLLM from 0.32 on (vllm/distributed/kv_events.py). A `BlockStored` names
consecutive chunks by their keys; its `token_ids` are empty. A parent of None is a prompt's start, or unknown.
`ownership` is the namespace: the model as `kvdepot status` lists it, prefixed with `TENANT/` if it belongs to a tenant;
chunks with the same key in two namespaces are different.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from kvdepot.core.index.chunk import Namespace
from kvdepot.kv_events.feed import Change

__all__ = ["BATCH", "TOPIC", "AllBlocksCleared", "BlockRemoved", "BlockStored", "DepotView", "Event"]

TOPIC = b"kvdepot"
MEDIUM = "CPU"
BATCH = 512
"""Maximum number of chunks in one message."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks were stored, each behind the one before it. The fields are vLLM's."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks were removed."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """All chunks were removed."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class DepotView:
    """What a subscriber that has read every message believes to exist: parents by key, by namespace."""

    def __init__(self) -> None:
        self.chunks: dict[Namespace, dict[bytes, bytes | None]] = {}
        self.count = 0

    def __repr__(self) -> str:
        return f"<DepotView of {self.count} chunks>"

    @property
    def batch(self) -> int:
        """The most changes that `apply` may be given."""
        return BATCH

    @property
    def beat_topic(self) -> bytes:
        """Where a message without events goes."""
        return TOPIC

    def apply(self, changes: list[Change]) -> list[tuple[list[bytes], list[Event]]]:
        """Apply changes; returns the messages that report them: topics and events."""
        events: list[Event] = []
        removed = False
        for change in changes:
            if change is None:
                self.chunks.clear()
                self.count = 0
                events = [AllBlocksCleared()]
                continue
            assert isinstance(change, tuple), "the depot's topic needs neither descriptions nor other topics"
            is_there, namespace, key, parent = change
            keys = self.chunks.get(namespace)
            if is_there == (keys is not None and key in keys):
                continue
            if is_there:
                self.chunks.setdefault(namespace, {})[key] = parent or None
                self.count += 1
                _add_stored(events, namespace, key, parent or None)
            else:
                assert keys is not None
                del keys[key]
                self.count -= 1
                removed = True
                if not keys:
                    del self.chunks[namespace]
                _add_removed(events, namespace, key)
        # If this removed the last chunk, one event is enough.
        events = [AllBlocksCleared()] if removed and not self.count else events
        return [([TOPIC], events)] if events else []

    def listing(self) -> Iterator[tuple[bytes, list[Event]]]:
        """Messages that list everything as of now; `messages` of them."""
        known = [(namespace, key, parent) for namespace, keys in self.chunks.items() for key, parent in keys.items()]

        def batches() -> Iterator[tuple[bytes, list[Event]]]:
            for first in range(0, max(1, len(known)), BATCH):
                events: list[Event] = [] if first else [AllBlocksCleared()]
                for namespace, key, parent in known[first : first + BATCH]:
                    _add_stored(events, namespace, key, parent)
                yield TOPIC, events

        return batches()

    @property
    def messages(self) -> int:
        """The number of messages in a listing."""
        return max(1, -(-self.count // BATCH))

    def end(self) -> list[tuple[list[bytes], list[Event]]]:
        """Messages that take everything back."""
        return [([TOPIC], [AllBlocksCleared()])]


def _add_stored(events: list[Event], namespace: Namespace, key: bytes, parent: bytes | None) -> None:
    last = events[-1] if events else None
    owner, group = _owner(namespace), _group(namespace)
    is_same = isinstance(last, BlockStored) and (last.ownership, last.group_idx) == (owner, group)
    if isinstance(last, BlockStored) and is_same and parent == last.block_hashes[-1]:
        last.block_hashes.append(key)
    else:
        tokens = namespace.chunk_tokens
        events.append(BlockStored([key], parent, [], tokens, None, MEDIUM, None, "LOCAL", owner, group))


def _add_removed(events: list[Event], namespace: Namespace, key: bytes) -> None:
    last = events[-1] if events else None
    owner, group = _owner(namespace), _group(namespace)
    if isinstance(last, BlockRemoved) and (last.ownership, last.group_idx) == (owner, group):
        last.block_hashes.append(key)
    else:
        events.append(BlockRemoved([key], MEDIUM, "LOCAL", owner, group))


def _owner(namespace: Namespace) -> str:
    return f"{namespace.tenant}/{namespace.model}" if namespace.tenant else namespace.model


def _group(namespace: Namespace) -> int | None:
    """The KV cache group, for models that have several."""
    return namespace.group if len(namespace.groups) > 1 else None
