"""The longest prefix of a prompt that memory has, for lookups and leases. Pure; used on the deciding thread."""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.core.index.chunk import Namespace, Pin
from kvdepot.core.index.index import Index
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["Match", "match"]


class Match(NamedTuple):
    """namespaces: of the model, the first group of each. pins: the prefix in each. chunks: how many all have."""

    namespaces: list[Namespace]
    pins: list[Pin]
    chunks: int


def match(index: Index, tenant: str, request: wire.Lookup | wire.Lease, hashes: bytes) -> Match:
    """The longest prefix of `hashes` (32 bytes per chunk) that all of the model's namespaces have. Holds nothing."""
    namespaces = index.namespaces.for_lookup(
        request.model, request.world_size, request.blocks_in_chunk, tenant, request.chunk_tokens
    )
    pins = [index.match(namespace, hashes) for namespace in namespaces]
    matched = min((pin.matched for pin in pins), default=0)
    while any(pin.matched != matched for pin in pins):
        # Engines with one model name but different layouts: only what every namespace has is certainly a hit.
        pins = [index.match(namespace, hashes[: matched * HASH_BYTES]) for namespace in namespaces]
        matched = min(pin.matched for pin in pins)
    return Match(namespaces, pins, matched)
