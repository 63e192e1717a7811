"""The index of chunks, and how a new server has it back from the records."""

from kvdepot.core.index.chunk import Chunk, Namespace, Pin, Shard
from kvdepot.core.index.index import Index

__all__ = ["Chunk", "Index", "Namespace", "Pin", "Shard"]
