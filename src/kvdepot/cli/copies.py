"""How `kvdepot serve` has the C library copy: settings that it reads only when a process starts.

Called first of all, before anything that takes time is imported: that would be imported twice.
"""

from __future__ import annotations

import os
import sys

__all__ = ["start_over_tuned"]

_TUNED = "KVDEPOT_COPY_TUNED"
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""glibc's memcpy with non-temporal stores from 32 KiB on (see docs/decisions/0011-copies-past-the-cache.md)."""


def start_over_tuned() -> None:
    """Start this process over with the C library's copies tuned, unless it has been or the library is another."""
    if os.environ.pop(_TUNED, None) or os.uname().machine != "x86_64":
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("gl"):
        return
    ours = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{_TUNABLES}:{ours}" if ours else _TUNABLES
    environ = {**os.environ, "GLIBC_TUNABLES": tunables, _TUNED: "1"}
    os.execve(sys.executable, [*sys.orig_argv], environ)
