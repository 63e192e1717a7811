"""Whether an engine stores what its requests decode: learned from whether later prompts continue with it.

Used by scheduler.py. A chat's next turn repeats the previous answer, if the template repeats it unchanged; answers of
one-off requests, and answers whose reasoning the template drops, never come back. So the hash of each answer's first
chunk is remembered, whether its bytes are stored or not; a prompt that contains it is a **continuation**. With
`kvdepot.save_decode = auto`, an engine stores decoded chunks at first, and goes on while at least one in twenty comes
back: a store costs a few percent of the time of computing the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from vllm.logger import init_logger

from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import AnswersStatus

log = init_logger(__name__)

_TRIAL = 32
"""Requests that are judged before the first decision."""
_PROMPTS = 64
"""An answer is judged once this many prompts have come after it, or, if more answers than this waited to be judged, as
many prompts as answers: many chats may begin at once."""
_LEAST, _AGAIN = 0.05, 0.1
"""Below the first share of chunks that come back, decoded chunks are not stored any more; above the second, again."""
_FADE = 0.98
"""The factor for earlier requests at each one that is judged: about the last 50 count."""
_MOST = 1 << 17
"""Answers that are remembered, oldest forgotten first: some 20 MB."""


class Answers:
    """The answers of one engine, and whether later prompts continued with them."""

    def __init__(self, mode: str, add: Callable[[str, int], None], schedulers: int = 1) -> None:
        """mode: auto, on or off. add: adds to a counter of the engine's metrics. schedulers: number of schedulers that
        share the engine's requests (data parallelism), each of which sees only its share of the prompts that
        continue."""
        self._mode = mode
        self.are_stored = mode != "off"
        self.learns = mode == "auto"
        self._add = add
        self._schedulers = schedulers
        self._remembered: dict[int, int] = {}  # chunks of an answer, by the first 8 bytes of its first chunk's hash
        self._waiting: deque[tuple[int, int]] = deque()  # to judge: the number of prompts when due, and chunks
        self._prompts = self._judged = 0
        self._decoded = self._continued = 0.0  # chunks, faded

    def __repr__(self) -> str:
        return f"<Answers {self.share:.2f} of {len(self._remembered)} came back>"

    @property
    def share(self) -> float:
        return self._continued / self._decoded if self._decoded else 0.0

    @property
    def status(self) -> AnswersStatus:
        return AnswersStatus(self._mode, self.are_stored, self.share if self._judged >= _TRIAL else None)

    def prompt_came(self, hashes: bytes) -> None:
        """Look for the starts of answers in a new prompt's chunks (32 bytes each)."""
        if not self._remembered:
            return
        self._prompts += 1
        for key in self._remembered.keys() & np.frombuffer(hashes, "<u8")[::4].tolist():
            chunks = self._remembered.pop(key)
            self._continued += chunks
            self._add("continued_chunks", chunks)
        while self._waiting and self._waiting[0][0] <= self._prompts:
            self._judge(self._waiting.popleft()[1])
        self._decide()

    def request_ended(self, hashes: bytes) -> None:
        """Remember an answer by the hashes of the chunks that have some of it."""
        chunks = len(hashes) // HASH_BYTES
        if not (self.learns and chunks):
            return
        key = int.from_bytes(hashes[:8], "little")
        self._add("decoded_chunks", chunks)
        self._remembered[key] = chunks
        self._waiting.append((self._prompts + max(_PROMPTS, len(self._waiting)), chunks))
        while len(self._remembered) > _MOST:
            del self._remembered[next(iter(self._remembered))]
        while len(self._waiting) > _MOST:
            self._judge(self._waiting.popleft()[1])

    def _judge(self, chunks: int) -> None:
        """Count an answer's chunks: if no prompt has continued with it by now, probably none will."""
        self._judged += 1
        self._decoded = self._decoded * _FADE + chunks
        self._continued *= _FADE

    def _decide(self) -> None:
        if self._judged < _TRIAL:
            return
        stores = self.share * self._schedulers >= (_LEAST if self.are_stored else _AGAIN)
        if stores != self.are_stored:
            self.are_stored = stores
            log.info(
                "kvdepot: decoded chunks are %s from now on: later prompts continued with %.0f %% of those of the "
                "last requests (kvdepot.save_decode = auto)", "stored" if stores else "not stored", 100 * self.share,
            )  # fmt: skip
