"""The index of chunks, and its recovery from the records of an earlier server."""

from kvdepot.core.index.chunk import Chunk, Namespace, Pin, Shard
from kvdepot.core.index.index import Index

__all__ = ["Chunk", "Index", "Namespace", "Pin", "Shard"]
