"""Opens standard input, output and error if the process was started without them (`kvdepot serve <&- >&- 2>&-`).

The command and the web process call this before they open any file. Otherwise the next file, perhaps the arena, would
get the missing number, and libraries would print into it.
"""

from __future__ import annotations

import os
import sys

__all__ = ["reserve"]


def reserve() -> None:
    """Open /dev/null as each closed descriptor from 0 to 2, for this process and its children."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            assert fd == number, f"descriptor {number} is closed, but open returned {fd}"
            os.set_inheritable(fd, True)
    # Python sets these to None if the descriptor was closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
