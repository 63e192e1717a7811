"""Checks limits before a server starts: libraries that hit one give poor error messages, and the kernel gives none."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
from collections.abc import Iterator

from kvdepot.cli.output import size
from kvdepot.config import Config
from kvdepot.errors import ConfigError
from kvdepot.memory.room import allocated, limits
from kvdepot.memory.shm import SHM

log = logging.getLogger(__name__)

_LEAST_FILES = 64
"""Open files that a server needs to start, plus some for its first clients."""
_OWN_BYTES = 448 << 20
"""Minimum address space that a server needs besides its arena."""
_SMALL_ARENA = 1 << 30
"""A default arena below this is worth a warning."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def check_limits(arena_bytes: int) -> None:
    """Raise ConfigError if this process's limits are too low for any server."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the server raises its own limit up to this
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        raise ConfigError(f"{files} open files are allowed, and a server needs {_LEAST_FILES}: raise `ulimit -n`")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < arena_bytes + _OWN_BYTES:
        raise ConfigError(
            f"{space >> 20} MiB of address space are allowed, and a server with an arena of {arena_bytes >> 20} MiB "
            f"needs {(arena_bytes + _OWN_BYTES) >> 20} MiB: raise `ulimit -v` or lower --arena-gib"
        )


def check_memory(config: Config) -> None:
    """Warn of an arena that does not suit the memory here.

    Raises ConfigError if it exceeds a hard limit: filling it would end this process, or an engine that shares the
    limit. The arena itself compares its size with /dev/shm.
    """
    arena, found = config.arena_bytes, limits()
    for limit in found:
        if arena > limit.most and limit.is_hard and limit.what != str(SHM):
            raise ConfigError(
                f"an arena of {size(arena)} exceeds the {size(limit.most)} that {limit.what} allows: lower "
                f"--arena-gib, or {limit.advice}"
            )
    if not found:
        return
    tightest = found[0]
    free = tightest.free + allocated(config.arena)
    if not config.arena_gib and arena < _SMALL_ARENA:
        log.warning(
            "the arena has %s only, a quarter of the %s that %s has free: set --arena-gib, or %s",
            size(arena), size(free), tightest.what, tightest.advice,
        )  # fmt: skip
    elif config.arena_gib and arena > free:
        log.warning(
            "the arena may grow to %s, and %s has %s free: the kernel may kill this server then. Lower --arena-gib, or "
            "%s", size(arena), tightest.what, size(free), tightest.advice,
        )  # fmt: skip


@contextlib.contextmanager
def explain_limits() -> Iterator[None]:
    """Raise ConfigError if the body runs into a limit of this process or of the machine."""
    try:
        yield
    except MemoryError as exc:
        raise ConfigError("the server cannot start: no memory; lower --arena-gib, or raise `ulimit -v`") from exc
    except OSError as exc:
        if exc.errno not in _SHORT:
            raise
        raise ConfigError(
            f"the server cannot start: {exc.strerror}; raise the limits of this process, which `ulimit -a` shows"
        ) from exc
