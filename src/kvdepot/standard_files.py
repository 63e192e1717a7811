"""Standard input, output and error of a process that was started without them (`kvdepot serve <&- >&- 2>&-`).

Called first of all by the command and the web process, before anything opens a file: the next file would get the
number of the missing one, and what libraries print would be written into it, the arena perhaps.
"""

from __future__ import annotations

import os
import sys

__all__ = ["reserve"]


def reserve() -> None:
    """Give each of descriptors 0 to 2 that is closed to /dev/null, for this process and those that it starts."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            assert fd == number, f"descriptor {number} is closed, and {fd} was given"
            os.set_inheritable(fd, True)
    # Python has none of these where the descriptor was closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
