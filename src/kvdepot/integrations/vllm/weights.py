"""The weights that name an engine's KV: those on disk, a version that its trainer has set, or private weights.

Used by scheduler.py and lora.py. vLLM asks trainers for a version of new weights (`update_weight_version`,
`finish_weight_update`), and each engine core keeps it. With `kvdepot.weights_run`, the version names the KV that the
core computes, so engines of one run and version share. Invariant: no KV is named by a version unless the engine's
caches were reset and the version was set, in either order, since the last step that computed anything; a second reset
after that begins another update. So a version that was forgotten, is used twice, or is set while requests run, costs
sharing, never a wrong byte.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from types import FrameType

from vllm.logger import init_logger

log = init_logger(__name__)


def find_version() -> Callable[[], str]:
    """The method of the engine core that returns the version of its weights.

    vLLM hands no connector its core, but makes connectors in the core's constructor, so it is among the callers then.
    """
    from vllm.v1.engine.core import EngineCore  # which imports connectors

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCore):
            version: Callable[[], str] = core.get_weight_version
            return version
        frame = frame.f_back
    log.warning("kvdepot.weights_run has no effect: the engine core, which knows the weights' version, was not found")
    return str  # always the same empty version


class NamedWeights:
    """The weights of one engine, and the name of the KV that they compute now."""

    def __init__(self, run: str, version: Callable[[], str]) -> None:
        """run: `kvdepot.weights_run`; empty: versions name nothing. version: returns vLLM's version of the weights."""
        self.run = run
        self.parts: tuple[tuple[str, str], ...] = ()
        """Parts of the roots of requests' chunks; none: the weights on disk."""
        self._version = version
        self._seen = self._computed = version()  # the version now, and when a step last computed
        self._is_reset = False  # whether the caches were reset since that step
        self._is_apart = False  # whether the KV is private until a restart
        self.is_mixed = False
        """Whether the version has changed without a reset, so that KV of both may have one name; cleared by a reset of
        the depot's chunks."""

    def reset(self) -> None:
        """Note that the caches were reset: weights may have changed, or are going to."""
        if self._is_reset and (version := self._version()) != self._computed:
            self._computed = version  # no step has used the version, and the next update may have begun without one
        self._is_reset = True
        self._begin()

    def part(self) -> None:
        """Give the KV a private name from here on: it differs from the KV of other engines with the same name."""
        self._is_apart = True
        self._become_private()

    def follow(self) -> bool:
        """Follow vLLM's version; returns whether it has changed, so that requests under way have another's name."""
        if not self.run or self._version() == self._seen:
            return False
        self.is_mixed |= not self._is_reset
        self._begin()
        return True

    def step(self) -> None:
        """Note that a step computes, with the weights of now."""
        self._computed, self._is_reset = self._seen, False

    def _begin(self) -> None:
        self._seen = self._version()
        if self.run and self._is_reset and self._seen != self._computed and not self._is_apart:
            self.parts = ("weights run", self.run), ("weights version", self._seen)
            log.info("kvdepot: sharing KV with engines at weight version %r of run %r", self._seen, self.run)
            return
        self._become_private()
        until = "vLLM has a new weight version and its caches are reset" if self.run else "it is restarted"
        until = "it is restarted" if self._is_apart else until
        log.info("kvdepot: the weights may have changed: this engine shares KV with no other engine until %s", until)

    def _become_private(self) -> None:
        self.parts = (("epoch", secrets.token_hex(16)),)
