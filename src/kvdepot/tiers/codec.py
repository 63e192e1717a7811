"""What happens to a shard's bytes between arena and tier: nothing yet."""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.tiers import Options
from kvdepot.tiers.format import Facts, Header

__all__ = ["SLACK", "Codec", "make_codec"]

SLACK = 64
"""By so many bytes an object may be longer than its header and its KV."""


class Codec:
    slack = 0

    def encode(self, header: Header, facts: Facts, parts: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
        """The object: its header, and what follows."""
        return [header.pack(facts), *parts]

    def decode(self, header: Header, stored: memoryview, out: Sequence[memoryview]) -> bool:
        """Undo `encode`; False where the bytes are not what the header says, or this codec cannot."""
        return False


def make_codec(options: Options) -> Codec:
    return Codec()
