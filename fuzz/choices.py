"""Turns bytes into decisions, so any source of bytes (a coverage-guided fuzzer, Hypothesis, a file) makes a story."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Choices", "Script"]

T = TypeVar("T")


class Choices:
    """Takes decisions from the front of `data`; once it is used up, every decision is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, end: int) -> int:
        """A number in `[0, end)`, from the bytes that it needs."""
        size = max(1, ((end - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(size), "little") % end

    def of(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def take(self, size: int) -> bytes:
        """Up to `size` bytes, unchanged."""
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def text(self, most: int) -> bytes:
        """Up to `most` bytes, preceded by their number."""
        return self.take(self.below(most + 1))


class Script:
    """Writes bytes that `Choices` reads, for seeds."""

    def __init__(self) -> None:
        self.data = b""

    def below(self, value: int, end: int) -> Script:
        self.data += value.to_bytes(max(1, ((end - 1).bit_length() + 7) // 8), "little")
        return self

    def text(self, value: bytes, most: int) -> Script:
        self.below(len(value), most + 1)
        self.data += value
        return self
