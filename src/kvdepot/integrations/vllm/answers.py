"""Whether an engine stores what its requests decode: learned from whether later prompts continue with it.

Used by scheduler.py. A chat's next turn repeats the previous answer, if the template repeats it unchanged; answers of
one-off requests, and answers whose reasoning the template drops, never come back. So the hashes of decoded chunks are
remembered, without their bytes, whether they are stored or not; a prompt that contains one is a **continuation**. With
`kvdepot.save_decode = auto`, an engine stores decoded chunks at first, and goes on while at least one in twenty comes
back: a store costs a few percent of the time of computing the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
from vllm.logger import init_logger

__all__ = ["Answers"]

log = init_logger(__name__)

_TRIAL = 32
"""Requests with decoded chunks that end before the first decision: the first turns of some chats."""
_LEAST, _AGAIN = 0.05, 0.1
"""Below the first share of chunks that come back, decoded chunks are not stored any more; above the second, again."""
_FADE = 0.98
"""The weight of the past at each request that ends: about the last 50 count."""
_MOST = 1 << 17
"""Hashes that are remembered, oldest forgotten first: some 12 MB."""


class Answers:
    """The decoded chunks of one engine's requests."""

    def __init__(self, mode: str, count: Callable[[str, int], None]) -> None:
        """mode: auto, on or off. count: adds to a counter of the engine's metrics."""
        self._mode = mode
        self._count = count
        self._remembered: dict[int, None] = {}  # the first 8 bytes of hashes
        self._decoded = self._continued = 0.0  # chunks, faded
        self._ended = 0  # requests
        self.are_stored = mode != "off"

    def __repr__(self) -> str:
        return f"<Answers {self._mode}, {self.share:.2f} of {len(self._remembered)} chunks came back>"

    @property
    def share(self) -> float:
        """The share of decoded chunks that came back lately."""
        return self._continued / self._decoded if self._decoded else 0.0

    def prompt_came(self, hashes: bytes) -> None:
        """Look for decoded chunks in a new prompt's chunks (32 bytes each)."""
        if not self._remembered:
            return
        found = self._remembered.keys() & np.frombuffer(hashes, "<u8")[::4].tolist()
        for each in found:
            del self._remembered[each]
        if found:
            self._continued += len(found)
            self._count("continued_chunks", len(found))
            self._decide()

    def request_ended(self, hashes: bytes) -> None:
        """Remember the hashes of the chunks that a request decoded, at least in part."""
        chunks = np.frombuffer(hashes, "<u8")[::4].tolist()
        if not chunks:
            return
        self._ended += 1
        self._decoded = self._decoded * _FADE + len(chunks)
        self._continued *= _FADE
        self._count("decoded_chunks", len(chunks))
        self._remembered |= dict.fromkeys(chunks)
        excess = len(self._remembered) - _MOST
        for each in list(islice(self._remembered, max(0, excess))):
            del self._remembered[each]
        self._decide()

    def _decide(self) -> None:
        if self._mode != "auto" or self._ended < _TRIAL:
            return
        stores = self.share >= (_LEAST if self.are_stored else _AGAIN)
        if stores != self.are_stored:
            self.are_stored = stores
            log.info(
                "kvdepot: decoded chunks are %s from now on: later prompts continued with %.0f %% of those of the "
                "last requests (kvdepot.save_decode = auto)", "stored" if stores else "not stored", 100 * self.share,
            )  # fmt: skip
