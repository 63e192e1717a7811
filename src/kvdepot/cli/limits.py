"""Checks the process's limits before a server starts, because libraries that hit one give poor error messages."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from kvdepot.errors import ConfigError

__all__ = ["check_limits", "explain_limits"]

_LEAST_FILES = 64
"""Open files that a server needs to start, plus some for its first clients."""
_OWN_BYTES = 448 << 20
"""Minimum address space that a server needs besides its arena."""
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
