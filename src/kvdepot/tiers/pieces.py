"""Copies bytes from one sequence of buffers into another.

Called on the tier's threads. Invariant: numpy copies, which releases the GIL; the deciding thread needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["fill"]


def fill(buffers: Sequence[memoryview], parts: Iterable[bytes | memoryview]) -> int:
    """Copy `parts` one after the other into `buffers`, as far as they suffice; bytes of all parts."""
    total = 0
    rest = iter(buffers)
    room = np.empty(0, np.uint8)
    full = False
    for part in parts:
        total += len(part)
        data = np.frombuffer(part, np.uint8) if len(part) else room[:0]
        while len(data) and not full:
            if not len(room):
                buffer = next(rest, None)
                full = buffer is None
                if buffer is not None:
                    room = np.frombuffer(buffer, np.uint8) if len(buffer) else room
                continue
            count = min(len(room), len(data))
            room[:count] = data[:count]
            room, data = room[count:], data[count:]
    return total
