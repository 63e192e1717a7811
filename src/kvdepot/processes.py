"""Command lines that start Python code of ours, and what such a process does first.

Python puts the working directory first on the import path for `-m` and `-c`, so a file `click.py` in the folder where
somebody types `kvdepot serve` would run. `-P` prevents that, from Python 3.11 on; for 3.10 the code itself drops the
entry. Not `-I`, which also ignores PYTHONPATH and packages of the user's.
"""

from __future__ import annotations

import io
import os
import sys

_TUNED = "KVDEPOT_COPY_TUNED"
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""glibc's memcpy with non-temporal stores from 32 KiB on (see docs/decisions.md, "Copies bypass the CPU cache")."""
_HAS_SAFE_PATH = sys.version_info >= (3, 11)
_DROP = "import sys; del sys.path[0]\n"
_AS_MAIN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_command(name: str, *arguments: str) -> list[str]:
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", name, *arguments]
    return code_command(_AS_MAIN, name, *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """The command line that runs this code as `python -c` does; `sys.argv[1:]` is `arguments`."""
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-c", code, *arguments]
    return [sys.executable, "-c", f"{_DROP}{code}", *arguments]


def prepare_standard_files() -> None:
    """Open /dev/null as each closed descriptor from 0 to 2, and let no text fail to be written.

    Call this before any file is opened: the next one, perhaps the arena, would get the missing number, and libraries
    would print into it. Children inherit the descriptors. Letters that the locale's encoding lacks are written as `?`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            assert fd == number, f"descriptor {number} is closed, but open returned {fd}"
            os.set_inheritable(fd, True)
    # Python sets these to None if the descriptor was closed.
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else a caller has replaced it
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def start_over_tuned() -> None:
    """Re-execute this process with glibc's tunables, unless that was done already or this is not glibc on x86-64.

    glibc reads them only when a process starts. Call this before anything slow is imported, which would be done twice.
    """
    if os.environ.pop(_TUNED, None) or os.uname().machine != "x86_64":
        return
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("gl"):
        return
    ours = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{_TUNABLES}:{ours}" if ours else _TUNABLES
    environ = {**os.environ, "GLIBC_TUNABLES": tunables, _TUNED: "1"}
    os.execve(sys.executable, [*sys.orig_argv], environ)
