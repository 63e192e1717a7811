"""Re-exports protocol/keys.py."""

from kvdepot.protocol.keys import (
    HASH_BYTES,
    ROOT,
    ChunkChain,
    derive_root,
    engine_hash,
    salt_tag,
)

__all__ = [
    "HASH_BYTES",
    "ROOT",
    "ChunkChain",
    "derive_root",
    "engine_hash",
    "salt_tag",
]
