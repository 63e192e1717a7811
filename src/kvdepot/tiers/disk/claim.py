"""The lock on a disk tier's directory, and the calls that may use the directory while it is held. Any thread."""

# ruff: noqa: PTH116

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvdepot import locks
from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers.disk.files import make_parents
from kvdepot.tiers.disk.layout import LOCK
from kvdepot.tiers.disk.permissions import make_private
from kvdepot.tiers.tally import Tally

__all__ = ["Claim"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Claim:
    """One locked directory. Once it has ended, because the directory is gone or was closed, it stays so."""

    def __init__(self, path: Path, tally: Tally) -> None:
        """Raises TierError if the directory is not accessible, ConfigError if it is in use or another user's."""
        self.root = str(path)
        self.ended: str | None = None
        """Why calls are refused; None while they are not."""
        self.tally = tally
        self._idle = threading.Condition()
        self._calls = 0
        self._fd: int | None = None
        try:
            make_private(path)
            self.block_bytes = os.statvfs(path).f_frsize
            self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            is_free = locks.lock(self._fd)
        except OSError as exc:
            self.release()
            raise TierError(f"{path} cannot be used: {exc.strerror}") from exc
        if not is_free:
            self.release()
            raise ConfigError(f"{path} is in use by another kvdepot server")

    def is_here(self) -> bool:
        """Whether the root is still the directory that was locked."""
        try:
            there = os.stat(f"{self.root}/{LOCK}", follow_symlinks=False)
            return self._fd is not None and os.path.samestat(there, os.fstat(self._fd))
        except OSError:
            return False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that uses the directory: it stays locked meanwhile. Raises TierError if the claim has ended."""
        with self._idle:
            self.check()
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def check(self) -> None:
        """Raises TierError if the claim has ended."""
        if self.ended is not None:
            raise TierError(f"{self.root}: {self.ended}")

    def check_here(self) -> None:
        """Look whether the directory is there. If not, ends the claim and raises TierError."""
        if not self.is_here():
            self.end("the directory is gone")
            self.check()

    def failed(self, what: str, exc: OSError) -> None:
        """Count and log a failed system call. Raises TierError if the directory is gone."""
        self.tally("errors")
        log.info("%s: %s: %s", self.root, what, exc.strerror)
        self.check_here()

    def with_parents(self, path: str, act: Callable[[], _T]) -> _T:
        """Do what creates `path`, making its parent directories as often as others remove them. Raises OSError."""
        for _ in range(16):
            try:
                return act()
            except FileNotFoundError:
                if not self.is_here():
                    raise
            make_parents(self.root, path)
        return act()

    # -- the end

    def end(self, reason: str) -> None:
        """Refuse calls from now on. The first reason stays."""
        with self._idle:
            if self.ended is None:
                self.ended = reason

    def drain(self, timeout_s: float) -> None:
        """Wait for the calls in progress. Raises TierError if one hangs for so long."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._calls == 0, timeout_s):
                raise TierError(f"{self.root}: {self._calls} calls hang")

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
