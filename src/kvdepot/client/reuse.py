"""The result of a request or a call, as it is told to whoever made it: the tokens that the depot had.

Used by the library, the transformers integration and vLLM's connector. Invariant: `loaded + compared <= found`, unless
loads have failed.
"""

from __future__ import annotations

import msgspec


class Reuse(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request that the depot had, and what became of them.

    found: tokens that the depot had, beyond those of the engine's own cache. loaded: tokens of these that were loaded.
    compared: tokens of these that were computed, to compare them with what is stored. saved_s: seconds that computing
    the loaded tokens would have taken at the measured speed of prefill; 0.0 while that speed is unknown.
    """

    found: int = 0
    loaded: int = 0
    compared: int = 0
    saved_s: float = 0.0

    def __add__(self, other: Reuse) -> Reuse:
        return Reuse(
            self.found + other.found, self.loaded + other.loaded, self.compared + other.compared,
            self.saved_s + other.saved_s,
        )  # fmt: skip


NOTHING_REUSED = Reuse()
