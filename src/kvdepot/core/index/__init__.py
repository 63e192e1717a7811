"""The index of chunks, and how a new server has it back from the records."""

from kvdepot.core.index.index import Chunk, Index, Namespace, Pin, Shard

__all__ = ["Chunk", "Index", "Namespace", "Pin", "Shard"]
