"""Tunes glibc's memcpy for `kvdepot serve`, by settings that glibc reads only when a process starts.

Called before anything slow is imported, because the process is re-executed and would import it twice.
"""

from __future__ import annotations

import os
import sys

_TUNED = "KVDEPOT_COPY_TUNED"
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""glibc's memcpy with non-temporal stores from 32 KiB on (see docs/decisions.md, "Copies bypass the CPU cache")."""


def start_over_tuned() -> None:
    """Re-execute this process with glibc's tunables, unless that was done already or this is not glibc on x86-64."""
    if os.environ.pop(_TUNED, None) or os.uname().machine != "x86_64":
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("gl"):
        return
    ours = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{_TUNABLES}:{ours}" if ours else _TUNABLES
    environ = {**os.environ, "GLIBC_TUNABLES": tunables, _TUNED: "1"}
    os.execve(sys.executable, [*sys.orig_argv], environ)
